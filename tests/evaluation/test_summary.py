"""The summary of a run: it comes back from JSON as it was written, and refuses what it does not know."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from polyclinic.core.errors import StoreError
from polyclinic.evaluation.summary import RunSummary, package_versions
from polyclinic.evaluation.task import class_names, confusion_of, task_of
from polyclinic.storage.run_folder import RunFolder
from tests.summaries import Sites, make_headline, make_scores, make_summary


def test_a_summary_comes_back_from_its_file(tmp_path: Path) -> None:
    sites = {"north": {"global": {"test": make_scores(4, {"confusion": [[1, 1], [0, 2]]}, auc=(0.8, 0.6, 0.9))}}}
    summary = make_summary(
        make_headline(n=4, auc=None), sites, progress={"": [(0, 0.5)]}, public={"global": make_scores()}
    )
    folder = RunFolder(tmp_path)
    folder.write_summary(summary)
    assert folder.read_summary() == summary
    assert RunSummary.model_validate(json.loads(folder.result.read_text())) == summary


def test_a_metric_that_was_not_measured_is_nan_as_a_number() -> None:
    scores = make_scores(auc=None, accuracy=(0.5, 0.4, 0.6))
    assert math.isnan(scores.value("auc"))
    assert math.isnan(scores.value("never heard of"))
    assert all(map(math.isnan, scores.interval("auc")))
    assert (scores.value("accuracy"), scores.interval("accuracy")) == (0.5, (0.4, 0.6))


def test_the_headline_at_a_site_is_about_the_same_model_and_part() -> None:
    sites: Sites = {
        "north": {"global": {"test": make_scores(accuracy=0.25)}, "x": {"test": make_scores()}},
        "south": {"x": {}},
    }
    summary = make_summary(make_headline(accuracy=0.5), sites)
    here = summary.headline_at("north")
    assert here is not None
    assert here.value("accuracy") == 0.25
    assert summary.headline_at("south") is None
    assert summary.headline_at("nowhere") is None
    assert make_headline("held-out", of="student").images == "held-out test images"
    assert make_headline("held-out", of="student").model_description == "the server's student"
    assert make_headline(part="validation").images == "validation images of all sites"
    assert make_headline("high").model_description == "cluster high's model"


def test_what_belongs_to_the_task_lies_in_details() -> None:
    summary = make_summary()
    assert class_names(summary) == ("no", "yes")
    assert class_names(make_summary(details={})) == ()
    assert confusion_of(make_scores(details={"confusion": [[1, 0], [0, 2]]})) == [[1, 0], [0, 2]]
    assert confusion_of(make_scores()) is None
    assert task_of(summary).name == "classification"


def test_an_unknown_key_is_refused() -> None:
    fields = json.loads(make_summary().model_dump_json())
    with pytest.raises(ValidationError, match="hospitals"):
        RunSummary.model_validate({**fields, "hospitals": []})


def test_a_summary_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for version in ({}, {"schema_version": 1}, {"schema_version": 3}):
        folder.result.write_text(json.dumps({"headline": {}, **version}))
        with pytest.raises(StoreError, match=r"another version of polyclinic .*remove it and run `polyclinic resume"):
            folder.read_summary()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"x"', '{"schema_version": 2}', '{"schema_version": 2, "seed": "x"}']
)
def test_a_damaged_summary_is_one_sentence(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    folder.result.write_text(content)
    with pytest.raises(StoreError, match=r"result\.json is damaged .*remove it and run again") as error:
        folder.read_summary()
    assert "\n" not in str(error.value)


def test_versions_name_what_figures_depend_on() -> None:
    assert {"python", "torch", "polyclinic", "numpy"} <= set(package_versions())
    assert package_versions()["torch"] == torch.__version__
