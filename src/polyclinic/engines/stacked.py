"""Many sites as one batch on one device: all sites' `local` generators are driven in step, jobs that fit run together.

Sites whose next jobs have one shape (model, objective, optimiser) train as a stack (`learning.stacked`); any other job
runs one by one, as on the local engine. Either way a site's numbers are those of the local engine, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyclinic.core import Failure, Fit, Fitted, Job, SiteId, Tensors, Work
from polyclinic.engines.local import failing, keep_freed_memory
from polyclinic.learning.stacked import Seat, fit_stacked, signature, why_not
from polyclinic.runner import SiteRunner, Visit

MOST_BYTES = 2**33
"""Of a stack's weights, gradients and optimiser state; what is beyond trains in the next stack."""


@dataclass
class Guest:
    """A site's round under way."""

    runner: SiteRunner
    visit: Visit
    work: Work
    job: Job
    number: int = 0
    together: int = 1
    """The largest stack it was part of."""


class StackedEngine:
    """In this process, on one device."""

    def __init__(self, runners: Mapping[SiteId, SiteRunner], threads: int = 1, most: int | None = None) -> None:
        self.runners, self.most = runners, most
        self.alone: set[str] = set()
        """Why jobs ran one by one."""
        torch.set_num_threads(threads)
        keep_freed_memory()

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, bytes | Failure]]:
        guests: dict[SiteId, Guest] = {}
        for site, data in sent.items():
            begun = self._begin(site, data)
            if isinstance(begun, Guest):
                guests[site] = begun
            else:
                yield site, begun
        while guests:
            for together in self._groups(guests):
                yield from self._advance(guests, together)

    def close(self) -> None:
        """Nothing to release."""

    def _begin(self, site: SiteId, data: bytes) -> Guest | bytes | Failure:
        runner = self.runners[site]

        def begin() -> Guest | bytes:
            order = runner.read(data)
            if order.fields["purpose"] == "evaluate":
                return runner.evaluate(order)
            visit = runner.begin(order)
            work = runner.work(visit)
            return Guest(runner, visit, work, next(work))

        return failing(begin)

    def _groups(self, guests: Mapping[SiteId, Guest]) -> list[list[SiteId]]:
        """Sites whose next jobs run as one, in stacks that fit into memory; the others alone."""
        stacks: dict[Any, list[SiteId]] = {}
        for site, guest in guests.items():
            stacks.setdefault(self._key(site, guest), []).append(site)
        return [
            members[start : start + self._room(guests[members[0]])]
            for members in stacks.values()
            for start in range(0, len(members), self._room(guests[members[0]]))
        ]

    def _key(self, site: SiteId, guest: Guest) -> Any:
        if not isinstance(guest.job, Fit):
            return site
        reason = why_not(guest.job, guest.runner.network)
        if reason:
            self.alone.add(reason)
            return site
        return signature(guest.job, guest.visit.site)

    def _room(self, guest: Guest) -> int:
        """How many such jobs one stack may hold."""
        if self.most is not None or not isinstance(guest.job, Fit):
            return self.most or 1
        weights = sum(t.nbytes for group in guest.job.weights.values() for t in group.values())
        return max(1, MOST_BYTES // (6 * weights))

    def _advance(self, guests: dict[SiteId, Guest], sites: list[SiteId]) -> Iterator[tuple[SiteId, bytes | Failure]]:
        """Run the next job of these sites, and hand in those that are done."""
        chosen = [guests[site] for site in sites]
        results: list[Fitted | Tensors | Failure] = [self._alone(chosen[0])] if len(chosen) == 1 else _stacked(chosen)
        for site, guest, result in zip(sites, chosen, results, strict=True):
            guest.together = max(guest.together, len(sites))
            ended = result if isinstance(result, Failure) else self._next(guest, result)
            if ended is not None:
                del guests[site]
                yield site, ended

    def _alone(self, guest: Guest) -> Fitted | Tensors | Failure:
        return failing(lambda: guest.runner.run(guest.job, guest.visit, guest.number))

    def _next(self, guest: Guest, result: Fitted | Tensors) -> bytes | Failure | None:
        """Send a result into the site's generator: its reply if that was the last, else None."""

        def send() -> bytes | None:
            try:
                guest.job, guest.number = guest.work.send(result), guest.number + 1
                return None
            except StopIteration as end:
                update, memory = end.value
                return guest.runner.end(guest.visit, update, memory, guest.together)

        return failing(send)


def _stacked(guests: list[Guest]) -> list[Fitted | Tensors | Failure]:
    return [*fit_stacked([_seat(guest) for guest in guests], guests[0].runner.network)]


def _seat(guest: Guest) -> Seat:
    assert isinstance(guest.job, Fit)
    stream = guest.visit.rng.child("job", guest.number) if guest.number else guest.visit.rng
    return Seat(guest.job, guest.runner.holdings.train, guest.visit.site, stream)
