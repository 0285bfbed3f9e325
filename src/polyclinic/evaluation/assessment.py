"""From predictions to scores: by site and over all sites, with bootstrap intervals on test images."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from polyclinic.core import HELD_OUT, PUBLIC, Bundle, DataError, Part, SiteId, Stream
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.rounds import weighted_mean
from polyclinic.evaluation.rows import EvaluateRow, MetricRow, group_pairs
from polyclinic.evaluation.statistics import bootstrap_intervals
from polyclinic.evaluation.summary import MODEL_DESCRIPTIONS, Headline, Metric, PartScores, SiteScores
from polyclinic.evaluation.task import Task

UNKNOWN = (math.nan, math.nan)
TRANSFER = "transfer"
"""Names the models of other sites, together."""
Groups = Mapping[str, Predictions]
"""Predictions by `model|part`."""


@dataclass(frozen=True)
class Assessment:
    """Scores by site, model and part; `merged` on the images of all sites together."""

    sites: dict[SiteId, SiteScores]
    merged: SiteScores


def assess_predictions(
    task: Task,
    predictions: Mapping[SiteId, Bundle],
    held_out: Predictions | None,
    resamples: int,
    stream: Stream,
) -> Assessment:
    """Score the predictions of final models, which each site sent as tensors by `model|part`.

    `held_out`: predictions on test images that belong to no site. `resamples`: of the bootstrap, which draws from
    `stream`; 0: no intervals.
    """
    found = {site: read_groups(task, groups, site, predictions) for site, groups in predictions.items()}
    sites = {site: _assess_models(task, groups, resamples, stream.child(site)) for site, groups in found.items()}
    pooled = _merge_by_key(pair for groups in found.values() for pair in groups.items())
    merged = _assess_models(task, pooled, resamples, stream.child("merged"))
    if held_out is not None:
        merged[HELD_OUT] = {"test": assess_part(task, held_out, "test", resamples, stream.child("held-out"))}
    return Assessment(sites, merged)


def assess_site(
    task: Task, groups: Bundle, site: SiteId, sites: Collection[SiteId], resamples: int, stream: Stream
) -> SiteScores:
    """Score one site's predictions as `assess_predictions` does, with the same draws of the bootstrap, and with the
    details of every part. `sites`: all sites of the run, whose models may be among those that predicted."""
    found = read_groups(task, groups, site, sites)
    scores = _assess_models(task, found, resamples, stream.child(site))
    for key, predictions in found.items():
        model, _, part = key.partition("|")
        details = {"details": task.details(predictions)}
        scores[model][_PARTS[part]] = scores[model][_PARTS[part]].model_copy(update=details)
    return scores


def read_groups(task: Task, groups: Bundle, site: SiteId, sites: Collection[SiteId]) -> dict[str, Predictions]:
    """Return one site's predictions by `model|part`, and those of other sites' models together."""
    found = {key: task.read_predictions(tensors, site) for key, tensors in groups.items()}
    return found | _transfer_predictions(found, site, sites)


def assess_part(
    task: Task, predictions: Predictions, part: Part, resamples: int = 0, stream: Stream | None = None
) -> PartScores:
    """Score predictions of one part; with `resamples`, metrics of a test part get bootstrap intervals."""
    bounds: dict[str, tuple[float, float]] = {}
    if part == "test" and resamples and stream is not None:
        names = [info.name for info in task.metrics if info.has_interval]
        bounds = bootstrap_intervals(
            predictions, names, stream=stream, resamples=resamples, measure=task.measure_weighted
        )
    metrics = {name: _metric(v, *bounds.get(name, UNKNOWN)) for name, v in task.measure(predictions).items()}
    return PartScores(n=len(predictions), metrics=metrics, details=task.details(predictions) if part == "test" else {})


def score_predictions(task: Task, predictions: Predictions) -> PartScores:
    """All metrics of the task, without intervals and details."""
    metrics = {name: _metric(value, *UNKNOWN) for name, value in task.measure(predictions).items()}
    return PartScores(n=len(predictions), metrics=metrics)


def summarise_reports(task: Task, rows: Sequence[MetricRow]) -> Assessment:
    """Scores from the last reports of the sites, for runs in which no site sends predictions.

    Scores over all sites are means weighted by images, not scores of all images together, and have no intervals.
    """
    reports = [row for row in rows if isinstance(row, EvaluateRow) and row.site != HELD_OUT]
    last = max((row.round for row in reports), default=0)
    sites: dict[SiteId, SiteScores] = {}
    final = [row for row in reports if row.round == last]
    for row in final:
        metrics = {name: Metric(value=row.metrics.get(name)) for name in task.metric_names}
        sites.setdefault(row.site, {}).setdefault(row.model, {})[row.part] = PartScores(n=row.n, metrics=metrics)
    merged: SiteScores = {}
    for (model, part), pool in group_pairs(((row.model, row.part), row) for row in final).items():
        means = {name: Metric(value=weighted_mean(pool, name)) for name in task.metric_names}
        merged.setdefault(model, {})[part] = PartScores(n=sum(row.n for row in pool), metrics=means)
    return Assessment(sites, merged)


def choose_headline(
    merged: SiteScores, public: Mapping[str, PartScores] | None = None, wanted: str | None = None
) -> Headline:
    """Choose the model that a run is judged by, on the test images of all sites; without any, on validation images.

    `wanted`: that model if it was evaluated, or `public`: the server's own model, on the public test images.
    """
    if wanted == PUBLIC and public:
        best = next((name for name in ("student", "global") if name in public), next(iter(public)))
        return Headline(model=PUBLIC, part="test", of=best, scores=public[best])
    parts: tuple[Part, ...] = ("test", "validation")
    for part in parts:
        if (model := choose_model(merged, part, wanted)) is not None:
            of = next((name for name in ("student", "ensemble") if name in merged), "global")
            return Headline(model=model, part=part, of=of if model == HELD_OUT else None, scores=merged[model][part])
    raise DataError("no site has a test or validation image, so nothing can be reported; raise data.split.test")


def choose_model(scores: SiteScores, part: Part, wanted: str | None = None) -> str | None:
    """Return the name of the model that is judged on this part; None if no model was scored on it."""
    names = (wanted, *MODEL_DESCRIPTIONS) if wanted else MODEL_DESCRIPTIONS
    return next((name for name in names if part in scores.get(name, {})), None)


def _transfer_predictions(groups: Groups, site: SiteId, sites: Collection[SiteId]) -> dict[str, Predictions]:
    """Predictions of models that were trained at other sites, together."""
    keys = ((key, *key.split("|", 1)) for key in groups)
    transferred = ((part, groups[key]) for key, model, part in keys if model != site and model in sites)
    return {f"{TRANSFER}|{part}": value for part, value in _merge_by_key(transferred).items()}


def _merge_by_key(predictions: Iterable[tuple[str, Predictions]]) -> dict[str, Predictions]:
    return {key: Predictions.merge(parts) for key, parts in group_pairs(predictions).items()}


def _assess_models(task: Task, groups: Groups, resamples: int, stream: Stream) -> SiteScores:
    models: SiteScores = {}
    for key, value in groups.items():
        model, _, part = key.partition("|")
        scores = models.setdefault(model, {})
        scores[_PARTS[part]] = assess_part(task, value, _PARTS[part], resamples, stream.child(key))
    return models


_PARTS: Mapping[str, Part] = {"train": "train", "validation": "validation", "test": "test"}


def _metric(value: float, low: float, high: float) -> Metric:
    """For JSON, which knows neither NaN nor infinity: both become None."""
    found = [number if math.isfinite(number) else None for number in (value, low, high)]
    return Metric(value=found[0], low=found[1], high=found[2])
