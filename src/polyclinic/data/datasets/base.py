"""What every named set's folder provides: `dataset.py` with `SET`, and a README.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.core.contract import Stream
from polyclinic.data.examples import Collection
from polyclinic.data.loading.options import ImageOptions
from polyclinic.data.options import Options
from polyclinic.data.records import Listing


@dataclass(frozen=True)
class Download:
    """One file to fetch: where from, what it must be, and whether it is unpacked (zip, tar) into the set's folder."""

    url: str
    sha256: str
    """"" where the publisher gives none and we have not seen the file: its sum is then shown, to compare by hand."""
    name: str
    unpack: bool = False


@dataclass(frozen=True)
class PublicDataset:
    """A public set: what it is, under which terms, how to get it, how it is listed."""

    name: str
    about: str
    licence: str
    classes: tuple[str, ...]
    read: Callable[[Any, Path], Listing]
    """(options, the set's folder) -> listing."""
    obtain: str
    """One sentence or two: how to get it and what the folder must hold."""
    options: type[Options] = ImageOptions
    folder: str = ""
    """Its folder inside the data folder ("" = its name)."""
    load: Callable[[Any, Stream, Path | None], Collection] | None = None
    """(options, stream, data folder) -> collection, where that is not simply what is listed."""
    downloads: tuple[Download, ...] = ()
    """What `polyclinic data fetch` gets; none where the terms ask for an account, a form or a fee."""
