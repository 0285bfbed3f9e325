"""DICOM files with a single picture, rendered in 8 bits as the file defines (PS3.3 C.11: modality, then VOI).

Only the tags below are read, and only pixels leave `read_dicom`: no exception, warning or log record contains the value
of a tag, since any of them may hold a patient's name.

A file's VOI lookup table is applied, else its first window. Without either, the values of this image except padding are
stretched from black to white. The alternative, the range of the declared bits, is the same for all images, but many
scanners declare 16 bits and use 10, so of 256 shades of grey four would remain. The price is that such images can be
compared in contrast but not in absolute values.

Pixels are decompressed and windows applied by pydicom. Three things are done here, because pydicom 3.0 gets them wrong:
- Lookup tables (modality, VOI, palette). pydicom keeps the index into a table in the type of its entries, so tables of
  bytes for more than 256 values wrap around; it refuses 12-bit modality tables and bytes packed into words; it does not
  limit entries to the declared bits; and it reads big-endian palettes as little-endian.
- Rescaling. pydicom ignores a slope without an intercept, and an intercept without a slope.
- Values without a window, which pydicom returns as they are.
The presentation lookup table is not read: its shape only repeats what the photometric interpretation says.
"""

import io
import math
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import dcmread
from pydicom.dataset import Dataset, FileDataset
from pydicom.encaps import get_frame
from pydicom.errors import InvalidDicomError
from pydicom.multival import MultiValue
from pydicom.pixels.decoders.base import Decoder, get_decoder
from pydicom.pixels.processing import apply_windowing
from pydicom.uid import UID, JPEG2000TransferSyntaxes, JPEGLSTransferSyntaxes, JPEGTransferSyntaxes, RLELossless

from polyclinic.data.sources.images import (
    LARGEST,
    Bytes,
    DecodedImage,
    UnreadableImage,
    check_size,
    read_head,
    scale_to_bytes,
    silence_decoders,
)

Numbers = NDArray[np.float64]

PALETTES = tuple(
    (f"{colour}PaletteColorLookupTableDescriptor", f"{colour}PaletteColorLookupTableData")
    for colour in ("Red", "Green", "Blue")
)
SHAPE: list[str] = [
    "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
]  # fmt: skip
RENDERING: list[str] = [
    "PixelPaddingValue", "PixelPaddingRangeLimit", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence",
    "VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction", *(name for pair in PALETTES for name in pair),
]  # fmt: skip
PIXELS: list[str] = ["PixelData", "ExtendedOffsetTable", "ExtendedOffsetTableLengths"]
COMPRESSIONS = (
    ("JPEG", JPEGTransferSyntaxes, "libjpeg"),
    ("JPEG-LS", JPEGLSTransferSyntaxes, "libjpeg"),
    ("JPEG 2000", JPEG2000TransferSyntaxes, "openjpeg"),
    ("RLE", [RLELossless], ""),
)
MONOCHROME = ("MONOCHROME1", "MONOCHROME2")
PHOTOMETRICS = (*MONOCHROME, "PALETTE COLOR", "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
END_OF_IMAGE = b"\xff\xd9"


def read_dicom(path: Path) -> DecodedImage:
    read_head(path)
    with silence_decoders():
        try:
            return _read_file(path)
        except UnreadableImage:
            raise
        except InvalidDicomError:
            raise UnreadableImage("it is not a DICOM file: the mark DICM is missing") from None
        except Exception:  # pydicom raises many kinds of errors on damaged files, and quotes tags
            raise UnreadableImage("the DICOM file is damaged") from None


def _read_file(path: Path) -> DecodedImage:
    header = _read_tags(path, SHAPE + RENDERING, stop_before_pixels=True)
    _check_header(header)
    stored, photometric = _read_stored_values(path, header.file_meta.get("TransferSyntaxUID"))
    if stored.shape[:2] != (header.Rows, header.Columns) or stored.ndim > 3:
        raise UnreadableImage("its pixels are not the one picture that its header announces")
    return DecodedImage(
        pixels=_render_pixels(stored, photometric, header),
        bits=int(header.BitsStored),
        colour=photometric not in MONOCHROME,
        windowed=True,
    )


class _GuardedReader(io.BufferedReader):
    """pydicom reads the whole rest of a file only to inflate it: check the inflated size first."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if size is None or size < 0:
            _check_inflated_size(data)
        return data


def _check_inflated_size(data: bytes, most: int = 6 * LARGEST) -> None:
    """Allow three samples of two bytes for each pixel of the largest image."""
    stream, size = zlib.decompressobj(-zlib.MAX_WBITS), 0
    while data and not stream.eof:
        size += len(stream.decompress(data, 2**20))
        data = stream.unconsumed_tail
        if size > most:
            raise UnreadableImage("its deflated content is larger than any image allowed")


def _read_tags(path: Path, tags: list[str], *, stop_before_pixels: bool = False) -> FileDataset:
    with _GuardedReader(io.FileIO(path)) as file:
        return dcmread(file, specific_tags=tags, stop_before_pixels=stop_before_pixels)


def _check_header(header: Dataset) -> None:
    if "Rows" not in header or "Columns" not in header:
        raise UnreadableImage("it holds no picture (it is a report or another document), or ends before it")
    if int(header.get("NumberOfFrames") or 1) > 1:
        raise UnreadableImage(
            "it holds several pictures (multi-frame DICOM); export those wanted as files of their own"
        )
    check_size(header.Columns, header.Rows)
    if header.PhotometricInterpretation not in PHOTOMETRICS:
        raise UnreadableImage("its kind of colour (photometric interpretation) is not supported")
    if header.BitsAllocated > 16:
        raise UnreadableImage(f"its pixels have {int(header.BitsAllocated)} bits; up to 16 can be read")
    if header.get("HighBit", header.BitsStored - 1) != header.BitsStored - 1:
        raise UnreadableImage("its pixels are not kept in the lowest bits, an old habit that is not supported")


def _read_stored_values(path: Path, syntax: UID | None) -> tuple[NDArray[np.integer[Any]], str]:
    """Return the stored pixel values (colour: as RGB), and their photometric interpretation after decompression."""
    decoder, compression, package = _find_decoder(syntax)
    dataset = _read_tags(path, SHAPE + PIXELS)
    if not dataset.get("PixelData"):
        raise UnreadableImage("it has no pixel data, or is truncated within them")
    if package:
        _check_frame(dataset, package)
    try:
        values, facts = decoder.as_array(dataset)
    except Exception:
        if package and "pylibjpeg" not in decoder.available_plugins:  # Pillow decodes some, not all
            raise _missing_decoder(compression) from None
        raise UnreadableImage("its pixel data are truncated or damaged") from None
    return values, str(facts["photometric_interpretation"])


def _find_decoder(syntax: UID | None) -> tuple[Decoder, str, str]:
    """Return the decoder, the name of the compression, and the package that decodes it ("": pydicom)."""
    if not syntax:
        raise UnreadableImage("it does not define how its pixels are stored (no transfer syntax)")
    compression, package = next(((name, package) for name, known, package in COMPRESSIONS if syntax in known), ("", ""))
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise UnreadableImage(
            "its pixels are stored or compressed in a way that cannot be read (video, private)"
        ) from None
    if not decoder.is_available:
        raise _missing_decoder(compression)
    return decoder, compression, package


def _missing_decoder(compression: str) -> UnreadableImage:
    return UnreadableImage(
        f'its pixels are compressed ({compression}); install the decoders with pip install "polyclinic[dicom]"'
    )


def _check_frame(dataset: Dataset, package: str) -> None:
    """Check the size and the end of a compressed picture: decoders trust its own size and tolerate a missing end."""
    frame = get_frame(dataset.PixelData, 0, number_of_frames=1)
    if END_OF_IMAGE not in frame[-16:]:  # its end may be padded with zeros
        raise UnreadableImage("its compressed pixels are truncated")
    try:
        size = import_module(package).get_parameters(frame)
    except (ImportError, RuntimeError):  # then only Pillow can decode it, which has a limit of its own
        return
    if (size["rows"], size["columns"]) != (dataset.Rows, dataset.Columns):
        raise UnreadableImage("its compressed picture has another size than its header announces")


def _render_pixels(stored: NDArray[np.integer[Any]], photometric: str, header: Dataset) -> Bytes:
    if photometric == "RGB":
        return scale_to_bytes(stored.astype(np.uint16), int(header.BitsStored))
    low = int(stored.min())
    index = np.subtract(stored, low, dtype=np.int32)
    seen = np.bincount(index.ravel()) > 0
    # at most 2^16 different values: render each once
    levels = np.arange(low, low + len(seen), dtype=np.float64)
    if photometric == "PALETTE COLOR":
        return np.stack([_LookupTable(header, *names).to_shades(levels)[index] for names in PALETTES], axis=-1)
    if photometric not in MONOCHROME:
        raise UnreadableImage("its colours cannot be converted to red, green and blue")
    seen &= ~_padding_mask(levels, stored, header)
    shades = np.rint(_apply_voi(_apply_modality(levels, header), seen, header)).astype(np.uint8)
    pixels: Bytes = np.take(shades, index)
    return np.invert(pixels) if photometric == "MONOCHROME1" else pixels


def _apply_modality(levels: Numbers, header: Dataset) -> Numbers:
    if header.get("ModalityLUTSequence"):
        return _LookupTable(header.ModalityLUTSequence[0]).look_up(levels)
    slope, intercept = _first_number(header, "RescaleSlope"), _first_number(header, "RescaleIntercept")
    if slope == 0:
        raise UnreadableImage("its rescale slope is 0, which makes all its pixels equal")
    return levels * (1.0 if slope is None else slope) + (intercept or 0.0)


def _apply_voi(values: Numbers, seen: NDArray[np.bool_], header: Dataset) -> Numbers:
    """Shades of MONOCHROME2, from 0 (black) to 255 (white)."""
    if header.get("VOILUTSequence"):
        table = _LookupTable(header.VOILUTSequence[0])
        return 255 * (table.look_up(values) / table.top)
    if _first_number(header, "WindowCenter") is not None and _first_number(header, "WindowWidth") is not None:
        return _apply_window(values, header)
    if not seen.any() or (low := values[seen].min()) == (high := values[seen].max()):
        return np.zeros_like(values)
    return np.asarray(255 * np.clip((values - low) / (high - low), 0, 1))


def _apply_window(values: Numbers, header: Dataset) -> Numbers:
    """pydicom's windows (PS3.3 C.11.2.1.2.1, C.11.2.1.3.1, C.11.2.1.3.2), for an output of eight unsigned bits."""
    shape = str(header.get("VOILUTFunction") or "LINEAR").strip().upper()
    if shape not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        raise UnreadableImage("its window has an unknown shape (neither linear, linear exact nor sigmoid)")
    window = Dataset()
    window["WindowCenter"], window["WindowWidth"] = header["WindowCenter"], header["WindowWidth"]
    window.VOILUTFunction, window.PhotometricInterpretation = shape, "MONOCHROME2"
    window.BitsStored, window.PixelRepresentation = 8, 0
    try:
        return np.asarray(apply_windowing(values, window))
    except ValueError:  # it quotes the width
        raise UnreadableImage("its window is too narrow to show anything; correct or remove its window") from None


def _padding_mask(levels: Numbers, stored: NDArray[np.integer[Any]], header: Dataset) -> NDArray[np.bool_]:
    value = _first_number(header, "PixelPaddingValue")
    if value is None:
        return np.zeros(len(levels), dtype=bool)
    limit = _first_number(header, "PixelPaddingRangeLimit")
    # some writers store −2000 as the unsigned 63536: interpret it in the type of the pixels
    ends = np.array([value, value if limit is None else limit]).astype(np.int64).astype(stored.dtype)
    return np.asarray((levels >= ends.min()) & (levels <= ends.max()))


def _first_number(header: Dataset, keyword: str) -> float | None:
    """Return the first value of a tag, or None if it is absent or empty."""
    value = header.get(keyword)
    first = (value[0] if value else None) if isinstance(value, MultiValue) else value
    if first is None or first == "":
        return None
    if not math.isfinite(number := float(first)):
        raise UnreadableImage("a number that defines its display is infinite or not a number")
    return number


class _LookupTable:
    """A lookup table (PS3.3 C.11.1.1). Values outside its range get its first or last entry."""

    def __init__(self, holder: Dataset, descriptor: str = "LUTDescriptor", data: str = "LUTData") -> None:
        if descriptor not in holder or data not in holder:
            raise UnreadableImage("its lookup table is missing, or segmented, which is not supported")
        count, self.first, bits = (int(number) for number in holder[descriptor].value)
        self.entries, self.top = _read_entries(holder[data].value, (count & 0xFFFF) or 2**16, bits, holder)

    def look_up(self, values: Numbers) -> Numbers:
        return self.entries[np.clip(values - self.first, 0, len(self.entries) - 1).astype(np.int64)]

    def to_shades(self, values: Numbers) -> Bytes:
        return np.rint(255 * self.look_up(values) / self.top).astype(np.uint8)


def _read_entries(raw: Any, count: int, bits: int, holder: Dataset) -> tuple[Numbers, int]:
    """Return the entries of a table, and their largest possible value."""
    little = bool(holder.original_encoding[1])
    if not isinstance(raw, bytes):
        entries = np.atleast_1d(np.asarray(raw, dtype=np.float64)) % 2**16
    elif len(raw) >= 2 * count:
        entries = np.frombuffer(raw[: 2 * count], dtype="<u2" if little else ">u2").astype(np.float64)
    elif little:  # two entries of eight bits in each word
        entries, bits = np.frombuffer(raw, dtype=np.uint8).astype(np.float64), 8
    else:
        raise UnreadableImage("its lookup table packs bytes in big-endian words, which is not supported")
    if len(entries) < count or not 1 <= bits <= 16:
        raise UnreadableImage("its lookup table does not match its descriptor")
    return np.minimum(entries[:count], 2**bits - 1), 2**bits - 1
