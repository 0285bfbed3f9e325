"""The recipes that a server plays one after another: the files of a folder, in the order of their names."""

from pathlib import Path
from typing import TypeAlias

from polyclinic.storage.run_folder import RunFolder

FileState: TypeAlias = tuple[int, int]


class RecipeQueue:
    """The recipes in `folder`, each with a run of its own in `out`; a person may add files at any time."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self.failed: dict[Path, FileState] = {}
        """Recipes that could not be played, as they were then: one that is changed is tried again."""

    def run_folder(self, recipe: Path) -> Path:
        """The folder of a recipe's run: it is named like the recipe."""
        return self.out / recipe.stem

    def next_recipe(self) -> Path | None:
        """The first recipe whose run has neither finished nor failed; None if there is none at the moment."""
        for path in sorted(self.folder.glob("*.yaml")):
            if not RunFolder(self.run_folder(path)).is_finished and self.failed.get(path) != _file_state(path):
                return path
        return None

    def set_aside(self, recipe: Path) -> None:
        """Try this recipe again only after its file has changed, or in another process."""
        self.failed[recipe] = _file_state(recipe)


def _file_state(path: Path) -> FileState:
    try:
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    except OSError:
        return 0, 0
