"""A network as a function of its weights, with a fast path for the weights that live in the module."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from polyclinic.core import Batch, Bundle, Precision, Tensors
from polyclinic.errors import EngineError
from polyclinic.flat import copied
from polyclinic.learning.dropout import draws_alone, with_keys
from polyclinic.learning.unfolded import unfolded
from polyclinic.models import Classifier

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Layers that normalise what passes; the first are BatchNorm and InstanceNorm, of any dimension."""


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
        self._dropouts = with_keys(module, self.device)
        self.live: Bundle = {"model": dict(module.named_parameters()), "buffers": _statistics(module)}
        self.inhabited = True
        """Whether weights may live in the module; compilers cannot compare a bundle with them."""
        self.calls: dict[Any, Any] = {}
        """What stacks made of this network as a function, compiled or not."""
        self._lower: torch.dtype | None = None
        """What calls compute in at present, if not in the weights' own precision."""
        self._mode: frozenset[str] | None = None
        """What `training_mode` was last called with; None after evaluation. Walking all modules takes its time."""
        self._norms = {name: m for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._compute(self.module, weights, images, "")

    @contextmanager
    def precision(self, wanted: Precision) -> Iterator[None]:
        """Meanwhile calls compute in `wanted`, by autocast; weights, statistics and what calls return stay float32."""
        lower = {"float32": None, "bfloat16": torch.bfloat16}[wanted]
        if lower is not None and any(t.dtype == torch.float64 for t in self.live["model"].values()):
            raise EngineError(
                "training.precision is bfloat16, but this network's weights are float64; "
                "give it float32 weights, or set training.precision: float32"
            )
        before, self._lower = self._lower, lower
        slow = self.module.modules() if lower and self.device.type == "cpu" else ()
        hooks = [m.register_forward_pre_hook(_in_single) for m in slow if isinstance(m, nn.GroupNorm)]
        try:
            yield
        finally:
            self._lower = before
            for hook in hooks:
                hook.remove()

    def _compute(self, module: nn.Module, weights: Bundle, images: Tensor, prefix: str) -> Tensor:
        if self._lower is None:
            return self._forward(module, weights, images, prefix)
        # A call casts every weight once, so there is nothing to cache; and a cache would outlive the optimiser's step.
        with torch.autocast(self.device.type, self._lower, cache_enabled=False):
            return self._forward(module, weights, images, prefix).float()

    def _forward(self, module: nn.Module, weights: Bundle, images: Tensor, prefix: str) -> Tensor:
        live = self.inhabited and weights is self.live
        output: Tensor = module(self._laid(images)) if live else self._call(module, weights, images, prefix)
        return output

    def _laid(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=self.layout) if images.ndim == 4 else images

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._compute(self.module.extractor, weights, images, "extractor.")

    def head(self, weights: Bundle, features: Tensor) -> Tensor:
        return self._compute(self.module.head, weights, features, "head.")

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(weights, images), labels)

    def taught(self, weights: Bundle, images: Tensor, features: bool = False) -> Tensor:
        if features:
            return self._call(self._calm.extractor, weights, images, "extractor.").detach()
        return self._call(self._calm, weights, images, "").detach()

    @cached_property
    def _calm(self) -> Classifier:
        """The module as it evaluates, whatever mode the other is in; its own weights are never used."""
        return copy.deepcopy(self.module).eval()

    @staticmethod
    def _call(module: nn.Module, weights: Bundle, images: Tensor, prefix: str) -> Tensor:
        tensors = {**weights["model"], **weights["buffers"]}
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        output: Tensor = functional_call(module, own, (images,))
        return output

    @cached_property
    def stackable(self) -> LiveNetwork:
        """The same network, written so that many sites' weights run as one; its own weights are never used."""
        network = LiveNetwork(unfolded(self.module), self.device)
        network.inhabited = False
        return network

    @cached_property
    def shared_draws(self) -> str:
        """Layers whose random numbers depend on who else trains in the process."""
        return ", ".join(sorted({type(m).__name__ for m in self.module.modules() if not draws_alone(m)}))

    @property
    def draws(self) -> bool:
        return bool(self._dropouts)

    def draw_by(self, key: int) -> None:
        """What dropout drops from now on."""
        for layer in self._dropouts.values():
            layer.key.fill_(key)

    def keyed(self, keys: Tensor) -> Tensors:
        """The same for calls with weights of one's own: to be passed among their buffers."""
        return {f"{name}.key": keys for name in self._dropouts}

    def evaluation_mode(self) -> None:
        self._mode = None
        self.module.eval()

    @torch.no_grad()
    def load(self, weights: Bundle) -> Bundle:
        """Copy weights in; returns the live bundle, by whose identity calls take the fast path."""
        for kind, live in self.live.items():
            given = weights.get(kind, {})
            if live:
                wanted = list(moved({name: given[name] for name in live}, self.device).values())
                torch._foreach_copy_(list(live.values()), wanted)
        return self.live

    @torch.no_grad()
    def take(self) -> Bundle:
        """A copy of the live weights, where they are."""
        return {kind: copied(group) for kind, group in self.live.items()}

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


def _in_single(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As autocast does on CUDA; a CPU takes 3.6 times as long to normalise groups of bfloat16."""
    return tuple(tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in given)


_in_single.changes_nothing = True  # type: ignore[attr-defined]  # layers may still be recorded


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def across(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on another device, moved as one block per dtype: each of hundreds of small ones would wait its turn."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [tensor.to(device, copy=True) for tensor in tensors]
    moved: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        chosen = [position for position, tensor in enumerate(tensors) if tensor.dtype == dtype]
        block = torch.cat([tensors[position].reshape(-1) for position in chosen]).to(device)
        pieces = torch.split(block, [tensors[position].numel() for position in chosen])
        moved |= {p: piece.reshape(tensors[p].shape).clone() for p, piece in zip(chosen, pieces, strict=True)}
    return [moved[position] for position in range(len(tensors))]


def moved(group: Tensors, device: torch.device) -> Tensors:
    """The tensors on `device`; themselves if they are there."""
    if all(tensor.device.type == device.type for tensor in group.values()):
        return group
    return dict(zip(group, across(list(group.values()), device), strict=True))


def on(bundle: Bundle, device: torch.device) -> Bundle:
    return {kind: moved(group, device) for kind, group in bundle.items()}


def weights_of(module: nn.Module) -> Bundle:
    """A copy of a module's parameters and buffers, as a bundle."""
    return {"model": copied(dict(module.named_parameters())), "buffers": copied(_statistics(module))}


def norm_names(module: nn.Module) -> frozenset[str]:
    """The parameters and lasting buffers of normalisation layers, known by their type: names tell nothing."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, NORMS)}
    return frozenset(f"{name}.{own}" for name, layer in layers.items() for own in layer.state_dict())


def _statistics(module: nn.Module) -> Tensors:
    """The buffers that belong to the model; not what a layer only keeps for the moment."""
    lasting = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in lasting}
