"""A small clinic written to disk, every file and every patient under a name that must not be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyclinic.core.rng import Stream
from polyclinic.data.examples import Collection
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.loading.loader import load_collection
from polyclinic.data.records import Listing
from polyclinic.data.sources.table import read_table

Rows: TypeAlias = list[dict[str, str]]
"""Of a table: cells by the names of their columns."""
NAME = "Zenobia Krautwurst"
OPTIONS = ImageOptions(size=16, channels=1)


def noise(seed: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape or (20, 20), dtype=np.uint8)


def clinic(folder: Path, seed: int = 0) -> Rows:
    """24 pictures of 12 patients, two each, six of either class, at two sites."""
    made = []
    for number in range(24):
        Image.fromarray(noise(seed + number)).save(folder / f"{NAME} {number}.png")
        patient = number // 2
        said = {"label": ("benign", "malignant")[patient % 2], "site": ("north", "south")[patient // 2 % 2]}
        made.append({"path": f"{NAME} {number}.png", **said, "patient": f"{NAME} {patient}"})
    return made


def listed(folder: Path, rows: Rows, classes: tuple[str, ...] | None = None) -> Listing:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_table(folder / "labels.csv", name="clinic", classes=classes)


def loaded(listing: Listing, seed: int = 0, **options: Any) -> Collection:
    return load_collection(listing, OPTIONS.model_copy(update=options), Stream(seed))
