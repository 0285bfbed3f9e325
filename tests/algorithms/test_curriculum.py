"""Recipes with an order of cases, and forgetting as a run tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from polyclinic.core.errors import RecipeError
from polyclinic.evaluation.comparison import metric_value
from polyclinic.evaluation.rounds import forgetting_by_round
from polyclinic.evaluation.rows import EvaluateRow, TrainRow
from polyclinic.evaluation.summary import RunSummary
from polyclinic.experiments.compare import compare
from polyclinic.experiments.reproduce import _to_kept_json
from polyclinic.reporting.report_data import Method, ReportData, Run
from polyclinic.reporting.sections.training import forgetting_chart
from polyclinic.runs.experiment import run
from tests.small import tiny

CLUSTERS = {"high": {"min_score": 0.5, "model": "mlp"}, "low": {"min_score": 0, "model": "linear"}}
CARDS = {f"site-{n}": {"cpu": s, "memory": s, "battery": s, "network": s} for n, s in ((1, 1.0), (2, 1.0), (3, 0.0))}
MEASURED: dict[str, Any] = {"rounds": 3, "evaluate__forgetting": True, "training__batch": 32}


def sha256(**settings: Any) -> str:
    found: str = run(tiny(**{**MEASURED, **settings})).summary.sha256
    return found


def test_a_run_tells_shares_and_keeps_its_cases_at_the_sites(tmp_path: Path) -> None:
    found = run(tiny(training__curriculum__by="forgotten", **MEASURED), tmp_path / "run").summary
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["event"] == "train"]
    told = {(row["round"], row["site"]): row["scalars"] for row in trained if "scalars" in row}
    assert sorted(told) == [(round, f"site-{n}") for round in (2, 3) for n in (1, 2, 3)]
    assert {frozenset(shares) for shares in told.values()} == {frozenset({"forgotten", "gained", "cases"})}
    files = sorted((tmp_path / "run").glob("sites/*/scores/*.safetensors"))
    assert [path.stem for path in files] == ["000002", "000003"] * 3
    shares = []
    for path in files:
        scores = load_file(path)
        before, after, weight = (scores[f"scores/{name}"] for name in ("before", "after", "weight"))
        lost = before & ~after
        assert weight.tolist() == (1 + lost.double()).tolist()
        shares.append((int(path.stem), float(lost.double().mean()), len(lost)))
    assert sorted(shares) == sorted((round, s["forgotten"], int(s["cases"])) for (round, _), s in told.items())
    wanted = [sum(s * n for r, s, n in shares if r == at) / sum(n for r, _, n in shares if r == at) for at in (2, 3)]
    assert dict(found.forgetting["forgotten"]) == pytest.approx({1: wanted[0], 2: wanted[1]})
    assert max(wanted) > 0
    assert "forgotten" in (tmp_path / "run" / "forgetting.svg").read_text()
    assert metric_value(found, "forgotten") == pytest.approx(sum(wanted) / 2)


def test_unasked_nothing_is_told_or_drawn(tmp_path: Path) -> None:
    found = run(tiny(training__curriculum__by="hard"), tmp_path / "run").summary
    assert found.forgetting == {}
    assert "scalars" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not (tmp_path / "run" / "forgetting.svg").exists()
    assert len(list((tmp_path / "run").glob("sites/*/scores/*"))) == 3, "its scores are filed all the same"


def test_shares_of_sites_count_by_their_images() -> None:
    rows: list[TrainRow | EvaluateRow] = [
        TrainRow(round=2, site="a", scalars={"forgotten": 0.5, "gained": 0.0, "cases": 10.0}),
        TrainRow(round=2, site="b", scalars={"forgotten": 0.0, "gained": 0.2, "cases": 30.0}),
        TrainRow(round=3, site="a", scalars={"steps": 4.0}),
        EvaluateRow(round=2, site="a", model="global", part="test", n=3),
    ]
    assert forgetting_by_round(rows) == {"forgotten": [(1, 0.125)], "gained": [(1, pytest.approx(0.15))]}
    assert forgetting_by_round(rows[2:]) == {}


def test_a_comparison_draws_forgetting_and_keeps_it(tmp_path: Path) -> None:
    methods = {
        "Fed": {"evaluate.forgetting": True},
        "Fed-CL": {"evaluate.forgetting": True, "training.curriculum.by": "forgotten"},
    }
    comparison = compare([tiny(methods={**methods, "silent": {}}, rounds=3)], 1, tmp_path)
    assert "(report-figures/forgetting.svg)" in (tmp_path / "report.md").read_text()
    kept: Any = _to_kept_json(comparison)["runs"]
    assert len(kept["Fed"][0]["forgetting"]["gained"]) == 2
    assert not kept["silent"][0].get("forgetting")


def test_curves_are_of_the_seeds_that_all_methods_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed whose images are hard is hard for every method; one that only some have would look like a difference."""

    def run_of(seed: int, *shares: float) -> Run:
        known = {"forgotten": list(enumerate(shares, 1))} if shares else {}
        made: Any = RunSummary
        return Run(made.model_construct(seed=seed, forgetting=known))

    def chart(**runs: list[Run]) -> dict[str, Any]:
        drawn: list[Any] = []
        monkeypatch.setattr(
            "polyclinic.reporting.sections.training.line_chart", lambda _, __, lines, ___: drawn.append(lines)
        )
        forgetting_chart(ReportData("t", "", tuple(Method(name, tuple(own)) for name, own in runs.items())))
        return {name: [(x, y) for x, y, *_ in points] for name, points in drawn[0].items()}

    shared = chart(fed=[run_of(0, 0.2, 0.1), run_of(1, 0.8, 0.7)], cl=[run_of(0, 0.2, 0.3)], silent=[run_of(0)])
    assert shared == {"fed": [(1, 0.2), (2, 0.1)], "cl": [(1, 0.2), (2, 0.3)]}
    apart = chart(fed=[run_of(0, 0.2)], cl=[run_of(1, 0.4)])
    assert apart == {"fed": [(1, 0.2)], "cl": [(1, 0.4)]}, "no seed is shared: better than no picture"


def test_measuring_and_worker_processes_change_no_bit() -> None:
    assert sha256() == sha256(evaluate__forgetting=False)
    curriculum = sha256(training__curriculum__by="forgotten")
    assert curriculum != sha256()
    assert curriculum == sha256(training__curriculum__by="forgotten", engine__workers=2)
    assert curriculum == sha256(training__curriculum__by="forgotten", evaluate__forgetting=False)


@pytest.mark.parametrize(
    "beside",
    [
        {"clusters": CLUSTERS, "capability": {"profiles": CARDS}},
        {"clusters": CLUSTERS, "capability": {"reassess_every": 1}, "seed": 3, "rounds": 5},
        {"ensemble": True},
        {"algorithm": "fedper", "training__oversample": True},
        {"algorithm": "fedmp", "training__augment": {"rotation": 10}},
        {"algorithm": "fedcycle", "model": "mlp", "training__fine_tune": 0.5},
        {"engine__name": "auto"},
    ],
    ids=["clusters", "sites that move", "ensemble", "fedper", "fedmp", "fedcycle", "auto"],
)
def test_an_order_goes_with_everything(beside: dict[str, Any]) -> None:
    summary = run(tiny(**{**MEASURED, "training__curriculum__by": "forgotten", **beside})).summary
    assert len(summary.forgetting["forgotten"]) == summary.rounds - 1
    assert summary.cost.lost == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"training__curriculum__by": "forgotten", "privacy": {"noise": 1.0}},
            "training.curriculum.by: forgotten looks at images beside",
        ),
        ({"training__curriculum__by": "easy", "privacy": {"noise": 1.0, "unit": "site"}}, "leave privacy out"),
        ({"evaluate__forgetting": True, "privacy": {"noise": 1.0}}, "evaluate.forgetting reports on training images"),
        (
            {"training__curriculum__by": "hard", "algorithm": "fedsgd"},
            "so a curriculum has no effect; set training.curriculum.by: random",
        ),
        (
            {"training__curriculum__by": "hard", "algorithm": "centralised"},
            "no deployed model forgets; set training.curriculum.by",
        ),
        ({"evaluate__forgetting": True, "algorithm": "centralised"}, "set evaluate.forgetting: false"),
        ({"training__curriculum__by": "sorted"}, "training.curriculum.by is 'sorted'"),
        ({"training__curriculum__strength": 0.5}, "training.curriculum.strength is 0.5, but should be greater"),
        (
            {"training__curriculum__warmup_rounds": 0},
            "training.curriculum.warmup_rounds is 0, but should be greater",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny(**settings)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
