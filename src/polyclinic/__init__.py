"""polyclinic: federated learning on medical images, for hospitals that differ."""

from polyclinic.experiment import Result, run
from polyclinic.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["Recipe", "Result", "__version__", "run"]
