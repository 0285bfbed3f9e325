"""Networks beside the classifier: they train, stack and travel with it, and whatever predicts does not know of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from polyclinic import Recipe, run
from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import classifier_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit, Score, Site, Step, Update, Work
from polyclinic.core.network import Network
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import AUX_PREFIX, Batch, Bundle
from polyclinic.evaluation.flops import count_parameters, training_step_flops
from polyclinic.runs.experiment import Experiment
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities
from polyclinic.training.network import LiveNetwork, copy_module_weights, with_auxiliary
from tests.laws.bench import CLASSES, clinics, noise, play, same, small, tapped
from tests.laws.test_determinism import RandomStates
from tests.laws.test_handed_over import over_bytes
from tests.laws.test_stacked import SIZES, same_on_both, together
from tests.runs.test_networks import VALUES, hospitals
from tests.small import tiny
from tests.training.jobs import at_round

SGD = Training(Optimiser("sgd", 0.1), batch=4, epochs=2)
BATCH = noise(6, "beside")


def judging(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """A second opinion on the labels, from the features of the model as it evaluates."""
    del reference
    images, labels = batch
    return F.cross_entropy(network.auxiliary(weights, "judge", network.teacher_features(weights, images)), labels)


def plain(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    del reference
    return network.loss(weights, batch)


STEPS = Step(plain, ("extractor.", "head.")), Step(judging, (AUX_PREFIX,))


@dataclass(frozen=True)
class Judged(FedAvg):
    """FedAvg; beside it a judge trains that nobody listens to."""

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        (width,) = features
        layers = nn.Linear(width, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, classes)
        return {"judge": nn.Sequential(*layers)}

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(received, STEPS, self.training)
        return Update(fitted.weights, site.examples), None


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ALGORITHMS, "judged", Judged)
    return "judged"


def with_judge(network: LiveNetwork, seed: int = 1) -> LiveNetwork:
    return with_auxiliary(network, Judged(SGD).auxiliary, (16,), CLASSES, Stream(seed))


# What the classifier is does not change


def test_the_classifier_does_not_know_of_them() -> None:
    bare, module = small(dropout=0.4), small(dropout=0.4).module
    before = copy_module_weights(module)
    network = with_judge(LiveNetwork(module))
    assert same(copy_module_weights(network.module), before)
    assert network.module.leaf_layers() == bare.module.leaf_layers()
    assert count_parameters(network.module) == count_parameters(bare.module)
    assert training_step_flops(network.module, (4, 1, 4, 4)) == training_step_flops(bare.module, (4, 1, 4, 4))
    mine = {n for n in network.live["model"] if n.startswith(AUX_PREFIX)}
    assert mine == {f"auxiliary.judge.{layer}.{own}" for layer in (0, 1, 4) for own in ("weight", "bias")}
    assert network.live["model"].keys() - mine == bare.live["model"].keys()
    network.set_eval_mode()
    bare.set_eval_mode()
    others = copy.deepcopy(network.copy_weights())  # called functionally, with names that the module has not
    for weights in (network.live, others, classifier_weights(others)):
        assert torch.equal(network(weights, BATCH.images), bare(bare.live, BATCH.images))
        assert torch.equal(network.teacher_logits(weights, BATCH.images), bare(bare.live, BATCH.images))


def test_first_weights_come_from_the_seed_and_nowhere_else() -> None:
    before = RandomStates()
    one, again, other = (with_judge(small(), seed).copy_weights() for seed in (1, 1, 2))
    assert RandomStates() == before
    torch.rand(3)
    assert same(one, with_judge(small(), 1).copy_weights())
    assert same(one, again)
    names = [n for n in one["model"] if n.startswith(AUX_PREFIX) and ".1." not in n]
    assert not any(torch.equal(one["model"][n], other["model"][n]) for n in names)


def test_an_algorithm_without_them_gets_the_network_itself() -> None:
    network = small()
    assert with_auxiliary(network, FedAvg(SGD).auxiliary, (16,), CLASSES, Stream(1)) is network


@pytest.mark.parametrize("eval_mode", [False, True])
def test_a_call_is_the_networks_own_and_calm_moves_and_drops_nothing(eval_mode: bool) -> None:
    network = with_judge(small())
    network.set_training_mode(frozenset(network.live["model"]))
    v = torch.rand(8, 16, generator=Stream(3).generator())
    hand = copy.deepcopy(network.auxiliary_modules["judge"]).train(not eval_mode)
    before = network.copy_weights()["buffers"]
    wanted = hand(v)
    for weights in (network.copy_weights(), network.live):  # a copy first: calls write statistics where they find them
        found = network.auxiliary(weights, "judge", v, eval_mode=eval_mode)
        torch.testing.assert_close(found, wanted)
    assert (
        torch.equal(before["auxiliary.judge.1.running_mean"], network.live["buffers"]["auxiliary.judge.1.running_mean"])
        is eval_mode
    )
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert network.live["model"]["auxiliary.judge.4.weight"].grad is not None


# Training and travelling


def test_the_classifier_trains_as_if_they_were_not_there_and_they_do_train() -> None:
    fedavg, judged = (play(kind(SGD), clinics(12, 7, 16), small(dropout=0.3), 3) for kind in (FedAvg, Judged))
    assert same(judged.weights, fedavg.weights), "at the end they are gone"
    _, letters = tapped(Judged(SGD), clinics(12, 7), small(), 2)
    sent = [letter.sent.tensors["model"]["auxiliary.judge.0.weight"] for letter in letters]
    replies = [letter.answer.tensors["model"]["auxiliary.judge.0.weight"] for letter in letters]
    assert not torch.equal(sent[0], replies[0])
    torch.testing.assert_close(sent[2], (12 * replies[0] + 7 * replies[1]) / 19)


def test_they_stack_with_dropout_and_statistics_of_their_own() -> None:
    sites = clinics(*SIZES, dtype=torch.float64)
    assert together(same_on_both(Judged(SGD), sites, 1e-10, torch.float64, dropout=0.5)) == {len(SIZES)}
    handed, sent = (
        play(Judged(SGD), clinics(12, 7), small(), 2),
        play(Judged(SGD), clinics(12, 7), small(), 2, over_bytes),
    )
    assert handed.sha256 == sent.sha256


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_fine_tuning_is_of_the_classifiers_layers_and_leaves_them_free(fraction: float) -> None:
    network, bare = with_judge(small()), small()
    mine = frozenset(n for n in network.live["model"] if n.startswith(AUX_PREFIX))
    assert network.trainable_names(fraction, ()) - mine == bare.trainable_names(fraction, ())
    assert network.trainable_names(fraction, (AUX_PREFIX,)) == mine


def test_whoever_evaluates_needs_the_classifier_alone_whoever_trains_all() -> None:
    network = with_judge(small())
    weights = copy_module_weights(small().module)
    found = score(Score(weights, predict_probabilities), network, BATCH)
    assert torch.equal(
        found["probabilities"], score(Score(weights, predict_probabilities), small(), BATCH)["probabilities"]
    )
    with pytest.raises(KeyError, match="auxiliary"):
        fit(Fit(weights, STEPS, SGD), network, BATCH, at_round(1), Stream(0))


def test_a_run_counts_their_bytes_and_saves_the_model_alone(judged: str, tmp_path: Path) -> None:
    fedavg, found = (run(tiny(algorithm=name), tmp_path / name) for name in ("fedavg", judged))
    assert same(found.state, fedavg.state)
    for key in ("merged", "model", "sites"):
        assert found.summary.model_dump()[key] == fedavg.summary.model_dump()[key]
    more = found.summary.cost.bytes_up - fedavg.summary.cost.bytes_up
    width = 64 * 5 + 5 + 5 * 10 + 10 + 4 * 5  # two dense layers, a BatchNorm
    assert 0 < more - 4 * width * 3 * 2 < 0.6 * more, "and their names"
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("fedavg", judged)]
    assert saved[0].keys() == saved[1].keys()
    again = run(tiny(algorithm=judged, model__weights=str(tmp_path / judged / "model.safetensors")))
    assert again.headline.scores.value("accuracy") > 0.5


def test_every_cluster_has_its_own_by_its_features(judged: str) -> None:
    recipe = Recipe.from_values({**VALUES, "algorithm": judged})
    experiment = Experiment(recipe, dataset=hospitals())
    state = experiment.setup.algorithm.init(experiment.setup.federation)
    widths = {name: state[f"model@{name}"]["auxiliary.judge.0.weight"].shape[1] for name in recipe.clusters}
    assert widths == {"high": 128, "medium": 64, "low": 32}
    found = run(recipe, dataset=hospitals())
    assert not any(name.startswith(AUX_PREFIX) for group in found.state.values() for name in group)


def test_sites_may_keep_their_models_as_an_ensemble(judged: str) -> None:
    found = run(tiny(algorithm=judged, ensemble=True))
    assert found.summary.merged["ensemble"] == run(tiny(ensemble=True)).summary.merged["ensemble"]
    assert not any(name.startswith(AUX_PREFIX) for group in found.state.values() for name in group)


@pytest.mark.parametrize("unit", ["image", "site"])
def test_statistics_of_theirs_that_would_leave_are_refused_under_a_plan(judged: str, unit: str) -> None:
    wish: dict[str, Any] = {"unit": unit, "epsilon": 30.0, "delta": 1e-4, "randomness": "seed"}
    with pytest.raises(
        RecipeError, match=r"auxiliary\.judge\.1, of a network that this algorithm trains beside the model"
    ):
        Experiment(tiny(algorithm=judged, privacy=wish))
