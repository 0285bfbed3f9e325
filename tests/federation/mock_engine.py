"""A scripted engine for tests of algorithms, of the round loop, and of failures of a network."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from polyclinic.core import Failure, SiteId

Answer = Callable[[SiteId, bytes], bytes | Failure]


class MockEngine:
    """Answers each message with `answer`, then delivers the replies in `arrival` order (a list of positions).

    `tamper` sees all replies before delivery and may drop, repeat or change them.
    """

    def __init__(
        self,
        answer: Answer,
        arrival: Sequence[int] | None = None,
        tamper: Callable[[int, list[tuple[SiteId, bytes | Failure]]], list[tuple[SiteId, bytes | Failure]]]
        | None = None,
    ) -> None:
        self.answer, self.arrival, self.tamper = answer, arrival, tamper

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, bytes | Failure]]:
        replies = [(site, self.answer(site, sent[site])) for site in sent]
        if self.arrival is not None:
            replies = [replies[i] for i in self.arrival if i < len(replies)]
        return self.tamper(round, replies) if self.tamper else replies
