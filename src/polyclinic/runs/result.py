"""The result of a run, and that of a finished run read back from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyclinic.config.identity import check_same_recipe
from polyclinic.config.recipe import Recipe
from polyclinic.core import Bundle
from polyclinic.evaluation.summary import Headline, RunSummary
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
    """Return the result of a finished run; raises if `recipe` is given and the run is of another one."""
    if recipe is not None:
        check_same_recipe(folder, recipe)
    return RunResult(RunFolder(folder).read_summary(), {}, folder)
