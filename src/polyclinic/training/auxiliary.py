"""Auxiliary networks, which train beside a classifier (a generator, a discriminator). Predictions do not use them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

from polyclinic.core import AUX_PREFIX, Bundle, Stream
from polyclinic.training.fit import seed_generators
from polyclinic.training.network import LiveNetwork, copy_module_weights

T = TypeVar("T")


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
