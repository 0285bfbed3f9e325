"""Cohorts in a cyclic order: every site takes part equally often."""

from __future__ import annotations

from collections import Counter

import pytest

from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import draw_cohort


@pytest.mark.parametrize(("sites", "size"), [(10, 5), (10, 3), (7, 7), (4, 1)])
def test_sites_take_turns(sites: int, size: int) -> None:
    names = [f"site-{n}" for n in range(sites)]
    rules = RoundOptions(rounds=sites, cohort=size, cohort_order="cyclic")
    cohorts = [draw_cohort(names, rules, number) for number in range(1, sites + 1)]
    assert all(len(set(cohort)) == size for cohort in cohorts)
    assert set(Counter(site for cohort in cohorts for site in cohort).values()) == {size}
    assert cohorts[0] == names[:size]
