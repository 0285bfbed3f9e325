"""Checks of the options in `training`: their ranges, and the rules between them."""

from polyclinic.core import RecipeError, Training, check_options


def check_training(training: Training) -> None:
    """Raise a RecipeError about the first option that is out of range or does not fit another one."""
    check_options(training, "training.")
    check_options(training.optimiser, "training.optimiser.")
    check_options(training.curriculum, "training.curriculum.")
    if training.augment is not None:
        check_options(training.augment, "training.augment.")
    if (training.epochs is None) == (training.steps is None):
        raise RecipeError(
            "training needs either epochs or steps: to average every τ steps write `epochs: null` and `steps: τ`"
        )
    if (training.batch is None) == (training.batches is None):
        raise RecipeError(
            "training needs either batch or batches: for Q batches an epoch write `batch: null` and `batches: Q`"
        )
    if training.optimiser.name != "sgd" and training.optimiser.momentum != 0:
        raise RecipeError(f"{training.optimiser.name} has no momentum option; leave training.optimiser.momentum at 0")
