"""The trackers TensorBoard (event files) and MLflow (its store). Both are optional extras."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.config.recipe import Track
from polyclinic.core import EngineError, RecipeError, StoreError
from polyclinic.storage.files import write_json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Points = Mapping[tuple[str, int], float]
"""Values by name and step, which is a round."""
NEEDED = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
AT_ONCE = 1000
"""The most values that MLflow accepts in one request."""


def check_tracking(track: Track, folder: Path | None) -> None:
    """Raise, before anything runs, if a tracked run has no folder or a tracker is not installed."""
    for name in track:
        if folder is None:
            raise RecipeError(f"track: {name} follows a run's folder, and this run has none; give one, or leave it out")
        if missing := [package for package in NEEDED[name] if find_spec(package) is None]:
            raise EngineError(
                f"track: {name} needs {', '.join(missing)}; pip install 'polyclinic[{name}]', or leave it out"
            )


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs` shows all runs below `runs`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.writer: SummaryWriter | None = None

    def written_points(self) -> set[tuple[str, int]]:
        """Return the points of this run that it has already."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if not self.folder.exists():
            return set()
        found = EventAccumulator(str(self.folder), {"scalars": 0})  # 0: all of them
        found.Reload()
        return {(name, event.step) for name in found.Tags()["scalars"] for event in found.Scalars(name)}

    def write_points(self, points: Points) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to load

        self.writer = self.writer or SummaryWriter(str(self.folder))
        for (name, step), value in points.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        if self.writer is not None:
            self.writer.close()


class MLflow:
    """A run in MLflow's own store: MLFLOW_TRACKING_URI, or mlflow.db where the first command was given.

    Which run it is stands in the folder's mlflow.json; a store that the environment names is not noted there: its
    address may hold a password.
    """

    def __init__(self, folder: Path, name: str, parameters: Mapping[str, object]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else it reports its use to its makers
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        self.noted = folder / "mlflow.json"
        kept = self._find_run()
        own = None if os.environ.get("MLFLOW_TRACKING_URI") else f"sqlite:///{Path('mlflow.db').resolve()}"
        self.store = own and (kept.get("store") or own)
        try:
            self.client = MlflowClient(self.store)
            self.id = kept.get("run_id") or self._create_run(name, parameters)
            self.open = self.client.get_run(self.id).info.status == "RUNNING"
        except Exception as error:  # of MLflow, of the database, of the way to it
            raise StoreError(
                f"MLflow's store cannot be used, or does not have the run that {self.noted} names "
                f"({str(error).splitlines()[0]}); set MLFLOW_TRACKING_URI as when the run began, or leave mlflow out"
            ) from error

    def _find_run(self) -> dict[str, str]:
        try:
            found: dict[str, str] = json.loads(self.noted.read_text()) if self.noted.exists() else {}
            return {key: str(found[key]) for key in ("run_id", "store") if found.get(key)}
        except (OSError, ValueError, AttributeError) as error:
            raise StoreError(f"{self.noted} is damaged ({error}); remove it to track this run anew") from error

    def _create_run(self, name: str, parameters: Mapping[str, object]) -> str:
        label = os.environ.get("MLFLOW_EXPERIMENT_NAME", "polyclinic")
        known = self.client.get_experiment_by_name(label)
        experiment = known.experiment_id if known else self.client.create_experiment(label)
        begun: str = self.client.create_run(experiment, run_name=name).info.run_id
        write_json(self.noted, {"run_id": begun, "store": self.store})
        for key, value in parameters.items():
            self.client.log_param(begun, key, value)
        return begun

    def written_points(self) -> set[tuple[str, int]]:
        names = self.client.get_run(self.id).data.metrics
        return {(name, found.step) for name in names for found in self.client.get_metric_history(self.id, name)}

    def write_points(self, points: Points) -> None:
        from mlflow.entities import Metric

        if not self.open:
            self.client.update_run(self.id, status="RUNNING")
        self.open, now = True, time.time_ns() // 1_000_000
        new = [Metric(name, value, now, step) for (name, step), value in points.items()]
        for start in range(0, len(new), AT_ONCE):
            self.client.log_batch(self.id, new[start : start + AT_ONCE])

    def close(self, finished: bool) -> None:
        if self.open:
            self.client.set_terminated(self.id, "FINISHED" if finished else "FAILED")
