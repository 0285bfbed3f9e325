"""A decoded image, and what all decoders share: a limit on size, 8-bit scaling, silence, and the error they raise."""

import logging
import threading
import warnings
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyclinic.core import PolyclinicError

LARGEST = 100_000_000
"""Pixels of the largest image that is opened: a small file can announce any size and exhaust the memory."""
TOO_LARGE = f"it announces more than the {LARGEST // 10**6} megapixels allowed"

Bytes = NDArray[np.uint8]


class UnreadableImage(PolyclinicError):  # noqa: N818  it describes the file
    """The reason why an image cannot be read, without any name or path: "the JPEG is truncated".

    Images with the same fault get the same text, so that faults can be counted.
    """


@dataclass(frozen=True, eq=False)
class DecodedImage:
    pixels: Bytes
    """H×W grey, or H×W×3 red, green, blue."""
    bits: int
    """The number of bits per sample in the file."""
    colour: bool
    windowed: bool = False
    """Whether the file itself defines how its values become shades of grey (DICOM)."""


def read_head(path: Path) -> bytes:
    """Return the first 132 bytes, which identify the image format."""
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
    """Return value × 255 / (2^bits − 1), rounded."""
    top = 2**bits - 1
    if values.max() > top:
        raise UnreadableImage(f"it has values too large for {bits} bits, which it is declared to use")
    return np.take(np.rint(np.arange(top + 1) * 255 / top).astype(np.uint8), values)


class _SilentDecoders:
    """Suppresses warnings and log records while any thread decodes an image, and restores them afterwards."""

    def __init__(self, *loggers: str) -> None:
        self.loggers = loggers
        self.lock = threading.Lock()
        self.inside = 0
        self.before = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                for logger in map(logging.getLogger, self.loggers):
                    self.before.callback(logger.setLevel, logger.level)
                    logger.setLevel(logging.CRITICAL + 1)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.before.close()


_SILENT_DECODERS = _SilentDecoders("PIL", "pydicom", "pylibjpeg", "openjpeg")


def silence_decoders() -> AbstractContextManager[None]:
    """Suppress the decoders' warnings and log records, since they may quote headers that contain a patient's name."""
    return _SILENT_DECODERS
