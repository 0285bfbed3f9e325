"""W5: a site's influence is capped by what it registered, whatever it claims.

Each site sends a unit vector of its own and training starts at zero, so the state after a round IS the weights that
the sites were given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fednova import FedNova
from polyclinic.core.errors import RoundFailed
from polyclinic.core.jobs import Federation
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import SiteId
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from polyclinic.training.data_order import draw_epoch_batches
from tests.federation.mock_engine import MockEngine

BATCH = 8
TRAINING = Training(batch=BATCH)
COUNTS = st.lists(st.integers(1, 2000), min_size=2, max_size=6)
CLAIMS = st.integers(-5, 2100) | st.integers(-(10**18), 10**18)
quick = settings(max_examples=120, deadline=None, derandomize=True)


def influence(
    registered: Sequence[int],
    claims: Mapping[int, Any],
    scalars: Mapping[int, Mapping[str, Any]] | None = None,
    algorithm: Algorithm | None = None,
) -> list[float]:
    """The weight each site gets in one round, when some claim other examples or steps than they have."""
    sites = {f"site {k}": n for k, n in enumerate(registered)}
    start = {"model": {"w": torch.zeros(len(sites), dtype=torch.float64)}, "buffers": {}}

    def answer(site: SiteId, data: bytes) -> bytes:
        k = list(sites).index(site)
        fields = {"run": "run", "round": 1, "site": site, "examples": claims.get(k, registered[k])}
        fields["scalars"] = (scalars or {}).get(k, {"steps": honest_steps(registered[k])})
        unit = torch.eye(len(sites), dtype=torch.float64)[k]
        return messages.encode(fields, {"model": {"w": unit}})

    method = algorithm or FedAvg()
    rounds = Rounds(
        Federation(("a", "b"), sites, start), method, MockEngine(answer), RoundOptions(rounds=1), RamJournal()
    )
    return [float(v) for v in rounds.play_all().state["model"]["w"]]


@cache
def honest_steps(examples: int) -> int:
    """What the training loop does with that many examples in one epoch."""
    return len(draw_epoch_batches(torch.zeros(examples), TRAINING, Stream(0)))


def shares(registered: Sequence[int], out: frozenset[int] = frozenset()) -> list[float]:
    total = sum(n for k, n in enumerate(registered) if k not in out)
    return [0.0 if k in out else n / total for k, n in enumerate(registered)]


@quick
@given(COUNTS, CLAIMS, st.data())
def test_one_claim_never_gains_more_than_its_share(registered: list[int], claim: int, data: st.DataObject) -> None:
    """A true claim gives exactly its share, a lower one less, a higher one nothing: it is refused."""
    k = data.draw(st.integers(0, len(registered) - 1))
    found = influence(registered, {k: claim})
    allowed = 1 <= claim <= registered[k]
    assert found[k] <= shares(registered)[k] + 1e-12
    expected = shares([claim if i == k else n for i, n in enumerate(registered)], frozenset(() if allowed else (k,)))
    assert found == pytest.approx(expected, abs=1e-12)


def _claims(counts: list[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(CLAIMS, min_size=len(counts), max_size=len(counts))


@quick
@given(COUNTS.flatmap(lambda counts: st.tuples(st.just(counts), _claims(counts))))
def test_whatever_all_claim_each_is_capped_by_what_it_registered(case: tuple[list[int], list[int]]) -> None:
    registered, claims = case
    accepted = [k for k, n in enumerate(registered) if 1 <= claims[k] <= n]
    assume(accepted)
    found = influence(registered, dict(enumerate(claims)))
    assert sum(found) == pytest.approx(1.0)
    for k, weight in enumerate(found):
        rest = sum(claims[i] for i in accepted if i != k)
        assert weight <= (registered[k] / (registered[k] + rest) if k in accepted else 0.0) + 1e-12


@quick
@given(COUNTS, st.data())
def test_uniform_weights_ignore_every_claim(registered: list[int], data: st.DataObject) -> None:
    claims = {k: data.draw(st.integers(1, n)) for k, n in enumerate(registered)}
    found = influence(registered, claims, algorithm=FedAvg(Training(weights="uniform")))
    assert found == pytest.approx([1 / len(registered)] * len(registered), abs=1e-12)


@pytest.mark.parametrize("claim", [True, 5.0, "5", None, [5], 10**400, -1, 0])
def test_a_claim_that_is_no_count_gets_no_weight(claim: object) -> None:
    assert influence([10, 20, 30], {1: claim}) == pytest.approx([0.25, 0.0, 0.75])


def test_when_all_claim_too_much_the_round_fails() -> None:
    with pytest.raises(RoundFailed, match="examples"):
        influence([10, 20], {0: 11, 1: 21})


@quick
@given(COUNTS, st.floats(-10, 1e4) | st.integers(-(10**400), 10**400), st.sampled_from([0.0, 0.9]), st.data())
def test_only_the_steps_that_follow_from_the_examples_count(
    registered: list[int], steps: float, momentum: float, data: st.DataObject
) -> None:
    """FedNova divides a site's update by its claim and multiplies everybody's by the mean of the claims: fewer steps
    than were taken would pull harder, more would push everybody. Both are refused."""
    method = FedNova(replace(TRAINING, optimiser=Optimiser(momentum=momentum)))
    k = data.draw(st.integers(0, len(registered) - 1))
    steps = data.draw(st.sampled_from([steps, honest_steps(registered[k]), 1]))
    found = influence(registered, {}, {k: {"steps": steps}}, method)
    if steps == honest_steps(registered[k]):
        assert found == influence(registered, {}, algorithm=method)
    else:
        assert found[k] == 0.0
        others = [i for i in range(len(registered)) if i != k]
        rest = influence([registered[i] for i in others], {}, algorithm=method)
        assert [found[i] for i in others] == pytest.approx(rest, rel=1e-9)


@quick
@given(COUNTS, st.data())
def test_fewer_examples_do_not_buy_more_steps(registered: list[int], data: st.DataObject) -> None:
    """The steps that a site may claim follow from the examples it claims in the same message."""
    k = data.draw(st.integers(0, len(registered) - 1))
    claim = data.draw(st.integers(1, registered[k]))
    too_many = -(-claim // BATCH) + data.draw(st.integers(1, 1000))
    found = influence(registered, {k: claim}, {k: {"steps": too_many}}, FedNova(TRAINING))
    assert found[k] == 0.0


@pytest.mark.parametrize("steps", [0, -1, 0.5, 3, "2", None, True, [2]])
def test_steps_that_cannot_be_are_refused(steps: object) -> None:
    found = influence([16, 16], {}, {1: {"steps": steps}}, FedNova(TRAINING))
    assert found == pytest.approx([1.0, 0.0])


def test_missing_steps_are_refused() -> None:
    assert influence([16, 16], {}, {1: {}}, FedNova(TRAINING)) == pytest.approx([1.0, 0.0])
