"""Messages between server and sites: encoded on access, and replies sorted by site, whatever order they arrive in."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO

from polyclinic.core import Bundle, Failure, FlatTensors, Refused, SiteId
from polyclinic.federation.engines import Answer
from polyclinic.storage import messages


class DividedMessages(Mapping[SiteId, bytes]):
    """Messages that are also available in parts, of which those that are the same for several sites exist once."""

    def parts(self, site: SiteId) -> tuple[bytes, ...]:
        """Return the parts of the site's message, which joined are the message."""
        raise NotImplementedError

    def release_shared(self) -> None:
        """Keep no shared part any longer: whoever sends it holds it, and if it is asked for again it is made anew."""


def message_parts(sent: Mapping[SiteId, bytes], site: SiteId) -> tuple[bytes, ...]:
    """Return the parts of a site's message: one, unless it was divided."""
    return sent.parts(site) if isinstance(sent, DividedMessages) else (sent[site],)


class Outbox(DividedMessages):
    """The messages to the sites, encoded on access; tensors that are the same for several sites are encoded once.

    `tensors(site)` is called once a site, and its result is kept until `take`, since the reply is checked against it.
    """

    def __init__(self, fields: Mapping[SiteId, Mapping[str, object]], tensors: Callable[[SiteId], Bundle]) -> None:
        self.fields, self.tensors = fields, tensors
        self.sizes: dict[SiteId, int] = {}
        self._sent: dict[SiteId, Bundle] = {}
        self._last: tuple[Bundle, messages.Body] | None = None
        self._last_size: tuple[Bundle, int] | None = None

    def __getitem__(self, site: SiteId) -> bytes:
        return b"".join(self.parts(site))

    def parts(self, site: SiteId) -> tuple[bytes, bytes]:
        bundle = self.bundle(site)
        if self._last is None or self._last[0] is not bundle:
            self._last = (bundle, messages.encode_body(bundle))
        head, body = messages.encode_parts(self.fields[site], self._last[1])
        self.sizes[site] = len(head) + len(body)
        return head, body

    def release_shared(self) -> None:
        self._last = None

    def in_process_message(self, site: SiteId) -> messages.Message:
        """Return the message for a site in this process, which needs no encoding."""
        bundle = self.bundle(site)
        if self._last_size is None or self._last_size[0] is not bundle:
            self._last_size = bundle, messages.body_size(bundle)
        message = messages.Message(
            self.fields[site], {k: g if isinstance(g, FlatTensors) else dict(g) for k, g in bundle.items() if g}
        )
        self.sizes[site] = messages.message_size(message, self._last_size[1])
        return message

    def take(self, site: SiteId) -> Bundle:
        """Return what the site was sent, and forget it."""
        self.bundle(site)
        return self._sent.pop(site)

    def bundle(self, site: SiteId) -> Bundle:
        """Return what the site is sent."""
        if site not in self._sent:
            self._sent[site] = self.tensors(site)
        return self._sent[site]

    def __iter__(self) -> Iterator[SiteId]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


class ReorderBuffer:
    """Holds replies that arrive early: in memory up to `limit` bytes in all, beyond that on disk."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit, self.buffered_bytes = limit, 0
        self._kept: dict[SiteId, Answer | IO[bytes]] = {}

    def put(self, site: SiteId, answer: Answer) -> None:
        if isinstance(answer, bytes) and self.buffered_bytes + len(answer) > self.limit:
            file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `take`
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
    """Yield each site's first reply in the order of `sites`; a site without one yields a `Failure`.

    `on_refused` is called for replies of other sites and for second replies.
    """
    buffer, turn, seen, asked = ReorderBuffer(), 0, set(), set(sites)
    for site, answer in arrivals:
        if site not in asked:
            on_refused(site, Refused("site", f"{site[:60]!r} was not asked"))
        elif site in seen:
            on_refused(site, Refused("duplicate", f"{site} has already replied this round"))
        else:
            seen.add(site)
            if site != sites[turn]:
                buffer.put(site, answer)
                del answer  # which may lie on disk now
                continue
            yield site, answer
            del answer  # so that the consumer holds the only reference
            turn += 1
            while turn < len(sites) and sites[turn] in buffer:
                yield sites[turn], buffer.take(sites[turn])
                turn += 1
    for site in sites[turn:]:
        yield site, buffer.take(site) if site in buffer else Failure("late", "no reply before the deadline")
