"""Updates in 8 bits: how far they may err, that they err to neither side, and that nothing bad hides in them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic import wire
from polyclinic.algorithms.fedavg import FedAvg
from polyclinic.core import Bundle, Failure, Federation, Optimiser, Stage, Stream, Tensors, Training
from polyclinic.engines.mock import MockEngine
from polyclinic.errors import RecipeError, Refused
from polyclinic.experiment import run
from polyclinic.journal import RamJournal
from polyclinic.learning.network import weights_of
from polyclinic.rounds import Rounds, Rules
from polyclinic.runner import SiteRunner
from polyclinic.stages.quantise import CHUNK, SCALES, VALUES, Quantise, dequantise_into, quantise
from polyclinic.store import RamMemory
from tests.laws.bench import clinics, small
from tests.small import tiny

STREAM = Stream(7)
EPSILON = 2.0**-23
SITES = clinics(12, 12)


def weights(sizes: dict[str, tuple[int, ...]], seed: int, size: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * size for name, shape in sizes.items()}


def there_and_back(stage: Stage, tensors: Bundle, received: Bundle, stream: Stream = STREAM) -> Bundle:
    """Through the wire as well, so that what arrives is what a server would see."""
    sent = wire.decode(wire.encode({}, stage.out(tensors, received, stream))).tensors
    return stage.back(sent, received)


@settings(max_examples=60, deadline=None)
@given(
    length=st.one_of(st.integers(1, 300), st.just(CHUNK), st.just(CHUNK + 5)),
    block=st.sampled_from([1, 7, 64, 1024]),
    size=st.sampled_from([1e-40, 1e-20, 1.0, 1e20]),
    seed=st.integers(0, 99),
    stochastic=st.booleans(),
)
def test_no_value_errs_by_more_than_its_step(length: int, block: int, size: float, seed: int, stochastic: bool) -> None:
    """Half a step to the nearest, a whole one stochastically; q = d·(1/s) rounds to 127·2⁻²³ of a step beside it."""
    length = min(length, 4000 * block)
    moved = weights({"a": (length,)}, seed, size)["a"]
    values, scales = quantise(moved, torch.zeros(length), block, STREAM.generator() if stochastic else None)
    found = torch.zeros(length)
    dequantise_into(found, values, scales, block)
    assert scales.shape == (math.ceil(length / block),)
    assert int(values.abs().max()) <= 127
    steps = scales.repeat_interleave(block)[:length].double()
    most = (1.0 if stochastic else 0.5) + 2 * 127 * EPSILON
    assert bool(((found.double() - moved.double()).abs() <= most * steps).all())
    largest = max(float(moved.abs().max()), 1e-36)
    assert float(scales.max()) <= 1.001 * largest / 127 + 1e-37


@pytest.mark.parametrize("stochastic", [True, False])
def test_the_difference_is_what_is_rounded_not_the_weights(stochastic: bool) -> None:
    """Large weights that moved little come back within a step of that little move, and float32's own rounding."""
    received = {"model": weights({"a": (50, 7), "b": (3,)}, 1, 100.0)}
    trained = {"model": {n: t + d for (n, t), d in zip(received["model"].items(), (1e-3, -1e-3), strict=True)}}
    found = there_and_back(Quantise(stochastic=stochastic), trained, received)["model"]
    assert found.keys() == trained["model"].keys()
    for name, tensor in trained["model"].items():
        rounding = 4 * EPSILON * float(tensor.abs().max())
        assert found[name].shape == tensor.shape
        assert float((found[name] - tensor).abs().max()) <= 1.3e-3 / 126 + rounding
        assert not torch.equal(found[name], received["model"][name])


def test_stochastic_rounding_errs_to_neither_side() -> None:
    """n independent draws within one step: by Hoeffding their mean is off by √(ln(2/δ)/2n) steps with chance δ = 1e-9.

    To the nearest, the same values are off by their whole fraction.
    """
    draws, fractions = 200_000, (0.1, 0.3, 0.5, 0.77, 63.9)
    room = math.sqrt(math.log(2 / 1e-9) / (2 * draws)) + 2.0**-15 + 127 * EPSILON
    for fraction in fractions:
        moved = torch.full((draws,), fraction / 126.99)
        moved[::100] = 1.0  # so that the step is 1/126.99 in every block
        rest = torch.ones(draws, dtype=torch.bool)
        rest[::100] = False
        for generator, fair in ((Stream(3, (str(fraction),)).generator(), True), (None, False)):
            values, scales = quantise(moved, torch.zeros(draws), 1000, generator)
            off = abs(float(values[rest].double().mean()) - fraction)
            assert scales.tolist() == pytest.approx([1 / 126.99] * (draws // 1000))
            assert (off <= room * math.sqrt(1 / 0.99)) == fair


def test_stochastic_errors_of_different_sites_and_kinds_are_independent() -> None:
    received = {kind: {"a": torch.zeros(5000)} for kind in ("model", "control")}
    moved = {kind: {"a": weights({"a": (5000,)}, 1)["a"]} for kind in received}
    stage = Quantise(kinds=("model", "control"))
    errors = []
    for site in ("one", "other"):
        found = there_and_back(stage, moved, received, STREAM.child(site))
        errors += [found[kind]["a"] - moved[kind]["a"] for kind in received]
    again = there_and_back(stage, moved, received, STREAM.child("one"))
    assert torch.equal(again["model"]["a"] - moved["model"]["a"], errors[0])
    correlations = torch.corrcoef(torch.stack(errors)) - torch.eye(4)
    assert float(correlations.abs().max()) < 6 / math.sqrt(5000)


@pytest.mark.parametrize("stochastic", [True, False])
def test_who_did_not_move_comes_back_exactly(stochastic: bool) -> None:
    received = {"model": weights({"a": (2000,), "b": (3, 3)}, 1, 1e-3)}
    found = there_and_back(Quantise(stochastic=stochastic), {"model": dict(received["model"])}, received)
    assert all(torch.equal(found["model"][n], t) for n, t in received["model"].items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_what_is_not_finite_is_refused_as_without_the_stage(bad: float, stochastic: bool, place: int) -> None:
    stage, received = Quantise(stochastic=stochastic), {"model": weights({"a": (3000,)}, 1)}
    trained = {"model": {"a": received["model"]["a"] + 0.1}}
    expected = wire.Expected("run", 1, "site", received, stage.out(received, received, Stream(0)))
    fields = {"run": "run", "round": 1, "site": "site", "examples": 1}

    def accepted() -> wire.Reply:
        data = wire.encode(fields, stage.out(trained, received, STREAM))
        return wire.accept(data, expected, lambda sent: stage.back(sent, received))

    assert accepted().drift == pytest.approx(0.1 * math.sqrt(3000), rel=1e-2)
    trained["model"]["a"][place] = bad
    with pytest.raises(Refused, match="NaN or infinity") as refusal:
        accepted()
    assert refusal.value.kind == "finite"


def test_buffers_integers_and_what_was_not_received_travel_as_they_are() -> None:
    received: Bundle = {
        "model": {"w": torch.zeros(9), "d": torch.zeros(2).double(), "n": torch.tensor(3)},
        "buffers": {"variance": torch.ones(3)},
    }
    sent: Bundle = {
        "model": {"w": torch.ones(9), "d": torch.ones(2).double() / 3, "n": torch.tensor(4), "more": torch.ones(2) / 3},
        "buffers": {"variance": torch.ones(3) / 3},
        "control": {"w": torch.ones(9) / 3},
    }
    crossed = Quantise().out(sent, received, STREAM)
    assert crossed["model"].keys() == {VALUES, SCALES, "d", "n", "more"}
    assert crossed["buffers"] is sent["buffers"]
    assert crossed["control"] is sent["control"]
    found = there_and_back(Quantise(), sent, received)
    for kind, group in sent.items():
        assert found[kind].keys() == group.keys()
        for name in group.keys() - {"w"}:
            assert torch.equal(found[kind][name], group[name])


@pytest.mark.parametrize("left", [{"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(3, 2)}, {}])
def test_a_share_of_what_was_received_travels_as_it_is(left: Tensors) -> None:
    """The server knows what it sent, not which layers a site chose."""
    received = {"model": {"a": torch.zeros(3), "b": torch.zeros(2, 3)}}
    assert Quantise().out({"model": left}, received, STREAM) == {"model": left}
    assert there_and_back(Quantise(), {"model": left}, received).get("model", {}).keys() == left.keys()


def test_an_update_takes_a_quarter_of_the_bytes() -> None:
    received = {"model": weights({f"layer-{i}": (100, 30) for i in range(40)}, 1)}
    trained = {"model": weights({f"layer-{i}": (100, 30) for i in range(40)}, 2)}
    plain, small = (len(wire.encode({}, b)) for b in (trained, Quantise().out(trained, received, STREAM)))
    assert small < 0.26 * plain


def test_a_block_must_have_values() -> None:
    with pytest.raises(RecipeError, match=r"quantise\.block is 0"):
        Quantise(block=0)


def play(stages: list[Stage]) -> tuple[Bundle, list[int]]:
    network, algorithm, sizes = small(), FedAvg(Training(Optimiser(lr=0.1), batch=4)), []
    runners = {n: SiteRunner(n, s, algorithm, network, RamMemory(), stages) for n, s in SITES.items()}
    start = weights_of(network.module)

    def answer(site: str, message: bytes) -> bytes | Failure:
        reply = runners[site].answer(message)
        assert isinstance(reply, bytes)
        sizes.append(sum(t.nbytes for t in wire.decode(reply).tensors["model"].values()))
        return reply

    federation = Federation(("a", "b"), {n: len(s.train) for n, s in SITES.items()}, start)
    rounds = Rounds(federation, algorithm, MockEngine(answer), Rules(rounds=3), RamJournal(), stages=stages)
    return rounds.run().state, sizes


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_whole_run_stays_within_the_steps_of_its_rounds(stochastic: bool) -> None:
    """Close to the run without the stage, repeatable, and with a quarter of the bytes."""
    plain, whole = play([])
    state, sizes = play([Quantise(stochastic=stochastic)])
    again, _ = play([Quantise(stochastic=stochastic)])
    network = small()
    start = weights_of(network.module)["model"]
    moved = max(float((plain["model"][n] - t).abs().max()) for n, t in start.items())
    off = max(float((plain["model"][n] - t).abs().max()) for n, t in state["model"].items())
    assert 0 < off < 0.1 * moved
    assert all(torch.equal(again[k][n], t) for k, group in state.items() for n, t in group.items())
    assert max(sizes) <= min(whole) / 4 + 4 * math.ceil(min(whole) / 4 / 1024)


def test_a_recipe_can_ask_for_it() -> None:
    plain, shrunk = run(tiny()).summary, run(tiny(stages=[{"name": "quantise"}])).summary
    # up go two rounds' updates and one set of predictions, which are not quantised
    updates = plain["rounds"] * len(plain["hospitals"]) * 4 * plain["model"]["parameters"]
    saved = plain["cost"]["bytes_up"] - shrunk["cost"]["bytes_up"]
    assert 0.7 * updates < saved < 0.77 * updates
    assert shrunk["cost"]["bytes_down"] == plain["cost"]["bytes_down"]
    assert shrunk["headline"]["accuracy"] == pytest.approx(plain["headline"]["accuracy"], abs=0.05)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"name": "quantize"}], "did you mean 'quantise'?"),
        ([{"name": "quantise", "blocks": 5}], "did you mean 'block'?"),
        ([{"name": "quantise", "block": 0}], "quantise.block is 0"),
        ([{"name": "quantise", "block": "many"}], "stages.block is 'many'"),
        ("quantise", "stages is 'quantise'"),
        ([{"name": "quantise"}, {"name": "quantise", "block": 64}], "quantise is there twice"),
    ],
)
def test_a_recipe_that_asks_wrongly_is_told_so(stages: Any, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        tiny(stages=stages)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
