"""What a hostile server recovered: compared with images that were trained on, and with others that were not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyclinic.analysis.attack.image_similarity import THRESHOLD
from polyclinic.core import SiteId, Stream

View = Literal["each", "sum"]
"""What the server sees: every site's update, or only the mean of all, as with masks."""
SHUFFLES = 999


@dataclass(frozen=True)
class LabelCounts:
    """The classes of a site's training images as the bias of the last layer tells them, and as they are."""

    guessed: tuple[float, ...]
    true: tuple[int, ...]

    @property
    def error(self) -> float:
        """The largest error of a count, as a share of the site's images."""
        return max(abs(a - b) for a, b in zip(self.guessed, self.true, strict=True)) / max(sum(self.true), 1)


@dataclass(frozen=True, eq=False)
class Recovered:
    """What a hostile server made of the updates it saw."""

    view: View
    images: bool
    """Whether guesses are images; otherwise they are features of images."""
    rounds: int
    guesses: int
    trained: int
    """Images that the sites trained on …"""
    found: int
    """… and how many of them a guess shows: nearest of all images to it, and below the threshold …"""
    held_out: int
    found_held_out: int
    """… and the same for images that they did not train on, which guesses can resemble only by chance."""
    nearest_trained: float
    """The share of guesses whose most similar image was trained on …"""
    expected: float
    """… and what it would be by chance."""
    p_value: float
    labels: Mapping[SiteId, LabelCounts]

    @property
    def leaks(self) -> bool:
        """Whether guesses tell images that were trained on from others better than chance."""
        return self.p_value <= 0.05

    @property
    def sentence(self) -> str:
        """What was found, in one sentence."""
        seen = "each site's update" if self.view == "each" else "the sum of all updates alone, as with masks,"
        what = "images" if self.images else "images' features"
        told = (
            f"a hostile server that sees {seen} recovers {self.found} of {self.trained} training {what} in "
            f"{self.rounds} crafted rounds"
        )
        chance = "; this attack finds no image in the updates of a network without a hidden dense layer"
        if self.guesses:
            chance = (
                f"; of its {self.guesses} guesses {self.nearest_trained:.0%} are nearest to an image that was trained "
                f"on, by chance {self.expected:.0%} (p = {self.p_value:.3f})"
            )
        labels = max((found.error for found in self.labels.values()), default=None)
        counts = "" if labels is None else f"; it counts the images of each class with an error of {labels:.1%} at most"
        return f"{told}{chance}{counts}."

    def as_json(self) -> dict[str, object]:
        return {
            "view": self.view,
            "guesses_are": "images" if self.images else "features",
            "crafted_rounds": self.rounds,
            "guesses": self.guesses,
            "trained_images": self.trained,
            "recovered": self.found,
            "held_out_images": self.held_out,
            "recovered_held_out": self.found_held_out,
            "nearest_was_trained_on": self.nearest_trained,
            "expected_by_chance": self.expected,
            "p_value": self.p_value,
            "leaks": self.leaks,
            "largest_label_count_error": max((found.error for found in self.labels.values()), default=None),
        }


def count_recovered(guesses: Tensor, inside: Tensor, outside: Tensor, pixel_range: float) -> tuple[int, int]:
    """Count the images of both kinds that are nearest of all to a guess, and nearer than `THRESHOLD` of their range."""
    found: set[int] = set()
    if len(guesses):
        pool = torch.cat([inside, outside]).double()
        distance, nearest = (torch.cdist(guesses.double(), pool) / (pool.shape[1] ** 0.5 * pixel_range)).min(1)
        found = set(nearest[distance < THRESHOLD].tolist())
    trained = sum(row < len(inside) for row in found)
    return trained, len(found) - trained


def compare_with_chance(guesses: Tensor, inside: Tensor, outside: Tensor, stream: Stream) -> tuple[float, float, float]:
    """Test whether guesses are more similar to images that were trained on than chance allows.

    Statistic: the share of guesses whose most similar image (by correlation, whatever brightness and contrast) is one
    of `inside`. If the guesses knew nothing of which images were trained on, it would be as large for any other choice
    of as many images among all: the permutations.

    Returns:
        The share, its mean over permutations, and the p-value.
    """
    pool = standardise_rows(torch.cat([inside, outside]).double())
    if not len(guesses):
        return 0.0, 0.0, 1.0
    nearest = (standardise_rows(guesses.double()) @ pool.T).argmax(1)
    generator = stream.generator()
    shuffled = []
    for _ in range(SHUFFLES):
        member = torch.zeros(len(pool))
        member[torch.randperm(len(pool), generator=generator)[: len(inside)]] = 1.0
        shuffled.append(float(member[nearest].mean()))
    share = float((nearest < len(inside)).double().mean())
    beaten = sum(value >= share - 1e-12 for value in shuffled)
    return share, sum(shuffled) / SHUFFLES, (1 + beaten) / (1 + SHUFFLES)


def standardise_rows(rows: Tensor) -> Tensor:
    """Return rows with mean 0 and length 1."""
    centred = rows - rows.mean(1, keepdim=True)
    scaled: Tensor = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return scaled
