"""The GroupNorm residual CNN of the adaptive-noise paper.

S. Purokayisto, J. Hossain, J. Du, M. Salman, M. S. Ali: "Privacy-Preserving Federated Learning with Adaptive
Noise Scaling and Enhanced CNN Models", EJCSIT 13(52), 2025, section III-B.

Our reading of the skip connection: the text projects "the output from the first convolution" by a 1×1 convolution and
"three successive pooling operations" and adds it "to the third convolutional layer's output". Three pools fit only if
the branch starts BEFORE the first block's pool (28 → 14 → 7 → 3) and joins AFTER the third block's pool (3×3). So it
starts after the first convolution, its GroupNorm and its ReLU, and 128 × 3 × 3 = 1152 values are flattened. The 1×1
convolution has no normalisation of its own; its pools are max-pools, as the others are. Images of other sizes are
halved three times, rounding down, on both branches alike.
"""

from collections import OrderedDict

from torch import Tensor, nn

from polyclinic.models.classifier import Classifier

GROUPS = 8
WIDTHS = (32, 64, 128)


class ResidualExtractor(nn.Module):
    """Three convolutions with GroupNorm and a skip connection, then a dense layer of 256 features."""

    def __init__(self, channels: int, size: int, dropout: float) -> None:
        super().__init__()
        first, second, third = WIDTHS
        self.block1 = _conv_block(channels, first)
        self.pool1 = nn.MaxPool2d(2)
        self.block2 = _conv_block(first, second)
        self.pool2 = nn.MaxPool2d(2)
        self.block3 = _conv_block(second, third)
        self.pool3 = nn.MaxPool2d(2)
        self.skip = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(first, third, 1),
                pool1=nn.MaxPool2d(2),
                pool2=nn.MaxPool2d(2),
                pool3=nn.MaxPool2d(2),
            )
        )
        self.flatten = nn.Flatten()
        self.dense = nn.Linear(third * (size // 8) ** 2, 256)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        early = self.block1(images)
        late = self.pool3(self.block3(self.pool2(self.block2(self.pool1(early)))))
        features: Tensor = self.dropout(self.relu(self.dense(self.flatten(late + self.skip(early)))))
        return features


def groupnorm_cnn(*, classes: int, channels: int, size: int, dropout: float) -> Classifier:
    return Classifier(ResidualExtractor(channels, size, dropout), nn.Linear(256, classes))


def _conv_block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels, width, 3, padding=1),
            norm=nn.GroupNorm(GROUPS, width),
            relu=nn.ReLU(),
        )
    )
