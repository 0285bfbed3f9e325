"""Per-example gradients from one forward and one backward pass: book-keeping (Bu et al., ICML 2023).

Layers are called with detached parameters, and their inputs a are recorded. Together with the gradients g of their
outputs these give the norm of each example's gradient, and weighted sums of the gradients. So autograd never computes
the parameters' gradients, and per-example gradients are kept only where that is the cheapest way: for convolutions, as
one batched product of g with the patches of a.

Nothing here is specific to privacy. All sums have a leading axis of sites, which is 1 where a site trains alone.
"""

import copy
import sys
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
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
"""The most bytes of one parameter's per-example gradients that are kept in memory if there is another way."""
PIECE_BYTES = 1 << 21
"""The bytes of a convolution's patches that are made at once on a CPU; they fit into its cache."""
LayerInputs = tuple[Tensor, ...]
"""The tensors that a layer needs to compute its gradients, usually its detached input."""
M = TypeVar("M", bound=nn.Module)


class NotRecordableError(Exception):
    """A network that has parameters in other layers than those below, or calls one of them twice."""


class GradientRecord(Protocol):
    """Keeps the inputs of every layer of one forward pass."""

    @property
    def piece_bytes(self) -> int:
        """The bytes of a convolution's patches that are made at once."""
        ...

    def record_call(self, layer: "RecordedLayer", inputs: LayerInputs, output: Tensor) -> Tensor:
        """Keep a layer's inputs, and return its output, prepared so that its gradient will be known."""
        ...

    def make_contiguous(self, images: Tensor) -> Tensor:
        """Return the images in a contiguous memory format."""
        ...


class RecordedLayer(nn.Module):
    """A layer that reports its calls to a record."""

    name: str
    record: GradientRecord
    trainable: frozenset[str]
    """The names of its parameters that train."""

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        """Return the per-example gradients of the layer's trainable parameters.

        Args:
            inputs: What the layer recorded.
            g: The gradient of its output.
            count: The number of examples; each has one row in `inputs` and `g`, or several (its views).
        """
        raise NotImplementedError


def _linear_gradients(trainable: frozenset[str], a: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
    """Return the gradients of W and b in y = Wa + b. One example's rows of `a` and `g` are adjacent."""
    a, g = a.reshape(count, -1, a.shape[-1]), g.reshape(count, -1, g.shape[-1])
    found: dict[str, ParameterGradients] = {}
    if "weight" in trainable:
        shape = g.shape[-1], a.shape[-1]
        places, size = a.shape[1], shape[0] * shape[1]
        keep_factors = places == 1 or (2 * places**2 < size and count * size * g.itemsize > MAX_KEPT_BYTES)
        found["weight"] = OuterProducts(a, g) if keep_factors else FullGradients(torch.bmm(g.mT, a.to(g.dtype)), shape)
    if "bias" in trainable:
        found["bias"] = FullGradients(g[:, 0] if g.shape[1] == 1 else g.sum(1), (g.shape[-1],))
    return found


class RecordedLinear(RecordedLayer, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = nn.functional.linear(input, self.weight.detach(), _detach_parameter(self.bias))
        return self.record.record_call(self, (input.detach(),), output)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return _linear_gradients(self.trainable, inputs[0], g, count)


class RecordedConv2d(RecordedLayer, nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = super()._conv_forward(input, weight.detach(), _detach_parameter(bias))
        return self.record.record_call(self, (input.detach(),), output)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        size = g[0, 0].numel() * self.kernel_size[0] * self.kernel_size[1] * self.in_channels * g.itemsize
        rows = len(g) // count
        examples = max(1, self.record.piece_bytes // (size * rows))
        images, gradients = (torch.split(t, examples * rows) for t in (inputs[0], g.permute(0, 2, 3, 1)))
        pieces = []
        for some, each in zip(images, gradients, strict=True):
            patches = extract_patches(some, self.kernel_size, self.stride, self.padding, self.dilation)
            pieces.append(self.gradients_from_patches(patches, each, len(each) // rows))
        if len(pieces) == 1:
            return pieces[0]
        return {name: ConcatenatedGradients(tuple(piece[name] for piece in pieces), examples) for name in pieces[0]}

    def gradients_from_patches(self, patches: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        """Return the gradients from patches (… × kernel·channels) and output gradients g (… × filters)."""
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


class RecordedIm2colConv2d(RecordedConv2d, Im2colConv2d):
    """An `Im2colConv2d`, which has its patches already."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return Im2colConv2d._conv_forward(self, input, weight.detach(), _detach_parameter(bias))

    def multiply_patches(self, patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.record.record_call(self, (patches.detach(),), super().multiply_patches(patches, weight, bias))

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return self.gradients_from_patches(inputs[0], g, count)


class RecordedGroupNorm(RecordedLayer, nn.GroupNorm):
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
        return _affine_gradients(self.trainable, ((g * values).sum(2) - mean * plain) * scale, plain, count)


class RecordedLayerNorm(RecordedLayer, nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        normal = nn.functional.layer_norm(input, self.normalized_shape, None, None, self.eps)
        bias = _detach_parameter(self.bias)
        output = normal * self.weight.detach()
        return self.record.record_call(self, (normal.detach(),), output if bias is None else output + bias)

    def parameter_gradients(self, inputs: LayerInputs, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return _affine_gradients(self.trainable, g * inputs[0], g, count, self.normalized_shape)


def _affine_gradients(
    trainable: frozenset[str], scaled: Tensor, plain: Tensor, count: int, shape: tuple[int, ...] | None = None
) -> dict[str, ParameterGradients]:
    """Return the gradients in y = weight·x + bias, where `scaled` is g·x and `plain` is g, summed over an example."""
    shape = tuple(plain.shape[1:]) if shape is None else shape
    rows = {"weight": scaled, "bias": plain}
    return {n: FullGradients(t.reshape(count, -1, *shape).sum(1), shape) for n, t in rows.items() if n in trainable}


def _detach_parameter(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


RECORDED_TYPES: dict[type[nn.Module], type[RecordedLayer]] = {
    nn.Linear: RecordedLinear,
    nn.Conv2d: RecordedConv2d,
    Im2colConv2d: RecordedIm2colConv2d,
    nn.GroupNorm: RecordedGroupNorm,
    nn.LayerNorm: RecordedLayerNorm,
}


def copy_with_record(module: M, names: frozenset[str], record: GradientRecord) -> M:
    """Copy a module, sharing its parameters, so that the layers with parameters among `names` report to `record`."""
    if len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)]):
        raise NotRecordableError("layers share parameters")
    memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    other = copy.deepcopy(module, memo)
    for name, layer in other.named_modules():
        trainable = frozenset(n for n, _ in layer.named_parameters(recurse=False) if f"{name}.{n}".lstrip(".") in names)
        if trainable:
            if type(layer) not in RECORDED_TYPES or not _is_plain(layer):
                raise NotRecordableError(f"{name} is a {type(layer).__name__}")
            layer.__class__ = RECORDED_TYPES[type(layer)]
            assert isinstance(layer, RecordedLayer)
            layer.name, layer.record, layer.trainable = name, record, trainable
    return other


def _is_plain(layer: nn.Module) -> bool:
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values(), *layer._backward_hooks.values())
    hooked = any(not getattr(hook, "changes_nothing", False) for hook in hooks)
    zeros = not isinstance(layer, nn.Conv2d) or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    return zeros and not hooked


class _RequireGradient(torch.autograd.Function):
    """Make an output require a gradient, although nothing before it does: backward stops here."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _token: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        return None, None


class GradientTape:
    """A `GradientRecord` of one network. A layer's inputs are released as soon as its gradients are known."""

    def __init__(self, device: torch.device) -> None:
        self.token = torch.zeros((), device=device, requires_grad=True)
        self.piece_bytes = PIECE_BYTES if device.type == "cpu" else sys.maxsize
        self.begin_pass(0)

    def begin_pass(self, count: int) -> None:
        """Start a pass over `count` examples; the rows of one example (its views) are adjacent."""
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
        inputs, versions = self.inputs.pop(layer.name)
        if [t._version for t in inputs] != versions:
            raise NotRecordableError(f"the input of {layer.name} was overwritten")
        gradients = layer.parameter_gradients(inputs, g, self.count)
        self.gradients |= {f"{layer.name}.{name}": gradient for name, gradient in gradients.items()}

    def make_contiguous(self, images: Tensor) -> Tensor:
        ready = images.is_cpu and images.is_contiguous(memory_format=torch.channels_last)
        return images if ready else images.contiguous()

    def backward(self, loss: Tensor) -> dict[str, ParameterGradients]:
        """Return the per-example gradients of every parameter that trains, whose sum is that of `loss`."""
        torch.autograd.grad(loss, [self.token], allow_unused=True)
        return self.gradients
