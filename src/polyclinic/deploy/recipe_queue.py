"""The recipes that a server plays one after another: the files of a folder, in the order of their names."""

import re
import time
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from polyclinic.storage.run_folder import RunFolder

FileState: TypeAlias = tuple[int, int]
RETRY, SOONEST_RETRY = 300.0, 10.0
"""Seconds after which a recipe that sites refused, or for which they were missing, is tried again: at the latest; and
at the soonest, if a site has connected or gone meanwhile."""


@dataclass(frozen=True)
class Setback:
    """Why a recipe was not played, and what has to change before it is tried again."""

    file: FileState
    sentence: str
    waits_for_sites: bool
    sites: Hashable
    time: float

    def is_over(self, file: FileState, sites: Hashable, now: float) -> bool:
        """Whether the recipe can be tried again."""
        wait = SOONEST_RETRY if sites != self.sites else RETRY
        return file != self.file or (self.waits_for_sites and now >= self.time + wait)


class RecipeQueue:
    """The recipes in `folder`, each with a run of its own in `out`; a person may add files at any time."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self.setbacks: dict[Path, Setback] = {}
        """The last one of each recipe that could not be played."""

    def run_folder(self, recipe: Path) -> Path:
        """The folder of a recipe's run: it is named like the recipe."""
        return self.out / recipe.stem

    def next_recipe(self, sites: Hashable = None) -> Path | None:
        """Return the first recipe that has not been played and can be tried now; None if there is none at the moment.

        `sites`: the sites that are connected, in a form that changes whenever one connects or goes.
        """
        now = time.monotonic()
        for path in self._unplayed():
            if path not in self.setbacks or self.setbacks[path].is_over(_file_state(path), sites, now):
                return path
        return None

    def waiting_recipes(self) -> list[str]:
        """The names of the recipes that wait for sites."""
        return [path.name for path in self._unplayed() if path in self.setbacks and self.setbacks[path].waits_for_sites]

    def set_aside(self, recipe: Path, sentence: str, waits_for_sites: bool = False, sites: Hashable = None) -> bool:
        """Try a recipe again only after its file has changed, or in another process.

        Args:
            recipe: Its file.
            sentence: Why it could not be played.
            waits_for_sites: Whether sites refused or were missing: then it is also tried again after a while.
            sites: As for `next_recipe`.

        Returns:
            Whether this is news: the file, or more than the numbers in the sentence, differs from the last time.
        """
        new = Setback(_file_state(recipe), sentence, waits_for_sites, sites, time.monotonic())
        former, self.setbacks[recipe] = self.setbacks.get(recipe), new
        return former is None or (former.file, _words(former.sentence)) != (new.file, _words(sentence))

    def _unplayed(self) -> list[Path]:
        return [path for path in sorted(self.folder.glob("*.yaml")) if not RunFolder(self.run_folder(path)).is_finished]


def _words(sentence: str) -> str:
    return re.sub(r"\d+", "", sentence)


def _file_state(path: Path) -> FileState:
    try:
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    except OSError:
        return 0, 0
