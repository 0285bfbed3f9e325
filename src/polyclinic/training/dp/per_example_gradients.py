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

from polyclinic.training.dp.gradient_parts import FullGradients, Joined, OuterProducts, ParameterGradients, Reordered
from polyclinic.training.im2col_conv import UnfoldedConv2d, neighbourhoods

LARGE = 1 << 26
"""Bytes of one parameter's per-example gradients, above which they are not kept if there is another way."""
PIECE = 1 << 21
"""On a CPU, what stays near the processor."""
Seen = tuple[Tensor, ...]
M = TypeVar("M", bound=nn.Module)


class NotRecordableError(Exception):
    """A network that is not the sum of layers known here, each called once."""


class GradientRecord(Protocol):
    @property
    def piece(self) -> int:
        """Bytes of a convolution's neighbourhoods that are made at once."""
        ...

    def enter(self, layer: Recorded, seen: Seen, output: Tensor) -> Tensor:
        """Note what a layer saw; returns its output, whose gradient will be known."""
        ...

    def laid(self, images: Tensor) -> Tensor:
        """The images without gaps in memory."""
        ...


class Recorded(Protocol):
    """A layer that tells a book."""

    name: str
    book: GradientRecord
    wanted: frozenset[str]
    """Which of its parameters train."""

    def parts(self, seen: Seen, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        """Gradients of `count` examples, by the layer's own names; an example may have several rows (views)."""
        ...


def _matrix(wanted: frozenset[str], a: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
    """Of y = Wa + b, from a's and g's rows; an example's rows follow each other."""
    a, g = a.reshape(count, -1, a.shape[-1]), g.reshape(count, -1, g.shape[-1])
    found: dict[str, ParameterGradients] = {}
    if "weight" in wanted:
        shape = g.shape[-1], a.shape[-1]
        places, size = a.shape[1], shape[0] * shape[1]
        apart = places == 1 or (2 * places**2 < size and count * size * g.itemsize > LARGE)
        found["weight"] = OuterProducts(a, g) if apart else FullGradients(torch.bmm(g.mT, a.to(g.dtype)), shape)
    if "bias" in wanted:
        found["bias"] = FullGradients(g[:, 0] if g.shape[1] == 1 else g.sum(1), (g.shape[-1],))
    return found


class RecordedLinear(nn.Linear):
    name: str
    book: GradientRecord
    wanted: frozenset[str]

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight.detach(), _held(self.bias))
        return self.book.enter(self, (input.detach(),), output)

    def parts(self, seen: Seen, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return _matrix(self.wanted, seen[0], g, count)


class RecordedConv2d(nn.Conv2d):
    name: str
    book: GradientRecord
    wanted: frozenset[str]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = super()._conv_forward(input, weight.detach(), _held(bias))
        return self.book.enter(self, (input.detach(),), output)

    def parts(self, seen: Seen, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        size = g[0, 0].numel() * self.kernel_size[0] * self.kernel_size[1] * self.in_channels * g.itemsize
        rows = len(g) // count
        some = max(1, self.book.piece // (size * rows))
        images, gradients = (torch.split(t, some * rows) for t in (seen[0], g.permute(0, 2, 3, 1)))
        pieces = [self._parts(i, each, len(each) // rows) for i, each in zip(images, gradients, strict=True)]
        return pieces[0] if len(pieces) == 1 else {n: Joined(tuple(p[n] for p in pieces), some) for n in pieces[0]}

    def _parts(self, images: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        around = neighbourhoods(images, self.kernel_size, self.stride, self.padding, self.dilation)
        return self.products(around, g, count)

    def products(self, around: Tensor, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        """From neighbourhoods (… × kernel·channels) and the gradients (… × filters) where they lie."""
        shape = self.out_channels, *self.kernel_size, self.in_channels // self.groups
        found = _matrix(self.wanted if self.groups == 1 else self.wanted - {"weight"}, around, g, count)
        if self.groups > 1 and "weight" in self.wanted:
            a = around.reshape(count, -1, shape[1] * shape[2], self.groups, shape[3]).to(g.dtype)
            g = g.reshape(count, -1, self.groups, self.out_channels // self.groups)
            found["weight"] = FullGradients(torch.einsum("ntkgc,ntgo->ngokc", a, g), shape)
        if "weight" in found:
            found["weight"] = Reordered(found["weight"], shape)
        return found


class RecordedUnfolded(RecordedConv2d):
    """An `UnfoldedConv2d`, whose neighbourhoods are there already."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        around = neighbourhoods(input, self.kernel_size, self.stride, self.padding, self.dilation)
        matrix = weight.detach().permute(2, 3, 1, 0).reshape(-1, weight.shape[0])
        output = around.reshape(-1, around.shape[-1]) @ matrix
        output = output if bias is None else output + bias.detach().to(output.dtype)
        output = self.book.enter(self, (around.detach(),), output)
        return output.reshape(*around.shape[:-1], -1).permute(0, 3, 1, 2)

    def parts(self, seen: Seen, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return self.products(seen[0], g, count)


class RecordedGroupNorm(nn.GroupNorm):
    name: str
    book: GradientRecord
    wanted: frozenset[str]

    def forward(self, input: Tensor) -> Tensor:
        values = self.book.laid(input.to(self.weight.dtype))
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
        return self.book.enter(self, (values.detach(), mean.detach(), scale.detach()), output)

    def parts(self, seen: Seen, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        values, mean, scale = seen
        mean, scale = (t.repeat_interleave(self.num_channels // self.num_groups, 1) for t in (mean, scale))
        g, values = (t.reshape(*t.shape[:2], -1) for t in (g, values))  # a dense layer's values have no places
        plain = g.sum(2)
        # Σ g·(x − mean)·scale, without writing the normalised values down.
        scaled = ((g * values).sum(2) - mean * plain) * scale
        return _affine(self.wanted, scaled, plain, count)


class RecordedLayerNorm(nn.LayerNorm):
    name: str
    book: GradientRecord
    wanted: frozenset[str]

    def forward(self, input: Tensor) -> Tensor:
        normal = F.layer_norm(input, self.normalized_shape, None, None, self.eps)
        bias = _held(self.bias)
        output = normal * self.weight.detach()
        return self.book.enter(self, (normal.detach(),), output if bias is None else output + bias)

    def parts(self, seen: Seen, g: Tensor, count: int) -> dict[str, ParameterGradients]:
        return _affine(self.wanted, g * seen[0], g, count, self.normalized_shape)


def _affine(
    wanted: frozenset[str], scaled: Tensor, plain: Tensor, count: int, shape: tuple[int, ...] | None = None
) -> dict[str, ParameterGradients]:
    """Of y = weight·x + bias, from the rows that are to be added up for each example."""
    shape = tuple(plain.shape[1:]) if shape is None else shape
    rows = {"weight": scaled, "bias": plain}
    return {n: FullGradients(t.reshape(count, -1, *shape).sum(1), shape) for n, t in rows.items() if n in wanted}


def _held(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RecordedLinear,
    nn.Conv2d: RecordedConv2d,
    UnfoldedConv2d: RecordedUnfolded,
    nn.GroupNorm: RecordedGroupNorm,
    nn.LayerNorm: RecordedLayerNorm,
}


def twin(module: M, names: frozenset[str], book: GradientRecord) -> M:
    """The same module on the same weights; layers that have parameters among `names` tell the book."""
    if len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)]):
        raise NotRecordableError("layers share parameters")
    memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    other = copy.deepcopy(module, memo)
    for name, layer in other.named_modules():
        wanted = frozenset(n for n, _ in layer.named_parameters(recurse=False) if f"{name}.{n}".lstrip(".") in names)
        if wanted:
            if type(layer) not in KINDS or not _is_plain(layer):
                raise NotRecordableError(f"{name} is a {type(layer).__name__}")
            layer.__class__ = KINDS[type(layer)]
            known = cast(Recorded, layer)
            known.name, known.book, known.wanted = name, book, wanted
    return other


def told(module: nn.Module) -> dict[str, Recorded]:
    """The layers of a twin that tell a book, by name."""
    kinds = tuple(KINDS.values())
    return {name: cast(Recorded, layer) for name, layer in module.named_modules() if isinstance(layer, kinds)}


def _is_plain(layer: nn.Module) -> bool:
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values(), *layer._backward_hooks.values())
    hooked = any(not getattr(hook, "changes_nothing", False) for hook in hooks)
    zeros = not isinstance(layer, nn.Conv2d) or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    return zeros and not hooked


class _Start(torch.autograd.Function):
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
        self.piece = PIECE if device.type == "cpu" else sys.maxsize
        self.begin(0)

    def begin(self, count: int) -> None:
        """Of `count` examples, whose rows follow each other."""
        self.count = count
        self.seen: dict[str, tuple[Seen, list[int]]] = {}
        self.parts: dict[str, ParameterGradients] = {}
        self.called: set[str] = set()

    def enter(self, layer: Recorded, seen: Seen, output: Tensor) -> Tensor:
        if layer.name in self.called:
            raise NotRecordableError(f"{layer.name} is called twice")
        self.called.add(layer.name)
        self.seen[layer.name] = seen, [t._version for t in seen]
        if not output.requires_grad:
            output = _Start.apply(output, self.token)
        output.register_hook(partial(self._note, layer))  # type: ignore[no-untyped-call]
        return output

    def _note(self, layer: Recorded, g: Tensor) -> None:
        seen, versions = self.seen.pop(layer.name)
        if [t._version for t in seen] != versions:
            raise NotRecordableError(f"what {layer.name} saw was written over")
        self.parts |= {f"{layer.name}.{name}": part for name, part in layer.parts(seen, g, self.count).items()}

    def laid(self, images: Tensor) -> Tensor:
        kept = images.is_cpu and images.is_contiguous(memory_format=torch.channels_last)
        return images if kept else images.contiguous()

    def backward(self, loss: Tensor) -> dict[str, ParameterGradients]:
        """The parts of every parameter that trains."""
        torch.autograd.grad(loss, [self.token], allow_unused=True)
        return self.parts
