"""What a paper claims, tested on our runs: a difference with its interval, a p-value, a verdict.

A recipe lists claims as data: the page of results is made anew with the runs, and nobody writes verdicts by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from polyclinic.comparison import Runs, decimal, mean, number
from polyclinic.results import at_site
from polyclinic.stats import holm, paired, summary

LEVEL = 0.05
Verdict = Literal["supported", "contradicted", "not decided", "not run"]


class Claim(BaseModel):
    """One sentence of the paper and the test that decides it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str
    test: Literal["higher", "lower", "equal", "effect", "no effect"]
    """higher, lower: the first method against the second, seed by seed (paired t-test). equal: their difference lies
    within `margin` (95 % interval). effect, no effect: one-way ANOVA over all methods (Welch's t-test for two)."""
    methods: list[str] = Field(min_length=2)
    metric: str = "accuracy"
    """A metric, or gap (accuracy on training minus on validation images), drift, megabytes, seconds."""
    site: str | None = None
    """At this hospital alone; else over all hospitals' images together."""
    margin: float = Field(0.01, gt=0)
    paper: str = ""
    """What the paper reports."""


@dataclass(frozen=True)
class Tested:
    claim: Claim
    figures: tuple[float, ...]
    """The mean of each method."""
    effect: str
    p: float
    """Corrected by Holm for the number of claims tested together."""
    verdict: Verdict


def tested(claims: Sequence[Claim], results: Mapping[str, Runs]) -> list[Tested]:
    """Every claim on the runs that are there."""
    raw = [_raw(claim, results) for claim in claims]
    corrected = iter(holm([found.p for found in raw if not math.isnan(found.p)]))
    return [_judged(found, math.nan if math.isnan(found.p) else next(corrected)) for found in raw]


def value(result: Mapping[str, Any], metric: str, site: str | None = None) -> float:
    """One figure of one run."""
    if metric == "gap":
        return _part(result, "train", site) - _part(result, "validation", site)
    if metric == "drift":
        moved = result["drift"]
        return number(moved.get(site)) if site else mean(list(moved.values()))
    if metric == "megabytes":
        return float(result["cost"]["bytes_up"] + result["cost"]["bytes_down"]) / 1e6
    if metric == "seconds":
        return float(result["cost"]["seconds"])
    best = at_site(result, site) if site else result["headline"]
    return number(best.get(metric))


def _part(result: Mapping[str, Any], part: str, site: str | None) -> float:
    model = result["headline"]["model"]
    found = result["sites"].get(site, {}) if site else result.get("merged", {})
    return number(found.get(model, {}).get(part, {}).get("accuracy"))


@dataclass(frozen=True)
class _Raw:
    claim: Claim
    figures: tuple[float, ...]
    effect: str = "–"
    p: float = math.nan
    direction: float = 0.0
    within: bool | None = None


def _raw(claim: Claim, results: Mapping[str, Runs]) -> _Raw:
    if not all(name in results for name in claim.methods):
        return _Raw(claim, ())
    values = [[value(run, claim.metric, claim.site) for run in results[name]] for name in claim.methods]
    figures = tuple(mean(found) for found in values)
    if any(math.isnan(v) for found in values for v in found) or min(map(len, values)) < 2:
        return _Raw(claim, figures)
    if claim.test in ("effect", "no effect"):
        return _anova(claim, figures, values)
    return _pair(claim, figures, values)


def _pair(claim: Claim, figures: tuple[float, ...], values: Sequence[Sequence[float]]) -> _Raw:
    n = min(len(values[0]), len(values[1]))
    found = paired(values[0][:n], values[1][:n])
    effect = f"{signed(found.difference)} [{signed(found.low)}, {signed(found.high)}]"
    if claim.test == "equal":
        inside = max(abs(found.low), abs(found.high)) <= claim.margin
        outside = found.low > claim.margin or found.high < -claim.margin
        effect = f"{effect}, margin ±{claim.margin:g}"
        return _Raw(claim, figures, effect, within=inside if inside or outside else None)
    p = 1.0 if math.isnan(found.p) else found.p
    return _Raw(claim, figures, effect, p, math.copysign(1, found.difference) if found.difference else 0.0)


def _anova(claim: Claim, figures: tuple[float, ...], values: Sequence[Sequence[float]]) -> _Raw:
    from scipy import stats

    spread = max(figures) - min(figures)
    if all(np.ptp(found) == 0 for found in values):
        return _Raw(claim, figures, f"range {decimal(spread)}", 1.0 if spread == 0 else 0.0)
    if len(values) == 2:
        welch = stats.ttest_ind(values[0], values[1], equal_var=False)
        low, high = welch.confidence_interval()
        effect = f"{signed(figures[0] - figures[1])} [{signed(low)}, {signed(high)}], t = {welch.statistic:.2f}"
        return _Raw(claim, figures, effect, float(welch.pvalue))
    found = stats.f_oneway(*values)
    return _Raw(claim, figures, f"range {decimal(spread)}, F = {found.statistic:.2f}", float(found.pvalue))


def _judged(found: _Raw, p: float) -> Tested:
    return Tested(found.claim, found.figures, found.effect, p, _verdict(found, p))


def _verdict(found: _Raw, p: float) -> Verdict:
    test = found.claim.test
    if found.effect == "–":
        return "not run"
    if test == "equal":
        return "not decided" if found.within is None else "supported" if found.within else "contradicted"
    seen = p < LEVEL
    if test == "effect":
        return "supported" if seen else "not decided"
    if test == "no effect":
        return "contradicted" if seen else "not decided"
    wanted = found.direction == (1 if test == "higher" else -1)
    return "not decided" if not seen else "supported" if wanted else "contradicted"


def signed(figure: float) -> str:
    """With as many decimals as its size asks for."""
    return "–" if math.isnan(figure) else f"{figure:+.3f}" if abs(figure) < 10 else f"{figure:+,.1f}"


def spread_of(results: Runs, metric: str, site: str | None = None) -> str:
    """mean ± standard deviation over runs."""
    found = summary([value(result, metric, site) for result in results])
    return decimal(found.mean) + ("" if math.isnan(found.std) else f" ± {decimal(found.std)}")


def rows(tests: Sequence[Tested]) -> list[str]:
    """The claims as a Markdown table."""
    if not tests:
        return []
    head = [
        "| the paper's claim | paper | ours | difference [95 %] | p (Holm) | our data |",
        "|---|---|---|---|---|---|",
    ]
    return [*head, *(_row(found) for found in tests)]


def _row(found: Tested) -> str:
    claim = found.claim
    metric = "" if claim.metric == "accuracy" else f"{claim.metric} "
    place = f"{claim.site}: " if claim.site else ""
    ours = ", ".join(f"{name} {decimal(v)}" for name, v in zip(claim.methods, found.figures, strict=False))
    p = "–" if math.isnan(found.p) else "< 0.001" if found.p < 0.001 else f"{found.p:.3f}"
    verdict = "no effect seen" if (claim.test, found.verdict) == ("no effect", "not decided") else found.verdict
    cells = [claim.claim, claim.paper or "–", f"{place}{metric}{ours}" or "–", found.effect, p, f"**{verdict}**"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
