"""What an attacker overhears of a run: every noised sum that an optimiser receives, and every update that leaves."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polyclinic.analysis.audit.canaries import SEATS
from polyclinic.core import (
    Bundle,
    EngineError,
    Failure,
    Fit,
    Fitted,
    Job,
    Objective,
    SiteId,
    Stream,
    Tensors,
    Update,
    Work,
)
from polyclinic.data.examples import SiteData
from polyclinic.federation.engines import Answer, Engine
from polyclinic.federation.job_loop import JobLoop
from polyclinic.federation.secure_aggregation.cohort import MASKS, Cohort
from polyclinic.federation.site_runner import SiteRound, SiteRunner
from polyclinic.privacy.masking.fixed_point import as_words, restore_group
from polyclinic.privacy.transforms.mask import SUM
from polyclinic.storage.messages import Message
from polyclinic.training.data_order import schedule_steps
from polyclinic.training.dp.dp_sgd import ZeroLossNetwork, expected_batch_size, sampling_rate
from polyclinic.training.losses import SEPARABLE
from polyclinic.training.stacked.optimisers import STEP_PRE_HOOKS, StackedOptimiser

KEPT = 8192
"""Values of a sum that are kept; of the others, their squares are summed."""


class SumName(NamedTuple):
    """Which noised sum it is."""

    site: SiteId
    round: int
    job: int
    """The number of the private training job in its round."""
    step: int
    """The number of the optimiser step in its job."""


@dataclass(frozen=True)
class OverheardSum:
    """A noised sum, in clips."""

    seats: Tensor
    """The values on the canaries' seats; empty if the job does not train them."""
    noise: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Of a round without images: the first values that are nothing but noise, in the order of parameters' names."""
    squares: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """The number of all such values of each parameter, and the sum of their squares."""


@dataclass(frozen=True)
class Visit:
    """A site's part in a round: all that the algorithm got there, so that it can be run again without training."""

    site_round: SiteRound
    results: list[tuple[Job, Fitted | Tensors]] = field(default_factory=list)


@dataclass(frozen=True)
class OverheardUpdate:
    """An update on its way out: before the plan's transforms, after them, and what it started from."""

    before: Tensors
    after: Tensors
    received: Tensors
    weight: float = 1.0
    """The site's weight in the sum of which it is a part, where updates are masked."""


class ListeningRunner(SiteRunner):
    """A site whose attacker overhears it. `blank`: the same site without a single image."""

    blank: SiteData
    visit: Visit
    is_blank = False

    def attach(self, recorder: "Recorder", blank: SiteData) -> "ListeningRunner":
        self.recorder, self.blank, self.private_jobs = recorder, blank, 0
        self.steps, self.batch_sizes = Counter[int](), dict[int, list[int]]()
        return self

    @property
    def was_visited(self) -> bool:
        return hasattr(self, "visit")

    @property
    def job(self) -> Fit | None:
        """The job that runs, if it trains privately."""
        return self._job if self._job is not None and self._job.training.private is not None else None

    _job: Fit | None = None

    def start_local(self, site_round: SiteRound) -> Work:
        self.visit, self.private_jobs, self._job = Visit(site_round), 0, None
        self.steps.clear()
        self.batch_sizes.clear()
        return self._relay(super().start_local(site_round))

    def _relay(self, work: Work) -> Work:
        jobs = JobLoop(work)
        for job in jobs:
            self._job = job if isinstance(job, Fit) else None
            jobs.result = yield job
            self.visit.results.append((job, jobs.result))
            self.private_jobs += self.job is not None
        return jobs.returned

    def run_job(self, job: Job, site_round: SiteRound, number: int) -> Fitted | Tensors:
        self.recorder.training = self
        try:
            return super().run_job(job, site_round, number)
        finally:
            self.recorder.training = None

    def finish_round(
        self,
        site_round: SiteRound,
        update: Update,
        memory: Bundle | None,
        stack_size: int = 1,
        unstacked_reason: str = "",
    ) -> Message:
        reply = super().finish_round(site_round, update, memory, stack_size, unstacked_reason)
        if not self.is_blank and self.transforms:
            left = self.read_model(site_round, reply, update.tensors["model"])
            self.recorder.hear_update(self.name, site_round, update.tensors["model"], left, self._weight(site_round))
        self.recorder.stacked = max(self.recorder.stacked, stack_size)
        return reply

    def read_model(self, site_round: SiteRound, reply: Message, like: Tensors) -> Tensors:
        """Return the model as it leaves the site: of an update that is masked, its part of the sum, without masks."""
        left, received = reply.tensors["model"], site_round.order.tensors["model"]
        return left if self.masking is None else restore_group("model", as_words(left[SUM]), received, like, 1.0)

    def _weight(self, site_round: SiteRound) -> float:
        if self.masking is None or "model" in self.masking.unweighted:
            return 1.0
        fields = site_round.order.fields
        cohort = Cohort.from_json(fields["run"], fields["round"], fields[MASKS]["keys"])
        return self.masking.weight / cohort.largest_weight

    @contextmanager
    def without_images(self) -> Iterator[None]:
        own, self.images, self.is_blank = self.images, self.blank, True
        try:
            yield
        finally:
            self.images, self.is_blank = own, False

    def expected(self, job: Fit, step: int) -> float:
        """Return the number by which the sum of this step was divided."""
        training, train = job.training, self.images.train
        assert training.private is not None
        if training.private.unit == "patient":
            return sampling_rate(training, len(train), job.full_batch) * len(set(train.patients or ()))
        if training.private.sampling == "poisson":
            return expected_batch_size(training, len(train), job.full_batch, 0)
        if self.private_jobs not in self.batch_sizes:
            round = self.visit.site_round.site.round
            self.batch_sizes[self.private_jobs] = _batch_sizes(job, train.labels, round)
        drawn = self.batch_sizes[self.private_jobs][step // len(job.sequence)]
        return expected_batch_size(training, len(train), job.full_batch, drawn)


def _batch_sizes(job: Fit, labels: Tensor, round: int) -> list[int]:
    """Return the number of examples of each step of a job that shuffles, which does not depend on their order."""
    return [sum(map(len, batches)) for _, batches in schedule_steps(job, labels, Stream(0), None, round)]


class Recorder:
    """Overhears the runners of all sites: the sums of a run's rounds, and those of blank ones."""

    def __init__(self, runners: Mapping[SiteId, ListeningRunner]) -> None:
        self.runners, self.training = runners, None
        self.sums: dict[SumName, OverheardSum] = {}
        self.blank_sums: dict[SumName, OverheardSum] = {}
        self.updates: dict[SiteId, list[OverheardUpdate]] = {}
        self.stacked = 1
        """The largest stack of sites."""

    training: ListeningRunner | None
    """The site whose job runs by itself."""

    @contextmanager
    def listen(self) -> Iterator[None]:
        handle = register_optimizer_step_pre_hook(self._hear_optimiser)
        STEP_PRE_HOOKS.append(self._hear_stack)
        try:
            yield
        finally:
            handle.remove()
            STEP_PRE_HOOKS.remove(self._hear_stack)

    def _hear_optimiser(self, optimiser: torch.optim.Optimizer, *_: Any) -> None:
        if self.training is None or self.training.job is None:
            return
        live = self.training.network.live
        names = {id(p): name for name, p in live["model"].items()}
        found = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        grads = {names[id(p)]: p.grad for p in found if p.grad is not None}
        self._hear_sum(self.training, grads, dict(live["model"]))

    def _hear_stack(self, optimiser: StackedOptimiser, model: Tensors, grads: Tensors, members: Tensor | None) -> None:
        rows = range(len(optimiser.sites)) if members is None else members.tolist()
        for place, row in enumerate(rows):
            runner = self.runners.get(optimiser.sites[row])
            if runner is not None and runner.job is not None:
                self._hear_sum(runner, {n: g[place] for n, g in grads.items()}, {n: t[row] for n, t in model.items()})

    def _hear_sum(self, runner: ListeningRunner, grads: Tensors, model: Tensors) -> None:
        job, which = runner.job, runner.private_jobs
        assert job is not None
        assert job.training.private is not None
        step = runner.steps[which]
        runner.steps[which] += 1
        objective = job.sequence[step % len(job.sequence)].objective
        free = _data_free_gradients(objective, model, job.reference)
        scale = runner.expected(job, step) / job.training.private.clip
        sums = {n: (grads[n].detach() - free.get(n, 0.0)).double().cpu().flatten() * scale for n in sorted(grads)}
        seats = sums.get(SEATS, torch.zeros(0, dtype=torch.float64))
        name = SumName(runner.name, runner.visit.site_round.site.round, which, step)
        if not runner.is_blank:
            self.sums[name] = OverheardSum(seats)
            return
        if objective not in SEPARABLE and _moves_without_images(runner, objective, job):
            sums = {SEATS: seats} if len(seats) else {}
        first = torch.cat([*sums.values(), seats[:0]])[:KEPT].clone()
        self.blank_sums[name] = OverheardSum(
            seats, first, {n: (t.numel(), float(t.square().sum())) for n, t in sums.items()}
        )

    def hear_update(self, site: SiteId, site_round: SiteRound, before: Tensors, after: Tensors, weight: float) -> None:
        kinds = (before, after, site_round.order.tensors["model"])
        copies = [{n: t.detach().cpu() for n, t in kind.items() if t.is_floating_point()} for kind in kinds]
        self.updates.setdefault(site, []).append(OverheardUpdate(copies[0], copies[1], copies[2], weight))


def _data_free_gradients(objective: Objective, model: Tensors, reference: Bundle) -> Tensors:
    """Return the gradient of the objective's terms that use no data, which everybody knows."""
    if objective not in SEPARABLE:
        return {}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in model.items()}
    device = next(iter(leaves.values())).device
    nothing = torch.empty(0, device=device)
    own = {kind: {n: t.to(device) for n, t in group.items()} for kind, group in reference.items()}
    with torch.enable_grad():
        loss = objective(ZeroLossNetwork(device), {"model": leaves, "buffers": {}}, (nothing, nothing), own)
        if not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: t for name, t in zip(leaves, found, strict=True) if t is not None}


def _moves_without_images(runner: ListeningRunner, objective: Objective, job: Fit) -> bool:
    """Whether a row without an image has a gradient: of terms that use no image, but are clipped with those that do."""
    network = runner.network
    batch = runner.images.train.batch(torch.zeros(1, dtype=torch.int64))
    own = {kind: {n: t.to(network.device) for n, t in group.items()} for kind, group in job.reference.items()}
    leaves = [p for p in network.live["model"].values() if p.requires_grad]
    training = [module for module in network.module.modules() if module.training]
    network.module.eval()  # dropout knows the rows of the step's batch, not this one
    try:
        with torch.enable_grad():
            found = torch.autograd.grad(objective(network, network.live, batch, own), leaves, allow_unused=True)
    finally:
        for module in training:
            module.training = True
    return any(bool(gradient.any()) for gradient in found if gradient is not None)


class TwinEngine:
    """An engine that plays the first rounds twice: without images, for which nothing is replied, then as they are.

    Both times sites get the same orders, so that their noise is the same: the difference is what the images moved.
    """

    def __init__(self, engine: Engine, runners: Iterable[ListeningRunner], twice: int) -> None:
        self.engine, self.runners, self.twice = engine, list(runners), twice

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        if round <= self.twice:
            with ExitStack() as blank:
                for runner in self.runners:
                    blank.enter_context(runner.without_images())
                for site, answer in self.engine.exchange(round, sent, deadline):
                    if isinstance(answer, Failure):
                        raise EngineError(f"{site} could not be audited: {answer.sentence}")
        yield from self.engine.exchange(round, sent, deadline)
