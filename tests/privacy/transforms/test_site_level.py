"""Whole sites under differential privacy: clip and noise as stages of a run, at the site or at the server."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from polyclinic.algorithms.base import RunningMean
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.privacy.mechanism import distance, join_kinds
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.transforms.clip import Clip
from polyclinic.privacy.transforms.noise import Noise, add_noise_to, largest_weight
from polyclinic.privacy.transforms.quantise import Quantise
from polyclinic.storage import messages as wire
from polyclinic.training.network import copy_module_weights
from tests.laws.bench import small
from tests.privacy.transforms.test_clip_noise import largest_difference, play

KINDS = ("model", "control")


def bundle(number: int, scale: float = 1.0, size: int = 200) -> Bundle:
    generator = Stream(2, (number,)).generator()
    return {k: {"w": torch.randn(size, generator=generator) * scale, "n": torch.tensor(number)} for k in KINDS}


def way(tensors: Bundle, received: Bundle) -> float:
    return distance(join_kinds(tensors, KINDS), join_kinds(received, KINDS))


def same_bits(one: Bundle, other: Bundle) -> bool:
    return all(torch.equal(t, other[k][n]) for k, group in one.items() for n, t in group.items())


def test_a_wide_bound_and_no_noise_give_the_bits_of_the_run_without() -> None:
    plain, messages = play([])
    state, staged = play([Clip(1e6), Noise(0.0)])
    assert same_bits(plain, state)
    for one, other in zip(messages, staged, strict=True):
        assert same_bits(wire.decode(one).tensors, wire.decode(other).tensors)


def test_nothing_longer_than_the_bound_leaves_a_site() -> None:
    plain, messages = play([])
    state, staged = play([Clip(0.01)])
    start = {"model": copy_module_weights(small().module)["model"]}
    lengths = [[way({"model": wire.decode(m).tensors["model"]}, start) for m in run[:2]] for run in (messages, staged)]
    assert min(lengths[0]) > 0.1
    assert lengths[1] == pytest.approx([0.01, 0.01], rel=1e-6)
    assert way({"model": state["model"]}, start) <= 2 * 0.01 * (1 + 1e-6) < way({"model": plain["model"]}, start)


@pytest.mark.parametrize("stages", [[Clip(0.5, noise=0.1), Noise(0.1)], [Clip(0.5, noise=0.1), Noise(0.1), Quantise()]])
def test_a_run_with_noise_is_another_and_its_statistics_are_not_touched(stages: list[UpdateTransform]) -> None:
    bare, _ = play([Clip(0.5)])
    state, messages = play(stages)
    assert 0.1 < largest_difference({"model": state["model"]}, {"model": bare["model"]}) < 2
    start = copy_module_weights(small().module)["buffers"]
    sent = wire.decode(messages[0]).tensors["buffers"]
    assert {n: (t.dtype, t.shape) for n, t in sent.items()} == {n: (t.dtype, t.shape) for n, t in start.items()}


def test_kinds_are_one_vector_and_what_was_not_received_is_part_of_it() -> None:
    tensors = {"model": {"w": torch.tensor([13.0])}, "control": {"c": torch.tensor([4.0])}, "other": {}}
    sent = Clip(1.0, KINDS).encode(tensors, {"model": {"w": torch.tensor([10.0])}}, Stream(0))
    assert (float(sent["model"]["w"]), float(sent["control"]["c"])) == pytest.approx((10.6, 0.8))
    assert sent.keys() == tensors.keys()


def test_integers_and_kinds_that_are_not_named_pass() -> None:
    received, tensors = bundle(1), bundle(2, 100) | {"buffers": {"mean": torch.full((3,), 1e9)}}
    sent = Noise(1.0, KINDS).encode(Clip(1.0, KINDS).encode(tensors, received, Stream(0)), received, Stream(0))
    assert all(sent[kind]["n"] is tensors[kind]["n"] for kind in KINDS)
    assert sent["buffers"] is tensors["buffers"]
    assert not torch.equal(sent["model"]["w"], tensors["model"]["w"])


def test_the_server_leaves_an_honest_update_alone_to_the_bit() -> None:
    stage = Clip(0.01, KINDS)
    for number in range(300):
        received = bundle(number, 10.0 ** (number % 4))
        moved = {k: {**g, "w": g["w"] + torch.randn(200, generator=Stream(3).generator())} for k, g in received.items()}
        sent = stage.encode(moved, received, Stream(0))
        assert stage.decode(sent, received) is sent
        assert way(sent, received) <= 0.01 * (1 + 1e-6)


def test_the_server_clips_what_a_site_did_not() -> None:
    received, sent = bundle(1), bundle(2, 1000)
    restored = Clip(0.5, KINDS).decode(sent, received)
    assert way(sent, received) > 1000
    assert way(restored, received) == pytest.approx(0.5, rel=1e-6)


def test_the_server_allows_for_the_sites_noise_and_for_no_more() -> None:
    clip, noise = Clip(0.5, KINDS, noise=2.0), Noise(2.0, KINDS)
    received = bundle(1)
    for number in range(50):
        sent = noise.encode(clip.encode(bundle(number), received, Stream(0)), received, Stream(number))
        assert way(sent, received) > 10 * 0.5
        assert clip.decode(noise.decode(sent, received), received) is sent
    assert way(clip.decode(bundle(3, 1e5), received), received) < 0.5 + 2 * (math.sqrt(400) + 11)


def test_an_update_that_is_not_finite_stays_at_home_or_is_left_to_be_refused() -> None:
    received, broken = bundle(1), bundle(2)
    broken["control"]["w"][7] = math.nan
    sent = Clip(1.0, KINDS).encode(broken, received, Stream(0))
    assert all(torch.equal(sent[kind]["w"], received[kind]["w"]) for kind in KINDS)
    assert Clip(1.0, KINDS).decode(broken, received) is broken


def test_the_sites_noise_is_gaussian_of_this_size_and_stays() -> None:
    received = {"model": {"w": torch.zeros(1_000_000)}}
    stage = Noise(0.3)
    sent = stage.encode(received, received, Stream(4))
    drawn = sent["model"]["w"].double().numpy()
    assert drawn.std() == pytest.approx(0.3, rel=0.005)
    assert stats.kstest(drawn / 0.3, "norm", method="asymp").pvalue > 0.01
    assert stage.decode(sent, received) is sent


def test_no_two_sites_rounds_or_kinds_share_noise() -> None:
    zero = {kind: {"w": torch.zeros(4, dtype=torch.float64)} for kind in KINDS}
    streams = [Stream(1, ("site", s, "stage", 1, r)) for s in ("a", "b", "c") for r in range(50)]
    sent = [Noise(1.0, KINDS).encode(zero, zero, stream) for stream in streams]
    drawn = [v for b in sent for kind in KINDS for v in b[kind]["w"].tolist()]
    assert len(set(drawn)) == len(drawn) == 150 * 8


def test_replacing_a_site_by_silence_moves_the_mean_by_its_share_at_most() -> None:
    """And 1,000 neighbouring pairs of clipped updates differ by no more than the bound."""
    weights, stage = [8000.0, 500.0, 500.0, 500.0, 500.0], Clip(1.5, KINDS)
    share = largest_weight(weights)
    farthest = 0.0
    for number in range(200):
        received = bundle(number)
        sent = [stage.encode(bundle(5 * number + k, 10.0 ** (k - 2), 200), received, Stream(0)) for k in range(5)]
        assert all(way(update, received) <= 1.5 * (1 + 1e-6) for update in sent)
        for silent in range(5):
            means = [RunningMean(), RunningMean()]
            for k, update in enumerate(sent):
                means[0].add(join_kinds(update, KINDS), weights[k])
                means[1].add(join_kinds(received if k == silent else update, KINDS), weights[k])
            one, other = ({n: t for n, t in m.value().items() if t.is_floating_point()} for m in means)
            farthest = max(farthest, distance(one, other))
    assert farthest == pytest.approx(1.5 * share, rel=1e-5)


def test_the_servers_noise_follows_the_largest_weight() -> None:
    weights = [8000.0, 500.0, 500.0, 500.0, 500.0]
    assert largest_weight(weights) == 0.8
    assert largest_weight([1, 1, 1, 1]) == 0.25
    state = {"model": {"w": torch.full((1_000_000,), 0.5), "n": torch.tensor(4)}, "buffers": {"m": torch.ones(2)}}
    noised = add_noise_to(state, ("model", "control"), 1.1 * 1.5 * largest_weight(weights), Stream(5))
    drawn = (noised["model"]["w"] - 0.5).double().numpy()
    assert drawn.std() == pytest.approx(1.1 * 1.5 * 8000 / 10_000, rel=0.005)
    assert stats.kstest(drawn / (1.1 * 1.5 * 0.8), "norm", method="asymp").pvalue > 0.01
    assert noised["buffers"] is state["buffers"]
    assert noised["model"]["n"] is state["model"]["n"]
    assert noised.keys() == state.keys()


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [2.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_weights_without_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(Refused, match="weights"):
        largest_weight(weights)


def test_impossible_bounds_and_noise_are_refused() -> None:
    for bound in (0.0, -1.0, math.nan):
        with pytest.raises(RecipeError, match=r"privacy\.clip"):
            Clip(bound)
    for std in (-1.0, math.nan, math.inf):
        with pytest.raises(RecipeError, match="noise"):
            Noise(std)
        with pytest.raises(RecipeError, match="noise"):
            Clip(1.0, noise=std)
