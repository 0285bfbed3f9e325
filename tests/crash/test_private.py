"""C4: never less is charged than was released, and no noise covers two things, whenever a run is killed."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import pytest

from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.runs.result import read_result
from polyclinic.storage.ledger import Ledger
from tests.crash.runs import KILLED, RECIPES, Driver, summary

pytestmark = pytest.mark.usefixtures("_privacy_loaded")
BETWEEN = ("charge-written", "site-received", "site-trained", "reply-accepted", "aggregated", "ledger-half-written")


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.heavy)])
def test_killed_many_times_between_charge_and_release(driver: Driver, place: Path, kills: int) -> None:
    folder = place / "run"
    for point in islice(cycle(BETWEEN), kills):
        assert driver.run(RECIPES["private"], folder, fault=(point, 1)).code == KILLED
    assert driver.run(RECIPES["private"], folder).code == 0
    charges = [row for row in Ledger(folder / "ledger.jsonl").read() if row["event"] == "charge" and row["privacy"]]
    assert len(charges) > kills / 2, "every attempt was charged before it began"
    # Every attempt at a round started from the same weights, so it drew the same noise: nothing was released twice.
    assert all(len({c["privacy"]["of"] for c in charges if c["round"] == number}) == 1 for number in (1, 2, 3, 4))
    paid = summary(folder)["privacy"]["epsilon_by_accountant"]["pld"]
    once = {c["round"]: c["privacy"]["sites"] for c in charges}
    for site in {site for sites in once.values() for site in sites}:
        spends = [Spend(*spend) for sites in once.values() for spend in sites.get(site, [])]
        assert paid >= epsilon(spends, 1e-4) > 0
    assert read_result(folder).summary.rounds == 4


def test_killed_and_resumed_the_noise_is_the_same(driver: Driver, place: Path) -> None:
    """The secret lies in the run's folder: what a crash leaves of it is what the resumed run draws from."""
    folder = place / "run"
    assert driver.run(RECIPES["private"], folder, fault=("result-written", 1)).code == KILLED
    ended = summary(folder)["sha256"]
    (folder / "result.json").unlink()
    for snapshot in sorted((folder / "snapshots").iterdir())[1:]:
        snapshot.unlink()
    assert driver.run(RECIPES["private"], folder).code == 0
    assert summary(folder)["sha256"] == ended


def test_a_run_that_cannot_pay_for_a_round_twice_ends_with_those_that_it_has(driver: Driver, place: Path) -> None:
    folder = place / "run"
    assert driver.run(RECIPES["promised"], folder, fault=("charge-written", 2)).code == KILLED
    assert driver.run(RECIPES["promised"], folder).code == 0
    found = read_result(folder).summary
    assert found.rounds == 1
    assert found.privacy is not None
    assert found.privacy.stopped_by_budget
    charges = [row for row in Ledger(folder / "ledger.jsonl").read() if row["event"] == "charge" and row["privacy"]]
    assert [row["round"] for row in charges] == [1, 2]
    assert 0.98 * 20 <= (found.epsilon or 0) <= 20, "what was charged and never released is reported as spent"


def test_a_first_round_that_cannot_be_paid_twice_is_told_as_it_is(driver: Driver, place: Path) -> None:
    folder, once = place / "run", {**RECIPES["promised"], "rounds": 1}
    assert driver.run(once, folder, fault=("site-received", 1)).code == KILLED
    ended = driver.run(once, folder)
    assert ended.code == 1
    assert "round 1 was charged and then cut off" in ended.sentence
