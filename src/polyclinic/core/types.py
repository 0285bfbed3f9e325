"""Named tensors and the other types that everything else is made of."""

from typing import Literal, Protocol, TypeAlias

from torch import Tensor

SiteId: TypeAlias = str

Tensors: TypeAlias = dict[str, Tensor]
"""Tensors by name. Only these, and a few numbers, travel between server and sites."""

Bundle: TypeAlias = dict[str, Tensors]
"""Tensors by kind, such as "model", "buffers" or "features". Releases are declared, protected and counted by kind.

The weights of a network are two kinds: "model" (parameters) and "buffers" (statistics such as BatchNorm's). Only
parameters have gradients, noise and control variates.
"""

AUX_PREFIX = "auxiliary."
"""The prefix of the names of weights of auxiliary networks (`Algorithm.auxiliary`)."""

Batch: TypeAlias = tuple[Tensor, Tensor]

Part: TypeAlias = Literal["train", "validation", "test"]

Precision: TypeAlias = Literal["float32", "bfloat16"]


class Examples(Protocol):
    """Labelled images of one part (train, validation or test) of one site."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def patients(self) -> tuple[str, ...] | None:
        """An identifier of every image's patient (`data.patients` tells those that are not named); None: not known."""
        ...

    def __len__(self) -> int: ...

    def batch(self, index: Tensor) -> Batch:
        """Return the images (float, n × channels × height × width) and labels at `index`, on the examples' device."""
        ...
