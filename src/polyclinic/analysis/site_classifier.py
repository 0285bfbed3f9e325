"""How well a fresh classifier tells from features which site an image is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from polyclinic.core.contract import Stream

if TYPE_CHECKING:
    from polyclinic.analysis.features import FeaturePoints

FOLDS = 5


def classify_sites(points: FeaturePoints, stream: Stream) -> float | None:
    """Balanced accuracy of a logistic regression on frozen features, at patients it did not see; 1/sites is chance.

    Every site counts alike, whatever its size. None where fewer than two sites have a patient for every fold.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

    patients = [len(np.unique(points.patient[points.site == site])) for site in range(points.site.max() + 1)]
    able = np.flatnonzero(np.array(patients) >= FOLDS)
    rows = np.flatnonzero(np.isin(points.site, able))
    if len(able) < 2:
        return None
    here = points.select_rows(rows)
    values = here.values - here.values.mean(axis=0)
    values /= np.sqrt((values**2).mean())  # one scale for all: moving or turning features changes nothing
    classifier = LogisticRegression(class_weight="balanced", max_iter=2000)
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=stream.integer() % 2**32)
    guessed = cross_val_predict(classifier, values, here.site, groups=here.patient, cv=folds)
    return float(balanced_accuracy_score(here.site, guessed))
