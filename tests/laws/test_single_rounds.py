"""SCAFFOLD and FedNova, round by round, against what Algorithm 1 gives by hand on quadratics; partial cohorts too."""

from __future__ import annotations

import pytest

from polyclinic.algorithms.optimisation.fednova import FedNova
from polyclinic.algorithms.optimisation.scaffold import Scaffold
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.types import SiteId
from tests.laws.bench import Played, QuadraticNetwork, Weighting, play, quadratic

ETA, TAU, START = 0.05, 3, 2.0
CURVES: dict[SiteId, tuple[float, float]] = {"a": (10.0, 1.0), "b": (1.0, -1.0), "c": (4.0, 3.0), "d": (2.0, 0.5)}
COUNTS = {"a": 1, "b": 2, "c": 3, "d": 6}


def scaffold(rounds: int, cohort: int | None = None, global_lr: float = 1.0, weights: Weighting = "uniform") -> Played:
    sites = {name: quadratic(name, a, b, COUNTS[name]) for name, (a, b) in CURVES.items()}
    training = Training(Optimiser(lr=ETA), batch=6, epochs=None, steps=TAU, weights=weights)
    return play(Scaffold(training, global_lr), sites, QuadraticNetwork(START), rounds, cohort=cohort, seed=5)


def by_hand(
    cohorts: list[list[SiteId]], global_lr: float = 1.0, weights: Weighting = "uniform"
) -> tuple[float, float, dict[SiteId, float]]:
    """Algorithm 1, option II. The correction c − c_k moves a quadratic's minimum from b to b − (c − c_k)/a, so
    y = m + (1 − ηa)^τ·(x − m) with m = b − (c − c_k)/a.
    """
    x, c, own = START, 0.0, dict.fromkeys(CURVES, 0.0)
    for cohort in cohorts:
        y, new = {}, {}
        for name in cohort:
            a, b = CURVES[name]
            m = b - (c - own[name]) / a
            y[name] = m + (1 - ETA * a) ** TAU * (x - m)
            new[name] = own[name] - c + (x - y[name]) / (TAU * ETA)
        share = {n: COUNTS[n] if weights == "examples" else 1 for n in cohort}
        c += sum(new[n] - own[n] for n in cohort) / len(CURVES)
        x += global_lr * sum(share[n] * (y[n] - x) for n in cohort) / sum(share.values())
        own |= new
    return x, c, own


@pytest.mark.parametrize(("global_lr", "weights"), [(1.0, "uniform"), (0.3, "uniform"), (1.0, "examples")])
@pytest.mark.parametrize("cohort", [None, 1, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_scaffold_follows_algorithm_1(rounds: int, cohort: int | None, global_lr: float, weights: Weighting) -> None:
    played = scaffold(rounds, cohort, global_lr, weights)
    x, c, own = by_hand(played.cohorts(), global_lr, weights)
    assert float(played.model["head.weight"]) == pytest.approx(x, abs=1e-12)
    assert float(played.outcome.state["control"]["head.weight"]) == pytest.approx(c, abs=1e-11)
    for name in CURVES:
        memory = played.remembered(name)
        found = float(memory["control"]["head.weight"]) if memory else 0.0
        assert found == pytest.approx(own[name], abs=1e-11)


def test_the_servers_control_counts_the_sites_that_were_not_asked() -> None:
    """c ← c + (1/N)·Σ over the cohort, so after one round of two sites of four c is half their mean."""
    played = scaffold(rounds=1, cohort=2)
    (cohort,) = played.cohorts()
    memories = [played.remembered(name) for name in cohort]
    mean = sum(float(m["control"]["head.weight"]) for m in memories if m) / 2
    assert mean != 0
    assert float(played.outcome.state["control"]["head.weight"]) == pytest.approx(mean / 2, rel=1e-12)


def test_a_site_that_skips_a_round_keeps_its_control() -> None:
    for rounds in (1, 2, 3, 6):
        before, after = scaffold(rounds, cohort=2), scaffold(rounds + 1, cohort=2)
        asked = after.cohorts()[-1]
        for name in CURVES:
            then, now = before.remembered(name), after.remembered(name)
            changed = (then and float(then["control"]["head.weight"])) != (now and float(now["control"]["head.weight"]))
            assert changed == (name in asked)


@pytest.mark.parametrize("cohort", [None, 2])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_fednova_follows_equation_6(rounds: int, weights: Weighting, cohort: int | None) -> None:
    """One epoch of batches of one: n_k steps. x ← x − τ_eff·Σ p_k·(x − y_k)/τ_k, τ_eff = Σ p_k·τ_k."""
    sites = {name: quadratic(name, a, b, COUNTS[name]) for name, (a, b) in CURVES.items()}
    chosen = Training(Optimiser(lr=ETA), batch=1, weights=weights)
    played = play(FedNova(chosen), sites, QuadraticNetwork(START), rounds, cohort=cohort, seed=5)
    x = START
    for names in played.cohorts():
        share = {n: COUNTS[n] if weights == "examples" else 1 for n in names}
        p = {n: s / sum(share.values()) for n, s in share.items()}
        y = {n: CURVES[n][1] + (1 - ETA * CURVES[n][0]) ** COUNTS[n] * (x - CURVES[n][1]) for n in names}
        tau_eff = sum(p[n] * COUNTS[n] for n in names)
        x -= tau_eff * sum(p[n] * (x - y[n]) / COUNTS[n] for n in names)
    assert float(played.model["head.weight"]) == pytest.approx(x, abs=1e-12)
