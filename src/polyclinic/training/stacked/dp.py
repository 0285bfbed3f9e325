"""Private steps of many sites at once: `private`'s, with an axis of sites before the axis of examples."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from polyclinic.core.contract import Batch, Bundle, Network, Objective, Private, Tensors
from polyclinic.training.dp import dp_sgd
from polyclinic.training.dp.gradient_parts import ParameterGradients
from polyclinic.training.dp.per_example_gradients import (
    LayerInputs,
    NotRecordableError,
    RecordedLayer,
    copy_with_record,
    find_recorded_layers,
)
from polyclinic.training.network import LiveNetwork
from polyclinic.training.stacked.batching import StackMember, StackStep
from polyclinic.training.stacked.compile import compile_function as compiled_function


class StackedRecord:
    """One pass of a stack. Noughts that join what layers give are what there is to differentiate by, from outside."""

    piece_bytes = sys.maxsize

    def __init__(self) -> None:
        self.zeros: Tensors = {}
        self.inputs: dict[str, LayerInputs] = {}
        self.output_types: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def begin_pass(self, zeros: Tensors) -> None:
        """Without noughts the book only learns what layers give."""
        self.zeros, self.inputs = zeros, {}

    def end_pass(self) -> dict[str, LayerInputs]:
        seen, self.inputs, self.zeros = self.inputs, {}, {}
        return seen

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


class KeyedNetwork:
    """A network whose every call drops what a site's keys say, whatever the weights it is called with."""

    def __init__(self, network: LiveNetwork, keys: Tensors) -> None:
        self.network, self.keys = network, keys

    def _with_keys(self, weights: Bundle) -> Bundle:
        return {"model": weights["model"], "buffers": {**weights.get("buffers", {}), **self.keys}}

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network(self._with_keys(weights), images)

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network.features(self._with_keys(weights), images)

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        return self.network.head(self._with_keys(weights), features, eval_mode)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        return self.network.loss(self._with_keys(weights), batch)

    def teacher_logits(self, weights: Bundle, images: Tensor, features: bool = False) -> Tensor:
        return self.network.teacher_logits(weights, images, features)

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        return self.network.auxiliary(self._with_keys(weights), name, *given, eval_mode=eval_mode)


class PaddedNetwork:
    """A network whose loss leaves out what is not there."""

    def __init__(self, network: Network, present: Tensor) -> None:
        self.network, self.present = network, present

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network(weights, images)

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network.features(weights, images)

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        return self.network.head(weights, features, eval_mode)

    def teacher_logits(self, weights: Bundle, images: Tensor, features: bool = False) -> Tensor:
        return self.network.teacher_logits(weights, images, features)

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        return self.network.auxiliary(weights, name, *given, eval_mode=eval_mode)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        images, labels = batch
        each = F.cross_entropy(self(weights, images), labels, reduction="none")
        there = self.present.to(each.dtype).repeat_interleave(len(labels) // len(self.present))
        return (each * there).sum() / there.sum().clamp(min=1)


ClippedSumFunction = Callable[[Bundle, Tensors, Batch, Tensor, Bundle], tuple[Tensors, Tensor, Tensor]]


def make_clipped_sum_function(
    network: LiveNetwork,
    objective: Objective,
    names: frozenset[str],
    clip: float,
    compiled: bool,
) -> ClippedSumFunction:
    """(weights, dropout's keys, batch, who is present, reference) -> sums, losses and numbers dropped of every site."""
    book, other = StackedRecord(), copy.copy(network)
    other.module = copy_with_record(network.module, names, book)
    layers = find_recorded_layers(other.module)

    def of_one(
        noughts: Tensors,
        model: Tensors,
        buffers: Tensors,
        keys: Tensors,
        batch: Batch,
        there: Tensor,
        aside: Bundle,
    ) -> tuple[Tensor, dict[str, LayerInputs]]:
        book.begin_pass(noughts)
        seen = PaddedNetwork(KeyedNetwork(other, keys) if keys else other, there)
        return objective(seen, {"model": model, "buffers": buffers}, batch, aside), book.end_pass()

    def forward(*arguments: Any) -> tuple[Tensor, dict[str, LayerInputs]]:
        found: tuple[Tensor, dict[str, LayerInputs]] = vmap(of_one, randomness="error")(*arguments)
        return found

    def backward(seen: dict[str, LayerInputs], gradients: Tensors, there: Tensor) -> tuple[Tensors, Tensor]:
        parts: dict[str, ParameterGradients] = {}
        for name, g in gradients.items():
            rows = tuple(t.flatten(0, 1) for t in seen[name])
            found = layers[name].parameter_gradients(rows, g.flatten(0, 1), there.numel())
            parts |= {f"{name}.{n}": part for n, part in found.items()}
        return dp_sgd.sum_clipped_gradients(parts, clip, there)

    probe = forward
    if compiled:
        torch._dynamo.config.cache_size_limit = 64  # objectives and lengths of batches share these functions
        forward = compiled_function(forward, network.device, "first")
        backward = compiled_function(backward, network.device, "later")
    noughts: dict[torch.Size, Tensors] = {}

    def call(
        weights: Bundle, keys: Tensors, batch: Batch, there: Tensor, aside: Bundle
    ) -> tuple[Tensors, Tensor, Tensor]:
        rest = weights["model"], weights["buffers"], keys, batch, there, aside
        if batch[0].shape not in noughts:
            with torch.no_grad():
                probe({}, *rest)
            if book.output_types.keys() != layers.keys():
                raise NotRecordableError("a layer is not called")
            noughts[batch[0].shape] = {
                n: _expand_zeros(len(there), *book.output_types[n], there.device) for n in layers
            }
        mine = {n: t.detach().requires_grad_() for n, t in noughts[batch[0].shape].items()}
        losses, seen = forward(mine, *rest)
        found = torch.autograd.grad((losses * there.sum(1)).sum(), list(mine.values()))
        with torch.no_grad(), _full_precision_products():
            sums, dropped = backward(seen, dict(zip(mine, found, strict=True)), there)
        return sums, losses.detach(), dropped

    return call


def _expand_zeros(sites: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """They take no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(sites, *shape)


@contextmanager
def _full_precision_products() -> Iterator[None]:
    """Rounded to TF32, a sum of clipped gradients would be longer than the clip allows."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class StackedNoise:
    """What joins the sums of a stack's sites: noise, each site's from its own secret, and what looks at no data."""

    def __init__(self, members: Sequence[StackMember], network: LiveNetwork) -> None:
        self.secrets = [dp_sgd.check_private_job(seat.job, network, seat.secret) for seat in members]
        options = [seat.job.training.private or Private(0.0, 0.0) for seat in members]
        self.clip, self.has_noise = options[0].clip, any(option.noise for option in options)
        scales = [option.noise * option.clip if option.noise else 0.0 for option in options]
        dtype = next(iter(members[0].job.weights["model"].values())).dtype
        self.scales = torch.tensor(scales, dtype=dtype, device=network.device)
        self.data_only_objectives: set[Objective] = set()
        """Objectives that look at nothing but data."""
        self.dropped = torch.zeros(len(members), dtype=torch.int64, device=network.device)

    def add_noise(self, sums: Tensors, step: StackStep) -> Tensors:
        """(Σ clip(gradient) + σC·noise) / expected batch, of the members of a turn."""
        names, first = sorted(sums), next(iter(sums.values()))
        found = {name: sums[name] / _broadcast_to(step.expected, sums[name]) for name in names}
        if self.has_noise:
            sizes = [sums[name][0].numel() for name in names]
            secrets = [self.secrets[site].child("noise", number, 0) for site, number in step.step_numbers]
            block = torch.stack([dp_sgd.draw_gaussian_noise(s, sum(sizes), first.device, first.dtype) for s in secrets])
            scales = self.scales if step.members is None else self.scales[step.members]
            block *= _broadcast_to(scales / step.expected, block)
            for name, piece in zip(names, torch.split(block, sizes, 1), strict=True):
                found[name] += piece.reshape(found[name].shape)
        return found

    def data_free_gradients(
        self, objective: Objective, names: frozenset[str], weights: Bundle, reference: Bundle
    ) -> Tensors:
        """The gradient of what looks at no data, of every site that is seated."""
        if objective in self.data_only_objectives:
            return {}
        silent, nothing = dp_sgd.ZeroLossNetwork(self.dropped.device), torch.empty(0, device=self.dropped.device)

        def of_one(model: Tensors, aside: Bundle) -> Tensor:
            return objective(silent, {"model": model, "buffers": {}}, (nothing, nothing), aside)

        moving = {name: w.detach().requires_grad_() for name, w in weights["model"].items() if name in names}
        still = {name: w for name, w in weights["model"].items() if name not in names}
        losses = vmap(of_one)({**still, **moving}, reference)
        if not losses.requires_grad:
            self.data_only_objectives.add(objective)
            return {}
        found = torch.autograd.grad(losses.sum(), list(moving.values()), allow_unused=True)
        return {name: t for name, t in zip(moving, found, strict=True) if t is not None}


def _broadcast_to(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
