"""Splits a site's images into the attacker's images and the attacked images."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyclinic.core import DataError, SiteId, Stream
from polyclinic.data.examples import Images, Selection
from polyclinic.data.splits import Fractions, split_by_patient

MIN_IMAGES = 16
"""Of a site, so that both halves are large enough to mean anything."""


@dataclass(frozen=True, eq=False)
class AttackSplit:
    """A site's training images as pixels in [0, 1]: the attacker's images and the attacked images."""

    attacker_images: Tensor
    target_images: Tensor
    target_labels: Tensor
    """Of the attacked images."""
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    """The rows of both among the site's training images."""
    normalise: Callable[[Tensor], Tensor]
    """Turns pixels into the network's input."""


def split_for_attack(
    site: SiteId, examples: Images | Selection, stream: Stream, most: int, device: torch.device
) -> AttackSplit:
    """Split the images in half by patient, stratified by class; of many images use a random choice of `most`.

    Pixels are the stored bytes / 255; images stored as floats are scaled from the site's minimum to its maximum.
    """
    rows = tuple(part[: most // 2] for part in split_rows(examples, stream))
    if min(map(len, rows)) < MIN_IMAGES // 2:
        raise DataError(
            f"site {site} has {len(examples)} training images, too few for two halves of {MIN_IMAGES // 2} or more by "
            "patient; attack another site"
        )
    stored = [examples.stored_batch(part)[0] for part in rows]
    integers = stored[0].dtype == torch.uint8
    low, high = (0.0, 1.0) if integers else (float(min(s.min() for s in stored)), float(max(s.max() for s in stored)))
    scale = 255.0 if integers else max(high - low, 1e-12)
    own, attacked = ((part.to(device).float() - low) / scale for part in stored)

    def normalise(pixels: Tensor) -> Tensor:
        return examples.scale_images(pixels * (high - low) + low)

    labels = examples.labels.cpu()[rows[1]].to(device)
    return AttackSplit(own, attacked, labels, (tuple(rows[0].tolist()), tuple(rows[1].tolist())), normalise)


def split_rows(examples: Images | Selection, stream: Stream) -> tuple[Tensor, Tensor]:
    """Return the rows of both halves in random order; no patient is in both."""
    patients, halves = examples.patients or tuple(map(str, range(len(examples)))), stream.child("halves")
    parts = split_by_patient(
        examples.labels.cpu().numpy(), patients, Fractions(train=0.5, validation=0.0, test=0.5), halves
    )
    generator = np.random.default_rng(stream.child("order").integer())
    own, attacked = (torch.from_numpy(generator.permutation(parts[part])) for part in ("train", "test"))
    return own, attacked
