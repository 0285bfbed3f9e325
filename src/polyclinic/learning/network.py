"""A network as a function of its weights, with a fast path for the weights that live in the module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from polyclinic.core import Batch, Bundle, Tensors
from polyclinic.models import Classifier


class LiveNetwork:
    """Implements `core.Network` on one module.

    `load` copies weights into the module once per job; calls with exactly those weights run the plain module, at the
    speed of an ordinary training loop. Any other weights (a teacher, a previous model) are called functionally.
    """

    def __init__(self, module: Classifier, device: torch.device | None = None) -> None:
        self.module = module.to(device or torch.device("cpu"))
        self.device = device or torch.device("cpu")
        self.layout = torch.channels_last if _convolves(module) else torch.contiguous_format
        """Convolutions run much faster, on CPU and GPU, where a pixel's channels lie side by side."""
        self.module = self.module.to(memory_format=self.layout)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.live: Bundle = {"model": dict(parameters), "buffers": buffers}
        self._mode: frozenset[str] | None = None
        """What `training_mode` was last called with; None after evaluation. Walking all modules takes its time."""
        self._norms = {name: m for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        live = weights is self.live
        logits: Tensor = self.module(self._laid(images)) if live else self._call(self.module, weights, images, "")
        return logits

    def _laid(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=self.layout) if images.ndim == 4 else images

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        extractor = self.module.extractor
        live = weights is self.live
        output: Tensor = extractor(self._laid(images)) if live else self._call(extractor, weights, images, "extractor.")
        return output

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(weights, images), labels)

    @staticmethod
    def _call(module: nn.Module, weights: Bundle, images: Tensor, prefix: str) -> Tensor:
        tensors = {**weights["model"], **weights["buffers"]}
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        output: Tensor = functional_call(module, own, (images,))
        return output

    def evaluation_mode(self) -> None:
        self._mode = None
        self.module.eval()

    @torch.no_grad()
    def load(self, weights: Bundle) -> Bundle:
        """Copy weights in; returns the live bundle, by whose identity calls take the fast path."""
        for kind, live in self.live.items():
            given = weights.get(kind, {})
            if live:
                wanted = [given[name] for name in live]
                on_cpu = self.device.type == "cpu"
                torch._foreach_copy_(list(live.values()), wanted if on_cpu else across(wanted, self.device))
        return self.live

    @torch.no_grad()
    def take(self) -> Bundle:
        """A copy of the live weights, on the CPU."""
        if self.device.type == "cpu":
            return {
                kind: {n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in g.items()}
                for kind, g in self.live.items()
            }
        home = torch.device("cpu")
        return {
            kind: dict(zip(group, across([t.detach() for t in group.values()], home), strict=True))
            for kind, group in self.live.items()
        }

    def training_mode(self, trainable: frozenset[str]) -> None:
        """Train mode, but normalisation layers whose own parameters are frozen stay in eval."""
        if self._mode == trainable:
            return
        self._mode = trainable
        self.module.train()
        for name, norm in self._norms.items():
            if f"{name}.weight" in self.live["model"] and f"{name}.weight" not in trainable:
                norm.eval()

    def trainable(self, fraction: float, prefixes: Iterable[str]) -> frozenset[str]:
        """Names of the parameters a step may move: the top `fraction` of layers, within `prefixes` if any."""
        names = frozenset(self.live["model"]) if fraction >= 1 else self.module.tail(fraction)
        wanted = tuple(prefixes)
        return frozenset(n for n in names if n.startswith(wanted)) if wanted else names

    def require_gradients(self, names: frozenset[str]) -> list[nn.Parameter]:
        chosen: Tensors = self.live["model"]
        for name, parameter in chosen.items():
            parameter.requires_grad_(name in names)
        return [p for n, p in chosen.items() if n in names and isinstance(p, nn.Parameter)]


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def across(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on another device, moved as one block per dtype: each of hundreds of small ones would wait its turn."""
    moved: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        chosen = [position for position, tensor in enumerate(tensors) if tensor.dtype == dtype]
        block = torch.cat([tensors[position].reshape(-1) for position in chosen]).to(device)
        pieces = torch.split(block, [tensors[position].numel() for position in chosen])
        moved |= {p: piece.reshape(tensors[p].shape).clone() for p, piece in zip(chosen, pieces, strict=True)}
    return [moved[position] for position in range(len(tensors))]


def weights_of(module: nn.Module) -> Bundle:
    """A copy of a module's parameters and buffers, as a bundle."""
    plain = torch.contiguous_format
    return {
        "model": {n: p.detach().clone(memory_format=plain) for n, p in module.named_parameters()},
        "buffers": {n: b.detach().clone(memory_format=plain) for n, b in module.named_buffers()},
    }
