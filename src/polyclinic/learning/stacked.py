"""Many sites' training jobs as one: parameters stacked, `torch.func.vmap` over sites, the same numbers as one by one.

A step runs all sites whose batch has the same length as one call; a site that has no batch left stands still. So sites
of unequal size give what they give alone, BatchNorm included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from polyclinic.core import (
    Augment,
    Batch,
    Bundle,
    Examples,
    Fit,
    Fitted,
    Objective,
    Optimiser,
    Site,
    Stream,
    Tensors,
)
from polyclinic.data.examples import Selection
from polyclinic.learning.augment import augmented
from polyclinic.learning.fit import walk
from polyclinic.learning.network import LiveNetwork, across

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""torch.optim.Adam's own."""


@dataclass(frozen=True)
class Seat:
    """One site's place in a stack."""

    job: Fit
    data: Examples
    site: Site
    stream: Stream


def signature(job: Fit, site: Site) -> tuple[Any, ...]:
    """Jobs with equal signatures run as one."""
    state = None if job.optimiser_state is None else {"": job.optimiser_state}
    return job.sequence, job.training, site.lr, _shapes(job.weights), _shapes(job.reference), state and _shapes(state)


def _shapes(bundle: Bundle) -> tuple[Any, ...]:
    return tuple((kind, name, t.shape, t.dtype) for kind, group in bundle.items() for name, t in group.items())


def why_not(job: Fit, network: LiveNetwork) -> str:
    """Why a job cannot be stacked; "" if it can."""
    if job.whole:
        return "full-gradient steps are accumulated over batches"
    if any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0 for m in network.module.modules()):
        return "dropout draws from each site's own stream"
    return ""


def fit_stacked(seats: Sequence[Seat], network: LiveNetwork) -> list[Fitted]:
    """What `fit` gives for each seat alone, up to rounding."""
    first = seats[0].job
    training = first.training
    steps = first.sequence
    moving = [network.trainable(training.fine_tune, step.train) for step in steps]
    network.training_mode(frozenset().union(*moving))
    weights = {
        kind: _stack([s.job.weights.get(kind, {}) for s in seats], network.device) for kind in ("model", "buffers")
    }
    reference = {k: _stack([s.job.reference[k] for s in seats], network.device) for k in first.reference}
    optimisers = [StackedOptimiser(training.optimiser, seats[0].site.lr, number) for number in range(len(moving))]
    if first.optimiser_state is not None:
        state = _stack([s.job.optimiser_state or {} for s in seats], network.device)
        for optimiser in optimisers:
            optimiser.restore(state)
    plans = [list(walk(s.data.labels, training, s.stream, s.site.round, False)) for s in seats]
    losses = torch.zeros(len(seats), device=network.device)
    calls = [_gradients(network, step.objective) for step in steps]
    for turn in range(max(map(len, plans))):
        for members, rows in _by_length(plans, turn):
            images, labels = _batch([seats[m].data for m in members], rows)
            if training.augment is not None:
                numbers = [plans[m][turn][0] for m in members]
                images = _changed(images, training.augment, [seats[m] for m in members], numbers)
            whole = len(members) == len(seats)
            for call, names, optimiser in zip(calls, moving, optimisers, strict=True):
                here = weights if whole else _take(weights, members)
                grads, loss = call(here, names, (images, labels), reference if whole else _take(reference, members))
                optimiser.step(weights["model"], grads, None if whole else members)
                if not whole:
                    _put(weights["buffers"], here["buffers"], members)
            if whole:
                losses += loss
            else:
                losses[members] += loss
    return _apart(seats, weights, optimisers, losses, plans)


def _stack(groups: Sequence[Tensors], device: torch.device) -> Tensors:
    names = list(groups[0])
    stacked = [torch.stack([group[name] for group in groups]) for name in names]
    return _onto(dict(zip(names, stacked, strict=True)), device)


def _onto(group: Tensors, device: torch.device) -> Tensors:
    """Moved in one block, unless it is there already."""
    if all(tensor.device.type == device.type for tensor in group.values()):
        return group
    return dict(zip(group, across(list(group.values()), device), strict=True))


def _take(bundle: Bundle, members: Sequence[int]) -> Bundle:
    return {kind: {name: tensor[list(members)] for name, tensor in group.items()} for kind, group in bundle.items()}


def _put(into: Tensors, values: Tensors, members: Sequence[int]) -> None:
    for name, value in values.items():
        into[name][list(members)] = value


Call = Callable[[Bundle, frozenset[str], Batch, Bundle], tuple[Tensors, Tensor]]


def _gradients(network: LiveNetwork, objective: Objective) -> Call:
    """(stacked weights, what moves, stacked batch, stacked reference) -> gradient and loss of every site."""

    def loss(moving: Tensors, still: Tensors, buffers: Tensors, batch: Batch, reference: Bundle) -> Tensor:
        return objective(network, {"model": {**still, **moving}, "buffers": buffers}, batch, reference)

    stacked = vmap(loss, randomness="different")

    def call(weights: Bundle, names: frozenset[str], batch: Batch, reference: Bundle) -> tuple[Tensors, Tensor]:
        moving = {name: w.detach().requires_grad_() for name, w in weights["model"].items() if name in names}
        still = {name: w for name, w in weights["model"].items() if name not in names}
        losses = stacked(moving, still, weights["buffers"], batch, reference)
        # No site's loss depends on another's weights: the gradient of their sum holds everyone's own.
        found = torch.autograd.grad(losses.sum(), list(moving.values()), allow_unused=True)
        grads = {name: grad for name, grad in zip(moving, found, strict=True) if grad is not None}
        return grads, losses.detach()

    return call


def _by_length(plans: Sequence[list[tuple[int, list[Tensor]]]], turn: int) -> list[tuple[list[int], list[Tensor]]]:
    """The sites that have a batch at this turn, those with equally long ones together."""
    groups: dict[int, list[int]] = {}
    for member, plan in enumerate(plans):
        if turn < len(plan):
            groups.setdefault(len(plan[turn][1][0]), []).append(member)
    return [(members, [plans[m][turn][1][0] for m in members]) for members in groups.values()]


def _batch(data: Sequence[Examples], rows: Sequence[Tensor]) -> Batch:
    """The sites' batches, stacked; where they share their images, in one gathering."""
    selections = [d for d in data if isinstance(d, Selection)]
    if len(selections) == len(data) and all(d.shared is selections[0].shared for d in selections):
        chosen = [d.rows.index_select(0, r.to(d.rows.device)) for d, r in zip(selections, rows, strict=True)]
        images, labels = selections[0].shared.batch(torch.cat(chosen))
        return images.reshape(len(data), -1, *images.shape[1:]), labels.reshape(len(data), -1)
    batches = [d.batch(r) for d, r in zip(data, rows, strict=True)]
    return torch.stack([images for images, _ in batches]), torch.stack([labels for _, labels in batches])


def _changed(images: Tensor, options: Augment, seats: Sequence[Seat], numbers: Sequence[int]) -> Tensor:
    """Each site's images changed as `fit` would change them, from the site's own stream."""
    streams = [seat.stream.child("augment", number, 0) for seat, number in zip(seats, numbers, strict=True)]
    return torch.stack([augmented(some, options, stream) for some, stream in zip(images, streams, strict=True)])


class StackedOptimiser:
    """SGD, Adam or AdamW of every site at once, as torch.optim takes them one by one."""

    def __init__(self, options: Optimiser, lr: float, number: int) -> None:
        self.options, self.lr, self.number = options, lr, number
        self.slots: dict[str, Tensors] = {}

    def restore(self, state: Tensors) -> None:
        for path, value in state.items():
            number, slot, name = path.split("/", 2)
            if int(number) == self.number:
                self.slots.setdefault(slot, {})[name] = value

    def state(self) -> Tensors:
        return {f"{self.number}/{slot}/{n}": t for slot, group in self.slots.items() for n, t in group.items()}

    @torch.no_grad()
    def step(self, model: Tensors, grads: Tensors, members: Sequence[int] | None) -> None:
        rows: Any = slice(None) if members is None else torch.tensor(members)
        update = self._sgd if self.options.name == "sgd" else self._adam
        for name, grad in grads.items():
            update(name, model[name], grad, rows)

    def _slot(self, slot: str, name: str, like: Tensor) -> Tensor:
        group = self.slots.setdefault(slot, {})
        if name not in group:
            group[name] = torch.zeros(len(like)) if slot == "step" else torch.zeros_like(like)
        return group[name]

    def _sgd(self, name: str, whole: Tensor, grad: Tensor, rows: Any) -> None:
        options = self.options
        if options.weight_decay:
            grad = grad + options.weight_decay * whole[rows]
        if options.momentum:
            fresh = name not in self.slots.get("momentum_buffer", {})
            buffer = self._slot("momentum_buffer", name, whole)
            grad = grad if fresh else options.momentum * buffer[rows] + grad
            buffer[rows] = grad
        if isinstance(rows, slice):
            whole.sub_(grad, alpha=self.lr)
        else:
            whole[rows] -= self.lr * grad

    def _adam(self, name: str, whole: Tensor, grad: Tensor, rows: Any) -> None:
        options = self.options
        if options.name == "adamw":
            whole[rows] *= 1 - self.lr * options.weight_decay
        elif options.weight_decay:
            grad = grad + options.weight_decay * whole[rows]
        step = self._slot("step", name, whole)
        step[rows] += 1
        mean, square = self._slot("exp_avg", name, whole), self._slot("exp_avg_sq", name, whole)
        mean[rows] = torch.lerp(mean[rows], grad, 1 - BETA_1)
        square[rows] = BETA_2 * square[rows] + (1 - BETA_2) * grad * grad
        count = step[rows].to(whole.device, whole.dtype).reshape(-1, *[1] * (whole.ndim - 1))
        scale = self.lr / (1 - BETA_1**count)
        whole[rows] -= scale * mean[rows] / (square[rows].sqrt() / (1 - BETA_2**count).sqrt() + EPSILON)


def _apart(
    seats: Sequence[Seat],
    weights: Bundle,
    optimisers: Sequence[StackedOptimiser],
    losses: Tensor,
    plans: Sequence[Sequence[Any]],
) -> list[Fitted]:
    """Every site's own share of the stack, on the CPU."""
    home = torch.device("cpu")
    keep = seats[0].job.optimiser_state is not None
    state = {name: t for optimiser in optimisers for name, t in optimiser.state().items()} if keep else {}
    moved = {kind: _onto(group, home) for kind, group in {**weights, "": state}.items()}
    found, total = [], losses.tolist()
    for number, plan in enumerate(plans):
        mine = {kind: {name: t[number].clone() for name, t in group.items()} for kind, group in moved.items()}
        own = mine.pop("")
        found.append(Fitted(mine, len(plan), total[number] / max(len(plan), 1), own))
    return found
