"""Methods side by side: the grid, what is not repeated, and figures worked out by hand."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
import scipy.stats

from polyclinic import Recipe, run
from polyclinic.core.errors import RecipeError, StoreError
from polyclinic.core.names import slugify
from polyclinic.evaluation.comparison import Comparison, MetricEstimate, summarise_methods
from polyclinic.evaluation.rounds import final_rows, metric_over_rounds
from polyclinic.experiments.compare import compare, compare_folders, expand_grid
from polyclinic.experiments.reproduce import SEEDS, paper_recipes, reproduce, write_page
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_results_page
from polyclinic.storage.run_folder import RunFolder
from tests.small import SITES, tiny
from tests.summaries import make_headline, make_summary

METHODS = {"FedAvg": {}, "Local": {"algorithm": "local"}, "Centralised": {"algorithm": "centralised"}}
T_TWO_DEGREES = 4.302653
"""Student's 97.5 % quantile with two degrees of freedom, from a table."""


class Watcher:
    """Counts rounds that were really played, and notes which runs began."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.played, self.begun, self.stop_at = 0, list[tuple[str, int, int, int]](), stop_at

    def watch(self, event: str, info: Mapping[str, Any]) -> None:
        self.played += event == "round done"
        if self.played >= self.stop_at:
            raise KeyboardInterrupt

    def begin(self, recipe: Recipe, done: int, total: int) -> None:
        self.begun.append((recipe.name, recipe.seed, done, total))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("compare") / "out"
    return compare([tiny(methods=METHODS, paper={"FedAvg": "0.9"}, about="Small.")], 3, out)


def test_the_grid_is_every_method_with_every_seed() -> None:
    found = expand_grid([tiny(methods=METHODS, seed=5)], 2)
    assert {name: [recipe.seed for recipe in runs] for name, runs in found.items()} == {
        name: [5, 6] for name in METHODS
    }
    assert [recipe.algorithm.name for recipe in found["Local"]] == ["local", "local"]
    assert list(expand_grid([tiny(), tiny(name="other")], 1)) == ["tiny", "other"]


@pytest.mark.parametrize("names", [("FedAvg", "fedavg"), ("a b", "a-b"), ("tiny", "tiny")])
def test_two_methods_that_would_share_a_folder_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(RecipeError, match="a name of its own"):
        expand_grid([tiny(name=name) for name in names], 1)


def test_figures_are_mean_deviation_and_students_interval(compared: Comparison) -> None:
    for line in compared.lines:
        for metric in ("accuracy", "balanced_accuracy", "auc"):
            values = [result.headline.scores.value(metric) for result in compared.results[line.name]]
            figure = line.figures[metric]
            half = T_TWO_DEGREES * statistics.stdev(values) / math.sqrt(3)
            assert figure.mean == pytest.approx(statistics.mean(values))
            assert figure.std == pytest.approx(statistics.stdev(values))
            assert (figure.low, figure.high) == pytest.approx((figure.mean - half, figure.mean + half), abs=1e-6)
        assert line.seeds == 3


def test_costs_and_drift_are_means_over_seeds(compared: Comparison) -> None:
    line, results = compared.lines[0], compared.results["FedAvg"]
    assert line.seconds == pytest.approx(statistics.mean(r.cost.seconds for r in results))
    sent = [(r.cost.bytes_up + r.cost.bytes_down) / 1e6 for r in results]
    assert line.megabytes == pytest.approx(statistics.mean(sent))
    assert line.drift == pytest.approx(statistics.mean(r.drift[site] for r in results for site in SITES))
    assert math.isnan(compared.lines[2].drift), "centralised training has no drift"
    assert [line.pools_images for line in compared.lines] == [False, False, True]


def test_the_hospital_served_worst_has_the_lowest_mean_auc(compared: Comparison) -> None:
    line, results = compared.lines[0], compared.results["FedAvg"]
    means = {s: statistics.mean(r.sites[s]["global"]["test"].value("auc") for r in results) for s in SITES}
    assert line.worst_site == min(SITES, key=means.__getitem__)
    assert line.worst_score == pytest.approx(min(means.values()))


def test_with_one_seed_the_interval_is_the_bootstraps() -> None:
    result = make_summary(make_headline(accuracy=(0.9, 0.8, 0.95), auc=None))
    assert MetricEstimate.estimate([result], "accuracy") == MetricEstimate(0.9, 0.8, 0.95)
    undefined = MetricEstimate.estimate([result], "auc")
    assert all(math.isnan(value) for value in (undefined.mean, undefined.low, undefined.high))


def test_a_comparison_writes_report_pictures_and_json(compared: Comparison) -> None:
    out = compared.folder
    assert out is not None
    written = {"report.md", "report-figures", "runs.json", "comparison.json", "fedavg", "local", "centralised"}
    assert {path.name for path in out.iterdir()} == written
    charts = list((out / "report-figures").iterdir())
    assert charts
    assert all(fromstring(chart.read_text()).tag.endswith("svg") for chart in charts)
    found = json.loads((out / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert [method["name"] for method in found["methods"]] == list(METHODS)
    assert found["methods"][0]["figures"]["auc"]["mean"] == compared.lines[0].figures["auc"].mean
    assert found["methods"][2]["drift"] is None


def test_the_report_is_a_table_with_everything(compared: Comparison) -> None:
    text = to_markdown(build_results_page(compared))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, methods = rows[0], rows[1:4]
    assert {len(row) for row in rows[:4]} == {len(head)} == {11}
    assert head[-1] == "paper"
    assert [row[-1] for row in methods] == ["0.9", "–", "–"]
    assert methods[2][head.index("MB sent")] == "images"
    figure = compared.lines[0].figures["accuracy"]
    assert methods[0][head.index("accuracy")] == (
        f"{figure.mean:.3f} ± {figure.std:.3f} [{figure.low:.3f}, {figure.high:.3f}]"
    )
    assert "3 seeds (Student)" in text
    assert "Small." in text
    assert "nan" not in text.lower()
    assert sum(f"| {site} |" in text for site in SITES) == 3


def test_a_bar_in_a_name_does_not_break_the_table(compared: Comparison) -> None:
    results = {"a|b": compared.results["FedAvg"]}
    text = to_markdown(build_results_page(Comparison("x", tuple(summarise_methods(results)), results, None)))
    assert "| a\\|b |" in text


def test_curves_go_from_the_start_to_the_final_model(compared: Comparison) -> None:
    assert compared.folder is not None
    result, folder = compared.results["FedAvg"][0], compared.folder / "fedavg" / "seed-0"
    curve = metric_over_rounds([*RunFolder(folder).metrics(), *final_rows(result)], "accuracy")
    assert list(curve) == [0, 1, 2]
    assert curve[2] == pytest.approx(result.merged["global"]["validation"].value("accuracy"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = [row for row in rows if row["event"] == "evaluate" and row["round"] == 0]
    right, count = sum(row["accuracy"] * row["n"] for row in first), sum(row["n"] for row in first)
    assert curve[0] == pytest.approx(right / count)


def test_a_second_call_trains_nothing_again(compared: Comparison) -> None:
    assert compared.folder is not None
    before = {path: path.stat().st_mtime_ns for path in compared.folder.rglob("seed-*/**/*")}
    watcher = Watcher()
    recipe = tiny(methods=METHODS, paper={"FedAvg": "0.9"}, about="Small.")
    again = compare([recipe], 3, compared.folder, None, watcher.watch, watcher.begin)
    assert watcher.played == 0
    assert [(done, total) for *_, done, total in watcher.begun] == [(k, 9) for k in range(9)]
    assert {path: path.stat().st_mtime_ns for path in compared.folder.rglob("seed-*/**/*")} == before
    assert again.to_json() == compared.to_json()


def test_a_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recipe, first, second = tiny(methods=METHODS), Watcher(stop_at=3), Watcher()
    with pytest.raises(KeyboardInterrupt):
        compare([recipe], 1, tmp_path / "cut", None, first.watch)
    found = compare([recipe], 1, tmp_path / "cut", None, second.watch)
    assert second.played == 6 - 2, "FedAvg had ended, Local had not come through its first round"
    whole = compare([recipe], 1, tmp_path / "whole")
    for name in METHODS:
        assert found.results[name][0].sha256 == whole.results[name][0].sha256


@pytest.mark.parametrize(
    ("settings", "told"), [({"model": "inception_v3"}, "75 pixels"), ({"cohort": 9}, "a cohort of 9")]
)
def test_a_method_that_cannot_run_is_refused_before_others_have(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    watcher = Watcher()
    with pytest.raises(RecipeError, match=told):
        compare([tiny(methods={"good": {}, "bad": settings})], 1, tmp_path / "out", None, watcher.watch)
    assert watcher.played == 0
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_comparison_is_refused_before_anything_runs(tmp_path: Path) -> None:
    compare([tiny(methods={"A": {}, "B": {"rounds": 1}})], 1, tmp_path / "out")
    (tmp_path / "out" / "a" / "seed-0" / "result.json").unlink()
    watcher = Watcher()
    with pytest.raises(StoreError, match="another recipe"):
        compare([tiny(methods={"A": {}, "B": {}})], 1, tmp_path / "out", None, watcher.watch)
    assert watcher.played == 0


def test_finished_runs_are_compared_by_folder(compared: Comparison, tmp_path: Path) -> None:
    assert compared.folder is not None
    found = compare_folders([compared.folder], tmp_path / "report")
    assert {line.name: line.figures for line in found.lines} == {line.name: line.figures for line in compared.lines}
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "report.md",
        "comparison.json",
        "report-figures",
    }


def test_runs_of_one_name_but_different_recipes_are_not_one_method(tmp_path: Path) -> None:
    """`run my.yaml --set algorithm=…` keeps the recipe's name: pooling such runs as seeds would be a lie."""
    settings: list[dict[str, Any]] = [{}, {"seed": 1}, {"algorithm": "local"}]
    folders = [tmp_path / str(number) for number in range(3)]
    for changes, folder in zip(settings, folders, strict=True):
        run(tiny(**changes), folder)
    found = compare_folders([*folders, folders[0]], None)
    assert {line.name: line.seeds for line in found.lines} == {"tiny (fedavg)": 2, "tiny (local)": 1}
    assert "or with one seed over test patients" in found.interval_description
    other = tmp_path / "other"
    run(tiny(rounds=1), other)
    assert [line.name for line in compare_folders([folders[0], other], None).lines] == [str(folders[0]), str(other)]


def test_a_folder_without_a_finished_run_says_how_to_finish_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="polyclinic resume"):
        compare_folders([tmp_path], None)


def test_methods_judged_on_different_images_are_told_apart(compared: Comparison) -> None:
    results = {name: [runs[0]] for name, runs in compared.results.items()}
    assert compared.judged_on == "test images of all sites"
    best = results["FedAvg"][0].headline.model_copy(update={"model": "held-out"})
    results["FedAvg"] = [results["FedAvg"][0].model_copy(update={"headline": best})]
    mixed = Comparison("x", tuple(summarise_methods(results)), results, None)
    assert mixed.judged_on == "held-out test images, or test images of all sites"
    assert "FedAvg is judged on held-out test images." in to_markdown(build_results_page(mixed))


@pytest.mark.parametrize(
    ("name", "part"), [("FedAvg, 5 × 2", "fedavg-5-2"), ("../../etc", "etc"), ("/", "method"), ("μ = 0.1", "μ-0-1")]
)
def test_a_name_becomes_one_part_of_a_path(name: str, part: str) -> None:
    assert slugify(name) == part


QUICK = """name: small again
rounds: 1
data: {name: digits, partition: {by: iid, sites: 2}}
model: linear
algorithm: fedavg
evaluate: {bootstrap: 0}
methods: {FedAvg: {}, Local: {algorithm: local}}
"""


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes with one paper in it, in place of ours."""
    recipes = tmp_path / "recipes"
    (recipes / "paper").mkdir(parents=True)
    (recipes / "paper" / "quick.yaml").write_text(QUICK)
    (recipes / "paper" / "table1.yaml").write_text(QUICK)
    (recipes / "paper" / "notes.md").write_text("What differs from the paper: all of it.")
    monkeypatch.setattr("polyclinic.config.bundled.recipes_folder", lambda: recipes)
    monkeypatch.setattr("polyclinic.experiments.reproduce.recipes_folder", lambda: recipes)
    return recipes


def test_a_paper_is_reproduced_in_small_and_in_full(paper: Path, tmp_path: Path) -> None:
    page, (quick,) = reproduce("paper", True, tmp_path / "quick")
    assert page == tmp_path / "quick" / "paper.md"
    assert [line.seeds for line in quick.lines] == [SEEDS, SEEDS]
    full, (table,) = reproduce("paper", False, tmp_path / "runs", results=tmp_path / "docs")
    assert full == tmp_path / "docs" / "paper.md"
    assert "What differs from the paper" in full.read_text()
    assert [line.seeds for line in table.lines] == [5, 5]
    text = full.read_text()
    full.unlink()
    rebuilt, _ = write_page("paper", False, tmp_path / "docs")
    assert rebuilt.read_text() == text, "the page follows from the kept figures alone"


def test_a_paper_we_do_not_have_is_refused(paper: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there are some for: paper"):
        paper_recipes("papers", True)
    (paper / "paper" / "quick.yaml").unlink()
    with pytest.raises(RecipeError, match="try it without --quick"):
        reproduce("paper", True, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"title": 1, "runs": {"a": [{}]}}'])
def test_a_page_is_not_made_of_damaged_figures(paper: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "paper-quick.json").write_text(content)
    with pytest.raises(StoreError, match="without --rebuild first"):
        write_page("paper", True, tmp_path)
    assert not (tmp_path / "paper.md").exists()


def test_a_method_that_diverges_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    methods = {"Mild": {}, "Wild": {"training.optimiser.lr": 1e6, "training.epochs": 5}, "Calm": {"rounds": 1}}
    comparison = compare([tiny(methods=methods)], 1, tmp_path)
    assert [line.name for line in comparison.lines] == ["Mild", "Calm"]
    assert [failure.split(",")[0] for failure in comparison.failures] == ["Wild"]
    assert "Wild, seed 0, did not end" in (tmp_path / "report.md").read_text()


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    comparison = compare([tiny(methods={"One": {}, "Two": {"rounds": 1}})], 3, tmp_path)
    one, two = ([r.headline.scores.value("accuracy") for r in comparison.results[name]] for name in ("One", "Two"))
    p = scipy.stats.ttest_rel(two, one).pvalue
    difference = sum(b - a for a, b in zip(one, two, strict=True)) / 3
    row = next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| Two | "))
    assert any(f"| Two | {difference:+.3f} [" in line and f"| {p:.3f} |" in line for line in report_lines(tmp_path)), (
        row
    )


def report_lines(folder: Path) -> list[str]:
    return (folder / "report.md").read_text().splitlines()
