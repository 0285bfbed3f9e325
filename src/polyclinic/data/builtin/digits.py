"""scikit-learn's copy of the UCI optical digits: 1,797 real images without a download."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from polyclinic.core import Stream
from polyclinic.data.datasets.base import Dataset
from polyclinic.data.examples import Collection
from polyclinic.data.options import Options
from polyclinic.data.patients import UNNAMED

CLASSES = tuple("0123456789")


class DigitsOptions(Options):
    size: int = Field(8, ge=8, le=256)
    """Height and width; the originals are 8 × 8."""


def load_digit_images(options: DigitsOptions, stream: Stream, folder: Path | None = None) -> Collection:  # noqa: ARG001
    scans, labels = _read_scans()
    images = scans.float()[:, None] * (255 / 16)
    if options.size != 8:
        images = F.interpolate(images, size=(options.size, options.size), mode="bilinear")
    return Collection(
        images=images.round().to(torch.uint8),
        labels=labels.clone(),
        classes=CLASSES,
        patients=tuple(f"{UNNAMED}{row}" for row in range(len(labels))),
    )


@cache
def _read_scans() -> tuple[torch.Tensor, torch.Tensor]:
    """Read the file that `sklearn.datasets.load_digits` reads: to load scikit-learn itself takes a second."""
    package = find_spec("sklearn")
    assert package is not None
    path = Path(package.origin or "").with_name("datasets") / "data" / "digits.csv.gz"
    rows = torch.from_numpy(np.loadtxt(path, delimiter=","))
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].long()


DATASET = Dataset(options=DigitsOptions, licence="CC BY 4.0", classes=CLASSES, load=load_digit_images)
