"""Calibration of probabilities by temperature scaling.

C. Guo, G. Pleiss, Y. Sun, K. Q. Weinberger: "On Calibration of Modern Neural Networks", ICML 2017, section 4.2:

    (9)  q = softmax(z / T)        z: the logits; T > 0 is fitted by the loss (NLL) of q on validation images

T above 1 lowers the confidence of a network, T below 1 raises it; predicted classes and accuracy do not change.
The loss is convex in 1/T, so that a bounded search finds the one minimum. Logits may be log-probabilities: they differ
by a constant for each image, which softmax takes out. So an ensemble has a temperature, too, and kept probabilities do.

A temperature holds for images like those that it was fitted on. Under a privacy plan it is a number computed from
validation images as they are, outside the claim.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from polyclinic.core import Part, SiteId
from polyclinic.evaluation.metrics import Floats, Predictions, measure

LOWEST, HIGHEST = 0.05, 20.0
"""Where T is looked for. At an end of it nothing was found."""
FEWEST = 20
"""Validation images; a temperature fitted on fewer is unreliable."""


@dataclass(frozen=True)
class Calibration:
    """A temperature, with loss and calibration error before and after it."""

    temperature: float
    images: int
    """Validation images, of all sites that the model is for."""
    loss: tuple[float, float]
    """Before and after, as is the calibration error, on the same images."""
    ece: tuple[float, float]
    test_images: int = 0
    test_ece: tuple[float, float] | None = None
    """On test images, which it was not fitted on; None if no test predictions were kept."""


@dataclass(frozen=True)
class Uncalibrated:
    """Why there is no temperature, in words that end a sentence."""

    reason: str


def apply_temperature(logits: Floats, temperature: float) -> Floats:
    """(9)"""
    return np.asarray(softmax(np.asarray(logits, dtype=np.float64) / temperature, axis=-1), dtype=np.float64)


def fit_temperature(logits: Floats, labels: NDArray[np.integer[Any]]) -> float:
    """T with the least loss, between `LOWEST` and `HIGHEST`."""
    values, rows = np.asarray(logits, dtype=np.float64), np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(values / math.exp(log_temperature), axis=-1)[rows, labels].mean())

    bounds = (math.log(LOWEST), math.log(HIGHEST))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-7})
    return math.exp(float(found.x))


def calibrate(validation: Predictions, test: Predictions | None = None) -> Calibration | Uncalibrated:
    """Fit the temperature of a model on its predictions of validation images."""
    if len(validation) < FEWEST:
        return Uncalibrated(f"{len(validation)} validation images are too few for a temperature ({FEWEST} are needed)")
    logits = log_probabilities(validation.probabilities)
    of_truth = logits[np.arange(len(validation)), validation.labels]
    if (of_truth >= logits.max(axis=1)).all():  # the surer, the better: the loss has no minimum
        return Uncalibrated(
            f"the model is right on all its {len(validation)} validation images, which tell no temperature"
        )
    temperature = fit_temperature(logits, validation.labels)
    if not LOWEST * 1.001 < temperature < HIGHEST / 1.001:
        return Uncalibrated(
            f"no temperature from {LOWEST:g} to {HIGHEST:g} is best for its {len(validation)} validation images, of "
            "which its probabilities tell no more than guesses"
        )
    found = Calibration(temperature, len(validation), *_loss_and_ece(validation, temperature))
    return (
        found if test is None else replace(found, test_images=len(test), test_ece=_loss_and_ece(test, temperature)[1])
    )


def log_probabilities(probabilities: NDArray[np.floating[Any]]) -> Floats:
    """Log-probabilities; a probability stored as 0 counts as the smallest positive number of single precision."""
    least = float(np.finfo(np.float32).smallest_subnormal)
    found: Floats = np.log(np.maximum(np.asarray(probabilities, dtype=np.float64), least))
    return found


def _loss_and_ece(predictions: Predictions, temperature: float) -> tuple[tuple[float, float], tuple[float, float]]:
    before = measure(predictions.probabilities, predictions.labels)
    after = measure(apply_temperature(log_probabilities(predictions.probabilities), temperature), predictions.labels)
    return (before["loss"], after["loss"]), (before["ece"], after["ece"])


def merge_part(
    kept: Mapping[tuple[SiteId, str, str], Predictions], sites: Collection[SiteId], model: str, part: Part
) -> Predictions | None:
    """Merge a model's predictions of one part over all `sites`; None where there are none."""
    found = [kept[site, model, part] for site in sites if (site, model, part) in kept]
    return Predictions.merge(found) if found else None
