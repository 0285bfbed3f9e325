"""The public sets by name. Each folder has the same files: `dataset.py` with `SET`, and README.md."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from polyclinic.data.datasets.base import Download, PublicDataset

__all__ = ["SETS", "Download", "PublicDataset"]

SETS: Mapping[str, PublicDataset] = {
    name: import_module(f"{__name__}.{name}.dataset").SET
    for name in sorted(path.parent.name for path in Path(__file__).parent.glob("*/dataset.py"))
}
