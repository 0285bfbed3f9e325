"""Where a network is split into extractor and head: usually before its last layers, for FedMP also after a stage.

A stage ends before the next reduction in image size: ResNet's `layer1` to `layer4`, as in FedMP; other families
likewise. What follows the last stage (pooling, a dense layer) belongs to it, so a network that is cut there is as it
was built. Only networks that are one chain of layers can be cut.
"""

from collections import OrderedDict

from torch import nn

from polyclinic.core import RecipeError
from polyclinic.models.classifier import Classifier

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


def count_stages(classifier: Classifier) -> int:
    """Return the number of stages."""
    layers, ends = _layers_and_ends(classifier)
    return 1 + sum(end in layers for end in ends)


def cut_after(classifier: Classifier, stage: int) -> Classifier:
    """Return the same network with its extractor ending after `stage` (1 is the first). Layers are shared."""
    layers, ends = _layers_and_ends(classifier)
    last = 1 + sum(end in layers for end in ends)
    if not 1 <= stage <= last:
        raise RecipeError(f"model.split_after is {stage}, but this network has stages 1 to {last}; choose one of them")
    if stage == last:
        return classifier
    names = list(layers)
    at = names.index(ends[stage - 1]) + 1
    early, late = ({name: layers[name] for name in part} for part in (names[:at], names[at:]))
    return Classifier(nn.Sequential(OrderedDict(early)), nn.Sequential(OrderedDict(late, classify=classifier.head)))


def chained_layers(classifier: Classifier) -> list[nn.Module]:
    """Return the extractor's layers in the order in which they are computed; none if it is not a chain."""
    return list(_layers_and_ends(classifier)[0].values())


def _layers_and_ends(classifier: Classifier) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Return the extractor's layers by name, and the names of those after which stages end."""
    extractor = classifier.extractor
    family = type(extractor).__name__
    if family not in STAGE_ENDS:
        return {}, ()
    children = dict(extractor.named_children())
    pooled: dict[str, nn.Module] = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    if "features" not in children:
        children.pop("fc", None)  # where torchvision's network had its own head
        return {**children, **({"flatten": nn.Flatten()} if family == "ResNet" else {})}, STAGE_ENDS[family]
    inner = dict(children["features"].named_children())
    return {**inner, **({"relu": nn.ReLU()} if family == "DenseNet" else {}), **pooled}, STAGE_ENDS[family]
