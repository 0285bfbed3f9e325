"""Small sources written to disk, with a patient's name planted in them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polyclinic.core.errors import DataError

NAME = "Zebulon Quast"
"""A patient who must not be named anywhere."""


def touch(folder: Path, *files: str) -> None:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def table(folder: Path, text: str | bytes, name: str = "labels.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def pictures(count: int, dtype: str = "uint8", shape: tuple[int, ...] = (4, 4)) -> NDArray[Any]:
    return np.zeros((count, *shape), dtype)


def saved(folder: Path, arrays: Mapping[str, Any], compressed: bool = False) -> Path:
    path = folder / "set.npz"
    (np.savez_compressed if compressed else np.savez)(path, allow_pickle=False, **arrays)
    return path


def refused(deed: Callable[[], object]) -> str:
    """What the refusal says; nothing may be chained to it, for that would be printed too."""
    with pytest.raises(DataError) as caught:
        deed()
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def counts(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values))


def real(name: str) -> Path:
    """A folder of the real data; where there is none the test is skipped."""
    folder = os.environ.get("POLYCLINIC_DATA")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"needs the real images of {name} in the folder that POLYCLINIC_DATA names")
    return Path(folder) / name
