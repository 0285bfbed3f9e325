"""The one training loop, and its counterpart that only looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from polyclinic.core import (
    Augment,
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
from polyclinic.learning.augment import augmented
from polyclinic.learning.network import LiveNetwork


def order(labels: Tensor, training: Training, stream: Stream) -> Tensor:
    """One epoch's examples in random order, minority classes repeated if the recipe says so."""
    generator = stream.generator()
    pool = oversampled(labels, generator) if training.oversample else torch.arange(len(labels))
    return pool[torch.randperm(len(pool), generator=generator)]


def oversampled(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Every example once, then random repeats of each class until all are as frequent as the largest."""
    counts = labels.cpu().bincount()
    chosen = [torch.arange(len(labels))]
    for value in counts.nonzero().squeeze(1).tolist():
        members = (labels.cpu() == value).nonzero().squeeze(1)
        missing = int(counts.max()) - len(members)
        chosen.append(members[torch.randint(len(members), (missing,), generator=generator)])
    return torch.cat(chosen)


def batches(labels: Tensor, training: Training, stream: Stream) -> list[Tensor]:
    """One epoch cut into batches. A single left-over example joins the batch before it (BatchNorm needs two)."""
    cut = list(torch.split(order(labels, training, stream), training.batch))
    if len(cut) > 1 and len(cut[-1]) == 1 < training.batch:
        cut[-2:] = [torch.cat(cut[-2:])]
    return cut


def batches_per_epoch(examples: int, batch: int) -> int:
    """How many batches `batches` cuts that many examples into."""
    whole, left = divmod(examples, batch)
    return max(1, whole + (left > 1 or (left == 1 and whole == 0)))


def walk(
    labels: Tensor, training: Training, stream: Stream, round: int, whole: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """Each step of one round: its number and its batches.

    Epochs and steps are numbered over the whole run, so averaging more often changes when sites meet, not what they
    see: the same site draws the same order in epoch e whether that epoch is a round, a part of one, or spans several,
    and changes the images of step s in the same way.
    """
    if training.epochs is not None:
        for epoch in range((round - 1) * training.epochs, round * training.epochs):
            cut = batches(labels, training, stream.child("order", epoch))
            steps_of_epoch = [cut] if whole else [[index] for index in cut]
            yield from enumerate(steps_of_epoch, epoch * len(steps_of_epoch))
    else:
        steps = training.steps or 1
        epoch, cut = -1, []
        for position in range((round - 1) * steps, round * steps):
            per_epoch = len(cut) or len(batches(labels, training, stream.child("order", 0)))
            if position // per_epoch != epoch:
                epoch = position // per_epoch
                cut = batches(labels, training, stream.child("order", epoch))
            yield position, [cut[position % per_epoch]]


def make_optimiser(parameters: list[torch.nn.Parameter], options: Optimiser, lr: float) -> torch.optim.Optimizer:
    if options.name == "sgd":
        return torch.optim.SGD(parameters, lr, options.momentum, weight_decay=options.weight_decay)
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr, weight_decay=options.weight_decay)


def fit(job: Fit, network: LiveNetwork, data: Examples, site: Site, stream: Stream) -> Fitted:
    """Train from `job.weights` on `data`; `stream` is the site's, so its data order does not depend on the engine."""
    live, training = network.load(job.weights), job.training
    steps = job.sequence
    moving = [network.trainable(training.fine_tune, step.train) for step in steps]
    network.training_mode(frozenset().union(*moving))
    reference = {k: {n: t.to(network.device) for n, t in g.items()} for k, g in job.reference.items()}
    optimisers = [make_optimiser(network.require_gradients(n), training.optimiser, site.lr) for n in moving]
    restore_optimisers(optimisers, network, moving, job.optimiser_state)
    count, total = 0, torch.zeros((), device=network.device)
    with draws_from(stream.child("dropout", site.round), network.device):
        for number, micro in walk(data.labels, training, stream, site.round, job.whole):
            look = partial(seen, data, training.augment, stream.child("augment", number))
            for step, names, optimiser in zip(steps, moving, optimisers, strict=True):
                if len(steps) > 1:
                    network.require_gradients(names)
                optimiser.zero_grad(set_to_none=True)
                loss = _gradient(step, network, live, look, micro, reference)
                optimiser.step()
            total += loss
            count += 1
    state = {} if job.optimiser_state is None else optimiser_state(optimisers, network, moving)
    return Fitted(network.take(), count, float(total) / max(count, 1), state)


def seen(data: Examples, augment: Augment | None, stream: Stream, position: int, index: Tensor) -> Batch:
    """The examples at `index` as a step sees them; `position` is the batch's among those of the step."""
    images, labels = data.batch(index)
    return (images if augment is None else augmented(images, augment, stream.child(position))), labels


def _gradient(
    step: Step,
    network: LiveNetwork,
    live: Bundle,
    look: Callable[[int, Tensor], Batch],
    micro: list[Tensor],
    reference: Bundle,
) -> Tensor:
    """Leave the gradient of the mean over `micro` in the parameters; returns the mean loss, detached."""
    if len(micro) == 1:
        loss = step.objective(network, live, look(0, micro[0]), reference)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
    examples = sum(len(index) for index in micro)
    total = torch.zeros((), device=network.device)
    for position, index in enumerate(micro):
        loss = step.objective(network, live, look(position, index), reference) * (len(index) / examples)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@contextmanager
def draws_from(stream: Stream, device: torch.device) -> Iterator[None]:
    """Whatever the network draws (dropout, stochastic depth) comes from `stream`; no generator is left changed."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        # torch.manual_seed would also reseed accelerators that were not forked.
        torch.default_generator.manual_seed(stream.integer())
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(stream.integer())
        yield


def optimiser_state(
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


@torch.no_grad()
def score(job: Score, network: LiveNetwork, data: Examples, batch: int) -> Tensors:
    """`job.function` over all of `data`, in its own order, in evaluation mode."""
    weights = network.load(job.weights)
    network.evaluation_mode()
    reference = {k: {n: t.to(network.device) for n, t in g.items()} for k, g in job.reference.items()}
    parts = [
        (len(index), job.function(network, weights, data.batch(index), reference))
        for index in torch.split(torch.arange(len(data)), batch)
    ]
    if not parts:
        return {}
    if job.reduce == "cat":
        return {name: torch.cat([rows[name] for _, rows in parts]).cpu() for name in parts[0][1]}
    return {
        name: sum((rows[name] * (n / len(data)) for n, rows in parts), torch.zeros(())).cpu() for name in parts[0][1]
    }
