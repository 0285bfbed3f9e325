"""What the averaging algorithms share: a streaming mean, and the defaults of the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyclinic.core import Bundle, Exchange, Federation, Site, SiteId, Stream, Tensors, Training, Update, Work
from polyclinic.flat import Layout, Row, apart, layout_of, side_by_side

WEIGHTS = ("model", "buffers")


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
        self._vector: Tensor | None = None
        self._pieces: Tensors = {}
        """Those of `_mean` that are views of `_vector`."""
        self._layout: Layout = ()

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        self.total += weight
        self.count += 1
        if self.count == 1:
            self._begin(tensors)
        elif tensors:
            self._move(tensors, weight / self.total)

    def _begin(self, tensors: Tensors) -> None:
        self._dtypes = {name: t.dtype for name, t in tensors.items()}
        single = {n: t for n, t in tensors.items() if t.dtype == torch.float32}
        vector = side_by_side(list(single.values()))
        if vector is not None:
            self._vector = vector.clone()
            self._pieces = dict(zip(single, apart(self._vector, list(single.values())), strict=True))
        rest = {n: t for n, t in tensors.items() if n not in self._pieces}
        copies = {n: t.clone() if t.is_floating_point() else t.double() for n, t in rest.items()}
        self._mean = {name: self._pieces[name] if name in self._pieces else copies[name] for name in tensors}
        self._layout = layout_of(self._mean)

    def _move(self, tensors: Tensors, share: float) -> None:
        if isinstance(tensors, Row) and self._vector is not None and tensors.layout == self._layout:
            self._vector.lerp_(tensors.vector, share)
            return
        rest = self._mean
        new = [tensors[name] for name in self._pieces]
        alike = [t.shape for t in new] == [t.shape for t in self._pieces.values()]
        if self._vector is not None and alike and (vector := side_by_side(new)) is not None:
            self._vector.lerp_(vector, share)
            rest = {n: t for n, t in rest.items() if n not in self._pieces}
        if rest:
            new = [tensors[n] if tensors[n].is_floating_point() else tensors[n].double() for n in rest]
            torch._foreach_lerp_(list(rest.values()), new, share)

    def value(self) -> Tensors:
        if self._vector is not None and len(self._pieces) == len(self._mean):
            return Row(self._mean.items(), self._vector)
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

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(Exchange(kind, like=kind) for kind in WEIGHTS)

    def init(self, federation: Federation) -> Bundle:
        return dict(federation.initial)

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        del site
        return state

    @abstractmethod
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work: ...

    @abstractmethod
    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle: ...

    def check(self, update: Update) -> None:
        del update

    def finish(self, state: Bundle) -> Bundle:
        return state

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        del memory
        return {"global": weights(received)}

    def weight(self, update: Update) -> float:
        """n_k, or 1 where the recipe asks for uniform weights."""
        return float(update.examples) if self.training.weights == "examples" else 1.0


def weights(bundle: Bundle) -> Bundle:
    """Only what a network needs: parameters and buffers."""
    return {kind: bundle.get(kind, {}) for kind in WEIGHTS}
