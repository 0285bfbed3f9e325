"""Every example's gradient from one forward and one backward pass: book-keeping (Bu et al., ICML 2023).

A layer with parameters is called with these detached. What it saw (a) and the gradient of what it gave (g) are enough
to tell how long each example's gradient is, and to add the gradients up with a weight each. So autograd never computes
the weights' gradients, and per-example ones are kept only where that is the cheapest way: for convolutions, as one
batched product of g with the neighbourhoods in a.

Nothing here knows of privacy. All sums have a leading axis of sites, which is 1 where a site trains alone.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.training.dp.gradient_parts import (
    ConcatenatedGradients,
    ConvolutionGradients,
    FullGradients,
    OuterProducts,
    ParameterGradients,
)
from polyclinic.training.im2col_conv import Im2colConv2d, extract_patches

MAX_KEPT_BYTES = 1 << 26
"""Bytes of one parameter's per-example gradients, above which they are not kept if there is another way."""
PIECE_BYTES = 1 << 21
"""On a CPU, what stays near the processor."""
LayerInputs = tuple[Tensor, ...]
M = TypeVar("M", bound=nn.Module)


class NotRecordableError(Exception):
    """A network that is not the sum of layers known here, each called once."""


class GradientRecord(Protocol):
    @property
    def piece_bytes(self) -> int:
        """Bytes of a convolution's neighbourhoods that are made at once."""
        ...

    def record_call(self, layer: RecordedLayer, inputs: LayerInputs, output: Tensor) -> Tensor:
        """Note what a layer saw; returns its output, whose gradient will be known."""
        ...

    def make_contiguous(self, images: Tensor) -> Tensor:
        """The images without gaps in memory."""
        ...


class RecordedLayer(Protocol):
    """A layer that tells a book."""

    name: str
    record: GradientRecord
    trainable: frozenset[str]
    """Which of its parameters train."""

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        """Gradients of `count` examples, by the layer's own names; an example may have several rows (views)."""
        ...


def _linear_gradients(trainable: frozenset[str], a: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
    """Of y = Wa + b, from a's and g's rows; an example's rows follow each other."""
    a, g = a.reshape(count, -1, a.shape[-1]), g.reshape(count, -1, g.shape[-1])
    found: dict[str, ParameterGradients] = {}
    if "weight" in trainable:
        shape = g.shape[-1], a.shape[-1]
        places, size = a.shape[1], shape[0] * shape[1]
        apart = places == 1 or (2 * places**2 < size and count * size * g.itemsize > MAX_KEPT_BYTES)
        found["weight"] = OuterProducts(a, g) if apart else FullGradients(torch.bmm(g.mT, a.to(g.dtype)), shape)
    if "bias" in trainable:
        found["bias"] = FullGradients(g[:, 0] if g.shape[1] == 1 else g.sum(1), (g.shape[-1],))
    return found


class RecordedLinear(nn.Linear):
    name: str
    record: GradientRecord
    trainable: frozenset[str]

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight.detach(), _detach_parameter(self.bias))
        return self.record.record_call(self, (input.detach(),), output)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return _linear_gradients(self.trainable, inputs[0], g, count)


class RecordedConv2d(nn.Conv2d):
    name: str
    record: GradientRecord
    trainable: frozenset[str]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = super()._conv_forward(input, weight.detach(), _detach_parameter(bias))
        return self.record.record_call(self, (input.detach(),), output)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        size = g[0, 0].numel() * self.kernel_size[0] * self.kernel_size[1] * self.in_channels * g.itemsize
        rows = len(g) // count
        some = max(1, self.record.piece_bytes // (size * rows))
        images, gradients = (torch.split(t, some * rows) for t in (inputs[0], g.permute(0, 2, 3, 1)))
        pieces = [self._piece_gradients(i, each, len(each) // rows) for i, each in zip(images, gradients, strict=True)]
        return (
            pieces[0]
            if len(pieces) == 1
            else {n: ConcatenatedGradients(tuple(p[n] for p in pieces), some) for n in pieces[0]}
        )

    def _piece_gradients(self, images: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        around = extract_patches(images, self.kernel_size, self.stride, self.padding, self.dilation)
        return self.gradients_from_patches(around, g, count)

    def gradients_from_patches(self, patches: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        """From neighbourhoods (… × kernel·channels) and the gradients (… × filters) where they lie."""
        shape = self.out_channels, *self.kernel_size, self.in_channels // self.groups
        found = _linear_gradients(
            self.trainable if self.groups == 1 else self.trainable - {"weight"}, patches, g, count
        )
        if self.groups > 1 and "weight" in self.trainable:
            a = patches.reshape(count, -1, shape[1] * shape[2], self.groups, shape[3]).to(g.dtype)
            g = g.reshape(count, -1, self.groups, self.out_channels // self.groups)
            found["weight"] = FullGradients(torch.einsum("ntkgc,ntgo->ngokc", a, g), shape)
        if "weight" in found:
            found["weight"] = ConvolutionGradients(found["weight"], shape)
        return found


class RecordedIm2colConv2d(RecordedConv2d):
    """An `UnfoldedConv2d`, whose neighbourhoods are there already."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        around = extract_patches(input, self.kernel_size, self.stride, self.padding, self.dilation)
        matrix = weight.detach().permute(2, 3, 1, 0).reshape(-1, weight.shape[0])
        output = around.reshape(-1, around.shape[-1]) @ matrix
        output = output if bias is None else output + bias.detach().to(output.dtype)
        output = self.record.record_call(self, (around.detach(),), output)
        return output.reshape(*around.shape[:-1], -1).permute(0, 3, 1, 2)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return self.gradients_from_patches(inputs[0], g, count)


class RecordedGroupNorm(nn.GroupNorm):
    name: str
    record: GradientRecord
    trainable: frozenset[str]

    def forward(self, input: Tensor) -> Tensor:
        values = self.record.make_contiguous(input.to(self.weight.dtype))
        n, channels = values.shape[:2]
        output, mean, scale = torch.native_group_norm(
            values,
            self.weight.detach(),
            self.bias.detach(),
            n,
            channels,
            values[0, 0].numel(),
            self.num_groups,
            self.eps,
        )
        return self.record.record_call(self, (values.detach(), mean.detach(), scale.detach()), output)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        values, mean, scale = inputs
        mean, scale = (t.repeat_interleave(self.num_channels // self.num_groups, 1) for t in (mean, scale))
        g, values = (t.reshape(*t.shape[:2], -1) for t in (g, values))  # a dense layer's values have no places
        plain = g.sum(2)
        # Σ g·(x − mean)·scale, without writing the normalised values down.
        scaled = ((g * values).sum(2) - mean * plain) * scale
        return _affine_gradients(self.trainable, scaled, plain, count)


class RecordedLayerNorm(nn.LayerNorm):
    name: str
    record: GradientRecord
    trainable: frozenset[str]

    def forward(self, input: Tensor) -> Tensor:
        normal = F.layer_norm(input, self.normalized_shape, None, None, self.eps)
        bias = _detach_parameter(self.bias)
        output = normal * self.weight.detach()
        return self.record.record_call(self, (normal.detach(),), output if bias is None else output + bias)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return _affine_gradients(self.trainable, g * inputs[0], g, count, self.normalized_shape)


def _affine_gradients(
    trainable: frozenset[str], scaled: Tensor, plain: Tensor, count: int, shape: tuple[int, ...] | None = None
) -> dict[str, ParameterGradients]:
    """Of y = weight·x + bias, from the rows that are to be added up for each example."""
    shape = tuple(plain.shape[1:]) if shape is None else shape
    rows = {"weight": scaled, "bias": plain}
    return {n: FullGradients(t.reshape(count, -1, *shape).sum(1), shape) for n, t in rows.items() if n in trainable}


def _detach_parameter(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


RECORDED_TYPES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RecordedLinear,
    nn.Conv2d: RecordedConv2d,
    Im2colConv2d: RecordedIm2colConv2d,
    nn.GroupNorm: RecordedGroupNorm,
    nn.LayerNorm: RecordedLayerNorm,
}


def copy_with_record(module: M, names: frozenset[str], record: GradientRecord) -> M:
    """The same module on the same weights; layers that have parameters among `names` tell the book."""
    if len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)]):
        raise NotRecordableError("layers share parameters")
    memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    other = copy.deepcopy(module, memo)
    for name, layer in other.named_modules():
        wanted = frozenset(n for n, _ in layer.named_parameters(recurse=False) if f"{name}.{n}".lstrip(".") in names)
        if wanted:
            if type(layer) not in RECORDED_TYPES or not _is_plain(layer):
                raise NotRecordableError(f"{name} is a {type(layer).__name__}")
            layer.__class__ = RECORDED_TYPES[type(layer)]
            known = cast(RecordedLayer, layer)
            known.name, known.record, known.trainable = name, record, wanted
    return other


def find_recorded_layers(module: nn.Module) -> dict[str, RecordedLayer]:
    """The layers of a twin that tell a book, by name."""
    kinds = tuple(RECORDED_TYPES.values())
    return {name: cast(RecordedLayer, layer) for name, layer in module.named_modules() if isinstance(layer, kinds)}


def _is_plain(layer: nn.Module) -> bool:
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values(), *layer._backward_hooks.values())
    hooked = any(not getattr(hook, "changes_nothing", False) for hook in hooks)
    zeros = not isinstance(layer, nn.Conv2d) or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    return zeros and not hooked


class _RequireGradient(torch.autograd.Function):
    """From here on there is something to differentiate by: the gradient of the output is asked for, nothing before."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor) -> Tensor:
        del token
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        return None, None


class GradientTape:
    """One forward and backward pass of a network by itself. What a layer saw is let go as soon as it is of no use."""

    def __init__(self, device: torch.device) -> None:
        self.token = torch.zeros((), device=device, requires_grad=True)
        self.piece_bytes = PIECE_BYTES if device.type == "cpu" else sys.maxsize
        self.begin_pass(0)

    def begin_pass(self, count: int) -> None:
        """Of `count` examples, whose rows follow each other."""
        self.count = count
        self.inputs: dict[str, tuple[LayerInputs, list[int]]] = {}
        self.gradients: dict[str, ParameterGradients] = {}
        self.called_layers: set[str] = set()

    def record_call(self, layer: RecordedLayer, inputs: LayerInputs, output: Tensor) -> Tensor:
        if layer.name in self.called_layers:
            raise NotRecordableError(f"{layer.name} is called twice")
        self.called_layers.add(layer.name)
        self.inputs[layer.name] = inputs, [t._version for t in inputs]
        if not output.requires_grad:
            output = _RequireGradient.apply(output, self.token)
        output.register_hook(partial(self._collect_gradients, layer))  # type: ignore[no-untyped-call]
        return output

    def _collect_gradients(self, layer: RecordedLayer, g: Tensor) -> None:
        seen, versions = self.inputs.pop(layer.name)
        if [t._version for t in seen] != versions:
            raise NotRecordableError(f"what {layer.name} saw was written over")
        self.gradients |= {
            f"{layer.name}.{name}": part for name, part in layer.parameter_gradients(seen, g, self.count).items()
        }

    def make_contiguous(self, images: Tensor) -> Tensor:
        kept = images.is_cpu and images.is_contiguous(memory_format=torch.channels_last)
        return images if kept else images.contiguous()

    def backward(self, loss: Tensor) -> dict[str, ParameterGradients]:
        """The parts of every parameter that trains."""
        torch.autograd.grad(loss, [self.token], allow_unused=True)
        return self.gradients
