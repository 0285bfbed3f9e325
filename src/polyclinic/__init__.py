"""polyclinic: federated learning on medical images, for hospitals that differ."""

from polyclinic.config.recipe import Recipe
from polyclinic.runs.experiment import RunResult, run

__version__ = "0.1.0"
__all__ = ["Recipe", "RunResult", "__version__", "run"]
