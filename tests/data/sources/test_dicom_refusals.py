"""DICOM files that cannot be shown are refused by a sentence, and nobody's name gets out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from hypothesis import given, strategies as st
from pydicom.encaps import encapsulate
from pydicom.pixels.decoders.base import get_decoder
from pydicom.uid import (
    MPEG2MPML,
    UID,
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
)

from polyclinic.data.sources import dicom
from polyclinic.data.sources.decoder import decode_image
from polyclinic.data.sources.dicom import read_dicom
from polyclinic.data.sources.images import DecodedImage, UnreadableImage
from tests.data.dicoms import (
    NAME,
    RAMP,
    SECRETS,
    SMOOTH,
    dataset,
    jpeg,
    lut,
    refusal,
    save,
    shipped,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a Hypothesis test."""
    return tmp_path_factory.mktemp("dicom")


@pytest.fixture
def without_decoders() -> Iterator[None]:
    """As on a machine where pydicom is installed, and no decoder."""
    decoder = get_decoder(JPEG2000Lossless)
    labels = decoder.available_plugins
    for label in labels:
        decoder.remove_plugin(label)
    yield
    for label in labels:
        decoder.add_plugin(label, (f"pydicom.pixels.decoders.{label}", "_decode_frame"))


@pytest.mark.usefixtures("without_decoders")
def test_a_missing_decoder_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    made = dataset(RAMP)
    made.compress(JPEG2000Lossless, generate_instance_uid=False)
    assert refusal(save(tmp_path, made)) == (
        'its pixels are compressed (JPEG 2000); install the decoders with pip install "polyclinic[dicom]"'
    )


def test_multi_frame_is_refused(tmp_path: Path) -> None:
    made = dataset(RAMP, NumberOfFrames=2)
    made.PixelData *= 2
    assert refusal(save(tmp_path, made)).startswith("it holds several pictures")


def test_more_frames_than_announced_are_refused(tmp_path: Path) -> None:
    made = dataset(RAMP)
    made.PixelData *= 2
    assert "not the one picture" in refusal(save(tmp_path, made))


def test_a_report_is_refused(tmp_path: Path) -> None:
    assert refusal(shipped("reportsi.dcm")).startswith("it holds no picture")
    made = dataset(RAMP)
    del made.PixelData
    assert refusal(save(tmp_path, made)) == "it has no pixel data, or is truncated within them"


@pytest.mark.parametrize("syntax", [None, RLELossless, JPEG2000Lossless])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.97])
def test_a_truncated_file_is_refused(tmp_path: Path, syntax: UID | None, share: float) -> None:
    made = dataset(np.random.default_rng(2).integers(0, 4096, (64, 64), dtype=np.uint16))
    if syntax:
        made.compress(syntax, generate_instance_uid=False)
    path = save(tmp_path, made)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refusal(path)


@pytest.mark.parametrize("syntax", [JPEGBaseline8Bit, JPEG2000Lossless])
def test_a_truncated_picture_in_a_whole_file_is_refused(tmp_path: Path, syntax: UID) -> None:
    made = dataset(SMOOTH)
    made.compress(JPEG2000Lossless, generate_instance_uid=False)
    stream = (
        pydicom.encaps.get_frame(made.PixelData, 0, number_of_frames=1) if syntax != JPEGBaseline8Bit else jpeg(SMOOTH)
    )
    made.file_meta.TransferSyntaxUID = syntax
    made.PixelData = encapsulate([stream[: len(stream) // 2]])
    assert refusal(save(tmp_path, made)) == "its compressed pixels are truncated"


def test_a_compressed_picture_of_another_size_is_refused(tmp_path: Path) -> None:
    made = dataset(SMOOTH, syntax=JPEGBaseline8Bit)
    made.PixelData = encapsulate([jpeg(np.zeros((4000, 4000), np.uint8))])
    made["PixelData"].is_undefined_length = True
    assert "another size" in refusal(save(tmp_path, made))


def test_huge_pictures_are_refused_before_they_are_read(tmp_path: Path) -> None:
    assert "100 megapixels" in refusal(save(tmp_path, dataset(RAMP, Rows=60000, Columns=60000)))


def test_a_deflate_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicom._check_inflated_size, "__defaults__", (2**22,))
    path = save(tmp_path, dataset(np.zeros((4096, 4096), np.uint8), syntax=DeflatedExplicitVRLittleEndian))
    assert path.stat().st_size < 2**17
    assert "deflated" in refusal(path)


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"RescaleSlope": 0, "RescaleIntercept": 1}, "slope"),
        ({"WindowCenter": 10, "WindowWidth": 0}, "too narrow"),
        ({"WindowCenter": 10, "WindowWidth": 5, "VOILUTFunction": "QUENDOLIN"}, "unknown shape"),
        ({"HighBit": 15, "BitsStored": 12}, "lowest bits"),
        ({"PhotometricInterpretation": "QUENDOLIN"}, "photometric"),
        ({"VOILUTSequence": lut([1, 2, 3], 0, 40)}, "lookup table"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "lookup table is missing"),
        ({"BitsAllocated": 32, "BitsStored": 32, "HighBit": 31}, "32 bits"),
    ],
)
def test_tags_that_cannot_be_shown(tmp_path: Path, tags: dict[str, Any], reason: str) -> None:
    text = refusal(save(tmp_path, dataset(RAMP, **tags)))
    assert reason in text
    assert "QUENDOLIN" not in text


def test_video_is_refused(tmp_path: Path) -> None:
    made = dataset(RAMP, syntax=MPEG2MPML)
    made.PixelData = encapsulate([b"\0" * 64])
    made["PixelData"].is_undefined_length = True
    assert "cannot be read" in refusal(save(tmp_path, made))


def test_what_is_no_dicom(tmp_path: Path) -> None:
    path = tmp_path / "picture.dcm"
    path.write_bytes(b"a letter" * 100)
    assert refusal(path).startswith("it is not a DICOM file")
    assert refusal(tmp_path / "absent.dcm") == "the file does not exist"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=30))
def test_damage_is_told_in_one_sentence_or_harmless(folder: Path, damage: list[tuple[int, int]]) -> None:
    path = save(folder, dataset(SMOOTH, WindowCenter=100, WindowWidth=50))
    content = bytearray(path.read_bytes())
    for place, value in damage:
        content[132 + place % 700] = value
    path.write_bytes(content)
    try:
        outcome = str(read_dicom(path).pixels.dtype)
    except UnreadableImage as error:
        outcome = str(error)
    assert not any(secret in outcome for secret in SECRETS)


# nobody's name


def noisy(folder: Path) -> list[Path]:
    """Files that make pydicom warn, log, fail, or all of it; each with a name in its tags and in its path."""
    home = folder / NAME
    home.mkdir()
    padded = dataset(RAMP, PixelSpacing=["1", "1"], NumberOfFrames=0)
    padded.PixelData += b"\0" * 100
    garbled = dataset(RAMP)
    garbled.add_new(0x00281050, "LO", NAME)
    garbled.add_new(0x00281051, "LO", NAME)
    charset = dataset(RAMP)
    charset.add_new("SpecificCharacterSet", "LO", NAME)
    paths = []
    for number, made in enumerate((dataset(RAMP), padded, garbled, charset)):
        save(home, made).rename(home / f"{NAME}{number}.dcm")
        paths.append(home / f"{NAME}{number}.dcm")
    cut = home / f"{NAME}.dcm"
    cut.write_bytes(paths[0].read_bytes()[:-500])
    return [*paths, cut, home / "absent.dcm"]


def everything(found: object) -> str:
    """What an object holds, to its bytes."""
    assert isinstance(found, DecodedImage)
    base = found.pixels if found.pixels.base is None else np.asarray(found.pixels.base)
    return f"{found!r} {vars(found)!r} {base.tobytes().decode('latin1')}"


@pytest.mark.parametrize("reader", [read_dicom, decode_image])
def test_no_name_is_said_written_or_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], reader: Any
) -> None:
    paths, said = noisy(tmp_path), []
    caplog.clear()
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="pydicom")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for path in paths:
            try:
                said.append(everything(reader(path)))
            except UnreadableImage as error:
                said.append(f"{error!r} {error} {error.__cause__}")
    said += [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in warned]
    said += [*capfd.readouterr()]
    assert not warned
    assert not any(secret in text for text in said for secret in SECRETS)
    assert logging.getLogger("pydicom").level == logging.DEBUG


def test_these_files_would_have_talked(tmp_path: Path) -> None:
    """Without the care taken above, pydicom does say the name: the test before this one can fail."""
    paths = noisy(tmp_path)[:-1]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for path in paths:
            pydicom.dcmread(path)
    assert any(NAME in str(warning.message) for warning in warned)


def test_patient_tags_are_not_even_read(tmp_path: Path) -> None:
    header = dicom._read_tags(save(tmp_path, dataset(RAMP)), dicom.SHAPE + dicom.RENDERING, stop_before_pixels=True)
    assert not any(keyword.startswith(("Patient", "Accession")) for keyword in header.dir())
    assert NAME not in str(header)
