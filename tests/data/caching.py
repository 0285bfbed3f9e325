"""Images to keep in a cache, and a count of how often they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from polyclinic.data.loading.cache import Pixels, load_cached
from polyclinic.data.loading.image_options import Preparation
from polyclinic.data.loading.preprocessing import preprocess_image
from polyclinic.data.records import Record
from polyclinic.data.sources.decoder import decode_image
from polyclinic.data.sources.stacks import decode_rows

SMALL = Preparation(size=8, channels=1)


def drawn(folder: Path, count: int) -> list[Record]:
    """Noise, each image of its own size, the second in colour."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    for number in range(count):
        shape = (9 + number, 12, 3) if number == 1 else (9 + number, 12)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{number}.png")
    return [Record(folder / f"{number}.png", "a", where=f"row {number}") for number in range(count)]


def anew(records: Sequence[Record], preparation: Preparation) -> Pixels:
    """Every image decoded and prepared now."""
    decoded = [
        decode_image(record.path, preparation.bits).pixels
        if record.row is None
        else decode_rows(record.path, record.array, [record.row])[0]
        for record in records
    ]
    return np.stack([preprocess_image(pixels, preparation) for pixels in decoded])


@dataclass
class Asked:
    """Asks the cache for these records and counts how often it had to decode."""

    records: Sequence[Record]
    preparation: Preparation = SMALL
    decoded: int = field(default=0, init=False)

    def __call__(self) -> Tensor:
        return load_cached(self.records, self.preparation, self.fill)

    def fill(self, pixels: Pixels) -> None:
        self.decoded += 1
        pixels[:] = anew(self.records, self.preparation)

    def is_right(self) -> bool:
        return np.array_equal(self().numpy(), anew(self.records, self.preparation))


def the_set(home: Path) -> Path:
    (index,) = home.glob("*/index.json")
    return index.parent
