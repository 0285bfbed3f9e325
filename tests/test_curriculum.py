"""Recipes with an order of cases, and forgetting as a run tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from polyclinic.core.errors import RecipeError
from polyclinic.evaluation.comparison import Comparison, metric_value
from polyclinic.evaluation.summary import forgetting_by_round
from polyclinic.experiments.compare import compare
from polyclinic.experiments.reproduce import _to_kept_json
from polyclinic.reporting.markdown.rounds import draw_forgetting
from polyclinic.runs.experiment import run
from tests.small import tiny

CLUSTERS = {"high": {"at_least": 0.5, "model": "mlp"}, "low": {"at_least": 0, "model": "linear"}}
CARDS = {f"site-{n}": {"cpu": s, "memory": s, "battery": s, "network": s} for n, s in ((1, 1.0), (2, 1.0), (3, 0.0))}
MEASURED: dict[str, Any] = {"rounds": 3, "evaluate__forgetting": True, "training__batch": 32}


def sha256(**settings: Any) -> str:
    found: str = run(tiny(**{**MEASURED, **settings})).summary["sha256"]
    return found


def test_a_run_tells_shares_and_keeps_its_cases_at_the_sites(tmp_path: Path) -> None:
    found = run(tiny(training__order="forgotten", **MEASURED), tmp_path / "run").summary
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
    assert found["forgetting"]["forgotten"] == [(1, pytest.approx(wanted[0])), (2, pytest.approx(wanted[1]))]
    assert max(wanted) > 0
    assert (tmp_path / "run" / "forgetting.png").stat().st_size > 10_000
    assert metric_value(found, "forgotten") == pytest.approx(sum(wanted) / 2)


def test_unasked_nothing_is_told_or_drawn(tmp_path: Path) -> None:
    found = run(tiny(training__order="hard"), tmp_path / "run").summary
    assert found["forgetting"] is None
    assert "scalars" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not (tmp_path / "run" / "forgetting.png").exists()
    assert len(list((tmp_path / "run").glob("sites/*/scores/*"))) == 3, "its scores are filed all the same"


def test_shares_of_sites_count_by_their_images() -> None:
    rows = [
        {"event": "train", "round": 2, "scalars": {"forgotten": 0.5, "gained": 0.0, "cases": 10.0}},
        {"event": "train", "round": 2, "scalars": {"forgotten": 0.0, "gained": 0.2, "cases": 30.0}},
        {"event": "train", "round": 3, "scalars": {"steps": 4.0}},
        {"event": "evaluate", "round": 2},
    ]
    assert forgetting_by_round(rows) == {"forgotten": [(1, 0.125)], "gained": [(1, pytest.approx(0.15))]}
    assert forgetting_by_round(rows[2:]) == {}


def test_a_comparison_draws_forgetting_and_keeps_it(tmp_path: Path) -> None:
    methods = {
        "Fed": {"evaluate.forgetting": True},
        "Fed-CL": {"evaluate.forgetting": True, "training.order": "forgotten"},
    }
    comparison = compare([tiny(methods={**methods, "silent": {}}, rounds=3)], 1, tmp_path)
    assert "![forgetting](forgetting.png)" in (tmp_path / "report.md").read_text()
    kept = _to_kept_json(comparison)["runs"]
    assert len(kept["Fed"][0]["forgetting"]["gained"]) == 2
    assert kept["silent"][0]["forgetting"] is None


def test_curves_are_of_the_seeds_that_all_methods_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed whose images are hard is hard for every method; one that only some have would look like a difference."""

    def run_of(seed: int, *shares: float) -> dict[str, Any]:
        return {"seed": seed, "forgetting": {"forgotten": list(enumerate(shares, 1)), "gained": []}}

    drawn: list[Any] = []
    monkeypatch.setattr("polyclinic.reporting.figures.draw_curves", lambda lines, *_: drawn.append(lines))
    results = {
        "Fed": [run_of(0, 0.2, 0.1), run_of(1, 0.8, 0.7)],
        "Fed-CL": [run_of(0, 0.2, 0.3)],
        "silent": [{"seed": 0}],
    }
    assert draw_forgetting(Comparison("t", (), results, None), tmp_path / "x.png")
    assert drawn == [{"Fed": [(1.0, 0.2), (2.0, 0.1)], "Fed-CL": [(1.0, 0.2), (2.0, 0.3)]}]
    apart = {"Fed": [run_of(0, 0.2)], "Fed-CL": [run_of(1, 0.4)]}
    assert draw_forgetting(Comparison("t", (), apart, None), tmp_path / "x.png")
    assert drawn[1] == {"Fed": [(1.0, 0.2)], "Fed-CL": [(1.0, 0.4)]}, "no seed is shared: better than no picture"


def test_measuring_and_worker_processes_change_no_bit() -> None:
    assert sha256() == sha256(evaluate__forgetting=False)
    curriculum = sha256(training__order="forgotten")
    assert curriculum != sha256()
    assert curriculum == sha256(training__order="forgotten", engine__workers=2)
    assert curriculum == sha256(training__order="forgotten", evaluate__forgetting=False)


@pytest.mark.parametrize(
    "beside",
    [
        {"clusters": CLUSTERS, "capability": {"cards": CARDS}},
        {"clusters": CLUSTERS, "capability": {"every": 1}, "seed": 3, "rounds": 5},
        {"ensemble": True},
        {"algorithm": "fedper", "training__oversample": True},
        {"algorithm": "fedmp", "training__augment": {"rotation": 10}},
        {"algorithm": "fedcycle", "model": "mlp", "training__fine_tune": 0.5},
        {"engine__name": "auto"},
    ],
    ids=["clusters", "sites that move", "ensemble", "fedper", "fedmp", "fedcycle", "auto"],
)
def test_an_order_goes_with_everything(beside: dict[str, Any]) -> None:
    summary = run(tiny(**{**MEASURED, "training__order": "forgotten", **beside})).summary
    assert len(summary["forgetting"]["forgotten"]) == summary["rounds"] - 1
    assert summary["cost"]["refused"] + summary["cost"]["failed"] == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"training__order": "forgotten", "privacy": {"noise": 1.0}},
            "training.order: forgotten looks at images beside",
        ),
        ({"training__order": "easy", "privacy": {"noise": 1.0, "unit": "site"}}, "leave privacy out"),
        ({"evaluate__forgetting": True, "privacy": {"noise": 1.0}}, "evaluate.forgetting tells of training images"),
        ({"training__order": "hard", "algorithm": "fedsgd"}, "so they have no order; set training.order: random"),
        (
            {"training__order": "hard", "algorithm": "centralised"},
            "nothing is deployed and forgotten; set training.order",
        ),
        ({"evaluate__forgetting": True, "algorithm": "centralised"}, "set evaluate.forgetting: false"),
        ({"training__order": "sorted"}, "training.order is 'sorted'"),
        ({"training__emphasis": 0.5}, "training.emphasis is 0.5; choose 1"),
        ({"training__order_after": 0}, "training.order_after is 0; the first round is in random order"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny(**settings)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
