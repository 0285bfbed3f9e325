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
from polyclinic.core.flat_tensors import FlatDifference, FlatTensors, contiguous_vector, layout_of
from polyclinic.training.dp.dp_sgd import is_plain_sgd
from polyclinic.training.dp.per_example_gradients import NotRecordableError
from polyclinic.training.losses import SEPARABLE
from polyclinic.training.network import LiveNetwork, move_tensors
from polyclinic.training.stacked.batching import StackMember, StackSchedule
from polyclinic.training.stacked.compile import compile_function as compiled_function
from polyclinic.training.stacked.dp import ClippedSumFunction, KeyedNetwork, StackedNoise, make_clipped_sum_function
from polyclinic.training.stacked.optimisers import StackedOptimiser


class NotStackableError(Exception):
    """An objective that `vmap` cannot do: it looks at values, draws at random, or writes in place."""


def job_signature(job: Fit, site: Site, cache: dict[Any, Any] | None = None) -> tuple[Any, ...]:
    """Jobs with equal signatures run as one, whatever their noise. `known` remembers bundles that many jobs share."""
    cache = {} if cache is None else cache
    mark = tuple(id(group) for group in job.weights.values())
    if mark not in cache:
        cache[mark] = _BundleShapes(job.weights)
    state = None if job.optimiser_state is None else _BundleShapes({"": job.optimiser_state})
    reference = _BundleShapes(job.reference) if job.reference else None
    training = job.training
    if training.private is not None:
        training = replace(training, private=replace(training.private, noise=0.0))
    return (
        job.sequence,
        training,
        job.full_batch,
        site.lr,
        cache[mark],
        reference,
        state,
        training.batch_size(site.examples),
    )


class _BundleShapes:
    """Names, shapes and dtypes of a bundle, quickly compared."""

    def __init__(self, bundle: Bundle) -> None:
        self.all = tuple((k, name, t.shape, t.dtype) for k, group in bundle.items() for name, t in group.items())
        self.hash = hash(self.all)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _BundleShapes) and self.all == other.all)


def why_not_stackable(job: Fit, network: LiveNetwork) -> str:
    """Why a job cannot be stacked; "" if it can."""
    if job.full_batch and len(job.sequence) > 1:
        return "several steps on full gradients are taken site by site"
    if not all(isinstance(step.objective, Hashable) for step in job.sequence):
        return "its objective cannot be told from another's (it has no hash)"
    if not is_plain_sgd(job.training.private):
        if len(job.sequence) > 1:
            return "several private steps on a batch are taken site by site"
        if job.sequence[0].objective not in SEPARABLE:
            return "its objective may mix examples, so these are clipped one by one"
    shared = network.shared_random_layers
    return f"{shared} draws from a generator that sites would share" if shared else ""


def fit_stacked(members: Sequence[StackMember], network: LiveNetwork, compiled: bool = False) -> list[Fitted]:
    """What `fit` gives for each seat alone, up to rounding. `compiled` pays after some thousand steps."""
    first, network = members[0].job, network.stackable_copy
    training, steps = first.training, first.sequence
    moving = [network.trainable_names(training.fine_tune, step.train) for step in steps]
    network.set_training_mode(frozenset().union(*moving))
    weights = {
        "model": _stack_tensors([s.job.weights["model"] for s in members], network.device),
        # Each by itself: batch normalisation writes into a copy of what does not lie by itself, and its work is lost.
        "buffers": _stack_tensors([dict(s.job.weights.get("buffers", {})) for s in members], network.device),
    }
    reference = {k: _stack_tensors([s.job.reference[k] for s in members], network.device) for k in first.reference}
    optimisers = [StackedOptimiser(training.optimiser, members[0].site.lr, number) for number in range(len(steps))]
    if first.optimiser_state is not None:
        state = _stack_tensors([s.job.optimiser_state or {} for s in members], network.device)
        for optimiser in optimisers:
            optimiser.load_state(state)
    table = StackSchedule(members, network.device, compiled, network.has_dropout)
    losses, gathered = torch.zeros(len(members), device=network.device), dict[str, Tensor]()
    noise = None if is_plain_sgd(training.private) else StackedNoise(members, network)
    precise = network.use_precision(training.precision)
    with precise, _match_convolution_precision(network.device), table.open_batches() as served:
        for turn, batch in served:
            keys = network.dropout_buffers(turn.keys)
            for step, names, optimiser in zip(steps, moving, optimisers, strict=True):
                here, aside = _select_rows(weights, turn.computed), _select_rows(reference, turn.computed)
                if turn.members_among_computed is not None:  # not everyone's statistics may move
                    here = {**here, "buffers": {name: t.clone() for name, t in here["buffers"].items()}}
                if noise is None:
                    call = _gradient_function(network, step.objective, names, compiled and turn.computes_all)
                    grads, loss = call(here, keys, batch, aside)
                else:
                    sums = _clipped_sum_function(
                        network, step.objective, names, training, compiled and turn.computes_all
                    )
                    grads, loss, lost = sums(here, keys, batch, turn.present, aside)
                    loss = torch.where(loss.isfinite(), loss, 0)
                    _add_rows(noise.dropped, turn.select_members({"": lost})[""], turn.members)
                if turn.members is not None:
                    grads, loss = turn.select_members(grads), turn.select_members({"": loss})[""]
                    _write_rows(weights["buffers"], turn.select_members(here["buffers"]), turn.members)
                if turn.step_fractions is not None:
                    parts = turn.step_fractions if noise is None else torch.ones_like(turn.step_fractions)
                    grads = _accumulate_gradients(
                        gathered, grads, parts, turn.members, len(members), turn.completes_step
                    )
                if turn.completes_step:
                    if noise is not None:
                        grads = noise.add_noise(grads, turn)
                        for name, free in turn.select_members(
                            noise.data_free_gradients(step.objective, names, here, aside)
                        ).items():
                            grads[name] += free
                    optimiser.step(weights["model"], grads, turn.members)
            _add_rows(losses, loss if turn.step_fractions is None else loss * turn.step_fractions, turn.members)
    dropped = [0] * len(members) if noise is None else noise.dropped.tolist()
    return _split_results(members, weights, optimisers, losses, table.steps, dropped)


def _stack_tensors(groups: Sequence[Tensors], device: torch.device) -> Tensors:
    """One tensor per name, with a row per site; where a site's tensors are one vector, so are its rows."""
    first = groups[0]
    if not isinstance(first, FlatTensors) or not all(
        isinstance(group, FlatTensors) and group.has_layout_of(first) for group in groups
    ):
        return move_tensors({name: torch.stack([group[name] for group in groups]) for name in first}, device)
    vectors = [group.vector for group in groups if isinstance(group, FlatTensors)]
    if all(vector is first.vector for vector in vectors):
        block = first.vector.to(device).expand(len(groups), -1).clone()
    else:
        block = torch.stack(vectors).to(device)
    pieces = torch.split(block, [t.numel() for t in first.values()], dim=1)
    return {n: p.view(len(groups), *t.shape) for (n, t), p in zip(first.items(), pieces, strict=True)}


def _select_rows(bundle: Bundle, sites: Tensor | None) -> Bundle:
    if sites is None:
        return bundle
    return {kind: {name: tensor[sites] for name, tensor in group.items()} for kind, group in bundle.items()}


def _write_rows(into: Tensors, values: Tensors, members: Tensor) -> None:
    for name, value in values.items():
        into[name][members] = value


def _add_rows(total: Tensor, values: Tensor, members: Tensor | None) -> None:
    if members is None:
        total += values
    else:
        total[members] += values


def _accumulate_gradients(
    total: Tensors, grads: Tensors, step_fractions: Tensor, members: Tensor | None, sites: int, last: bool
) -> Tensors:
    """The members' gradients so far, over the batches of a step, weighted by their `shares` of the examples."""
    rows: Any = slice(None) if members is None else members
    for name, grad in grads.items():
        if name not in total:
            total[name] = grad.new_zeros(sites, *grad.shape[1:])
        total[name][rows] += grad * step_fractions.reshape(-1, *[1] * (grad.ndim - 1)).to(grad.dtype)
    found = {name: total[name][rows].clone() for name in grads}
    if last:
        for name in grads:
            total[name][rows] = 0
    return found


GradientFunction = Callable[[Bundle, Tensors, Batch, Bundle], tuple[Tensors, Tensor]]


def _gradient_function(
    network: LiveNetwork, objective: Objective, names: frozenset[str], compiled: bool
) -> GradientFunction:
    """(stacked weights, dropout's keys, stacked batch, stacked reference) -> gradient and loss of every site."""
    key = (objective, names, compiled)
    if key not in network.stacked_functions:
        network.stacked_functions[key] = _make_gradient_function(network, objective, names, compiled)
    found: GradientFunction = network.stacked_functions[key]
    return found


def _clipped_sum_function(
    network: LiveNetwork, objective: Objective, names: frozenset[str], training: Training, compiled: bool
) -> ClippedSumFunction:
    """The same for private steps: (…, reference) -> sum of clipped gradients, loss, examples dropped of every site."""
    assert training.private is not None
    clip = training.private.clip
    key = ("private", objective, names, clip, training.precision, compiled)
    if key not in network.stacked_functions:
        with _translate_errors(compiled):
            network.stacked_functions[key] = make_clipped_sum_function(network, objective, names, clip, compiled)
    made: ClippedSumFunction = network.stacked_functions[key]

    def call(*arguments: Any) -> tuple[Tensors, Tensor, Tensor]:
        with _translate_errors(compiled):
            return made(*arguments)

    return call


@contextmanager
def _translate_errors(compiled: bool) -> Iterator[None]:
    try:
        yield
    except NotRecordableError as error:
        raise NotStackableError(f"its examples are clipped one by one: {error}") from error
    except RuntimeError as error:
        if compiled or isinstance(error, torch.OutOfMemoryError):
            raise
        # If the objective itself is wrong, each site's own training will say so.
        raise NotStackableError(f"its objective cannot be: {' '.join(str(error).split())[:120]}") from error


def _make_gradient_function(
    network: LiveNetwork, objective: Objective, names: frozenset[str], compiled: bool
) -> GradientFunction:
    def loss(moving: Tensors, still: Tensors, buffers: Tensors, keys: Tensors, batch: Batch, aside: Bundle) -> Tensor:
        seen = KeyedNetwork(network, keys) if keys else network
        return objective(seen, {"model": {**still, **moving}, "buffers": buffers}, batch, aside)

    def stacked(*arguments: Any) -> Tensor:
        found: Tensor = vmap(loss, randomness="error")(*arguments)
        return found

    if compiled:  # this function, not what vmap returns: the compiler passes over torch's own
        stacked = compiled_function(stacked, network.device)

    def call(weights: Bundle, keys: Tensors, batch: Batch, aside: Bundle) -> tuple[Tensors, Tensor]:
        moving = {name: w.detach().requires_grad_() for name, w in weights["model"].items() if name in names}
        still = {name: w for name, w in weights["model"].items() if name not in names}
        with _translate_errors(compiled):
            losses = stacked(moving, still, weights["buffers"], keys, batch, aside)
        # No site's loss depends on another's weights: the gradient of their sum holds everyone's own.
        found = torch.autograd.grad(losses.sum(), list(moving.values()), allow_unused=True)
        grads = {name: grad for name, grad in zip(moving, found, strict=True) if grad is not None}
        return grads, losses.detach()

    return call


@contextmanager
def _match_convolution_precision(device: torch.device) -> Iterator[None]:
    """On CUDA, convolutions round to TF32 unless told otherwise; here they are matrix products, which would not."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _split_results(
    members: Sequence[StackMember],
    weights: Bundle,
    optimisers: Sequence[StackedOptimiser],
    losses: Tensor,
    steps: list[int],
    dropped: list[int],
) -> list[Fitted]:
    """Every site's own share of the stack, as views of it."""
    keep = members[0].job.optimiser_state is not None
    state = {name: t for optimiser in optimisers for name, t in optimiser.state().items()} if keep else {}
    starts = {kind: [seat.job.weights.get(kind) for seat in members] for kind in weights}
    apart = {kind: _split_rows(group, starts.get(kind, [])) for kind, group in {**weights, "": state}.items()}
    found = []
    for number, (count, total) in enumerate(zip(steps, losses.tolist(), strict=True)):
        mine = {kind: rows[number] if rows else {} for kind, rows in apart.items()}
        own = mine.pop("")
        found.append(Fitted(mine, count, total / max(count, 1), own, dropped[number]))
    return found


def _split_rows(group: Tensors, starts: Sequence[Tensors | None]) -> list[Tensors]:
    """Each site's tensors; as one vector, where a site's lie side by side, with the way it has come from the start."""
    split = zip(*(tensor.unbind() for tensor in group.values()), strict=True)
    rows = [dict(zip(group, tensors, strict=True)) for tensors in split]
    vector = contiguous_vector([tensor for row in rows[:2] for tensor in row.values()])
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
