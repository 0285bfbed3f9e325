"""What an attacker has beside a finished run: half of a site's images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyclinic.core.contract import SiteId, Stream
from polyclinic.core.errors import DataError
from polyclinic.data.examples import Images, Selection
from polyclinic.data.splits import Fractions, split_by_patient

LEAST = 16
"""Images a site must have, so that either half says anything."""


@dataclass(frozen=True, eq=False)
class AttackSplit:
    """A site's training images as pixels in [0, 1]: the attacker's own, and those under attack."""

    attacker_images: Tensor
    target_images: Tensor
    target_labels: Tensor
    """Of the attacked."""
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    """Where both stand among the site's training images."""
    normalise: Callable[[Tensor], Tensor]
    """What the network is shown in the place of pixels."""


def split_for_attack(
    site: SiteId, examples: Images | Selection, stream: Stream, most: int, device: torch.device
) -> AttackSplit:
    """Half and half by patient, classes alike; of many images a random choice of `most`.

    Pixels are the stored bytes / 255; of images that are stored as numbers, 0 is the site's least and 1 its largest.
    """
    rows = tuple(part[: most // 2] for part in split_rows(examples, stream))
    if min(map(len, rows)) < LEAST // 2:
        raise DataError(
            f"site {site} has {len(examples)} training images, too few for two halves of {LEAST // 2} or more by "
            "patient; attack another site"
        )
    stored = [examples.stored_batch(part)[0] for part in rows]
    integers = stored[0].dtype == torch.uint8
    low, high = (0.0, 1.0) if integers else (float(min(s.min() for s in stored)), float(max(s.max() for s in stored)))
    scale = 255.0 if integers else max(high - low, 1e-12)
    own, attacked = ((part.to(device).float() - low) / scale for part in stored)

    def seen(pixels: Tensor) -> Tensor:
        return examples.scale_images(pixels * (high - low) + low)

    places = tuple(rows[0].tolist()), tuple(rows[1].tolist())
    return AttackSplit(own, attacked, examples.labels.cpu()[rows[1]].to(device), places, seen)


def split_rows(examples: Images | Selection, stream: Stream) -> tuple[Tensor, Tensor]:
    """The rows of both halves, each in random order; nobody has images in both."""
    people = examples.patients or tuple(map(str, range(len(examples))))
    fractions = Fractions(train=0.5, validation=0.0, test=0.5)
    parts = split_by_patient(examples.labels.cpu().numpy(), people, fractions, stream.child("halves"))
    generator = np.random.default_rng(stream.child("order").integer())
    own, attacked = (torch.from_numpy(generator.permutation(parts[part])) for part in ("train", "test"))
    return own, attacked
