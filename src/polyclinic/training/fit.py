"""The one training loop, and its counterpart that only looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from polyclinic.core.contract import (
    Batch,
    Bundle,
    Examples,
    Fit,
    Fitted,
    Optimiser,
    Score,
    Site,
    Step,
    Stream,
    Tensors,
    Training,
)
from polyclinic.training.augment import augment_images
from polyclinic.training.dp.dp_sgd import (
    PrivateGradients,
    draw_poisson_batches,
    is_plain_sgd,
    max_physical_batch,
    sampling_rate,
)
from polyclinic.training.keyed_dropout import dropout_key, first_key
from polyclinic.training.network import LiveNetwork
from polyclinic.training.prefetch import prefetch_batches, to_device


def draw_epoch_order(labels: Tensor, training: Training, stream: Stream, weights: Tensor | None = None) -> Tensor:
    """One epoch's examples in random order, minority classes repeated if the recipe says so.

    With `weights`: drawn one after another from those that are left, each in proportion to its weight. A repeat is
    drawn by itself, with the weight of its example.
    """
    generator = stream.generator()
    pool = oversample_classes(labels, generator) if training.oversample else torch.arange(len(labels))
    if weights is None:
        return pool[torch.randperm(len(pool), generator=generator)]
    # The first of exponential waiting times with rates w is i with probability w_i / Σw, and so on for those that
    # are left, as waiting has no memory (Efraimidis and Spirakis 2006).
    waiting = -torch.log1p(-torch.rand(len(pool), generator=generator, dtype=torch.float64))
    return pool[(waiting / weights[pool]).argsort(stable=True)]


def oversample_classes(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Every example once, then random repeats of each class until all are as frequent as the largest."""
    here = labels.cpu()
    counts = here.bincount()
    chosen = [torch.arange(len(here))]
    for value in counts.nonzero().squeeze(1).tolist():
        members = (here == value).nonzero().squeeze(1)
        missing = int(counts.max()) - len(members)
        chosen.append(members[torch.randint(len(members), (missing,), generator=generator)])
    return torch.cat(chosen)


def draw_epoch_batches(
    labels: Tensor, training: Training, stream: Stream, weights: Tensor | None = None
) -> list[Tensor]:
    """One epoch cut into batches. A single left-over example joins the batch before it (BatchNorm needs two).

    The order is made on the CPU and sent to where the labels are as a whole: batch by batch the host would wait.
    """
    size = training.batch_size(len(labels))
    cut = list(torch.split(to_device(draw_epoch_order(labels, training, stream, weights), labels.device), size))
    if len(cut) > 1 and len(cut[-1]) == 1 < size:
        cut[-2:] = [torch.cat(cut[-2:])]
    return cut


def batches_per_epoch(examples: int, batch: int) -> int:
    """How many batches `batches` cuts that many examples into."""
    whole, left = divmod(examples, batch)
    return max(1, whole + (left > 1 or (left == 1 and whole == 0)))


def regular_rounds_before(training: Training, round: int) -> int:
    """How many rounds of the usual length came before; −1: this is the first, and has a length of its own."""
    return round - 1 - (training.first_epochs is not None)


def iterate_steps(
    labels: Tensor,
    training: Training,
    stream: Stream,
    round: int,
    whole: bool,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Iterator[tuple[int, list[Tensor]]]:
    """Each step of one round: its number and its batches.

    Epochs and steps are numbered over the whole run, so averaging more often changes when sites meet, not what they
    see: the same site draws the same order in epoch e whether that epoch is a round, a part of one, or spans several,
    and changes the images of step s in the same way. `weights` as in `Fit.order`.
    """
    first, before = training.first_epochs or 0, regular_rounds_before(training, round)
    epochs = training.first_epochs if before < 0 else training.epochs
    if epochs is not None:
        start = 0 if before < 0 else first + before * epochs
        for epoch in range(start, start + epochs):
            cut = draw_epoch_batches(labels, training, stream.child("order", epoch), weights[0])
            steps_of_epoch = [cut] if whole else [[index] for index in cut]
            yield from enumerate(steps_of_epoch, epoch * len(steps_of_epoch))
    else:
        steps = training.steps or 1
        per_epoch = len(draw_epoch_batches(labels, training, stream.child("order", 0)))
        epoch, cut = -1, []
        for position in range(first * per_epoch + before * steps, first * per_epoch + (before + 1) * steps):
            if position // per_epoch != epoch:
                epoch = position // per_epoch
                cut = draw_epoch_batches(
                    labels, training, stream.child("order", epoch), weights[position % per_epoch > 0]
                )
            yield position, [cut[position % per_epoch]]


def iterate_poisson_steps(
    labels: Tensor, training: Training, secret: Stream, round: int, whole: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """The same for steps that every example joins by itself; a step nobody joins has no batch."""
    per_epoch = 1 if whole else batches_per_epoch(len(labels), training.batch_size(len(labels)))
    steps = (training.steps or 1) if training.epochs is None else training.epochs * per_epoch
    rate, most = sampling_rate(training, len(labels), whole), max_physical_batch(training, len(labels), whole)
    drawn = draw_poisson_batches(len(labels), rate, steps, secret.child("sample"))
    everyone = to_device(torch.cat([torch.zeros(0, dtype=torch.int64), *drawn]), labels.device)
    joined = torch.split(everyone, [len(index) for index in drawn])
    yield from enumerate(([*torch.split(index, most)] if len(index) else [] for index in joined), (round - 1) * steps)


def schedule_steps(
    job: Fit, labels: Tensor, stream: Stream, secret: Stream | None, round: int
) -> list[tuple[int, list[Tensor]]]:
    """Every step of a job in one round: its number in the run and its batches."""
    private = job.training.private
    if private is None or private.sampling == "shuffle" or secret is None:
        return list(iterate_steps(labels, job.training, stream, round, job.full_batch, job.order))
    return list(iterate_poisson_steps(labels, job.training, secret, round, job.full_batch))


def make_optimiser(parameters: list[torch.nn.Parameter], options: Optimiser, lr: float) -> torch.optim.Optimizer:
    if options.name == "sgd":
        return torch.optim.SGD(parameters, lr, options.momentum, weight_decay=options.weight_decay)
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr, weight_decay=options.weight_decay)


def fit(
    job: Fit, network: LiveNetwork, data: Examples, site: Site, stream: Stream, secret: Stream | None = None
) -> Fitted:
    """Train from `job.weights` on `data`; `stream` is the site's, so its data order does not depend on the engine.

    Private training draws who joins a step, and its noise, from `secret`, which never leaves the site.
    """
    live, training = network.load_weights(job.weights), job.training
    steps = job.sequence
    moving = [network.trainable_names(training.fine_tune, step.train) for step in steps]
    network.set_training_mode(frozenset().union(*moving))
    plain = is_plain_sgd(training.private)
    private = None if plain else PrivateGradients(job, network, live, len(data), secret)
    # A copy: a network that is called with weights from it, in training mode, writes into their statistics.
    reference = {k: {n: t.to(network.device, copy=True) for n, t in g.items()} for k, g in job.reference.items()}
    optimisers = [make_optimiser(network.require_gradients(n), training.optimiser, site.lr) for n in moving]
    restore_optimisers(optimisers, network, moving, job.optimiser_state)
    total, key = torch.zeros((), device=network.device), first_key(stream)
    plan = schedule_steps(job, data.labels, stream, secret, site.round)
    turns = (index for _, micro in plan for _ in steps for index in micro)
    with (
        seed_generators(stream.child("dropout", site.round), network.device),
        network.use_precision(training.precision),
        network.use_checkpointing(private is None),  # private steps note what every layer sees, once
        prefetch_batches(data, turns, network.device) as fed,
    ):
        for number, micro in plan:
            sizes = [len(index) for index in micro]
            for which, (step, names, optimiser) in enumerate(zip(steps, moving, optimisers, strict=True)):
                if len(steps) > 1:
                    network.require_gradients(names)
                optimiser.zero_grad(set_to_none=True)
                look = augment_batches(islice(fed, len(micro)), training, stream.child("augment", number))
                look = key_dropout(look, network, key, number)
                if private is None:
                    loss = _accumulate_gradient(step, network, live, look, sizes, reference)
                else:
                    loss = private.set_gradients(
                        step, names, look, sizes, reference, private.noise_stream(number, which)
                    )
                optimiser.step()
            total += loss
    state = {} if job.optimiser_state is None else collect_optimiser_state(optimisers, network, moving)
    dropped = 0 if private is None else int(private.dropped)
    return Fitted(network.copy_weights(), len(plan), float(total) / max(len(plan), 1), state, dropped)


def augment_batches(batches: Iterator[Batch], training: Training, stream: Stream) -> Iterator[Batch]:
    """The batches of one step as it sees them."""
    for position, batch in enumerate(batches):
        yield augment_batch(*batch, training, stream.child(position))


def augment_batch(images: Tensor, labels: Tensor, training: Training, stream: Stream) -> Batch:
    """One batch as a step sees it; where private training asks for several views of an example, one after another."""
    views = 1 if training.private is None else training.private.views
    if views > 1:
        images, labels = images.repeat_interleave(views, 0), labels.repeat_interleave(views, 0)
    return (images if training.augment is None else augment_images(images, training.augment, stream)), labels


def key_dropout(batches: Iterator[Batch], network: LiveNetwork, first: int, number: int) -> Iterator[Batch]:
    """The same batches, each with a dropout of its own."""
    for position, batch in enumerate(batches):
        network.set_dropout_key(dropout_key(first, number, position))
        yield batch


def _accumulate_gradient(
    step: Step, network: LiveNetwork, live: Bundle, batches: Iterator[Batch], sizes: Sequence[int], reference: Bundle
) -> Tensor:
    """Leave the gradient of the mean over all `batches` in the parameters; returns the mean loss, detached."""
    if len(sizes) == 1:
        loss = step.objective(network, live, next(batches), reference)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
    total, examples = torch.zeros((), device=network.device), sum(sizes)
    for size, batch in zip(sizes, batches, strict=True):
        loss = step.objective(network, live, batch, reference) * (size / examples)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@contextmanager
def seed_generators(stream: Stream, device: torch.device) -> Iterator[None]:
    """Whatever the network draws (dropout, stochastic depth) comes from `stream`; no generator is left changed."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        # torch.manual_seed would also reseed accelerators that were not forked.
        torch.default_generator.manual_seed(stream.integer())
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(stream.integer())
        yield


def collect_optimiser_state(
    optimisers: Sequence[torch.optim.Optimizer], network: LiveNetwork, moving: Sequence[frozenset[str]]
) -> Tensors:
    """What the optimisers remember, by `step/slot/parameter`: the job's steps have an optimiser each."""
    state: Tensors = {}
    for number, (optimiser, names) in enumerate(zip(optimisers, moving, strict=True)):
        for name in sorted(names):
            for slot, value in optimiser.state.get(network.live["model"][name], {}).items():
                if isinstance(value, Tensor):
                    state[f"{number}/{slot}/{name}"] = value.detach().to("cpu", copy=True)
    return state


def restore_optimisers(
    optimisers: Sequence[torch.optim.Optimizer],
    network: LiveNetwork,
    moving: Sequence[frozenset[str]],
    state: Tensors | None,
) -> None:
    for path, value in (state or {}).items():
        number, slot, name = path.split("/", 2)
        if name in moving[int(number)]:
            parameter = network.live["model"][name]
            device = torch.device("cpu") if slot == "step" else parameter.device
            optimisers[int(number)].state[parameter][slot] = value.to(device, copy=True)


def evaluation_batch_size(device: torch.device) -> int:
    """Images of an evaluation batch: on a CPU few, so that evaluating takes no more memory than training did."""
    return 64 if device.type == "cpu" else 512


@torch.no_grad()
def score(job: Score, network: LiveNetwork, data: Examples, batch: int | None = None) -> Tensors:
    """`job.function` over all of `data`, in its own order, in evaluation mode."""
    weights = network.load_weights(job.weights, classifier_only=True)
    network.set_eval_mode()
    reference = {k: {n: t.to(network.device) for n, t in g.items()} for k, g in job.reference.items()}
    size = batch or job.batch or evaluation_batch_size(network.device)
    turns = torch.split(torch.arange(len(data), device=data.labels.device), size)
    with prefetch_batches(data, turns, network.device) as fed:
        parts = ((len(found[1]), job.function(network, weights, found, reference)) for found in fed)
        if job.reduce == "mean":
            return _weighted_mean(parts, len(data))
        rows = [found for _, found in parts]
    return {name: torch.cat([found[name] for found in rows]) for name in rows[0]} if rows else {}


def _weighted_mean(parts: Iterator[tuple[int, Tensors]], examples: int) -> Tensors:
    """One copy at a time: what a batch gives may be as large as the model."""
    mean: Tensors = {}
    for count, found in parts:
        share = count / max(examples, 1)
        mean = {name: mean[name].add_(t * share) if mean else t * share for name, t in found.items()}
    return mean
