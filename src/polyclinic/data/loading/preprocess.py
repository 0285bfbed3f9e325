"""From decoded pixels to `channels` × `size` × `size` bytes: borders, colour, size.

Sizes are changed by Pillow's bilinear filter, which widens with the reduction and so averages all pixels it covers.
Lanczos is a little sharper, but overshoots: a bright calcification or the rim of a film gets a halo that nobody has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from polyclinic.core.errors import DataError
from polyclinic.data.loading.options import Preparation

Bytes = NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""top, left, bottom, right; the last two are just outside."""

DARK = 20
"""Scanned film is not quite black where nothing is; tissue is brighter than this."""
BLOCKS = 255
"""Objects are looked for on a copy of at most so many rows and columns. Odd, so that its halves mirror each other."""
THIN = 2
"""Blocks on each side that an object must have around its core; the lit rim of a film has not."""
MARGIN = 0.02
"""Kept around the breast, as a share of its longer side: skin fades out below `DARK`."""


def preprocess_image(pixels: Bytes, preparation: Preparation) -> Bytes:
    """A decoded image (H×W or H×W×3) as the network gets it."""
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.size == 0 or pixels.shape[2:] not in ((), (3,)):
        raise DataError(f"An image must be H×W or H×W×3 bytes, not {pixels.dtype} of shape {pixels.shape}.")
    if preparation.crop_borders:
        pixels = _crop_borders(pixels)
    if preparation.channels == 1:
        pixels = _to_grey(pixels)
    image = _fit_to_square(Image.fromarray(pixels), preparation)
    if preparation.channels == 1:
        return image[None]
    return np.ascontiguousarray(np.broadcast_to(np.atleast_3d(image), (*image.shape[:2], 3)).transpose(2, 0, 1))


def breast_box(pixels: Bytes) -> Box:
    """The largest bright object with a margin; the whole image where there is none."""
    return _locate_object(_to_grey(pixels))[0]


def _to_grey(pixels: Bytes) -> Bytes:
    return pixels if pixels.ndim == 2 else np.array(Image.fromarray(pixels).convert("L"))


def _crop_borders(pixels: Bytes) -> Bytes:
    """The box of the largest object, everything in it that does not touch the object made black."""
    (top, left, bottom, right), foreign = _locate_object(_to_grey(pixels))
    cut = pixels[top:bottom, left:right].copy()
    cut[foreign[top:bottom, left:right]] = 0
    return cut


def _locate_object(grey: Bytes) -> tuple[Box, NDArray[np.bool_]]:
    """Where the largest object is, and which pixels belong to other objects."""
    foreign = np.zeros(grey.shape, dtype=bool)
    rows, columns = np.flatnonzero(grey.any(axis=1)), np.flatnonzero(grey.any(axis=0))
    if not rows.size:
        return (0, 0, *grey.shape), foreign
    # black borders go first, at full resolution: what follows must not depend on how wide they are
    top, left, bottom, right = int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1
    inner = grey[top:bottom, left:right]
    across, down = _block_edges(inner.shape[1]), _block_edges(inner.shape[0])
    bright = _block_means(inner, down, across) > DARK
    if not bright.any():
        return (top, left, bottom, right), foreign
    object_ = _largest_object(bright)
    others = _expand_blocks(_foreign_blocks(bright, object_) & ~object_, down, across)
    foreign[top:bottom, left:right] = others
    (y0, y1), (x0, x1) = _object_extent(object_, 0, down), _object_extent(object_, 1, across)
    margin = round(MARGIN * max(y1 - y0, x1 - x0))
    box = (
        top + max(y0 - margin, 0),
        left + max(x0 - margin, 0),
        top + min(y1 + margin, inner.shape[0]),
        left + min(x1 + margin, inner.shape[1]),
    )
    return box, foreign


def _block_edges(length: int) -> NDArray[np.int64]:
    """Limits of at most `BLOCKS` blocks of nearly equal length, the same from both ends."""
    count = min(length, BLOCKS)
    lower = np.arange(count + 1) * length // count
    return np.where(np.arange(count + 1) <= count // 2, lower, length - lower[::-1])


def _block_means(grey: Bytes, down: NDArray[np.int64], across: NDArray[np.int64]) -> NDArray[np.float64]:
    sums = np.add.reduceat(np.add.reduceat(grey, down[:-1], axis=0, dtype=np.int64), across[:-1], axis=1)
    return np.asarray(sums / np.outer(np.diff(down), np.diff(across)))


def _largest_object(bright: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The largest connected object (all of them, where several are equally large), thin lines not counted."""
    thick = ndimage.binary_opening(bright, np.ones((2 * THIN + 1, 2 * THIN + 1)))
    labels, _ = ndimage.label(thick if thick.any() else bright)
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    return np.asarray((sizes == sizes.max())[labels])


def _foreign_blocks(bright: NDArray[np.bool_], object_: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Blocks of, and right beside, the bright areas that have no connection with the object."""
    labels, count = ndimage.label(bright)
    touching = np.zeros(count + 1, dtype=bool)
    touching[labels[object_]] = True
    ours = ndimage.binary_dilation(bright & touching[labels])
    return np.asarray(ndimage.binary_dilation(bright & ~touching[labels]) & ~ours)


def _expand_blocks(blocks: NDArray[np.bool_], down: NDArray[np.int64], across: NDArray[np.int64]) -> NDArray[np.bool_]:
    return blocks.repeat(np.diff(down), axis=0).repeat(np.diff(across), axis=1)


def _object_extent(object_: NDArray[np.bool_], axis: int, edges: NDArray[np.int64]) -> tuple[int, int]:
    blocks = np.unique(object_.nonzero()[axis])
    return int(edges[blocks[0]]), int(edges[blocks[-1] + 1])


def _fit_to_square(image: Image.Image, preparation: Preparation) -> Bytes:
    size, (width, height) = preparation.size, image.size
    if preparation.fit == "stretch":
        return _resize(image, size, size)
    if preparation.fit == "crop":
        short = min(width, height)
        x, y = (width - short) / 2, (height - short) / 2
        return _resize(image, size, size, (x, y, x + short, y + short))
    inside = [_same_parity(size * side / max(width, height), size) for side in (height, width)]
    canvas = np.zeros((size, size, *np.array(image).shape[2:]), dtype=np.uint8)
    y, x = ((size - side) // 2 for side in inside)
    canvas[y : y + inside[0], x : x + inside[1]] = _resize(image, inside[1], inside[0])
    return canvas


def _same_parity(length: float, size: int) -> int:
    """Rounded so that equal margins remain on both sides: otherwise a mirrored image would be shifted by a pixel."""
    return max(size - 2 * round((size - length) / 2), 2 - size % 2)


def _resize(image: Image.Image, width: int, height: int, box: tuple[float, float, float, float] | None = None) -> Bytes:
    return np.array(image.resize((width, height), Image.Resampling.BILINEAR, box))
