"""The recipes that come with the package."""

from importlib import resources
from pathlib import Path


def recipes_folder() -> Path:
    """Return the folder of the bundled recipes: in the installed package, or beside the source in a checkout."""
    installed = Path(str(resources.files("polyclinic"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "recipes"


def bundled_recipes() -> dict[str, Path]:
    """Return the path of each bundled recipe by its name, such as `fedcycle/s1`."""
    folder = recipes_folder()
    return {str(p.relative_to(folder).with_suffix("")): p for p in sorted(folder.rglob("*.yaml"))}
