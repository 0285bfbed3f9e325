"""Several methods, several seeds, one table: runs what is missing, reads what is there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyclinic.curves import Row, draw_comparison, draw_curves
from polyclinic.errors import StoreError
from polyclinic.experiment import Result, finished, gather, run
from polyclinic.recipe import Recipe
from polyclinic.rounds import HELD_OUT, Watch
from polyclinic.stats import summary
from polyclinic.store import Metrics, write_atomically, write_json

SHOWN = ("accuracy", "balanced_accuracy", "auc")


@dataclass(frozen=True)
class Figure:
    """A metric of one method: its mean over seeds, their spread, and a 95 % interval.

    With several seeds the interval is Student's, over seeds; with one it is the bootstrap's, over test patients.
    """

    mean: float
    low: float
    high: float
    std: float | None = None

    @staticmethod
    def of(results: Sequence[Mapping[str, Any]], metric: str) -> Figure:
        values = [_number(result["headline"].get(metric)) for result in results]
        if len(values) == 1:
            low, high = (results[0]["headline"].get("intervals") or {}).get(metric, (None, None))
            return Figure(values[0], _number(low), _number(high))
        spread = summary(values)
        return Figure(spread.mean, spread.low, spread.high, spread.std)


@dataclass(frozen=True)
class Line:
    """One method in the table."""

    name: str
    seeds: int
    figures: Mapping[str, Figure]
    worst_site: str
    worst_auc: float
    drift: float
    megabytes: float
    seconds: float
    pools_images: bool


@dataclass(frozen=True)
class Comparison:
    """Methods side by side. `results` holds, by method, the summary of every seed."""

    title: str
    lines: tuple[Line, ...]
    results: Mapping[str, Sequence[Mapping[str, Any]]]
    folder: Path | None
    about: str = ""
    paper: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = _clean({"title": self.title, "methods": [asdict(line) for line in self.lines]})
        return found


def grid(recipes: Sequence[Recipe], seeds: int) -> dict[str, list[Recipe]]:
    """Every method of every recipe, under its name, once per seed."""
    methods: dict[str, Recipe] = {}
    for recipe in recipes:
        found = {name: recipe.method(name) for name in recipe.methods} or {recipe.name: recipe}
        for name, method in found.items():
            if name in methods:
                raise StoreError(f"two methods are called {name!r}; give each recipe its own name")
            methods[name] = method
    return {
        name: [method.model_copy(update={"seed": method.seed + k}) for k in range(seeds)]
        for name, method in methods.items()
    }


def compare(
    recipes: Sequence[Recipe],
    seeds: int,
    out: Path,
    data: Path | None = None,
    watch: Watch = lambda *_: None,
    begin: Callable[[Recipe, int, int], None] = lambda *_: None,
) -> Comparison:
    """Run every method with every seed (finished runs are read back), draw the pictures, write the table."""
    plan = grid(recipes, seeds)
    total, done = sum(map(len, plan.values())), 0
    results: dict[str, list[Mapping[str, Any]]] = {}
    hospitals: dict[str, Any] = {}
    for name, runs in plan.items():
        for recipe in runs:
            begin(recipe, done, total)
            folder = out / slug(name) / f"seed-{recipe.seed}"
            key = f"{recipe.seed} {recipe.data.model_dump_json()}"
            if key not in hospitals and not (folder / "result.json").exists():
                hospitals[key] = gather(recipe, data)
            result: Result = run(recipe, folder, data, watch, hospitals.get(key))
            results.setdefault(name, []).append(result.summary)
            done += 1
    first = recipes[0]
    return write(Comparison(first.name, tuple(lines(results)), results, out, first.about, first.paper))


def compare_folders(folders: Sequence[Path], out: Path | None) -> Comparison:
    """Runs that have already ended, side by side; runs of one name are seeds of one method."""
    results: dict[str, list[Mapping[str, Any]]] = {}
    for folder in folders:
        paths = sorted(folder.rglob("result.json"))
        if not paths:
            raise StoreError(
                f"{folder} holds no finished run; `polyclinic resume {folder}` finishes an interrupted one"
            )
        for path in paths:
            found = finished(path.parent).summary
            results.setdefault(found["name"], []).append(found)
    return Comparison("comparison", tuple(lines(results)), results, out)


def lines(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Line]:
    return [_line(name, runs) for name, runs in results.items()]


def _line(name: str, runs: Sequence[Mapping[str, Any]]) -> Line:
    worst_site, worst = _worst_site(runs)
    moved = [sum(r["drift"].values()) / len(r["drift"]) for r in runs if r["drift"]]
    return Line(
        name=name,
        seeds=len(runs),
        figures={metric: Figure.of(runs, metric) for metric in SHOWN},
        worst_site=worst_site,
        worst_auc=worst,
        drift=_mean(moved),
        megabytes=_mean([(r["cost"]["bytes_up"] + r["cost"]["bytes_down"]) / 1e6 for r in runs]),
        seconds=_mean([r["cost"]["seconds"] for r in runs]),
        pools_images=runs[0]["algorithm"] == "centralised",
    )


def _worst_site(runs: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """The hospital served worst: the lowest mean test AUC of the model it would use."""
    values: dict[str, list[float]] = {}
    for result in runs:
        for site, models in result["sites"].items():
            parts = models.get(result["headline"]["model"]) or next(iter(models.values()))
            values.setdefault(site, []).append(_number(parts.get("test", {}).get("auc")))
    known = {site: _mean(found) for site, found in values.items() if not math.isnan(_mean(found))}
    return min(known.items(), key=lambda item: item[1]) if known else ("", math.nan)


def curves_of(folder: Path, metric: str) -> list[tuple[int, float]]:
    """A run's metric on validation images after each round: the mean over sites, weighted by their size."""
    totals: dict[int, list[tuple[float, int]]] = {}
    for row in Metrics(folder / "metrics.jsonl").read():
        if row["event"] == "evaluate" and row["site"] != HELD_OUT and row.get(metric) is not None:
            totals.setdefault(row["round"], []).append((row[metric], row["n"]))
    return [(r, sum(v * n for v, n in rows) / sum(n for _, n in rows)) for r, rows in sorted(totals.items())]


def write(comparison: Comparison) -> Comparison:
    """The pictures, the table as Markdown, and everything as JSON, into the comparison's folder."""
    folder = comparison.folder
    assert folder is not None
    series = {}
    for name, runs in comparison.results.items():
        found = [dict(curves_of(folder / slug(name) / f"seed-{r['seed']}", "accuracy")) for r in runs]
        shared = sorted(set.intersection(*(set(points) for points in found)))
        series[name] = [(r, _mean([points[r] for points in found])) for r in shared]
    if any(series.values()):
        title = f"{comparison.title}: accuracy on validation images, mean over hospitals"
        draw_curves(series, title, "communication round", "accuracy", folder / "curves.png")
    bars = [
        Row(line.name, line.figures["auc"].mean, line.figures["auc"].low, line.figures["auc"].high)
        for line in comparison.lines
        if not math.isnan(line.figures["auc"].mean)
    ]
    if bars:
        draw_comparison(bars, f"{comparison.title}: test AUC, all hospitals together", "AUC", folder / "auc.png")
    write_json(folder / "comparison.json", comparison.as_json())
    write_atomically(folder / "report.md", markdown(comparison).encode())
    return comparison


def markdown(comparison: Comparison) -> str:
    """The report of a comparison: hospitals, table, pictures, how to run it again."""
    first = next(iter(comparison.results.values()))[0]
    seeds = comparison.lines[0].seeds
    kind = (
        "95 % interval over test patients (bootstrap), one seed"
        if seeds == 1
        else f"95 % interval of the mean over {seeds} seeds (Student)"
    )
    text = [
        f"# {comparison.title}",
        "",
        *([comparison.about, ""] if comparison.about else []),
        f"{first['data']} data, {first['model']['name']} ({first['model']['parameters']:,} parameters, "
        f"{first['model']['flops_per_step'] / 1e9:.2f} GFLOP a training step). Figures on the test images of all "
        f"hospitals together; in brackets the {kind}.",
        "",
        "| method | rounds | accuracy | balanced accuracy | AUC | worst-served hospital (AUC) | drift | MB sent | s |"
        + (" paper |" if comparison.paper else ""),
        "|---|---|---|---|---|---|---|---|---|" + ("---|" if comparison.paper else ""),
    ]
    for line in comparison.lines:
        rounds = comparison.results[line.name][0]["rounds"]
        cells = [line.name, str(rounds), *(show(line.figures[m]) for m in SHOWN)]
        cells += [
            f"{line.worst_site} {decimal(line.worst_auc)}",
            decimal(line.drift, 2),
            sent(line),
            f"{line.seconds:.1f}",
        ]
        cells += [comparison.paper.get(line.name, "–")] if comparison.paper else []
        text.append("| " + " | ".join(cells) + " |")
    text += [
        "",
        *_notes(comparison),
        "",
        "## Hospitals (first seed)",
        "",
        "| hospital | train | validation | test | classes |",
    ]
    text.append("|---|---|---|---|---|")
    for site in first["hospitals"]:
        counts = ", ".join(f"{name} {count}" for name, count in site["classes"].items())
        text.append(f"| {site['site']} | {site['train']} | {site['validation']} | {site['test']} | {counts} |")
    if comparison.folder and (comparison.folder / "curves.png").exists():
        text += ["", "![learning curves](curves.png)", "", "![AUC with intervals](auc.png)"]
    found = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    return "\n".join([*text, "", f"Versions: {found}.", ""])


def _notes(comparison: Comparison) -> list[str]:
    notes = ["Drift is the mean distance ‖w_k − w‖₂ that a hospital's weights travel in one round."]
    if any(line.pools_images for line in comparison.lines):
        notes.append("Centralised pools the images themselves, which hospitals may not do: it is a yardstick.")
    if any(r["algorithm"] == "local" for runs in comparison.results.values() for r in runs):
        notes.append("Local is judged by each hospital's own model on its own test images.")
    notes.append("Nothing here is private in the sense of a guarantee: no privacy plan was in the recipe.")
    return notes


def show(figure: Figure) -> str:
    return f"{decimal(figure.mean)} [{decimal(figure.low)}, {decimal(figure.high)}]"


def sent(line: Line) -> str:
    return "images" if line.pools_images else f"{line.megabytes:.1f}"


def decimal(value: float, places: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{places}f}"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "method"


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def _clean(value: Any) -> Any:
    """For JSON: NaN becomes null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list | tuple) else value
