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
from polyclinic.core.flat_tensors import copy_tensors
from polyclinic.models import Classifier
from polyclinic.models.activation_checkpointing import CheckpointedBlock
from polyclinic.training.im2col_conv import copy_with_im2col
from polyclinic.training.keyed_dropout import has_own_randomness, key_dropout_layers

NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Layers that normalise what passes; the first are BatchNorm and InstanceNorm, of any dimension."""


class LiveNetwork:
    """Implements `core.Network` on one module.

    `load` copies weights into the module once per job; calls with exactly those weights run the plain module, at the
    speed of an ordinary training loop. Any other weights (a teacher, a previous model) are called functionally.
    """

    def __init__(
        self, module: Classifier, device: torch.device | None = None, auxiliary: Mapping[str, nn.Module] | None = None
    ) -> None:
        """`beside`: networks that train beside the classifier; calls of it, and its module, do not have them."""
        self.module = module.to(device or torch.device("cpu"))
        self.device = device or torch.device("cpu")
        self.auxiliary_modules = nn.ModuleDict(dict(auxiliary or {})).to(self.device)
        self.memory_format = torch.channels_last if _has_convolutions(module) else torch.contiguous_format
        """Convolutions run much faster, on CPU and GPU, where a pixel's channels lie side by side."""
        self.module = self.module.to(memory_format=self.memory_format)
        self._dropouts = key_dropout_layers(self.named_layers(), self.device)
        self.live: Bundle = {
            "model": {
                **dict(module.named_parameters()),
                **_add_prefix(dict(self.auxiliary_modules.named_parameters())),
            },
            "buffers": {**_persistent_buffers(module), **_add_prefix(_persistent_buffers(self.auxiliary_modules))},
        }
        self.may_use_live = True
        """Whether weights may live in the module; compilers cannot compare a bundle with them."""
        self.stacked_functions: dict[Any, Any] = {}
        """What stacks made of this network as a function, compiled or not."""
        self._autocast_dtype: torch.dtype | None = None
        """What calls compute in at present, if not in the weights' own precision."""
        self._mode: frozenset[str] | None = None
        """What `training_mode` was last called with; None after evaluation. Walking all modules takes its time."""
        self._norms = {name: m for name, m in self.named_layers() if isinstance(m, nn.modules.batchnorm._BatchNorm)}

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules by name, the classifier's and those beside it."""
        yield from self.module.named_modules()
        yield from self.auxiliary_modules.named_modules(prefix=AUX_PREFIX.removesuffix("."))

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._forward_in_precision(self.module, weights, "", images)

    @contextmanager
    def use_precision(self, wanted: Precision) -> Iterator[None]:
        """Meanwhile calls compute in `wanted`, by autocast; weights, statistics and what calls return stay float32."""
        lower = {"float32": None, "bfloat16": torch.bfloat16}[wanted]
        if lower is not None and any(t.dtype == torch.float64 for t in self.live["model"].values()):
            raise EngineError(
                "training.precision is bfloat16, but this network's weights are float64; "
                "give it float32 weights, or set training.precision: float32"
            )
        before, self._autocast_dtype = self._autocast_dtype, lower
        slow = self.module.modules() if lower and self.device.type == "cpu" else ()
        hooks = [m.register_forward_pre_hook(_cast_to_float32) for m in slow if isinstance(m, nn.GroupNorm)]
        try:
            yield
        finally:
            self._autocast_dtype = before
            for hook in hooks:
                hook.remove()

    @contextmanager
    def use_checkpointing(self, wanted: bool = True) -> Iterator[None]:
        """Meanwhile blocks that can compute their activations again do so, instead of keeping them for the gradient."""
        blocks = [module for module in self.module.modules() if wanted and isinstance(module, CheckpointedBlock)]
        for block in blocks:
            block.checkpointing = True
        try:
            yield
        finally:
            for block in blocks:
                block.checkpointing = False

    def _forward_in_precision(self, module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        if self._autocast_dtype is None:
            return self._forward(module, weights, prefix, *given)
        # A call casts every weight once, so there is nothing to cache; and a cache would outlive the optimiser's step.
        with torch.autocast(self.device.type, self._autocast_dtype, cache_enabled=False):
            return self._forward(module, weights, prefix, *given).float()

    def _forward(self, module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        live = self.may_use_live and weights is self.live
        output: Tensor = (
            module(*map(self._to_memory_format, given))
            if live
            else self._functional_call(module, weights, prefix, *given)
        )
        return output

    def _to_memory_format(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=self.memory_format) if images.ndim == 4 else images

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._forward_in_precision(self.module.extractor, weights, "extractor.", images)

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        if not eval_mode:
            return self._forward_in_precision(self.module.head, weights, "head.", features)
        return self._forward_in_precision(
            self._eval_module.head, dict(weights), "head.", features
        )  # a copy of `live` is not `live`

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        if not eval_mode:
            return self._forward_in_precision(self.auxiliary_modules[name], weights, f"{AUX_PREFIX}{name}.", *given)
        return self._forward_in_precision(self._eval_auxiliary[name], dict(weights), f"{AUX_PREFIX}{name}.", *given)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(weights, images), labels)

    def teacher_logits(self, weights: Bundle, images: Tensor, features: bool = False) -> Tensor:
        if features:
            return self._functional_call(self._eval_module.extractor, weights, "extractor.", images).detach()
        return self._functional_call(self._eval_module, weights, "", images).detach()

    @cached_property
    def _eval_module(self) -> Classifier:
        """The module as it evaluates, whatever mode the other is in; its own weights are never used."""
        return copy.deepcopy(self.module).eval()

    @cached_property
    def _eval_auxiliary(self) -> nn.ModuleDict:
        return copy.deepcopy(self.auxiliary_modules).eval()

    @staticmethod
    def _functional_call(module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        tensors = {**weights["model"], **weights["buffers"]}
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if not prefix:
            own = {name: t for name, t in own.items() if not name.startswith(AUX_PREFIX)}
        output: Tensor = functional_call(module, own, given)
        return output

    @cached_property
    def stackable_copy(self) -> LiveNetwork:
        """The same network, written so that many sites' weights run as one; its own weights are never used."""
        beside = {name: copy_with_im2col(module) for name, module in self.auxiliary_modules.items()}
        network = LiveNetwork(copy_with_im2col(self.module), self.device, beside)
        network.may_use_live = False
        return network

    @cached_property
    def shared_random_layers(self) -> str:
        """Layers whose random numbers depend on who else trains in the process."""
        return ", ".join(sorted({type(m).__name__ for _, m in self.named_layers() if not has_own_randomness(m)}))

    @property
    def has_dropout(self) -> bool:
        return bool(self._dropouts)

    def set_dropout_key(self, key: int) -> None:
        """What dropout drops from now on."""
        for layer in self._dropouts.values():
            layer.key.fill_(key)

    def dropout_buffers(self, keys: Tensor) -> Tensors:
        """The same for calls with weights of one's own: to be passed among their buffers."""
        return {f"{name}.key": keys for name in self._dropouts}

    def set_eval_mode(self) -> None:
        self._mode = None
        self.module.eval()
        self.auxiliary_modules.eval()

    @torch.no_grad()
    def load_weights(self, weights: Bundle, classifier_only: bool = False) -> Bundle:
        """Copy weights in; returns the live bundle, by whose identity calls take the fast path.

        alone: they may be the classifier's alone, if nothing beside it is called.
        """
        for kind, live in self.live.items():
            given = weights.get(kind, {})
            names = [name for name in live if name in given or not (classifier_only and name.startswith(AUX_PREFIX))]
            if names:
                wanted = list(move_tensors({name: given[name] for name in names}, self.device).values())
                torch._foreach_copy_([live[name] for name in names], wanted)
        return self.live

    @torch.no_grad()
    def copy_weights(self) -> Bundle:
        """A copy of the live weights, where they are."""
        return {kind: copy_tensors(group) for kind, group in self.live.items()}

    def set_training_mode(self, trainable: frozenset[str]) -> None:
        """Train mode, but normalisation layers whose own parameters are frozen stay in eval."""
        if self._mode == trainable:
            return
        self._mode = trainable
        self.module.train()
        self.auxiliary_modules.train()
        for name, norm in self._norms.items():
            if f"{name}.weight" in self.live["model"] and f"{name}.weight" not in trainable:
                norm.eval()

    def trainable_names(self, fraction: float, prefixes: Iterable[str]) -> frozenset[str]:
        """Names of the parameters a step may move: the top `fraction` of the classifier's layers and everything beside
        it, within `prefixes` if any."""
        beside = frozenset(name for name in self.live["model"] if name.startswith(AUX_PREFIX))
        names = frozenset(self.live["model"]) if fraction >= 1 else self.module.tail_parameters(fraction) | beside
        wanted = tuple(prefixes)
        return frozenset(n for n in names if n.startswith(wanted)) if wanted else names

    def require_gradients(self, names: frozenset[str]) -> list[nn.Parameter]:
        chosen: Tensors = self.live["model"]
        for name, parameter in chosen.items():
            parameter.requires_grad_(name in names)
        return [p for n, p in chosen.items() if n in names and isinstance(p, nn.Parameter)]


def _cast_to_float32(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As autocast does on CUDA; a CPU takes 3.6 times as long to normalise groups of bfloat16."""
    return tuple(tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in given)


_cast_to_float32.changes_nothing = True  # type: ignore[attr-defined]  # layers may still be recorded


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv2d) for m in module.modules())


def copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
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


def move_tensors(group: Tensors, device: torch.device) -> Tensors:
    """The tensors on `device`; themselves if they are there."""
    if all(tensor.device.type == device.type for tensor in group.values()):
        return group
    return dict(zip(group, copy_to_device(list(group.values()), device), strict=True))


def move_bundle(bundle: Bundle, device: torch.device) -> Bundle:
    return {kind: move_tensors(group, device) for kind, group in bundle.items()}


def copy_module_weights(module: nn.Module) -> Bundle:
    """A copy of a module's parameters and buffers, as a bundle."""
    return {
        "model": copy_tensors(dict(module.named_parameters())),
        "buffers": copy_tensors(_persistent_buffers(module)),
    }


@torch.no_grad()
def feature_shape(network: LiveNetwork, images: Tensor) -> tuple[int, ...]:
    """Of what the extractor makes of one image."""
    network.set_eval_mode()
    return tuple(network.features(network.live, images[:1].to(network.device)).shape[1:])


def normalisation_names(module: nn.Module) -> frozenset[str]:
    """The parameters and lasting buffers of normalisation layers, known by their type: names tell nothing."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, NORM_LAYERS)}
    return frozenset(f"{name}.{own}" for name, layer in layers.items() for own in layer.state_dict())


def _add_prefix(tensors: Tensors) -> Tensors:
    return {f"{AUX_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def _persistent_buffers(module: nn.Module) -> Tensors:
    """The buffers that belong to the model; not what a layer only keeps for the moment."""
    lasting = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in lasting}
