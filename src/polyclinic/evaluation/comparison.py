"""Methods side by side: the figures of each, over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from polyclinic.evaluation.statistics import summarise_sample
from polyclinic.evaluation.summary import (
    convergence_round,
    describe_model,
    describe_test_images,
    headline_at_site,
    pools_images,
)

Runs: TypeAlias = Sequence[Mapping[str, Any]]
"""The summaries of one method, one for each seed."""
SHOWN = ("accuracy", "balanced_accuracy", "auc")


@dataclass(frozen=True)
class MetricEstimate:
    """A metric of one method: its mean over seeds, their spread, and a 95 % interval.

    With several seeds the interval is Student's, over seeds; with one it is the bootstrap's, over test patients.
    """

    mean: float
    low: float
    high: float
    std: float | None = None

    @staticmethod
    def estimate(results: Runs, metric: str) -> MetricEstimate:
        values = [nan_if_none(result["headline"].get(metric)) for result in results]
        if len(values) == 1:
            low, high = (results[0]["headline"].get("intervals") or {}).get(metric, (None, None))
            return MetricEstimate(values[0], nan_if_none(low), nan_if_none(high))
        spread = summarise_sample(values)
        return MetricEstimate(spread.mean, max(0.0, spread.low), min(1.0, spread.high), spread.std)


@dataclass(frozen=True)
class MethodSummary:
    """One method in the table."""

    name: str
    seeds: int
    figures: Mapping[str, MetricEstimate]
    worst_site: str
    worst_auc: float
    drift: float
    megabytes: float
    seconds: float
    pools_images: bool
    lost: int
    """Updates that were refused or never came, over all rounds and seeds."""
    judged_on: str
    judged_by: str


@dataclass(frozen=True)
class Comparison:
    """Methods side by side. `results` holds, by method, the summary of every seed."""

    title: str
    lines: tuple[MethodSummary, ...]
    results: Mapping[str, Runs]
    folder: Path | None
    about: str = ""
    paper: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    """Runs that did not end, and why; the others stand."""
    claims: Sequence[Any] = ()
    """What the paper claims of these methods (`claims.Claim`)."""

    @property
    def judged_on(self) -> str:
        """What the figures were measured on: the same for all methods, unless only some can be judged by held-out."""
        return ", or ".join(dict.fromkeys(line.judged_on for line in self.lines))

    @property
    def judged_by(self) -> str:
        """Whose figures these are, with the methods' names where it is not the same for all."""
        methods: dict[str, list[str]] = {}
        for line in self.lines:
            methods.setdefault(line.judged_by, []).append(line.name)
        if len(methods) == 1:
            return next(iter(methods))
        return "; ".join(f"{model} ({', '.join(names)})" for model, names in methods.items())

    @property
    def interval_description(self) -> str:
        """What the intervals are over."""
        counts = {line.seeds for line in self.lines}
        patients, seeds = "test patients (bootstrap)", "seeds (Student)"
        if counts == {1}:
            return patients
        return f"{counts.pop()} {seeds}" if len(counts) == 1 else f"{seeds}, or with one seed over {patients}"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = nan_to_none({"title": self.title, "methods": [asdict(line) for line in self.lines]})
        return found


def metric_value(result: Mapping[str, Any], metric: str, site: str | None = None) -> float:
    """One figure of one run, over all hospitals or at one; NaN where it has none."""
    if metric == "gap":
        models = result["sites"].get(site, {}) if site else result.get("merged", {})
        return nan_if_none(models.get(result["headline"]["model"], {}).get("gap"))
    if metric == "drift":
        moved = {} if result["headline"]["model"] == "transfer" else result["drift"]  # there is no mean to drift from
        return nan_if_none(moved.get(site)) if site else mean_of_known(list(moved.values()))
    if metric == "megabytes":
        return float(result["cost"]["bytes_up"] + result["cost"]["bytes_down"]) / 1e6
    if metric == "converged":
        return nan_if_none(convergence_round(result))
    if metric == "forgotten":
        return mean_of_known([share for _, share in (result.get("forgetting") or {}).get("forgotten", [])])
    if metric == "told_apart":
        return nan_if_none(result.get("told_apart"))
    if metric == "seconds":
        return float(result["cost"]["seconds"])
    if site and site not in result["sites"]:
        return math.nan
    best = headline_at_site(result, site) if site else result["headline"]
    return nan_if_none(best.get(metric))


def summarise_methods(results: Mapping[str, Runs]) -> list[MethodSummary]:
    return [_summarise_method(name, runs) for name, runs in results.items()]


def _summarise_method(name: str, runs: Runs) -> MethodSummary:
    worst_site, worst = _worst_site(runs)
    return MethodSummary(
        name=name,
        seeds=len(runs),
        figures={metric: MetricEstimate.estimate(runs, metric) for metric in SHOWN},
        worst_site=worst_site,
        worst_auc=worst,
        drift=mean_of_known([metric_value(result, "drift") for result in runs]),
        megabytes=mean_of_known([metric_value(result, "megabytes") for result in runs]),
        seconds=mean_of_known([metric_value(result, "seconds") for result in runs]),
        pools_images=pools_images(runs[0]),
        lost=sum(r["cost"].get("refused", 0) + r["cost"].get("failed", 0) for r in runs),
        judged_on=describe_test_images(runs[0]["headline"]),
        judged_by=describe_model(runs[0]["headline"]),
    )


def _worst_site(runs: Runs) -> tuple[str, float]:
    """The hospital served worst: the lowest mean AUC of the model the run is judged by."""
    values: dict[str, list[float]] = {}
    for result in runs:
        for site in result["sites"]:
            values.setdefault(site, []).append(nan_if_none(headline_at_site(result, site).get("auc")))
    known = {site: mean_of_known(found) for site, found in values.items() if not math.isnan(mean_of_known(found))}
    return min(known.items(), key=lambda item: item[1]) if known else ("", math.nan)


def format_estimate(figure: MetricEstimate) -> str:
    bounds = "" if math.isnan(figure.low) else f" [{format_decimal(figure.low)}, {format_decimal(figure.high)}]"
    return format_decimal(figure.mean) + bounds


def format_traffic(line: MethodSummary) -> str:
    return "images" if line.pools_images else f"{line.megabytes:.1f}"


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table; what would end a cell or the row is escaped or left out."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def format_decimal(value: float, places: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{places}f}"


def nan_if_none(value: float | None) -> float:
    return math.nan if value is None else float(value)


def mean_of_known(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def nan_to_none(value: Any) -> Any:
    """For JSON: NaN becomes null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {k: nan_to_none(v) for k, v in value.items()}
    return [nan_to_none(v) for v in value] if isinstance(value, list | tuple) else value
