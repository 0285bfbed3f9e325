"""Many sites' training jobs as one: parameters are stacked, and `torch.func.vmap` maps over sites.

Each site gets the numbers that it gets alone, BatchNorm included. Sites of unequal size do not wait for each other: a
call takes all sites whose next batch has the same length. All that calls need is on the device before the first one.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from polyclinic.core import (
    Batch,
    Bundle,
    Fit,
    Fitted,
    FlatDifference,
    FlatTensors,
    Objective,
    Site,
    Tensors,
    Training,
    contiguous_vector,
    layout_of,
)
from polyclinic.training.dp.dp_sgd import is_plain_sgd
from polyclinic.training.dp.per_example_gradients import NotRecordableError
from polyclinic.training.losses import SEPARABLE
from polyclinic.training.network import LiveNetwork, move_tensors
from polyclinic.training.stacked.batching import StackMember, StackSchedule
from polyclinic.training.stacked.compile import compile_function, use_matmul_precision
from polyclinic.training.stacked.dp import ClippedSumFunction, KeyedNetwork, StackedNoise, make_clipped_sum_function
from polyclinic.training.stacked.optimisers import StackedOptimiser


class NotStackableError(Exception):
    """An objective that `vmap` cannot map: it branches on values, draws random numbers, or writes in place."""


def job_signature(job: Fit, site: Site, cache: dict[Any, Any] | None = None) -> tuple[Any, ...]:
    """Return a key that is equal for jobs that can run as one stack; their noise may differ.

    `cache` keeps the shapes of bundles that many jobs share; pass the same dictionary for all jobs of a round.
    """
    cache = {} if cache is None else cache
    identity = tuple(id(group) for group in job.weights.values())
    if identity not in cache:
        cache[identity] = _BundleShapes(job.weights)
    state = None if job.optimiser_state is None else _BundleShapes({"": job.optimiser_state})
    reference = _BundleShapes(job.reference) if job.reference else None
    training, batch = job.training, job.training.batch_size(site.examples)
    if training.private is not None:
        training = replace(training, private=replace(training.private, noise=0.0))
    return job.sequence, training, job.full_batch, site.lr, cache[identity], reference, state, batch


class _BundleShapes:
    """The names, shapes and dtypes of a bundle, with a hash that is computed once."""

    def __init__(self, bundle: Bundle) -> None:
        self.all = tuple((k, name, t.shape, t.dtype) for k, group in bundle.items() for name, t in group.items())
        self.hash = hash(self.all)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _BundleShapes) and self.all == other.all)


def why_not_stackable(job: Fit, network: LiveNetwork) -> str:
    """Return why a job cannot be stacked; "" if it can."""
    if job.full_batch and len(job.sequence) > 1:
        return "jobs with several full-batch steps are computed site by site"
    if not all(isinstance(step.objective, Hashable) for step in job.sequence):
        return "its objective cannot be compared with another's (it has no hash)"
    if not is_plain_sgd(job.training.private):
        if len(job.sequence) > 1:
            return "jobs with several private steps on a batch are computed site by site"
        if job.training.private is not None and job.training.private.unit == "patient":
            return "patients have different numbers of images, so they are drawn and clipped site by site"
        if job.sequence[0].objective not in SEPARABLE:
            return "its objective may mix examples, so their gradients are clipped one by one"
    shared = network.shared_random_layers
    return f"{shared} draws from a generator that sites would share" if shared else ""


def fit_stacked(members: Sequence[StackMember], network: LiveNetwork, compiled: bool = False) -> list[Fitted]:
    """Run the jobs of many sites as one.

    Args:
        members: The sites' jobs, whose `job_signature` is equal and which `why_not_stackable` does not reject.
        network: The network that computes them.
        compiled: Compile the functions of a step. This pays after some thousand steps.

    Returns:
        What `fit` returns for each site alone, up to rounding.
    """
    first, network = members[0].job, network.stackable_copy
    device, training, steps = network.device, first.training, first.sequence
    moving = [network.trainable_names(training.fine_tune, step.train) for step in steps]
    network.set_training_mode(frozenset().union(*moving))
    weights = {
        "model": _stack_tensors([m.job.weights["model"] for m in members], device),
        # `dict`, so that they are stacked one by one: BatchNorm copies tensors that lie in a common vector before it
        # writes into them, so that its updates would be lost.
        "buffers": _stack_tensors([dict(m.job.weights.get("buffers", {})) for m in members], device),
    }
    reference = {kind: _stack_tensors([m.job.reference[kind] for m in members], device) for kind in first.reference}
    lr, names_of_sites = members[0].site.lr, [member.site.name for member in members]
    optimisers = [StackedOptimiser(training.optimiser, lr, number, names_of_sites) for number in range(len(steps))]
    if first.optimiser_state is not None:
        state = _stack_tensors([m.job.optimiser_state or {} for m in members], device)
        for optimiser in optimisers:
            optimiser.load_state(state)
    schedule = StackSchedule(members, device, compiled, bool(network.dropouts))
    noise = None if is_plain_sgd(training.private) else StackedNoise(members, network)
    losses, gathered = torch.zeros(len(members), device=device), dict[str, Tensor]()
    # Matrix products round to TF32 on CUDA if convolutions do, since here they take the convolutions' place.
    rounded = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    with (
        network.use_precision(training.precision),
        use_matmul_precision("high" if rounded else torch.get_float32_matmul_precision()),
        schedule.open_batches() as batches,
    ):
        for turn, batch in batches:
            keys, compile_step = network.dropout_buffers(turn.keys), compiled and turn.computed is None
            for step, names, optimiser in zip(steps, moving, optimisers, strict=True):
                rows, refs = _select_rows(weights, turn.computed), _select_rows(reference, turn.computed)
                if turn.members_among_computed is not None:  # the statistics of the other sites must not move
                    rows = {**rows, "buffers": {name: t.clone() for name, t in rows["buffers"].items()}}
                if noise is None:
                    gradients_and_losses = _gradient_function(network, step.objective, names, compile_step)
                    grads, loss = gradients_and_losses(rows, keys, batch, refs)
                else:
                    clipped_sum = _clipped_sum_function(network, step.objective, names, training, compile_step)
                    grads, loss, dropped = clipped_sum(rows, keys, batch, turn.present, refs)
                    loss = torch.where(loss.isfinite(), loss, 0)
                    _add_rows(noise.dropped, turn.select_members({"": dropped})[""], turn.members)
                if turn.members is not None:
                    grads, loss = turn.select_members(grads), turn.select_members({"": loss})[""]
                    for name, value in turn.select_members(rows["buffers"]).items():
                        weights["buffers"][name][turn.members] = value
                if turn.step_fractions is not None:
                    factors = turn.step_fractions if noise is None else torch.ones_like(turn.step_fractions)
                    grads = _accumulate_gradients(
                        gathered, len(members), grads, factors, turn.members, turn.completes_step
                    )
                if turn.completes_step:
                    if noise is not None:
                        grads = noise.add_noise(grads, turn)
                        free = noise.data_free_gradients(step.objective, names, rows, refs)
                        for name, gradient in turn.select_members(free).items():
                            grads[name] += gradient
                    optimiser.step(weights["model"], grads, turn.members)
            _add_rows(losses, loss if turn.step_fractions is None else loss * turn.step_fractions, turn.members)
    counts = [0] * len(members) if noise is None else noise.dropped.tolist()
    return _split_results(members, weights, optimisers, losses, schedule.steps, counts)


def _stack_tensors(groups: Sequence[Tensors], device: torch.device) -> Tensors:
    """Return one tensor per name with a row per site; if each site's tensors are one vector, so are its rows."""
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


def _add_rows(total: Tensor, values: Tensor, members: Tensor | None) -> None:
    total[... if members is None else members] += values


def _accumulate_gradients(
    total: Tensors, sites: int, grads: Tensors, step_fractions: Tensor, members: Tensor | None, last: bool
) -> Tensors:
    """Return the members' gradients so far, summed over the batches of a step with weights `step_fractions`."""
    rows: Any = slice(None) if members is None else members
    for name, grad in grads.items():
        if name not in total:
            total[name] = grad.new_zeros(sites, *grad.shape[1:])
        total[name][rows] += grad * step_fractions.reshape(-1, *[1] * (grad.ndim - 1)).to(grad.dtype)
    gradients = {name: total[name][rows].clone() for name in grads}
    if last:
        for name in grads:
            total[name][rows] = 0
    return gradients


GradientFunction = Callable[[Bundle, Tensors, Batch, Bundle], tuple[Tensors, Tensor]]
"""(stacked weights, dropout keys, stacked batch, stacked reference) -> gradients and losses of every site."""


def _gradient_function(
    network: LiveNetwork, objective: Objective, names: frozenset[str], compiled: bool
) -> GradientFunction:
    """Return the function for plain steps, made once for each network."""
    key = (objective, names, compiled)
    if key not in network.stacked_functions:
        network.stacked_functions[key] = _make_gradient_function(network, objective, names, compiled)
    return cast(GradientFunction, network.stacked_functions[key])


def _clipped_sum_function(
    network: LiveNetwork, objective: Objective, names: frozenset[str], training: Training, compiled: bool
) -> ClippedSumFunction:
    """Return the function for private steps, made once for each network."""
    assert training.private is not None
    options = replace(training.private, noise=0.0)
    key = ("private", objective, names, options, training.precision, compiled)
    if key not in network.stacked_functions:
        with _translate_errors(compiled):
            network.stacked_functions[key] = make_clipped_sum_function(network, objective, names, options, compiled)
    function: ClippedSumFunction = network.stacked_functions[key]

    def call(*arguments: Any) -> tuple[Tensors, Tensor, Tensor]:
        with _translate_errors(compiled):
            return function(*arguments)

    return call


@contextmanager
def _translate_errors(compiled: bool) -> Iterator[None]:
    """Turn what `vmap` and recorded layers raise into `NotStackableError`."""
    try:
        yield
    except NotRecordableError as error:
        raise NotStackableError(f"its examples' gradients are clipped one by one: {error}") from error
    except RuntimeError as error:
        if compiled or isinstance(error, torch.OutOfMemoryError):
            raise
        # If the objective itself is wrong, each site's own training will say so.
        raise NotStackableError(f"vmap cannot map its objective: {' '.join(str(error).split())[:120]}") from error


def _make_gradient_function(
    network: LiveNetwork, objective: Objective, names: frozenset[str], compiled: bool
) -> GradientFunction:
    def site_loss(
        moving: Tensors, frozen: Tensors, buffers: Tensors, keys: Tensors, batch: Batch, reference: Bundle
    ) -> Tensor:
        keyed = KeyedNetwork(network, keys) if keys else network
        return objective(keyed, {"model": {**frozen, **moving}, "buffers": buffers}, batch, reference)

    def stacked(*arguments: Any) -> Tensor:
        return torch.func.vmap(site_loss, randomness="error")(*arguments)

    if compiled:  # this function, not what vmap returns: the compiler passes over torch's own
        stacked = compile_function(stacked, network.device)

    def call(weights: Bundle, keys: Tensors, batch: Batch, reference: Bundle) -> tuple[Tensors, Tensor]:
        moving = {name: w.detach().requires_grad_() for name, w in weights["model"].items() if name in names}
        frozen = {name: w for name, w in weights["model"].items() if name not in names}
        with _translate_errors(compiled):
            losses = stacked(moving, frozen, weights["buffers"], keys, batch, reference)
        # No site's loss depends on another's weights, so the gradient of their sum holds each site's own.
        gradients = torch.autograd.grad(losses.sum(), list(moving.values()), allow_unused=True)
        return {n: g for n, g in zip(moving, gradients, strict=True) if g is not None}, losses.detach()

    return call


def _split_results(
    members: Sequence[StackMember],
    weights: Bundle,
    optimisers: Sequence[StackedOptimiser],
    losses: Tensor,
    steps: list[int],
    dropped: list[int],
) -> list[Fitted]:
    """Return every site's result; its tensors are views of the stacked ones."""
    keep = members[0].job.optimiser_state is not None
    state = {name: t for optimiser in optimisers for name, t in optimiser.state().items()} if keep else {}
    states = _split_rows(state, []) or [{} for _ in members]
    split = {kind: _split_rows(group, [m.job.weights.get(kind) for m in members]) for kind, group in weights.items()}
    bundles = [{kind: rows[k] if rows else {} for kind, rows in split.items()} for k in range(len(members))]
    means = [total / max(count, 1) for total, count in zip(losses.tolist(), steps, strict=True)]
    return [Fitted(*result) for result in zip(bundles, steps, means, states, dropped, strict=True)]


def _split_rows(group: Tensors, starts: Sequence[Tensors | None]) -> list[Tensors]:
    """Return each site's tensors.

    If they are contiguous they become `FlatTensors`, with their distance from `starts` where all sites share these.
    """
    tensors_by_site = zip(*(tensor.unbind() for tensor in group.values()), strict=True)
    rows = [dict(zip(group, tensors, strict=True)) for tensors in tensors_by_site]
    vector = contiguous_vector([tensor for row in rows[:2] for tensor in row.values()])
    if vector is None or len(rows) < 2:
        return rows
    width = len(vector) // 2  # of the block that holds all rows, since it holds two of them side by side
    block = vector.as_strided((len(rows), width), (width, 1))
    first, layout = starts[0] if starts else None, layout_of(rows[0])
    differences: list[FlatDifference | None] = [None] * len(rows)
    alike = isinstance(first, FlatTensors) and first.layout == layout and all(start is first for start in starts)
    if isinstance(first, FlatTensors) and alike and first.vector.device == block.device:
        # For all sites at once, as each later question would wait for the device.
        norms = torch.linalg.vector_norm(block - first.vector, dim=1).tolist()
        differences = [FlatDifference(first.vector, norm) for norm in norms]
    return [
        FlatTensors(row.items(), vector, layout, difference)
        for row, vector, difference in zip(rows, block.unbind(), differences, strict=True)
    ]
