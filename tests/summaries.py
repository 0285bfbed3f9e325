"""Summaries of runs made by hand, whole and valid, with the fields that a test is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from polyclinic.core.types import Part
from polyclinic.evaluation.summary import (
    Cost,
    Headline,
    Metric,
    ModelSize,
    PartScores,
    RunSummary,
    SiteSizes,
)

Value = float | None | tuple[float, float, float]


Sites = Mapping[str, Mapping[str, Mapping[Any, PartScores]]]


def make_scores(n: int = 4, details: dict[str, JsonValue] | None = None, **metrics: Value) -> PartScores:
    """Scores of these metrics; a tuple is value, low, high."""
    found = {
        name: Metric(value=value[0], low=value[1], high=value[2]) if isinstance(value, tuple) else Metric(value=value)
        for name, value in metrics.items()
    }
    return PartScores(n=n, metrics=found, details=details or {})


def make_headline(
    model: str = "global", part: Part = "test", of: str | None = None, n: int = 4, **metrics: Value
) -> Headline:
    return Headline(model=model, part=part, of=of, scores=make_scores(n, None, **metrics))


def make_summary(
    headline: Headline | None = None,
    sites: Sites | None = None,
    **fields: Any,
) -> RunSummary:
    """A run with this headline; every other field can be given by name."""
    headline = headline or make_headline(accuracy=0.5)
    scores = {site: {m: dict(parts) for m, parts in models.items()} for site, models in (sites or {}).items()}
    defaults: dict[str, Any] = {
        "name": "run",
        "algorithm": "fedavg",
        "data": "phantom",
        "seed": 0,
        "rounds": 2,
        "details": {"classes": ["no", "yes"]},
        "site_sizes": [SiteSizes(site=site, train=8, validation=4, test=4) for site in scores],
        "model": ModelSize(name="linear", parameters=10, flops_per_step=100),
        "merged": {headline.model: {headline.part: headline.scores}},
        "drift": {},
        "cost": Cost(),
        "sha256": "0" * 64,
        "versions": {"polyclinic": "0"},
    }
    return RunSummary(headline=headline, sites=scores, **{**defaults, **fields})
