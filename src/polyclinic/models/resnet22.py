"""ResNet-22 for whole mammograms, with the classifier of Fed-Align-CL.

N. Wu et al.: "Deep Neural Networks Improve Radiologists' Performance in Breast Cancer Screening", IEEE TMI 39(4), 2020:
narrow at first, because a mammogram is large, and with five stages, so that 2048 × 2048 pixels become 32 × 32 positions
of 256 values. A. Jiménez-Sánchez et al.: "Memory-aware curriculum federated learning for breast cancer classification",
2021, Table IV: the head. Written from these descriptions; blocks as in K. He et al.: "Identity Mappings in Deep
Residual Networks", 2016.

Our reading of Table IV: it prints a first convolution of 3×3, and widths of second blocks that do not fit the first
ones'; the published weights have 7×7, and in every stage two blocks of one width. The skip connection of every stage's
first block is a 1×1 convolution, also in the first stage, where it is not needed; its input is the output of the
block's first normalisation and ReLU. The Sigmoid at the end belongs to the loss: the head returns logits.
"""

from collections import OrderedDict

from torch import Tensor, nn

from polyclinic.models.classifier import Classifier

WIDTHS = (16, 32, 64, 128, 256)
DENSE = (128, 64)


class PreActivationBlock(nn.Module):
    """Normalisation, ReLU and 3×3 convolution, twice, with a skip connection."""

    def __init__(self, channels: int, width: int, stride: int, first: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False)) if first else None

    def forward(self, values: Tensor) -> Tensor:
        ready = self.relu(self.bn1(values))
        added: Tensor = self.conv2(self.relu(self.bn2(self.conv1(ready))))
        passed: Tensor = values if self.downsample is None else self.downsample(ready)
        return passed + added


class ResNet22(nn.Sequential):
    """The extractor: 256 features an image, with 2,799,536 parameters for images of one channel."""

    def __init__(self, channels: int) -> None:
        layers: dict[str, nn.Module] = {
            "conv": nn.Conv2d(channels, WIDTHS[0], 7, stride=2, bias=False),
            "pool": nn.MaxPool2d(3, stride=2),
        }
        before = WIDTHS[0]
        for number, width in enumerate(WIDTHS, 1):
            first = PreActivationBlock(before, width, 1 if number == 1 else 2, first=True)
            layers[f"layer{number}"] = nn.Sequential(first, PreActivationBlock(width, width, 1, first=False))
            before = width
        end = {"norm": nn.BatchNorm2d(before), "relu": nn.ReLU(), "average": nn.AdaptiveAvgPool2d(1)}
        super().__init__(OrderedDict(layers | end, flatten=nn.Flatten()))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet22(
    *,
    classes: int,
    channels: int,
    size: int,  # noqa: ARG001 - it pools over the remaining area
    dropout: float,
) -> Classifier:
    layers: dict[str, nn.Module] = {}
    before = WIDTHS[-1]
    for number, width in enumerate(DENSE, 1):
        layers |= {f"dense{number}": nn.Linear(before, width), f"norm{number}": nn.BatchNorm1d(width)}
        layers |= {f"relu{number}": nn.ReLU(), f"dropout{number}": nn.Dropout(dropout)}
        before = width
    return Classifier(ResNet22(channels), nn.Sequential(OrderedDict(layers, classify=nn.Linear(before, classes))))
