"""The one training loop: what a site sees, in which order, and what a job may move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Fit, Fitted, Step
from polyclinic.core.network import Network
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream, seed_generators
from polyclinic.core.types import Batch, Bundle
from polyclinic.data.examples import Images, SiteData
from polyclinic.models.classifier import Classifier
from polyclinic.storage import messages
from polyclinic.training.data_order import draw_epoch_batches, draw_epoch_order, iterate_steps
from polyclinic.training.fit import fit
from polyclinic.training.losses import corrected_loss, proximal_loss, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import noise, play, same, small
from tests.training.jobs import at_round, job

STREAM = Stream(0, ("site", "here"))
SGD = Optimiser(lr=0.1)
ADAM = Optimiser("adam", lr=0.01)
LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(torch.tensor)


# What a site sees.


@settings(max_examples=60, deadline=None)
@given(labels=LABELS, seed=st.integers(0, 999))
def test_an_epoch_sees_every_example_once(labels: Tensor, seed: int) -> None:
    seen = draw_epoch_order(labels, Training(), Stream(seed))
    assert sorted(seen.tolist()) == list(range(len(labels)))


@settings(max_examples=60, deadline=None)
@given(labels=LABELS, seed=st.integers(0, 999))
def test_oversampling_makes_classes_equally_frequent_and_leaves_nobody_out(labels: Tensor, seed: int) -> None:
    seen = draw_epoch_order(labels, Training(oversample=True), Stream(seed))
    assert set(seen.tolist()) == set(range(len(labels)))
    counts = labels[seen].bincount()
    assert set(counts[counts > 0].tolist()) == {int(labels.bincount().max())}
    assert (counts > 0).tolist() == (labels.bincount() > 0).tolist(), "a class the site lacks stays absent"


def test_oversampling_draws_anew_each_epoch() -> None:
    labels = torch.tensor([0] * 30 + [1] * 10)
    epochs = [
        draw_epoch_order(labels, Training(oversample=True), Stream(0).child(epoch)).bincount() for epoch in range(2)
    ]
    assert not torch.equal(*epochs)


@settings(max_examples=80, deadline=None)
@given(labels=LABELS, size=st.integers(1, 20), oversample=st.booleans())
def test_batches_cut_the_epoch_and_leave_no_example_alone(labels: Tensor, size: int, oversample: bool) -> None:
    training = Training(batch=size, oversample=oversample)
    cut = draw_epoch_batches(labels, training, Stream(1))
    assert torch.equal(torch.cat(cut), draw_epoch_order(labels, training, Stream(1)))
    assert all(len(index) == size for index in cut[:-1])
    assert 1 <= len(cut[-1]) <= size + (size > 1)
    alone = len(cut[-1]) == 1
    assert not alone or size == 1 or len(cut) == 1


@pytest.mark.parametrize(("examples", "sizes"), [(12, [4, 4, 4]), (13, [4, 4, 5]), (14, [4, 4, 4, 2]), (1, [1])])
def test_a_single_leftover_joins_the_batch_before(examples: int, sizes: list[int]) -> None:
    assert [
        len(index) for index in draw_epoch_batches(torch.zeros(examples).long(), Training(batch=4), Stream(0))
    ] == sizes


def test_batches_of_one_are_as_many_as_there_are_examples() -> None:
    """Nobody is left over there, so nobody joins anybody."""
    assert [len(index) for index in draw_epoch_batches(torch.zeros(5).long(), Training(batch=1), Stream(0))] == [1] * 5


def seen_by(training: Training, rounds: int, whole: bool = False) -> list[list[Tensor]]:
    labels = torch.arange(13) % 3
    return [micro for r in range(1, rounds + 1) for _, micro in iterate_steps(labels, training, STREAM, r, whole)]


def flat(steps: list[list[Tensor]]) -> list[list[int]]:
    return [index.tolist() for micro in steps for index in micro]


@pytest.mark.parametrize(("epochs", "rounds"), [(2, 3), (3, 2), (6, 1)])
def test_epochs_are_numbered_over_the_run(epochs: int, rounds: int) -> None:
    often = seen_by(Training(batch=4), rounds=6)
    assert flat(seen_by(Training(batch=4, epochs=epochs), rounds)) == flat(often)
    assert len({tuple(index) for index in flat(often)}) == len(often) == 18, "no two epochs are alike"


@pytest.mark.parametrize(("steps", "rounds"), [(1, 18), (2, 9), (6, 3), (9, 2)])
def test_steps_walk_through_the_same_epochs(steps: int, rounds: int) -> None:
    by_steps = Training(batch=4, epochs=None, steps=steps)
    assert flat(seen_by(by_steps, rounds)) == flat(seen_by(Training(batch=4), rounds=6))


def test_whole_epochs_are_one_step_each() -> None:
    whole = seen_by(Training(batch=4), rounds=6, whole=True)
    assert [len(micro) for micro in whole] == [3] * 6
    assert flat(whole) == flat(seen_by(Training(batch=4), rounds=6))


@pytest.mark.parametrize("whole", [False, True])
def test_steps_are_numbered_over_the_run(whole: bool) -> None:
    labels, per_epoch = torch.arange(13) % 3, 1 if whole else 3
    for training, rounds in ((Training(batch=4), 6), (Training(batch=4, epochs=3), 2)):
        walked = [
            number for r in range(1, rounds + 1) for number, _ in iterate_steps(labels, training, STREAM, r, whole)
        ]
        assert walked == list(range(6 * per_epoch))
    by_steps = Training(batch=4, epochs=None, steps=4)
    assert [number for r in (1, 2) for number, _ in iterate_steps(labels, by_steps, STREAM, r, False)] == list(range(8))


class Sealed(Images):
    """Images nobody may look at."""

    def batch(self, index: Tensor) -> Batch:
        raise AssertionError("training looked at a part that is not for training")


@pytest.mark.parametrize("oversample", [False, True])
def test_training_looks_at_the_training_part_only(oversample: bool) -> None:
    train, sealed = noise(12, "here"), Sealed(noise(6, "sealed").images, noise(6, "sealed").labels)
    sites = {"here": SiteData("here", train, sealed, sealed)}
    played = play(FedAvg(Training(SGD, batch=5, oversample=oversample)), sites, small(), 2)
    assert not same(played.weights, copy_module_weights(small().module))


# What a job may move.


def deep() -> LiveNetwork:
    """Six leaf layers: conv, norm, conv, norm in the extractor; two linear ones in the head."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        extractor = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten()
        )
        return LiveNetwork(Classifier(extractor, nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))))


def changed(before: Bundle, after: Bundle) -> set[str]:
    return {
        name for kind, tensors in before.items() for name, t in tensors.items() if not torch.equal(t, after[kind][name])
    }


LAYERS = ["extractor.0", "extractor.1", "extractor.3", "extractor.4", "head.0", "head.2"]


@pytest.mark.parametrize("optimiser", [replace(SGD, weight_decay=0.1), ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("top", [1, 2, 3, 4, 5, 6])
def test_fine_tuning_moves_the_top_layers_and_their_statistics_and_nothing_else(top: int, optimiser: Optimiser) -> None:
    network = deep()
    before = copy_module_weights(network.module)
    fitted = fit(job(network, Training(optimiser, 8, fine_tune=top / 6)), network, noise(16), at_round(1), STREAM)
    everything = {name for tensors in before.values() for name in tensors}
    expected = {name for name in everything if name.rpartition(".")[0] in LAYERS[6 - top :]}
    assert changed(before, fitted.weights) == expected


def test_a_frozen_extractor_hands_on_the_same_features_whatever_the_batch() -> None:
    """Its BatchNorm normalises with what it knows, not with the batch, while the head trains."""
    network = deep()
    seen: list[bool] = []
    for index in (1, 4):
        network.module.extractor[index].register_forward_hook(  # type: ignore[index]
            lambda module, _inputs, _output: seen.append(module.training)
        )
    fit(job(network, Training(SGD, 8, fine_tune=3 / 6)), network, noise(16), at_round(1), STREAM)
    assert seen == [False, True] * 2


def test_freezing_does_not_outlast_the_job() -> None:
    network = deep()
    fit(job(network, Training(SGD, 8, fine_tune=1 / 6)), network, noise(16), at_round(1), STREAM)
    start = copy_module_weights(network.module)
    after = fit(job(network, Training(SGD, 8)), network, noise(16), at_round(1), STREAM)
    fresh = deep()
    fresh.load_weights(start)
    assert same(after.weights, fit(job(fresh, Training(SGD, 8)), fresh, noise(16), at_round(1), STREAM).weights)


def gradient(network: LiveNetwork, data: Images) -> dict[str, Tensor]:
    module = network.module.train().requires_grad_(True)
    module.zero_grad()
    torch.autograd.backward(F.cross_entropy(module(data.images), data.labels))
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("batch", [1, 4, 5, 13])
def test_a_whole_step_is_one_step_along_the_full_gradient(batch: int) -> None:
    """However it is cut into batches, unequal ones included."""
    network, data = small(norm=False, dtype=torch.float64), noise(13, dtype=torch.float64)
    before, full = copy_module_weights(network.module), gradient(network, data)
    fitted = fit(job(network, Training(SGD, batch), full_batch=True), network, data, at_round(1), STREAM)
    assert fitted.steps == 1
    for name, start in before["model"].items():
        torch.testing.assert_close(fitted.weights["model"][name], start - 0.1 * full[name], rtol=0, atol=1e-14)
    expected = F.cross_entropy(small(norm=False, dtype=torch.float64).module(data.images), data.labels)
    assert fitted.loss == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize("objective", [proximal_loss, corrected_loss])
def test_a_whole_step_counts_terms_without_data_once(objective: Callable[..., Tensor]) -> None:
    """μ/2·‖w − anchor‖² and ⟨c, w⟩ do not grow with the number of batches."""
    data, start = (
        noise(12, dtype=torch.float64),
        copy_module_weights(small(norm=False, dtype=torch.float64).module)["model"],
    )
    reference = {
        "anchor": {name: torch.zeros_like(w) for name, w in start.items()},
        "scalars": {"mu": torch.tensor(0.5, dtype=torch.float64)},
        "correction": {name: torch.ones_like(w) for name, w in start.items()},
    }
    ended = []
    for batch in (12, 3):
        network = small(norm=False, dtype=torch.float64)
        ask = job(network, Training(SGD, batch), steps=objective, reference=reference, full_batch=True)
        ended.append(fit(ask, network, data, at_round(1), STREAM))
    plain = start["head.bias"] - 0.1 * gradient(small(norm=False, dtype=torch.float64), data)["head.bias"]
    extra = 0.5 * start["head.bias"] if objective is proximal_loss else torch.ones_like(plain)
    for fitted in ended:
        torch.testing.assert_close(fitted.weights["model"]["head.bias"], plain - 0.1 * extra, rtol=0, atol=1e-14)


@pytest.mark.parametrize("optimiser", [ADAM, Optimiser("adamw", 0.01, weight_decay=0.1), replace(SGD, momentum=0.9)])
def test_an_optimiser_goes_on_where_it_stopped(optimiser: Optimiser) -> None:
    """Two rounds of one epoch with the state handed on are one round of two epochs; without it they are not."""
    network, data = small(), noise(16)
    once = fit(job(network, Training(optimiser, 5, epochs=2), optimiser_state={}), network, data, at_round(1), STREAM)
    network = small()
    first = fit(job(network, Training(optimiser, 5), optimiser_state={}), network, data, at_round(1), STREAM)
    sent = messages.decode(messages.encode({}, {"optimiser": first.optimiser_state})).tensors["optimiser"]
    second = Fit(first.weights, task_loss, Training(optimiser, 5), optimiser_state=sent)
    twice, anew = (
        fit(asked, network, data, at_round(2), STREAM) for asked in (second, replace(second, optimiser_state={}))
    )
    assert same(twice.weights, once.weights)
    assert same({"optimiser": twice.optimiser_state}, {"optimiser": once.optimiser_state})
    assert not same(anew.weights, once.weights)


def test_a_job_that_asks_for_no_state_gets_none() -> None:
    network = small()
    assert fit(job(network, Training(ADAM, 5)), network, noise(16), at_round(1), STREAM).optimiser_state == {}


def shrink_head(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """‖head‖²/2: its gradient is the head itself, whatever the images."""
    return sum((w.pow(2).sum() for n, w in weights["model"].items() if n.startswith("head.")), torch.zeros(())) / 2


def everything_at_once(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Depends on every parameter, so that only `Step.train` keeps it from moving them."""
    return task_loss(network, weights, batch, reference) + sum(w.pow(2).sum() for w in weights["model"].values())


TWO_STEPS = (Step(everything_at_once, ("extractor.",)), Step(shrink_head, ("head.",)))


def test_each_step_of_a_job_moves_its_own_parameters() -> None:
    """One batch of plain SGD: the head only shrinks by η, the extractor goes along the first objective's gradient."""
    network, data = small(norm=False, dtype=torch.float64), noise(8, dtype=torch.float64)
    start, slope = copy_module_weights(network.module)["model"], gradient(network, data)
    fitted = fit(job(network, Training(SGD, 8), steps=TWO_STEPS), network, data, at_round(1), STREAM)
    for name, w in start.items():
        expected = 0.9 * w if name.startswith("head.") else w - 0.1 * (slope[name] + 2 * w)
        torch.testing.assert_close(fitted.weights["model"][name], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_alone_leaves_the_others_parameters_alone(number: int) -> None:
    network = small()
    before, prefix = copy_module_weights(network.module), TWO_STEPS[number].train
    fitted = fit(job(network, Training(ADAM, 4), steps=(TWO_STEPS[number],)), network, noise(8), at_round(1), STREAM)
    moved = changed({"model": before["model"]}, fitted.weights)
    assert moved == {name for name in before["model"] if name.startswith(prefix)}


def two_rounds(optimiser: Optimiser, epochs: int) -> Fitted:
    """Both steps' optimisers, over two epochs: in one round, or in two with the state handed on."""
    network, data = small(norm=False), noise(16)
    ask = job(network, Training(optimiser, 4, epochs=epochs), steps=TWO_STEPS, optimiser_state={})
    for round in range(1, 2 // epochs + 1):
        fitted = fit(ask, network, data, at_round(round), STREAM)
        ask = replace(ask, weights=fitted.weights, optimiser_state=fitted.optimiser_state)
    return fitted


@pytest.mark.parametrize("optimiser", [ADAM, replace(SGD, momentum=0.9)], ids=["adam", "momentum"])
def test_every_steps_optimiser_goes_on_where_it_stopped(optimiser: Optimiser) -> None:
    assert same(two_rounds(optimiser, epochs=1).weights, two_rounds(optimiser, epochs=2).weights)


def test_fine_tuning_and_a_steps_own_parameters_both_apply() -> None:
    network = deep()
    before = copy_module_weights(network.module)
    step = Step(task_loss, ("head.",))
    training = Training(SGD, 8, fine_tune=1 / 6)
    fitted = fit(job(network, training, steps=(step,)), network, noise(16), at_round(1), STREAM)
    assert changed(before, fitted.weights) == {"head.2.weight", "head.2.bias"}


def test_the_sites_rate_is_used_not_the_recipes() -> None:
    """The schedule's rate comes with the message."""
    network, data = small(norm=False, dtype=torch.float64), noise(8, dtype=torch.float64)
    start, slope = copy_module_weights(network.module)["model"], gradient(network, data)
    fitted = fit(job(network, Training(Optimiser(lr=5.0), 8)), network, data, at_round(1, lr=0.01), STREAM)
    for name, w in start.items():
        torch.testing.assert_close(fitted.weights["model"][name], w - 0.01 * slope[name], rtol=0, atol=1e-14)


def test_the_network_draws_from_the_stream_and_gives_the_generator_back_also_after_an_error() -> None:
    before = torch.get_rng_state()
    draws = []
    for path in ("a", "a", "b"):
        with seed_generators(Stream(0, (path,)), torch.device("cpu")):
            draws.append(float(torch.rand(())))
    with pytest.raises(ZeroDivisionError), seed_generators(Stream(0), torch.device("cpu")):
        torch.rand(1 // 0)
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)
