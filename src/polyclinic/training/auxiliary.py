"""Small networks that train beside a classifier: a generator, a discriminator. Nothing that predicts has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from polyclinic.core.contract import AUX_PREFIX, Algorithm, Bundle, Stream
from polyclinic.training.fit import draws_from
from polyclinic.training.network import LiveNetwork, weights_of

T = TypeVar("T")


def drawn(build: Callable[[], T], seed: Stream) -> T:
    """What `build` makes; its first weights depend on `seed` alone."""
    with draws_from(seed, torch.device("cpu")), torch.device("cpu"):
        return build()


def with_auxiliary(
    network: LiveNetwork, algorithm: Algorithm, features: tuple[int, ...], classes: int, seed: Stream
) -> LiveNetwork:
    """The network with what the algorithm trains beside it; itself if that is nothing."""
    beside = drawn(lambda: algorithm.auxiliary(features, classes), seed)
    if not beside:
        return network
    dtype = next(iter(network.live["model"].values())).dtype
    return LiveNetwork(network.module, network.device, {name: module.to(dtype) for name, module in beside.items()})


def named(name: str, module: nn.Module) -> Bundle:
    """A network's weights, as they are called beside a classifier."""
    found = weights_of(module)
    return {kind: {f"{AUX_PREFIX}{name}.{own}": t for own, t in group.items()} for kind, group in found.items()}
