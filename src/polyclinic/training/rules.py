"""What `training` may say in a recipe. Every problem is one sentence with the way out."""

from __future__ import annotations

from collections.abc import Iterator

from polyclinic.core.contract import Augment, Training


def find_training_problems(training: Training) -> Iterator[str]:
    options = training.optimiser
    if (training.epochs is None) == (training.steps is None):
        yield "training needs either epochs or steps: to average every τ steps write `epochs: null` and `steps: τ`"
    if 0 in (training.epochs, training.steps) or min(training.epochs or 1, training.steps or 1) < 1:
        yield "training.epochs and training.steps start at 1"
    if training.first_epochs is not None and training.first_epochs < 1:
        yield f"training.first_epochs is {training.first_epochs}; choose 1 or more, or leave it out"
    if (training.batch is None) == (training.batches is None):
        yield "training needs either batch or batches: for Q batches an epoch write `batch: null` and `batches: Q`"
    for name, size in (("batch", training.batch), ("batches", training.batches)):
        if size is not None and not 1 <= size <= 1_000_000:
            yield f"training.{name} is {size}; choose 1 to 1,000,000"
    if not 0 < training.fine_tune <= 1:
        yield f"training.fine_tune is {training.fine_tune}; choose a share in (0, 1]"
    if not 0 < options.lr <= 1e6:
        yield f"training.optimiser.lr is {options.lr}; choose a positive learning rate of at most 1e6"
    if not 0 <= options.momentum < 1:
        yield f"training.optimiser.momentum is {options.momentum}; choose one in [0, 1)"
    if options.weight_decay < 0:
        yield f"training.optimiser.weight_decay is {options.weight_decay}; choose 0 or more"
    if options.name != "sgd" and options.momentum != 0:
        yield f"{options.name} has no momentum option; leave training.optimiser.momentum at 0"
    if not 1 <= training.emphasis <= 1e6:
        yield f"training.emphasis is {training.emphasis}; choose 1 (any order) to 1e6 (nearly sorted), usually 2"
    if training.order_after < 1:
        yield f"training.order_after is {training.order_after}; the first round is in random order: choose 1 or more"
    if training.augment is not None:
        yield from _find_augment_problems(training.augment)


def _find_augment_problems(augment: Augment) -> Iterator[str]:
    if not 0 <= augment.rotation <= 180:
        yield f"training.augment.rotation is {augment.rotation}; choose 0 to 180 degrees"
    if not 0 <= augment.brightness <= 10:
        yield f"training.augment.brightness is {augment.brightness}; choose 0 to 10 standard deviations of an image"
    if not 0 <= augment.contrast <= 1:
        yield f"training.augment.contrast is {augment.contrast}; choose a share in [0, 1]"
    if not 0 <= augment.crop < 1:
        yield f"training.augment.crop is {augment.crop}; choose a share of the side in [0, 1)"
    if not 0 <= augment.blur <= 20:
        yield f"training.augment.blur is {augment.blur}; choose 0 to 20 pixels"
