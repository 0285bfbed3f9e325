"""Many sites as one batch on one device: all sites' `local` generators are driven in step, jobs that fit run together.

Sites whose next jobs have one shape (model, objective, optimiser) train as a stack (`learning.stacked`); any other job
runs one by one, as on the local engine, and the ledger says why. Either way a site's numbers are those of the local
engine, up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from polyclinic.core.contract import Failure, Fit, Fitted, Job, SiteId, Tensors, Work
from polyclinic.federation.engines import Answer
from polyclinic.federation.engines.batched_evaluation import BatchedEvaluation
from polyclinic.federation.engines.local import call_or_failure, keep_freed_memory, message_for
from polyclinic.federation.site_runner import SiteRound, SiteRunner, advances_counter, job_streams
from polyclinic.storage.messages import Message
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import NotStackableError, fit_stacked, job_signature, why_not_stackable
from polyclinic.training.stacked.memory import max_stack_size

Compile = Literal["auto", "always", "never"]
WORTH_COMPILING = 120.0
"""Seconds that stacks would yet take uncompiled. Compiling takes about half a minute and doubles their speed."""


@dataclass
class StackedSite:
    """A site's round under way."""

    runner: SiteRunner
    site_round: SiteRound
    work: Work
    job: Job
    number: int = 0
    stack_size: int = 1
    """The largest stack it was part of."""
    unstacked_reason: str = ""
    """Why a training job of it was not stacked."""


class StackedEngine:
    """In this process, on one device."""

    def __init__(
        self,
        runners: Mapping[SiteId, SiteRunner],
        threads: int = 1,
        most: int | None = None,
        compile: Compile = "auto",
    ) -> None:
        """`most`: sites in one stack; None: as many as the device's memory holds."""
        self.runners, self.max_stack, self.compile = runners, most, compile
        self.compiling, self.rounds = compile == "always", 0
        self.uncompiled = ""
        """Why compiling did not work."""
        self._rooms: dict[Any, int] = {}
        self._unstackable: dict[Any, str] = {}
        """Jobs that turned out not to stack, and why."""
        torch.set_num_threads(threads)
        keep_freed_memory()

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        guests: dict[SiteId, StackedSite] = {}
        foresight = BatchedEvaluation([self.runners[site] for site in sent])
        for site in sent:
            begun = call_or_failure(partial(self._begin_site, sent, site, foresight))
            if isinstance(begun, StackedSite):
                guests[site] = begun
            else:
                yield site, begun
        left = max((guest.site_round.site.rounds - round for guest in guests.values()), default=0)
        spent = 0.0
        while guests:
            for together in self._group_jobs(guests):
                began = time.perf_counter()
                results = call_or_failure(partial(self._run_jobs, [guests[site] for site in together]))
                spent += time.perf_counter() - began
                yield from self._advance_sites(guests, together, results)
        self._consider_compiling(spent * left)

    def close(self) -> None:
        """Nothing to release."""

    def _begin_site(
        self, sent: Mapping[SiteId, bytes], site: SiteId, foresight: BatchedEvaluation
    ) -> StackedSite | Message:
        runner = self.runners[site]
        order = message_for(sent, site)
        runner.check_order(order)
        predict = partial(foresight.predict, runner)
        if order.fields["purpose"] == "evaluate":
            return runner.evaluate(order, predict)
        visit = runner.begin_round(order, predict)
        work = runner.start_local(visit)
        try:
            return StackedSite(runner, visit, work, next(work))
        except StopIteration as end:  # a site that has nothing to do this round
            update, memory = end.value
            return runner.finish_round(visit, update, memory)

    def _group_jobs(self, guests: Mapping[SiteId, StackedSite]) -> list[list[SiteId]]:
        """Sites whose next jobs run as one, in stacks that fit into memory; the others alone."""
        stacks: dict[Any, list[SiteId]] = {}
        known: dict[int, Any] = {}
        for site, guest in guests.items():
            stacks.setdefault(self._stack_key(site, guest, known), []).append(site)
        groups = []
        for key, members in stacks.items():
            first = guests[members[0]]
            if len(members) == 1 < len(guests) and isinstance(first.job, Fit):
                first.unstacked_reason = first.unstacked_reason or "no other site's job was like it"
            size = self._stack_capacity(key, first) if len(members) > 1 else 1
            groups += [members[start : start + size] for start in range(0, len(members), size)]
        return groups

    def _stack_key(self, site: SiteId, guest: StackedSite, known: dict[int, Any]) -> Any:
        if not isinstance(guest.job, Fit):
            return site
        reason = why_not_stackable(guest.job, guest.runner.network) or self._unstackable.get(guest.job.sequence, "")
        guest.unstacked_reason = reason or guest.unstacked_reason
        # Weights of one shape may belong to networks that differ, as in how much they drop.
        return site if reason else (*job_signature(guest.job, guest.site_round.site, known), id(guest.runner.network))

    def _stack_capacity(self, key: Any, guest: StackedSite) -> int:
        """How many such jobs one stack may hold."""
        sequence, training, whole, _, *shapes = key  # whatever the learning rate
        kind = sequence, training, whole, *shapes
        if kind not in self._rooms:
            try:
                self._rooms[kind] = max_stack_size(_stack_member(guest), guest.runner.network)
            except RuntimeError:  # an objective that fails here fails in training too, where it is told
                return self.max_stack or len(self.runners)
        return min(self._rooms[kind], self.max_stack or self._rooms[kind])

    def _run_jobs(self, guests: Sequence[StackedSite]) -> list[Fitted | Tensors]:
        """The next job of each."""
        first = guests[0]
        if len(guests) == 1:
            return [first.runner.run_job(first.job, first.site_round, first.number)]
        try:
            found = fit_stacked([_stack_member(guest) for guest in guests], first.runner.network, self.compiling)
        except torch._dynamo.exc.TorchDynamoException as error:  # no compiler here, or one that cannot do this
            self.compile, self.compiling = "never", False
            self.uncompiled = str(error).strip().partition("\n")[0][:160] or type(error).__name__
            return self._run_jobs(guests)
        except NotStackableError as error:
            assert isinstance(first.job, Fit)
            self._unstackable[first.job.sequence] = str(error)
            for guest in guests:
                guest.unstacked_reason = str(error)
            return [guest.runner.run_job(guest.job, guest.site_round, guest.number) for guest in guests]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.max_stack = half = (len(guests) + 1) // 2
            return [*self._run_jobs(guests[:half]), *self._run_jobs(guests[half:])]
        for guest in guests:
            guest.stack_size = max(guest.stack_size, len(guests))
            if self.uncompiled:
                guest.unstacked_reason = (
                    guest.unstacked_reason or f"stacked, but it could not be compiled: {self.uncompiled}"
                )
        return [*found]

    def _advance_sites(
        self, guests: dict[SiteId, StackedSite], sites: Sequence[SiteId], results: Sequence[Fitted | Tensors] | Failure
    ) -> Iterator[tuple[SiteId, Answer]]:
        """Send results into the sites' generators, and hand in those that are done."""
        for number, site in enumerate(sites):
            ended: Answer | None = results if isinstance(results, Failure) else None
            if not isinstance(results, Failure):
                ended = call_or_failure(partial(self._advance_site, guests[site], results[number]))
            if ended is not None:
                del guests[site]
                yield site, ended

    def _advance_site(self, guest: StackedSite, result: Fitted | Tensors) -> Message | None:
        """The site's reply if that was its last job, else None."""
        try:
            guest.number += advances_counter(guest.job)
            guest.job = guest.work.send(result)
            return None
        except StopIteration as end:
            update, memory = end.value
            return guest.runner.finish_round(guest.site_round, update, memory, guest.stack_size, guest.unstacked_reason)

    def _consider_compiling(self, seconds: float) -> None:
        """After the second round, whose time is that of the rounds to come."""
        self.rounds += 1
        device = next(iter(self.runners.values())).network.device
        if self.compile == "auto" and self.rounds > 1 and device.type == "cuda":
            self.compiling = self.compiling or seconds > WORTH_COMPILING


def _stack_member(guest: StackedSite) -> StackMember:
    assert isinstance(guest.job, Fit)
    return StackMember(
        guest.job, guest.runner.images.train, guest.site_round.site, *job_streams(guest.site_round, guest.number)
    )
