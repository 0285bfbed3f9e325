"""Learning rates over rounds against torch's schedulers, early stopping, and how a round's sites are drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from scipy import stats

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.types import SiteId
from polyclinic.federation.rounds import Outcome, Progress, RoundOptions, Rounds, draw_cohort
from polyclinic.federation.schedules import EarlyStop, Schedule
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import clinics, federation, small

LR = 0.1


class Scripted:
    """Two sites that send back what they received, and report of it what the script says for that round."""

    def __init__(self, script: Sequence[float | None], metric: str = "loss") -> None:
        self.script, self.metric = script, metric
        self.rates: list[float] = []

    def answer(self, site: SiteId, message: bytes) -> bytes:
        order = messages.decode(message)
        fields = order.fields
        if site == "clinic-1":
            self.rates.append(fields["lr"])
        value = self.script[fields["round"] - 1]
        row: dict[str, Any] = {"model": "global", "part": "validation", "n": 1, self.metric: value}
        reply = {"run": fields["run"], "round": fields["round"], "site": site, "examples": 1, "report": [row]}
        return messages.encode(reply, order.tensors)

    def play(self, **rules: Any) -> Outcome:
        algorithm = FedAvg(Training(Optimiser(lr=LR)))
        known, _ = federation(algorithm, clinics(12, 7), small())
        engine = MockEngine(self.answer)
        return Rounds(known, algorithm, engine, RoundOptions(len(self.script), **rules), RamJournal()).play_all()


def a_rate() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


@pytest.mark.parametrize(("period", "minimum"), [(None, 0.0), (5, 0.0), (5, 0.1), (30, 0.01)])
def test_the_cosine_schedule_is_torchs(period: int | None, minimum: float) -> None:
    rounds, optimiser = 12, a_rate()
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, period or rounds, eta_min=minimum * LR)
    schedule = Schedule("cosine", period=period, minimum=minimum)
    for round in range(1, rounds + 1):
        assert LR * schedule.lr_factor(round, rounds, reductions=0) == pytest.approx(
            theirs.get_last_lr()[0], rel=1e-9, abs=1e-12
        )
        optimiser.step()
        theirs.step()


def test_the_cosine_schedule_anneals_over_rounds_at_the_sites() -> None:
    scripted = Scripted([1.0] * 6)
    scripted.play(schedule=Schedule("cosine"))
    assert scripted.rates == pytest.approx([LR * (1 + math.cos(math.pi * t / 6)) / 2 for t in range(6)])


LOSSES = st.lists(
    st.floats(0.01, 10) | st.sampled_from([1.0, 0.9999, 0.99991, 0.99985, 0.5, 0.49996]), min_size=3, max_size=14
)


@settings(max_examples=40, deadline=None)
@example(losses=[1.0, 0.99995, 0.99988, 1.0], patience=1, minimum=0.0)  # two steps, noticeable only together
@given(losses=LOSSES, patience=st.integers(0, 3), minimum=st.sampled_from([0.0, 0.05, 0.3]))
def test_the_plateau_schedule_is_torchs(losses: list[float], patience: int, minimum: float) -> None:
    """A report of round t steers round t + 1, as torch's scheduler after epoch t steers epoch t + 1."""
    scripted, optimiser = Scripted(losses), a_rate()
    scripted.play(schedule=Schedule("plateau", patience=patience, factor=0.5, minimum=minimum))
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, factor=0.5, patience=patience, min_lr=minimum * LR, eps=0
    )
    expected = []
    for loss in losses:
        expected.append(optimiser.param_groups[0]["lr"])
        theirs.step(loss)
    assert scripted.rates == pytest.approx(expected)


def test_a_constant_rate_ignores_what_is_reported() -> None:
    scripted = Scripted([1.0] * 8)
    scripted.play()
    assert scripted.rates == [LR] * 8


STOPS: list[tuple[str, EarlyStop, list[float | None], int, bool]] = [
    ("never, while it improves", EarlyStop(2), [5.0, 4.0, 3.0, 2.0, 1.0], 5, False),
    ("after `patience` rounds without", EarlyStop(2), [1.0, 1.0, 1.0, 1.0, 1.0], 3, True),
    ("an improvement starts the count anew", EarlyStop(2), [3.0, 3.0, 2.0, 2.0, 2.0, 1.0], 5, True),
    ("less than min_delta is none", EarlyStop(2, min_delta=0.5), [3.0, 2.9, 2.8, 2.7, 2.6], 3, True),
    ("small steps add up to one", EarlyStop(2, min_delta=0.15), [3.0, 2.9, 2.8, 2.7, 2.6, 2.5], 6, False),
    ("as a share, bigger is better", EarlyStop(2, metric="accuracy"), [0.1, 0.2, 0.3, 0.4, 0.5], 5, False),
    ("a share that falls", EarlyStop(2, metric="accuracy"), [0.5, 0.4, 0.3, 0.2, 0.1], 3, True),
    ("a calibration error, smaller is better", EarlyStop(2, metric="ece"), [0.5, 0.4, 0.3, 0.2, 0.1], 5, False),
    ("half a point of accuracy", EarlyStop(1, 0.005, "accuracy"), [0.5, 0.506, 0.512, 0.516, 0.9], 4, True),
    ("a round without reports does not count", EarlyStop(2), [1.0, None, None, None, None], 5, False),
]


@pytest.mark.parametrize(("stop", "script", "rounds", "early"), [case[1:] for case in STOPS], ids=[c[0] for c in STOPS])
def test_early_stopping(stop: EarlyStop, script: list[float | None], rounds: int, early: bool) -> None:
    outcome = Scripted(script, stop.metric).play(early_stop=stop)
    assert (outcome.rounds, outcome.stopped_early) == (rounds, early)


def test_progress_survives_json() -> None:
    for progress in (Progress(), Progress(3, 1, 0.5, 0.4, 2, 0.25, 0.2, 1, True)):
        assert Progress.from_json(progress.as_json()) == progress


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 12), cohort=st.integers(1, 14), round=st.integers(1, 1000))
def test_a_cohort_has_no_repeats_keeps_the_order_and_comes_from_the_seed(
    seed: int, count: int, cohort: int, round: int
) -> None:
    sites, rules = [f"s{n}" for n in range(count)], RoundOptions(1, seed=seed, cohort=cohort)
    drawn = draw_cohort(sites, rules, round)
    assert len(set(drawn)) == len(drawn) == min(count, cohort)
    assert drawn == sorted(drawn, key=sites.index)
    assert drawn == draw_cohort(sites, rules, round)


def test_every_cohort_is_equally_likely() -> None:
    """χ² over all 20 choices of three sites of six; the seed is fixed, so this cannot fail by chance twice."""
    sites = list("abcdef")
    counts = Counter(tuple(draw_cohort(sites, RoundOptions(1, seed=1, cohort=3), round)) for round in range(1, 3001))
    observed = [counts[chosen] for chosen in combinations(sites, 3)]
    assert sum(observed) == 3000
    assert stats.chisquare(observed).pvalue > 1e-3


def test_cohorts_change_with_round_and_seed() -> None:
    sites = [f"s{n}" for n in range(30)]
    drawn = [tuple(draw_cohort(sites, RoundOptions(1, seed=s, cohort=10), r)) for s in range(5) for r in range(1, 6)]
    assert len(set(drawn)) == 25
