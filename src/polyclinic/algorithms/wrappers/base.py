"""An algorithm that plays another, and changes something about it: clusters, ensembles, the order of cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from polyclinic.algorithms.base import Averaging
from polyclinic.core.contract import Bundle, Exchange, Federation, ServerWork, Site, SiteId, Stream, Update, Work


@dataclass(frozen=True)
class Wrapper(Averaging):
    """Plays another algorithm, and changes something about it."""

    inner: Averaging = field(kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pooled", self.inner.pooled)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return self.inner.exchanges

    @property
    def trains_on_server(self) -> bool:
        return self.inner.trains_on_server

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        return self.inner.auxiliary(features, classes)

    def init(self, federation: Federation) -> Bundle:
        return self.inner.init(federation)

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        return self.inner.broadcast(state, site)

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        return self.inner.local(received, memory, site, rng)

    def check_update(self, update: Update) -> None:
        self.inner.check_update(update)

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        return self.inner.aggregate(state, updates)

    def server_step(self, state: Bundle, server: Site, rng: Stream) -> ServerWork:
        return self.inner.server_step(state, server, rng)

    def finish(self, state: Bundle) -> Bundle:
        return self.inner.finish(state)

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return self.inner.models(received, memory)

    def privacy_releases(self) -> Mapping[str, float]:
        return self.inner.privacy_releases()

    def no_guarantee_reason(self) -> str:
        return self.inner.no_guarantee_reason()

    def warning(self) -> str:
        return self.inner.warning()
