"""DICOM rendering against the formulas of the standard and against pydicom's own."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
)

from polyclinic.data.sources.dicom import read_dicom
from tests.data.dicoms import (
    LEVELS,
    RAMP,
    SMOOTH,
    Stored,
    dataset,
    jpeg,
    lut,
    save,
    shipped,
    shown,
)


def linear(x: NDArray[np.float64], centre: float, width: float) -> NDArray[np.float64]:
    """PS3.3 C.11.2.1.2.1, line by line, with ymin 0 and ymax 255."""
    middle = ((x - (centre - 0.5)) / (width - 1) + 0.5) * 255
    return np.where(x <= centre - 0.5 - (width - 1) / 2, 0, np.where(x > centre - 0.5 + (width - 1) / 2, 255, middle))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a Hypothesis test."""
    return tmp_path_factory.mktemp("dicom")


@given(st.integers(-500, 5000), st.integers(2, 6000))
def test_linear_window_is_the_standards_formula(folder: Path, centre: int, width: int) -> None:
    pixels = shown(folder, RAMP, 12, WindowCenter=centre, WindowWidth=width)
    np.testing.assert_array_equal(pixels, np.rint(linear(LEVELS, centre, width)))


@pytest.mark.parametrize(("centre", "width", "function"), [(2048, 4096, "LINEAR_EXACT"), (1000.5, 0.5, "LINEAR_EXACT"),
                                                            (2000, 700, "SIGMOID"), (1500, 900, "LINEAR")])  # fmt: skip
def test_windows_agree_with_pydicom(tmp_path: Path, centre: float, width: float, function: str) -> None:
    made = dataset(RAMP, 12, WindowCenter=centre, WindowWidth=width, VOILUTFunction=function)
    theirs = apply_voi_lut(RAMP, made) * 255 / 4095
    np.testing.assert_allclose(read_dicom(save(tmp_path, made)).pixels, theirs, atol=0.5 + 1e-9)


def test_window_of_width_one_is_a_threshold(tmp_path: Path) -> None:
    np.testing.assert_array_equal(
        shown(tmp_path, RAMP, 12, WindowCenter=100, WindowWidth=1), np.where(RAMP < 100, 0, 255)
    )


def test_first_of_several_windows(tmp_path: Path) -> None:
    several = shown(tmp_path, RAMP, 12, WindowCenter=[800, 3000], WindowWidth=[400, 10])
    np.testing.assert_array_equal(several, shown(tmp_path, RAMP, 12, WindowCenter=800, WindowWidth=400))


@pytest.mark.parametrize("window", [{}, {"WindowCenter": 1700, "WindowWidth": 333}])
def test_monochrome1_is_the_negative(tmp_path: Path, window: dict[str, int]) -> None:
    positive = shown(tmp_path, RAMP, 12, **window)
    negative = shown(tmp_path, RAMP, 12, PhotometricInterpretation="MONOCHROME1", **window)
    np.testing.assert_array_equal(negative, 255 - positive.astype(int))
    assert positive[0, 0] == 0
    assert positive[-1, -1] == 255


def test_slope_and_intercept_are_applied_before_the_window(tmp_path: Path) -> None:
    pixels = shown(tmp_path, RAMP, 12, RescaleSlope=0.5, RescaleIntercept=-1024, WindowCenter=40, WindowWidth=400)
    np.testing.assert_array_equal(pixels, np.rint(linear(LEVELS * 0.5 - 1024, 40, 400)))


def test_a_negative_slope_turns_the_image_round(tmp_path: Path) -> None:
    pixels = shown(tmp_path, RAMP, 12, RescaleSlope=-1, RescaleIntercept=4095)
    np.testing.assert_array_equal(pixels, np.rint((4095 - LEVELS) * 255 / 4095))


@pytest.mark.parametrize(
    ("dtype", "bits", "low", "high"),
    [("u1", 8, 0, 255), ("u2", 12, 0, 4095), ("u2", 16, 0, 65535), ("i2", 16, -32768, 32767), ("i2", 12, -2048, 2047),
     ("u2", 16, 300, 1100)],
)  # fmt: skip
def test_without_a_window_the_images_own_range_is_stretched(
    tmp_path: Path, dtype: str, bits: int, low: int, high: int
) -> None:
    stored = np.linspace(low, high, 900).round().reshape(30, 30).astype(dtype)
    decoded = read_dicom(save(tmp_path, dataset(stored, bits)))
    expected = np.rint((stored.astype(float) - low) * 255 / (high - low))
    np.testing.assert_array_equal(decoded.pixels, expected)
    assert decoded.pixels.dtype == np.uint8
    assert (decoded.bits, decoded.colour) == (bits, False)


@pytest.mark.parametrize(
    "padding", [{"PixelPaddingValue": -2000}, {"PixelPaddingValue": -2000, "PixelPaddingRangeLimit": -1990}]
)
def test_padding_does_not_count_and_is_black(tmp_path: Path, padding: dict[str, int]) -> None:
    stored = np.arange(-100, 300, dtype=np.int16).reshape(20, 20)
    framed = np.pad(stored, 3, constant_values=-2000)
    pixels = shown(tmp_path, framed, **padding)
    np.testing.assert_array_equal(pixels[3:-3, 3:-3], np.rint((stored + 100.0) * 255 / 399))
    assert pixels[:3].max() == 0


def test_padding_written_unsigned_for_signed_pixels(tmp_path: Path) -> None:
    stored = np.pad(np.arange(-100, 300, dtype=np.int16).reshape(20, 20), 3, constant_values=-2000)
    made = dataset(stored)
    made.add_new(0x00280120, "US", 63536)
    assert read_dicom(save(tmp_path, made)).pixels[3, 4] == 1


def test_an_image_of_one_value_is_black(tmp_path: Path) -> None:
    assert not shown(tmp_path, np.full((5, 6), 77, np.uint16)).any()
    assert not shown(tmp_path, np.full((5, 6), 77, np.uint16), PixelPaddingValue=77).any()


def test_modality_and_voi_tables_agree_with_pydicom(tmp_path: Path) -> None:
    stored = np.arange(400, dtype=np.uint16).reshape(20, 20)
    bend = [int(4000 * (step / 255) ** 2) for step in range(256)]
    curve = [int(1023 * (step / 4000) ** 0.5) for step in range(4001)]
    made = dataset(stored, 12, ModalityLUTSequence=lut(bend, 50, 16), VOILUTSequence=lut(curve, 0, 10))
    theirs = apply_voi_lut(apply_modality_lut(stored, made), made)
    np.testing.assert_array_equal(read_dicom(save(tmp_path, made)).pixels, np.rint(theirs * (255 / 1023)))


def test_a_voi_table_of_bytes_covers_more_than_256_values(tmp_path: Path) -> None:
    table = [value // 16 for value in range(4096)]
    np.testing.assert_array_equal(shown(tmp_path, RAMP, 12, VOILUTSequence=lut(table, 0, 8)), RAMP // 16)


def test_a_voi_table_goes_before_a_window(tmp_path: Path) -> None:
    table = lut([4095 - value for value in range(4096)], 0, 12)
    both = shown(tmp_path, RAMP, 12, VOILUTSequence=table, WindowCenter=5, WindowWidth=2)
    np.testing.assert_array_equal(both, np.rint((4095 - LEVELS) * 255 / 4095))


COLOURS = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)


@pytest.mark.parametrize("planar", [0, 1])
def test_rgb_stays_as_it_is(tmp_path: Path, planar: int) -> None:
    stored = COLOURS if planar == 0 else np.ascontiguousarray(COLOURS.transpose(2, 0, 1)).reshape(COLOURS.shape)
    decoded = read_dicom(save(tmp_path, dataset(stored, PlanarConfiguration=planar)))
    np.testing.assert_array_equal(decoded.pixels, COLOURS)
    assert decoded.colour


def test_ybr_is_converted_as_pillow_does(tmp_path: Path) -> None:
    ybr = np.array(Image.fromarray(COLOURS).convert("YCbCr"))
    pixels = shown(tmp_path, ybr, PhotometricInterpretation="YBR_FULL")
    theirs = np.array(Image.fromarray(ybr, "YCbCr").convert("RGB"))
    assert np.abs(pixels.astype(int) - theirs).max() <= 1


def test_sixteen_bit_rgb(tmp_path: Path) -> None:
    stored = COLOURS.astype(np.uint16) * 257
    np.testing.assert_array_equal(shown(tmp_path, stored), COLOURS)


@pytest.mark.parametrize("bits", [8, 16])
def test_palette(tmp_path: Path, bits: int) -> None:
    stored = np.arange(256, dtype=np.uint8).reshape(16, 16)
    tables = np.random.default_rng(1).integers(0, 256, (3, 200), dtype=np.uint8)
    tags: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for colour, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        tags[f"{colour}PaletteColorLookupTableDescriptor"] = [200, 30, bits]
        raw = table.tobytes() if bits == 8 else (table.astype("<u2") * 257).tobytes()
        tags[f"{colour}PaletteColorLookupTableData"] = raw
    made = dataset(stored, **tags)
    np.testing.assert_array_equal(
        read_dicom(save(tmp_path, made)).pixels, tables.T[np.clip(stored.astype(int) - 30, 0, 199)]
    )


@pytest.mark.parametrize(
    "syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian]
)
def test_every_uncompressed_syntax_shows_the_same(tmp_path: Path, syntax: UID) -> None:
    pixels = shown(tmp_path, RAMP, 12, syntax=syntax, WindowCenter=2000, WindowWidth=900)
    np.testing.assert_array_equal(pixels, np.rint(linear(LEVELS, 2000, 900)))


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless])
@pytest.mark.parametrize("stored", [RAMP, RAMP.astype(np.uint8), COLOURS, (RAMP.astype(np.int16) - 2048)])
def test_lossless_compression_changes_nothing(tmp_path: Path, syntax: UID, stored: Stored) -> None:
    made = dataset(stored)
    plain = read_dicom(save(tmp_path, made)).pixels
    made.compress(syntax, generate_instance_uid=False)
    np.testing.assert_array_equal(read_dicom(save(tmp_path, made)).pixels, plain)


@pytest.mark.parametrize("pixels", [SMOOTH, np.stack([SMOOTH, 255 - SMOOTH, SMOOTH // 2], -1)])
def test_baseline_jpeg_as_pillow_decodes_it(tmp_path: Path, pixels: NDArray[np.uint8]) -> None:
    made = dataset(pixels, syntax=JPEGBaseline8Bit, WindowCenter=128, WindowWidth=256)
    if pixels.ndim == 3:
        made.PhotometricInterpretation = "YBR_FULL"
    made.PixelData = encapsulate([jpeg(pixels)])
    made["PixelData"].is_undefined_length = True
    theirs = np.array(Image.open(io.BytesIO(jpeg(pixels)))).astype(int)
    assert np.abs(read_dicom(save(tmp_path, made)).pixels - theirs).max() <= 3


@pytest.mark.parametrize(
    "encoding", ["RLE", "bigendian", "expb", "implicit", "jp2klossless", "jpeg_ls_lossless", "padded"]
)
def test_a_real_scan_looks_the_same_in_every_encoding(encoding: str) -> None:
    plain = read_dicom(shipped("MR_small.dcm")).pixels
    np.testing.assert_array_equal(read_dicom(shipped(f"MR_small_{encoding}.dcm")).pixels, plain)
    assert plain.std() > 10


@pytest.mark.parametrize(
    "name", ["693_J2KI.dcm", "JPGExtended.dcm", "JPEGLSNearLossless_16.dcm", "examples_overlay.dcm"]
)
def test_real_files_agree_with_pydicoms_pipeline(name: str) -> None:
    made = pydicom.dcmread(shipped(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = np.asarray(apply_voi_lut(apply_modality_lut(made.pixel_array, made), made), dtype=float)
    low, high = theirs.min(), theirs.max()
    ours = read_dicom(shipped(name)).pixels.astype(float)
    order = np.corrcoef(ours.ravel(), theirs.ravel())[0, 1]
    assert order > 0.9999
    if "WindowWidth" not in made:
        np.testing.assert_allclose(ours, (theirs - low) * 255 / (high - low), atol=0.5 + 1e-9)
