"""DP-SGD (Abadi et al. 2016), sampled and counted as in Opacus.

Each example's gradient is clipped to length C, noise N(0, (σC)²) is added to their sum, and the sum is divided by the
EXPECTED number of examples in a step (with `sampling: shuffle`, by the batch size):

    (1)  g̃ = (Σ_i g_i · min(1, C/‖g_i‖) + σC·N(0, I)) / (q·n)     q: sampling rate; n: examples

With automatic clipping (Bu, Wang, Zha, Karypis: Automatic clipping: differentially private deep learning made easier
and stronger. NeurIPS 2023, AUTO-S), short gradients are lengthened, so that C is only a factor on the learning rate:

    (2)  g_i · C / (‖g_i‖ + γ), γ = 0.01, in the place of g_i · min(1, C/‖g_i‖)

Where patients join the steps, not single examples, i counts patients: g_i is the MEAN gradient of all examples of
patient i, and n is the number of patients (user-level sampling, Charles et al. 2024). So a patient with many examples
moves the sum no further than one with a single example.

Terms of an objective that use no data (FedProx's penalty, SCAFFOLD's linear term) cost no privacy: their gradient is
added in full, neither clipped nor noised.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.core import (
    Batch,
    Bundle,
    EngineError,
    Fit,
    Objective,
    Private,
    RecipeError,
    Step,
    Stream,
    Tensors,
    Training,
)
from polyclinic.training.dp import secure_random
from polyclinic.training.dp.gradient_parts import FullGradients, ParameterGradients
from polyclinic.training.dp.per_example_gradients import GradientTape, NotRecordableError, copy_with_record
from polyclinic.training.losses import SEPARABLE
from polyclinic.training.network import LiveNetwork, NetworkWrapper

VMAP_EXAMPLES = 16
"""How many examples' gradients `vmap` computes at once, where layers cannot be recorded."""
STABILITY = 0.01
"""γ of (2): how fast the gradient of an example that is learnt goes to 0."""
BATCH_MULTIPLE = 16
"""Random batches are padded to a multiple of this, so that stacks see few different lengths."""
BATCH_DEPENDENT_LAYERS = {
    nn.modules.batchnorm._BatchNorm: "GroupNorm",
    nn.modules.instancenorm._InstanceNorm: "GroupNorm with a group for each channel",
}
"""Layers through which, in training, one example changes another's output; and what replaces them."""


class PrivateGradients:
    """Computes the private gradients of one job on a live network.

    Args:
        job: The job; its `training.private` holds C and σ.
        network: The network, in training mode.
        live: The bundle that `network.load_weights` returned.
        examples: The number of the site's training examples.
        secret: The stream of the noise.
        patients: The number of patients, if they, and not single examples, join the steps.
    """

    def __init__(
        self,
        job: Fit,
        network: LiveNetwork,
        live: Bundle,
        examples: int,
        secret: Stream | None,
        patients: int | None = None,
    ) -> None:
        assert job.training.private is not None
        self.secret = check_private_job(job, network, secret)
        self.training, self.options, self.full_batch = job.training, job.training.private, job.full_batch
        self.network, self.live, self.examples, self.patients = network, live, examples, patients
        self.dropped = torch.zeros((), dtype=torch.int64, device=network.device)
        """How many gradients were not finite, and so counted as zero."""
        self._tapes: dict[frozenset[str], tuple[LiveNetwork, GradientTape]] = {}
        self._unrecordable: set[frozenset[str]] = set()

    def noise_stream(self, number: int, which: int) -> Stream:
        """Return the stream of the noise of the `which`-th optimiser step on the batch of step `number`."""
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
        """Set the parameters' `grad` to a step's private gradient (1).

        Args:
            step: The optimiser step with its objective.
            names: The parameters that it moves.
            batches: The batches into which the step's examples are cut.
            sizes: Their numbers of examples (or patients, whose examples lie one after another).
            reference: What the objective refers to.
            noise: The stream of the step's noise.

        Returns:
            The mean loss of the step's examples, detached.
        """
        model, total = self.live["model"], torch.zeros((), device=self.network.device)
        sums: Tensors = {}
        for size, batch in zip(sizes, batches, strict=True):
            loss, clipped = self._sum_clipped(step.objective, names, batch, reference, size)
            sums = {n: sums[n] + t for n, t in clipped.items()} if sums else clipped
            total += torch.where(loss.isfinite(), loss, 0) * (size / sum(sizes))
        sums = sums or {name: torch.zeros_like(model[name]) for name in names}
        expected: float = expected_batch_size(self.training, self.examples, self.full_batch, sum(sizes))
        if self.patients is not None:
            expected = sampling_rate(self.training, self.examples, self.full_batch) * self.patients
        gradients = add_noise(sums, self.options, expected, noise)
        for name, gradient in self._data_free_gradients(step.objective, names, reference).items():
            gradients[name].add_(gradient)
        for name, gradient in gradients.items():
            model[name].grad = gradient
        return total

    def _data_free_gradients(self, objective: Objective, names: frozenset[str], reference: Bundle) -> Tensors:
        """Return the gradient of the objective's terms that use no data."""
        if objective not in SEPARABLE:
            return {}
        nothing = torch.empty(0, device=self.network.device)
        loss = objective(ZeroLossNetwork(self.network.device), self.live, (nothing, nothing), reference)
        if not loss.requires_grad:
            return {}
        moving = {name: self.live["model"][name] for name in sorted(names)}
        gradients = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
        return {name: t for name, t in zip(moving, gradients, strict=True) if t is not None}

    def _sum_clipped(
        self, objective: Objective, names: frozenset[str], batch: Batch, reference: Bundle, count: int | None = None
    ) -> tuple[Tensor, Tensors]:
        """Return the mean loss of a batch and the sum of its examples' clipped gradients.

        `count`: the number of examples or patients, each with as many rows, one after another, whose mean gradient is
        clipped. Without it these are the views of an example.
        """
        count = len(batch[1]) // self.options.views if count is None else count
        if objective in SEPARABLE and names not in self._unrecordable:
            try:
                return self._sum_with_tape(objective, names, batch, reference, count)
            except NotRecordableError:
                self._unrecordable.add(names)
        return self._sum_with_vmap(objective, names, batch, reference, count)

    def _sum_with_tape(
        self, objective: Objective, names: frozenset[str], batch: Batch, reference: Bundle, count: int
    ) -> tuple[Tensor, Tensors]:
        """Do so in one forward and one backward pass; the quick way, for separable objectives and known layers."""
        if names not in self._tapes:
            tape, network = GradientTape(self.network.device), copy.copy(self.network)
            network.module = copy_with_record(self.network.module, names, tape)
            self._tapes[names] = network, tape
        network, tape = self._tapes[names]
        tape.begin_pass(count)
        loss = objective(network, self.live, batch, reference)
        gradients = tape.backward(loss * count)
        if gradients.keys() != names:
            raise NotRecordableError("a layer is not called")
        return loss.detach(), self._clip_and_count(gradients, count)

    def _sum_with_vmap(
        self, objective: Objective, names: frozenset[str], batch: Batch, reference: Bundle, count: int
    ) -> tuple[Tensor, Tensors]:
        """Do so with the objective on batches of one example or patient; right for any network and objective."""
        images, labels = (t.reshape(count, -1, *t.shape[1:]) for t in batch)
        example_loss = self._example_loss(objective, names, reference)
        call = torch.func.vmap(torch.func.grad_and_value(example_loss), (None, 0, 0, 0), randomness="different")
        key = next((layer.key for layer in self.network.dropouts.values()), labels.new_zeros(()))
        keys = key.reshape(len(labels), -1) if key.ndim else key.expand(len(labels), 1)
        moving = {name: self.live["model"][name].detach() for name in sorted(names)}
        total, sums = torch.zeros((), device=self.network.device), dict[str, Tensor]()
        for index in torch.split(torch.arange(len(labels), device=labels.device), VMAP_EXAMPLES):
            per_example, losses = call(moving, images[index], labels[index], keys[index])
            gradients = {n: FullGradients(t, tuple(t.shape[1:])) for n, t in per_example.items()}
            clipped = self._clip_and_count(gradients, len(index))
            sums = {n: sums[n] + t for n, t in clipped.items()} if sums else clipped
            total += losses.sum() / len(labels)
        return total, sums

    def _example_loss(self, objective: Objective, names: frozenset[str], reference: Bundle) -> Callable[..., Tensor]:
        """Return one example's loss (the mean over its views) as a function of the parameters that train."""
        frozen = {name: t.detach() for name, t in self.live["model"].items() if name not in names}

        def loss(moving: Tensors, images: Tensor, labels: Tensor, keys: Tensor) -> Tensor:
            own_keys = self.network.dropout_buffers(keys)
            weights = {"model": {**frozen, **moving}, "buffers": {**self.live["buffers"], **own_keys}}
            if objective in SEPARABLE:  # its terms without data are added later, in full
                return objective(SubstituteWeights(self.network, weights), self.live, (images, labels), reference)
            return objective(self.network, weights, (images, labels), reference)

        return loss

    def _clip_and_count(self, gradients: Mapping[str, ParameterGradients], count: int) -> Tensors:
        present = torch.ones(1, count, device=self.network.device)
        # Where the device works ahead of the host, asking it whether all is well would take longer than taking care.
        assume_nonfinite = self.network.device.type != "cpu"
        sums, dropped = sum_clipped_gradients(gradients, self.options, present, assume_nonfinite)
        self.dropped += dropped[0]
        return {name: total[0] for name, total in sums.items()}


class ZeroLossNetwork:
    """A network whose loss is 0. An objective of it is the sum of its terms that use no data."""

    def __init__(self, device: torch.device) -> None:
        self.zero = torch.zeros((), device=device)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        return self.zero

    def _raise_misuse(self, *given: object, **named: object) -> NoReturn:
        raise EngineError("an objective marked as separable may only call network.loss; remove the mark `separable`")

    __call__ = features = head = output_loss = predict = teacher_logits = teacher_features = auxiliary = _raise_misuse


class SubstituteWeights(NetworkWrapper):
    """A network that is called with given weights instead of those of the call."""

    def __init__(self, network: LiveNetwork, weights: Bundle) -> None:
        super().__init__(network)
        self.weights = weights

    def replace_weights(self, weights: Bundle) -> Bundle:
        return self.weights


def is_plain_sgd(options: Private | None) -> bool:
    """Return whether these options change nothing, neither by clipping, nor by noise, nor by sampling."""
    unchanged = (math.inf, 0.0, "shuffle", 1)
    return options is None or (options.clip, options.noise, options.sampling, options.views) == unchanged


def check_private_job(job: Fit, network: LiveNetwork, secret: Stream | None) -> Stream:
    """Return the job's secret after checking that it can train privately; recipes were checked before."""
    options = job.training.private
    assert options is not None
    if secret is None:
        raise EngineError("a private training job came without a secret; an engine must pass its site's own to fit")
    if job.sampling_weights != (None, None):
        raise RecipeError("training.curriculum uses images outside the steps that privacy prices; leave it out")
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


def sampling_rate(training: Training, examples: int, full_batch: bool) -> float:
    """Return q, the probability with which an example joins a step."""
    return 1.0 if full_batch else min(1.0, training.batch_size(examples) / max(examples, 1))


def max_physical_batch(training: Training, examples: int, full_batch: bool) -> int:
    """Return the most examples computed at once: room for all but the largest of a step's random batches."""
    if full_batch or training.private is None or training.private.sampling != "poisson":
        return training.batch_size(examples)
    expected = min(training.batch_size(examples), examples)
    return -int(-(expected + 3 * math.sqrt(expected)) // BATCH_MULTIPLE) * BATCH_MULTIPLE


def expected_batch_size(training: Training, examples: int, full_batch: bool, drawn: int) -> int:
    """Return q·n, by which a step's sum is divided; it does not depend on which examples were drawn.

    `drawn` is the step's actual number of examples. It counts only without Poisson sampling, where the lengths of all
    batches follow from the number of examples, which is known.
    """
    assert training.private is not None
    if training.private.sampling != "poisson":
        return max(drawn, 1)
    return max(examples if full_batch else min(training.batch_size(examples), examples), 1)


def draw_poisson_batches(examples: int, rate: float, steps: int, stream: Stream) -> list[Tensor]:
    """Draw the examples of each of `steps` steps; every example joins every step independently with probability `rate`.

    All steps × examples coins are one row; the gaps between heads are geometric, so that tails cost nothing.
    """
    if rate >= 1:
        return [torch.arange(examples)] * steps
    coins, at, heads = steps * examples, -1, [np.zeros(0, np.int64)]
    while rate > 0 and at < coins:
        expected = (coins - at) * rate
        more = int(expected + 4 * math.sqrt(expected)) + 16
        gaps = secure_random.draw_geometric(stream.child(len(heads)), rate, more)
        heads.append(at + np.minimum(gaps, coins + 1).cumsum())
        at = int(heads[-1][-1])
    chosen = np.concatenate(heads)
    step, example = np.divmod(chosen[chosen < coins], max(examples, 1))
    cuts = np.searchsorted(step, np.arange(1, steps))
    return [torch.from_numpy(part) for part in np.split(example, cuts)] if steps else []


def clip_factors(norms: Tensor, clip: float, normalise: bool = False) -> Tensor:
    """Return min(1, C/‖g‖), or C/(‖g‖ + γ) by (2), for every example, and 0 where ‖g‖ is not finite."""
    factors = torch.ones_like(norms) if math.isinf(clip) else (clip / norms).clamp(max=1)
    if normalise:
        factors = clip / (norms + STABILITY)
    return factors.masked_fill(~norms.isfinite(), 0)


def sum_clipped_gradients(
    gradients: Mapping[str, ParameterGradients], options: Private, present: Tensor, assume_nonfinite: bool = True
) -> tuple[Tensors, Tensor]:
    """Sum the clipped gradients of each site.

    Args:
        gradients: The examples' gradients by parameter, all sites' examples one after another.
        options: How they are clipped.
        present: Sites × examples; 1 for an example, 0 for padding.
        assume_nonfinite: Mask gradients that are not finite without looking whether there are any.

    Returns:
        Σ clip(gradient) by parameter (sites × shape), and how many gradients of each site were not finite.
    """
    squares = torch.stack([gradient.squared_norms() for gradient in gradients.values()]).sum(0)
    norms = squares.sqrt().reshape(present.shape)
    finite = norms.isfinite()
    factors = clip_factors(norms, options.clip, options.normalise) * present
    nonfinite = ~finite.reshape(-1) if assume_nonfinite or not bool(finite.all()) else None
    sums = {name: gradient.weighted_sum(factors, nonfinite) for name, gradient in gradients.items()}
    return sums, (~finite & present.bool()).sum(1)


def add_noise(sums: Tensors, options: Private, expected: float, secret: Stream) -> Tensors:
    """Return (Σ clip(gradient) + σC·noise) / expected for one site; `sums` is overwritten."""
    if options.noise:
        first, names = next(iter(sums.values())), sorted(sums)
        size = sum(t.numel() for t in sums.values())
        noise = secure_random.draw_normals([secret], size, first.device, first.dtype)[0]
        for name, piece in zip(names, torch.split(noise, [sums[name].numel() for name in names]), strict=True):
            sums[name].add_(piece.view(sums[name].shape), alpha=options.noise * options.clip)
    torch._foreach_div_(list(sums.values()), expected)
    return sums
