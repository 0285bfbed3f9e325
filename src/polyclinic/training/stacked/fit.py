"""Many sites' training jobs as one: parameters stacked, `torch.func.vmap` over sites, the same numbers as one by one.

Sites do not wait for each other: a call takes all sites whose next batch has the same length. So sites of unequal size
give what they give alone, BatchNorm included. Everything a call needs lies on the device before the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from polyclinic.core.contract import Batch, Bundle, Fit, Fitted, Objective, Site, Tensors, Training
from polyclinic.core.flat_tensors import FlatDifference, FlatTensors, layout_of, side_by_side
from polyclinic.training.dp.dp_sgd import changes_nothing
from polyclinic.training.dp.per_example_gradients import NotRecordableError
from polyclinic.training.losses import SEPARABLE
from polyclinic.training.network import LiveNetwork, moved
from polyclinic.training.stacked.batching import StackMember, StackSchedule
from polyclinic.training.stacked.compile import compiled as compiled_function
from polyclinic.training.stacked.dp import Keyed, StackedNoise, Sums, clipped_sums
from polyclinic.training.stacked.optimisers import StackedOptimiser


class NotStackableError(Exception):
    """An objective that `vmap` cannot do: it looks at values, draws at random, or writes in place."""


def signature(job: Fit, site: Site, known: dict[Any, Any] | None = None) -> tuple[Any, ...]:
    """Jobs with equal signatures run as one, whatever their noise. `known` remembers bundles that many jobs share."""
    known = {} if known is None else known
    mark = tuple(id(group) for group in job.weights.values())
    if mark not in known:
        known[mark] = _Shapes(job.weights)
    state = None if job.optimiser_state is None else _Shapes({"": job.optimiser_state})
    reference = _Shapes(job.reference) if job.reference else None
    training = job.training
    if training.private is not None:
        training = replace(training, private=replace(training.private, noise=0.0))
    return job.sequence, training, job.whole, site.lr, known[mark], reference, state, training.size(site.examples)


class _Shapes:
    """Names, shapes and dtypes of a bundle, quickly compared."""

    def __init__(self, bundle: Bundle) -> None:
        self.all = tuple((k, name, t.shape, t.dtype) for k, group in bundle.items() for name, t in group.items())
        self.hash = hash(self.all)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Shapes) and self.all == other.all)


def why_not(job: Fit, network: LiveNetwork) -> str:
    """Why a job cannot be stacked; "" if it can."""
    if job.whole and len(job.sequence) > 1:
        return "several steps on full gradients are taken site by site"
    if not all(isinstance(step.objective, Hashable) for step in job.sequence):
        return "its objective cannot be told from another's (it has no hash)"
    if not changes_nothing(job.training.private):
        if len(job.sequence) > 1:
            return "several private steps on a batch are taken site by site"
        if job.sequence[0].objective not in SEPARABLE:
            return "its objective may mix examples, so these are clipped one by one"
    shared = network.shared_draws
    return f"{shared} draws from a generator that sites would share" if shared else ""


def fit_stacked(seats: Sequence[StackMember], network: LiveNetwork, compiled: bool = False) -> list[Fitted]:
    """What `fit` gives for each seat alone, up to rounding. `compiled` pays after some thousand steps."""
    first, network = seats[0].job, network.stackable
    training, steps = first.training, first.sequence
    moving = [network.trainable(training.fine_tune, step.train) for step in steps]
    network.training_mode(frozenset().union(*moving))
    weights = {
        "model": _stack([s.job.weights["model"] for s in seats], network.device),
        # Each by itself: batch normalisation writes into a copy of what does not lie by itself, and its work is lost.
        "buffers": _stack([dict(s.job.weights.get("buffers", {})) for s in seats], network.device),
    }
    reference = {k: _stack([s.job.reference[k] for s in seats], network.device) for k in first.reference}
    optimisers = [StackedOptimiser(training.optimiser, seats[0].site.lr, number) for number in range(len(steps))]
    if first.optimiser_state is not None:
        state = _stack([s.job.optimiser_state or {} for s in seats], network.device)
        for optimiser in optimisers:
            optimiser.restore(state)
    table = StackSchedule(seats, network.device, compiled, network.draws)
    losses, gathered = torch.zeros(len(seats), device=network.device), dict[str, Tensor]()
    noise = None if changes_nothing(training.private) else StackedNoise(seats, network)
    precise = network.precision(training.precision)
    with precise, _products_like_convolutions(network.device), table.served() as served:
        for turn, batch in served:
            keys = network.keyed(turn.keys)
            for step, names, optimiser in zip(steps, moving, optimisers, strict=True):
                here, aside = _rows(weights, turn.seated), _rows(reference, turn.seated)
                if turn.inside is not None:  # not everyone's statistics may move
                    here = {**here, "buffers": {name: t.clone() for name, t in here["buffers"].items()}}
                if noise is None:
                    call = _gradients(network, step.objective, names, compiled and turn.everyone)
                    grads, loss = call(here, keys, batch, aside)
                else:
                    sums = _sums(network, step.objective, names, training, compiled and turn.everyone)
                    grads, loss, lost = sums(here, keys, batch, turn.present, aside)
                    loss = torch.where(loss.isfinite(), loss, 0)
                    _add(noise.dropped, turn.of_members({"": lost})[""], turn.members)
                if turn.members is not None:
                    grads, loss = turn.of_members(grads), turn.of_members({"": loss})[""]
                    _put(weights["buffers"], turn.of_members(here["buffers"]), turn.members)
                if turn.shares is not None:
                    parts = turn.shares if noise is None else torch.ones_like(turn.shares)
                    grads = _gathered(gathered, grads, parts, turn.members, len(seats), turn.last)
                if turn.last:
                    if noise is not None:
                        grads = noise.added(grads, turn)
                        for name, free in turn.of_members(noise.besides(step.objective, names, here, aside)).items():
                            grads[name] += free
                    optimiser.step(weights["model"], grads, turn.members)
            _add(losses, loss if turn.shares is None else loss * turn.shares, turn.members)
    dropped = [0] * len(seats) if noise is None else noise.dropped.tolist()
    return _apart(seats, weights, optimisers, losses, table.steps, dropped)


def _stack(groups: Sequence[Tensors], device: torch.device) -> Tensors:
    """One tensor per name, with a row per site; where a site's tensors are one vector, so are its rows."""
    first = groups[0]
    if not isinstance(first, FlatTensors) or not all(
        isinstance(group, FlatTensors) and group.is_like(first) for group in groups
    ):
        return moved({name: torch.stack([group[name] for group in groups]) for name in first}, device)
    vectors = [group.vector for group in groups if isinstance(group, FlatTensors)]
    if all(vector is first.vector for vector in vectors):
        block = first.vector.to(device).expand(len(groups), -1).clone()
    else:
        block = torch.stack(vectors).to(device)
    pieces = torch.split(block, [t.numel() for t in first.values()], dim=1)
    return {n: p.view(len(groups), *t.shape) for (n, t), p in zip(first.items(), pieces, strict=True)}


def _rows(bundle: Bundle, seated: Tensor | None) -> Bundle:
    if seated is None:
        return bundle
    return {kind: {name: tensor[seated] for name, tensor in group.items()} for kind, group in bundle.items()}


def _put(into: Tensors, values: Tensors, members: Tensor) -> None:
    for name, value in values.items():
        into[name][members] = value


def _add(total: Tensor, values: Tensor, members: Tensor | None) -> None:
    if members is None:
        total += values
    else:
        total[members] += values


def _gathered(
    total: Tensors, grads: Tensors, shares: Tensor, members: Tensor | None, sites: int, last: bool
) -> Tensors:
    """The members' gradients so far, over the batches of a step, weighted by their `shares` of the examples."""
    rows: Any = slice(None) if members is None else members
    for name, grad in grads.items():
        if name not in total:
            total[name] = grad.new_zeros(sites, *grad.shape[1:])
        total[name][rows] += grad * shares.reshape(-1, *[1] * (grad.ndim - 1)).to(grad.dtype)
    found = {name: total[name][rows].clone() for name in grads}
    if last:
        for name in grads:
            total[name][rows] = 0
    return found


Call = Callable[[Bundle, Tensors, Batch, Bundle], tuple[Tensors, Tensor]]


def _gradients(network: LiveNetwork, objective: Objective, names: frozenset[str], compiled: bool) -> Call:
    """(stacked weights, dropout's keys, stacked batch, stacked reference) -> gradient and loss of every site."""
    key = (objective, names, compiled)
    if key not in network.calls:
        network.calls[key] = _made(network, objective, names, compiled)
    found: Call = network.calls[key]
    return found


def _sums(
    network: LiveNetwork, objective: Objective, names: frozenset[str], training: Training, compiled: bool
) -> Sums:
    """The same for private steps: (…, reference) -> sum of clipped gradients, loss, examples dropped of every site."""
    assert training.private is not None
    clip = training.private.clip
    key = ("private", objective, names, clip, training.precision, compiled)
    if key not in network.calls:
        with _stackable_or_said(compiled):
            network.calls[key] = clipped_sums(network, objective, names, clip, compiled)
    made: Sums = network.calls[key]

    def call(*arguments: Any) -> tuple[Tensors, Tensor, Tensor]:
        with _stackable_or_said(compiled):
            return made(*arguments)

    return call


@contextmanager
def _stackable_or_said(compiled: bool) -> Iterator[None]:
    try:
        yield
    except NotRecordableError as error:
        raise NotStackableError(f"its examples are clipped one by one: {error}") from error
    except RuntimeError as error:
        if compiled or isinstance(error, torch.OutOfMemoryError):
            raise
        # If the objective itself is wrong, each site's own training will say so.
        raise NotStackableError(f"its objective cannot be: {' '.join(str(error).split())[:120]}") from error


def _made(network: LiveNetwork, objective: Objective, names: frozenset[str], compiled: bool) -> Call:
    def loss(moving: Tensors, still: Tensors, buffers: Tensors, keys: Tensors, batch: Batch, aside: Bundle) -> Tensor:
        seen = Keyed(network, keys) if keys else network
        return objective(seen, {"model": {**still, **moving}, "buffers": buffers}, batch, aside)

    def stacked(*arguments: Any) -> Tensor:
        found: Tensor = vmap(loss, randomness="error")(*arguments)
        return found

    if compiled:  # this function, not what vmap returns: the compiler passes over torch's own
        stacked = compiled_function(stacked, network.device)

    def call(weights: Bundle, keys: Tensors, batch: Batch, aside: Bundle) -> tuple[Tensors, Tensor]:
        moving = {name: w.detach().requires_grad_() for name, w in weights["model"].items() if name in names}
        still = {name: w for name, w in weights["model"].items() if name not in names}
        with _stackable_or_said(compiled):
            losses = stacked(moving, still, weights["buffers"], keys, batch, aside)
        # No site's loss depends on another's weights: the gradient of their sum holds everyone's own.
        found = torch.autograd.grad(losses.sum(), list(moving.values()), allow_unused=True)
        grads = {name: grad for name, grad in zip(moving, found, strict=True) if grad is not None}
        return grads, losses.detach()

    return call


@contextmanager
def _products_like_convolutions(device: torch.device) -> Iterator[None]:
    """On CUDA, convolutions round to TF32 unless told otherwise; here they are matrix products, which would not."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _apart(
    seats: Sequence[StackMember],
    weights: Bundle,
    optimisers: Sequence[StackedOptimiser],
    losses: Tensor,
    steps: list[int],
    dropped: list[int],
) -> list[Fitted]:
    """Every site's own share of the stack, as views of it."""
    keep = seats[0].job.optimiser_state is not None
    state = {name: t for optimiser in optimisers for name, t in optimiser.state().items()} if keep else {}
    starts = {kind: [seat.job.weights.get(kind) for seat in seats] for kind in weights}
    apart = {kind: _rows_of(group, starts.get(kind, [])) for kind, group in {**weights, "": state}.items()}
    found = []
    for number, (count, total) in enumerate(zip(steps, losses.tolist(), strict=True)):
        mine = {kind: rows[number] if rows else {} for kind, rows in apart.items()}
        own = mine.pop("")
        found.append(Fitted(mine, count, total / max(count, 1), own, dropped[number]))
    return found


def _rows_of(group: Tensors, starts: Sequence[Tensors | None]) -> list[Tensors]:
    """Each site's tensors; as one vector, where a site's lie side by side, with the way it has come from the start."""
    split = zip(*(tensor.unbind() for tensor in group.values()), strict=True)
    rows = [dict(zip(group, tensors, strict=True)) for tensors in split]
    vector = side_by_side([tensor for row in rows[:2] for tensor in row.values()])
    if vector is None or len(rows) < 2:
        return rows
    width = len(vector) // 2  # of the block that holds all rows, since it holds two of them side by side
    block = vector.as_strided((len(rows), width), (width, 1))
    first, layout = starts[0] if starts else None, layout_of(rows[0])
    far: list[FlatDifference | None] = [None] * len(rows)
    alike = isinstance(first, FlatTensors) and first.layout == layout and all(start is first for start in starts)
    if isinstance(first, FlatTensors) and alike and first.vector.device == block.device:
        # Here for all sites at once: one by one, whoever asks would wait for the device each time.
        far = [FlatDifference(first.vector, w) for w in torch.linalg.vector_norm(block - first.vector, dim=1).tolist()]
    return [FlatTensors(row.items(), own, layout, way) for row, own, way in zip(rows, block.unbind(), far, strict=True)]
