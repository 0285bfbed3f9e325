"""Forgetting over rounds, as pictures: of one run, and of methods side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from polyclinic.comparison import Comparison

AXES = "round whose model was deployed", "share of training images"


def draw_run(summary: Mapping[str, Any], path: Path) -> None:
    """What each deployment of a run lost and gained, over all hospitals."""
    from polyclinic.curves import draw_curves  # matplotlib takes a second to load

    draw_curves(summary["forgetting"], f"{summary['name']}: forgetting over rounds", *AXES, path)


def draw_forgetting(comparison: Comparison, path: Path) -> bool:
    """What deployments lost, by method, the mean over seeds; False where nobody measured it."""
    from polyclinic.curves import draw_curves  # matplotlib takes a second to load

    lines: dict[str, list[tuple[float, float]]] = {}
    for name, runs in comparison.results.items():
        found = [dict(run["forgetting"]["forgotten"]) for run in runs if run.get("forgetting")]
        if found:
            common = sorted(set.intersection(*(set(points) for points in found)))
            lines[name] = [(float(at), fmean(points[at] for points in found)) for at in common]
    if not any(lines.values()):
        return False
    draw_curves(lines, f"{comparison.title}: forgotten after a deployment", *AXES, path)
    return True
