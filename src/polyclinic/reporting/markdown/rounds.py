"""What changes over rounds, as pictures: accuracy, and what deployments made sites forget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polyclinic.evaluation.comparison import Comparison

MOST_LINES = 9
"""More cannot be told apart: the first are drawn."""
AXES = "round whose model was deployed", "share of training images"


def draw_run(summary: Mapping[str, Any], path: Path) -> None:
    """What each deployment of a run lost and gained, over all hospitals."""
    from polyclinic.reporting.figures import draw_curves  # matplotlib takes a second to load

    draw_curves(summary["forgetting"], f"{summary['name']}: forgetting over rounds", *AXES, path)


def draw_forgetting(comparison: Comparison, path: Path) -> bool:
    """What deployments lost, by method, the mean over seeds; False where nobody measured it."""
    from polyclinic.reporting.figures import draw_curves  # matplotlib takes a second to load

    told = _at_shared_seeds(comparison, "forgetting")
    lines = {name: _mean([dict(run["forgotten"]) for run in runs]) for name, runs in told.items()}
    if not any(lines.values()):
        return False
    draw_curves(lines, f"{comparison.title}: forgotten after a deployment", *AXES, path)
    return True


def draw_progress(comparison: Comparison, path: Path) -> bool:
    """Accuracy of all sites, or of every cluster, over rounds, the mean over seeds; False where that is not known."""
    from polyclinic.reporting.figures import draw_curves  # matplotlib takes a second to load

    series: dict[str, list[tuple[float, float]]] = {}
    for name, found in _at_shared_seeds(comparison, "progress").items():
        for cluster in found[0]:
            called = f"{name}: {cluster}" if cluster else name
            series[called] = _mean([dict(run[cluster]) for run in found if cluster in run])
    lines = {name: points for name, points in series.items() if len(points) > 1}
    if not lines:
        return False
    draw_curves(
        dict(list(lines.items())[:MOST_LINES]), comparison.title, "round", "accuracy on validation images", path
    )
    return True


def _at_shared_seeds(comparison: Comparison, key: str) -> dict[str, list[Any]]:
    """What runs say under `key`, at the seeds that all methods have: one that is easy is easy for all of them."""
    said = {name: {run["seed"]: run[key] for run in runs if run.get(key)} for name, runs in comparison.results.items()}
    told = {name: found for name, found in said.items() if found}
    shared = set.intersection(*(set(found) for found in told.values())) if told else set()
    return {name: [found[seed] for seed in sorted(shared or found)] for name, found in told.items()}


def _mean(curves: Sequence[Mapping[int, float]]) -> list[tuple[float, float]]:
    """Over seeds, at the rounds that all have."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(float(at), fmean(curve[at] for curve in curves)) for at in common]
