"""Where site work runs. The round loop knows only `Engine.exchange`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from polyclinic.core import Failure, SiteId
from polyclinic.storage.messages import Message
from polyclinic.storage.signatures import PeerKeys

Answer: TypeAlias = bytes | Message | Failure
"""A reply as it came over a wire, or handed over within this process, or why there is none."""


class Engine(Protocol):
    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        """Deliver one message to each site and yield the replies as they come, in any order."""
        ...


@dataclass(frozen=True)
class RemoteExecution:
    """Sites that are not here, and how long a round waits for them."""

    engine: Engine
    name: str
    deadline: float | None = None
    """Seconds; None: until they answer."""
    absent: Mapping[SiteId, str] = field(default_factory=dict)
    """Sites that were asked and take no part, and why."""
    most_images: Mapping[SiteId, int] = field(default_factory=dict)
    """By site, where the coordinator has registered it: the most images of all parts together."""
    believed: Mapping[SiteId, int] = field(default_factory=dict)
    """By every other site: as how many training images it counts …"""
    doubted: Mapping[SiteId, str] = field(default_factory=dict)
    """… a sentence about each whose numbers of images nobody believes …"""
    unscored: Collection[SiteId] = ()
    """… and those of them whose scores do not count among the scores of all sites."""
    peers: PeerKeys | None = None
    """The sites' public keys, with which the server checks what they sign in masked rounds."""
