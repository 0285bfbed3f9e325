"""polyclinic: federated learning on medical images, for hospitals that differ."""

from polyclinic.config.recipe import Recipe
from polyclinic.runs.experiment import Result, run

__version__ = "0.1.0"
__all__ = ["Recipe", "Result", "__version__", "run"]
