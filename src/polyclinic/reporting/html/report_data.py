"""What a report is made from: the folders of finished runs, read and put together by method."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import SiteId
from polyclinic.core.errors import StoreError
from polyclinic.evaluation.comparison import Comparison, summarise_methods
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.summary import pools_images
from polyclinic.federation.round_log import HELD_OUT
from polyclinic.reporting.run_folder import method_identity, read_result
from polyclinic.storage.journal import add_interrupted_rounds
from polyclinic.storage.run_files import MetricsFile, load_predictions

ALONE = "local"
"""The algorithm in which every site trains by itself."""


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run's folder."""

    folder: Path
    recipe: Recipe
    summary: Mapping[str, Any]

    @property
    def best(self) -> Mapping[str, Any]:
        """The figures that it is judged by."""
        found: Mapping[str, Any] = self.summary["headline"]
        return found

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return MetricsFile(self.folder / "metrics.jsonl").read()

    @cached_property
    def ledger(self) -> list[dict[str, Any]]:
        """What it has cost, with what cut-short rounds may have; [] where the folder has no ledger."""
        return add_interrupted_rounds(read_ledger(self.folder))

    @cached_property
    def predictions(self) -> Mapping[tuple[SiteId, str, str], Predictions]:
        return load_predictions(self.folder)

    def judged(self, site: SiteId | None = None) -> Predictions | None:
        """What the model that it is judged by says of one site's images, or of all; None where that was not kept."""
        model, part = self.best["model"], self.best["part"]
        if model == HELD_OUT:
            return self.predictions.get((HELD_OUT, HELD_OUT, part)) if site is None else None
        if site is not None:
            return self.predictions.get((site, model, part))
        every = [self.predictions.get((name, model, part)) for name in self.summary["sites"]]
        known = [found for found in every if found is not None]
        complete = known and sum(map(len, known)) == self.best.get("n")
        return Predictions.merge(known) if complete else None


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """Only to be read: what a killed process left half-written is passed over, not cut off."""
    path = folder / "ledger.jsonl"
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        return [json.loads(line) for line in whole]
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}); restore it, and write the report again") from error


@dataclass(frozen=True, eq=False)
class Method:
    """One recipe, with every seed that it has run with."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def algorithm(self) -> str:
        return str(self.first.summary["algorithm"])

    @property
    def summaries(self) -> list[Mapping[str, Any]]:
        return [run.summary for run in self.runs]


@dataclass(frozen=True, eq=False)
class UnfinishedRun:
    """A run that has not ended, and how far it came."""

    folder: Path
    recipe: Recipe
    told: str


@dataclass(frozen=True, eq=False)
class ReportData:
    """Everything that a report tells of."""

    title: str
    about: str
    methods: tuple[Method, ...]
    folders: tuple[Path, ...]
    """As they were given."""
    unfinished: tuple[UnfinishedRun, ...] = ()
    pictures: bool = False
    """Whether pictures of patients may be shown."""
    claims: Sequence[Any] = ()
    paper: Mapping[str, str] | None = None

    @property
    def single(self) -> bool:
        return len(self.methods) == 1

    @property
    def first(self) -> Run:
        return self.methods[0].first

    @cached_property
    def sites(self) -> tuple[SiteId, ...]:
        return tuple(dict.fromkeys(site for method in self.methods for site in method.first.summary["sites"]))

    @cached_property
    def classes(self) -> tuple[str, ...]:
        best = self.first.summary
        known = best.get("classes") or range(len(best["headline"].get("confusion") or ()))
        return tuple(map(str, known))

    @cached_property
    def alone(self) -> Method | None:
        """Every site training by itself, if there is such a method: what a hospital has without the others."""
        return next((method for method in self.methods if method.algorithm == ALONE), None)

    @cached_property
    def together(self) -> tuple[Method, ...]:
        """Methods that keep images at home and learn from others."""
        return tuple(m for m in self.methods if m.algorithm != ALONE and not pools_images(m.first.summary))

    @cached_property
    def comparison(self) -> Comparison:
        results = {method.name: method.summaries for method in self.methods}
        return Comparison(self.title, tuple(summarise_methods(results)), results, None, self.about)


def read_report_data(folders: Sequence[Path], pictures: bool = False) -> ReportData:
    """Folders of runs, of comparisons, or both: runs whose recipes differ in the seed only are one method."""
    found: dict[str, dict[int, Run]] = {}
    unfinished = []
    for place in dict.fromkeys(folder for given in folders for folder in _runs_in(given)):
        recipe = Recipe.load(place / "recipe.yaml")
        if not (place / "result.json").exists():
            unfinished.append(UnfinishedRun(place, recipe, _how_far(place, recipe)))
            continue
        found.setdefault(method_identity(recipe), {}).setdefault(
            recipe.seed, Run(place, recipe, read_result(place).summary)
        )
    if not found:
        raise StoreError(
            f"no run in {', '.join(map(str, folders))} has ended; "
            f"`polyclinic resume {unfinished[0].folder}` finishes it"
        )
    methods = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in found.values()]
    named = dict(zip(_labels([runs[0] for runs in methods]), methods, strict=True))
    title, order = _told(folders, list(named))
    about = methods[0][0].recipe.about
    ordered = tuple(Method(name, named[name]) for name in order)
    return ReportData(title, about, ordered, tuple(folders), tuple(unfinished), pictures)


def _runs_in(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}; give the folder of a finished run or of a comparison")
    found = sorted(path.parent for path in folder.rglob("recipe.yaml"))
    if not found:
        raise StoreError(f"{folder} holds no run (recipe.yaml is missing); give the folder that `run` wrote to")
    yield from found


def _how_far(folder: Path, recipe: Recipe) -> str:
    """Of a run that has not ended."""
    ledger = read_ledger(folder)
    done = max((row["round"] for row in ledger if row["event"] == "round"), default=0)
    failed = any(row["event"] == "failed round" for row in ledger[-1:])
    why = "; its last round failed" if failed else ""
    return f"{recipe.name}: {done} of {recipe.rounds} rounds{why}"


def _labels(runs: Sequence[Run]) -> list[str]:
    """The shortest names that tell methods apart: the recipe's, with the algorithm, or the folder's."""
    named = [run.recipe.name for run in runs]
    longer = [f"{run.recipe.name} ({run.recipe.algorithm.name})" for run in runs]
    folders = [str(run.folder.parent if run.folder.name.startswith("seed-") else run.folder) for run in runs]
    numbered = [f"{label}, {number}" for number, label in enumerate(longer, 1)]
    return next(labels for labels in (named, longer, folders, numbered) if len(set(labels)) == len(labels))


def _told(folders: Sequence[Path], names: list[str]) -> tuple[str, list[str]]:
    """Title, and methods in their order: a comparison's own, else as they were given."""
    if len(names) == 1:
        return names[0], names
    path = folders[0] / "comparison.json"
    if len(folders) == 1 and path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            first = [line["name"] for line in kept["methods"] if line["name"] in names]
            return str(kept["title"]), [*first, *(name for name in names if name not in first)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is damaged ({error}); remove it, and write the report again") from error
    return " and ".join(names) if len(names) < 4 else f"{len(names)} methods compared", names
