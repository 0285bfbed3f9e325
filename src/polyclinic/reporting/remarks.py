"""Warnings about a recipe, shown with its figures: on the terminal, in privacy.md and in reports."""

import math
from collections.abc import Collection, Iterator

from polyclinic.algorithms.base import Algorithm
from polyclinic.config.recipe import Recipe
from polyclinic.data.examples import SiteData
from polyclinic.data.patients import count_unnamed
from polyclinic.evaluation.summary import RunSummary
from polyclinic.evaluation.task import task_of
from polyclinic.reporting.formatting import format_names


def describe_pooling(summary: RunSummary) -> Iterator[str]:
    """Sentences on the figures of all sites together, where sites keep their predictions to themselves, and on sites
    whose figures are missing."""
    means = [info.label for info in task_of(summary).metrics if info.pooled_by == "sites"]
    if summary.pooled_from == "scores":
        yield (
            "Of all sites together, accuracy, sensitivity, F1 and whatever else follows from counts are exact: the "
            f"sites' own counts, added. {format_names(means)} are means of the sites' own figures, weighted by images, "
            "not figures of all images together. There is no interval, since predictions stayed at the sites."
        )
    elif summary.pooled_from == "rounded predictions":
        yield (
            f"{format_names(means)} of all sites together, and the intervals, are of predictions that the sites "
            "rounded to thousandths; counts are the sites' own, added."
        )
    elif summary.pooled_from == "reports":
        yield (
            "No site told scores of the final model, so these are means of the sites' reports on their validation "
            "images in the last round."
        )
    elif summary.pooled_from == "nothing":
        yield (
            "No figure of the final model left a site: every site has its own at home, where polyclinic site scores "
            "shows them."
        )
    for site, why in summary.withheld.items():
        yield f"{site} told no scores of the final model: {why}."


def collect_warnings(
    recipe: Recipe, algorithm: Algorithm, sizes: Collection[int], sites: Collection[SiteData]
) -> list[str]:
    """The algorithm's own warning, and warnings of options without effect and of splits by image.

    `sizes`: the training images of each place that trains; `sites`: the sites with their images.
    """
    warnings = (
        *_check_patients(sites),
        algorithm.warning(),
        *_check_alignment(recipe),
        *_check_curriculum(recipe, sizes),
    )
    return [warning for warning in warnings if warning]


def _check_patients(sites: Collection[SiteData]) -> Iterator[str]:
    parts = [part for site in sites for part in (site.train, site.validation, site.test)]
    unnamed, images = sum(map(count_unnamed, parts)), sum(map(len, parts))
    if unnamed:
        which = (
            "no image names its patient" if unnamed == images else f"{unnamed:,} of {images:,} images name no patient"
        )
        yield (
            f"{which}, so training, validation and test parts are by image: images of one patient may lie in two "
            "parts, and figures may be too good"
        )


def _check_alignment(recipe: Recipe) -> Iterator[str]:
    options = recipe.build_algorithm()
    if not getattr(options, "align", 0):
        return
    warmup = getattr(options, "warmup", 0)
    if recipe.rounds <= max(warmup, 1):
        yield f"nobody aligns: algorithm.warmup is {warmup}, and there are {recipe.rounds} rounds"
    elif recipe.cohort is not None:
        yield (
            "with a cohort a site's features are of another round than those that it is given, and a discriminator may "
            "learn to tell rounds instead of sites"
        )


def _check_curriculum(recipe: Recipe, sizes: Collection[int]) -> Iterator[str]:
    training, rounds = recipe.training, recipe.rounds
    if training.curriculum.by == "random":
        return
    if rounds <= training.curriculum.warmup_rounds:
        warmup = training.curriculum.warmup_rounds
        yield f"no case is put in order: training.curriculum.warmup_rounds is {warmup}, and there are {rounds} rounds"
    elif training.steps is not None and sizes:
        steps, epoch = rounds * training.steps, min(math.ceil(n / training.batch_size(n)) for n in sizes)
        if steps <= epoch:
            yield (
                f"no case is put in order: that begins with a site's second epoch, and {steps} steps in all are no "
                f"more than the first ({epoch} steps)"
            )
