"""Predictions that are kept beside a run come back by site, model and part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic.core.errors import StoreError
from polyclinic.core.types import Tensors
from polyclinic.evaluation.metrics import Predictions
from polyclinic.storage.predictions import load_predictions, save_predictions


def rows(*scores: float) -> Tensors:
    """Each site numbers its patients from 0."""
    second = torch.tensor(scores, dtype=torch.float64)
    labels = torch.arange(len(scores)) % 2
    return {
        "probabilities": torch.stack([1 - second, second], 1),
        "labels": labels,
        "patients": torch.arange(len(scores)),
    }


def test_patients_of_two_sites_stay_different_people(tmp_path: Path) -> None:
    path = tmp_path / "predictions.safetensors"
    groups = {"global|validation": rows(0.5), "global|test": rows(0.25, 0.75), "global|train": rows(0.1)}
    save_predictions(path, {"north": groups, "south": groups}, None)
    found = load_predictions(path)
    assert set(found) == {(site, "global", part) for site in ("north", "south") for part in ("validation", "test")}
    north, south = found["north", "global", "test"], found["south", "global", "test"]
    assert np.array_equal(north.probabilities, south.probabilities)
    assert north.patients is not None
    assert south.patients is not None
    assert not set(north.patients) & set(south.patients)
    _, patients = Predictions.merge([north, south]).patient_numbers
    assert patients == 4


def test_where_none_are_kept_none_are_found(tmp_path: Path) -> None:
    path = tmp_path / "predictions.safetensors"
    save_predictions(path, {"north": {"global|train": rows(0.5)}}, None)
    assert not path.exists()
    assert load_predictions(path) == {}


def test_damaged_predictions_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "predictions.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(StoreError, match=r"predictions\.safetensors is damaged .*remove it"):
        load_predictions(path)
