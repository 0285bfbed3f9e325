"""Small networks: the benchmark's CNN, one hidden layer, and a linear model."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyclinic.models.classifier import Classifier
from polyclinic.models.pfedcdp import cnn_a

HIDDEN = 64

small_cnn = cnn_a
"""The network of the benchmarks: PFedCDP's model A, convolutions of 32 and 64 filters and 128 dense units."""


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
