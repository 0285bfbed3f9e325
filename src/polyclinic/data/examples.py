"""Labelled images in memory: one part of a site (`Images`, `Selection`), one site, or a whole collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyclinic.core import Batch, Examples
from polyclinic.data.patients import spread_group

PerChannel: TypeAlias = float | tuple[float, ...]
"""One number for all channels, or one for each channel."""


def _select_patients(patients: tuple[str, ...] | None, index: Tensor) -> tuple[str, ...] | None:
    return None if patients is None else tuple(patients[row] for row in index.tolist())


def _copy_rows(tensor: Tensor, index: Tensor, pinned: bool) -> Tensor:
    """Copy rows. Indexing with [] takes two to three times as long."""
    if not pinned:
        return tensor.index_select(0, index)
    page_locked = torch.empty((len(index), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, index, out=page_locked)


@dataclass(frozen=True)
class Images:
    """Images in memory, uint8 (0 to 255) or float32. A batch is (image − mean) / std; uint8 is scaled to [0, 1]."""

    images: Tensor
    labels: Tensor
    patients: tuple[str, ...] | None = None
    """The identifiers of `Collection.patients`; None: no patient is named."""
    mean: PerChannel = 0.0
    std: PerChannel = 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> Batch:
        images, labels = self.stored_batch(index)
        return self.scale_images(images), labels

    def stored_batch(self, index: Tensor, pinned: bool = False) -> Batch:
        """Return the images as stored, before scaling: a quarter of the bytes. `pinned`: in page-locked memory."""
        index = index.to(self.labels.device)
        return _copy_rows(self.images, index, pinned), _copy_rows(self.labels, index, pinned)

    def scale_images(self, images: Tensor) -> Tensor:
        """Scale and normalise stored images as `batch` does, on their current device."""
        if images.dtype == torch.uint8:
            images = images.float().div_(255)
        if self.mean == 0.0 and self.std == 1.0:
            return images
        mean, std = self._scale_tensors(images.device)
        return (images - mean) / std

    def subset(self, index: Tensor) -> Images:
        """Return a copy of the images at `index`."""
        rows = index.to(self.labels.device)
        return replace(
            self,
            images=self.images[rows],
            labels=self.labels[rows],
            patients=_select_patients(self.patients, index),
        )

    def to(self, device: torch.device | str) -> Images:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def _scale_tensors(self, device: torch.device) -> tuple[Tensor | float, Tensor | float]:
        """Mean and standard deviation, sent to a device once: sending them with every batch would block the host."""
        if device not in self._cached_scales:
            mean, std = (
                v if isinstance(v, float) else torch.tensor(v, device=device).reshape(-1, 1, 1)
                for v in (self.mean, self.std)
            )
            self._cached_scales[device] = (mean, std)
        return self._cached_scales[device]

    @cached_property
    def _cached_scales(self) -> dict[torch.device, tuple[Tensor | float, Tensor | float]]:
        return {}


@dataclass(frozen=True)
class Selection:
    """Some rows of images that all sites share, in memory or in a mapped file."""

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
        """Return the images as stored, before scaling: a quarter of the bytes. `pinned`: in page-locked memory."""
        return self.shared.stored_batch(self.rows.index_select(0, index.to(self.rows.device)), pinned)

    def scale_images(self, images: Tensor) -> Tensor:
        """Scale and normalise stored images as `batch` does, on their current device."""
        return self.shared.scale_images(images)

    def subset(self, index: Tensor) -> Selection:
        return Selection.from_rows(self.shared, self.rows.cpu()[index])

    def with_images(self, shared: Images) -> Selection:
        """Select the same rows from a copy of the images, for instance on another device."""
        device = shared.labels.device
        return replace(self, shared=shared, rows=self.rows.to(device), labels=self.labels.to(device))


def concatenate(parts: Sequence[Images | Selection]) -> Images | Selection:
    """Concatenate parts. From selections every image is taken once, however many sites share it."""
    selections = [part for part in parts if isinstance(part, Selection)]
    if selections:
        rows = np.unique(np.concatenate([part.rows.cpu().numpy() for part in selections]))
        return Selection.from_rows(selections[0].shared, torch.from_numpy(rows))
    whole = [part for part in parts if isinstance(part, Images)]
    known = [part.patients for part in whole if part.patients is not None]
    return replace(
        whole[0],
        images=torch.cat([part.images for part in whole]),
        labels=torch.cat([part.labels for part in whole]),
        patients=tuple(name for names in known for name in names) if len(known) == len(whole) else None,
    )


@dataclass(frozen=True)
class SiteData:
    """The three parts of one site's images."""

    name: str
    train: Examples
    validation: Examples
    test: Examples
    left_out: int = field(default=0, kw_only=True)
    """Images that `limit_group` has taken out of the training part."""

    def limit_group(self, most: int) -> SiteData:
        """Return the site with at most `most` training images of each named patient."""
        if not isinstance(self.train, Images | Selection) or self.train.patients is None:
            return self
        kept = torch.from_numpy(spread_group(self.train.patients, most))
        left_out = self.left_out + len(self.train) - len(kept)
        return replace(self, train=self.train.subset(kept), left_out=left_out) if left_out > self.left_out else self


@dataclass(frozen=True)
class PooledData(SiteData):
    """The images of all sites in one place, for training on pooled data."""

    members: Mapping[str, Examples]
    """The training images of each site."""


@dataclass(frozen=True)
class Collection:
    """A whole dataset before it is partitioned into sites."""

    images: Tensor
    """n × channels × height × width, uint8 or float32."""
    labels: Tensor
    classes: tuple[str, ...]
    patients: tuple[str, ...]
    """An identifier for every image; UNNAMED (`data.patients`) and a unique number where its patient is not named."""
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
        """Return the same images with batches normalised to (image − mean) / std."""
        return replace(self, held_out=self.held_out and replace(self.held_out, mean=mean, std=std), mean=mean, std=std)

    def to_images(self) -> Images:
        return Images(self.images, self.labels, self.patients, self.mean, self.std)
