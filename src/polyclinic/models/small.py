"""Small networks: the cluster models and the student of PFedCDP, one hidden layer, and a linear model.

N. S. Shadin, X. Zhang, J. Wang, M. Pan: "Heterogeneity-Aware Private Personalized Federated Learning for
Medical Imaging via Contrastive Distillation", section "Simulation Environment and Models".

Departures: the paper ends its networks in a softmax; ours return logits, because a softmax that is softened again by a
temperature is not the distribution in the equations. The paper states no padding; ours is 1, so that a block halves the
image exactly. It states no rate for model B's dropout; 0.5 is the rate of its student and of the authors' published
client for that cluster.
"""

from collections import OrderedDict
from functools import partial

from torch import nn

from polyclinic.models.classifier import Classifier, ModelBuilder

HIDDEN = 64


def _build_two_blocks(
    filters: tuple[int, int], dense: int, *, classes: int, channels: int, size: int, dropout: float
) -> Classifier:
    """Build two blocks of 3×3 convolution, ReLU and 2×2 max-pool, a dense layer, dropout and the classes.

    The ReLU follows the pool, where it has a quarter of the values: the maximum is the same either way.
    """
    first, second = filters
    extractor = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, first, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(first, second, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            dense=nn.Linear(second * (size // 4) ** 2, dense),
            relu3=nn.ReLU(),
            dropout=nn.Dropout(dropout),
        )
    )
    return Classifier(extractor, nn.Linear(dense, classes))


cnn_a: ModelBuilder = partial(_build_two_blocks, (32, 64), 128)
cnn_b: ModelBuilder = partial(_build_two_blocks, (16, 32), 64)
cnn_c: ModelBuilder = partial(_build_two_blocks, (8, 16), 32)
student = cnn_b
small_cnn = cnn_a
"""The network of the benchmarks: convolutions of 32 and 64 filters and 128 dense units."""


def mlp(*, classes: int, channels: int, size: int, dropout: float) -> Classifier:
    extractor = nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            dense=nn.Linear(channels * size**2, HIDDEN),
            relu=nn.ReLU(),
            dropout=nn.Dropout(dropout),
        )
    )
    return Classifier(extractor, nn.Linear(HIDDEN, classes))


def linear(*, classes: int, channels: int, size: int, dropout: float) -> Classifier:
    extractor = nn.Sequential(OrderedDict(flatten=nn.Flatten(), dropout=nn.Dropout(dropout)))
    return Classifier(extractor, nn.Linear(channels * size**2, classes))
