"""What a comparison says of privacy: what each method costs, what it buys, and who is mistaken for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polyclinic.evaluation import claims
from polyclinic.evaluation.comparison import Comparison, markdown_row
from polyclinic.reporting.privacy_statement import PAPER_METRIC

AVERAGES = ("precision_macro", "recall_macro", "f1_macro", "f1_weighted", "balanced_accuracy")
MOST_CLASSES = 12


def privacy_sections(comparison: Comparison) -> list[str]:
    """Nothing where no method has a plan."""
    plans = {name: [run.get("privacy") for run in runs] for name, runs in comparison.results.items()}
    if not any(found for runs in plans.values() for found in runs):
        return []
    return [*_costs(plans), *_averages(comparison), *_confusion(comparison)]


def _costs(plans: Mapping[str, Sequence[Mapping[str, Any] | None]]) -> list[str]:
    head = ["method", "unit", "noise", "ε, worst-placed unit", "ε, if at one site only", "δ", PAPER_METRIC]
    body = [markdown_row(head), "|" + "---|" * len(head)]
    body += [markdown_row([name, *_paid([found for found in runs if found])]) for name, runs in plans.items()]
    caveats = sorted({found["caveat"] for runs in plans.values() for found in runs if found and found["caveat"]})
    note = (
        "ε by privacy loss distributions unless the recipe says otherwise, the mean over seeds (which draw other "
        "cohorts); every run has a page of its own, privacy.md. "
    )
    note += " ".join(f"In brackets, without a guarantee ({why}): as if the noise were fixed." for why in caveats)
    return ["## What privacy costs", "\n".join(body), note]


def _paid(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    if not plans:
        return ["–", "0", "∞ (nothing is claimed)", "∞", "–", "–"]
    first = plans[0]
    unsure = "({})" if first["caveat"] else "{}"
    worst, alone = _mean([_epsilon(found) for found in plans]), _mean([found["worst_site"] for found in plans])
    metric = _mean([found["paper_metric"] for found in plans]) if first["paper_metric"] is not None else "–"
    told = [first["unit"], f"{first['noise']:.4g}", unsure.format(worst), unsure.format(alone)]
    return [*told, f"{first['delta']:.2g}", metric]


def _epsilon(found: Mapping[str, Any]) -> float | None:
    value: float | None = found["epsilon"][found["accountant"]]
    return value


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f}" if known and len(known) == len(values) else "∞"


def _averages(comparison: Comparison) -> list[str]:
    known = {n: r for n, r in comparison.results.items() if all(m in r[0]["headline"] for m in AVERAGES)}
    if not known:
        return []
    head = ["method", *(name.replace("_", " ") for name in AVERAGES)]
    body = [
        markdown_row([name, *(claims.format_mean_and_std(runs, m) for m in AVERAGES)]) for name, runs in known.items()
    ]
    table = "\n".join([markdown_row(head), "|" + "---|" * len(head), *body])
    return ["## Averages over classes (mean ± standard deviation over seeds)", table]


def _confusion(comparison: Comparison) -> list[str]:
    """Of the first method, first seed."""
    name, runs = next(iter(comparison.results.items()))
    counts = runs[0]["headline"].get("confusion")
    if not counts or len(counts) > MOST_CLASSES:
        return []
    classes = runs[0].get("classes") or [str(number) for number in range(len(counts))]
    head = [markdown_row(["true \\ predicted", *classes]), "|" + "---|" * (1 + len(classes))]
    body = [markdown_row([label, *map(str, line)]) for label, line in zip(classes, counts, strict=True)]
    return [f"## Who is taken for whom: {name}, first seed", "\n".join([*head, *body])]


def draw_price(comparison: Comparison, path: Path) -> bool:
    """Accuracy against ε, a line for methods that differ in their noise only; False where there is nothing to draw."""
    from polyclinic.reporting.figures import draw_curves  # matplotlib takes a second to load

    series: dict[str, list[tuple[float, float]]] = {}
    for name, runs in comparison.results.items():
        paid = [_epsilon(run["privacy"]) for run in runs if run.get("privacy")]
        known = [value for value in paid if value is not None]
        if known:
            accuracy = fmean(run["headline"]["accuracy"] for run in runs)
            unsure = ", no guarantee" if runs[0]["privacy"]["caveat"] else ""
            line = name.partition(" σ=")[0].partition(" ε=")[0] + unsure
            series.setdefault(line, []).append((fmean(known), accuracy))
    lines = {name: sorted(points) for name, points in series.items() if len(points) > 1}
    if not lines:
        return False
    title = f"{comparison.title}: what privacy costs"
    draw_curves(lines, title, "ε of the worst-placed unit", "accuracy", path, whole=False)
    return True
