"""Messages on their way: encoded when asked for, and put into site order whatever the order they arrive in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from polyclinic.core.contract import Bundle, Failure, SiteId
from polyclinic.core.errors import Refused
from polyclinic.core.flat_tensors import FlatTensors
from polyclinic.federation.engines import Answer
from polyclinic.storage import messages


class Outbox(Mapping[SiteId, bytes]):
    """Messages to the sites, encoded when asked for; equal tensors are encoded once."""

    def __init__(self, fields: Mapping[SiteId, Mapping[str, Any]], tensors: Callable[[SiteId], Bundle]) -> None:
        self.fields, self.tensors = fields, tensors
        self.sizes: dict[SiteId, int] = {}
        self._last: tuple[Bundle, messages.Body] | None = None
        self._weighed: tuple[Bundle, int] | None = None

    def __getitem__(self, site: SiteId) -> bytes:
        bundle = self.tensors(site)
        if self._last is None or self._last[0] is not bundle:
            self._last = (bundle, messages.encode_body(bundle))
        message = messages.encode_with_body(self.fields[site], self._last[1])
        self.sizes[site] = len(message)
        return message

    def in_process_message(self, site: SiteId) -> messages.Message:
        """The same message for a site in this process: nothing travels, so nothing is encoded."""
        bundle = self.tensors(site)
        if self._weighed is None or self._weighed[0] is not bundle:
            self._weighed = bundle, messages.body_size(bundle)
        own = {
            kind: group if isinstance(group, FlatTensors) else dict(group) for kind, group in bundle.items() if group
        }
        message = messages.Message(self.fields[site], own)
        self.sizes[site] = messages.message_size(message, self._weighed[1])
        return message

    def __iter__(self) -> Iterator[SiteId]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


class ReorderBuffer:
    """Replies that came before their turn: in memory up to `limit` bytes together, beyond that on disk."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit, self.buffered_bytes = limit, 0
        self._kept: dict[SiteId, Answer | IO[bytes]] = {}

    def put(self, site: SiteId, answer: Answer) -> None:
        if isinstance(answer, bytes) and self.buffered_bytes + len(answer) > self.limit:
            file = tempfile.TemporaryFile()  # noqa: SIM115  it lives until its turn
            file.write(answer)
            self._kept[site] = file
            return
        self.buffered_bytes += len(answer) if isinstance(answer, bytes) else 0
        self._kept[site] = answer

    def take(self, site: SiteId) -> Answer:
        kept = self._kept.pop(site)
        if isinstance(kept, bytes):
            self.buffered_bytes -= len(kept)
        if isinstance(kept, bytes | messages.Message | Failure):
            return kept
        with kept as file:
            file.seek(0)
            return file.read()

    def __contains__(self, site: SiteId) -> bool:
        return site in self._kept


def in_site_order(
    arrivals: Iterable[tuple[SiteId, Answer]],
    sites: Sequence[SiteId],
    on_refused: Callable[[SiteId, Refused], None],
) -> Iterator[tuple[SiteId, Answer]]:
    """Each site's first reply, in the order of `sites`, whatever the order of arrival; silence becomes a failure."""
    shelf, turn, seen, asked = ReorderBuffer(), 0, set(), set(sites)
    for site, answer in arrivals:
        if site not in asked:
            on_refused(site, Refused("site", f"{site[:60]!r} was not asked"))
        elif site in seen:
            on_refused(site, Refused("duplicate", f"{site} has already replied this round"))
        else:
            seen.add(site)
            if site != sites[turn]:
                shelf.put(site, answer)
                continue
            yield site, answer
            del answer  # whoever took it may be the only one that holds it
            turn += 1
            while turn < len(sites) and sites[turn] in shelf:
                yield sites[turn], shelf.take(sites[turn])
                turn += 1
    for site in sites[turn:]:
        yield site, shelf.take(site) if site in shelf else Failure("late", "no reply before the deadline")
