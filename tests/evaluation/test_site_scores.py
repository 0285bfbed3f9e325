"""What sites' own scores tell of all images together: exact where counts and means give it, said where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    roc_auc_score,
)

from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.evaluation.assessment import assess_predictions, assess_site, choose_model
from polyclinic.evaluation.site_scores import (
    MOST_CLASSES,
    FinalScores,
    build_final_scores,
    merge_final_scores,
    merge_part_scores,
)
from polyclinic.evaluation.summary import ModelScores, PartScores, SiteScores
from polyclinic.evaluation.task import CLASSIFICATION, confusion_of
from tests.summaries import make_scores

STREAM = Stream(0, ("bootstrap",))


def predictions(seed: int, images: int, classes: int, skew: float = 0.0) -> Bundle:
    """Random predictions of one model on test images; `skew` shifts all of a site's scores of the last class."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(images, classes))
    logits[:, -1] += skew
    labels = rng.integers(0, classes, images)
    labels[:classes] = np.arange(classes)[:images]
    table = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    columns = {"probabilities": table, "labels": labels, "patients": np.arange(images)}
    return {"global|test": {name: torch.from_numpy(values) for name, values in columns.items()}}


def told(site: str, found: Bundle) -> FinalScores:
    return build_final_scores(CLASSIFICATION, assess_site(CLASSIFICATION, found, site, (), 0, STREAM))


def merged(sites: dict[str, Bundle]) -> PartScores:
    found = merge_final_scores(CLASSIFICATION, {site: told(site, one) for site, one in sites.items()})
    return found.merged["global"]["test"]


def pooled(sites: dict[str, Bundle]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    tables = [found["global|test"] for found in sites.values()]
    return tuple(np.concatenate([one[name].numpy() for one in tables]) for name in ("labels", "probabilities"))  # type: ignore[return-value]


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 4), st.lists(st.integers(4, 40), min_size=1, max_size=5), st.integers(0, 10**6))
def test_counts_and_means_of_sites_give_the_figures_of_all_images(classes: int, sizes: list[int], seed: int) -> None:
    """Against scikit-learn, which sees all images at once."""
    sites = {f"s{place}": predictions(seed + place, n, classes) for place, n in enumerate(sizes)}
    found, (labels, table) = merged(sites), pooled(sites)
    called = table.argmax(1)
    assert found.n == len(labels)
    assert found.value("accuracy") == pytest.approx(accuracy_score(labels, called))
    assert found.value("balanced_accuracy") == pytest.approx(balanced_accuracy_score(labels, called))
    assert found.value("loss") == pytest.approx(log_loss(labels, table, labels=range(classes)))
    assert found.value("f1_macro") == pytest.approx(f1_score(labels, called, average="macro"))
    assert found.value("f1_weighted") == pytest.approx(f1_score(labels, called, average="weighted"))
    assert found.value("recall_macro") == pytest.approx(recall_score(labels, called, average="macro"))
    assert found.value("precision_macro") == pytest.approx(
        precision_score(labels, called, average="macro", zero_division=0)
    )
    if classes == 2:
        assert found.value("recall") == pytest.approx(recall_score(labels, called))
        assert found.value("specificity") == pytest.approx(recall_score(labels, called, pos_label=0))
    exact = assess_predictions(CLASSIFICATION, sites, None, 0, STREAM).merged["global"]["test"]
    assert confusion_of(found) == confusion_of(exact)
    assert found.value("ece") >= exact.value("ece") - 1e-12, "a mean of sites' calibration errors is never better"


def test_the_auc_is_the_mean_of_the_sites_and_not_that_of_all_images() -> None:
    """Two sites that each rank perfectly, on scales that do not fit: of all images together the ranking is worse."""
    sites = {"a": predictions(1, 30, 2, skew=4.0), "b": predictions(2, 10, 2, skew=-4.0)}
    found, (labels, table) = merged(sites), pooled(sites)
    own = {
        site: roc_auc_score(one["global|test"]["labels"], one["global|test"]["probabilities"][:, 1])
        for site, one in sites.items()
    }
    assert found.value("auc") == pytest.approx((30 * own["a"] + 10 * own["b"]) / 40)
    assert abs(found.value("auc") - roc_auc_score(labels, table[:, 1])) > 0.01
    assert found["auc"].low is None
    assert {info.name for info in CLASSIFICATION.metrics if info.pooled_by == "sites"} == {"auc", "pr_auc", "ece"}


def test_a_site_where_a_metric_is_undefined_is_left_out_of_its_mean() -> None:
    pool = [make_scores(30, auc=None, accuracy=0.5), make_scores(10, auc=0.75, accuracy=1.0)]
    found = merge_part_scores(CLASSIFICATION, pool)
    assert (found.n, found["auc"].value, found["accuracy"].value) == (40, 0.75, 0.625)
    assert merge_part_scores(CLASSIFICATION, [make_scores(3, auc=None)])["auc"].value is None


def test_counts_of_very_many_classes_stay_at_the_site() -> None:
    few, many = (told("s", predictions(0, 60, classes)) for classes in (MOST_CLASSES, MOST_CLASSES + 1))
    assert confusion_of(few.models["global"]["test"]) is not None
    assert many.models["global"]["test"].details == {}
    assert many.models["global"]["test"].metrics.keys() == few.models["global"]["test"].metrics.keys()


def test_summaries_hold_details_of_test_images_only() -> None:
    found: Bundle = {f"global|{part}": predictions(3, 8, 2)["global|test"] for part in ("train", "validation", "test")}
    scores = told("s", found)
    assert all(one.details for one in scores.models["global"].values()), "all parts are merged from counts"
    kept = merge_final_scores(CLASSIFICATION, {"s": scores})
    assert kept.sites == assess_predictions(CLASSIFICATION, {"s": found}, None, 0, STREAM).sites
    assert [part for part, one in kept.merged["global"].items() if one.details] == ["test"]


def test_the_judged_model_is_the_wanted_one_or_the_first_that_was_tested() -> None:
    tested: ModelScores = {"test": make_scores()}
    scores: SiteScores = {"global": tested, "personal": tested, "student": {"train": make_scores()}}
    assert choose_model(scores, "test") == "personal"
    assert choose_model(scores, "test", "global") == "global"
    assert choose_model(scores, "test", "student") == "personal"
    assert choose_model({}, "test") is None
