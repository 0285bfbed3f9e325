"""A small real task: 1,797 digits of 8 × 8 pixels, most of them private, some public."""

from __future__ import annotations

from functools import cache

import torch

from polyclinic.algorithms.distillation import RefinementOptions, Teacher
from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.data.builtin.digits import CLASSES, DigitsOptions, load_digit_images
from polyclinic.data.examples import Images, SiteData
from polyclinic.models import build_model
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights

SEED = Stream(11)
QUICK = RefinementOptions(batch=32, lr=3e-3, augment=None)
"""A digit that is flipped is no longer one."""


@cache
def parts() -> tuple[Images, ...]:
    """Two hospitals' images, then the public parts: training, validation, test."""
    images = load_digit_images(DigitsOptions(), SEED).to_images()
    mixed = torch.randperm(len(images), generator=SEED.child("parts").generator())
    return tuple(images.subset(rows) for rows in torch.split(mixed[:1600], [500, 500, 250, 100, 250]))


def public() -> SiteData:
    return SiteData("public", *parts()[2:])


def network(name: str, seed: str = "network", dropout: float | None = None) -> LiveNetwork:
    size = {"classes": len(CLASSES), "channels": 1, "size": 8}
    return LiveNetwork(build_model(name, **size, dropout=dropout, seed=SEED.child(seed)))


@cache
def taught(name: str, which: int) -> Teacher:
    """A network that learnt from one hospital's images."""
    data, blank = parts()[which], network(name, f"teacher {which}")
    training = Training(Optimiser("adam"), batch=32, epochs=10)
    job = Fit(copy_module_weights(blank.module), task_loss, training)
    return Teacher(f"{name} {which}", blank, fit(job, blank, data, Site("any", len(data), 1, 1, 3e-3), SEED).weights)


def good() -> list[Teacher]:
    return [taught("cnn_c", 0), taught("mlp", 1)]


def untrained(loudness: float = 1.0) -> Teacher:
    blank = network("mlp", "untrained")
    weights = copy_module_weights(blank.module)
    loud = {name: loudness * tensor for name, tensor in weights["model"].items()}
    return Teacher("untrained", blank, {**weights, "model": loud})


def accuracy(teacher: Teacher, data: Images | None = None) -> float:
    data = data or parts()[4]
    images, labels = data.batch(torch.arange(len(data)))
    return float((teacher.logits(images).argmax(-1).cpu() == labels).double().mean())
