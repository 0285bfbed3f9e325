"""DP-SGD for many sites at once: `training.dp`, with an axis of sites before the axis of examples."""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyclinic.core import Batch, Bundle, Network, Objective, Private, Tensors
from polyclinic.training.dp import dp_sgd, secure_random
from polyclinic.training.dp.gradient_parts import ParameterGradients
from polyclinic.training.dp.per_example_gradients import (
    LayerInputs,
    NotRecordableError,
    RecordedLayer,
    copy_with_record,
)
from polyclinic.training.network import LiveNetwork, NetworkWrapper
from polyclinic.training.stacked.batching import StackMember, StackStep
from polyclinic.training.stacked.compile import compile_function, use_matmul_precision

ClippedSumFunction = Callable[[Bundle, Tensors, Batch, Tensor, Bundle], tuple[Tensors, Tensor, Tensor]]
"""(weights, dropout keys, batch, presence, reference) -> clipped sums, losses and numbers dropped, of every site."""


def make_clipped_sum_function(
    network: LiveNetwork, objective: Objective, names: frozenset[str], options: Private, compiled: bool
) -> ClippedSumFunction:
    """Build the function that sums the clipped gradients of each site's batch.

    Args:
        network: A network's `stackable_copy`.
        objective: A separable loss.
        names: The parameters that train.
        options: How the gradient of an example is clipped.
        compiled: Compile the function; this pays after some thousand calls.
    """
    record, recorded = StackedRecord(), copy.copy(network)
    recorded.module = copy_with_record(network.module, names, record)
    layers = {name: layer for name, layer in recorded.module.named_modules() if isinstance(layer, RecordedLayer)}

    def site_loss(
        zeros: Tensors,
        model: Tensors,
        buffers: Tensors,
        keys: Tensors,
        batch: Batch,
        present: Tensor,
        reference: Bundle,
    ) -> tuple[Tensor, dict[str, LayerInputs]]:
        record.begin_pass(zeros)
        padded = PaddedNetwork(KeyedNetwork(recorded, keys) if keys else recorded, present)
        return objective(padded, {"model": model, "buffers": buffers}, batch, reference), record.end_pass()

    def forward(*arguments: Any) -> tuple[Tensor, dict[str, LayerInputs]]:
        return torch.func.vmap(site_loss, randomness="error")(*arguments)

    def backward(inputs: dict[str, LayerInputs], gradients: Tensors, present: Tensor) -> tuple[Tensors, Tensor]:
        parts: dict[str, ParameterGradients] = {}
        for name, g in gradients.items():
            rows = tuple(t.flatten(0, 1) for t in inputs[name])
            found = layers[name].parameter_gradients(rows, g.flatten(0, 1), present.numel())
            parts |= {f"{name}.{n}": part for n, part in found.items()}
        return dp_sgd.sum_clipped_gradients(parts, options, present)

    probe = forward
    if compiled:
        torch._dynamo.config.cache_size_limit = 64  # objectives and lengths of batches share these functions
        forward = compile_function(forward, network.device, "first")
        backward = compile_function(backward, network.device, "later")
    zeros_by_shape: dict[torch.Size, Tensors] = {}

    def call(
        weights: Bundle, keys: Tensors, batch: Batch, present: Tensor, reference: Bundle
    ) -> tuple[Tensors, Tensor, Tensor]:
        rest = weights["model"], weights["buffers"], keys, batch, present, reference
        shape = batch[0].shape
        if shape not in zeros_by_shape:
            with torch.no_grad():
                probe({}, *rest)
            if record.output_types.keys() != layers.keys():
                raise NotRecordableError("a layer is not called")
            types, sites = record.output_types, len(present)
            zero = torch.zeros((), device=present.device)  # expanded, so that it takes no memory
            zeros_by_shape[shape] = {n: zero.to(types[n][1]).expand(sites, *types[n][0]) for n in layers}
        zeros = {n: t.detach().requires_grad_() for n, t in zeros_by_shape[shape].items()}
        losses, inputs = forward(zeros, *rest)
        found = torch.autograd.grad((losses * present.sum(1)).sum(), list(zeros.values()))
        # Rounded to TF32, a sum of clipped gradients could be longer than the clip allows.
        with torch.no_grad(), use_matmul_precision("highest"):
            sums, dropped = backward(inputs, dict(zip(zeros, found, strict=True)), present)
        return sums, losses.detach(), dropped

    return call


class StackedRecord:
    """Records one pass of a stack.

    Under `vmap` outputs cannot be hooked. Instead zeros are added to the layers' outputs from outside: the gradient
    with respect to them is that of the outputs.
    """

    piece_bytes = sys.maxsize

    def __init__(self) -> None:
        self.zeros: Tensors = {}
        self.inputs: dict[str, LayerInputs] = {}
        self.output_types: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def begin_pass(self, zeros: Tensors) -> None:
        """Start a pass with these zeros, by layer; without any the record only learns the outputs' shapes and types."""
        self.zeros, self.inputs = zeros, {}

    def end_pass(self) -> dict[str, LayerInputs]:
        """Return every layer's inputs."""
        inputs, self.inputs, self.zeros = self.inputs, {}, {}
        return inputs

    def record_call(self, layer: RecordedLayer, inputs: LayerInputs, output: Tensor) -> Tensor:
        if layer.name in self.inputs:
            raise NotRecordableError(f"{layer.name} is called twice")
        self.inputs[layer.name] = inputs
        if not self.zeros:
            self.output_types[layer.name] = output.shape, output.dtype
            return output
        return output + self.zeros[layer.name]

    def make_contiguous(self, images: Tensor) -> Tensor:
        return images.contiguous()


class KeyedNetwork(NetworkWrapper):
    """A network that is called with one site's dropout keys among the buffers."""

    def __init__(self, network: LiveNetwork, keys: Tensors) -> None:
        super().__init__(network)
        self.keys = keys

    def replace_weights(self, weights: Bundle) -> Bundle:
        return {"model": weights["model"], "buffers": {**weights.get("buffers", {}), **self.keys}}


class PaddedNetwork(NetworkWrapper):
    """A network whose loss leaves out padding: `present` is 1 for an example and 0 for a padding row."""

    def __init__(self, network: Network, present: Tensor) -> None:
        super().__init__(network)
        self.present = present

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        images, labels = batch
        losses = self.output_loss(self(weights, images), labels, "none")
        present = self.present.to(losses.dtype).repeat_interleave(len(labels) // len(self.present))
        return (losses * present).sum() / present.sum().clamp(min=1)


class StackedNoise:
    """Adds to the clipped sums of a stack's sites: each site's noise from its own secret, and data-free gradients."""

    def __init__(self, members: Sequence[StackMember], network: LiveNetwork) -> None:
        self.secrets = [dp_sgd.check_private_job(member.job, network, member.secret) for member in members]
        options = [member.job.training.private or Private(0.0, 0.0) for member in members]
        self.clip, self.has_noise = options[0].clip, any(option.noise for option in options)
        scales = [option.noise * option.clip if option.noise else 0.0 for option in options]
        dtype = next(iter(members[0].job.weights["model"].values())).dtype
        self.scales = torch.tensor(scales, dtype=dtype, device=network.device)
        self.data_only_objectives: set[Objective] = set()
        """Objectives found to have no terms without data."""
        self.dropped = torch.zeros(len(members), dtype=torch.int64, device=network.device)
        """How many gradients of each site were not finite."""

    def add_noise(self, sums: Tensors, step: StackStep) -> Tensors:
        """Return (Σ clip(gradient) + σC·noise) / expected batch, of the members of a step."""
        names, first = sorted(sums), next(iter(sums.values()))
        found = {name: sums[name] / _broadcast_to(step.expected, sums[name]) for name in names}
        if self.has_noise:
            sizes = [sums[name][0].numel() for name in names]
            secrets = [self.secrets[site].child("noise", number, 0) for site, number in step.step_numbers]
            block = secure_random.draw_normals(secrets, sum(sizes), first.device, first.dtype)
            scales = self.scales if step.members is None else self.scales[step.members]
            block *= _broadcast_to(scales / step.expected, block)
            for name, piece in zip(names, torch.split(block, sizes, 1), strict=True):
                found[name] += piece.reshape(found[name].shape)
        return found

    def data_free_gradients(
        self, objective: Objective, names: frozenset[str], weights: Bundle, reference: Bundle
    ) -> Tensors:
        """Return the gradient of the objective's terms that use no data, for every site that is computed."""
        if objective in self.data_only_objectives:
            return {}
        network, nothing = dp_sgd.ZeroLossNetwork(self.dropped.device), torch.empty(0, device=self.dropped.device)

        def site_loss(model: Tensors, reference: Bundle) -> Tensor:
            return objective(network, {"model": model, "buffers": {}}, (nothing, nothing), reference)

        moving = {name: w.detach().requires_grad_() for name, w in weights["model"].items() if name in names}
        frozen = {name: w for name, w in weights["model"].items() if name not in names}
        losses = torch.func.vmap(site_loss)({**frozen, **moving}, reference)
        if not losses.requires_grad:
            self.data_only_objectives.add(objective)
            return {}
        found = torch.autograd.grad(losses.sum(), list(moving.values()), allow_unused=True)
        return {name: t for name, t in zip(moving, found, strict=True) if t is not None}


def _broadcast_to(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
