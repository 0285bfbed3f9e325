"""What the averaging algorithms share: a streaming mean, and the defaults of the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from polyclinic.core.contract import (
    AUX_PREFIX,
    Bundle,
    Exchange,
    Federation,
    ServerWork,
    Site,
    SiteId,
    Stream,
    Tensors,
    Training,
    Update,
    Work,
)
from polyclinic.core.flat_tensors import FlatTensors, copy_tensors

WEIGHT_KINDS = ("model", "buffers")
IDENTIFYING_KINDS = ("bank", "features", "means")
"""Kinds in which single sites' images can be recognised: a finished run keeps none, nor hands them on."""


class RunningMean:
    """Weighted mean of tensors that arrive one at a time: m ← m + (w/Σw)·(t − m). Holds one copy, never all.

    One summand comes out bit for bit, equal ones too but for the sign of a zero. Integers (BatchNorm's batch counters)
    are averaged and rounded. Tensors that lie side by side, as in every decoded message, are averaged as one vector.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self._mean: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        self.total += weight
        self.count += 1
        if self.count == 1:
            self._dtypes = {name: t.dtype for name, t in tensors.items()}
            self._mean = copy_tensors({n: t if t.is_floating_point() else t.double() for n, t in tensors.items()})
        elif (
            isinstance(tensors, FlatTensors)
            and isinstance(self._mean, FlatTensors)
            and tensors.has_layout_of(self._mean)
        ):
            self._mean.vector.lerp_(tensors.vector, weight / self.total)
        elif tensors:
            new = [tensors[n] if tensors[n].is_floating_point() else tensors[n].double() for n in self._mean]
            torch._foreach_lerp_(list(self._mean.values()), new, weight / self.total)

    def value(self) -> Tensors:
        if all(dtype.is_floating_point for dtype in self._dtypes.values()):
            return self._mean
        return {
            name: mean if self._dtypes[name].is_floating_point else mean.round().to(self._dtypes[name])
            for name, mean in self._mean.items()
        }


@dataclass(frozen=True)
class Averaging(ABC):
    """Defaults: the state is one set of weights, every site receives it, and predicts with it.

    A subclass says what a site does (`local`) and how updates meet (`aggregate`).
    """

    training: Training = Training()
    pooled: ClassVar[bool] = False
    idle: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Options without effect, by variant."""

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(Exchange(kind, like=kind) for kind in WEIGHT_KINDS)

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        del features, classes
        return {}

    def init(self, federation: Federation) -> Bundle:
        return dict(federation.initial)

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        del site
        return state

    @abstractmethod
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work: ...

    @abstractmethod
    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle: ...

    def check_update(self, update: Update) -> None:
        del update

    def finish(self, state: Bundle) -> Bundle:
        return {
            kind: without_prefix(AUX_PREFIX, group) for kind, group in state.items() if kind not in IDENTIFYING_KINDS
        }

    @property
    def trains_on_server(self) -> bool:
        return False

    def server_step(self, state: Bundle, server: Site, rng: Stream) -> ServerWork:
        del server, rng
        yield from ()
        return state

    def cluster_of(self, state: Bundle, site: SiteId) -> str:
        del state, site
        return ""

    def cluster_state(self, state: Bundle, group: str) -> Bundle:
        del group
        return state

    def cluster_from_broadcast(self, received: Bundle) -> str:
        del received
        return ""

    def lr_scale(self, group: str) -> float:
        del group
        return 1.0

    def privacy_releases(self) -> Mapping[str, float]:
        return {}

    def no_guarantee_reason(self) -> str:
        return ""

    def warning(self) -> str:
        return ""

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        del memory
        return {"global": classifier_weights(received)}

    def update_weight(self, update: Update) -> float:
        """n_k, or 1 where the recipe asks for uniform weights."""
        return float(update.examples) if self.training.weights == "examples" else 1.0


def network_weights(bundle: Bundle) -> Bundle:
    """Only what a network needs: parameters and buffers."""
    return {kind: bundle.get(kind, {}) for kind in WEIGHT_KINDS}


def classifier_weights(bundle: Bundle) -> Bundle:
    """Only what predicts: weights, without those of networks that train beside the classifier."""
    return {kind: without_prefix(AUX_PREFIX, group) for kind, group in network_weights(bundle).items()}


def without_prefix(prefix: str, group: Tensors) -> Tensors:
    """Themselves where no name begins so: tensors that lie side by side shall stay so."""
    if not any(name.startswith(prefix) for name in group):
        return group
    return {name: tensor for name, tensor in group.items() if not name.startswith(prefix)}
