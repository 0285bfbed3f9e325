"""DP-SGD (Abadi et al. 2016), as Opacus counts it: every example's gradient is clipped, noise N(0, (σC)²) joins their
sum, and the sum is divided by the number of examples EXPECTED in a step.

What a step's objective has besides its examples (FedProx's penalty, SCAFFOLD's linear term) looks at no data: its
gradient is added in full, neither clipped nor noised, and costs no privacy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from polyclinic.core.contract import Batch, Bundle, Fit, Network, Objective, Private, Step, Stream, Tensors, Training
from polyclinic.core.errors import EngineError, RecipeError
from polyclinic.training.dp.gradient_parts import FullGradients, ParameterGradients
from polyclinic.training.dp.per_example_gradients import GradientTape, NotRecordableError, copy_with_record
from polyclinic.training.losses import SEPARABLE
from polyclinic.training.network import LiveNetwork

VMAP_EXAMPLES = 16
"""Examples whose gradients are taken one by one at the same time, where there is no quicker way."""
BATCH_MULTIPLE = 16
"""Batches have room for a multiple of so many examples, so that stacks see few different lengths."""
BATCH_DEPENDENT_LAYERS = {
    nn.modules.batchnorm._BatchNorm: "GroupNorm",
    nn.modules.instancenorm._InstanceNorm: "GroupNorm with a group for each channel",
}
"""Layers that, as they train, let an example change what another gives, and what takes their place."""


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """min(1, C/‖g‖) for every example; 0 where ‖g‖ is not finite."""
    factors = torch.ones_like(norms) if math.isinf(clip) else (clip / norms).clamp(max=1)
    return factors.masked_fill(~norms.isfinite(), 0)


def draw_poisson_batches(examples: int, rate: float, steps: int, stream: Stream) -> list[Tensor]:
    """Who joins each of `steps` steps: everyone by itself, with probability `rate` at every step.

    All steps × examples coins are one row; the gaps between heads are geometric, so that tails cost nothing.
    """
    if rate >= 1:
        return [torch.arange(examples)] * steps
    coins, at, heads = steps * examples, -1, [np.zeros(0, np.int64)]
    generator = secret_generator(stream)
    while rate > 0 and at < coins:
        expected = (coins - at) * rate
        gaps = generator.geometric(rate, int(expected + 4 * math.sqrt(expected)) + 16)
        heads.append(at + np.minimum(gaps, coins + 1).cumsum())
        at = int(heads[-1][-1])
    chosen = np.concatenate(heads)
    step, who = np.divmod(chosen[chosen < coins], max(examples, 1))
    cuts = np.searchsorted(step, np.arange(1, steps))
    return [torch.from_numpy(part) for part in np.split(who, cuts)] if steps else []


def draw_gaussian_noise(stream: Stream, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The standard normal noise of one step for ALL parameters, in the order of their sorted names."""
    if device.type == "cuda":
        generator = torch.Generator(device).manual_seed(stream.integer())
        return torch.randn(size, generator=generator, device=device, dtype=dtype)
    wanted = np.float64 if dtype == torch.float64 else np.float32
    return torch.from_numpy(secret_generator(stream).standard_normal(size, wanted)).to(device, dtype)


def secret_generator(stream: Stream) -> np.random.Generator:
    """Numbers on the CPU that cannot be guessed from a seed: torch's generator there keeps 32 bits of it.

    With 2³² seeds noise would be drawn twice in a long run, and could be found by trying them all.
    """
    entropy = [stream.child("entropy", part).integer() for part in range(4)]
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(entropy)))


def is_plain_sgd(options: Private | None) -> bool:
    """Whether training goes on as if it were not private."""
    if options is None:
        return True
    return (options.clip, options.noise, options.sampling, options.views) == (math.inf, 0.0, "shuffle", 1)


def check_private_job(job: Fit, network: LiveNetwork, secret: Stream | None) -> Stream:
    """The secret of a job that can be private; the last line of defence, as the recipe was looked at before."""
    options = job.training.private
    assert options is not None
    if secret is None:
        raise EngineError("a private training job came without a secret; an engine must pass its site's own to fit")
    if job.order != (None, None):
        raise RecipeError("training.order looks at examples beside the priced steps; set it to random")
    if job.training.oversample:
        raise RecipeError("training.oversample repeats examples, which privacy cannot count; set it to false")
    if math.isinf(options.clip) and options.noise:
        raise RecipeError("privacy.noise is in units of privacy.clip, which is infinite; set privacy.clip")
    for name, layer in network.named_layers():
        for kind, instead in BATCH_DEPENDENT_LAYERS.items():
            writes = isinstance(layer, nn.modules.batchnorm._BatchNorm) or getattr(layer, "track_running_stats", False)
            if isinstance(layer, kind) and layer.training and writes:
                raise RecipeError(
                    f"layer {name} ({type(layer).__name__}) mixes the examples of a batch, so that no example's "
                    f"influence can be bounded; use {instead}"
                )
    return secret


def sampling_rate(training: Training, examples: int, whole: bool) -> float:
    """q: the probability with which an example joins a step."""
    return 1.0 if whole else min(1.0, training.batch_size(examples) / max(examples, 1))


def max_physical_batch(training: Training, examples: int, whole: bool) -> int:
    """The most examples computed at once: enough for all but the largest of a step's random batches."""
    if whole or training.private is None or training.private.sampling != "poisson":
        return training.batch_size(examples)
    expected = min(training.batch_size(examples), examples)
    return -int(-(expected + 3 * math.sqrt(expected)) // BATCH_MULTIPLE) * BATCH_MULTIPLE


def expected_batch_size(training: Training, examples: int, whole: bool, drawn: int) -> int:
    """q·n, what a step's sum is divided by: never a number that depends on who was drawn.

    Without Poisson sampling all batches' lengths follow from the number of examples, which is known.
    """
    assert training.private is not None
    if training.private.sampling != "poisson":
        return max(drawn, 1)
    return max(examples if whole else min(training.batch_size(examples), examples), 1)


def sum_clipped_gradients(
    gradients: Mapping[str, ParameterGradients], clip: float, present: Tensor, assume_nonfinite: bool = True
) -> tuple[Tensors, Tensor]:
    """Σ clip(gradient) by name and site, and how many gradients of each site were not finite.

    `present`: sites × examples, what is there and not padding. `careful`: count on bad examples without looking.
    """
    squares = torch.stack([part.squared_norms() for part in gradients.values()]).sum(0)
    norms = squares.sqrt().reshape(present.shape)
    finite = norms.isfinite()
    factors = clip_factors(norms, clip) * present
    bad = ~finite.reshape(-1) if assume_nonfinite or not bool(finite.all()) else None
    sums = {name: part.weighted_sum(factors, bad) for name, part in gradients.items()}
    return sums, (~finite & present.bool()).sum(1)


def add_noise(sums: Tensors, options: Private, expected: int, secret: Stream) -> Tensors:
    """(Σ clip(gradient) + σC·noise) / expected batch, of one site; writes over `sums`."""
    if options.noise:
        first, names = next(iter(sums.values())), sorted(sums)
        noise = draw_gaussian_noise(secret, sum(t.numel() for t in sums.values()), first.device, first.dtype)
        pieces = torch.split(noise, [sums[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            sums[name].add_(piece.view(sums[name].shape), alpha=options.noise * options.clip)
    torch._foreach_div_(list(sums.values()), expected)
    return sums


class ZeroLossNetwork:
    """A network that has nothing to say of the data: an objective of it is what it has besides."""

    def __init__(self, device: torch.device) -> None:
        self.zero = torch.zeros((), device=device)

    def __call__(self, *given: object, **named: object) -> Tensor:
        del given, named
        raise EngineError("an objective marked as separable calls the network otherwise than by its loss; unmark it")

    features = head = teacher_logits = auxiliary = __call__

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        del weights, batch
        return self.zero


class SubstituteWeights:
    """A network that is called with other weights than those it is given."""

    def __init__(self, network: LiveNetwork, weights: Bundle) -> None:
        self.network, self.weights = network, weights

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        del weights
        return self.network(self.weights, images)

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        del weights
        return self.network.features(self.weights, images)

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        del weights
        return self.network.head(self.weights, features, eval_mode)

    def teacher_logits(self, weights: Bundle, images: Tensor, features: bool = False) -> Tensor:
        return self.network.teacher_logits(weights, images, features)

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        del weights
        return self.network.auxiliary(self.weights, name, *given, eval_mode=eval_mode)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        del weights
        return self.network.loss(self.weights, batch)


class PrivateGradients:
    """The private steps of one job on a live network."""

    def __init__(self, job: Fit, network: LiveNetwork, live: Bundle, examples: int, secret: Stream | None) -> None:
        assert job.training.private is not None
        self.secret = check_private_job(job, network, secret)
        self.training, self.options, self.whole = job.training, job.training.private, job.full_batch
        self.network, self.live, self.examples = network, live, examples
        self.dropped = torch.zeros((), dtype=torch.int64, device=network.device)
        self._recorders: dict[frozenset[str], tuple[LiveNetwork, GradientTape]] = {}
        self._unrecordable: set[frozenset[str]] = set()

    def noise_stream(self, number: int, which: int) -> Stream:
        """Where the noise of the `which`-th step on the batch of step `number` comes from."""
        return self.secret.child("noise", number, which)

    def set_gradients(
        self,
        step: Step,
        names: frozenset[str],
        batches: Iterable[Batch],
        sizes: Sequence[int],
        reference: Bundle,
        noise: Stream,
    ) -> Tensor:
        """Leave a step's private gradient in the parameters; returns the mean loss, detached."""
        model, total = self.live["model"], torch.zeros((), device=self.network.device)
        sums: Tensors = {}
        for size, batch in zip(sizes, batches, strict=True):
            loss, found = self._sum_clipped(step.objective, names, batch, reference)
            sums = {n: sums[n] + t for n, t in found.items()} if sums else found
            total += torch.where(loss.isfinite(), loss, 0) * (size / sum(sizes))
        sums = sums or {name: torch.zeros_like(model[name]) for name in names}
        expected = expected_batch_size(self.training, self.examples, self.whole, sum(sizes))
        gradients = add_noise(sums, self.options, expected, noise)
        for name, besides in self._data_free_gradients(step.objective, names, reference).items():
            gradients[name].add_(besides)
        for name, gradient in gradients.items():
            model[name].grad = gradient
        return total

    def _data_free_gradients(self, objective: Objective, names: frozenset[str], reference: Bundle) -> Tensors:
        """The gradient of what looks at no data."""
        if objective not in SEPARABLE:
            return {}
        nothing = torch.empty(0, device=self.network.device)
        loss = objective(ZeroLossNetwork(self.network.device), self.live, (nothing, nothing), reference)
        if not loss.requires_grad:
            return {}
        moving = {name: self.live["model"][name] for name in sorted(names)}
        found = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
        return {name: t for name, t in zip(moving, found, strict=True) if t is not None}

    def _sum_clipped(
        self, objective: Objective, names: frozenset[str], batch: Batch, reference: Bundle
    ) -> tuple[Tensor, Tensors]:
        """The mean loss of a batch and the sum of its examples' clipped gradients."""
        if objective in SEPARABLE and names not in self._unrecordable:
            try:
                return self._sum_with_tape(objective, names, batch, reference)
            except NotRecordableError:
                self._unrecordable.add(names)
        return self._sum_with_vmap(objective, names, batch, reference)

    def _sum_with_tape(
        self, objective: Objective, names: frozenset[str], batch: Batch, reference: Bundle
    ) -> tuple[Tensor, Tensors]:
        if names not in self._recorders:
            book, network = GradientTape(self.network.device), copy.copy(self.network)
            network.module = copy_with_record(self.network.module, names, book)
            self._recorders[names] = network, book
        network, book = self._recorders[names]
        count = len(batch[1]) // self.options.views
        book.begin_pass(count)
        loss = objective(network, self.live, batch, reference)
        parts = book.backward(loss * count)
        if parts.keys() != names:
            raise NotRecordableError("a layer is not called")
        return loss.detach(), self._clip_and_count(parts, count)

    def _clip_and_count(self, parts: Mapping[str, ParameterGradients], count: int) -> Tensors:
        present = torch.ones(1, count, device=self.network.device)
        # Where the device works ahead of the host, asking it whether all is well would take longer than taking care.
        sums, dropped = sum_clipped_gradients(parts, self.options.clip, present, self.network.device.type != "cpu")
        self.dropped += dropped[0]
        return {name: total[0] for name, total in sums.items()}

    def _sum_with_vmap(
        self, objective: Objective, names: frozenset[str], batch: Batch, reference: Bundle
    ) -> tuple[Tensor, Tensors]:
        """By the objective on batches of one example: right for any network and objective."""
        images, labels = (t.reshape(-1, self.options.views, *t.shape[1:]) for t in batch)
        call = vmap(
            grad_and_value(self._example_loss(objective, names, reference)), (None, 0, 0, 0), randomness="different"
        )
        moving = {name: self.live["model"][name].detach() for name in sorted(names)}
        total, sums = torch.zeros((), device=self.network.device), dict[str, Tensor]()
        everyone = torch.arange(len(labels), device=labels.device)
        for some in torch.split(everyone, VMAP_EXAMPLES):
            each, losses = call(moving, images[some], labels[some], some)
            found = self._clip_and_count({n: FullGradients(t, tuple(t.shape[1:])) for n, t in each.items()}, len(some))
            sums = {n: sums[n] + t for n, t in found.items()} if sums else found
            total += losses.sum() / len(labels)
        return total, sums

    def _example_loss(self, objective: Objective, names: frozenset[str], reference: Bundle) -> Callable[..., Tensor]:
        """The loss of one example in all its views, as a function of what trains."""
        still = {name: t.detach() for name, t in self.live["model"].items() if name not in names}
        keys = {name: self.network.module.get_buffer(name) for name in self.network.dropout_buffers(torch.zeros(0))}

        def loss(moving: Tensors, images: Tensor, labels: Tensor, place: Tensor) -> Tensor:
            # Each by itself in its batch, examples would all drop the same units.
            own = {name: key + place * (1 << 40) for name, key in keys.items()}
            weights = {"model": {**still, **moving}, "buffers": {**self.live["buffers"], **own}}
            if objective in SEPARABLE:  # what it has besides is added later, in full
                network: Network = SubstituteWeights(self.network, weights)
                return objective(network, self.live, (images, labels), reference)
            return objective(self.network, weights, (images, labels), reference)

        return loss
