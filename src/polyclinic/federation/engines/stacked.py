"""Many sites as one batch on one device.

The `local` generators of all sites advance in step. Sites whose next jobs are alike (model, objective, optimiser) train
as a stack (`training.stacked`); any other job runs by itself, and the ledger says why. Either way results are those of
the local engine, up to rounding.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from polyclinic.core import Failure, Fit, Fitted, Job, SiteId, Tensors, Work
from polyclinic.federation.engines import Answer
from polyclinic.federation.engines.batched_evaluation import BatchedEvaluation
from polyclinic.federation.engines.local import LocalEngine, call_or_failure, message_for
from polyclinic.federation.site_runner import SiteRound, SiteRunner, advances_counter, job_streams
from polyclinic.storage.messages import Message
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import NotStackableError, fit_stacked, job_signature, why_not_stackable
from polyclinic.training.stacked.memory import max_stack_size

Compile = Literal["auto", "always", "never"]
WORTH_COMPILING = 120.0
"""Remaining seconds of stacked training from which compiling pays: it takes half a minute and doubles the speed."""


@dataclass
class StackedSite:
    """A site's round in progress."""

    runner: SiteRunner
    site_round: SiteRound
    work: Work
    job: Job
    number: int = 0
    stack_size: int = 1
    """The largest stack it was part of."""
    unstacked_reason: str = ""
    """Why a training job of it was not stacked."""


class StackedEngine(LocalEngine):
    """Runs sites in this process on one device, stacked where possible."""

    def __init__(
        self,
        runners: Mapping[SiteId, SiteRunner],
        threads: int = 1,
        max_stack: int | None = None,
        compile: Compile = "auto",
    ) -> None:
        """`max_stack`: sites in one stack; None: as many as fit into the device's memory."""
        super().__init__(runners, threads)
        self.max_stack, self.compile = max_stack, compile
        self.compiling, self.rounds = compile == "always", 0
        self.uncompiled = ""
        """Why compiling did not work."""
        self._rooms: dict[Any, int] = {}
        self._unstackable: dict[Any, str] = {}
        """Jobs that turned out not to stack, and why."""

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        active: dict[SiteId, StackedSite] = {}
        batched = BatchedEvaluation([self.runners[site] for site in sent])
        for site in sent:
            begun = call_or_failure(partial(self._begin_site, sent, site, batched))
            if isinstance(begun, StackedSite):
                active[site] = begun
            else:
                yield site, begun
        left = max((stacked.site_round.site.rounds - round for stacked in active.values()), default=0)
        spent = 0.0
        while active:
            for together in self._group_jobs(active):
                began = time.perf_counter()
                results = call_or_failure(partial(self._run_jobs, [active[site] for site in together]))
                spent += time.perf_counter() - began
                yield from self._advance_sites(active, together, results)
        self._consider_compiling(spent * left)

    def _begin_site(
        self, sent: Mapping[SiteId, bytes], site: SiteId, batched: BatchedEvaluation
    ) -> StackedSite | Message:
        runner = self.runners[site]
        order = message_for(sent, site)
        runner.check_order(order)
        predict = partial(batched.predict, runner)
        if (found := runner.reply_without_training(order, predict)) is not None:
            return found
        site_round = runner.begin_round(order, predict)
        work = runner.start_local(site_round)
        try:
            return StackedSite(runner, site_round, work, next(work))
        except StopIteration as end:  # a site that has nothing to do this round
            return runner.finish_round(site_round, *end.value)

    def _group_jobs(self, active: Mapping[SiteId, StackedSite]) -> list[list[SiteId]]:
        """Return the sites whose next jobs run together, in stacks that fit into memory; other sites by themselves."""
        stacks: dict[Any, list[SiteId]] = {}
        known: dict[int, Any] = {}
        for site, stacked in active.items():
            stacks.setdefault(self._stack_key(site, stacked, known), []).append(site)
        groups = []
        for key, members in stacks.items():
            first = active[members[0]]
            if len(members) == 1 < len(active) and isinstance(first.job, Fit):
                first.unstacked_reason = first.unstacked_reason or "no other site's job was like it"
            size = self._stack_capacity(key, first) if len(members) > 1 else 1
            groups += [members[start : start + size] for start in range(0, len(members), size)]
        return groups

    def _stack_key(self, site: SiteId, stacked: StackedSite, known: dict[int, Any]) -> Any:
        if not isinstance(stacked.job, Fit):
            return site
        network = stacked.runner.network
        if reason := why_not_stackable(stacked.job, network) or self._unstackable.get(stacked.job.sequence, ""):
            stacked.unstacked_reason = reason
            return site
        # Weights of one shape may belong to networks that differ, as in how much they drop.
        return *job_signature(stacked.job, stacked.site_round.site, known), id(network)

    def _stack_capacity(self, key: Any, stacked: StackedSite) -> int:
        """Return how many such jobs one stack may hold."""
        sequence, training, whole, _, *shapes = key  # whatever the learning rate
        kind = sequence, training, whole, *shapes
        if kind not in self._rooms:
            try:
                self._rooms[kind] = max_stack_size(_stack_member(stacked), stacked.runner.network)
            except RuntimeError:  # an objective that fails here fails in training too, which reports the error
                return self.max_stack or len(self.runners)
        return min(self._rooms[kind], self.max_stack or self._rooms[kind])

    def _run_jobs(self, active: Sequence[StackedSite]) -> list[Fitted | Tensors]:
        """Run the next job of each site and return the results."""
        first = active[0]
        if len(active) == 1:
            return [first.runner.run_job(first.job, first.site_round, first.number)]
        try:
            found = fit_stacked([_stack_member(stacked) for stacked in active], first.runner.network, self.compiling)
        except torch._dynamo.exc.TorchDynamoException as error:  # no compiler here, or one that cannot do this
            self.compile, self.compiling = "never", False
            self.uncompiled = str(error).strip().partition("\n")[0][:160] or type(error).__name__
            return self._run_jobs(active)
        except NotStackableError as error:
            assert isinstance(first.job, Fit)
            self._unstackable[first.job.sequence] = str(error)
            for stacked in active:
                stacked.unstacked_reason = str(error)
            return [stacked.runner.run_job(stacked.job, stacked.site_round, stacked.number) for stacked in active]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.max_stack = half = (len(active) + 1) // 2
            return [*self._run_jobs(active[:half]), *self._run_jobs(active[half:])]
        for stacked in active:
            stacked.stack_size = max(stacked.stack_size, len(active))
            if self.uncompiled and not stacked.unstacked_reason:
                stacked.unstacked_reason = f"stacked, but it could not be compiled: {self.uncompiled}"
        return [*found]

    def _advance_sites(
        self, active: dict[SiteId, StackedSite], sites: Sequence[SiteId], results: Sequence[Fitted | Tensors] | Failure
    ) -> Iterator[tuple[SiteId, Answer]]:
        """Send results into the sites' generators, and yield the replies of sites that are done."""
        for number, site in enumerate(sites):
            if isinstance(results, Failure):
                ended: Answer | None = results
            else:
                ended = call_or_failure(partial(self._advance_site, active[site], results[number]))
            if ended is not None:
                del active[site]
                yield site, ended

    def _advance_site(self, stacked: StackedSite, result: Fitted | Tensors) -> Message | None:
        """Return the site's reply if that was its last job, else None."""
        try:
            stacked.number += advances_counter(stacked.job)
            stacked.job = stacked.work.send(result)
            return None
        except StopIteration as end:
            update, memory = end.value
            return stacked.runner.finish_round(
                stacked.site_round, update, memory, stacked.stack_size, stacked.unstacked_reason
            )

    def _consider_compiling(self, seconds: float) -> None:
        """Decide after the second round, which takes as long as those to come."""
        self.rounds += 1
        on_gpu = next(iter(self.runners.values())).network.device.type == "cuda"
        if self.compile == "auto" and self.rounds > 1 and on_gpu:
            self.compiling = self.compiling or seconds > WORTH_COMPILING


def _stack_member(stacked: StackedSite) -> StackMember:
    assert isinstance(stacked.job, Fit)
    return StackMember(
        stacked.job,
        stacked.runner.images.train,
        stacked.site_round.site,
        *job_streams(stacked.site_round, stacked.number),
    )
