"""Laws of preparation: sizes, symmetry, proportions, and a breast that stays whole while labels go."""

from __future__ import annotations

import csv
import itertools
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from polyclinic.core.errors import DataError
from polyclinic.data.loading.image_options import Preparation
from polyclinic.data.loading.preprocessing import breast_box, preprocess_image
from polyclinic.data.sources.decoder import decode_image

Bytes = NDArray[np.uint8]
Fit = Literal["pad", "stretch", "crop"]
FITS: tuple[Fit, ...] = ("pad", "stretch", "crop")

greys = arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=40))
colours = arrays(np.uint8, st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(3)))
preparations = st.builds(
    Preparation,
    size=st.integers(8, 40),
    channels=st.sampled_from([1, 3]),
    fit=st.sampled_from(FITS),
    crop_borders=st.booleans(),
)


def one(**how: Any) -> Preparation:
    return Preparation(**{"channels": 1, **how})


def distance(shape: tuple[int, int], row: float, column: float) -> NDArray[np.float64]:
    y, x = np.indices(shape)
    return np.asarray(np.hypot(y - row, x - column))


def disc(side: int, radius: float, value: int = 200) -> Bytes:
    return np.where(distance((side, side), side / 2 - 0.5, side / 2 - 0.5) <= radius, value, 0).astype(np.uint8)


@given(greys | colours, preparations)
def test_shape_and_type_for_every_combination(pixels: Bytes, preparation: Preparation) -> None:
    before = pixels.copy()
    found = preprocess_image(pixels, preparation)
    assert found.shape == (preparation.channels, preparation.size, preparation.size)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(pixels, before)


@given(greys | colours, preparations)
def test_a_mirrored_image_gives_the_mirrored_result(pixels: Bytes, preparation: Preparation) -> None:
    straight = preprocess_image(pixels, preparation).astype(int)
    for axis in (0, 1):
        mirrored = preprocess_image(np.flip(pixels, axis), preparation)
        assert np.abs(np.flip(mirrored, axis + 1) - straight).max() <= 1


@given(st.integers(0, 255), st.integers(1, 90), st.integers(1, 90), st.sampled_from(FITS))
def test_a_constant_image_stays_constant(value: int, height: int, width: int, fit: Fit) -> None:
    found = preprocess_image(np.full((height, width), value, np.uint8), one(size=32, fit=fit))[0]
    assert set(np.unique(found)) <= {0, value}
    assert (found[15:17, 15:17] == value).all()
    assert fit == "pad" or (found == value).all()


@given(greys | colours, preparations)
def test_a_prepared_image_is_left_as_it_is(pixels: Bytes, preparation: Preparation) -> None:
    plain = preparation.model_copy(update={"crop_borders": False})
    once = preprocess_image(pixels, plain)
    again = preprocess_image(once[0] if plain.channels == 1 else once.transpose(1, 2, 0), plain)
    np.testing.assert_array_equal(again, once)


@given(greys)
def test_grey_as_rgb_is_three_times_the_same_and_back(pixels: Bytes) -> None:
    three = preprocess_image(pixels, Preparation(size=16))
    np.testing.assert_array_equal(three, np.repeat(preprocess_image(pixels, one(size=16)), 3, axis=0))
    np.testing.assert_array_equal(preprocess_image(three.transpose(1, 2, 0), one(size=16)), three[:1])


def test_rgb_as_grey_is_the_luma_of_bt_601() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    luma = pixels @ [0.299, 0.587, 0.114]
    assert np.abs(preprocess_image(pixels, one(size=16))[0] - luma).max() <= 0.51


@pytest.mark.parametrize(("height", "width"), [(300, 200), (123, 457), (64, 64), (31, 60)])
@pytest.mark.parametrize("size", [64, 97])
def test_padding_keeps_proportions(height: int, width: int, size: int) -> None:
    found = preprocess_image(np.full((height, width), 255, np.uint8), one(size=size))[0]
    rows, columns = found.any(axis=1), found.any(axis=0)
    scale = size / max(height, width)
    assert abs(rows.sum() - height * scale) <= 1
    assert abs(columns.sum() - width * scale) <= 1
    np.testing.assert_array_equal(rows, rows[::-1])
    np.testing.assert_array_equal(columns, columns[::-1])


@pytest.mark.parametrize("fit", ["pad", "crop"])
@pytest.mark.parametrize("shape", [(400, 300), (300, 400), (401, 300)])
def test_a_circle_stays_a_circle(fit: Fit, shape: tuple[int, int]) -> None:
    canvas = np.zeros(shape, np.uint8)
    canvas[distance(shape, shape[0] / 2 - 0.5, shape[1] / 2 - 0.5) <= 120] = 255
    circle = preprocess_image(canvas, one(size=128, fit=fit))[0] > 127
    scale = 128 / (max(shape) if fit == "pad" else min(shape))
    for axis in (0, 1):
        assert abs(circle.any(axis=axis).sum() - 240 * scale) <= 1.5
    assert abs(circle.any(axis=0).sum() - circle.any(axis=1).sum()) <= 1


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_shrinking_a_gradient_samples_its_line(factor: int) -> None:
    """Output pixel i is centred on input (i + ½)·factor − ½, and a symmetric filter keeps straight lines straight."""
    size = 256 // factor
    gradient = np.tile(np.arange(256, dtype=np.uint8), (50, 1))
    found = preprocess_image(gradient, one(size=size, fit="stretch"))[0]
    expected = (np.arange(size) + 0.5) * factor - 0.5
    inner = slice(2, -2)  # at the rim the filter has only one side
    assert np.abs(found[:, inner] - expected[inner]).max() <= 0.5


def test_enlarging_a_gradient_interpolates_it() -> None:
    gradient = np.tile((np.arange(16) * 16).astype(np.uint8), (16, 1))
    found = preprocess_image(gradient, one(size=64, fit="stretch"))[0]
    expected = np.clip((np.arange(64) + 0.5) / 4 - 0.5, 0, 15) * 16
    assert np.abs(found - expected).max() <= 0.51


def test_shrinking_averages_instead_of_picking() -> None:
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 128))
    found = preprocess_image(stripes, one(size=32, fit="stretch"))[0]
    assert np.abs(found[:, 2:-2] - 127.5).max() <= 2


def test_crop_keeps_the_middle() -> None:
    pixels = np.zeros((60, 100), np.uint8)
    pixels[:, 20:80] = np.arange(60)[:, None]
    np.testing.assert_array_equal(preprocess_image(pixels, one(size=60, fit="crop"))[0], pixels[:, 20:80])


def test_large_sizes() -> None:
    assert preprocess_image(disc(3000, 1000), one(size=2048)).shape == (1, 2048, 2048)


@pytest.mark.parametrize(
    "pixels", [np.zeros((4, 4)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4), np.uint8), np.zeros(4, np.uint8)]
)
def test_what_is_no_image_is_refused(pixels: Any) -> None:
    with pytest.raises(DataError, match="H×W or H×W×3 bytes"):
        preprocess_image(pixels, Preparation())


# borders and labels


@given(greys | colours, st.tuples(*[st.integers(0, 200)] * 4), st.sampled_from(FITS))
def test_black_borders_change_nothing(pixels: Bytes, border: tuple[int, int, int, int], fit: Fit) -> None:
    top, bottom, left, right = border
    framed = np.pad(pixels, [(top, bottom), (left, right), (0, 0)][: pixels.ndim])
    preparation = one(size=24, fit=fit, crop_borders=True)
    if pixels.max() > 4:  # the luma of a nearly black blue is rounded to black
        np.testing.assert_array_equal(preprocess_image(framed, preparation), preprocess_image(pixels, preparation))


@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 20))
def test_an_image_without_anything_stays_whole(height: int, width: int, value: int) -> None:
    assert breast_box(np.full((height, width), value, np.uint8)) == (0, 0, height, width)


@given(arrays(np.uint8, array_shapes(min_dims=2, max_dims=2, max_side=60), elements=st.sampled_from([0, 5, 30, 255])))
def test_the_box_is_never_empty_and_never_outside(pixels: Bytes) -> None:
    top, left, bottom, right = breast_box(pixels)
    assert 0 <= top < bottom <= pixels.shape[0]
    assert 0 <= left < right <= pixels.shape[1]


def film() -> Bytes:
    """A half disc at the left, noise, a label inside its box, a lit rim that touches it and runs round three sides."""
    film = np.random.default_rng(1).integers(0, 9, (1200, 900)).astype(np.uint8)
    film[:, :5] = 100
    film[distance(film.shape, 600, 0) <= 450] = 150
    film[170:230, 380:440] = 255
    film[:, 895:] = 255
    film[1196:] = 255
    return film


def test_box_of_a_film() -> None:
    top, left, bottom, right = breast_box(film())
    margin = 0.02 * 900
    blocks = 2 * 1200 / 255
    assert left == 0
    for found, true in ((top, 150 - margin), (bottom, 1050 + margin), (right, 450 + margin)):
        assert abs(found - true) <= blocks


def test_labels_and_rims_go_and_the_breast_stays() -> None:
    picture = film()
    found = preprocess_image(picture, one(size=450, crop_borders=True))[0]
    assert found.max() <= 160  # label and rim are 255
    box = breast_box(picture)
    scale = 450 / (box[2] - box[0])
    assert np.count_nonzero(found > 100) == pytest.approx(np.pi * 450**2 / 2 * scale**2, rel=0.02)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("shape", [(1200, 900), (1199, 900), (777, 801)])
def test_a_mirrored_film_gives_the_mirrored_result(fit: Fit, shape: tuple[int, int]) -> None:
    picture, preparation = film()[: shape[0], : shape[1]], one(size=101, fit=fit, crop_borders=True)
    straight = preprocess_image(picture, preparation).astype(int)
    for axis in (0, 1):
        assert np.abs(np.flip(preprocess_image(np.flip(picture, axis), preparation), axis + 1) - straight).max() <= 1


def test_the_largest_object_is_kept() -> None:
    canvas = np.zeros((500, 800), np.uint8)
    canvas[100:300, 50:250] = disc(200, 90)
    canvas[150:450, 450:750] = disc(300, 149)
    top, left, bottom, right = breast_box(canvas)
    assert left > 350
    assert top <= 151
    assert bottom >= 449
    assert right >= 748


# real mammograms


def mammograms() -> Path:
    folder = Path(os.environ.get("POLYCLINIC_DATA", "")) / "mias"
    if not (folder / "full").is_dir() or not (folder / "annotations.csv").is_file():
        pytest.skip("POLYCLINIC_DATA names no folder with mias/full/*.png and mias/annotations.csv")
    return folder


def lesions(folder: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Circles (row, column, radius) by image; MIAS counts rows from the bottom, and three lesions have no place."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    with (folder / "annotations.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["x"].isdigit():
                circle = (1023 - int(row["y"]), int(row["x"]), int(row["radius"]))
                found.setdefault(row["ref"], []).append(circle)
    return found


def test_no_lesion_is_cut_off() -> None:
    """Every circle is inside the box; where radiologists drew beyond the film, all that is not black of it is."""
    folder = mammograms()
    circles, inside, shares = lesions(folder), [], []
    for path in sorted((folder / "full").glob("*.png")):
        pixels = decode_image(path).pixels
        top, left, bottom, right = breast_box(pixels)
        shares.append((bottom - top) * (right - left) / pixels.size)
        outside = pixels.copy()
        outside[top:bottom, left:right] = 0
        for row, column, radius in circles.get(path.stem, []):
            assert outside[distance(pixels.shape, row, column) <= radius].max() <= 20, path.stem
            vertically = top <= row - radius and row + radius <= bottom
            inside.append(vertically and left <= column - radius and column + radius <= right)
    assert len(inside) >= 20
    assert np.mean(inside) >= 0.98
    assert np.mean(shares) < 0.7  # there was something to cut


def test_nothing_of_a_lesion_is_blackened() -> None:
    folder = mammograms()
    circles = lesions(folder)
    for path in itertools.islice(sorted((folder / "full").glob("*.png")), 12):
        pixels = decode_image(path).pixels
        top, left, bottom, right = breast_box(pixels)
        side = max(bottom - top, right - left)
        plain = preprocess_image(pixels[top:bottom, left:right], one(size=256))[0]
        cropped = preprocess_image(pixels, one(size=256, crop_borders=True))[0]
        y0, x0 = (256 - (bottom - top) * 256 / side) / 2, (256 - (right - left) * 256 / side) / 2
        for row, column, radius in circles.get(path.stem, []):
            y, x = y0 + (row - top) * 256 / side, x0 + (column - left) * 256 / side
            area = distance((256, 256), y, x) <= radius * 256 / side
            np.testing.assert_array_equal(cropped[area], plain[area])
