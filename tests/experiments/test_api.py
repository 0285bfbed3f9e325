"""The functions that `polyclinic` offers give what the packages behind them give."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import polyclinic as pc
from polyclinic.analysis.predict import Prediction, UnreadableFile
from polyclinic.experiments.api import ComparisonResult
from tests.small import TINY, tiny

METHODS = {"FedAvg": {}, "Local": {"algorithm": "local"}}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> ComparisonResult:
    recipe = pc.Recipe.from_values({**TINY, "rounds": 1, "methods": METHODS})
    return pc.compare([recipe], seeds=2, out=tmp_path_factory.mktemp("compared"))


def test_a_comparison_has_a_table_tests_and_a_report(comparison: ComparisonResult) -> None:
    assert [(row.name, row.seeds) for row in comparison.table] == [("FedAvg", 2), ("Local", 2)]
    (test,) = comparison.tests
    assert {test.a, test.b} == set(METHODS)
    assert comparison.failures == ()
    page = comparison.report(comparison.folder / "pages" / "page.html")
    assert "FedAvg" in page.read_text(encoding="utf-8")


def test_a_report_is_written_of_folders_by_their_names(
    comparison: ComparisonResult,
    tmp_path: Path,
) -> None:
    pc.report([str(comparison.folder)], str(tmp_path / "deep" / "report.html"))
    assert (tmp_path / "deep" / "report.html").read_bytes() == comparison.report(tmp_path / "b.html").read_bytes()


def test_a_run_is_opened_with_its_recipe_summary_rows_and_models(tmp_path: Path) -> None:
    result = pc.run(tiny(algorithm="fedper", model="cnn_c"), tmp_path / "run")
    assert isinstance(result, pc.RunResult)
    run = pc.open_run(str(tmp_path / "run"))
    assert (run.recipe.name, run.folder) == ("tiny", tmp_path / "run")
    assert run.summary == result.summary
    assert [row.round for row in run.ledger if row.event == "round"] == [1, 2]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(run.metrics) == len(list(map(json.loads, lines)))
    assert run.model("site-2").site == "site-2"
    with pytest.raises(pc.RecipeError, match="no site of this run"):
        run.model("site-9")


def test_a_run_predicts_files_and_names_those_that_it_cannot_read(tmp_path: Path) -> None:
    pc.run(tiny(), tmp_path / "run")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "scan.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    found = pc.predict(pc.open_run(tmp_path / "run"), [tmp_path / "scan.png", str(tmp_path / "bad.png")])
    good, bad = found
    assert isinstance(good, Prediction)
    assert isinstance(bad, UnreadableFile)
    assert (good.file.name, bad.file.name) == ("scan.png", "bad.png")
    assert good.probabilities.sum() == pytest.approx(1)
    assert good.calibrated is not None, "by the predictions that the run kept"


def test_a_plan_is_priced_without_training_and_none_without_privacy() -> None:
    assert pc.plan(tiny()) is None
    plan = pc.plan(tiny(privacy={"epsilon": 3.0, "delta": 1e-4}))
    assert plan is not None
    assert 0 < plan.epsilon <= 3


def test_data_are_checked_by_path_and_by_name(tmp_path: Path) -> None:
    for label in ("benign", "malignant"):
        (tmp_path / label).mkdir()
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    found = pc.check_data(str(tmp_path))
    assert found.images == 24
    assert dict(found.classes) == {"benign": 12, "malignant": 12}
    assert found.findings, "every image is there twice, under two labels"
    with pytest.raises(pc.DataError, match="no dataset and no path"):
        pc.check_data("nowhere")
