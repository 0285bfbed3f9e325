"""polyclinic: federated learning on medical images, for hospitals that differ.

Each name is imported when it is first used, so that `import polyclinic` loads neither torch nor anything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyclinic.core import __version__

if TYPE_CHECKING:
    from polyclinic.algorithms import register_algorithm
    from polyclinic.algorithms.base import Algorithm
    from polyclinic.algorithms.optimisation.fedavg import FedAvg
    from polyclinic.config.recipe import Recipe
    from polyclinic.core.errors import DataError, PolyclinicError, RecipeError
    from polyclinic.core.jobs import Federation, Fit, Score, Site, Update
    from polyclinic.data.datasets.base import register_dataset
    from polyclinic.experiments.api import check_data, compare, open_run, plan, predict, report
    from polyclinic.models import register_model
    from polyclinic.privacy.transforms import register_transform
    from polyclinic.runs.experiment import run
    from polyclinic.runs.result import RunResult

_NAMES = {
    "polyclinic.algorithms": ("register_algorithm",),
    "polyclinic.algorithms.base": ("Algorithm",),
    "polyclinic.algorithms.optimisation.fedavg": ("FedAvg",),
    "polyclinic.config.recipe": ("Recipe",),
    "polyclinic.core.errors": ("DataError", "PolyclinicError", "RecipeError"),
    "polyclinic.core.jobs": ("Federation", "Fit", "Score", "Site", "Update"),
    "polyclinic.data.datasets.base": ("register_dataset",),
    "polyclinic.experiments.api": ("check_data", "compare", "open_run", "plan", "predict", "report"),
    "polyclinic.models": ("register_model",),
    "polyclinic.privacy.transforms": ("register_transform",),
    "polyclinic.runs.experiment": ("run",),
    "polyclinic.runs.result": ("RunResult",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Algorithm",
    "DataError",
    "FedAvg",
    "Federation",
    "Fit",
    "PolyclinicError",
    "Recipe",
    "RecipeError",
    "RunResult",
    "Score",
    "Site",
    "Update",
    "__version__",
    "check_data",
    "compare",
    "open_run",
    "plan",
    "predict",
    "register_algorithm",
    "register_dataset",
    "register_model",
    "register_transform",
    "report",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'polyclinic' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
