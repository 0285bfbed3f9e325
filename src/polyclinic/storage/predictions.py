"""The predictions of final models, kept beside a run's result."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyclinic.core import HELD_OUT, Bundle, DataError, Refused, SiteId, StoreError
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.task import CLASSIFICATION, Task
from polyclinic.storage import messages
from polyclinic.storage.files import write_atomically


def save_predictions(path: Path, found: Mapping[SiteId, Bundle], held_out: Predictions | None) -> None:
    """Keep the final models' predictions of validation and test images, by site and `model|part`: probabilities,
    labels, patients by number. `held_out`: those of the test images that belong to no site."""
    kept = {f"{site}|{key}": group for site, groups in found.items() for key, group in groups.items()}
    kept = {key: group for key, group in kept.items() if not key.endswith("|train")}
    if held_out is not None:
        kept[f"{HELD_OUT}|{HELD_OUT}|test"] = {
            "probabilities": torch.tensor(held_out.probabilities),
            "labels": torch.tensor(held_out.labels),
            "patients": torch.arange(len(held_out)),
        }
    if kept:
        write_atomically(path, messages.encode_body(kept).data)


def load_predictions(path: Path, task: Task = CLASSIFICATION) -> dict[tuple[SiteId, str, str], Predictions]:
    """The predictions by site, model and part; {} where none were kept."""
    if not path.exists():
        return {}
    try:
        named = {tuple(key.split("|")): group for key, group in messages.unflatten(load_file(path)).items()}
        return {(site, model, part): task.read_predictions(group, site) for (site, model, part), group in named.items()}
    except (SafetensorError, OSError, KeyError, ValueError, DataError, Refused) as error:
        raise StoreError(f"{path} is damaged ({error}); remove it, and reports do without") from error
