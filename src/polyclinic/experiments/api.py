"""The functions that `polyclinic` offers beside `run`: each is a few lines over the package that does the work."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polyclinic.analysis.predict import (
    ModelCatalogue,
    Prediction,
    RunModel,
    UnreadableFile,
    find_image_files,
    fit_calibration,
    open_catalogue,
    predict_files,
)
from polyclinic.config.recipe import Recipe
from polyclinic.core import SiteId
from polyclinic.data.check import CheckResult, check_listing
from polyclinic.data.listings import open_listing
from polyclinic.evaluation.calibration import Calibration
from polyclinic.evaluation.comparison import Comparison, MethodSummary, PairwiseTest
from polyclinic.evaluation.rows import LedgerRow, MetricRow
from polyclinic.evaluation.summary import RunSummary
from polyclinic.experiments import compare as comparisons
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.reporting.blocks import Report
from polyclinic.reporting.html.render import to_html
from polyclinic.reporting.report import build_report
from polyclinic.reporting.report_data import read_report_data
from polyclinic.runs.experiment import Experiment
from polyclinic.storage.files import make_folder, write_atomically


def check_data(source: Path | str, data: Path | str | None = None, columns: str = "") -> CheckResult:
    """Look for faults in a dataset: unreadable files, duplicates, wrong labels, patients in two parts and more.

    Args:
        source: A folder, a table, an npz or an IDX file, or the name of a public dataset.
        data: The data folder of public datasets (None: the one that POLYCLINIC_DATA names).
        columns: The columns of a table, such as "path=file,label=diagnosis".
    """
    return check_listing(open_listing(str(source), None if data is None else Path(data), columns))


def plan(recipe: Recipe, data: Path | str | None = None) -> PrivacyPlan | None:
    """Price the privacy of a recipe, site by site, without training. None if the recipe has no `privacy` section."""
    return Experiment(recipe, None, None if data is None else Path(data)).setup.plan


@dataclass(frozen=True)
class ComparisonResult:
    """Several methods side by side, and the folder that holds their runs."""

    comparison: Comparison
    folder: Path

    @property
    def table(self) -> tuple[MethodSummary, ...]:
        """One row for each method, with means and confidence intervals over the seeds."""
        return self.comparison.lines

    @cached_property
    def tests(self) -> list[PairwiseTest]:
        """A paired test of every method against every other one; p-values are corrected for their number (Holm)."""
        return self.comparison.compare_pairs()

    @property
    def failures(self) -> tuple[str, ...]:
        """The runs that did not finish, and why."""
        return self.comparison.failures

    def report(self, out: Path | str) -> Path:
        """Write the report as one HTML file."""
        report([self.folder], out)
        return Path(out)


def compare(
    recipes: Sequence[Recipe], seeds: int = 1, *, out: Path | str, data: Path | str | None = None
) -> ComparisonResult:
    """Run every method of the recipes with several seeds. Runs that `out` already holds are not repeated.

    Args:
        recipes: Recipes; one with `methods` stands for all of them.
        seeds: The number of seeds of each method.
        out: The folder of the comparison. Call again with the same folder after an interruption.
        data: The data folder of public datasets (None: the one that POLYCLINIC_DATA names).
    """
    return ComparisonResult(
        comparisons.compare(recipes, seeds, Path(out), None if data is None else Path(data)), Path(out)
    )


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A finished run, read from its folder. Its images are not needed."""

    catalogue: ModelCatalogue

    @property
    def folder(self) -> Path:
        return self.catalogue.folder

    @property
    def recipe(self) -> Recipe:
        return self.catalogue.recipe

    @property
    def summary(self) -> RunSummary:
        return self.catalogue.summary

    @cached_property
    def metrics(self) -> list[MetricRow]:
        """The metrics of each round at each site."""
        return self.catalogue.files.metrics()

    @cached_property
    def ledger(self) -> list[LedgerRow]:
        """The events of each round: which sites took part, and the updates that were sent, refused or lost."""
        return self.catalogue.files.ledger()

    def model(self, site: SiteId | None = None, name: str | None = None) -> RunModel:
        """Load a model: that of a site, or the one called `name` (global, personal, student, ensemble or a cluster).

        Without either it is the model that the headline figures are about.
        """
        return self.catalogue.load_model(name, site)


def open_run(folder: Path | str, device: str | None = None) -> SavedRun:
    """Open a finished run; `device` is where its models compute (None: where the run did)."""
    return SavedRun(open_catalogue(Path(folder), device))


def predict(
    run: SavedRun,
    files: Sequence[Path | str],
    site: SiteId | None = None,
    model: str | None = None,
    data: Path | str | None = None,
) -> list[Prediction | UnreadableFile]:
    """Predict image files with a model of a finished run. Probabilities are calibrated if the run kept predictions of
    its validation images, or if `data` gives its data folder. For research; not a medical device.

    Args:
        run: A run that `open_run` opened.
        files: Image files; folders stand for all images in them.
        site: The site whose model predicts, if sites have models of their own.
        model: The name of the model (None: the one that the headline figures are about).
        data: The data folder of the run's images.
    """
    chosen = run.model(site, model)
    found, unreadable = find_image_files([Path(file) for file in files])
    calibration = fit_calibration(run.catalogue, chosen, None if data is None else Path(data))
    temperature = calibration.temperature if isinstance(calibration, Calibration) else None
    return [*unreadable, *predict_files(chosen, run.catalogue.preprocessing, found, temperature)]


def report(folders: Sequence[Path | str], out: Path | str, with_images: bool = False) -> Report:
    """Write the report of finished runs, or of a comparison, as one HTML file, and return its content.

    Args:
        folders: The folders of the runs or of the comparison.
        out: The HTML file.
        with_images: Show the gallery of `polyclinic explain`, which shows patients' images.
    """
    content, target = build_report(read_report_data([Path(folder) for folder in folders], with_images)), Path(out)
    make_folder(target.parent)
    write_atomically(target, to_html(content).encode())
    return content
