"""Features that never change are computed once, and cohorts that take turns."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from polyclinic import run
from polyclinic.federation.rounds import Rules, draw_cohort
from polyclinic.runs import sites as consortium
from tests.small import tiny


def test_fixed_features_computed_beforehand_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(model="scattering_linear", privacy={"noise": 1.0, "delta": 1e-4, "clip": 5.0, "randomness": "seed"})
    once = run(recipe).state["model"]
    monkeypatch.setattr(consortium, "MOST_FEATURES", 0)
    anew = run(recipe).state["model"]
    for name, value in once.items():
        torch.testing.assert_close(value, anew[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("sites", "size"), [(10, 5), (10, 3), (7, 7), (4, 1)])
def test_sites_take_turns(sites: int, size: int) -> None:
    names = [f"site-{n}" for n in range(sites)]
    rules = Rules(rounds=sites, cohort=size, cohort_order="cyclic")
    cohorts = [draw_cohort(names, rules, number) for number in range(1, sites + 1)]
    assert all(len(set(cohort)) == size for cohort in cohorts)
    assert set(Counter(site for cohort in cohorts for site in cohort).values()) == {size}
    assert cohorts[0] == names[:size]
