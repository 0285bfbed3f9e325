"""Predicts the site of an image from its features; the more sites differ, the higher site_classifier_accuracy.

`features.py` calls it for `polyclinic features` and for claims about this metric.
"""

from __future__ import annotations

import numpy as np

from polyclinic.core import Stream
from polyclinic.data.patients import Indices
from polyclinic.evaluation.metrics import Floats

FOLDS = 5


def score_site_classifier(features: Floats, site: Indices, patient: Indices, stream: Stream) -> float | None:
    """Balanced accuracy of a logistic regression on patients it was not fitted on; chance is 1 / number of sites.

    Args:
        features: One row for each image.
        site: The number of each image's site. Every site counts alike, whatever its size.
        patient: The number of each image's patient; no patient is in two folds of the cross-validation.
        stream: Decides the folds.

    Returns:
        The accuracy; None if fewer than two sites have a patient for every fold.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

    patients = [len(np.unique(patient[site == number])) for number in range(site.max() + 1)]
    able = np.flatnonzero(np.array(patients) >= FOLDS)
    rows = np.isin(site, able)
    if len(able) < 2:
        return None
    values = features[rows] - features[rows].mean(axis=0)
    values /= np.sqrt((values**2).mean())  # one scale for all: moving or turning features changes nothing
    classifier = LogisticRegression(class_weight="balanced", max_iter=2000)
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=stream.integer() % 2**32)
    predicted = cross_val_predict(classifier, values, site[rows], groups=patient[rows], cv=folds)
    return float(balanced_accuracy_score(site[rows], predicted))
