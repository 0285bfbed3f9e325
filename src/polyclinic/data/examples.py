"""Labelled images: of one part of a site (`Images`, `Selection`), of one site, of a whole collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyclinic.core.contract import Batch, Examples

PerChannel: TypeAlias = float | tuple[float, ...]
"""One number for all channels, or one for each."""


def _select_patients(patients: tuple[str, ...] | None, index: Tensor) -> tuple[str, ...] | None:
    return None if patients is None else tuple(patients[row] for row in index.tolist())


def _copy_rows(tensor: Tensor, index: Tensor, pinned: bool) -> Tensor:
    """Copies whole rows; indexing with [] takes two to three times as long."""
    if not pinned:
        return tensor.index_select(0, index)
    page_locked = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, index, out=page_locked)


def _channel_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).reshape(-1, 1, 1)


@dataclass(frozen=True)
class Images:
    """Images in memory: uint8 of 0..255, or float32. Batches are (image − mean) / std, uint8 first scaled to [0, 1]."""

    images: Tensor
    labels: Tensor
    patients: tuple[str, ...] | None = None
    mean: PerChannel = 0.0
    std: PerChannel = 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> Batch:
        images, labels = self.stored_batch(index)
        return self.scale_images(images), labels

    def stored_batch(self, index: Tensor, pinned: bool = False) -> Batch:
        """As they lie in memory, before they are scaled: a quarter of the bytes. Pinned, a GPU fetches them unaided."""
        index = index.to(self.labels.device)
        return _copy_rows(self.images, index, pinned), _copy_rows(self.labels, index, pinned)

    def scale_images(self, images: Tensor) -> Tensor:
        """What `batch` makes of stored images, on the device where they now are."""
        if images.dtype == torch.uint8:
            images = images.float().div_(255)
        if self.mean == 0.0 and self.std == 1.0:
            return images
        mean, std = self._scale_tensors(images.device)
        return (images - mean) / std

    def subset(self, index: Tensor) -> Images:
        """A copy of the images at `index`."""
        rows = index.to(self.labels.device)
        patients = _select_patients(self.patients, index)
        return replace(self, images=self.images[rows], labels=self.labels[rows], patients=patients)

    def to(self, device: torch.device | str) -> Images:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def _scale_tensors(self, device: torch.device) -> tuple[Tensor | float, Tensor | float]:
        """Mean and deviation, made once for a device: sending them with every batch would have the host wait for it."""
        if device not in self._cached_scales:
            mean, std = (v if isinstance(v, float) else _channel_tensor(v, device) for v in (self.mean, self.std))
            self._cached_scales[device] = (mean, std)
        return self._cached_scales[device]

    @cached_property
    def _cached_scales(self) -> dict[torch.device, tuple[Tensor | float, Tensor | float]]:
        return {}


@dataclass(frozen=True)
class Selection:
    """Some rows of images that lie in memory, or in a mapped file, once for all sites."""

    shared: Images
    rows: Tensor
    labels: Tensor
    patients: tuple[str, ...] | None

    @staticmethod
    def from_rows(shared: Images, rows: Tensor) -> Selection:
        here = rows.to(shared.labels.device)
        return Selection(shared, here, shared.labels[here], _select_patients(shared.patients, rows))

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Tensor) -> Batch:
        return self.shared.batch(self.rows.index_select(0, index.to(self.rows.device)))

    def stored_batch(self, index: Tensor, pinned: bool = False) -> Batch:
        """As they lie in memory, before they are scaled: a quarter of the bytes. Pinned, a GPU fetches them unaided."""
        return self.shared.stored_batch(self.rows.index_select(0, index.to(self.rows.device)), pinned)

    def scale_images(self, images: Tensor) -> Tensor:
        """What `batch` makes of stored images, on the device where they now are."""
        return self.shared.scale_images(images)

    def subset(self, index: Tensor) -> Selection:
        return Selection.from_rows(self.shared, self.rows.cpu()[index])

    def with_images(self, shared: Images) -> Selection:
        """The same rows of a copy of the images, on whatever device that is."""
        device = shared.labels.device
        return replace(self, shared=shared, rows=self.rows.to(device), labels=self.labels.to(device))


def concatenate(parts: Sequence[Images | Selection]) -> Images | Selection:
    """All parts, one after the other; of selections every image once, however many sites share it."""
    selections = [part for part in parts if isinstance(part, Selection)]
    if selections:
        rows = np.unique(np.concatenate([part.rows.cpu().numpy() for part in selections]))
        return Selection.from_rows(selections[0].shared, torch.from_numpy(rows))
    return _concatenate_images([part for part in parts if isinstance(part, Images)])


def _concatenate_images(parts: Sequence[Images]) -> Images:
    known = [part.patients for part in parts if part.patients is not None]
    return replace(
        parts[0],
        images=torch.cat([part.images for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        patients=tuple(name for names in known for name in names) if len(known) == len(parts) else None,
    )


@dataclass(frozen=True)
class SiteData:
    """What one hospital holds."""

    name: str
    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True)
class PooledData(SiteData):
    """What all hospitals hold, in one place."""

    members: Mapping[str, Examples]
    """Each one's own training images."""


@dataclass(frozen=True)
class Collection:
    """A whole dataset before it is divided among sites."""

    images: Tensor
    """n × channels × height × width, uint8 or float32."""
    labels: Tensor
    classes: tuple[str, ...]
    patients: tuple[str, ...]
    """One identifier per image; unique where patients are unknown."""
    sites: tuple[str, ...] | None = None
    """The natural site of every image."""
    split: tuple[str, ...] | None = None
    """The official part ("train", "validation", "test") of every image."""
    held_out: Images | None = None
    """An official test set that belongs to no site."""
    mean: PerChannel = 0.0
    std: PerChannel = 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def with_normalisation(self, mean: PerChannel, std: PerChannel) -> Collection:
        """The same images, whose batches will be (image − mean) / std."""
        held_out = self.held_out and replace(self.held_out, mean=mean, std=std)
        return replace(self, held_out=held_out, mean=mean, std=std)

    def to_images(self) -> Images:
        return Images(self.images, self.labels, self.patients, self.mean, self.std)
