"""The data of a report: finished runs, read from their folders and grouped by method."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, zip_longest
from pathlib import Path

from polyclinic.config.identity import method_identity
from polyclinic.config.recipe import Recipe
from polyclinic.core import SiteId, StoreError
from polyclinic.evaluation.claims import Claim
from polyclinic.evaluation.comparison import Comparison, PairwiseTest, metric_value, summarise_methods
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.rows import CostRow, LedgerRow, MetricRow
from polyclinic.evaluation.statistics import summarise_sample
from polyclinic.evaluation.summary import PartScores, RunSummary
from polyclinic.evaluation.task import Task, task_of
from polyclinic.reporting.formatting import format_spread
from polyclinic.storage.journal import add_interrupted_rounds
from polyclinic.storage.run_folder import RunFolder

LOCAL = "local"
"""The algorithm in which every site trains by itself."""


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run. Of a kept table of results only the summary is known."""

    summary: RunSummary
    recipe: Recipe | None = None
    files: RunFolder | None = None

    @cached_property
    def site_scores(self) -> dict[SiteId, PartScores]:
        """The headline model's scores at each site that has such images."""
        found = {site: self.summary.headline_at(site) for site in self.summary.sites}
        return {site: scores for site, scores in found.items() if scores is not None}

    @cached_property
    def metric_rows(self) -> Sequence[MetricRow]:
        return self.files.metrics() if self.files else ()

    @cached_property
    def ledger(self) -> Sequence[LedgerRow]:
        """With the possible cost of interrupted rounds."""
        return add_interrupted_rounds(self.files.ledger()) if self.files else ()

    @property
    def cost_rows(self) -> list[CostRow]:
        return [row for row in self.ledger if isinstance(row, CostRow)]

    def headline_predictions(self, site: SiteId | None = None) -> Predictions | None:
        """Predictions of the headline's model on one site's images, or on all; None where they were not kept."""
        return self.files.headline_predictions(site) if self.files else None


@dataclass(frozen=True, eq=False)
class Method:
    """One recipe, with every seed that it has run with."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def summaries(self) -> list[RunSummary]:
        return [run.summary for run in self.runs]

    def format_spread(self, metric: str, site: SiteId | None = None) -> str:
        """Mean ± standard deviation of a metric over seeds."""
        return format_sample([metric_value(summary, metric, site) for summary in self.summaries])


@dataclass(frozen=True, eq=False)
class UnfinishedRun:
    folder: Path
    recipe: Recipe
    progress: str


@dataclass(frozen=True, eq=False)
class ReportData:
    """Everything that a report shows."""

    title: str
    about: str
    methods: tuple[Method, ...]
    folders: tuple[Path, ...] = ()
    """As they were given."""
    unfinished: tuple[UnfinishedRun, ...] = ()
    with_images: bool = False
    """Whether pictures of patients may be shown."""
    claims: Sequence[Claim] = ()
    paper: Mapping[str, str] | None = None
    """The paper's figure for each method."""
    failures: tuple[str, ...] = ()

    @property
    def is_single(self) -> bool:
        return len(self.methods) == 1

    @property
    def is_from_folders(self) -> bool:
        return self.first.files is not None

    @property
    def has_several_seeds(self) -> bool:
        return any(len(method.runs) > 1 for method in self.methods)

    @property
    def spread_note(self) -> str:
        return " (mean ± standard deviation over seeds)" if self.has_several_seeds else ""

    @property
    def has_privacy(self) -> bool:
        return any(run.privacy is not None for method in self.methods for run in method.summaries)

    @property
    def first(self) -> Run:
        return self.methods[0].first

    @property
    def versions(self) -> str:
        return f"Versions: {', '.join(f'{name} {number}' for name, number in self.first.summary.versions.items())}."

    @property
    def task(self) -> Task:
        return task_of(self.first.summary)

    @property
    def main_metric(self) -> str:
        return self.task.main_metric

    @property
    def columns(self) -> dict[str, str]:
        """The metrics that tables show, with their labels."""
        return {name: self.task.info(name).label for name in self.task.shown_metrics}

    def label(self, metric: str) -> str:
        """The metric's label, as a heading begins."""
        label = self.task.info(metric).label
        return label[0].upper() + label[1:]

    @cached_property
    def sites(self) -> tuple[SiteId, ...]:
        return tuple(dict.fromkeys(site for method in self.methods for site in method.first.summary.sites))

    @cached_property
    def local(self) -> Method | None:
        """The method in which every site trains alone: what a site has without the others."""
        return next((method for method in self.methods if method.first.summary.algorithm == LOCAL), None)

    @cached_property
    def federated(self) -> tuple[Method, ...]:
        """The methods that keep images at their sites and learn from others."""
        summaries = ((method, method.first.summary) for method in self.methods)
        return tuple(method for method, one in summaries if one.algorithm != LOCAL and not one.pooled)

    @cached_property
    def comparison(self) -> Comparison:
        results = {method.name: method.summaries for method in self.methods}
        return Comparison(
            self.title, summarise_methods(results), results, None, self.about, predictions=self._find_predictions
        )

    @cached_property
    def pairs(self) -> list[PairwiseTest]:
        """Every method against every other, corrected together, so that the best may be picked afterwards."""
        return self.comparison.compare_pairs()

    @cached_property
    def site_tests(self) -> list[PairwiseTest]:
        """Every method that learns with others against training alone, at every site, corrected together."""
        if self.local is None:
            return []
        pairs = [(method.name, self.local.name, site) for method, site in product(self.federated, self.sites)]
        return self.comparison.compare_pairs(pairs)

    def _find_predictions(self, name: str, seed: int, site: SiteId | None) -> Predictions | None:
        run = next((run for run in self.method(name).runs if run.summary.seed == seed), None)
        return run.headline_predictions(site) if run else None

    def method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)


def format_sample(values: Sequence[float]) -> str:
    """Mean ± standard deviation of a figure over seeds."""
    found = summarise_sample(values)
    return format_spread(found.mean, found.std)


def gather_report_data(comparison: Comparison, folders: Mapping[str, Sequence[RunFolder]]) -> ReportData:
    """The data of a comparison in memory, with the folders of its runs by method, where there are any."""
    methods = []
    for name, summaries in comparison.results.items():
        files = folders.get(name, ())
        recipes = [Recipe.load(one.recipe) for one in files]
        runs = zip_longest(summaries, recipes, files) if files else ((summary, None, None) for summary in summaries)
        methods.append(Method(name, tuple(Run(*run) for run in runs)))
    return ReportData(
        comparison.title,
        comparison.about,
        tuple(methods),
        (comparison.folder,) if comparison.folder and folders else (),
        claims=comparison.claims,
        paper=comparison.paper,
        failures=comparison.failures,
    )


def read_report_data(folders: Sequence[Path], with_images: bool = False) -> ReportData:
    """Read folders of runs, of comparisons, or both. Runs whose recipes differ only in the seed are one method."""
    found: dict[str, dict[int, Run]] = {}
    unfinished = []
    for files in {files.path: files for given in folders for files in _runs_in(given)}.values():
        recipe = Recipe.load(files.recipe)
        summary = files.summary
        if summary is None:
            unfinished.append(UnfinishedRun(files.path, recipe, _describe_progress(files, recipe)))
        else:
            found.setdefault(method_identity(recipe), {}).setdefault(recipe.seed, Run(summary, recipe, files))
    if not found:
        raise StoreError(
            f"no run in {', '.join(map(str, folders))} has finished; "
            f"`polyclinic resume {unfinished[0].folder}` finishes it"
        )
    methods = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in found.values()]
    named = dict(zip(_label_methods([runs[0] for runs in methods]), methods, strict=True))
    title, order = _read_title(folders, list(named))
    about = methods[0][0].recipe
    return ReportData(
        title,
        about.about if about else "",
        tuple(Method(name, named[name]) for name in order),
        tuple(folders),
        tuple(unfinished),
        with_images,
    )


def _runs_in(folder: Path) -> list[RunFolder]:
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}; give the folder of a finished run or of a comparison")
    found = sorted(path.parent for path in folder.rglob("recipe.yaml"))
    if not found:
        raise StoreError(f"{folder} holds no run (recipe.yaml is missing); give the folder that `run` wrote to")
    return [RunFolder(path) for path in found]


def _describe_progress(files: RunFolder, recipe: Recipe) -> str:
    """How far an unfinished run came."""
    ledger = files.ledger()
    done = max((row.round for row in ledger if row.event == "round"), default=0)
    failed = "; its last round failed" if ledger and ledger[-1].event == "failed round" else ""
    return f"{recipe.name}: {done} of {recipe.rounds} rounds{failed}"


def _label_methods(runs: Sequence[Run]) -> list[str]:
    """The shortest labels that differ: the recipe's name, with the algorithm, the folder's, or numbers."""
    recipes = [(run.recipe, run.files.path) for run in runs if run.recipe and run.files]
    named = [recipe.name for recipe, _ in recipes]
    longer = [f"{recipe.name} ({recipe.algorithm.name})" for recipe, _ in recipes]
    folders = [str(path.parent if path.name.startswith("seed-") else path) for _, path in recipes]
    numbered = [f"{label}, {number}" for number, label in enumerate(longer, 1)]
    return next(labels for labels in (named, longer, folders, numbered) if len(set(labels)) == len(labels))


def _read_title(folders: Sequence[Path], names: list[str]) -> tuple[str, list[str]]:
    """The title, and the methods' order: a comparison's own, else as they were given."""
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
