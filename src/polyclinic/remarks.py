"""What whoever runs a recipe should know beside its figures: on the terminal, in privacy.md and in reports."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyclinic.algorithms import Averaging
    from polyclinic.recipe import Recipe


def pools_images(summary: Mapping[str, Any]) -> bool:
    """Whether all images lay in one place. Runs that are older than the key do not say it of themselves."""
    return bool(summary.get("pooled", summary.get("algorithm") == "centralised"))


def remarks(recipe: Recipe, algorithm: Averaging, sizes: Collection[int]) -> list[str]:
    """Of the algorithm, and of parts that have no effect; `sizes`: how many training images sites have."""
    return [told for told in (algorithm.remark(), *_idle(recipe, sizes), *_times(recipe)) if told]


def _idle(recipe: Recipe, sizes: Collection[int]) -> Iterator[str]:
    training, rounds = recipe.training, recipe.rounds
    algorithm = recipe.algorithm_of()
    warmup, align = getattr(algorithm, "warmup", 0), getattr(algorithm, "align", 0)
    if align and rounds <= max(warmup, 1):
        yield f"nobody aligns: algorithm.warmup is {warmup}, and there are {rounds} rounds"
    if training.order == "random":
        return
    if rounds <= training.order_after:
        yield f"no case is put in order: training.order_after is {training.order_after}, and there are {rounds} rounds"
    elif training.steps is not None and sizes:
        steps, shortest = rounds * training.steps, min(math.ceil(n / training.size(n)) for n in sizes)
        if steps <= shortest:
            yield (
                f"no case is put in order: that begins with a site's second epoch, and {steps} steps in all are no "
                f"more than the first ({shortest} steps)"
            )


def _times(recipe: Recipe) -> Iterator[str]:
    if getattr(recipe.algorithm_of(), "align", 0) and recipe.cohort is not None:
        yield (
            "with a cohort a site's features are of another round than those that it is given, and a discriminator may "
            "learn to tell rounds instead of sites"
        )
