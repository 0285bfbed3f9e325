"""A network as a function of its weights (`core.network.Network`), with a fast path for the module's own weights.

Auxiliary networks train beside the classifier (a generator, a discriminator). Predictions do not use them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from polyclinic.core import AUX_PREFIX, Batch, Bundle, EngineError, Network, Precision, Stream, Tensors, copy_tensors
from polyclinic.core.rng import seed_generators
from polyclinic.evaluation.task import CLASSIFICATION, Task
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import CheckpointedBlock
from polyclinic.training.im2col_conv import copy_with_im2col
from polyclinic.training.keyed_dropout import has_own_randomness, key_dropout_layers
from polyclinic.training.prefetch import to_device

T = TypeVar("T")
NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Normalisation layers; the first of these classes is the base of BatchNorm and InstanceNorm."""


class LiveNetwork:
    """Implements `core.network.Network` on one module.

    `load_weights` copies weights into the module once per job. Calls with exactly the bundle that it returns run the
    plain module, at the speed of an ordinary training loop. Any other weights (of a teacher, of a previous model) are
    called functionally.
    """

    def __init__(
        self,
        module: Classifier,
        device: torch.device | None = None,
        auxiliary: Mapping[str, nn.Module] | None = None,
        task: Task = CLASSIFICATION,
    ) -> None:
        """Wrap a module.

        Args:
            module: The network that predicts. It is moved to `device`.
            device: Where to compute; None means the CPU.
            auxiliary: Networks that train beside it (a generator, a discriminator). Predictions do not use them.
            task: What outputs and targets mean: the loss and the predictions.
        """
        self.device, self.task = device or torch.device("cpu"), task
        has_convolutions = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
        self.memory_format = torch.channels_last if has_convolutions else torch.contiguous_format
        """Convolutions run much faster, on CPU and GPU, where a pixel's channels lie side by side."""
        self.module = module.to(self.device).to(memory_format=self.memory_format)
        self.auxiliary_modules = nn.ModuleDict(dict(auxiliary or {})).to(self.device)
        self.dropouts = key_dropout_layers(self.named_layers(), self.device)
        self._norms = {name: m for name, m in self.named_layers() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
        self.live: Bundle = {
            "model": {
                **dict(module.named_parameters()),
                **_add_prefix(dict(self.auxiliary_modules.named_parameters())),
            },
            "buffers": {**_persistent_buffers(module), **_add_prefix(_persistent_buffers(self.auxiliary_modules))},
        }
        self.may_use_live = True
        """False if no call can be with the live weights, so that compilers need not compare bundles."""
        self.stacked_functions: dict[Any, Any] = {}
        """Functions of stacked weights made from this network, compiled or not (see `stacked.fit`)."""
        self._autocast_dtype: torch.dtype | None = None
        """The lower precision in which calls compute at present; None: that of the weights."""
        self._mode: frozenset[str] | None = None
        """The last argument of `set_training_mode`, None after evaluation: walking through all modules takes time."""

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules by name, the classifier's and the auxiliary networks'."""
        yield from self.module.named_modules()
        yield from self.auxiliary_modules.named_modules(prefix=AUX_PREFIX.removesuffix("."))

    # Calls with given weights: the methods of `core.network.Network`.

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._forward_in_precision(self.module, weights, "", images)

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._forward_in_precision(self.module.extractor, weights, "extractor.", images)

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        if not eval_mode:
            return self._forward_in_precision(self.module.head, weights, "head.", features)
        # `dict` makes a copy, as `live` itself would take the fast path.
        return self._forward_in_precision(self._eval_module.head, dict(weights), "head.", features)

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        prefix = f"{AUX_PREFIX}{name}."
        if not eval_mode:
            return self._forward_in_precision(self.auxiliary_modules[name], weights, prefix, *given)
        return self._forward_in_precision(self._eval_auxiliary[name], dict(weights), prefix, *given)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        images, targets = batch
        return self.task.loss(self(weights, images), targets)

    def output_loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return self.task.loss(outputs, targets, reduction)

    def predict(self, weights: Bundle, images: Tensor) -> Tensors:
        return self.task.predict(self(weights, images))

    def teacher_logits(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._functional_call(self._eval_module, weights, "", images).detach()

    def teacher_features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self._functional_call(self._eval_module.extractor, weights, "extractor.", images).detach()

    def _forward_in_precision(self, module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        if self._autocast_dtype is None:
            return self._forward(module, weights, prefix, *given)
        # A call casts every weight once, so there is nothing to cache; and a cache would outlive the optimiser's step.
        with torch.autocast(self.device.type, self._autocast_dtype, cache_enabled=False):
            return self._forward(module, weights, prefix, *given).float()

    def _forward(self, module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        if not (self.may_use_live and weights is self.live):
            return self._functional_call(module, weights, prefix, *given)
        return cast(
            Tensor, module(*(t.contiguous(memory_format=self.memory_format) if t.ndim == 4 else t for t in given))
        )

    @staticmethod
    def _functional_call(module: nn.Module, weights: Bundle, prefix: str, *given: Tensor) -> Tensor:
        tensors = {**weights["model"], **weights["buffers"]}
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if not prefix:
            own = {name: t for name, t in own.items() if not name.startswith(AUX_PREFIX)}
        return cast(Tensor, torch.func.functional_call(module, own, given))

    @cached_property
    def _eval_module(self) -> Classifier:
        """A copy of the module that stays in evaluation mode; its own weights are never used."""
        return copy.deepcopy(self.module).eval()

    @cached_property
    def _eval_auxiliary(self) -> nn.ModuleDict:
        return copy.deepcopy(self.auxiliary_modules).eval()

    # How calls compute.

    @contextmanager
    def use_precision(self, wanted: Precision) -> Iterator[None]:
        """Compute calls in `wanted` by autocast. Weights, statistics and the outputs of calls stay float32."""
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
        """Let checkpointed blocks compute their activations twice instead of keeping them for the gradient."""
        blocks = [module for module in self.module.modules() if wanted and isinstance(module, CheckpointedBlock)]
        for block in blocks:
            block.checkpointing = True
        try:
            yield
        finally:
            for block in blocks:
                block.checkpointing = False

    @cached_property
    def stackable_copy(self) -> "LiveNetwork":
        """The network, rewritten so that many sites' weights run as one call; its own weights are never used."""
        auxiliary = {name: copy_with_im2col(module) for name, module in self.auxiliary_modules.items()}
        network = LiveNetwork(copy_with_im2col(self.module), self.device, auxiliary, self.task)
        network.may_use_live = False
        return network

    @cached_property
    def shared_random_layers(self) -> str:
        """The types of layers whose random numbers depend on which other sites train in the process; "" if none."""
        return ", ".join(sorted({type(m).__name__ for _, m in self.named_layers() if not has_own_randomness(m)}))

    def set_dropout_key(self, key: int | Tensor) -> None:
        """Set the key from which the masks of the next call are computed, or one key for each row of its batch."""
        keys = to_device(key, self.device) if isinstance(key, Tensor) else key
        for layer in self.dropouts.values():  # in place, since copies of a layer share its key
            if isinstance(keys, Tensor):
                layer.key.resize_(keys.shape).copy_(keys)
            else:
                layer.key.resize_(()).fill_(keys)

    def dropout_buffers(self, keys: Tensor) -> Tensors:
        """Return dropout keys as buffers, to be passed with the weights of a functional call."""
        return {f"{name}.key": keys for name in self.dropouts}

    # The live weights and how they train.

    @torch.no_grad()
    def load_weights(self, weights: Bundle, classifier_only: bool = False) -> Bundle:
        """Copy weights into the module and return the live bundle, with which calls take the fast path.

        With `classifier_only` the auxiliary networks' weights may be missing; then these must not be called.
        """
        for kind, live in self.live.items():
            given = weights.get(kind, {})
            names = [name for name in live if name in given or not (classifier_only and name.startswith(AUX_PREFIX))]
            if names:
                moved = list(move_tensors({name: given[name] for name in names}, self.device).values())
                torch._foreach_copy_([live[name] for name in names], moved)
        return self.live

    @torch.no_grad()
    def copy_weights(self) -> Bundle:
        """Return a copy of the live weights, on the network's device."""
        return {kind: copy_tensors(group) for kind, group in self.live.items()}

    def set_eval_mode(self) -> None:
        self._mode = None
        self.module.eval()
        self.auxiliary_modules.eval()

    def set_training_mode(self, trainable: frozenset[str]) -> None:
        """Switch to training mode; BatchNorm layers whose parameters are not `trainable` stay in evaluation mode."""
        if self._mode == trainable:
            return
        self._mode = trainable
        self.module.train()
        self.auxiliary_modules.train()
        for name, norm in self._norms.items():
            if f"{name}.weight" in self.live["model"] and f"{name}.weight" not in trainable:
                norm.eval()

    def trainable_names(self, fraction: float, prefixes: Iterable[str]) -> frozenset[str]:
        """Return the names of the parameters that a step moves.

        These are the `fraction` of the classifier's layers nearest the output and all auxiliary networks; with
        `prefixes` only those of them whose names start with one.
        """
        auxiliary = frozenset(name for name in self.live["model"] if name.startswith(AUX_PREFIX))
        names = frozenset(self.live["model"]) if fraction >= 1 else self.module.tail_parameters(fraction) | auxiliary
        wanted = tuple(prefixes)
        return frozenset(n for n in names if n.startswith(wanted)) if wanted else names

    def require_gradients(self, names: frozenset[str]) -> list[nn.Parameter]:
        """Let exactly the named parameters require gradients, and return them."""
        parameters: Tensors = self.live["model"]
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        return [p for n, p in parameters.items() if n in names and isinstance(p, nn.Parameter)]


class NetworkWrapper:
    """Forwards every call to another network. Subclasses change the weights of calls (`replace_weights`) or the loss.

    A teacher's weights are never replaced.
    """

    def __init__(self, network: Network) -> None:
        self.network = network

    def replace_weights(self, weights: Bundle) -> Bundle:
        return weights

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network(self.replace_weights(weights), images)

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network.features(self.replace_weights(weights), images)

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        return self.network.head(self.replace_weights(weights), features, eval_mode)

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        return self.network.auxiliary(self.replace_weights(weights), name, *given, eval_mode=eval_mode)

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        return self.network.loss(self.replace_weights(weights), batch)

    def output_loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return self.network.output_loss(outputs, targets, reduction)

    def predict(self, weights: Bundle, images: Tensor) -> Tensors:
        return self.network.predict(self.replace_weights(weights), images)

    def teacher_logits(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network.teacher_logits(weights, images)

    def teacher_features(self, weights: Bundle, images: Tensor) -> Tensor:
        return self.network.teacher_features(weights, images)


def _cast_to_float32(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast inputs of GroupNorm, as autocast does on CUDA: a CPU takes 3.6 times as long on bfloat16."""
    return tuple(tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in given)


_cast_to_float32.changes_nothing = True  # type: ignore[attr-defined]  # layers may still be recorded


def copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies on another device, moved as one block per dtype: hundreds of small copies would each wait."""
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
    """Return the tensors on `device`: the same ones if they are already there."""
    if all(tensor.device.type == device.type for tensor in group.values()):
        return group
    return dict(zip(group, copy_to_device(list(group.values()), device), strict=True))


def move_bundle(bundle: Bundle, device: torch.device) -> Bundle:
    """Return the bundle's tensors on `device`, as `move_tensors` does."""
    return {kind: move_tensors(group, device) for kind, group in bundle.items()}


def copy_module_weights(module: nn.Module) -> Bundle:
    """Return a copy of a module's parameters and buffers as a bundle."""
    return {
        "model": copy_tensors(dict(module.named_parameters())),
        "buffers": copy_tensors(_persistent_buffers(module)),
    }


@torch.no_grad()
def feature_shape(network: LiveNetwork, images: Tensor) -> tuple[int, ...]:
    """Return the shape of the extractor's features of one image; `images` holds at least one."""
    network.set_eval_mode()
    return tuple(network.features(network.live, images[:1].to(network.device)).shape[1:])


def normalisation_names(module: nn.Module) -> frozenset[str]:
    """Return the names of normalisation layers' parameters and statistics. Layers are recognised by type, not name."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, NORM_LAYERS)}
    return frozenset(f"{name}.{own}" for name, layer in layers.items() for own in layer.state_dict())


def build_with_seed(build: Callable[[], T], seed: Stream) -> T:
    """Return what `build` returns, with first weights that depend on `seed` alone."""
    with seed_generators(seed, torch.device("cpu")), torch.device("cpu"):
        return build()


def with_auxiliary(
    network: LiveNetwork,
    build: Callable[[tuple[int, ...], int], Mapping[str, nn.Module]],
    features: tuple[int, ...],
    classes: int,
    seed: Stream,
) -> LiveNetwork:
    """Return the network with an algorithm's auxiliary networks; the network itself if there are none.

    Args:
        network: The network of the classifier.
        build: Builds the auxiliary networks by name (`Algorithm.auxiliary`) from `features` and `classes`.
        features: The shape of the extractor's features of one image.
        classes: The number of classes.
        seed: The stream of their first weights.
    """
    modules = build_with_seed(lambda: build(features, classes), seed)
    if not modules:
        return network
    dtype = next(iter(network.live["model"].values())).dtype
    auxiliary = {name: module.to(dtype) for name, module in modules.items()}
    return LiveNetwork(network.module, network.device, auxiliary, network.task)


def copy_auxiliary_weights(name: str, module: nn.Module) -> Bundle:
    """Return a copy of an auxiliary network's weights, under the names that they have in a classifier's bundle."""
    prefix, weights = f"{AUX_PREFIX}{name}.", copy_module_weights(module)
    return {kind: {prefix + n: t for n, t in group.items()} for kind, group in weights.items()}


def _add_prefix(tensors: Tensors) -> Tensors:
    return {f"{AUX_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def _persistent_buffers(module: nn.Module) -> Tensors:
    """Return the buffers that are saved with the model, without a layer's temporary ones."""
    lasting = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in lasting}
