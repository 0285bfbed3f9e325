"""The claims of a paper, tested on our runs: a difference with its interval, a p-value, a verdict.

A recipe lists claims as data, so the verdicts on the page of results are computed anew with the runs.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from polyclinic.evaluation.comparison import (
    RUN_METRICS,
    Runs,
    mean_of_known,
    metric_value,
    pair_by_seed,
)
from polyclinic.evaluation.statistics import (
    LEVEL,
    compare_paired,
    correct_holm,
    one_way_anova,
    welch_test,
)
from polyclinic.evaluation.task import TASKS

PAIRED = ("higher", "lower", "equal")
CLAIM_METRICS = (*dict.fromkeys(n for task in TASKS.values() for n in task.metric_names), "gap", "drift", *RUN_METRICS)
Verdict = Literal["supported", "suggested", "not decided", "suggested against", "contradicted", "not run"]
"""Suggested: p is below the level before it is corrected for the number of claims, not after."""


class Claim(BaseModel):
    """One sentence of the paper and the test that decides it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    claim: str
    test: Literal["higher", "lower", "equal", "effect", "no effect"]
    """higher, lower: the first method against the second, seed by seed (paired t-test). equal: their difference lies
    within `margin` (95 % interval). effect, no effect: one-way ANOVA over all methods (Welch's t-test for two)."""
    methods: list[str] = Field(min_length=2)
    metric: str = "accuracy"
    """A metric, or gap (accuracy on training minus on validation images), drift, megabytes, seconds, converged (the
    first round after which validation accuracy is within a point of its best), forgotten (the share of training images
    that a deployment lost, on average), site_classifier_accuracy (balanced accuracy of a classifier that predicts the
    site from features of test images: analysis/features.py)."""
    site: str | None = None
    """Only at this site; else over the images of all sites together."""
    margin: float = Field(0.01, gt=0)
    paper: str = ""
    """What the paper reports."""

    @field_validator("methods")
    @classmethod
    def _check_methods(cls, methods: list[str], info: ValidationInfo) -> list[str]:
        if len(set(methods)) < len(methods):
            raise ValueError("a method cannot be compared with itself; name each once")
        if len(methods) > 2 and info.data.get("test") in PAIRED:
            raise ValueError(f"{info.data['test']!r} compares two methods; name two, or test for an effect")
        return methods

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if metric not in CLAIM_METRICS:
            near = difflib.get_close_matches(metric, CLAIM_METRICS, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"there is no such metric{hint}; there are: {', '.join(CLAIM_METRICS)}")
        return metric

    @field_validator("site")
    @classmethod
    def _check_site(cls, site: str | None, info: ValidationInfo) -> str | None:
        if site is not None and info.data.get("metric") in RUN_METRICS:
            raise ValueError(f"{info.data['metric']} are counted for whole runs; leave site out")
        return site


@dataclass(frozen=True)
class ClaimResult:
    """A claim, tested: the difference or range that was found, its p-value, and what follows from them."""

    claim: Claim
    figures: tuple[float, ...]
    """The mean of each method."""
    effect: str = "–"
    p: float = math.nan
    direction: float = 0.0
    """The sign of the first method's difference to the second."""
    within: bool | None = None
    """Whether the interval lies within the margin; None where it lies neither inside nor outside."""
    corrected: float = math.nan
    """p, by Holm, for the number of claims tested together."""
    verdict: Verdict = "not decided"


def evaluate_claims(claims: Sequence[Claim], results: Mapping[str, Runs]) -> list[ClaimResult]:
    """Test every claim on the runs in `results`, by method."""
    raw = [_measure_effect(claim, results) for claim in claims]
    corrected = iter(correct_holm([found.p for found in raw if not math.isnan(found.p)]))
    final = [found if math.isnan(found.p) else replace(found, corrected=next(corrected)) for found in raw]
    return [replace(found, verdict=_decide_verdict(found)) for found in final]


def _measure_effect(claim: Claim, results: Mapping[str, Runs]) -> ClaimResult:
    if not all(name in results for name in claim.methods):
        return ClaimResult(claim, ())
    runs = [results[name] for name in claim.methods]
    values = [[metric_value(run, claim.metric, claim.site) for run in found] for found in runs]
    figures = tuple(mean_of_known(found) for found in values)
    by = _paired_effect if claim.test in PAIRED else _anova_effect
    sample = pair_by_seed(runs[0], runs[1], claim.metric, claim.site) if by is _paired_effect else values
    if any(math.isnan(v) for found in sample for v in found) or min(map(len, sample)) < 2:
        return ClaimResult(claim, figures)
    return by(claim, figures, sample)


def _paired_effect(claim: Claim, figures: tuple[float, ...], values: Sequence[Sequence[float]]) -> ClaimResult:
    found = compare_paired(values[0], values[1])
    effect = _format_difference(found.difference, found.low, found.high)
    if claim.test == "equal":
        inside = max(abs(found.low), abs(found.high)) <= claim.margin
        outside = found.low > claim.margin or found.high < -claim.margin
        return ClaimResult(
            claim, figures, f"{effect}, margin ±{claim.margin:g}", within=inside if inside or outside else None
        )
    return ClaimResult(
        claim, figures, effect, 1.0 if math.isnan(found.p) else found.p, float(np.sign(found.difference))
    )


def _anova_effect(claim: Claim, figures: tuple[float, ...], values: Sequence[Sequence[float]]) -> ClaimResult:
    spread = max(figures) - min(figures)
    if all(np.ptp(found) == 0 for found in values):
        return ClaimResult(claim, figures, f"range {spread:.3f}", 1.0 if spread == 0 else 0.0)
    if len(values) == 2:
        statistic, p, interval = welch_test(*values)
        difference = _format_difference(figures[0] - figures[1], *interval)
        return ClaimResult(claim, figures, f"{difference}, t = {statistic:.2f}", p)
    statistic, p = one_way_anova(values)
    return ClaimResult(claim, figures, f"range {spread:.3f}, F = {statistic:.2f}", p)


def _decide_verdict(found: ClaimResult) -> Verdict:
    test = found.claim.test
    if not found.figures:
        return "not run"
    if test == "equal":
        return "not decided" if found.within is None else "supported" if found.within else "contradicted"
    if not found.p < LEVEL:
        return "not decided"
    seen = found.corrected < LEVEL
    if test == "no effect" or (test != "effect" and found.direction != (1 if test == "higher" else -1)):
        return "contradicted" if seen else "suggested against"
    return "supported" if seen else "suggested"


def _format_difference(*figures: float) -> str:
    """A difference and its interval, with as many decimals as their size asks for."""
    shown = [f"{f:+.3f}" if abs(f) < 10 else f"{f:+,.1f}" for f in figures]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def format_verdict(found: ClaimResult) -> str:
    """The verdict in words. A test cannot support a claim of no effect, only fail to see one."""
    unseen = (found.claim.test, found.verdict) == ("no effect", "not decided") and not math.isnan(found.p)
    return "no effect seen" if unseen else found.verdict
