"""One account for all runs on the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyclinic import run
from polyclinic.errors import RecipeError, StoreError
from polyclinic.experiment import Experiment
from polyclinic.privacy.account import Spend, epsilon
from polyclinic.privacy.passbook import Passbook
from tests.small import tiny

DELTA = 1e-4


def wish(path: Path, **more: Any) -> dict[str, Any]:
    return {"noise": 2.0, "delta": DELTA, "ledger": str(path), **more}


def test_a_second_run_pays_for_the_first_too(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    first = run(tiny(privacy=wish(book), seed=1)).summary["privacy"]
    second = run(tiny(privacy=wish(book), seed=2)).summary["privacy"]
    alone = first["epsilon"]["pld"]
    rate, times = 0.268, 4
    assert alone == pytest.approx(epsilon([Spend(2.0, rate, 2 * times)], DELTA))
    assert second["epsilon"]["pld"] == pytest.approx(epsilon([Spend(2.0, rate, 4 * times)], DELTA))
    assert second["earlier"] == pytest.approx(alone)


def test_the_same_run_again_is_the_same_release(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    costs = [run(tiny(privacy=wish(book))).summary["privacy"]["epsilon"]["pld"] for _ in range(2)]
    assert costs[0] == costs[1]
    other = run(tiny(privacy=wish(book, randomness="secret"))).summary["privacy"]["epsilon"]["pld"]
    assert other > costs[0], "with other noise it is another release"


def test_noise_is_solved_for_what_is_left_and_refused_when_nothing_is(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    run(tiny(privacy=wish(book), seed=1))
    left = Experiment(tiny(privacy={"epsilon": 3.0, "delta": DELTA, "ledger": str(book)}, seed=2)).plan
    fresh = Experiment(tiny(privacy={"epsilon": 3.0, "delta": DELTA}, seed=2)).plan
    assert left is not None
    assert fresh is not None
    assert left.noise > fresh.noise
    assert left.epsilon <= 3.0
    with pytest.raises(RecipeError, match="spends ε"):
        Experiment(tiny(privacy={"epsilon": 0.5, "delta": DELTA, "ledger": str(book)}, seed=2))


def test_units_do_not_mix_and_damage_is_told(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    run(tiny(privacy=wish(book)))
    with pytest.raises(RecipeError, match="holds charges of unit image"):
        Experiment(tiny(privacy={**wish(book), "unit": "site"}))
    book.write_text(book.read_text().replace("2.0", "9.0"))
    with pytest.raises(StoreError, match="damaged at row 1"):
        Passbook(book, "x", "image").earlier()
