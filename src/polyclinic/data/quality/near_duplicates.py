"""Near duplicates: the same picture saved anew, rescaled, brightened, marked, or cropped by a hair.

They are recognised by the correlation r of their thumbnails. No fixed threshold works: photographs of two retinas reach
0.998 and two handwritten digits 0.994, because they differ in details only, while the same ultrasound image cut out
twice from its screen has 0.99. But a copy is much nearer than images that are merely similar. So 1 − r must be 20 times
less than to the tenth nearest image, and 0.01 at most.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polyclinic.data.patients import is_named
from polyclinic.data.quality.image_stats import SIDE
from polyclinic.data.sources.images import Bytes

Floats: TypeAlias = NDArray[np.float32]
Rows: TypeAlias = NDArray[np.int64]
NEARER = 20
NEIGHBOUR = 10
FAR = 0.2
"""The value of 1 − r from which an image is no neighbour: the tenth neighbour counts as no farther than that."""
NEAR = FAR / NEARER
CANDIDATES = 30
"""The number of neighbours on the principal axes among which the tenth by correlation is searched."""
AXES = 16
SAMPLE = 512
"""The number of thumbnails that determine the axes: better axes would save time but change no result."""
BLOCK = 128
FLAT = 1.0
"""Thumbnails with less contrast than this (standard deviation of grey values) are not compared."""


def group_near_duplicates(thumbnails: Mapping[int, Bytes]) -> list[list[int]]:
    """Return the keys of images that are near duplicates of each other, in groups."""
    keys = [key for key, thumbnail in thumbnails.items() if thumbnail.std() >= FLAT]
    if len(keys) < 2:
        return []
    one, other = find_near_pairs(np.stack([thumbnails[key] for key in keys]))
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for key, group in zip(keys, _connect_nodes(one, other, len(keys)), strict=True):
        groups[group].append(key)
    return [group for group in groups.values() if len(group) > 1]


def _connect_nodes(one: Rows, other: Rows, count: int) -> list[int]:
    """Return the number of each node's connected component, given the two ends of every edge."""
    from scipy.sparse import coo_array  # takes a second to load, and most runs do without
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(one)), (one, other)), shape=(count, count))
    return list(connected_components(graph, directed=False)[1].tolist())


def find_near_pairs(thumbnails: Bytes) -> tuple[Rows, Rows]:
    """Return pairs of rows that are near duplicates."""
    space = _ThumbnailSpace(thumbnails)
    neighbours, apart = space.find_neighbours(np.arange(len(thumbnails)), NEIGHBOUR, NEAR)
    one, column = np.nonzero(apart <= NEAR)
    other, apart = neighbours[one, column], apart[one, column]
    concerned = np.union1d(one, other)
    usual = np.full(len(thumbnails), FAR, dtype=np.float32)
    usual[concerned] = np.sort(space.find_neighbours(concerned, CANDIDATES, FAR)[1], axis=1)[:, NEIGHBOUR - 1].clip(
        max=FAR
    )
    copies = apart * NEARER <= np.minimum(usual[one], usual[other])
    return one[copies], other[copies]


class _ThumbnailSpace:
    """Thumbnails as unit vectors, whose squared distance is 2 (1 − r), searched on their principal axes.

    Distances on these axes never exceed the true ones, so no near pair is missed. Not all pairs are compared, and no
    more than a block of thumbnails is held as floats.
    """

    def __init__(self, thumbnails: Bytes) -> None:
        from scipy.spatial import cKDTree

        self.thumbnails = thumbnails
        sample = _unit_vectors(thumbnails[:: -(-len(thumbnails) // SAMPLE)])
        axes = np.linalg.svd(sample - sample.mean(axis=0), full_matrices=False)[2][:AXES].T
        blocks = [thumbnails[start : start + SAMPLE] for start in range(0, len(thumbnails), SAMPLE)]
        self.places = np.concatenate([_unit_vectors(block) @ axes for block in blocks])
        self.tree = cKDTree(self.places)

    def find_neighbours(self, rows: Rows, count: int, within: float) -> tuple[Rows, Floats]:
        """Return the `count` nearest rows and their 1 − r, which is infinite for missing rows and the row itself."""
        _, found = self.tree.query(self.places[rows], k=count + 1, distance_upper_bound=np.sqrt(2 * within))
        apart = np.full(found.shape, np.inf, dtype=np.float32)
        for start in range(0, len(rows), BLOCK):
            here, others = rows[start : start + BLOCK], found[start : start + BLOCK]
            there = (others < len(self.places)) & (others != here[:, None])
            ours = np.repeat(_unit_vectors(self.thumbnails[here]), there.sum(axis=1), axis=0)
            apart[start : start + BLOCK][there] = 1 - (ours * _unit_vectors(self.thumbnails[others[there]])).sum(axis=1)
        return found, apart


def _unit_vectors(thumbnails: Bytes) -> Floats:
    flat: Floats = thumbnails.reshape(len(thumbnails), thumbnails[0].size if len(thumbnails) else 1).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    return flat


def merge_patients(patients: Sequence[str], images: Tensor) -> tuple[str, ...]:
    """Return a patient's name for every image, with one name for all patients who share a near duplicate.

    Pass the patient of every image and the images as bytes (n × channels × height × width).
    """
    groups = group_near_duplicates(dict(enumerate(_make_thumbnails(images))))
    names, number = np.unique(np.asarray(patients), return_inverse=True)
    links = [(number[group[0]], number[other]) for group in groups for other in group[1:]]
    one, other = np.array(links, dtype=np.int64).reshape(-1, 2).T
    person = _connect_nodes(one, other, len(names))
    # One image without a name leaves the patient of all of them unknown.
    ordered = sorted(zip(person, names.tolist(), strict=True), key=lambda pair: is_named(pair[1]))
    first = dict(reversed(ordered))
    return tuple(first[person[n]] for n in number)


def _make_thumbnails(images: Tensor) -> list[np.ndarray]:
    blocks = (
        F.interpolate(some.float().mean(1, keepdim=True), (SIDE, SIDE), mode="bilinear", antialias=True)
        for some in torch.split(images, 2 * BLOCK)
    )
    return [thumbnail for block in blocks for thumbnail in block[:, 0].round().to(torch.uint8).numpy()]
