"""A network as a function of its weights, with a fast path for the weights that live in the module."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from polyclinic.core.contract import AUX_PREFIX, Batch, Bundle, Precision, Tensors
from polyclinic.core.errors import EngineError
from polyclinic.core.flat_tensors import copied
from polyclinic.models import Classifier
from polyclinic.models.activation_checkpointing import Recomputed
from polyclinic.training.im2col_conv import unfolded
from polyclinic.training.keyed_dropout import draws_alone, with_keys

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Layers that normalise what passes; the first are BatchNorm and InstanceNorm, of any dimension."""


class LiveNetwork:
    """Implements `core.Network` on one module.

    `load` copies weights into the module once per job; calls with exactly those weights run the plain module, at the
    speed of an ordinary training loop. Any other weights (a teacher, a previous model) are called functionally.
    """

    def __init__(
        self, module: Classifier, device: torch.device | None = None, beside: Mapping[str, nn.Module] | None = None
    ) -> None:
        """`beside`: networks that train beside the classifier; calls of it, and its module, do not have them."""
        self.module = module.to(device or torch.device("cpu"))
        self.device = device or torch.device("cpu")
        self.companions = nn.ModuleDict(dict(beside or {})).to(self.device)
        self.layout = torch.channels_last if _convolves(module) else torch.contiguous_format
        """Convolutions run much faster, on CPU and GPU, where a pixel's channels lie side by side."""
        self.module = self.module.to(memory_format=self.layout)
        self._dropouts = with_keys(self.layers(), self.device)
        self.live: Bundle = {
            "model": {**dict(module.named_parameters()), **_prefixed(dict(self.companions.named_parameters()))},
            "buffers": {**_statistics(module), **_prefixed(_statistics(self.companions))},
        }
        self.inhabited = True
        """Whether weights may live in the module; compilers cannot compare a bundle with them."""
        self.calls: dict[Any, Any] = {}
        """What stacks made of this network as a function, compiled or not."""
        self._lower: torch.dtype | None = None
        """What calls compute in at present, if not in the weights' own precision."""
        self._mode: frozenset[str] | None = None
        """What `training_mode` was last called with; None after evaluation. Walking all modules takes its time."""
        self._norms = {name: m for name, m in self.layers() if isinstance(m, nn.modules.batchnorm._BatchNorm)}

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules by name, the classifier's and those beside it."""
        yield from self.module.named_modules()
        yield from self.companions.named_modules(prefix=AUX_PREFIX.removesuffix("."))

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._compute(self.module, weights, "", images)

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

    @contextmanager
    def recomputing(self, wanted: bool = True) -> Iterator[None]:
        """Meanwhile blocks that can compute their activations again do so, instead of keeping them for the gradient."""
        blocks = [module for module in self.module.modules() if wanted and isinstance(module, Recomputed)]
        for block in blocks:
            block.on = True
        try:
            yield
        finally:
            for block in blocks:
                block.on = False

    def _compute(self, module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        if self._lower is None:
            return self._forward(module, weights, prefix, *given)
        # A call casts every weight once, so there is nothing to cache; and a cache would outlive the optimiser's step.
        with torch.autocast(self.device.type, self._lower, cache_enabled=False):
            return self._forward(module, weights, prefix, *given).float()

    def _forward(self, module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        live = self.inhabited and weights is self.live
        output: Tensor = module(*map(self._laid, given)) if live else self._call(module, weights, prefix, *given)
        return output

    def _laid(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=self.layout) if images.ndim == 4 else images

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._compute(self.module.extractor, weights, "extractor.", images)

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        if not eval_mode:
            return self._compute(self.module.head, weights, "head.", features)
        return self._compute(self._calm.head, dict(weights), "head.", features)  # a copy of `live` is not `live`

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        if not eval_mode:
            return self._compute(self.companions[name], weights, f"{AUX_PREFIX}{name}.", *given)
        return self._compute(self._calm_companions[name], dict(weights), f"{AUX_PREFIX}{name}.", *given)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(weights, images), labels)

    def taught(self, weights: Bundle, images: Tensor, features: bool = False) -> Tensor:
        if features:
            return self._call(self._calm.extractor, weights, "extractor.", images).detach()
        return self._call(self._calm, weights, "", images).detach()

    @cached_property
    def _calm(self) -> Classifier:
        """The module as it evaluates, whatever mode the other is in; its own weights are never used."""
        return copy.deepcopy(self.module).eval()

    @cached_property
    def _calm_companions(self) -> nn.ModuleDict:
        return copy.deepcopy(self.companions).eval()

    @staticmethod
    def _call(module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        tensors = {**weights["model"], **weights["buffers"]}
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if not prefix:
            own = {name: t for name, t in own.items() if not name.startswith(AUX_PREFIX)}
        output: Tensor = functional_call(module, own, given)
        return output

    @cached_property
    def stackable(self) -> LiveNetwork:
        """The same network, written so that many sites' weights run as one; its own weights are never used."""
        beside = {name: unfolded(module) for name, module in self.companions.items()}
        network = LiveNetwork(unfolded(self.module), self.device, beside)
        network.inhabited = False
        return network

    @cached_property
    def shared_draws(self) -> str:
        """Layers whose random numbers depend on who else trains in the process."""
        return ", ".join(sorted({type(m).__name__ for _, m in self.layers() if not draws_alone(m)}))

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
        self.companions.eval()

    @torch.no_grad()
    def load(self, weights: Bundle, alone: bool = False) -> Bundle:
        """Copy weights in; returns the live bundle, by whose identity calls take the fast path.

        alone: they may be the classifier's alone, if nothing beside it is called.
        """
        for kind, live in self.live.items():
            given = weights.get(kind, {})
            names = [name for name in live if name in given or not (alone and name.startswith(AUX_PREFIX))]
            if names:
                wanted = list(moved({name: given[name] for name in names}, self.device).values())
                torch._foreach_copy_([live[name] for name in names], wanted)
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
        self.companions.train()
        for name, norm in self._norms.items():
            if f"{name}.weight" in self.live["model"] and f"{name}.weight" not in trainable:
                norm.eval()

    def trainable(self, fraction: float, prefixes: Iterable[str]) -> frozenset[str]:
        """Names of the parameters a step may move: the top `fraction` of the classifier's layers and everything beside
        it, within `prefixes` if any."""
        beside = frozenset(name for name in self.live["model"] if name.startswith(AUX_PREFIX))
        names = frozenset(self.live["model"]) if fraction >= 1 else self.module.tail(fraction) | beside
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


@torch.no_grad()
def feature_shape(network: LiveNetwork, images: Tensor) -> tuple[int, ...]:
    """Of what the extractor makes of one image."""
    network.evaluation_mode()
    return tuple(network.features(network.live, images[:1].to(network.device)).shape[1:])


def norm_names(module: nn.Module) -> frozenset[str]:
    """The parameters and lasting buffers of normalisation layers, known by their type: names tell nothing."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, NORMS)}
    return frozenset(f"{name}.{own}" for name, layer in layers.items() for own in layer.state_dict())


def _prefixed(tensors: Tensors) -> Tensors:
    return {f"{AUX_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def _statistics(module: nn.Module) -> Tensors:
    """The buffers that belong to the model; not what a layer only keeps for the moment."""
    lasting = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in lasting}
