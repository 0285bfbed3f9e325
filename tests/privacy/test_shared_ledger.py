"""One account for all runs on the same images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from polyclinic import run
from polyclinic.core.errors import RecipeError, RoundFailed, StoreError
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.runs.experiment import Experiment
from tests.small import run_until_the_end, tiny

DELTA = 1e-4


def wish(path: Path, **more: Any) -> dict[str, Any]:
    return {"noise": 2.0, "delta": DELTA, "ledger": str(path), **more}


def test_a_second_run_pays_for_the_first_too(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    first = run(tiny(privacy=wish(book), seed=1)).summary.privacy
    second = run(tiny(privacy=wish(book), seed=2)).summary.privacy
    assert first is not None
    assert second is not None
    alone = first.epsilon
    rate, times = 0.26723, 4
    assert alone == pytest.approx(epsilon([Spend(2.0, rate, 2 * times)], DELTA))
    assert second.epsilon == pytest.approx(epsilon([Spend(2.0, rate, 4 * times)], DELTA))
    assert second.earlier_epsilon == pytest.approx(alone)


def test_the_same_recipe_again_is_another_release(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    first, again = (run(tiny(privacy=wish(book))).summary.epsilon for _ in range(2))
    assert first is not None
    assert again is not None
    assert again > first, "since its noise is another"


def test_noise_is_solved_for_what_is_left_and_refused_when_nothing_is(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    run(tiny(privacy=wish(book), seed=1))
    left = Experiment(tiny(privacy={"epsilon": 3.0, "delta": DELTA, "ledger": str(book)}, seed=2)).setup.plan
    fresh = Experiment(tiny(privacy={"epsilon": 3.0, "delta": DELTA}, seed=2)).setup.plan
    assert left is not None
    assert fresh is not None
    assert left.noise > fresh.noise
    assert left.epsilon <= 3.0
    with pytest.raises(RecipeError, match="earlier runs on these images have spent"):
        Experiment(tiny(privacy={"epsilon": 0.5, "delta": DELTA, "ledger": str(book)}, seed=2))


def test_units_do_not_mix_and_damage_is_told(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    run(tiny(privacy=wish(book)))
    with pytest.raises(RecipeError, match="no bound on a site"):
        Experiment(tiny(privacy={**wish(book), "unit": "site"}))
    with pytest.raises(RecipeError, match="is a folder; name a file"):
        Experiment(tiny(privacy=wish(tmp_path)))
    with pytest.raises(RecipeError, match=r"leave privacy\.ledger out"):
        Experiment(tiny(privacy=wish(tmp_path / "other"), algorithm={"name": "adaptive-noise", "variant": "paper"}))
    book.write_text(book.read_text().replace("2.0", "9.0"))
    with pytest.raises(StoreError, match="damaged at row 1"):
        SharedLedger(book, "x", "image").earlier_runs()


def test_images_pay_under_whatever_name_their_site_had(tmp_path: Path) -> None:
    """Pooled, the same images are at a site of another name: both runs are counted for each of them."""
    book = tmp_path / "ours.jsonl"
    first = run(tiny(privacy=wish(book))).summary.epsilon
    second = run(tiny(privacy=wish(book), algorithm="centralised")).summary.epsilon
    alone = run(tiny(privacy={"noise": 2.0, "delta": DELTA}, algorithm="centralised")).summary.privacy
    assert alone is not None
    assert second is not None
    assert first is not None
    assert alone.epsilon is not None
    assert second > max(first, alone.epsilon)


def test_two_runs_at_once_cannot_both_spend_the_whole(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    both = [
        Experiment(tiny(privacy={"epsilon": 3.0, "delta": DELTA, "ledger": str(book)}, seed=seed)) for seed in (1, 2)
    ]
    assert (both[0].run().summary.epsilon or math.inf) <= 3.0
    with pytest.raises(RoundFailed, match="too small for one round"):
        both[1].run()


def test_a_run_that_goes_on_keeps_its_noise(tmp_path: Path) -> None:
    book = tmp_path / "ours.jsonl"
    recipe = tiny(privacy={"epsilon": 3.0, "delta": DELTA, "ledger": str(book)})
    before = Experiment(recipe, tmp_path / "a")
    ended = run_until_the_end(recipe, tmp_path / "a").summary.sha256
    run(tiny(privacy={"noise": 20.0, "delta": DELTA, "ledger": str(book)}, seed=5))
    again = Experiment(recipe, tmp_path / "a")
    assert again.run().summary.sha256 == ended
    assert before.setup.plan is not None
    assert again.setup.plan is not None
    assert again.setup.plan.noise == before.setup.plan.noise


def test_another_attempt_of_the_same_run_is_counted(tmp_path: Path) -> None:
    """The same recipe and seed in another folder, where the noise was solved anew: other numbers, so another cost."""
    book = tmp_path / "ours.jsonl"
    recipe = tiny(privacy={"epsilon": 3.0, "delta": DELTA, "ledger": str(book)}, rounds=1)
    run(recipe, tmp_path / "a")
    with pytest.raises(RecipeError, match="earlier runs on these images have spent"):
        run(recipe, tmp_path / "b")


@pytest.mark.parametrize("lost", ["all", "the last row"])
def test_charges_that_vanish_are_noticed_by_whoever_wrote_them(tmp_path: Path, lost: str) -> None:
    book = tmp_path / "ours.jsonl"
    recipe = tiny(privacy=wish(book))
    run_until_the_end(recipe, tmp_path / "a")
    rows = book.read_text().splitlines(keepends=True)
    book.unlink() if lost == "all" else book.write_text("".join(rows[:-1]))
    with pytest.raises(StoreError, match="lacks charges that this run has seen"):
        run(recipe, tmp_path / "a")
