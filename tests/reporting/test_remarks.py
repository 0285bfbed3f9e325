"""What is told of a run beside its figures: a part that never begins, where that changes nothing; where images lay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyclinic.core.errors import RecipeError, Refused
from polyclinic.deploy.site.policy import Allow, check_recipe
from polyclinic.evaluation.summary import RunSummary
from polyclinic.experiments.compare import compare
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_results_page
from polyclinic.runs.experiment import run
from tests.small import tiny

ALIGNING: dict[str, Any] = {"model": "cnn_c", "algorithm": "fed-align", "algorithm__warmup": 2}
PAPER: dict[str, Any] = {"model": "cnn_c", "algorithm": "fed-align", "algorithm__variant": "paper"}


def remarks(summary: RunSummary) -> list[str]:
    """All warnings, but for that of digits whose writers are not named."""
    first, *others = summary.warnings
    assert first.startswith("no image names its patient")
    return others


@pytest.mark.parametrize(("rounds", "idle"), [(2, True), (3, False)])
def test_nobody_aligns_exactly_where_it_is_fedavg(rounds: int, idle: bool) -> None:
    found = run(tiny(rounds=rounds, **ALIGNING)).summary
    plain = run(tiny(rounds=rounds, model="cnn_c")).summary
    assert (found.sha256 == plain.sha256) == idle
    assert remarks(found) == [f"nobody aligns: algorithm.warmup is 2, and there are {rounds} rounds"] * idle
    assert remarks(plain) == []


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        (
            {"curriculum__warmup_rounds": 3, "epochs": 1},
            "curriculum.warmup_rounds is 3, and there are 3 rounds",
        ),
        ({"curriculum__warmup_rounds": 2, "epochs": 1}, ""),
        ({"curriculum__warmup_rounds": 1, "epochs": None, "steps": 1}, "3 steps in all are no more than the first"),
        ({"curriculum__warmup_rounds": 1, "epochs": None, "steps": 4}, ""),
    ],
)
def test_no_case_is_put_in_order_exactly_where_the_order_is_random(settings: dict[str, Any], idle: str) -> None:
    pace = {f"training__{key}": value for key, value in settings.items()} | {"training__batch": 64, "rounds": 3}
    found = run(tiny(training__curriculum__by="hard", **pace)).summary
    assert (found.sha256 == run(tiny(**pace)).summary.sha256) == bool(idle)
    assert [idle in remark for remark in remarks(found)] == [True] * bool(idle)


def test_whoever_plays_all_sites_in_one_place_says_so_everywhere(tmp_path: Path) -> None:
    """Fed-Align as printed: no image stays where it is, no byte was sent, and no hospital takes part."""
    methods = {"Fed": {}, "Paper": {"algorithm": "fed-align", "algorithm.variant": "paper", "algorithm.warmup": 1}}
    found = compare([tiny(model="cnn_c", methods=methods)], 2, tmp_path)
    assert [line.pools_images for line in found.lines] == [False, True]
    told = (tmp_path / "paper" / "seed-0" / "privacy.md").read_text()
    assert "All images were pooled in one place." in told
    assert "which no hospital could take part in" in told
    assert "Images themselves did not leave their site." in (tmp_path / "fed" / "seed-0" / "privacy.md").read_text()
    page = to_markdown(build_results_page(found))
    assert "Paper: all images in one place" in page
    assert "Paper: fed-align, variant paper: all sites train in this process" in page
    assert "extra megabytes of" not in page
    with pytest.raises(Refused, match="needs all sites' images in one place"):
        check_recipe(tiny(**PAPER), "site-1", Allow(algorithms="all"), None, None)


def test_features_of_a_cohort_are_of_several_rounds_and_that_is_told() -> None:
    [remark] = remarks(run(tiny(rounds=3, cohort=2, **{**ALIGNING, "algorithm__warmup": 1})).summary)
    assert remark.startswith("with a cohort a site's features are of another round")


def test_noise_that_is_no_privacy_is_told_where_privacy_is_looked_up(tmp_path: Path) -> None:
    run(tiny(rounds=3, **ALIGNING, algorithm__variance=0.001), tmp_path)
    assert "this is no privacy guarantee, and no ε is claimed for it" in (tmp_path / "privacy.md").read_text()


def test_more_than_can_be_kept_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.bank is 1000000000, but should be less than or equal to 100000"):
        tiny(algorithm={"name": "fed-align", "bank": 10**9})


def test_a_claim_about_forgetting_needs_it_measured() -> None:
    claim = {"claim": "less", "test": "lower", "metric": "forgotten", "methods": ["Fed", "Local"]}
    methods = {"Fed": {"evaluate.forgetting": True}, "Local": {"algorithm": "local"}}
    with pytest.raises(RecipeError, match=r"a claim is about what Local forgot; set evaluate\.forgetting: true for it"):
        tiny(methods=methods, claims=[claim])


def test_what_megabytes_buy_is_told_seed_by_seed(tmp_path: Path) -> None:
    """The first method's second seed, which the other has not, counts for nothing."""
    methods = {"Scaffold": {"algorithm": "scaffold"}, "Fed": {}}
    found = compare([tiny(methods=methods)], 2, tmp_path)
    short = {**found.results, "Fed": found.results["Fed"][:1]}
    first, other = (short[name][0].headline.scores.value("accuracy") for name in methods)
    assert (
        f"| {first - other:+.3f} |"
        in to_markdown(build_results_page(replace(found, results=short))).split("extra megabytes of")[1]
    )
