"""Scores that a site computes at home of the final models, and what they tell of all sites' images together.

Predictions stay at the site; one `FinalScores` leaves it. What can be had of all sites' images without predictions:

- Everything that follows from counts (accuracy, sensitivity, F1 …) is exact: the sites' confusion matrices are added.
- The loss is exact: a mean of the sites' means, weighted by images.
- AUC, PR-AUC and the calibration error are means of the sites' own figures, weighted by images (`pooled_by: sites`).
  They are not the figures of all images together: an area ranks images of one site among each other only, and the mean
  calibration error is never below that of all images. A histogram of scores, or bins of confidences, would be closer,
  but with the few test images of a hospital most bins hold one image, and then they are its prediction.

There are no intervals for all sites together, since these draw patients, which only the sites know.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import ValidationError

from polyclinic.core import HELD_OUT, Part, Refused, SiteId
from polyclinic.evaluation.assessment import TRANSFER, Assessment
from polyclinic.evaluation.rows import group_pairs
from polyclinic.evaluation.summary import MODEL_DESCRIPTIONS, Metric, PartScores, SiteScores, SummaryPart
from polyclinic.evaluation.task import TASKS, Task, confusion_of

MOST_CLASSES = 32
"""A confusion matrix of more classes stays at the site, since it would be larger than everything else."""
CLOSE = 1e-9
"""Metrics and counts of one site agree to this, since the same code computes both."""


class FinalScores(SummaryPart):
    """What a site tells of the final models: their scores on its images, by model and part."""

    version: Literal[1] = 1
    task: str
    models: SiteScores


@dataclass(frozen=True)
class ScoredSite:
    """What the server knows of a site whose scores it reads, and what it asked for."""

    site: SiteId
    sites: Collection[SiteId]
    """All sites of the run: their models may be among those that are scored."""
    sizes: Mapping[Part, int]
    """Images by part, as the site registered them."""
    parts: Collection[Part]
    classes: int


def build_final_scores(task: Task, models: SiteScores) -> FinalScores:
    """Return the scores as they travel; `models`: with the details of every part (`assessment.assess_site`)."""
    return FinalScores(
        task=task.name,
        models={
            model: {part: _without_large_counts(scores) for part, scores in parts.items()}
            for model, parts in models.items()
        },
    )


def read_final_scores(fields: object, expected: ScoredSite) -> FinalScores:
    """Check what a site sent: kinds, ranges, counts of images, and that metrics agree with their counts.

    Raises `Refused` with the kind "scores".
    """
    try:
        found = FinalScores.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(name)[:30] for name in first["loc"])
        raise Refused("scores", f"{place or 'the scores'}: {first['msg'][:100]}") from None
    task = TASKS.get(found.task)
    if task is None:
        raise Refused("scores", f"{found.task[:40]!r} is not a task that is known here")
    for model, parts in found.models.items():
        if model not in {*MODEL_DESCRIPTIONS, *expected.sites} - {HELD_OUT}:
            raise Refused("scores", f"{model[:60]!r} is not a model of this run")
        for part, scores in parts.items():
            _check_images(scores, model, part, found.models, expected)
            _check_metrics(scores, f"{model} on {part} images", task)
            _check_counts(scores, f"{model} on {part} images", task, expected.classes)
    return found


def merge_final_scores(
    task: Task, sites: Mapping[SiteId, FinalScores], left_out: Collection[SiteId] = ()
) -> Assessment:
    """Return the scores of each site, and what they tell of all sites' images together, but for those `left_out`."""
    pooled = group_pairs(
        ((model, part), scores)
        for site, found in sites.items()
        if site not in left_out
        for model, parts in found.models.items()
        for part, scores in parts.items()
    )
    merged: SiteScores = {}
    for (model, part), pool in pooled.items():
        merged.setdefault(model, {})[part] = _keep_test_details(part, merge_part_scores(task, pool))
    own = {
        site: {
            model: {part: _keep_test_details(part, scores) for part, scores in parts.items()}
            for model, parts in found.models.items()
        }
        for site, found in sites.items()
    }
    return Assessment(own, merged)


def merge_part_scores(task: Task, pool: Sequence[PartScores]) -> PartScores:
    """Return the scores of several sites' images together: from added counts where every site tells them, otherwise
    means weighted by images. A site where a metric is undefined is left out of that mean."""
    means = {name: _mean(pool, name) for name in task.metric_names}
    counts = [confusion_of(scores) for scores in pool]
    if any(found is None for found in counts):
        return PartScores(n=sum(scores.n for scores in pool), metrics=means)
    total = np.sum([np.asarray(found, dtype=object) for found in counts], axis=0).tolist()
    exact = {name: Metric(value=_finite(value)) for name, value in task.measure_counts(total).items()}
    return PartScores(n=sum(scores.n for scores in pool), metrics={**means, **exact}, details={"confusion": total})


def _mean(pool: Sequence[PartScores], name: str) -> Metric:
    known = [(value, scores.n) for scores in pool if (value := scores[name].value) is not None]
    images = sum(n for _, n in known)
    return Metric(value=sum(value * n for value, n in known) / images if images else None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _keep_test_details(part: Part, scores: PartScores) -> PartScores:
    """A summary holds the details of test parts only, as a simulation's does."""
    return scores if part == "test" else scores.model_copy(update={"details": {}})


def _without_large_counts(scores: PartScores) -> PartScores:
    counts = confusion_of(scores)
    return scores if counts is None or len(counts) <= MOST_CLASSES else scores.model_copy(update={"details": {}})


def _check_images(scores: PartScores, model: str, part: Part, models: SiteScores, expected: ScoredSite) -> None:
    """Raise `Refused` unless a part was asked for and has as many images as the site registered."""
    others = [name for name in models if name in expected.sites and name != expected.site and part in models[name]]
    size = expected.sizes.get(part, 0) * (len(others) if model == TRANSFER else 1)
    if part not in expected.parts or not scores.n or scores.n != size:
        registered = size if part in expected.parts else 0
        raise Refused(
            "scores", f"{model[:60]} is scored on {scores.n} {part} images, where {registered} were registered"
        )


def _check_metrics(scores: PartScores, where: str, task: Task) -> None:
    for name, metric in scores.metrics.items():
        if name not in task.metric_names:
            raise Refused("scores", f"{where[:80]}: {name[:40]!r} is not a metric")
        largest = task.info(name).largest
        values = [value for value in (metric.value, metric.low, metric.high) if value is not None]
        if not all(0 <= value <= largest for value in values):
            raise Refused("scores", f"{where[:80]}: {name} is outside 0 to {largest:g}")
        if (metric.low is None) != (metric.high is None) or (metric.low or 0) > (metric.high or 0):
            raise Refused("scores", f"{where[:80]}: the interval of {name} has no two ends in order")


def _check_counts(scores: PartScores, where: str, task: Task, classes: int) -> None:
    """Raise `Refused` unless the confusion matrix, if there is one, has the images and the metrics of these scores."""
    if not scores.details:
        return
    found = scores.details.get("confusion")
    lines = [line for line in found if isinstance(line, list)] if isinstance(found, list) else []
    counts = [[count for count in line if type(count) is int and 0 <= count <= scores.n] for line in lines]
    whole = found == counts and [len(line) for line in counts] == [classes] * classes
    if scores.details.keys() != {"confusion"} or not whole or classes > MOST_CLASSES:
        raise Refused("scores", f"{where[:80]}: the details are not counts of {classes} by {classes} classes")
    if sum(map(sum, counts)) != scores.n:
        raise Refused("scores", f"{where[:80]}: the counts are of {sum(map(sum, counts))} images, not of {scores.n}")
    for name, value in task.measure_counts(counts).items():
        told = scores.metrics.get(name, Metric()).value
        known = _finite(value)
        if (told is None) != (known is None) or abs((told or 0) - (known or 0)) > CLOSE:
            raise Refused("scores", f"{where[:80]}: {name} is not what its own counts give")
