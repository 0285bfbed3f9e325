"""Changes to a built network: GroupNorm for BatchNorm, another split into extractor and head, activation checkpointing.

A network is usually split before its last layers, for FedMP also after a stage. A stage ends before the next reduction
in image size: ResNet's `layer1` to `layer4`, as in FedMP; other families likewise. What follows the last stage
(pooling, a dense layer) belongs to it, so a network that is cut there is as it was built. Only networks that are one
chain of layers can be cut.

With activation checkpointing (T. Chen et al.: "Training Deep Nets with Sublinear Memory Cost", 2016, by
`torch.utils.checkpoint`) blocks compute their activations twice instead of keeping them. It saves memory and takes a
third more time. The second time a block uses the same weights as the first time, also if they were passed with the
call, and copies of its statistics, so that these move once a step, as they do without checkpointing.
"""

import copy
import math
from collections import OrderedDict
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyclinic.core import RecipeError
from polyclinic.models.classifier import Classifier

GROUPS = 32
"""The most groups, as in Wu and He (2018) and Opacus' ModuleValidator. The values after a dense layer are one group: in
groups of two or four, little more than their signs would be left."""
STAGE_ENDS: dict[str, tuple[str, ...]] = {
    "ResNet": ("layer1", "layer2", "layer3"),
    "ResNet22": ("layer1", "layer2", "layer3", "layer4"),
    "MobileNetV2": ("3", "6", "13"),
    "MobileNetV3": ("1", "3", "8"),
    "EfficientNet": ("2", "3", "5"),
    "DenseNet": ("denseblock1", "denseblock2", "denseblock3"),
    "Sequential": ("relu1", "relu2"),
}
"""The last layer of each stage but the final one, by the extractor's type."""
M = TypeVar("M", bound=nn.Module)


def replace_batch_norm(module: M) -> M:
    """Return a copy with GroupNorm in the place of BatchNorm, so that no layer mixes the images of a batch, as DP-SGD
    requires. Scale and shift are kept, running statistics dropped."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                groups = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(GROUPS, layer.num_features)
                norm = nn.GroupNorm(groups, layer.num_features, layer.eps, layer.affine)
                if layer.affine:
                    norm.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
                setattr(parent, name, norm)
    return module


def count_stages(classifier: Classifier) -> int:
    """Return the number of stages."""
    layers, ends = _layers_and_ends(classifier)
    return 1 + sum(end in layers for end in ends)


def cut_after(classifier: Classifier, stage: int) -> Classifier:
    """Return the same network with its extractor ending after `stage` (1 is the first). Layers are shared."""
    last = count_stages(classifier)
    if not 1 <= stage <= last:
        raise RecipeError(f"model.split_after is {stage}, but this network has stages 1 to {last}; choose one of them")
    if stage == last:
        return classifier
    layers, ends = _layers_and_ends(classifier)
    names = list(layers)
    at = names.index(ends[stage - 1]) + 1
    early, late = ({name: layers[name] for name in part} for part in (names[:at], names[at:]))
    return Classifier(nn.Sequential(OrderedDict(early)), nn.Sequential(OrderedDict(late, classify=classifier.head)))


def chained_layers(classifier: Classifier) -> list[nn.Module]:
    """Return the extractor's layers in the order in which they are computed; none if it is not a chain."""
    return list(_layers_and_ends(classifier)[0].values())


def _layers_and_ends(classifier: Classifier) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Return the extractor's layers by name, and the names of those after which stages end."""
    family = type(classifier.extractor).__name__
    if family not in STAGE_ENDS:
        return {}, ()
    children = dict(classifier.extractor.named_children())
    if "features" not in children:
        children.pop("fc", None)  # where torchvision's network had its own head
        return {**children, **({"flatten": nn.Flatten()} if family == "ResNet" else {})}, STAGE_ENDS[family]
    layers = dict(children["features"].named_children()) | ({"relu": nn.ReLU()} if family == "DenseNet" else {})
    return {**layers, "pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}, STAGE_ENDS[family]


class CheckpointedBlock(nn.Module):
    """A base class that is added to a block's own. It does nothing until `checkpointing` is set, as only plain autograd
    (neither `vmap` nor a recorded layer) can recompute."""

    checkpointing = False

    def forward(self, values: Tensor, again: bool = False) -> Tensor:
        if again or not (self.checkpointing and torch.is_grad_enabled()):
            return cast(Tensor, super().forward(values))
        tensors = dict(self.named_parameters()) | {name: buffer.clone() for name, buffer in self.named_buffers()}
        first = True

        def compute(values: Tensor) -> Tensor:
            nonlocal first
            if first:
                first = False
                return self.forward(values, again=True)
            return cast(Tensor, torch.func.functional_call(self, tensors, (values,), {"again": True}))

        return checkpoint(compute, values, use_reentrant=False)


def enable_checkpointing(classifier: Classifier) -> Classifier:
    """Turn the classifier's blocks into checkpointed ones, in place; the names of weights stay as they are."""
    layers = (list(layer) if type(layer) is nn.Sequential else [layer] for layer in chained_layers(classifier))
    blocks = [block for stage in layers for block in stage if len(list(block.children()))]
    if not blocks:
        raise RecipeError(
            "model.activation_checkpointing is true, but this network is not a chain of blocks; "
            "leave it out, or choose resnet22 or a torchvision network other than Inception"
        )
    for layer in blocks:
        layer.__class__ = type(f"Checkpointed{type(layer).__name__}", (CheckpointedBlock, type(layer)), {})
    return classifier
