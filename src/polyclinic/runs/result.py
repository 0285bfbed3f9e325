"""The result of a run: its summary, put together from its parts, and the result of a finished run read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyclinic.algorithms.distillation.refine import RefinementResult
from polyclinic.config.identity import check_same_recipe
from polyclinic.config.recipe import Recipe
from polyclinic.core import Bundle
from polyclinic.evaluation.summary import Headline, RunSummary, StudentTraining
from polyclinic.storage.run_folder import RunFolder


@dataclass(frozen=True)
class RunResult:
    """A finished run. `state`: the server's last; empty where the result was read back."""

    summary: RunSummary
    state: Bundle
    folder: Path | None

    @property
    def headline(self) -> Headline:
        return self.summary.headline


def read_result(folder: Path, recipe: Recipe | None = None) -> RunResult:
    """The result of a run that has finished; `recipe`: it must be a run of this recipe."""
    if recipe is not None:
        check_same_recipe(folder, recipe)
    return RunResult(RunFolder(folder).read_summary(), {}, folder)


def summarise_student(refined: RefinementResult) -> StudentTraining:
    """What the summary holds of the student's training."""
    return StudentTraining(
        epochs=refined.epochs,
        best=refined.best,
        factor=refined.factor,
        shapley=refined.shapley,
        teacher_weights=refined.teacher_weights,
        history=refined.history,
    )
