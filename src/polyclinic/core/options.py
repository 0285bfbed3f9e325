"""Options of local training that all algorithms share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from polyclinic.core.errors import RecipeError
from polyclinic.core.types import Precision
from polyclinic.core.validation import PositiveShare, Share, check_options

Count = Annotated[int, Field(ge=1)]
BatchSize = Annotated[int, Field(ge=1, le=1_000_000)]


@dataclass(frozen=True)
class Optimiser:
    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0, le=1e6)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


@dataclass(frozen=True)
class Augment:
    """Random augmentation of training images, drawn anew for every image in every step; evaluation has none."""

    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    """The largest rotation in degrees, either way."""
    flip: bool = False
    """Whether half of the images are flipped left to right."""
    brightness: Annotated[float, Field(ge=0, le=10)] = 0.0
    """The largest shift of brightness, in standard deviations of the image."""
    contrast: Share = 0.0
    """The largest relative change of deviations from the image's mean."""
    crop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The largest share of the sides that is cut off, at a random place, before the rest is enlarged."""
    blur: Annotated[float, Field(ge=0, le=20)] = 0.0
    """The largest σ of a Gaussian blur, in pixels."""


@dataclass(frozen=True)
class Private:
    """DP-SGD (Abadi et al. 2016): each example's gradient is clipped, and noise is added to the sum in every step."""

    clip: float
    """C, the largest norm of an example's gradient; infinity clips nothing."""
    noise: float
    """σ: the standard deviation of the noise on the sum, in units of C."""
    sampling: Literal["poisson", "shuffle"] = "poisson"
    """poisson: every example joins a step independently with probability batch / n, as accountants assume."""
    views: int = 1
    """So many augmentations of an example, whose mean gradient is clipped."""
    normalise: bool = False
    """Whether every gradient is scaled to (almost) length C, short ones too: automatic clipping."""
    unit: Literal["image", "patient"] = "image"
    """What joins a step, and whose mean gradient is clipped: an image, or a patient with all training images."""


@dataclass(frozen=True)
class CurriculumOptions:
    """The order of examples within an epoch (`polyclinic.algorithms.wrappers.curriculum`)."""

    by: Literal["random", "forgotten", "hard", "easy"] = "random"
    strength: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """How many times more likely the top-ranked example is to be drawn next than the bottom-ranked one."""
    warmup_rounds: Count = 1
    """Number of first rounds in random order."""


@dataclass(frozen=True)
class Training:
    """Options of the local training of all algorithms."""

    optimiser: Optimiser = Optimiser()
    batch: BatchSize | None = 32
    batches: BatchSize | None = None
    """The number of batches per epoch at every site, instead of `batch` (which is then None)."""
    epochs: Count | None = 1
    steps: Count | None = None
    """Steps per round, which continue through the epochs, instead of `epochs` (which is then None)."""
    first_epochs: Count | None = None
    """Epochs of round 1, before sites have been averaged (local pretraining). None: as in every round."""
    weights: Literal["examples", "uniform"] = "examples"
    fine_tune: PositiveShare = 1.0
    """The share of layers, nearest the output, that is trained; the rest is frozen, with BatchNorm in eval mode."""
    oversample: bool = False
    """Whether examples of minority classes are repeated until all classes are equally frequent."""
    augment: Augment | None = None
    """The augmentation of training images; None: no augmentation."""
    curriculum: CurriculumOptions = CurriculumOptions()
    """The order of examples within an epoch."""
    precision: Precision = "float32"
    """The precision of forward passes in training; weights, gradients, losses and evaluation are always float32."""
    private: Private | None = None
    """Set by the privacy plan of a recipe, never by hand, since the plan prices it."""

    def batch_size(self, examples: int) -> int:
        """Return the batch size of a site: `batch`, or ⌊n / `batches`⌋ but at least 2. Remaining examples make more."""
        return self.batch or max(2, examples // (self.batches or 1))


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
