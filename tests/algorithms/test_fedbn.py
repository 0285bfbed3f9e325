"""FedBN: normalisation layers, known by their type, stay at their site; everything else is FedAvg."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.personalisation.fedbn import LOCAL_KINDS, FedBN
from polyclinic.core.jobs import Federation
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Tensors
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.models.modifications import replace_batch_norm
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.runs.experiment import run
from polyclinic.storage import messages as wire
from polyclinic.training.network import copy_module_weights, normalisation_names
from tests.algorithms.test_fedper import MOMENTUM, SGD, STAGES, crossing, traces
from tests.laws.bench import Weighting, clinics, plain_training, play, same, small, tapped
from tests.laws.test_stacked import SIZES, same_on_both, together
from tests.runs.test_networks import prepared
from tests.small import tiny


def whole(shared: Bundle, memory: Bundle | None) -> Bundle:
    own = memory or {}
    return {kind: {**shared.get(kind, {}), **own.get(LOCAL_KINDS[kind], {})} for kind in LOCAL_KINDS}


# Which layers: in networks whose normalisation layers the papers (and torchvision's definitions) let one count


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("resnet50", 1 + 16 * 3 + 4),  # the stem, three in each of 16 blocks, one in each of 4 shortcuts
        ("densenet201", 1 + 2 * (6 + 12 + 48 + 32) + 3 + 1),  # the stem, two a layer, three transitions, the end
        ("mobilenet_v2", 1 + 2 + 16 * 3 + 1),  # the stem, a block that does not expand, 16 that do, the end
    ],
)
@pytest.mark.parametrize("grouped", [False, True], ids=["batchnorm", "groupnorm"])
def test_every_normalisation_layer_stays_and_nothing_else(name: str, layers: int, grouped: bool) -> None:
    module = build_model(name, classes=3, channels=1, size=32, seed=Stream(0))
    module = replace_batch_norm(module) if grouped else module
    state = FedBN().init(
        Federation(("a", "b", "c"), {"one": 5}, copy_module_weights(module), normalisation_names(module))
    )
    travelling = {
        f"{path}.{own}"
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
        for own, _ in layer.named_parameters()
    }
    assert state["model"].keys() == travelling
    assert (len(state["norms"]), len(state["norm buffers"])) == (2 * layers, 0 if grouped else 3 * layers)
    assert state["buffers"] == {}
    assert {path.rpartition(".")[0] for path in state["norms"]} == {
        path for path, layer in module.named_modules() if isinstance(layer, nn.GroupNorm if grouped else nn.BatchNorm2d)
    }
    assert same(whole(state, state), copy_module_weights(module)), "every tensor is either shared or a site's own"
    if name == "resnet50":
        assert "extractor.layer1.0.downsample.1.weight" in state["norms"], "a name without bn"


def test_all_kinds_of_normalisation_are_known_by_their_type() -> None:
    module = nn.ModuleDict(
        {
            "bn0": nn.Linear(2, 2),
            "a": nn.BatchNorm1d(2),
            "b": nn.InstanceNorm2d(2, affine=True),
            "c": nn.InstanceNorm3d(2, track_running_stats=True),
            "d": nn.GroupNorm(1, 2),
            "e": nn.Sequential(nn.LayerNorm(2), nn.Conv2d(2, 2, 1)),
            "f": nn.RMSNorm(2),
            "g": nn.SyncBatchNorm(2, affine=False),
        }
    )
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    wanted = {"a": {"weight", "bias"} | statistics, "b": {"weight", "bias"}, "c": statistics, "d": {"weight", "bias"}}
    wanted |= {"e.0": {"weight", "bias"}, "f": {"weight"}, "g": statistics}
    assert normalisation_names(module) == {f"{layer}.{own}" for layer, names in wanted.items() for own in names}


# What it must equal


@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_without_normalisation_it_is_fedavg(weights: Weighting, dropout: float) -> None:
    training, sites = replace(MOMENTUM, weights=weights), clinics(12, 7, 16)
    for norm in (False, True):
        one, other = (play(kind(training), sites, small(norm, dropout), 3) for kind in (FedBN, FedAvg))
        assert same(one.weights, other.weights) is not norm
        assert (one.remembered("clinic-1") is not None) is norm


@pytest.mark.parametrize("training", [SGD, MOMENTUM, Training(Optimiser("adam", lr=0.01), batch=5)])
def test_one_site_is_ordinary_training(training: Training) -> None:
    """Shared weights come back from the server, normalisation from the site's own memory: nothing is lost."""
    sites, network, each = clinics(23), small(), training.epochs or 1
    played = play(FedBN(training), sites, network, 3)
    train = sites["clinic-1"].train
    assert isinstance(train, Images)
    periods = [range(round * each, (round + 1) * each) for round in range(3)]
    found = whole(played.outcome.state, played.remembered("clinic-1"))
    assert same(found, plain_training(network, train, training, "clinic-1", periods))


def test_in_the_first_round_sites_do_what_they_do_in_fedavg() -> None:
    for rounds, equal in ((1, True), (2, False)):
        fedbn, fedavg = (play(kind(MOMENTUM), clinics(12, 7, 16), small(), rounds) for kind in (FedBN, FedAvg))
        shared = {name: fedavg.model[name] for name in fedbn.model}
        assert same({"model": fedbn.model}, {"model": shared}) is equal


def test_a_sites_normalisation_is_what_it_has_by_itself_given_the_shared_weights() -> None:
    """Round by round an ordinary PyTorch loop, from the weights sent and the layers it had: bit for bit."""
    played, letters = tapped(FedBN(SGD), clinics(12, 7, 16), small(), 3)
    sites, network, first = clinics(12, 7, 16), small(), copy_module_weights(small().module)
    for name, held in sites.items():
        assert isinstance(held.train, Images)
        trained = first
        for letter in (letter for letter in letters if letter.site == name):
            network.load_weights({kind: {**trained[kind], **letter.sent.tensors.get(kind, {})} for kind in trained})
            trained = plain_training(network, held.train, SGD, name, [[letter.round - 1]])
        memory = played.remembered(name)
        assert memory is not None
        assert {kind: group.keys() for kind, group in memory.items()} == {
            "norms": {"extractor.norm.weight", "extractor.norm.bias"},
            "norm buffers": {f"extractor.norm.{s}" for s in ("running_mean", "running_var", "num_batches_tracked")},
        }
        own = {
            LOCAL_KINDS[kind]: {n: t for n, t in trained[kind].items() if n in memory[LOCAL_KINDS[kind]]}
            for kind in trained
        }
        assert same(memory, own)
    assert len({wire.hash_tensors(played.remembered(name) or {}) for name in sites}) == 3


# What travels


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_no_byte_of_a_normalisation_layer_leaves_a_site(stages: list[UpdateTransform]) -> None:
    messages, remembered, _ = crossing(FedBN(SGD), stages)
    assert (len(messages), len(remembered)) == (2 * (3 + 1), 2 * 3)
    own = [group for memory in remembered for group in memory.values()]
    numbers = [{name: t for name, t in group.items() if t.is_floating_point()} for group in own]
    for message in messages:
        assert b"norm." not in message
        assert not any(trace in message for group in numbers for trace in traces(group))
        assert set(wire.decode(message).tensors) in ({"model"}, {"predictions"})


def test_it_would_be_found_if_it_did() -> None:
    messages, _, _ = crossing(FedAvg(SGD), [])
    sent = wire.decode(messages[0]).tensors
    assert b"norm." in messages[0]
    mean = {"": sent["buffers"]["extractor.norm.running_mean"]}
    assert all(trace in messages[0] for trace in traces(mean))


@pytest.mark.parametrize(("cohort", "rounds"), [(None, (1, 1, 1)), (1, (1, 2, 3))])
def test_the_first_values_are_given_once_when_a_site_first_takes_part(
    cohort: int | None, rounds: tuple[int, ...]
) -> None:
    _, letters = tapped(FedBN(SGD), clinics(8, 8, 8), small(), 4, cohort=cohort, cohort_order="cyclic")
    first = copy_module_weights(small().module)
    begun = [letter for letter in letters if letter.sent.tensors.keys() != {"model"}]
    assert [(letter.round, letter.site) for letter in begun] == list(zip(rounds, clinics(8, 8, 8), strict=True))
    for letter in begun:
        sent = letter.sent.tensors
        assert same(
            sent | {"model": {}}, {own: _norms_of(first[kind]) for kind, own in LOCAL_KINDS.items()} | {"model": {}}
        )


def _norms_of(group: Tensors) -> Tensors:
    return {name: tensor for name, tensor in group.items() if ".norm." in name}


# Who predicts with what


def test_a_site_predicts_with_the_shared_weights_and_its_own_layers_and_there_is_no_other_model() -> None:
    played = play(FedBN(SGD), clinics(12, 7), small(), 2)
    algorithm, state = FedBN(SGD), played.outcome.state
    for site in ("clinic-1", "clinic-2"):
        memory = played.remembered(site)
        found = algorithm.models(algorithm.broadcast(state, site), memory)
        assert found.keys() == {"personal"}
        assert same(found["personal"], whole(state, memory))
    late = algorithm.models(algorithm.broadcast(state, "late"), None)["personal"]
    assert same(late, whole(state, {own: state[own] for own in LOCAL_KINDS.values()}))
    assert late["buffers"]["extractor.norm.num_batches_tracked"] == 0


def test_what_a_site_remembers_counts_though_its_first_reply_was_lost() -> None:
    """Then the server takes it for new and sends first values once more."""
    played = play(FedBN(SGD), clinics(12), small(), 1)
    memory, state = played.remembered("clinic-1"), played.outcome.state
    received = FedBN(SGD).broadcast(state, "unheard of")
    assert received.keys() == {"model", "buffers", *LOCAL_KINDS.values()}
    assert same(FedBN(SGD).start_weights(received, memory), whole(state, memory))


# Where it runs


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"norm": False}], ids=["batchnorm and dropout", "plain"])
def test_it_stacks(options: dict[str, Any]) -> None:
    algorithm = FedBN(Training(Optimiser("sgd", 0.1, 0.9), batch=4, epochs=2))
    played = same_on_both(algorithm, clinics(*SIZES, dtype=torch.float64), 1e-10, torch.float64, **options)
    assert together(played) == {len(SIZES)}


def test_a_recipe_tells_it_which_layers_and_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recipe = tiny(algorithm="fedbn", model__name="groupnorm_cnn", rounds=3, evaluate__bootstrap=0)

    def stop(event: str, fields: Any) -> None:
        if event == "round done" and fields["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "stopped", watch=stop)
    found = run(recipe, tmp_path / "stopped")
    whole_run = run(recipe)
    assert found.summary.sha256 == whole_run.summary.sha256
    assert found.summary.merged == whole_run.summary.merged
    assert found.summary.headline.model == "personal"
    assert len(whole_run.state["norms"]) == 2 * 3, "scale and shift of three GroupNorm layers"


def test_every_clusters_network_is_asked_for_its_own_layers() -> None:
    models = {"high": "groupnorm_cnn", "medium": "mobilenet_v2", "low": "mlp"}
    made = prepared(algorithm="fedbn", **{f"clusters__{name}__model": model for name, model in models.items()})
    state = made.setup.algorithm.init(made.setup.federation)
    own = {name: (len(state[f"norms@{name}"]), len(state[f"norm buffers@{name}"])) for name in models}
    assert own == {"high": (2 * 3, 0), "medium": (2 * 52, 3 * 52), "low": (0, 0)}
