"""Patients who share a near duplicate are merged, so that no test image has a copy in the training part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.data.quality.image_stats import SIDE
from polyclinic.data.quality.near_duplicates import group_near_duplicates

BLOCK = 256


def merge_patients(patients: Sequence[str], images: Tensor) -> tuple[str, ...]:
    """Return a patient's name for every image, with one name for all patients who share a near duplicate.

    Pass the patient of every image and the images as bytes (n × channels × height × width).
    """
    # scipy.sparse takes a second to load, and most runs do not need it
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    groups = group_near_duplicates(dict(enumerate(_make_thumbnails(images))))
    names, number = np.unique(np.asarray(patients), return_inverse=True)
    links = [(number[group[0]], number[other]) for group in groups for other in group[1:]]
    one, other = np.array(links, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(one)), (one, other)), shape=(len(names), len(names)))
    person = connected_components(graph, directed=False)[1]
    first = dict(reversed(list(zip(person.tolist(), names.tolist(), strict=True))))
    return tuple(first[person[n]] for n in number)


def _make_thumbnails(images: Tensor) -> list[np.ndarray]:
    found = []
    for some in torch.split(images, BLOCK):
        grey = some.float().mean(1, keepdim=True)
        small = F.interpolate(grey, (SIDE, SIDE), mode="bilinear", antialias=True)
        found += list(small[:, 0].round().to(torch.uint8).numpy())
    return found
