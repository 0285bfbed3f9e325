"""What a person sees: everything fits eighty columns, nothing is swallowed, and a mistake comes alone."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from polyclinic import run
from polyclinic.cli.display import Display, comparison_table, result_table, strip_zeros
from polyclinic.evaluation.assessment import choose_headline
from polyclinic.evaluation.comparison import Comparison, summarise_methods
from polyclinic.evaluation.summary import Metric, ModelScores, PartScores, RunSummary
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_results_page
from tests.small import SITES, tiny
from tests.summaries import make_summary


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, height=24, force_terminal=terminal, color_system=None)


def shown(renderable: RenderableType) -> str:
    screen = console()
    screen.print(renderable)
    return text_of(screen)


def text_of(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())


@pytest.fixture(scope="module")
def summary() -> RunSummary:
    return run(tiny()).summary


def event(**info: Any) -> Mapping[str, Any]:
    return info


DONE = event(round=1, seconds=1.26, stopped=False, loss=0.5, accuracy=0.75, auc=None)


def followed(display: Display) -> None:
    display.start_run(tiny(), 0, 2)
    display.on_event("round", event(round=1, cohort=list(SITES)))
    display.on_event("site", event(round=1, site="site-1", outcome="accepted"))
    display.on_event("site", event(round=1, site="site-2", outcome="refused", why="norm: too long"))


def test_without_a_terminal_there_are_plain_lines() -> None:
    screen = console()
    with Display(screen) as display:
        followed(display)
        display.on_event("round done", DONE)
    assert text_of(screen).splitlines() == [
        "tiny, seed 0 (1 of 2)",
        "  round 1: site-2 refused: norm: too long",
        "  round 1/2  1.3 s  validation after round 0: loss 0.500, accuracy 0.750",
    ]


def test_a_cluster_without_an_update_is_reported() -> None:
    screen = console()
    with Display(screen) as display:
        followed(display)
        display.on_event("round done", {**DONE, "clusters_without_updates": ["low"]})
    description = text_of(screen).splitlines()[-1]
    assert description == "  round 1: cluster low got no update and keeps its model"


def test_nothing_is_said_before_something_happens() -> None:
    """So that the one sentence about a mistake stands alone."""
    screen = console()
    with Display(screen) as display:
        display.start_run(tiny(), 0, 1)
    assert text_of(screen) == ""


def test_the_live_panel_shows_rounds_sites_metrics_and_time_left() -> None:
    screen = console(terminal=True)
    with Display(screen) as display:
        followed(display)
        display.on_event("round done", DONE)
        display.on_event("round", event(round=2, cohort=list(SITES)))
        display.on_event("site", event(round=2, site="site-1", outcome="accepted"))
        display.bars.update(display.current, completed=1.5)
        panel = shown(display.render_panel())
    assert re.search(r"tiny .* 1/2 rounds \d:\d\d:\d\d left", panel)
    assert re.search(r"all methods .* 0/2 runs", panel)
    assert "site-1 ✓   site-2 …   site-3 …" in panel
    assert "validation after round 0: loss 0.500, accuracy 0.750" in panel
    assert max(map(len, panel.splitlines())) <= 80
    assert "site-2 refused: norm: too long" in text_of(screen), "what goes wrong stays on the screen"


def test_the_panel_tells_of_testing_and_of_early_stopping() -> None:
    screen = console(terminal=True)
    with Display(screen) as display:
        followed(display)
        display.on_event("round done", {**DONE, "stopped": True})
        display.on_event("evaluated", event(site="site-1"))
        panel = shown(display.render_panel())
    assert "testing the final model" in panel
    assert "site-1 tested" in panel
    assert "stopped early after round 1" in text_of(screen)


def test_the_panel_counts_sites_it_has_no_room_for() -> None:
    display = Display(console(terminal=True))
    display.start_run(tiny(name="a long name " * 9), 0, 1)
    display.on_event("round", event(round=1, cohort=[f"hospital-{k:03}" for k in range(200)]))
    panel = shown(display.render_panel())
    assert "and 176 more" in panel
    assert len(panel.splitlines()) < 20
    assert max(map(len, panel.splitlines())) <= 80


def test_time_left_does_not_count_runs_that_were_only_read_back() -> None:
    display = Display(console(terminal=True))
    for done in range(3):
        display.start_run(tiny(), done, 5)
    display.on_event("round", event(round=1, cohort=["a"]))
    display.on_event("round done", DONE)
    task = display.bars.tasks[0]
    assert (task.completed, task.total) == (2.5, 5)
    assert task.speed is None or task.speed * 0 == 0
    assert len(task._progress) <= 2


def test_a_run_is_shown_by_site_within_eighty_columns(summary: RunSummary) -> None:
    text = shown(result_table(summary))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("tiny: 2 rounds, test images of all sites")
    best = summary.headline.scores
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert strip_zeros(f"{best.value('accuracy'):.3f}") in rows["all"]
    for site in SITES:
        here = summary.sites[site]["global"]["test"]
        assert rows[site].split()[1:3] == [str(here.n), strip_zeros(f"{here.value('accuracy'):.3f}")]
    assert f"{(summary.cost.bytes_up + summary.cost.bytes_down) / 1e6:.1f} MB both ways" in text


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (["cancer", "none"], "sensit.: the share of none that was found; specif.: of cancer"),
        (["a", "b", "c"], "sensit., specif.: means over the classes"),
    ],
)
def test_the_table_says_of_which_class_sensitivity_is(classes: list[str], words: str) -> None:
    """Of two it is the second by name, which a class called "none" may be."""
    assert words in shown(result_table(make_summary(details={"classes": classes})))


def test_a_run_judged_on_validation_images_says_so() -> None:
    found = run(tiny(data__split={"train": 0.8, "validation": 0.2, "test": 0})).summary
    text = shown(result_table(found))
    assert "validation images of all sites" in text
    assert "bootstrap" not in text
    assert all(site in text for site in SITES)


def test_a_held_out_set_has_its_own_row(summary: RunSummary) -> None:
    held_out = summary.headline.scores.model_copy(update={"n": 777})
    found = summary.model_copy(update={"merged": {**summary.merged, "held-out": {"test": held_out}}})
    assert re.search(r"held-out +777 ", shown(result_table(found)))
    headline = found.headline.model_copy(update={"model": "held-out", "scores": held_out})
    text = shown(result_table(found.model_copy(update={"headline": headline})))
    assert "held-out test images" in text
    assert not any(site in text for site in SITES)


def scores(n: int, accuracy: float, auc: float) -> PartScores:
    return PartScores(n=n, metrics={"accuracy": Metric(value=accuracy), "auc": Metric(value=auc)})


PUBLIC = {"global": scores(91, 0.5, 0.5), "student": scores(91, 0.625, 0.875)}


def refined(summary: RunSummary, wanted: str | None) -> RunSummary:
    """The same run, had it made a student."""
    student: ModelScores = {"test": scores(41, 0.25, 0.75)}
    merged = {**summary.merged, "student": student}
    headline = choose_headline(merged, PUBLIC, wanted)
    return summary.model_copy(update={"merged": merged, "public": PUBLIC, "headline": headline})


@pytest.mark.parametrize("wanted", ["global", "student", "public"])
def test_the_students_figures_are_shown_once_of_sites_and_once_of_public_images(
    summary: RunSummary, wanted: str
) -> None:
    text = shown(result_table(refined(summary, wanted)))
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"all \(student\) +(\S+) +(\S+) +(\S+)", text) == [("41", ".250", ".750")]
    assert re.findall(r"public \(student\) +(\S+) +(\S+) +(\S+)", text) == [("91", ".625", ".875")]


def test_without_a_student_nothing_is_said_of_one(summary: RunSummary) -> None:
    assert "student" not in shown(result_table(summary))


def test_names_are_shown_as_they_are_written(summary: RunSummary) -> None:
    name = "[bold]FedAvg[/bold] [a]"
    named = summary.model_copy(update={"name": name})
    results = {name: [named]}
    text = shown(comparison_table(Comparison(name, tuple(summarise_methods(results)), results, None)))
    assert text.count("[bold]FedAvg[/bold]") == 2
    assert name in shown(result_table(named))


def test_a_comparison_fits_eighty_columns(summary: RunSummary, tmp_path: Path) -> None:
    results = {name: [summary] for name in ("FedAvg, 10 rounds × 1 epoch, uniform", "Local", "FedProx (μ = 0.01)")}
    comparison = Comparison("a comparison", tuple(summarise_methods(results)), results, tmp_path)
    text = shown(comparison_table(comparison))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("[.") == 2 * len(results), "no interval is cut in two"
    assert "intervals over test patients (bootstrap); MB both ways; s: wall-clock" in text


def test_a_comparison_says_whose_figures_it_shows(summary: RunSummary) -> None:
    runs = {"A": summary, "B": refined(summary, "student"), "C": refined(summary, "public"), "D": summary}
    results = {name: [one] for name, one in runs.items()}
    comparison = Comparison("x", tuple(summarise_methods(results)), results, None)
    description = "the global model (A, D); the server's student (B, C)"
    assert f"figures of {description}\n" in re.sub(" +\n", "\n", shown(comparison_table(comparison)))
    assert f"Figures are of {description}." in to_markdown(build_results_page(comparison))
    assert [line.judged_by for line in comparison.lines][1] == "the server's student"
    alone = Comparison("x", tuple(summarise_methods({"A": [summary]})), {"A": [summary]}, None)
    assert "figures of the global model" in shown(comparison_table(alone))


PART: ModelScores = {"validation": scores(1, 0, 0)}
HELD_OUT: dict[str, ModelScores] = {"held-out": {"test": scores(1, 0, 0)}}


@pytest.mark.parametrize(
    ("merged", "public", "whose"),
    [
        ({"personal": PART, "student": PART}, None, "each site's own model"),
        ({"global": PART, **HELD_OUT}, None, "the global model"),
        ({"global": PART, "student": PART, **HELD_OUT}, None, "the server's student"),
        ({"global": PART}, {"high": PUBLIC["global"], "low": PUBLIC["student"]}, "cluster high's model"),
        ({"transfer": PART}, None, "each site's model at all others"),
    ],
)
def test_a_headline_has_an_owner(
    merged: dict[str, ModelScores], public: dict[str, PartScores] | None, whose: str
) -> None:
    assert choose_headline(merged, public, "public" if public else None).model_description == whose


def test_undefined_figures_are_a_dash(summary: RunSummary) -> None:
    best = scores(41, 0.5, 0.5).model_copy(update={"metrics": {"accuracy": Metric(value=0.5), "auc": Metric()}})
    headline = summary.headline.model_copy(update={"scores": best})
    text = shown(result_table(summary.model_copy(update={"headline": headline})))
    last = next(line for line in text.splitlines() if "all (global)" in line)
    assert "–" in last
    assert "None" not in text


@pytest.mark.parametrize(
    ("text", "short"), [("0.873 [0.850, 0.900]", ".873 [.850 .900]"), ("1.000", "1.000"), ("10.5", "10.5"), ("–", "–")]
)
def test_figures_are_shortened_without_harm(text: str, short: str) -> None:
    assert strip_zeros(text) == short
