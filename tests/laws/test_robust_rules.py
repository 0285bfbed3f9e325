"""Rules that one hostile site cannot own: closed forms, breakdown points, and equality with the mean when all agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fedcycle import FedCycle
from polyclinic.algorithms.optimisation.scaffold import Scaffold
from polyclinic.algorithms.personalisation.fedbn import FedBN
from polyclinic.core.errors import RecipeError
from polyclinic.core.flat_tensors import copy_tensors
from polyclinic.core.jobs import Update
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.types import Bundle, SiteId
from polyclinic.federation.robust.rules import (
    MOST_BELIEVED,
    Aggregation,
    believe_counts,
    cap_weights,
    choose_by_krum,
    trim_count,
    trimmed_mean,
)
from polyclinic.federation.robust.screen import LEFT_OUT, OUTVOTED, Outlier, UpdateScreen
from polyclinic.federation.robust.store import UpdateStore
from polyclinic.runs.experiment import Experiment
from polyclinic.storage import messages
from tests.laws.bench import clinics, play, same, small
from tests.small import tiny

quick = settings(max_examples=60, deadline=None, derandomize=True)
ROBUST = ("norm_bound", "trimmed_mean", "median", "krum")
SGD = Training(batch=4, optimiser=Optimiser(lr=0.05))
AVERAGING = {"fedavg": FedAvg(SGD), "fedcycle": FedCycle(SGD), "scaffold": Scaffold(SGD), "fedbn": FedBN(SGD)}


def updates(*rows: list[float], examples: list[int] | None = None, buffers: bool = False) -> list[Update]:
    """Sites `0`, `1`, … with these weights."""
    counts = examples or [10] * len(rows)
    found = []
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        tensors: Bundle = {
            "model": copy_tensors({"a": torch.tensor(row[:1]), "b": torch.tensor(row[1:])}),
            "buffers": {},
        }
        found.append(Update(tensors, count, str(number)))
    return found


def state_of(values: int) -> Bundle:
    return {"model": copy_tensors({"a": torch.zeros(1), "b": torch.zeros(values - 1)}), "buffers": {}}


def aggregated(
    rule: Aggregation,
    given_updates: list[Update],
    memory: int = 1 << 20,
    doubted: Collection[SiteId] = (),
) -> tuple[torch.Tensor, list[Outlier]]:
    """The next model as one vector, and the outliers."""
    method, state, found = FedAvg(), state_of(given_updates[0].tensors["model"]["b"].numel() + 1), list[Outlier]()
    screen = UpdateScreen(rule, method, memory, doubted)
    after = method.aggregate(state, screen.screen(iter(given_updates), state, found.append))
    return torch.cat([t.reshape(-1) for t in after["model"].values()]), found


HONEST = [[1.0, 0.9, 1.1], [0.8, 1.2, 1.0], [1.1, 1.0, 0.7], [0.9, 1.1, 1.2]]
rows_strategy = st.integers(3, 9).flatmap(
    lambda sites: st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=sites, max_size=sites)
)


@quick
@given(rows_strategy, st.sampled_from([0.1, 0.2, 0.4]))
def test_trimmed_mean_and_median_are_numpys(rows: list[list[float]], trim: float) -> None:
    """Sort each coordinate, leave out ⌈trim · K⌉ at each end (at most so many that one is left), and average."""
    table = np.sort(np.array(rows, dtype=np.float64), axis=0)
    found, _ = aggregated(Aggregation("median"), updates(*rows))
    assert np.allclose(found, np.median(table, axis=0), atol=1e-6)
    cut = min(int(np.ceil(trim * len(rows) - 1e-9)), (len(rows) - 1) // 2)
    found, _ = aggregated(Aggregation("trimmed_mean", trim=trim), updates(*rows))
    assert np.allclose(found, table[cut : len(rows) - cut].mean(axis=0), atol=1e-6)


@quick
@given(rows_strategy, st.integers(1, 2), st.integers(1, 3))
def test_krum_is_its_definition(rows: list[list[float]], hostile: int, choose: int) -> None:
    table = np.array(rows, dtype=np.float64)
    apart = ((table[:, None] - table[None]) ** 2).sum(-1)
    nearest = max(1, len(rows) - hostile - 2)
    scores = [np.sort(np.delete(apart[i], i))[:nearest].sum() for i in range(len(rows))]
    rule = Aggregation("krum", hostile=hostile, choose=choose)
    chosen = choose_by_krum(torch.from_numpy(apart), rule)
    best = sorted(scores)[: min(choose, len(rows))]
    assert np.allclose(sorted(scores[place] for place in chosen), best)
    found, _ = aggregated(rule, updates(*rows))
    assert np.allclose(found, table[sorted(chosen)].mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("name", ["trimmed_mean", "median", "krum"])
def test_one_of_five_has_a_bounded_effect_and_a_majority_does_not(name: str) -> None:
    """The breakdown point: one far value of five leaves the centre among the honest ones, three do not."""
    honest = torch.tensor(HONEST)
    for far in (1e6, -1e6):
        found, outliers = aggregated(Aggregation(name), updates(*HONEST, [far] * 3))  # type: ignore[arg-type]
        assert bool(((found >= honest.min(0).values) & (found <= honest.max(0).values)).all())
        assert [(o.site, o.done) for o in outliers] == [("4", OUTVOTED)]
        taken, _ = aggregated(Aggregation(name), updates(*HONEST[:2], *([[far] * 3] * 3)))  # type: ignore[arg-type]
        assert float(taken.abs().min()) > 1e5
    plain, _ = aggregated(Aggregation("mean"), updates(*HONEST, [1e6] * 3))
    assert float(plain.min()) > 1e5


@pytest.mark.parametrize("name", ["trimmed_mean", "median", "krum"])
def test_with_too_few_sites_for_what_a_rule_promises_no_run_begins(name: str) -> None:
    """Krum withstands f of 2f + 3 sites; a quorum, a cohort or a cluster may make a round smaller than the run."""
    least = {"krum": 5}.get(name, 3)
    few, enough = {"data__partition__sites": least - 1}, {"data__partition__sites": least}
    changes: dict[str, Any]
    for changes in (few, {**enough, "quorum": least - 1}, {**enough, "cohort": least - 1}):
        with pytest.raises(RecipeError, match=f"{name} needs {least} sites or more .* may have {least - 1}; have more"):
            Experiment(tiny(aggregate=name, **changes))
    Experiment(tiny(aggregate=name, **enough))
    Experiment(tiny(aggregate="norm_bound", **few))
    with pytest.raises(RecipeError, match="krum needs 7 sites or more"):
        Experiment(tiny(aggregate={"name": "krum", "hostile": 2}, data__partition__sites=6))


def test_counts_are_ignored_by_the_centres_and_not_by_the_mean() -> None:
    few, many = updates(*HONEST), updates(*HONEST, examples=[1, 1, 1, 1000])
    for name in ("trimmed_mean", "median", "krum"):
        rule = Aggregation(name)
        assert torch.equal(aggregated(rule, few)[0], aggregated(rule, many)[0])
    assert not torch.equal(aggregated(Aggregation("mean"), few)[0], aggregated(Aggregation("mean"), many)[0])


@pytest.mark.parametrize("name", ["trimmed_mean", "median", "krum"])
def test_the_order_of_sites_is_of_no_account(name: str) -> None:
    found = {
        aggregated(Aggregation(name), list(order))[0].numpy().tobytes()  # type: ignore[arg-type]
        for order in itertools.permutations(updates(*HONEST, [7.0, -7.0, 7.0]))
    }
    assert len(found) == 1


@pytest.mark.parametrize("memory", [0, 40, 1 << 20], ids=["on disk", "some on disk", "in memory"])
@pytest.mark.parametrize("name", ROBUST)
def test_where_updates_are_kept_changes_no_bit(name: str, memory: int) -> None:
    rule = Aggregation(name)  # type: ignore[arg-type]
    given_updates = updates(*HONEST, [1e6, -1e6, 3.0], examples=[3, 5, 7, 11, 13])
    assert torch.equal(aggregated(rule, given_updates, memory)[0], aggregated(rule, given_updates)[0])


def test_a_store_returns_what_it_was_given() -> None:
    tensors: Bundle = {
        "model": copy_tensors({"w": torch.randn(3, 2), "s": torch.randn(())}),
        "buffers": {"n": torch.tensor(7), "m": torch.randn(4, dtype=torch.float64), "e": torch.zeros(0)},
    }
    for limit in (0, 1 << 20):
        store = UpdateStore(limit)
        store.add(Update(tensors, 1, "a"))
        assert torch.equal(torch.cat(list(store.blocks("model", "w"))), tensors["model"]["w"].reshape(1, -1))
        (found,) = store.take_all()
        assert messages.hash_tensors(found.tensors) == messages.hash_tensors(tensors)
        assert len(store) == 0


@pytest.mark.parametrize("method", AVERAGING.values(), ids=AVERAGING.keys())
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
def test_without_an_outlier_the_bound_is_the_mean_bit_for_bit(method: Algorithm, norm: bool) -> None:
    """In whole runs; a bound that nobody reaches, and half the weight for one site."""
    sites, rule = clinics(12, 8, 20), Aggregation("norm_bound", bound=1e6, against=1e6)
    plain = play(method, sites, small(norm), 3)
    assert play(method, sites, small(norm), 3, aggregate=rule).sha256 == plain.sha256


@pytest.mark.parametrize("name", ["trimmed_mean", "median", "krum"])
def test_equal_updates_have_their_own_centre_in_every_kind(name: str) -> None:
    """SCAFFOLD's control variates too: what all sites agree on is what the algorithm gets from each."""
    way = {"w": torch.tensor([1.0, -2.0])}
    alike: list[Update] = [
        Update({"model": dict(way), "buffers": {}, "control": {"w": torch.tensor([0.5, 0.25])}}, n, str(n))
        for n in (1, 2, 3)
    ]
    zero = {"w": torch.zeros(2)}
    state: Bundle = {"model": zero, "buffers": {}, "control": zero, "all": {"sites": torch.tensor(4)}}
    screen = UpdateScreen(Aggregation(name), Scaffold(SGD))  # type: ignore[arg-type]
    found = Scaffold(SGD).aggregate(state, screen.screen(iter(alike), state))
    assert same(found, Scaffold(SGD).aggregate(state, iter(alike)))
    assert torch.equal(found["control"]["w"], torch.tensor([0.375, 0.1875]))


def test_far_updates_are_left_out() -> None:
    """The mean is that of the others, however far the outlier is; the kinds that it was far in do not matter."""
    others, _ = aggregated(Aggregation("mean"), updates(*HONEST))
    for far in ([100.0] * 3, [-5.0] * 3, [1e30, 0.0, 0.0]):
        found, outliers = aggregated(Aggregation(), updates(*HONEST, far))
        assert torch.equal(found, others)
        assert [(o.site, o.done, o.running) for o in outliers] == [("4", LEFT_OUT, 1)]


def test_nobody_nearer_than_the_median_is_ever_an_outlier() -> None:
    """Not even one that points against all others: it could be a site with other patients."""
    found, outliers = aggregated(Aggregation(), updates(*HONEST, [-1.0, -1.0, -1.0]))
    assert not outliers
    assert torch.allclose(found, torch.tensor([*HONEST, [-1.0] * 3]).mean(0))


def test_moving_against_the_others_is_bounded_more_tightly_than_moving_with_them() -> None:
    assert not aggregated(Aggregation(), updates(*HONEST, [3.0, 3.0, 3.0]))[1]
    (outlier,) = aggregated(Aggregation(), updates(*HONEST, [-3.0, -3.0, -3.0]))[1]
    assert outlier.opposed
    assert "against the others' direction" in outlier.sentence


def test_a_site_that_was_left_out_is_held_to_half_the_distance() -> None:
    method, state, found = FedAvg(), state_of(3), list[Outlier]()
    screen = UpdateScreen(Aggregation(), method)
    for factor in (100.0, 3.0, 1.0, 3.0):
        list(screen.screen(iter(updates(*HONEST, [factor] * 3)), state, found.append))
    assert [outlier.running for outlier in found] == [1, 2], "3 × the median is too far after 100 ×, not after 1 ×"


def test_two_sites_are_a_plain_mean() -> None:
    """Nobody can say who of two is wrong."""
    for name in ROBUST:
        rule = Aggregation(name)  # type: ignore[arg-type]
        found, outliers = aggregated(rule, updates([1.0, 1.0], [100.0, 100.0]))
        assert torch.equal(found, aggregated(Aggregation("mean"), updates([1.0, 1.0], [100.0, 100.0]))[0])
        assert not outliers


@quick
@given(st.lists(st.floats(1, 1e9), min_size=3, max_size=9), st.floats(0.35, 1))
def test_no_weight_is_more_than_its_share(weights: list[float], share: float) -> None:
    """A weight below the cap stays; the order of sizes stays; the largest share is the bound, or less."""
    found = cap_weights(weights, share)
    assert max(found) <= share * sum(found) * (1 + 1e-9)
    assert all(after <= before * (1 + 1e-12) for after, before in zip(found, weights, strict=True))
    assert sum(after < before for after, before in zip(found, weights, strict=True)) <= 2
    if max(weights) <= share * sum(weights):
        assert found == weights


def test_more_local_steps_allow_a_longer_way() -> None:
    """A site with twice the images may move twice as far; an announced billion gains two and a half times."""
    way = [4.5, 4.5, 4.5]
    assert aggregated(Aggregation(), updates(*HONEST, way, examples=[64] * 5))[1]
    assert not aggregated(Aggregation(), updates(*HONEST, way, examples=[64] * 4 + [128]))[1]
    assert aggregated(Aggregation(), updates(*HONEST, [11.0] * 3, examples=[64] * 4 + [10**9]))[1]


def test_a_number_that_nobody_believes_allows_no_longer_way() -> None:
    """Twice the images, four and a half times as far: left out, unless the number is believed."""
    given_updates = updates(*HONEST, [4.5] * 3, examples=[64] * 4 + [128])
    assert aggregated(Aggregation(), given_updates, doubted=["4"])[1]
    assert not aggregated(Aggregation(), given_updates)[1]


@quick
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.integers(1, 10**9))
def test_a_claim_is_believed_up_to_a_multiple_of_the_others(others: list[int], claim: int) -> None:
    """Exactly; a higher one counts as half a site; a registered one is not in question."""
    told = {"a": claim, **{f"b{number}": count for number, count in enumerate(others)}}
    middle = float(np.median(others))
    assert believe_counts(told)["a"] == (claim if claim <= MOST_BELIEVED * middle else math.ceil(middle / 2))
    assert "a" not in believe_counts(told, ["a"])
    assert believe_counts({"a": claim}) == {"a": claim}
    assert believe_counts({"a": claim, "b": 1}) == {"a": claim, "b": 1}, "of two nobody knows who is wrong"


def test_every_algorithm_says_whether_it_averages() -> None:
    """What is averaged is sent; and a rule that replaces single updates is refused where they are needed."""
    for name, kind in ALGORITHMS.items():
        method = kind(Training(optimiser=Optimiser(momentum=0.0, weight_decay=0.0)))
        sent = {exchange.kind for exchange in method.exchanges()}
        assert set(method.averaged_kinds()) <= sent, name
        if set(method.averaged_kinds()) != sent:
            assert method.needs_single_updates() or not method.averaged_kinds(), name


def test_trim_counts_leave_a_value() -> None:
    for sites in range(3, 30):
        for trim in (0.01, 0.2, 0.49):
            assert sites - 2 * trim_count(Aggregation("trimmed_mean", trim=trim), sites) >= 1
    assert torch.equal(trimmed_mean(torch.tensor([[1.0], [2.0], [9.0]]), 1), torch.tensor([2.0], dtype=torch.float64))
