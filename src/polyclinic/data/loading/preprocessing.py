"""From decoded pixels to `channels` × `size` × `size` bytes: crop borders, convert colours, resize.

Images are resized by Pillow's bilinear filter, whose support grows with the reduction, so it averages all pixels it
covers. Lanczos is slightly sharper but overshoots: it draws a halo around calcifications and the rim of a film.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyclinic.core import DataError
from polyclinic.data.loading.image_options import Preparation

Bytes = NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""top, left, bottom, right; the last two are exclusive."""

DARK = 20
"""The background of scanned film is not quite black; tissue is brighter than this."""
BLOCKS = 255
"""The largest number of rows and columns in which objects are searched. Odd, so that its halves mirror each other."""
THIN = 2
"""How many blocks an object must extend around its core on each side; the lit rim of a film does not."""
MARGIN = 0.02
"""The margin kept around the breast, relative to its longer side, since skin fades below `DARK`."""


def preprocess_image(pixels: Bytes, preparation: Preparation) -> Bytes:
    """Crop, convert and resize a decoded image (H×W or H×W×3) into `channels` × `size` × `size` bytes."""
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
    """Return the box of the largest bright object with a margin, or the whole image if there is none."""
    return _locate_object(_to_grey(pixels))[0]


def _to_grey(pixels: Bytes) -> Bytes:
    return pixels if pixels.ndim == 2 else np.array(Image.fromarray(pixels).convert("L"))


def _crop_borders(pixels: Bytes) -> Bytes:
    """Crop to the largest object and blacken everything in the box that does not touch it."""
    (top, left, bottom, right), foreign = _locate_object(_to_grey(pixels))
    cut = pixels[top:bottom, left:right].copy()
    cut[foreign[top:bottom, left:right]] = 0
    return cut


def _locate_object(grey: Bytes) -> tuple[Box, NDArray[np.bool_]]:
    """Return the box of the largest object, and a mask of the pixels of other objects."""
    foreign = np.zeros(grey.shape, dtype=bool)
    rows, columns = np.flatnonzero(grey.any(axis=1)), np.flatnonzero(grey.any(axis=0))
    if not rows.size:
        return (0, 0, *grey.shape), foreign
    # black borders are removed first, at full resolution, so that the result does not depend on their width
    top, left, bottom, right = int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1
    inner = grey[top:bottom, left:right]
    across, down = _block_edges(inner.shape[1]), _block_edges(inner.shape[0])
    sums = np.add.reduceat(np.add.reduceat(inner, down[:-1], axis=0, dtype=np.int64), across[:-1], axis=1)
    bright = sums / np.outer(np.diff(down), np.diff(across)) > DARK
    if not bright.any():
        return (top, left, bottom, right), foreign
    object_ = _largest_object(bright)
    others = _foreign_blocks(bright, object_) & ~object_
    foreign[top:bottom, left:right] = others.repeat(np.diff(down), axis=0).repeat(np.diff(across), axis=1)
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
    """Return the limits of at most `BLOCKS` blocks of nearly equal length, symmetric about the middle."""
    count = min(length, BLOCKS)
    lower = np.arange(count + 1) * length // count
    return np.where(np.arange(count + 1) <= count // 2, lower, length - lower[::-1])


def _largest_object(bright: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the largest connected object (of all, if several are equally large), ignoring thin lines."""
    from scipy import ndimage  # takes a moment to load, and most runs do without

    thick = ndimage.binary_opening(bright, np.ones((2 * THIN + 1, 2 * THIN + 1)))
    labels, _ = ndimage.label(thick if thick.any() else bright)
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    return np.asarray((sizes == sizes.max())[labels])


def _foreign_blocks(bright: NDArray[np.bool_], object_: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the bright areas that are not connected with the object, and of the blocks next to them."""
    from scipy import ndimage

    labels, count = ndimage.label(bright)
    touching = np.zeros(count + 1, dtype=bool)
    touching[labels[object_]] = True
    ours = ndimage.binary_dilation(bright & touching[labels])
    return np.asarray(ndimage.binary_dilation(bright & ~touching[labels]) & ~ours)


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
    """Round a length so that both margins are equal; otherwise a mirrored image would be shifted by a pixel."""
    return max(size - 2 * round((size - length) / 2), 2 - size % 2)


def _resize(image: Image.Image, width: int, height: int, box: tuple[float, float, float, float] | None = None) -> Bytes:
    return np.array(image.resize((width, height), Image.Resampling.BILINEAR, box))
