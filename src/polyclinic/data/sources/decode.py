"""From a file to 8-bit pixels: PNG, JPEG, BMP, TIFF, WebP, PGM and DICOM, and stacks of images in npz and idx files.

A file that cannot be read is refused by a short reason that names neither the file nor what is written in it, and never
replaced by something else: reasons end up in reports, and files and their headers carry patients' names.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
import struct
import threading
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from polyclinic.core.errors import PolyclinicError
from polyclinic.data.sources.npz import HEADERS, MOST_HEADER

LARGEST = 100_000_000
"""Pixels of the largest image that is opened; a small file can announce any size and exhaust the memory."""
TOO_LARGE = f"it announces more than the {LARGEST // 10**6} megapixels allowed"
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")
KINDS = {"PPM": "PGM", "MPO": "JPEG", "WEBP": "WebP"}
GREY = ("1", "L", "LA", "La")
ORIENTATION = 0x0112
UPRIGHT: dict[object, tuple[bool, bool, bool]] = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
"""EXIF orientation: (transpose, then reverse the rows, then reverse the columns)."""
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0
IDX_OF_BYTE_IMAGES = 0x803
BLOCK = 1 << 20

Bytes = NDArray[np.uint8]
Readable = IO[bytes] | io.BufferedIOBase


class UnreadableImage(PolyclinicError):  # noqa: N818  it says what the file is
    """Why an image cannot be read, in a few words without any name or path: "the JPEG is truncated".

    Images with the same fault get the same words, so that faults can be counted.
    """


@dataclass(frozen=True, eq=False)
class DecodedImage:
    pixels: Bytes
    """H×W grey, or H×W×3 red, green, blue."""
    bits: int
    """How many bits per sample the file stores."""
    colour: bool
    windowed: bool = False
    """Whether the file itself says how its values become shades of grey (DICOM), whatever its bits."""


def decode_image(path: Path, bits: int | None = None) -> DecodedImage:
    """One image as it is meant to be seen: upright, transparency on black, palettes and CMYK as RGB.

    `bits` says how many bits 16-bit image files really use (None: all); DICOM and PGM say so themselves.
    """
    head = read_head(path)
    with silence_decoders():
        if path.suffix.lower() in (".dcm", ".dicom") or head[128:] == b"DICM":
            return _decode_dicom(path)
        return _decode_picture(path, head, bits)


def read_head(path: Path) -> bytes:
    """The first 132, where every kind of image says what it is."""
    try:
        with path.open("rb") as file:
            head = file.read(132)
    except FileNotFoundError:
        raise UnreadableImage("the file does not exist") from None
    except OSError:
        raise UnreadableImage("the file cannot be opened") from None
    if not head:
        raise UnreadableImage("the file is empty")
    return head


def check_size(width: int, height: int) -> None:
    if width * height > LARGEST:
        raise UnreadableImage(TOO_LARGE)


def scale_to_bytes(values: NDArray[np.unsignedinteger[Any]], bits: int) -> Bytes:
    """value × 255 / (2^bits − 1), rounded."""
    top = 2**bits - 1
    if values.max() > top:
        raise UnreadableImage(f"it has values that the {bits} bits it is said to use cannot hold")
    return np.take(np.rint(np.arange(top + 1) * 255 / top).astype(np.uint8), values)


class _SilentDecoders:
    """No warnings and no log records while anybody decodes, in whichever thread; then all as it was before."""

    def __init__(self, *loggers: str) -> None:
        self.loggers = loggers
        self.lock = threading.Lock()
        self.inside = 0
        self.before = ExitStack()

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                for logger in map(logging.getLogger, self.loggers):
                    self.before.callback(logger.setLevel, logger.level)
                    logger.setLevel(logging.CRITICAL + 1)
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.before.close()


_SILENT_DECODERS = _SilentDecoders("PIL", "pydicom", "pylibjpeg", "openjpeg")


@contextmanager
def silence_decoders() -> Iterator[None]:
    """Keep decoders from talking: what they warn of and log may quote headers, and thereby a patient's name."""
    _SILENT_DECODERS.enter()
    try:
        yield
    finally:
        _SILENT_DECODERS.leave()


def _decode_dicom(path: Path) -> DecodedImage:
    try:
        from polyclinic.data.sources.dicom import read_dicom
    except ImportError:
        raise UnreadableImage('it is a DICOM file; install the reader with pip install "polyclinic[dicom]"') from None
    return read_dicom(path)


def _decode_picture(path: Path, head: bytes, bits: int | None) -> DecodedImage:
    kind = "image"
    try:
        # given a path, not a file, Pillow maps uncompressed TIFFs into memory and garbles those that lie on their side
        with path.open("rb") as file, Image.open(file, formats=FORMATS) as image:
            kind = KINDS.get(str(image.format), str(image.format))
            check_size(*image.size)
            _check_single_picture(image)
            image.load()
            pixels, depth = _decode_deep_png(path, bits) if _is_deep_colour_png(head) else _to_eight_bit(image, bits)
            pixels = _apply_orientation(pixels, image.getexif().get(ORIENTATION, 1))
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(
            "it is not a PNG, JPEG, BMP, TIFF, WebP, PGM or DICOM image, or cut off at its start"
        ) from None
    except Image.DecompressionBombError:
        raise UnreadableImage(TOO_LARGE) from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise UnreadableImage(f"the {kind} is {'truncated' if 'truncated' in str(error) else 'damaged'}") from None
    return DecodedImage(pixels, depth, colour=pixels.ndim == 3)


def _check_single_picture(image: Image.Image) -> None:
    # the other pictures of an MPO, a JPEG of some cameras, are previews of the first
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        raise UnreadableImage("it holds several pictures; save each as a file of its own")


def _to_eight_bit(image: Image.Image, bits: int | None) -> tuple[Bytes, int]:
    """Pixels and the stored depth."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _scale_deep_grey(image, bits), 16
    if image.mode in ("I", "F"):
        raise UnreadableImage("its pixels are signed, 32-bit or fractional numbers; save it with 8 or 16 bits")
    depth = _sample_depth(image, bits)
    if image.has_transparency_data:
        rgba = np.array(image.convert("RGBA"))
        pixels = _blend_onto_black(rgba[..., :3], rgba[..., 3:])
        return (pixels[..., 0].copy() if image.mode in GREY else pixels), depth
    return np.array(image.convert("L" if image.mode in GREY else "RGB")), depth


def _scale_deep_grey(image: Image.Image, bits: int | None) -> Bytes:
    values = np.array(image).astype(np.uint16)
    if image.format == "PPM":  # Pillow has stretched it already, by the greatest value that the header tells
        return scale_to_bytes(values, 16)
    pixels = scale_to_bytes(values, bits or 16)
    return 255 - pixels if _tiff_tag(image, PHOTOMETRIC) == WHITE_IS_ZERO else pixels


def _sample_depth(image: Image.Image, bits: int | None) -> int:
    samples = _tiff_tag(image, BITS_PER_SAMPLE)
    if isinstance(samples, tuple) and max(samples) > 8:
        if bits not in (None, 16):  # Pillow keeps only the upper eight
            raise UnreadableImage(f"it is a 16-bit colour TIFF, of which {bits} bits cannot be picked; save it as PNG")
        return 16
    return 1 if image.mode == "1" else 8


def _tiff_tag(image: Image.Image, tag: int) -> object:
    return image.tag_v2.get(tag) if image.format == "TIFF" and hasattr(image, "tag_v2") else None


def _is_deep_colour_png(head: bytes) -> bool:
    """16 bits per sample, and more than plain grey: Pillow would keep only the upper eight bits."""
    return head.startswith(b"\x89PNG") and head[24:25] == b"\x10" and head[25:26] != b"\x00"


def _decode_deep_png(path: Path, bits: int | None) -> tuple[Bytes, int]:
    import torch
    from torchvision.io import ImageReadMode, decode_png

    packed = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    values: NDArray[np.uint16] = decode_png(packed, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
    has_alpha = values.shape[2] in (2, 4)
    pixels = scale_to_bytes(values[..., :-1] if has_alpha else values, bits or 16)
    if has_alpha:
        pixels = _blend_onto_black(pixels, scale_to_bytes(values[..., -1:], 16))
    return (pixels[..., 0].copy() if pixels.shape[2] == 1 else pixels), 16


def _blend_onto_black(pixels: Bytes, alpha: Bytes) -> Bytes:
    return ((pixels.astype(np.uint16) * alpha + 127) // 255).astype(np.uint8)


def _apply_orientation(pixels: Bytes, orientation: object) -> Bytes:
    transpose, rows, columns = UPRIGHT.get(orientation, (False, False, False))
    turned = pixels.swapaxes(0, 1) if transpose else pixels
    return np.ascontiguousarray(turned[:: -1 if rows else 1, :: -1 if columns else 1])


@dataclass(frozen=True)
class _Stack:
    """Images of one shape, one behind the other."""

    file: Readable
    count: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.unsignedinteger[Any]]

    def read_images(self, rows: Sequence[int]) -> Iterator[NDArray[np.unsignedinteger[Any]]]:
        """The images at `rows`, which ascend. What lies between is read too: the checksum at the end counts it."""
        if rows and not 0 <= rows[0] <= rows[-1] < self.count:
            raise UnreadableImage(f"row {rows[-1]} was asked for, but it has {self.count} images, counted from 0")
        size, reached = math.prod(self.shape) * self.dtype.itemsize, 0
        for row in rows:
            _skip_bytes(self.file, (row - reached) * size)
            yield np.frombuffer(_read_exactly(self.file, size), self.dtype).reshape(self.shape)
            reached = row + 1
        if reached == self.count and self.file.read(1):
            raise UnreadableImage("it has bytes after its last image")


def _read_exactly(file: Readable, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise UnreadableImage("the file is truncated")
    return data


def _skip_bytes(file: Readable, size: int) -> None:
    for start in range(0, size, BLOCK):
        _read_exactly(file, min(BLOCK, size - start))


def decode_rows(path: Path, array: str, rows: Sequence[int], bits: int | None = None) -> Bytes:
    """Images of a stack, n×H×W or n×H×W×3, in the order of `rows`. Each call reads from the front: ask for many."""
    wanted, places = np.unique(np.asarray(rows, dtype=np.int64), return_inverse=True)
    images = list(stream_rows(path, array, wanted.tolist(), bits))
    return np.stack([images[place] for place in places]) if images else np.empty((0, 0, 0), np.uint8)


def stream_rows(path: Path, array: str, rows: Sequence[int], bits: int | None = None) -> Iterator[Bytes]:
    """One after the other the images at `rows`, which must ascend, of an array in an npz file, or of an idx(.gz) file.

    The file is gone through once, and no more than one image is held: for stacks that are larger than the memory.
    """
    if any(next_one <= row for row, next_one in pairwise(rows)):
        raise ValueError("rows must ascend")
    with _open_stack(path, array) as stack:
        for image in stack.read_images(rows):
            pixels = image.astype(np.uint8) if image.dtype == np.uint8 else scale_to_bytes(image, bits or 16)
            yield pixels[..., 0] if image.ndim == 3 and image.shape[2] == 1 else pixels


@contextmanager
def _open_stack(path: Path, array: str) -> Iterator[_Stack]:
    head = read_head(path)
    try:
        with ExitStack() as files:
            file = files.enter_context(path.open("rb"))
            if head.startswith(b"PK"):
                yield _open_npy(files.enter_context(zipfile.ZipFile(file)), array, files)
            else:
                yield _open_idx(gzip.GzipFile(fileobj=file) if head.startswith(b"\x1f\x8b") else file)
    except UnreadableImage:
        raise
    except Exception:  # what zip, deflate and header parsers raise on damaged files may quote them
        raise UnreadableImage("the file is truncated or damaged") from None


def _open_npy(archive: zipfile.ZipFile, array: str, files: ExitStack) -> _Stack:
    name = f"{array}.npy"
    if name not in archive.namelist():
        raise UnreadableImage(f"it has no array '{array}'")
    with silence_decoders(), archive.open(name) as member:
        opening = io.BytesIO(member.read(MOST_HEADER))  # NumPy itself would read any length that a header claims
        shape, by_column, dtype = HEADERS[npy.read_magic(opening)](opening)
    if dtype.kind != "u" or dtype.itemsize > 2:
        raise UnreadableImage("its images are not whole numbers of 8 or 16 bits (uint8, uint16)")
    if by_column and len(shape) > 1:
        raise UnreadableImage("its images are stored column by column; save them with numpy.ascontiguousarray")
    file = files.enter_context(archive.open(name))
    _skip_bytes(file, opening.tell())
    return _build_stack(file, shape, dtype)


def _open_idx(file: Readable) -> _Stack:
    header = file.read(16)
    if len(header) < 16 or struct.unpack(">I", header[:4])[0] != IDX_OF_BYTE_IMAGES:
        raise UnreadableImage("it is not an idx file of images")
    return _build_stack(file, struct.unpack(">3I", header[4:]), np.dtype(np.uint8))


def _build_stack(file: Readable, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Stack:
    image = shape[1:]
    if len(image) not in (2, 3) or image[2:] not in ((), (1,), (3,)) or min(image) < 1:
        raise UnreadableImage("its array has not the shape of images: n×H×W, n×H×W×1 or n×H×W×3")
    check_size(image[1], image[0])
    return _Stack(file, shape[0], image, dtype)
