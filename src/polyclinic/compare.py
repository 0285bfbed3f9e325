"""Several methods, several seeds, one table: runs what is missing, reads what is there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyclinic.algorithms import ALGORITHMS
from polyclinic.errors import RecipeError, RoundFailed, StoreError
from polyclinic.experiment import Consortium, Experiment, finished, gather, refuse_other, run
from polyclinic.recipe import EngineSection, Recipe
from polyclinic.results import at_site, judged_on
from polyclinic.rounds import HELD_OUT, Watch
from polyclinic.stats import paired, summary
from polyclinic.store import Metrics, named_failure, write_atomically, write_json

FEWEST_SEEDS = 3
"""With fewer, a paired test says nothing."""
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
        return Figure(spread.mean, max(0.0, spread.low), min(1.0, spread.high), spread.std)


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
    lost: int
    """Updates that were refused or never came, over all rounds and seeds."""
    judged_on: str


@dataclass(frozen=True)
class Comparison:
    """Methods side by side. `results` holds, by method, the summary of every seed."""

    title: str
    lines: tuple[Line, ...]
    results: Mapping[str, Sequence[Mapping[str, Any]]]
    folder: Path | None
    about: str = ""
    paper: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    """Runs that did not end, and why; the others stand."""

    @property
    def judged_on(self) -> str:
        """What the figures were measured on: the same for all methods, unless only some can be judged by held-out."""
        return ", or ".join(dict.fromkeys(line.judged_on for line in self.lines))

    @property
    def interval(self) -> str:
        """What the intervals are over."""
        counts = {line.seeds for line in self.lines}
        patients, seeds = "test patients (bootstrap)", "seeds (Student)"
        if counts == {1}:
            return patients
        return f"{counts.pop()} {seeds}" if len(counts) == 1 else f"{seeds}, or with one seed over {patients}"

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = _clean({"title": self.title, "methods": [asdict(line) for line in self.lines]})
        return found


def grid(recipes: Sequence[Recipe], seeds: int) -> dict[str, list[Recipe]]:
    """Every method of every recipe, under its name, once per seed."""
    methods: dict[str, Recipe] = {}
    for recipe in recipes:
        found = {name: recipe.method(name) for name in recipe.methods} or {recipe.name: recipe}
        for name, method in found.items():
            if slug(name) in map(slug, methods):
                raise RecipeError(f"two methods are called {name!r}, or nearly so; give each a name of its own")
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
    gathered: dict[str, Consortium] = {}

    def hospitals(recipe: Recipe) -> Consortium:
        key = f"{recipe.seed} {recipe.data.model_dump_json()}"
        if key not in gathered:
            gathered[key] = gather(recipe, data)
        return gathered[key]

    plan = {
        name: [(recipe, out / slug(name) / f"seed-{recipe.seed}") for recipe in runs]
        for name, runs in grid(recipes, seeds).items()
    }
    _check(plan, hospitals)
    total, done = sum(map(len, plan.values())), 0
    results: dict[str, list[Mapping[str, Any]]] = {}
    failures: list[str] = []
    for name, runs in plan.items():
        for recipe, folder in runs:
            begin(recipe, done, total)
            known = None if _ended(folder) else hospitals(recipe)
            try:
                results.setdefault(name, []).append(run(recipe, folder, data, watch, known).summary)
            except RoundFailed as error:
                failures.append(f"{name}, seed {recipe.seed}, did not end: {error}")
            done += 1
    results = {name: found for name, found in results.items() if found}
    if not results:
        raise RoundFailed(failures[0])
    title, about = ", ".join(recipe.name for recipe in recipes), "\n\n".join(r.about for r in recipes if r.about)
    paper = {method: text for recipe in recipes for method, text in recipe.paper.items()}
    comparison = Comparison(title, tuple(lines(results)), results, out, about, paper, tuple(failures))
    write(comparison, {name: [folder for _, folder in runs if _ended(folder)] for name, runs in plan.items()})
    return comparison


def _check(plan: Mapping[str, Sequence[tuple[Recipe, Path]]], hospitals: Callable[[Recipe], Consortium]) -> None:
    """What cannot run is refused before hours go into what can."""
    for runs in plan.values():
        for recipe, folder in runs:
            refuse_other(folder, recipe)
        for recipe, _ in [pair for pair in runs if not _ended(pair[1])][:1]:
            Experiment(recipe, consortium=hospitals(recipe))


def _ended(folder: Path) -> bool:
    return (folder / "result.json").exists()


def compare_folders(folders: Sequence[Path], out: Path | None) -> Comparison:
    """Runs that have already ended, side by side; runs whose recipes differ in the seed only are one method."""
    found: dict[str, dict[int, tuple[Recipe, Path]]] = {}
    for folder in folders:
        paths = sorted(path.parent for path in folder.rglob("result.json"))
        if not paths:
            raise StoreError(
                f"{folder} holds no finished run; `polyclinic resume {folder}` finishes an interrupted one"
            )
        for path in paths:
            recipe = Recipe.load(path / "recipe.yaml")
            method = recipe.model_copy(update={"seed": 0, "engine": EngineSection()}).to_yaml()
            found.setdefault(method, {}).setdefault(recipe.seed, (recipe, path))
    runs = [[seeds[seed] for seed in sorted(seeds)] for seeds in found.values()]
    plan = dict(zip(_labels([seeds[0] for seeds in runs]), runs, strict=True))
    results = {name: [finished(path).summary for _, path in seeds] for name, seeds in plan.items()}
    comparison = Comparison("comparison", tuple(lines(results)), results, out)
    if out is not None:
        write(comparison, {name: [path for _, path in seeds] for name, seeds in plan.items()})
    return comparison


def _labels(methods: Sequence[tuple[Recipe, Path]]) -> list[str]:
    """The shortest names that tell methods apart: the recipe's, with the algorithm, or the folder's."""
    named = [recipe.name for recipe, _ in methods]
    longer = [f"{recipe.name} ({recipe.algorithm.name})" for recipe, _ in methods]
    folders = [str(path) for _, path in methods]
    return next(labels for labels in (named, longer, folders) if len(set(labels)) == len(labels))


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
        pools_images=getattr(ALGORITHMS.get(runs[0]["algorithm"]), "pooled", False),
        lost=sum(r["cost"].get("refused", 0) + r["cost"].get("failed", 0) for r in runs),
        judged_on=judged_on(runs[0]["headline"]),
    )


def _worst_site(runs: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """The hospital served worst: the lowest mean AUC of the model the run is judged by."""
    values: dict[str, list[float]] = {}
    for result in runs:
        for site in result["sites"]:
            values.setdefault(site, []).append(_number(at_site(result, site).get("auc")))
    known = {site: _mean(found) for site, found in values.items() if not math.isnan(_mean(found))}
    return min(known.items(), key=lambda item: item[1]) if known else ("", math.nan)


def curve_of(folder: Path, result: Mapping[str, Any], metric: str) -> dict[int, float]:
    """A run's metric on validation images after each round: the mean over sites, weighted by their size."""
    totals: dict[int, list[tuple[float, int]]] = {}
    for row in Metrics(folder / "metrics.jsonl").read():
        if row["event"] == "evaluate" and row["site"] != HELD_OUT and row.get(metric) is not None:
            totals.setdefault(row["round"], []).append((row[metric], row["n"]))
    last = [
        (parts["validation"][metric], parts["validation"]["n"])
        for models in result["sites"].values()
        for name, parts in models.items()
        if name in ("global", "personal") and parts.get("validation", {}).get(metric) is not None
    ]
    if last:
        totals[result["rounds"]] = last
    return {r: sum(v * n for v, n in rows) / sum(n for _, n in rows) for r, rows in sorted(totals.items())}


def write(comparison: Comparison, folders: Mapping[str, Sequence[Path]]) -> None:
    """The pictures, the table as Markdown, and everything as JSON, into the comparison's folder."""
    out = comparison.folder
    assert out is not None
    with named_failure(out):
        out.mkdir(parents=True, exist_ok=True)
    _draw(comparison, folders, out)
    write_json(out / "comparison.json", comparison.as_json())
    write_atomically(out / "report.md", markdown(comparison).encode())


def _draw(comparison: Comparison, folders: Mapping[str, Sequence[Path]], out: Path) -> None:
    from polyclinic.curves import Row, draw_comparison, draw_curves  # matplotlib takes a second to load

    series = {}
    for name, results in comparison.results.items():
        found = [curve_of(*run, "accuracy") for run in zip(folders[name], results, strict=True)]
        shared = sorted(set.intersection(*(set(points) for points in found)))
        series[name] = [(r, _mean([points[r] for points in found])) for r in shared]
    if any(series.values()):
        title = f"{comparison.title}: accuracy on the hospitals' validation images"
        draw_curves(series, title, "communication round", "accuracy", out / "curves.png")
    bars = [
        Row(line.name, line.figures["auc"].mean, line.figures["auc"].low, line.figures["auc"].high)
        for line in comparison.lines
        if not math.isnan(line.figures["auc"].mean)
    ]
    if bars:
        draw_comparison(bars, f"{comparison.title}: AUC on {comparison.judged_on}", "AUC", out / "auc.png")


def markdown(comparison: Comparison) -> str:
    """The report of a comparison: table, notes, hospitals, pictures, versions."""
    first = next(iter(comparison.results.values()))[0]
    model, out = first["model"], comparison.folder
    pictures = [name for name in ("curves.png", "auc.png") if out is not None and (out / name).exists()]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    text = [
        f"# {comparison.title}",
        comparison.about,
        f"{first['data']} data, {model['name']} ({model['parameters']:,} parameters, "
        f"{model['flops_per_step'] / 1e9:.2g} GFLOP a training step). Figures on {comparison.judged_on} together; in "
        f"brackets the 95 % interval over {comparison.interval}.",
        "\n".join(_table(comparison)),
        "\n".join(_differences(comparison)),
        " ".join(_notes(comparison)),
        "## Hospitals (first seed)",
        "\n".join(_hospitals(first["hospitals"])),
        *(f"![{name.removesuffix('.png')}]({name})" for name in pictures),
        f"Versions: {versions}.",
    ]
    return "\n\n".join(block for block in text if block) + "\n"


def _table(comparison: Comparison) -> Iterator[str]:
    head = ["method", "rounds", "accuracy", "balanced accuracy", "AUC", "worst-served hospital (AUC)", "drift"]
    head += ["MB sent", "s", *(["paper"] if comparison.paper else [])]
    yield _row(head)
    yield "|" + "---|" * len(head)
    for line in comparison.lines:
        cells = [line.name, str(comparison.results[line.name][0]["rounds"])]
        cells += [show(line.figures[metric]) for metric in SHOWN]
        cells += [f"{line.worst_site} {decimal(line.worst_auc)}", decimal(line.drift, 2), sent(line)]
        cells += [f"{line.seconds:.1f}", *([comparison.paper.get(line.name, "–")] if comparison.paper else [])]
        yield _row(cells)


def _hospitals(hospitals: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield _row(["hospital", "train", "validation", "test", "classes"])
    yield "|" + "---|" * 5
    for site in hospitals:
        counts = ", ".join(f"{name} {count}" for name, count in site["classes"].items())
        yield _row([site["site"], str(site["train"]), str(site["validation"]), str(site["test"]), counts])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _differences(comparison: Comparison) -> list[str]:
    """Seed by seed against the first method: an interval of its own says little about a difference."""
    first, *others = comparison.lines
    if first.seeds < FEWEST_SEEDS or not others:
        return []
    values = {n: [_number(r["headline"].get("accuracy")) for r in runs] for n, runs in comparison.results.items()}
    rows = [f"| accuracy against {first.name}, seed by seed | difference [95 %] | p (paired t-test) |", "|---|---|---|"]
    for line in others:
        if line.seeds == first.seeds:
            found = paired(values[line.name], values[first.name])
            interval = f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            rows.append(f"| {line.name} | {interval} | {decimal(found.p)} |")
    return [*rows, "", f"{len(rows) - 2} tests, not corrected for their number."]


def _notes(comparison: Comparison) -> list[str]:
    notes = [f"{failure}." for failure in comparison.failures]
    notes += [
        f"{line.name}: {line.lost} updates of hospitals were refused or lost." for line in comparison.lines if line.lost
    ]
    notes += ["Drift is the mean distance ‖w_k − w‖₂ that a hospital's weights travel in one round."]
    if any(line.pools_images for line in comparison.lines):
        notes.append("Centralised pools the images themselves, which hospitals may not do: it is a yardstick.")
    if any(r["algorithm"] == "local" for runs in comparison.results.values() for r in runs):
        notes.append("Local is judged by each hospital's own model on its own images.")
    if any(r["algorithm"] == "cross-site" for runs in comparison.results.values() for r in runs):
        notes.append("Cross-site is judged by every hospital's model on the images of all the others.")
    if any(r["headline"]["model"] in ("personal", "transfer") for runs in comparison.results.values() for r in runs):
        notes.append(
            "Where several models are judged together, their AUC also tells how classes are spread over sites."
        )
    if len({line.judged_on for line in comparison.lines}) > 1:
        notes += [f"{line.name} is judged on {line.judged_on}." for line in comparison.lines]
    notes.append("Nothing here is private in the sense of a guarantee: no privacy plan was in the recipe.")
    return notes


def show(figure: Figure) -> str:
    bounds = "" if math.isnan(figure.low) else f" [{decimal(figure.low)}, {decimal(figure.high)}]"
    return decimal(figure.mean) + bounds


def sent(line: Line) -> str:
    return "images" if line.pools_images else f"{line.megabytes:.1f}"


def decimal(value: float, places: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{places}f}"


def slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"\W+", "-", name.lower()).strip("-")[:100] or "method"


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
