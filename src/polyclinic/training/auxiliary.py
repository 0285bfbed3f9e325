"""Small networks that train beside a classifier: a generator, a discriminator. Nothing that predicts has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from polyclinic.core.contract import AUX_PREFIX, Algorithm, Bundle, Stream
from polyclinic.training.fit import seed_generators
from polyclinic.training.network import LiveNetwork, copy_module_weights

T = TypeVar("T")


def build_with_seed(build: Callable[[], T], seed: Stream) -> T:
    """What `build` makes; its first weights depend on `seed` alone."""
    with seed_generators(seed, torch.device("cpu")), torch.device("cpu"):
        return build()


def with_auxiliary(
    network: LiveNetwork, algorithm: Algorithm, features: tuple[int, ...], classes: int, seed: Stream
) -> LiveNetwork:
    """The network with what the algorithm trains beside it; itself if that is nothing."""
    beside = build_with_seed(lambda: algorithm.auxiliary(features, classes), seed)
    if not beside:
        return network
    dtype = next(iter(network.live["model"].values())).dtype
    return LiveNetwork(network.module, network.device, {name: module.to(dtype) for name, module in beside.items()})


def copy_auxiliary_weights(name: str, module: nn.Module) -> Bundle:
    """A network's weights, as they are called beside a classifier."""
    found = copy_module_weights(module)
    return {kind: {f"{AUX_PREFIX}{name}.{own}": t for own, t in group.items()} for kind, group in found.items()}
