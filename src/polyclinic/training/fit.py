"""The training loop (`fit`), and the loop that evaluates a function without training (`score`)."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from polyclinic.core import (
    Batch,
    Bundle,
    Examples,
    Fit,
    Fitted,
    Optimiser,
    Score,
    Site,
    SiteId,
    Step,
    Stream,
    Tensors,
    Training,
)
from polyclinic.core.rng import seed_generators
from polyclinic.training.augment import augment_images
from polyclinic.training.data_order import schedule_steps
from polyclinic.training.dp.dp_sgd import PrivateGradients, is_plain_sgd
from polyclinic.training.keyed_dropout import dropout_key, first_key, row_keys
from polyclinic.training.network import LiveNetwork
from polyclinic.training.prefetch import prefetch_batches


@dataclass(frozen=True)
class MultiSiteFit(Fit):
    """A training job for all sites of one place at once, with a loop of its own, for algorithms that pool all images.
    The site runner calls `fit_sites` in the place of `fit`."""

    @abstractmethod
    def fit_sites(self, network: LiveNetwork, images: Mapping[SiteId, Examples], site: Site, stream: Stream) -> Fitted:
        """Train on the `images` of each site; `site` and `stream` are those of the place that has them all."""


def fit(
    job: Fit, network: LiveNetwork, data: Examples, site: Site, stream: Stream, secret: Stream | None = None
) -> Fitted:
    """Run a training job on a site's examples.

    Args:
        job: The weights to start from, the objectives, the options, and what the objectives refer to.
        network: The network that computes the job. Its weights are overwritten.
        data: The site's training examples.
        site: The site's round and learning rate.
        stream: The site's random stream. Data order, augmentation and dropout are drawn from it, so they do not depend
            on the engine.
        secret: The stream of Poisson sampling and DP-SGD's noise, and of the augmentation and dropout of private jobs,
            which need it. It never leaves the site.

    Returns:
        The trained weights (on the network's device), the number of steps, the mean loss of a step, the
        number of dropped gradients (private training) and, if the job names an optimiser state, the new one.
    """
    live, training, steps = network.load_weights(job.weights), job.training, job.sequence
    moving = [network.trainable_names(training.fine_tune, step.train) for step in steps]
    network.set_training_mode(frozenset().union(*moving))
    by_patient = training.private is not None and training.private.unit == "patient"
    patients = len(set(data.patients or ())) if by_patient else None
    private = (
        None if is_plain_sgd(training.private) else PrivateGradients(job, network, live, len(data), secret, patients)
    )
    # A copy: a network that is called with weights from it, in training mode, writes into their statistics.
    reference = {k: {n: t.to(network.device, copy=True) for n, t in g.items()} for k, g in job.reference.items()}
    optimisers = [make_optimiser(network.require_gradients(n), training.optimiser, site.lr) for n in moving]
    restore_optimisers(optimisers, network, moving, job.optimiser_state)
    total, key = torch.zeros((), device=network.device), first_key(stream)
    schedule = schedule_steps(job, data.labels, stream, secret, site.round, data.patients)
    rows = None if private is None else iterate_on_host([batches for _, batches in schedule for _ in steps])
    indices = (index.flatten() for _, batches in schedule for _ in steps for index in batches)
    with (
        seed_generators(stream.child("dropout", site.round), network.device),
        network.use_precision(training.precision),
        network.use_checkpointing(private is None),  # DP-SGD records what every layer receives, once
        prefetch_batches(data, indices, network.device) as loaded,
    ):
        for number, batches in schedule:
            sizes = [len(index) for index in batches]
            for which, (step, names, optimiser) in enumerate(zip(steps, moving, optimisers, strict=True)):
                if len(steps) > 1:
                    network.require_gradients(names)
                optimiser.zero_grad(set_to_none=True)
                given = islice(loaded, len(batches))
                if private is None or rows is None:
                    ready = prepare_batches(given, network, training, stream, key, number)
                    loss = accumulate_gradient(step, network, live, ready, sizes, reference)
                else:
                    ready = prepare_rows(given, next(rows), network, training, private.secret, number)
                    loss = private.set_gradients(
                        step, names, ready, sizes, reference, private.noise_stream(number, which)
                    )
                optimiser.step()
            total += loss
    state = {} if job.optimiser_state is None else collect_optimiser_state(optimisers, network, moving)
    dropped = 0 if private is None else int(private.dropped)
    return Fitted(network.copy_weights(), len(schedule), float(total) / max(len(schedule), 1), state, dropped)


def prepare_batches(
    batches: Iterator[Batch], network: LiveNetwork, training: Training, stream: Stream, first: int, number: int
) -> Iterator[Batch]:
    """Augment the batches of step `number`, and give each a dropout mask of its own, just before the batch is used."""
    for position, batch in enumerate(batches):
        ready = augment_batch(*batch, training, stream.child("augment", number, position))
        network.set_dropout_key(dropout_key(first, number, position))
        yield ready


def prepare_rows(
    batches: Iterator[Batch],
    rows: Sequence[Tensor],
    network: LiveNetwork,
    training: Training,
    secret: Stream,
    number: int,
) -> Iterator[Batch]:
    """Do the same under a privacy plan, where an image's augmentation and dropout follow from the step and its row.

    So with an image taken out, the step is the same for all others, whose places in the batch have moved.
    """
    for index, batch in zip(rows, batches, strict=True):
        ready = augment_batch(*batch, training, secret.child("augment", number), index)
        if network.dropouts:
            network.set_dropout_key(row_keys(secret.child("dropout", number), index, len(ready[1]) // len(index)))
        yield ready


def augment_batch(
    images: Tensor, labels: Tensor, training: Training, stream: Stream, rows: Tensor | None = None
) -> Batch:
    """Return a batch as the step sees it: augmented, with each example's views (if private) one after another.

    With `rows`, those of the images at their site, on the CPU, an image is augmented by its row and the stream.
    """
    views = 1 if training.private is None else training.private.views
    if views > 1:
        images, labels = images.repeat_interleave(views, 0), labels.repeat_interleave(views, 0)
    if training.augment is None:
        return images, labels
    keys = None if rows is None else row_keys(stream, rows, views)
    return augment_images(images, training.augment, stream, keys), labels


def iterate_on_host(steps: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield each step's batches of rows on the CPU; all are copied at once, as the host would wait for each copy."""
    batches = [index.flatten() for step in steps for index in step]
    here = iter(torch.split(torch.cat(batches).cpu(), [len(index) for index in batches]) if batches else [])
    for step in steps:
        yield list(islice(here, len(step)))


def accumulate_gradient(
    step: Step, network: LiveNetwork, live: Bundle, batches: Iterator[Batch], sizes: Sequence[int], reference: Bundle
) -> Tensor:
    """Set the parameters' `grad` to that of the mean loss over all `batches`; return this loss, detached."""
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


def make_optimiser(parameters: list[torch.nn.Parameter], options: Optimiser, lr: float) -> torch.optim.Optimizer:
    """Return the optimiser that a recipe asks for, at the learning rate of this round."""
    if options.name == "sgd":
        return torch.optim.SGD(parameters, lr, options.momentum, weight_decay=options.weight_decay)
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr, weight_decay=options.weight_decay)


def collect_optimiser_state(
    optimisers: Sequence[torch.optim.Optimizer], network: LiveNetwork, moving: Sequence[frozenset[str]]
) -> Tensors:
    """Return the optimisers' states by `step/slot/parameter`; each step of the job has an optimiser of its own."""
    return {
        f"{number}/{slot}/{name}": value.detach().to("cpu", copy=True)
        for number, (optimiser, names) in enumerate(zip(optimisers, moving, strict=True))
        for name in sorted(names)
        for slot, value in optimiser.state.get(network.live["model"][name], {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimisers(
    optimisers: Sequence[torch.optim.Optimizer],
    network: LiveNetwork,
    moving: Sequence[frozenset[str]],
    state: Tensors | None,
) -> None:
    """Load what `collect_optimiser_state` returned into new optimisers."""
    for path, value in (state or {}).items():
        number, slot, name = path.split("/", 2)
        if name in moving[int(number)]:
            parameter = network.live["model"][name]
            device = torch.device("cpu") if slot == "step" else parameter.device
            optimisers[int(number)].state[parameter][slot] = value.to(device, copy=True)


@torch.no_grad()
def score(job: Score, network: LiveNetwork, data: Examples, batch: int | None = None) -> Tensors:
    """Compute a job's function over all of `data`, in its order or the job's, in evaluation mode.

    Args:
        job: The weights, the function of (network, weights, batch, reference), and how batches are reduced.
        network: The network that computes the job. Its weights are overwritten.
        data: The examples.
        batch: Examples at a time; None leaves it to the job or to the device.

    Returns:
        The function's tensors: concatenated over batches, or their mean weighted by examples (`job.reduce`).
    """
    weights = network.load_weights(job.weights, classifier_only=True)
    network.set_eval_mode()
    reference = {k: {n: t.to(network.device) for n, t in g.items()} for k, g in job.reference.items()}
    size = batch or job.batch or evaluation_batch_size(network.device)
    rows = torch.arange(len(data)) if job.order is None else job.order
    indices = torch.split(rows.to(data.labels.device), size)
    with prefetch_batches(data, indices, network.device) as loaded:
        parts = ((len(part[1]), job.function(network, weights, part, reference)) for part in loaded)
        if job.reduce == "mean":
            return _weighted_mean(parts, len(data))
        found = [values for _, values in parts]
    return {name: torch.cat([values[name] for values in found]) for name in found[0]} if found else {}


def evaluation_batch_size(device: torch.device) -> int:
    """Return the images of an evaluation batch: few on a CPU, so that evaluation takes no more memory than training."""
    return 64 if device.type == "cpu" else 512


def _weighted_mean(parts: Iterator[tuple[int, Tensors]], examples: int) -> Tensors:
    """Average batches in place: what one batch gives may be as large as the model."""
    mean: Tensors = {}
    for count, values in parts:
        weight = count / max(examples, 1)
        mean = {name: mean[name].add_(t * weight) if mean else t * weight for name, t in values.items()}
    return mean
