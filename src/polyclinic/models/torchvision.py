"""torchvision's ImageNet networks as classifiers, for images of one or three channels.

The extractor is torchvision's network without its classifier, so it keeps torchvision's weight names; the head is that
classifier, sized for the task. There is always a dropout before its last layer, at rate 0 where the family has none, so
that the names of saved weights do not depend on the dropout that a recipe asks for.
"""

from functools import partial

from torch import nn

from polyclinic.models.classifier import Classifier, ModelBuilder

# Inception's own first weights are slow to draw, and its auxiliary classifier would be a second output.
OPTIONS = {"inception_v3": {"aux_logits": False, "init_weights": False}}


def _build_torchvision(
    name: str,
    *,
    classes: int,
    channels: int,
    size: int,  # noqa: ARG001 - these networks pool over the remaining area
    dropout: float,
) -> Classifier:
    # Imported here: torchvision takes as long to import as torch, and the paper CNNs do without it.
    from torchvision import models

    network = models.get_model(name, num_classes=classes, **OPTIONS.get(name, {}))
    slot = "fc" if hasattr(network, "fc") else "classifier"
    head = _set_dropout(getattr(network, slot), dropout)
    setattr(network, slot, nn.Identity())
    if isinstance(network, models.Inception3):
        network.dropout = nn.Identity()
    if channels == 1:
        _accept_grey_images(network)
    return Classifier(network, head)


def _set_dropout(classifier: nn.Module, rate: float) -> nn.Module:
    if isinstance(classifier, nn.Linear):
        return nn.Sequential(nn.Dropout(rate), classifier)
    for module in classifier.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    return classifier


def _accept_grey_images(network: nn.Module) -> None:
    """Sum the first convolution over RGB, which gives the same as a grey image repeated in three channels."""
    first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    first.in_channels = 1
    first.weight = nn.Parameter(first.weight.detach().sum(dim=1, keepdim=True))


mobilenet_v2: ModelBuilder = partial(_build_torchvision, "mobilenet_v2")
mobilenet_v3_small: ModelBuilder = partial(_build_torchvision, "mobilenet_v3_small")
efficientnet_b0: ModelBuilder = partial(_build_torchvision, "efficientnet_b0")
densenet201: ModelBuilder = partial(_build_torchvision, "densenet201")
resnet18: ModelBuilder = partial(_build_torchvision, "resnet18")
resnet50: ModelBuilder = partial(_build_torchvision, "resnet50")
resnet152: ModelBuilder = partial(_build_torchvision, "resnet152")
inception_v3: ModelBuilder = partial(_build_torchvision, "inception_v3")
