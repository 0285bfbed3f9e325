"""What a site's machine can do: Eq. 1 and 2 of PFedCDP by hand, drawn cards, and this very machine."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import kstest

from polyclinic.config.capability import (
    RESOURCES,
    THRESHOLDS,
    Capability,
    GivenProfile,
    MachineProfile,
    ResourceWeights,
    available_memory,
    capability_score,
    check_thresholds,
    find_cluster,
    site_profile,
    training_memory,
)
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import EngineError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.deploy.machine import _score_battery, _score_cpu, measure_latency, measure_machine
from tests.small import TINY

PAPER = ResourceWeights(0.3, 0.3, 0.1, 0.3)
"""The paper's example, for a deployment where the battery matters less."""
SEED = Stream(7)
EQUAL = Capability().weights
GIVEN = {"cpu": 0.9, "memory": 0.5, "battery": 1.0, "network": 0.8}

shares = st.floats(0, 1)
cards = st.builds(MachineProfile, shares, shares, shares, shares)
weights = (
    st.lists(st.integers(0, 100), min_size=4, max_size=4)
    .filter(any)
    .map(lambda parts: ResourceWeights(*(part / sum(parts) for part in parts)))
)
falling = (
    st.lists(st.floats(0, 1, exclude_min=True), unique=True, max_size=5)
    .map(lambda steps: [*sorted(steps, reverse=True), 0.0])
    .map(lambda steps: {f"cluster {number}": least for number, least in enumerate(steps)})
)


@pytest.fixture
def listening() -> Iterator[tuple[str, int]]:
    """A real server, which the kernel answers for."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()


@pytest.fixture
def deaf() -> Iterator[tuple[str, int]]:
    """A port that is taken, so nobody else's, at which nobody listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server.getsockname()


def test_the_score_by_hand() -> None:
    card = MachineProfile(cpu=0.8, memory=0.5, battery=0.2, network=0.9)
    assert capability_score(card, EQUAL) == pytest.approx((0.8 + 0.5 + 0.2 + 0.9) / 4)
    assert capability_score(card, PAPER) == pytest.approx(0.24 + 0.15 + 0.02 + 0.27)


@pytest.mark.parametrize("name", RESOURCES)
def test_each_weight_belongs_to_its_resource(name: str) -> None:
    card = MachineProfile(0.1, 0.2, 0.3, 0.4)
    alone = ResourceWeights(**dict.fromkeys(RESOURCES, 0.0) | {name: 1.0})
    assert capability_score(card, alone) == getattr(card, name)


@given(cards, weights)
def test_the_score_is_the_sum_of_equation_1(card: MachineProfile, weighed: ResourceWeights) -> None:
    by_hand = sum(getattr(weighed, name) * getattr(card, name) for name in RESOURCES)
    assert capability_score(card, weighed) == pytest.approx(by_hand, abs=1e-12)


@given(shares, weights)
def test_a_card_that_is_alike_throughout_scores_just_that(share: float, weighed: ResourceWeights) -> None:
    assert capability_score(MachineProfile(share, share, share, share), weighed) == share


@given(falling)
def test_a_cluster_begins_exactly_at_its_threshold(thresholds: dict[str, float]) -> None:
    assert list(check_thresholds(thresholds)) == []
    names = list(thresholds)
    for place, name in enumerate(names):
        assert find_cluster(thresholds[name], thresholds) == name
        if place + 1 < len(names):
            assert find_cluster(math.nextafter(thresholds[name], 0), thresholds) == names[place + 1]
    assert find_cluster(1.0, thresholds) == names[0]


def test_equation_2_with_our_thresholds() -> None:
    found = [find_cluster(value, THRESHOLDS) for value in (1, 0.66, 0.659, 0.33, 0.329, 0)]
    assert found == ["high", "high", "medium", "medium", "low", "low"]
    assert find_cluster(capability_score(MachineProfile(0.66, 0.66, 0.66, 0.66), PAPER), THRESHOLDS) == "high"


@given(cards, weights, falling, st.sampled_from(RESOURCES), shares)
def test_more_of_anything_never_lowers_the_cluster(
    card: MachineProfile, weighed: ResourceWeights, thresholds: dict[str, float], name: str, share: float
) -> None:
    better = replace(card, **{name: max(share, getattr(card, name))})
    order = list(thresholds)
    before, after = (order.index(find_cluster(capability_score(one, weighed), thresholds)) for one in (card, better))
    assert after <= before


@given(
    st.integers(0, 2**53),
    st.text(max_size=8),
    st.integers(0, 1000),
    st.dictionaries(st.text(), st.just(GivenProfile(**GIVEN))),
)
def test_a_drawn_card_depends_on_seed_site_and_period_only(
    seed: int, site: str, period: int, others: dict[str, GivenProfile]
) -> None:
    others.pop(site, None)
    plain, full = Capability(), Capability(PAPER, others, reassess_every=3, max_latency_ms=1.0)
    card = site_profile(plain, site, period, Stream(seed))
    assert card == site_profile(full, site, period, Stream(seed))
    different = [(site, period, seed + 1), (f"{site}+", period, seed), (site, period + 1, seed)]
    assert all(site_profile(plain, name, when, Stream(other)) != card for name, when, other in different)


def test_drawn_cards_are_uniform_and_their_numbers_unrelated() -> None:
    drawn = [site_profile(Capability(), f"site-{number}", 0, SEED) for number in range(500)]
    columns = [[getattr(card, name) for card in drawn] for name in RESOURCES]
    assert all(kstest(column, "uniform").pvalue > 0.001 for column in columns)
    assert len({value for column in columns for value in column}) == 2000


def test_a_given_card_stays() -> None:
    capability = Capability(profiles={"a": GivenProfile(**GIVEN, gigabytes=16), "b": GivenProfile(**GIVEN)})
    assert site_profile(capability, "a", 0, SEED) == MachineProfile(0.9, 0.5, 1.0, 0.8, 16 * 10**9)
    assert site_profile(capability, "b", 0, SEED) == MachineProfile(0.9, 0.5, 1.0, 0.8)
    assert site_profile(capability, "a", 5, Stream(8)) == site_profile(capability, "a", 0, SEED)
    assert site_profile(capability, "c", 5, SEED) != site_profile(capability, "c", 0, SEED)


def test_a_period_lasts_as_long_as_the_recipe_says() -> None:
    assert [Capability(reassess_every=3).period_of_round(number) for number in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
    assert {Capability().period_of_round(number) for number in range(1, 100)} == {0}


def test_a_recipe_can_write_it() -> None:
    values = {"weights": asdict(PAPER), "profiles": {"a": GIVEN}, "reassess_every": 5, "max_latency_ms": 100}
    assert read(values) == Capability(PAPER, {"a": GivenProfile(**GIVEN)}, 5, 100.0)
    assert read({}) == Capability()


def read(values: dict[str, Any]) -> Capability:
    return Recipe.from_values(TINY | {"capability": values}).capability


WRITTEN = asdict(PAPER)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"weights": WRITTEN | {"cpu": 0.4}}, "the weights add up to 1.1"),
    ({"weights": WRITTEN | {"cpu": 0.3 + 2e-6}}, "the weights add up to 1.000002"),
    ({"weights": WRITTEN | {"cpu": -0.3, "memory": 0.9}}, "weights.cpu is -0.3"),
    ({"weights": WRITTEN | {"cpu": math.nan}}, "weights.cpu is nan"),
    ({"weights": WRITTEN | {"cpu": math.inf}}, "weights.cpu is inf"),
    ({"weights": {"cpu": 0.5, "memory": 0.3, "network": 0.2}}, "'capability.weights.battery' is missing"),
    ({"weights": WRITTEN | {"gpu": 0.0}}, "there is no key 'capability.weights.gpu'"),
    ({"weights": {}}, "'capability.weights.cpu' is missing"),
    ({"profiles": {"a": GIVEN | {"cpu": 1.2}}}, "capability.profiles.a.cpu is 1.2"),
    ({"profiles": {"a": GIVEN | {"network": -0.1}}}, "profiles.a.network is -0.1"),
    ({"profiles": {"a": GIVEN | {"memory": math.nan}}}, "profiles.a.memory is nan"),
    ({"profiles": {"a": GIVEN, "b": {"cpu": 1.0}}}, "'capability.profiles.b.memory' is missing"),
    ({"profiles": {"a": GIVEN | {"gygabytes": 4}}}, "gygabytes' (did you mean 'gigabytes'?)"),
    ({"profiles": {"a": GIVEN | {"gigabytes": 0}}}, "gigabytes is 0"),
    ({"profiles": {"a": GIVEN | {"gigabytes": math.inf}}}, "gigabytes is inf"),
    ({"reassess_every": 0}, "capability.reassess_every is 0"),
    ({"max_latency_ms": 0.0}, "max_latency_ms is 0.0"),
    ({"max_latency_ms": math.nan}, "max_latency_ms is nan"),
    ({"max_latency_ms": math.inf}, "max_latency_ms is inf"),
]


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_what_is_wrong_with_a_recipe_is_said_in_a_sentence(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(values)
    assert words in str(caught.value)
    assert "capability." in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cpu", [-0.3, math.nan, math.inf, 0.4, 0.3 + 2e-6])
def test_no_score_has_wrong_weights(cpu: float) -> None:
    with pytest.raises((RecipeError, ValueError), match=r"the weights? "):
        ResourceWeights(**(WRITTEN | {"cpu": cpu}))


@pytest.mark.parametrize("wrong", [{"cpu": 1.2}, {"network": -0.1}, {"memory": math.nan}, {"gigabytes": math.inf}])
def test_no_simulated_site_has_a_wrong_profile(wrong: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=f"a site's {next(iter(wrong))} is"):
        GivenProfile(**(GIVEN | wrong))


def test_weights_may_miss_1_by_a_millionth() -> None:
    for cpu in (0.3 + 9e-7, 0.3 - 9e-7):
        assert replace(PAPER, cpu=cpu).cpu == cpu


@pytest.mark.parametrize(
    ("thresholds", "words"),
    [
        ({}, "there is no cluster"),
        ({"high": 0.3, "medium": 0.6, "low": 0.0}, "cluster high begins at a score of 0.3 and medium,"),
        ({"high": 0.6, "medium": 0.6, "low": 0.0}, "cluster high begins at a score of 0.6 and medium,"),
        ({"high": 0.6, "medium": 0.0, "low": 0.0}, "cluster medium begins at a score of 0.0 and low,"),
        ({"high": 0.6, "medium": math.nan, "low": 0.0}, "cluster high begins at a score of 0.6 and medium,"),
        ({"high": 1.1, "low": 0.0}, "cluster high begins at a score of 1.1"),
        ({"high": 0.6, "low": 0.1}, "cluster low, the last, begins at a score of 0.1"),
        ({"high": 0.6, "low": -0.1}, "cluster low, the last, begins at a score of -0.1"),
        ({"all": math.nan}, "cluster all begins at a score of nan"),
    ],
)
def test_thresholds_that_sort_nobody_are_refused(thresholds: dict[str, float], words: str) -> None:
    assert words in next(check_thresholds(thresholds))
    with pytest.raises(RecipeError):
        find_cluster(0.5, thresholds)


@pytest.mark.parametrize("value", [-0.01, math.nan])
def test_a_score_below_all_belongs_nowhere(value: float) -> None:
    with pytest.raises(RecipeError, match="belongs to no cluster"):
        find_cluster(value, THRESHOLDS)


@pytest.mark.parametrize("name", RESOURCES)
@pytest.mark.parametrize("value", [-0.001, 1.001, math.nan, math.inf])
def test_a_card_holds_shares(name: str, value: float) -> None:
    with pytest.raises(RecipeError, match=f"a site's {name} is {value}"):
        MachineProfile(**(GIVEN | {name: value}))  # type: ignore[arg-type]


def test_a_card_has_some_memory_or_does_not_say() -> None:
    with pytest.raises(RecipeError, match="total_memory is 0"):
        MachineProfile(1, 1, 1, 1, total_memory=0)


def test_this_machine_is_measured(listening: tuple[str, int]) -> None:
    card = measure_machine(listening, 200.0)
    assert 0 <= capability_score(card, EQUAL) <= 1
    assert card.total_memory == psutil.virtual_memory().total
    available = card.memory * card.total_memory
    assert available == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert card.notes[1] == f"{available / 1e9:.1f} of {card.total_memory / 1e9:.1f} GB available"
    assert card.network > 0.9
    assert len(card.notes) == len(RESOURCES)
    assert f"127.0.0.1:{listening[1]}" in card.notes[-1]


def test_without_a_server_the_network_is_not_measured() -> None:
    card = measure_machine()
    assert card.network == 1
    assert "not measured" in card.notes[-1]


def test_a_network_slower_than_acceptable_counts_0(listening: tuple[str, int]) -> None:
    assert measure_machine(listening, 1e-6).network == 0


def test_latency_is_that_of_a_connection(listening: tuple[str, int]) -> None:
    """In milliseconds: none takes less than a microsecond, nor, on one machine, as long as a blink."""
    assert 1e-3 < measure_latency(listening) < 50
    assert 1e-3 < measure_latency(("localhost", listening[1])) < 50


def test_a_server_nobody_runs_is_named(deaf: tuple[str, int]) -> None:
    with pytest.raises(EngineError, match=rf"^the server 127.0.0.1:{deaf[1]} cannot be reached \(Connection refused\)"):
        measure_machine(deaf, 200.0)


def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        first.connect(server.getsockname())  # the one place in its queue
        with pytest.raises(EngineError, match="timed out"):
            measure_latency(server.getsockname(), patience=0.2)


@pytest.mark.parametrize("server", [("a" * 70, 80), ("127.0.0.1", 0), ("127.0.0.1", -1)])
def test_an_address_that_is_none_gets_a_sentence(server: tuple[str, int]) -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        measure_latency(server, patience=1.0)


def test_a_port_beyond_the_last_does_not_count_from_0_again(listening: tuple[str, int]) -> None:
    with pytest.raises(EngineError, match="from 1 to 65535"):
        measure_latency((listening[0], listening[1] + 2**16))


@pytest.mark.parametrize("most", [0.0, -5.0, math.nan, math.inf, 1e300])
def test_a_latency_nobody_can_accept_is_refused(most: float) -> None:
    with pytest.raises(RecipeError, match="max_latency_ms is"):
        measure_machine(None, most)


def test_the_processor_by_its_frequency_or_by_its_use() -> None:
    assert _score_cpu(1200.0, 2400.0)[0] == 0.5
    assert _score_cpu(3600.0, 2400.0)[0] == 1
    for now, most in ((2400.0, 0.0), (0.0, 2400.0), (0.0, 0.0)):
        share, note = _score_cpu(now, most)
        assert 0 <= share <= 1
        percent = re.search(r"(\d+) % was in use", note)
        assert percent is not None
        assert abs(int(percent[1]) - 100 * (1 - share)) <= 1, "but for rounding"


def test_mains_power_is_a_full_battery() -> None:
    assert [_score_battery(None, False)[0], _score_battery(20.0, True)[0]] == [1, 1]
    assert [_score_battery(20.0, False)[0], _score_battery(0.0, False)[0], _score_battery(101.0, False)[0]] == [
        0.2,
        0,
        1,
    ]


def test_training_memory_counts_the_tensors_of_adam() -> None:
    layer = torch.nn.Linear(30, 20)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 30)).sum().backward()
    adam.step()
    moments = [value for state in adam.state.values() for name, value in state.items() if name != "step"]
    gradients = [weight.grad for weight in layer.parameters() if weight.grad is not None]
    held = sum(tensor.nbytes for tensor in (*layer.parameters(), *gradients, *moments))
    assert training_memory(30 * 20 + 20) == held
    assert training_memory(30 * 20 + 20, 500) == held + 500


def test_room_is_the_memory_that_is_available() -> None:
    assert available_memory(MachineProfile(1, 0.25, 1, 1, 16 * 10**9)) == 4 * 10**9
    assert available_memory(MachineProfile(1, 0.25, 1, 1)) is None
