"""Updates in b bits: how far they may err, that they err to neither side, and that nothing bad hides in them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.core.jobs import Failure, Federation
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Tensors
from polyclinic.federation import update_check
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models import build_model
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.transforms.bit_packing import unpack_bits
from polyclinic.privacy.transforms.quantise import (
    CHUNK,
    SCALES,
    VALUES,
    Per,
    Quantise,
    dequantise_into,
    quantise_vector,
    split_blocks,
)
from polyclinic.runs.experiment import run
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.network import copy_module_weights
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import clinics, small
from tests.small import tiny

STREAM = Stream(7)
EPSILON, TINY = 2.0**-23, torch.finfo(torch.float32).tiny
PER: tuple[Per, ...] = ("tensor", "channel", "block")
WIDTHS = range(2, 17)
SHAPES: dict[str, tuple[int, ...]] = {
    "a": (),
    "b": (0, 3),
    "c": (5,),
    "d": (4, 3, 2),
    "e": (6, 4),
    "f": (3, 8),
    "g": (1, 7),
}
SITES = clinics(12, 12)


def weights(sizes: dict[str, tuple[int, ...]], seed: int, size: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * size for name, shape in sizes.items()}


def there_and_back(stage: UpdateTransform, tensors: Bundle, received: Bundle, stream: Stream = STREAM) -> Bundle:
    """Through the wire as well, so that what arrives is what a server would see."""
    sent = messages.decode(messages.encode({}, stage.encode(tensors, received, stream))).tensors
    return stage.decode(sent, received)


def groups_of(tensors: Tensors, stage: Quantise) -> list[Tensor]:
    """What shares one scale, in the order of the names."""
    ordered = [tensors[name] for name in sorted(tensors)]
    if stage.per == "block":
        return list(torch.split(torch.cat([t.reshape(-1) for t in ordered]), stage.block))
    channels = stage.per == "channel"
    rows = [t.reshape(len(t), -1) if channels and t.dim() > 1 else t.reshape(1, -1) for t in ordered if t.numel()]
    return [group for tensor in rows for group in tensor]


@settings(max_examples=150, deadline=None)
@given(
    bits=st.sampled_from(WIDTHS),
    per=st.sampled_from(PER),
    block=st.sampled_from([1, 7, 64, 1024]),
    size=st.sampled_from([1e-40, 1e-20, 1.0, 1e20]),
    offset=st.sampled_from([0.0, -0.9, 30.0, 1e5]),
    weight=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    stochastic=st.booleans(),
)
def test_no_value_errs_by_more_than_its_step(
    bits: int, per: Per, block: int, size: float, offset: float, weight: float, seed: int, stochastic: bool
) -> None:
    """Half a step to the nearest, a whole one stochastically, and single precision's own rounding.

    That is, with u = 2⁻²⁴ and the range at most 2·max|d|: q·step is off by 4u of the range (d − low, 1/step, their
    product, the noise added) and by u more as a product; w + low and the sum of both by u(|w| + max|d|) each. Together
    6 units in the last place of the group's max|d|, and one of |w|.
    """
    stage = Quantise(bits=bits, per=per, block=block, stochastic=stochastic)
    received = weights(SHAPES, seed, weight)
    moved = weights(SHAPES, seed + 100, size)
    trained = {n: t + moved[n] + offset * size for n, t in received.items()}
    found = there_and_back(stage, {"model": trained}, {"model": received})["model"]
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in received.items()}
    scales = stage.encode({"model": trained}, {"model": received}, STREAM)["model"][SCALES]
    groups = [groups_of(tensors, stage) for tensors in (received, trained, found)]
    assert scales.shape == (2, len(groups[0]))
    for (low, step), old, new, back in zip(scales.T.tolist(), *groups, strict=True):
        d = (new - old).double()
        assert low == float(d.min())
        assert step == pytest.approx(max(float(d.max() - d.min()) / (2**bits - 1), TINY), rel=4 * EPSILON)
        most = (1.0 if stochastic else 0.5) * step + EPSILON * (6 * d.abs().max() + old.double().abs())
        assert bool(((back.double() - old.double() - d).abs() <= most).all())


@pytest.mark.parametrize("bits", WIDTHS)
def test_to_the_nearest_is_equation_14(bits: int) -> None:
    """In double precision; where the fraction is so near 1/2 that single precision cannot tell, either will do."""
    moved = weights({"a": (3000,)}, bits)["a"] + 0.3
    values, _ = quantise_vector(moved, None, split_blocks(3000, 1024), bits)
    found = unpack_bits(values, bits, 3000).double()
    for d, q in zip(torch.split(moved.double(), 1024), torch.split(found, 1024), strict=True):
        exact = (d - d.min()) / (d.max() - d.min()) * (2**bits - 1)
        assert float((q - exact).abs().max()) <= 0.5 + 4 * EPSILON * 2**bits
        assert (int(q.min()), int(q.max())) == (0, 2**bits - 1)


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 5, 2 * CHUNK + 1024])
@pytest.mark.parametrize("per", ["tensor", "block"])
def test_vectors_longer_than_what_is_handled_at_a_time(length: int, per: Per) -> None:
    moved, stage = weights({"a": (length,)}, 1)["a"], Quantise(per=per, stochastic=False)
    runs = stage.group_runs([(length,)])
    values, scales = quantise_vector(moved, None, runs)
    again, _ = quantise_vector(moved + 1.0, torch.ones(length), runs)
    found = torch.zeros(length)
    dequantise_into(found, values, scales, runs)
    steps = scales[1].repeat_interleave(length if per == "tensor" else 1024)[:length]
    assert bool(((found - moved).abs() <= 0.5 * steps + 6 * 6 * EPSILON).all())
    assert float((values != again).float().mean()) < 1e-3  # but for the rounding of moved + 1


@pytest.mark.parametrize("bits", [2, 7, 8, 9, 16])
def test_the_largest_value_is_never_one_level_too_many(bits: int) -> None:
    """It would come back as the smallest. Ranges that no step divides, and 2¹⁶ draws of each."""
    for top in (1.0, 0.1, 3.0e-7, 255.0, 1 / 3):
        moved = torch.full((1 << 16,), top)
        moved[0] = -0.7 * top
        values, _ = quantise_vector(moved, None, split_blocks(1 << 16, 1 << 16), bits, Stream(bits).generator())
        assert set(unpack_bits(values, bits, 1 << 16)[1:].tolist()) <= {2**bits - 1, 2**bits - 2}


def test_channels_of_different_scale_each_keep_their_own() -> None:
    """A channel 10⁴ times smaller than its neighbour is lost in the tensor's steps, and not in its own."""
    moved = weights({"a": (4, 50, 10)}, 1)["a"] * torch.tensor([1.0, 1e-2, 1e-4, 1e-6]).view(4, 1, 1)
    bundle, start, errors = {"model": {"a": moved}}, {"model": {"a": torch.zeros_like(moved)}}, {}
    for per in ("tensor", "channel"):
        found = there_and_back(Quantise(per=per, stochastic=False), bundle, start)["model"]["a"]
        errors[per] = (found - moved).flatten(1).norm(dim=1) / moved.flatten(1).norm(dim=1)
    assert float(errors["channel"].max()) < 0.02
    assert float(errors["tensor"][0]) < 0.02
    assert float(errors["tensor"][2:].min()) > 1


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_difference_is_what_is_rounded_not_the_weights(per: Per, stochastic: bool) -> None:
    """Large weights that moved little come back within a step of that little move, and float32's own rounding."""
    received = {"model": weights({"a": (50, 7), "b": (3,)}, 1, 100.0)}
    trained = {"model": {n: t + d for (n, t), d in zip(received["model"].items(), (1e-3, -1e-3), strict=True)}}
    found = there_and_back(Quantise(per=per, stochastic=stochastic), trained, received)["model"]
    assert found.keys() == trained["model"].keys()
    for name, tensor in trained["model"].items():
        rounding = 4 * EPSILON * float(tensor.abs().max())
        assert found[name].shape == tensor.shape
        assert float((found[name] - tensor).abs().max()) <= 1.3e-3 / 126 + rounding
        assert not torch.equal(found[name], received["model"][name])


@pytest.mark.parametrize("bits", [2, 5, 8, 11])
def test_stochastic_rounding_errs_to_neither_side(bits: int) -> None:
    """n independent draws within one step: by Hoeffding their mean is off by √(ln(2/δ)/2n) steps with chance δ = 1e-9.

    To the nearest, the same values are off by their whole fraction.
    """
    draws, most = 200_000, 2**bits - 1
    room = math.sqrt(math.log(2 / 1e-9) / (2 * draws)) + 2.0**-15 + most * 2.0**-22
    for fraction in (0.1, 0.3, 0.5, 0.77, most - 1.1):
        moved = torch.full((draws,), 0.5 + fraction / most)
        moved[::100], moved[1::100] = 0.5, 1.5  # so that the step is 1/most in every block
        rest = torch.ones(draws, dtype=torch.bool)
        rest[::100] = rest[1::100] = False
        for generator, fair in ((Stream(3, (str(fraction),)).generator(), True), (None, False)):
            values, scales = quantise_vector(moved, None, split_blocks(draws, 1000), bits, generator)
            off = abs(float(unpack_bits(values, bits, draws)[rest].double().mean()) - fraction)
            assert scales[1].tolist() == pytest.approx([1 / most] * (draws // 1000))
            assert (off <= room * math.sqrt(1 / 0.98) + most * EPSILON) == fair


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


@pytest.mark.parametrize("bits", [2, 8, 13])
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("stochastic", [True, False])
def test_who_did_not_move_comes_back_exactly(stochastic: bool, per: Per, bits: int) -> None:
    received = {"model": weights({"a": (2000,), "b": (3, 3)}, 1, 1e-3)}
    found = there_and_back(
        Quantise(("model",), bits, per, stochastic=stochastic), {"model": dict(received["model"])}, received
    )
    assert all(torch.equal(found["model"][n], t) for n, t in received["model"].items())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("value", [0.1, -3e4, 1e-42])
def test_groups_of_equal_values_come_back_exactly(bits: int, stochastic: bool, value: float) -> None:
    """Each channel moved by a number of its own; Eq. 14 as printed would divide by zero."""
    received = {"model": {"a": torch.zeros(3, 50), "b": torch.zeros(9), "c": torch.zeros(())}}
    rows = torch.tensor([[1.0], [-2.0], [0.3]]) * value * torch.ones(3, 50)
    trained = {"a": rows, "b": torch.full((9,), value), "c": torch.tensor(value)}
    stage = Quantise(bits=bits, per="channel", stochastic=stochastic)
    assert not unpack_bits(stage.encode({"model": trained}, received, STREAM)["model"][VALUES], bits, 160).any()
    found = there_and_back(stage, {"model": trained}, received)["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("place", [0, 1500, 2999])
@pytest.mark.parametrize(("bits", "per"), [(8, "block"), (3, "tensor"), (12, "channel")])
def test_what_is_not_finite_is_refused_as_without_the_stage(
    bad: float, stochastic: bool, place: int, bits: int, per: Per
) -> None:
    stage, received = Quantise(("model",), bits, per, stochastic=stochastic), {"model": weights({"a": (3000,)}, 1)}
    trained = {"model": {"a": received["model"]["a"] + 0.1}}
    expected = update_check.ExpectedUpdate("run", 1, "site", received, stage.encode(received, received, Stream(0)))
    fields = {"run": "run", "round": 1, "site": "site", "examples": 1}

    def accepted() -> update_check.CheckedUpdate:
        data = messages.encode(fields, stage.encode(trained, received, STREAM))
        return update_check.check_update(data, expected, [stage])

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
    crossed = Quantise().encode(sent, received, STREAM)
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
    assert Quantise().encode({"model": left}, received, STREAM) == {"model": left}
    assert there_and_back(Quantise(), {"model": left}, received).get("model", {}).keys() == left.keys()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("per", PER)
def test_a_value_takes_its_bits_and_a_group_two_numbers(bits: int, per: Per) -> None:
    stage, received = Quantise(bits=bits, per=per, block=10), {"model": weights(SHAPES, 1)}
    sent = stage.encode({"model": weights(SHAPES, 2)}, received, STREAM)["model"]
    values = sum(t.numel() for t in received["model"].values())
    assert sent[VALUES].nbytes == math.ceil(values * bits / 8)
    assert sent[SCALES].nbytes == 8 * len(groups_of(received["model"], stage))
    again = stage.encode(received, received, Stream(0))["model"]
    assert all((t.shape, t.dtype) == (again[n].shape, again[n].dtype) for n, t in sent.items())


@pytest.mark.parametrize(("bits", "share"), [(8, 0.26), (4, 0.135), (2, 0.073), (16, 0.51)])
def test_whole_messages_shrink_by_as_much(bits: int, share: float) -> None:
    """Header, table and scales included: an update of PFedCDP's largest network."""
    received = {
        "model": copy_module_weights(build_model("cnn_a", classes=2, channels=1, size=28, seed=STREAM))["model"]
    }
    moved = weights({n: tuple(t.shape) for n, t in received["model"].items()}, 1, 0.01)
    trained = {"model": {n: t + moved[n] for n, t in received["model"].items()}}
    plain, small = (
        len(messages.encode({}, b)) for b in (trained, Quantise(bits=bits).encode(trained, received, STREAM))
    )
    assert small <= share * plain


def test_what_is_not_named_keeps_all_its_bits() -> None:
    received, trained = {"model": weights(SHAPES, 1)}, {"model": weights(SHAPES, 2)}
    for stage in (Quantise(kinds=()), Quantise(kinds=("control",))):
        assert stage.encode(trained, received, STREAM)["model"] is trained["model"]
        found = there_and_back(stage, trained, received)["model"]
        assert all(torch.equal(found[n], t) for n, t in trained["model"].items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 0}, "quantise.block is 0; choose 1 value or more"),
        ({"bits": 1}, "quantise.bits is 1; choose 2 to 16"),
        ({"bits": 17}, "quantise.bits is 17; choose 2 to 16"),
        ({"per": "layer"}, "quantise.per is 'layer'; choose tensor, channel, block"),
    ],
)
def test_impossible_options_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as error:
        Quantise(**options)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize("other", [Quantise(bits=7), Quantise(bits=16), Quantise(block=8), Quantise(per="tensor")])
def test_what_another_stage_made_is_refused(other: Quantise) -> None:
    received = {"model": weights(SHAPES, 1)}
    sent = Quantise(block=10).encode({"model": weights(SHAPES, 2)}, received, STREAM)
    with pytest.raises(Refused, match="with the same options everywhere") as refusal:
        other.decode(sent, received)
    assert refusal.value.kind == "quantise"


@pytest.mark.parametrize("change", [{SCALES: None}, {SCALES: torch.zeros(2, 4).half()}, {VALUES: torch.zeros(79)}])
def test_what_does_not_fit_is_refused(change: dict[str, Tensor | None]) -> None:
    received = {"model": {"a": torch.zeros(79)}}
    sent = Quantise(block=20).encode(received, received, STREAM)["model"] | change
    with pytest.raises(Refused, match="quantise"):
        Quantise(block=20).decode({"model": {n: t for n, t in sent.items() if t is not None}}, received)


def play(stages: list[UpdateTransform]) -> tuple[Bundle, list[int]]:
    network, algorithm, sizes = small(), FedAvg(Training(Optimiser(lr=0.1), batch=4)), []
    runners = {n: SiteRunner(n, s, algorithm, network, RamMemory(), stages) for n, s in SITES.items()}
    start = copy_module_weights(network.module)

    def answer(site: str, message: bytes) -> bytes | Failure:
        reply = runners[site].answer(message)
        assert isinstance(reply, bytes)
        sizes.append(sum(t.nbytes for t in messages.decode(reply).tensors["model"].values()))
        return reply

    federation = Federation(("a", "b"), {n: len(s.train) for n, s in SITES.items()}, start)
    rounds = Rounds(federation, algorithm, MockEngine(answer), RoundOptions(rounds=3), RamJournal(), transforms=stages)
    return rounds.play_all().state, sizes


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_whole_run_stays_within_the_steps_of_its_rounds(stochastic: bool) -> None:
    """Close to the run without the stage, repeatable, and with a quarter of the bytes."""
    plain, whole = play([])
    state, sizes = play([Quantise(stochastic=stochastic)])
    again, _ = play([Quantise(stochastic=stochastic)])
    network = small()
    start = copy_module_weights(network.module)["model"]
    moved = max(float((plain["model"][n] - t).abs().max()) for n, t in start.items())
    off = max(float((plain["model"][n] - t).abs().max()) for n, t in state["model"].items())
    assert 0 < off < 0.1 * moved
    assert all(torch.equal(again[k][n], t) for k, group in state.items() for n, t in group.items())
    assert max(sizes) <= min(whole) / 4 + 8 * math.ceil(min(whole) / 4 / 1024)


@pytest.mark.parametrize(("options", "share"), [({}, 3 / 4), ({"bits": 4}, 7 / 8), ({"per": "channel"}, 3 / 4)])
def test_a_recipe_can_ask_for_it(options: dict[str, Any], share: float) -> None:
    plain, shrunk = run(tiny()).summary, run(tiny(stages=[{"name": "quantise", **options}])).summary
    # up go two rounds' updates and one set of predictions, which are not quantised
    updates = plain.rounds * len(plain.site_sizes) * 4 * plain.model.parameters
    saved = plain.cost.bytes_up - shrunk.cost.bytes_up
    assert share - 0.05 < saved / updates < share + 0.02
    assert shrunk.cost.bytes_down == plain.cost.bytes_down
    assert shrunk.headline.scores.value("accuracy") == pytest.approx(plain.headline.scores.value("accuracy"), abs=0.05)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{"name": "quantize"}], "did you mean 'quantise'?"),
        ([{"name": "quantise", "blocks": 5}], "did you mean 'block'?"),
        ([{"name": "quantise", "block": 0}], "quantise.block is 0"),
        ([{"name": "quantise", "block": "many"}], "stages.block is 'many'"),
        ([{"name": "quantise", "bits": 1}], "quantise.bits is 1; choose 2 to 16"),
        ([{"name": "quantise", "per": "layer"}], "stages.per is 'layer'"),
        ("quantise", "stages is 'quantise'"),
        ([{"name": "quantise"}, {"name": "quantise", "block": 64}], "quantise is listed twice"),
    ],
)
def test_a_recipe_that_asks_wrongly_is_told_so(stages: Any, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        tiny(stages=stages)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
