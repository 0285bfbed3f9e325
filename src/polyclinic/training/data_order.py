"""Which examples each optimiser step of a round trains on: shuffled epochs cut into batches, or Poisson samples.

Epochs and steps are numbered over the whole run, so averaging more often changes when sites meet, not what they see:
a site draws the same order in epoch e whether that epoch is a round, a part of one, or spans several rounds, and
augments the images of step s in the same way.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyclinic.core import EngineError, Fit, Stream, Training
from polyclinic.data.patients import Patients
from polyclinic.training.dp.dp_sgd import draw_poisson_batches, max_physical_batch, sampling_rate
from polyclinic.training.prefetch import to_device


def schedule_steps(
    job: Fit,
    labels: Tensor,
    stream: Stream,
    secret: Stream | None,
    round: int,
    patients: Sequence[str] | None = None,
) -> list[tuple[int, list[Tensor]]]:
    """List the optimiser steps of a job in one round.

    Args:
        job: The training job.
        labels: The labels of the site's training examples.
        stream: The site's random stream, which shuffles its epochs.
        secret: The stream of Poisson sampling, which private training needs.
        round: The round's number; 1 is the first.
        patients: The patient of each example, which private training by patient needs.

    Returns:
        For each step its number in the run and the rows of its batches, whose gradients it accumulates. Where patients
        join a step, a batch has a row for each patient, and columns for that patient's examples.
    """
    private = job.training.private
    if private is None or private.sampling == "shuffle" or secret is None:
        return list(iterate_steps(labels, job.training, stream, round, job.full_batch, job.sampling_weights))
    if private.unit == "patient":
        if patients is None:
            raise EngineError("a job that samples patients came to examples without patients")
        people = Patients.from_names(labels.cpu().numpy(), patients)
        return list(iterate_patient_steps(people, job.training, secret, round, job.full_batch))
    return list(iterate_poisson_steps(labels, job.training, secret, round, job.full_batch))


def iterate_steps(
    labels: Tensor,
    training: Training,
    stream: Stream,
    round: int,
    full_batch: bool,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each step of one round over shuffled epochs: its number and its batches. `weights`: as in `Fit.order`."""
    first, before = training.first_epochs or 0, regular_rounds_before(training, round)
    epochs = training.first_epochs if before < 0 else training.epochs
    if epochs is not None:
        start = 0 if before < 0 else first + before * epochs
        for epoch in range(start, start + epochs):
            cut = draw_epoch_batches(labels, training, stream.child("order", epoch), weights[0])
            steps_of_epoch = [cut] if full_batch else [[index] for index in cut]
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
    labels: Tensor, training: Training, secret: Stream, round: int, full_batch: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each step of one round, which every example joins independently. A step that nobody joins has no batch."""
    steps = steps_per_round(training, len(labels), full_batch)
    rate, most = sampling_rate(training, len(labels), full_batch), max_physical_batch(training, len(labels), full_batch)
    drawn = draw_poisson_batches(len(labels), rate, steps, secret.child("sample"))
    joined = to_device(torch.cat([torch.zeros(0, dtype=torch.int64), *drawn]), labels.device)
    batches = torch.split(joined, [len(index) for index in drawn])
    yield from enumerate(([*torch.split(index, most)] if len(index) else [] for index in batches), (round - 1) * steps)


def iterate_patient_steps(
    people: Patients, training: Training, secret: Stream, round: int, full_batch: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each step of one round, which every patient joins independently, with all examples.

    Rate and number of steps are those of as many examples that join by themselves. A batch holds patients with equally
    many examples: it has a row for each of them.
    """
    examples = len(people.of_image)
    steps = steps_per_round(training, examples, full_batch)
    rate, most = sampling_rate(training, examples, full_batch), max_physical_batch(training, examples, full_batch)
    rows, sizes = torch.from_numpy(people.of_image.argsort(kind="stable")), torch.from_numpy(people.sizes)
    first = sizes.cumsum(0) - sizes
    for number, drawn in enumerate(draw_poisson_batches(len(people), rate, steps, secret.child("sample"))):
        alike = ((size, drawn[sizes[drawn] == size]) for size in sorted(set(sizes[drawn].tolist())))
        batches = ((size, some) for size, who in alike for some in torch.split(who, max(1, most // size)))
        yield (
            (round - 1) * steps + number,
            [rows[first[some][:, None] + torch.arange(size)] for size, some in batches],
        )


def steps_per_round(training: Training, examples: int, full_batch: bool) -> int:
    """Count the steps of a round of Poisson sampling."""
    per_epoch = 1 if full_batch else batches_per_epoch(examples, training.batch_size(examples))
    return (training.steps or 1) if training.epochs is None else training.epochs * per_epoch


def regular_rounds_before(training: Training, round: int) -> int:
    """Count the earlier rounds of regular length; −1 for a first round with a length of its own (`first_epochs`)."""
    return round - 1 - (training.first_epochs is not None)


def batches_per_epoch(examples: int, batch: int) -> int:
    """Count the batches into which `draw_epoch_batches` cuts so many examples."""
    full, left = divmod(examples, batch)
    return max(1, full + (left > 1 or (left == 1 and full == 0)))


def draw_epoch_batches(
    labels: Tensor, training: Training, stream: Stream, weights: Tensor | None = None
) -> list[Tensor]:
    """Cut one shuffled epoch into batches. A single left-over example joins the last batch (BatchNorm needs two).

    The whole order is drawn on the CPU and copied to the labels' device at once: batch by batch the host would wait.
    """
    size = training.batch_size(len(labels))
    cut = list(torch.split(to_device(draw_epoch_order(labels, training, stream, weights), labels.device), size))
    if len(cut) > 1 and len(cut[-1]) == 1 < size:
        cut[-2:] = [torch.cat(cut[-2:])]
    return cut


def draw_epoch_order(labels: Tensor, training: Training, stream: Stream, weights: Tensor | None = None) -> Tensor:
    """Draw one epoch's examples in random order; with `training.oversample` minority classes are repeated.

    With `weights` examples are drawn without replacement, each next one in proportion to its weight. A repeat is drawn
    by itself, with the weight of its example.
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
    """List every example once, then random repeats of each class until all are as frequent as the largest."""
    labels = labels.cpu()
    counts = labels.bincount()
    chosen = [torch.arange(len(labels))]
    for value in counts.nonzero().squeeze(1).tolist():
        members = (labels == value).nonzero().squeeze(1)
        missing = int(counts.max()) - len(members)
        chosen.append(members[torch.randint(len(members), (missing,), generator=generator)])
    return torch.cat(chosen)
