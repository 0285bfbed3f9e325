"""Jobs for a site that has sixteen examples."""

from __future__ import annotations

from dataclasses import replace

from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Training
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights


def at_round(round: int, lr: float = 0.1) -> Site:
    return Site("here", 16, round, 10, lr)


def job(network: LiveNetwork, training: Training, **options: object) -> Fit:
    return replace(Fit(copy_module_weights(network.module), task_loss, training), **options)  # type: ignore[arg-type]
