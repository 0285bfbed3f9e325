"""What a comparison says of the server: its models on the public set, its teachers, and how clusters fared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from polyclinic.evaluation.comparison import Comparison, markdown_row
from polyclinic.reporting.markdown.rounds import MOST_LINES

SIX = ("accuracy", "precision", "recall", "f1", "specificity", "auc")
"""The metrics of PFedCDP's tables."""


def server_sections(comparison: Comparison) -> list[str]:
    """Nothing where no method has a public set."""
    found = {name: [run["public"] for run in runs if run.get("public")] for name, runs in comparison.results.items()}
    kept = {name: runs for name, runs in found.items() if runs}
    if not kept:
        return []
    return [*_at_hospitals(comparison), *_public(kept), *_teachers(comparison)]


def _at_hospitals(comparison: Comparison) -> list[str]:
    """The six metrics of the headline."""
    body = {name: [run["headline"] for run in runs] for name, runs in comparison.results.items()}
    rows = [markdown_row([name, runs[0]["model"], *_six(runs)]) for name, runs in body.items()]
    return [f"## Six metrics ({comparison.judged_on})", _grid(["method", "model", *SIX], rows), SPREAD]


def _public(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Every model of the server's on the public test images."""
    rows = []
    for name, runs in found.items():
        for model in runs[0]:
            rows.append(markdown_row([name, model, *_six([run[model] for run in runs if model in run])]))
    count = next(iter(next(iter(found.values()))[0].values()))["n"]
    title = f"## On the server's public test images ({count} in the first seed)"
    return [title, _grid(["method", "model", *SIX], rows), SPREAD]


def _teachers(comparison: Comparison) -> list[str]:
    """What teachers were worth to the student."""
    rows = []
    for name, runs in comparison.results.items():
        finishes = [run["finish"] for run in runs if run.get("finish")]
        if finishes and finishes[0]["shapley"]:
            worth = [_mean([f["shapley"][t] for f in finishes]) for t in finishes[0]["shapley"]]
            shares = [_mean([f["teacher_weights"][t] for f in finishes]) for t in finishes[0]["shapley"]]
            teachers = ", ".join(finishes[0]["shapley"])
            rows.append(markdown_row([name, teachers, ", ".join(worth), ", ".join(shares)]))
    if not rows:
        return []
    return ["## What teachers are worth (Shapley values)", _grid(["method", "teachers", "value", "weight"], rows)]


def _six(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_mean([run.get(metric) for run in runs]) for metric in SIX]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{fmean(known):.3f} ± {stdev(known):.3f}" if len(known) > 1 else f"{known[0]:.3f}"


SPREAD = "Mean ± standard deviation over seeds."


def _grid(head: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([markdown_row(list(head)), "|" + "---|" * len(head), *rows])


def draw_students(comparison: Comparison, path: Path) -> bool:
    """Students over epochs on public validation images, the mean over seeds; one that stopped early stays as it was."""
    from polyclinic.reporting.figures import draw_curves  # matplotlib takes a second to load

    lines: dict[str, list[tuple[float, float]]] = {}
    for name, runs in comparison.results.items():
        found = [[value for _, value in run["finish"]["history"]] for run in runs if run.get("finish")]
        last = max(map(len, found), default=0)
        if last > 1:
            lines[name] = [(float(at), fmean(each[min(at, len(each) - 1)] for each in found)) for at in range(last)]
    if not lines:
        return False
    draw_curves(
        dict(list(lines.items())[:MOST_LINES]),
        f"{comparison.title}: the student",
        "epoch",
        "accuracy on public validation images",
        path,
    )
    return True
