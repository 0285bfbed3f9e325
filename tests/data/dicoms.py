"""DICOM files for tests, written by pydicom, each with a name that nobody may hear of."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import (
    UID,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from polyclinic.data.sources.dicom import read_dicom
from polyclinic.data.sources.images import UnreadableImage

NAME, NUMBER, ACCESSION = "Quendolin^Xaver", "PID-7719305", "ACC-4410082"
SECRETS = ("Quendolin", "Xaver", NUMBER, ACCESSION)
Stored = NDArray[Any]

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
LEVELS = RAMP.astype(np.float64)


def dataset(stored: Stored, bits: int | None = None, syntax: UID = ExplicitVRLittleEndian, **tags: Any) -> FileDataset:
    """A picture with the tags that every writer gives, a patient's name, and whatever the test is about."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = UID("1.2.3.4")
    implicit, little = syntax == ImplicitVRLittleEndian, syntax != ExplicitVRBigEndian
    made = FileDataset("", {}, b"\0" * 128, meta, is_implicit_VR=implicit, is_little_endian=little)
    made.PatientName, made.PatientID, made.AccessionNumber = NAME, NUMBER, ACCESSION
    made.Rows, made.Columns = stored.shape[:2]
    made.SamplesPerPixel = 3 if stored.ndim == 3 else 1
    made.PhotometricInterpretation = "RGB" if stored.ndim == 3 else "MONOCHROME2"
    if stored.ndim == 3:
        made.PlanarConfiguration = 0
    made.BitsAllocated = 8 * stored.dtype.itemsize
    made.BitsStored = bits or made.BitsAllocated
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(stored.dtype.kind == "i")
    ordered = stored.astype(stored.dtype.newbyteorder("<" if little else ">"))
    made.add_new("PixelData", "OB" if stored.itemsize == 1 else "OW", ordered.tobytes())
    for name, value in tags.items():
        setattr(made, name, value)
    return made


def save(folder: Path, made: Dataset) -> Path:
    path = folder / "picture.dcm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_as(path, enforce_file_format=True)
    return path


def shown(folder: Path, stored: Stored, bits: int | None = None, **tags: Any) -> NDArray[np.uint8]:
    return read_dicom(save(folder, dataset(stored, bits, **tags))).pixels


def refusal(path: Path) -> str:
    with pytest.raises(UnreadableImage) as caught:
        read_dicom(path)
    text = str(caught.value)
    assert not set(text) & set("/\n")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return text


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


SMOOTH = np.add.outer(np.arange(64), np.arange(48)).astype(np.uint8)


def shipped(name: str) -> Path:
    path = get_testdata_file(name, download=False)
    if path is None:
        pytest.skip(f"this pydicom comes without {name}")
    return Path(str(path))


def lut(entries: list[int], first: int, bits: int) -> Sequence:
    item = Dataset()
    item.LUTDescriptor = [len(entries), first, bits]
    item.LUTData = struct.pack(f"<{len(entries)}H", *entries)
    item["LUTData"].VR = "OW"
    return Sequence([item])
