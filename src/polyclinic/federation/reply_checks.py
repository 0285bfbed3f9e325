"""What sites report beside their updates, checked: it steers the schedule and ends up in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyclinic.core.contract import Bundle
from polyclinic.core.errors import Refused
from polyclinic.evaluation.metrics import METRICS
from polyclinic.storage import messages


def split_predictions(tensors: Mapping[str, torch.Tensor], classes: int) -> Bundle:
    """By `model|part`: probabilities, labels and patient numbers, checked against each other."""
    bundle: Bundle = {}
    for path, tensor in tensors.items():
        group, _, key = path.rpartition("|")
        bundle.setdefault(group, {})[key] = tensor
    for group, found in bundle.items():
        rows = found.get("probabilities", torch.zeros(0))
        shaped = rows.is_floating_point() and rows.ndim == 2 and rows.shape[1] == classes
        if not shaped or not bool(torch.isfinite(rows).all()):
            raise Refused("predictions", f"{group[:60]!r} are not finite probabilities of {classes} classes")
        columns = [found.get(key, torch.zeros(0)) for key in ("labels", "patients")]
        if any(c.dtype != torch.int64 or c.shape != rows.shape[:1] for c in columns):
            raise Refused("predictions", f"{group[:60]!r} has not one label and one patient per row")
    return bundle


def check_report(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A site's metrics, checked to be rows of finite numbers, one per model and part: they steer the schedule."""
    report = fields.get("report", [])
    if not isinstance(report, list) or not all(isinstance(row, dict) for row in report):
        raise Refused("report", "the report is not a list of rows")
    for row in report:
        if type(row.get("n")) is not int or not 0 <= row["n"] <= messages.EXACT:
            raise Refused("report", "a row of the report has no count")
        for name, value in row.items():
            if not _is_cell(name, value):
                raise Refused("report", f"{name[:40]!r} is not a metric with a finite value")
    if len({(row.get("model"), row.get("part")) for row in report}) < len(report):
        raise Refused("report", "two rows of the report are about the same model and part")
    return report


def _is_cell(name: str, value: object) -> bool:
    """Only what belongs into a row: it is written beside the round and the site, and must not pose as them."""
    if name in ("model", "part"):
        return isinstance(value, str) and len(value) <= 200 and value.isprintable()
    return name == "n" or (name in METRICS and (value is None or messages.is_number(value)))


def training_seconds(fields: Mapping[str, Any]) -> float:
    seconds = fields.get("seconds")
    return float(seconds) if messages.is_number(seconds) else 0.0
