"""Pictures: real PNGs that describe themselves, complete or absent, and without pyplot's global state."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import polyclinic.reporting.figures
from polyclinic.core.errors import DataError, StoreError
from polyclinic.reporting.figures import COLOURS, Point, draw_curves

LONG = "A method whose name is much longer than anybody would like to read in a legend"


def curves(path: Path) -> None:
    series: dict[str, list[Point]] = {
        "FedAvg": [(1, 0.5, 0.4, 0.6), (2, 0.7, 0.6, 0.8)],
        "µ_prox $5 $6": [(1, 0.4), (2, math.nan), (3, 0.6251)],
        LONG: [(1, 0.3)],
        "never evaluated": [],
    }
    draw_curves(series, "AUC at ε = 8", "round", "AUC", path)


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def test_the_picture_is_a_png_that_describes_itself(tmp_path: Path) -> None:
    curves(tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.width >= 900
        words = dict(picture.info)
    assert words["Title"] == "AUC at ε = 8"
    assert "FedAvg" in words["Description"]
    assert LONG in words["Description"]
    assert os.listdir(tmp_path) == ["picture.png"]


def test_the_description_carries_the_figures(tmp_path: Path) -> None:
    curves(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert "µ_prox $5 $6 0.625; " in picture.info["Description"]
        assert "never evaluated undefined" in picture.info["Description"]


def test_nothing_is_cut_off_at_the_edges(tmp_path: Path) -> None:
    curves(tmp_path / "picture.png")
    image = pixels(tmp_path / "picture.png")
    for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
        assert (edge == 255).all()


def test_every_method_has_its_own_colour(tmp_path: Path) -> None:
    series = {f"method {k}": [(1, 0.1 * k), (9, 0.1 * k + 0.05)] for k in range(len(COLOURS))}
    draw_curves(series, "Colours", "round", "AUC", tmp_path / "picture.png")
    image = pixels(tmp_path / "picture.png").astype(np.int64) @ [65536, 256, 1]
    for colour in COLOURS:
        assert (image == int(colour[1:], 16)).sum() > 500, colour


def test_equal_figures_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        curves(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_an_interrupted_write_leaves_the_old_picture_alone(tmp_path: Path) -> None:
    """The kernel refuses to let any file grow past 4 KiB, so the write stops half way."""
    path = tmp_path / "picture.png"
    path.write_bytes(b"the old picture")
    curves(tmp_path / "warm-up.png")
    os.unlink(tmp_path / "warm-up.png")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot write .*picture\.png"):
            curves(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["picture.png"]
    assert path.read_bytes() == b"the old picture"


def test_a_picture_that_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "picture.png").mkdir()
    for path in (tmp_path / "picture.png", tmp_path / "no such folder" / "picture.png"):
        with pytest.raises(StoreError, match="cannot write"):
            curves(path)
    assert os.listdir(tmp_path) == ["picture.png"]


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    empty: list[dict[str, list[Point]]] = [{}, {"FedAvg": []}]
    for series in empty:
        with pytest.raises(DataError, match="no points"):
            draw_curves(series, "Empty", "round", "AUC", tmp_path / "picture.png")
    assert not os.listdir(tmp_path)


def test_pyplot_is_never_imported(tmp_path: Path) -> None:
    source = Path(polyclinic.__file__).parent
    assert not [file for file in source.rglob("*.py") if "pyplot" in file.read_text(encoding="utf-8")]
    program = (
        "import sys, pathlib; from polyclinic.reporting.figures import *\n"
        "draw_curves({'a': [(1, 0.5)]}, 't', 'x', 'y', pathlib.Path(sys.argv[1]))\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(source.parent)}
    command = [sys.executable, "-c", program, str(tmp_path / "picture.png")]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert (tmp_path / "picture.png").exists()
