"""FedMP: the way its terms push, manifolds of real features, FedAvg where nothing is known, both averages by hand."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from scipy.spatial.distance import directed_hausdorff
from torch import Tensor, nn
from torch.func import grad_and_value

from polyclinic import Recipe
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.fedmp import FedMP
from polyclinic.algorithms.representation.fedmp_losses import completion_loss, prototype_alignment, rescale_term
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import SiteId, Tensors
from polyclinic.data.examples import Images, SiteData
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import cut_after
from polyclinic.runs.sites import load_sites
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.algorithms.distillation.digits import parts
from tests.laws.bench import CLASSES, SIDE, Letter, clinics, noise, play, same, site, small, tapped
from tests.laws.test_stacked import SIZES, assert_close, on_the_stack, same_on_both, together

Variant = Literal["corrected", "paper"]
SGD = Training(Optimiser(lr=0.1), batch=5)
MOMENTUM = Training(Optimiser(lr=0.1, momentum=0.9), batch=5, epochs=2)
ADAM = Training(Optimiser("adam", lr=0.01), batch=5)
WITH_EACH_VARIANT = pytest.mark.parametrize("variant", ["corrected", "paper"])


def deep(cut: int, dtype: torch.dtype = torch.float64) -> LiveNetwork:
    """Two convolutions, each with BatchNorm: cut after the first, there are statistics in the head."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(1, 4, 3, padding=1), "norm1": nn.BatchNorm2d(4)}
        layers |= {"relu1": nn.ReLU(), "conv2": nn.Conv2d(4, 6, 3, 2, 1), "norm2": nn.BatchNorm2d(6)}
        layers |= {"relu2": nn.ReLU(), "flatten": nn.Flatten()}
        whole = Classifier(nn.Sequential(OrderedDict(layers)), nn.Linear(6 * (SIDE // 2) ** 2, CLASSES))
    return LiveNetwork(cut_after(whole, cut).to(dtype))


NETWORKS: list[Callable[[], LiveNetwork]] = [
    small,
    lambda: small(norm=False),
    lambda: small(dropout=0.4),
    lambda: deep(1, torch.float32),
]
WITH_EACH_NETWORK = pytest.mark.parametrize("network", NETWORKS, ids=["batchnorm", "plain", "dropout", "cut"])


# Which way it pushes: equations 1 and 8


def likeness(z: Tensor, labels: Tensor, means: Tensor) -> float:
    """The mean cosine of a class, and of these the mean over classes."""
    cosine = F.cosine_similarity(z, means[labels])
    return float(torch.stack([cosine[labels == c].mean() for c in set(labels.tolist())]).mean())


def literal(z: Tensor, labels: Tensor, means: Tensor, known: Tensor, loss: Tensor) -> Tensor:
    """Equation 1 as printed: −cos divided by its own ratio to the loss, sign and all."""
    term = prototype_alignment(z, labels, means, known, paper=True)
    return term / (term / loss).detach()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**20), loss=st.floats(0.01, 5))
def test_a_step_pulls_features_to_their_prototypes_and_the_printed_equation_pushes_them_away(
    seed: int, loss: float
) -> None:
    """Features and prototypes are positive, as after a ReLU: then −cos, and with it the printed ratio, is negative."""
    generator = Stream(seed).generator()
    z, means = (torch.rand(n, 6, generator=generator, dtype=torch.float64) for n in (9, 3))
    labels, known = torch.randint(3, (9,), generator=generator), z.new_ones(3)
    before, task = likeness(z, labels, means), z.new_tensor(loss)

    def after(term: Callable[[Tensor], Tensor]) -> float:
        slope, _ = grad_and_value(term)(z)
        return likeness(z - 1e-4 * slope / slope.norm(), labels, means)

    assert (
        after(lambda z: rescale_term(prototype_alignment(z, labels, means, known, paper=False), task, paper=False))
        > before
    )
    assert (
        after(lambda z: rescale_term(prototype_alignment(z, labels, means, known, paper=True), task, paper=True))
        > before
    )
    assert after(lambda z: literal(z, labels, means, known, task)) < before


@WITH_EACH_VARIANT
def test_training_by_both_terms_brings_a_networks_features_nearer_to_the_prototypes(variant: Variant) -> None:
    """The gradient as the network gets it, without the cross-entropy's: one step of its extractor."""
    network, data = deep(2), noise(24, "batch", dtype=torch.float64)
    network.set_eval_mode()
    weights = copy_module_weights(network.module)
    means = torch.rand(CLASSES, 24, generator=Stream(4).generator(), dtype=torch.float64)

    def features(model: Tensors) -> Tensor:
        return network.features({**weights, "model": model}, data.images).flatten(1)

    def term(model: Tensors) -> Tensor:
        pulled = prototype_alignment(features(model), data.labels, means, means.new_ones(CLASSES), variant == "paper")
        return rescale_term(pulled, means.new_tensor(1.1), variant == "paper")

    model = dict(weights["model"])
    slopes, _ = grad_and_value(term)(model)
    moved = {name: tensor - 1e-3 * slopes[name] for name, tensor in model.items()}
    assert likeness(features(moved), data.labels, means) > likeness(features(model), data.labels, means)


def test_others_features_train_the_head_alone_and_move_no_statistics() -> None:
    """Equation 5: its gradient is 0 in the extractor; in the head BatchNorm sees the site's own images only."""
    data = noise(8, "batch", dtype=torch.float64)
    others = torch.randn(CLASSES, 5, 4, SIDE, SIDE, generator=Stream(6).generator(), dtype=torch.float64) * 9
    bank = {"values": others, "held": torch.full((CLASSES,), 5.0), "key": torch.tensor(3)}
    gradients, statistics = [], []
    for reference in ({}, {"bank": bank, "scalars": {"sample": torch.arange(7)}}):
        network = deep(1)
        network.set_training_mode(frozenset(network.live["model"]))
        loss = completion_loss(network, network.live, (data.images, data.labels), reference)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append({n: t.grad for n, t in network.live["model"].items() if t.grad is not None})
        statistics.append({name: tensor.clone() for name, tensor in network.live["buffers"].items()})
    assert statistics[0].keys() == statistics[1].keys()
    assert all(torch.equal(tensor, statistics[1][name]) for name, tensor in statistics[0].items())
    assert any(name.startswith("head.") and "running_mean" in name for name in statistics[0])
    assert gradients[0].keys() == gradients[1].keys() == network.live["model"].keys()
    for name, alone in gradients[0].items():
        assert torch.equal(alone, gradients[1][name]) is name.startswith("extractor."), name


# Manifolds of real features


def shifted() -> dict[SiteId, SiteData]:
    """The digits 0, 1 and 2 at three sites: as they are, inverted, and blurred."""
    pool = parts()[0]
    pool = pool.subset((pool.labels < CLASSES).nonzero().flatten())
    change: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: 1 - x, lambda x: F.avg_pool2d(x, 3, 1, 1)]
    thirds = zip(("a", "b", "c"), torch.arange(len(pool)).tensor_split(3), change, strict=True)
    return {name: site(name, Images(f(pool.batch(rows)[0]), pool.labels[rows])) for name, rows, f in thirds}


def real(name: str) -> dict[SiteId, SiteData]:
    """Three classes of a set of photographs, at its own sites or at five like each other."""
    if not (Path(os.environ.get("POLYCLINIC_DATA", "")) / name / "labels.csv").exists():
        pytest.skip(f"POLYCLINIC_DATA names no folder with {name}")
    division = {"by": "iid", "sites": 5} if name == "busi" else {"by": "natural"}
    data = {"name": name, "size": 24, "partition": division}
    recipe = {"name": "any", "rounds": 1, "data": data, "model": {"name": "small_cnn"}, "algorithm": "fedavg"}
    found = {}
    for held, known in load_sites(Recipe.from_values(recipe)).sites.items():
        rows = (known.train.labels < CLASSES).nonzero().flatten()
        found[held] = site(held, Images(*known.train.batch(rows[:200])))
    return found


@torch.no_grad()
def made_of(letter: Letter, sites: dict[SiteId, SiteData], network: LiveNetwork) -> tuple[Tensor, Tensor]:
    """What a site's own model, as it was handed in, makes of its images in evaluation; and their labels."""
    train = sites[letter.site].train
    assert isinstance(train, Images)
    network.load_weights({kind: letter.answer.tensors[kind] for kind in ("model", "buffers")})
    return network.module.extractor.eval()(train.images), train.labels


def hausdorff(one: Tensor, other: Tensor) -> float:
    return max(float(directed_hausdorff(one, other)[0]), float(directed_hausdorff(other, one)[0]))


@pytest.mark.parametrize("source", ["digits", "office_caltech10", "busi"])
def test_a_completed_manifold_is_never_farther_from_the_global_one_and_often_nearer(source: str) -> None:
    """The claim before the paper's Lemma 1, whose "<" is "≤": a site that already has the farthest point gains nothing.

    The union of all sites' features of a class is the global manifold; all sites, all classes.
    """
    sites = shifted() if source == "digits" else real(source)
    first = next(iter(sites.values())).train.batch(torch.tensor([0]))[0]
    name, size = ("cnn_c" if source == "digits" else "small_cnn"), first.shape[-1]
    network = LiveNetwork(build_model(name, classes=CLASSES, channels=first.shape[1], size=size, seed=Stream(2)))
    algorithm = FedMP(Training(Optimiser("adam", lr=1e-3), batch=32, epochs=2), bank=6, receive=10)
    _, letters = tapped(algorithm, sites, network, rounds=3)
    told = {letter.site: letter.sent.tensors["others"] for letter in letters if letter.round == 3}
    own = {letter.site: made_of(letter, sites, network) for letter in letters if letter.round == 2}
    assert own.keys() == sites.keys()
    closer = []
    for held, (z, labels) in own.items():
        others = told[held]
        for c in range(CLASSES):
            mine = z[labels == c]
            heard = others["values"][c, : int(others["held"][c])]
            everybody = torch.cat([there[y == c] for there, y in own.values()])
            nearest = torch.cdist(heard.double(), everybody.double(), compute_mode="donot_use_mm_for_euclid_dist")
            assert float(nearest.min(1).values.max()) < 1e-4, "what is heard is part of the global manifold"
            before, after = hausdorff(mine, everybody), hausdorff(torch.cat([mine, heard]), everybody)
            assert after <= before + 1e-4
            closer.append(after < before - 1e-3)
    assert sum(closer) >= len(closer) / 3


# Where it is FedAvg


@WITH_EACH_NETWORK
@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_without_its_terms_it_is_fedavg(network: Callable[[], LiveNetwork], training: Training) -> None:
    sites = clinics(12, 7, 16)
    fedavg = play(FedAvg(training), sites, network(), 3)
    assert same(
        play(FedMP(training, completion=False, alignment=False), sites, network(), 3).outcome.state,
        fedavg.outcome.state,
    )
    for half in (FedMP(training, fewest=1, completion=False), FedMP(training, fewest=1, alignment=False)):
        assert not same(play(half, sites, network(), 3).weights, fedavg.weights)


@WITH_EACH_NETWORK
@WITH_EACH_VARIANT
def test_the_first_round_is_fedavgs(network: Callable[[], LiveNetwork], variant: Variant) -> None:
    """There is nothing to complete by or to align to, and nothing is divided by nothing."""
    sites = clinics(12, 7, 16)
    for rounds, equal in ((1, True), (2, False)):
        fedavg = play(FedAvg(SGD), sites, network(), rounds)
        found = play(FedMP(SGD, variant=variant, fewest=1), sites, network(), rounds)
        assert same(found.weights, fedavg.weights) is equal
        assert all(bool(t.isfinite().all()) for group in found.outcome.state.values() for t in group.values())


def test_a_federation_where_no_class_may_be_told_is_fedavg_to_the_end() -> None:
    sites = clinics(12, 7, 16)
    found = play(FedMP(SGD, fewest=1000), sites, small(), 3)
    assert same(found.weights, play(FedAvg(SGD), sites, small(), 3).weights)
    assert all(bool((tensor == 0).all()) for tensor in found.outcome.state["prototypes"].values())
    _, letters = tapped(FedMP(SGD, fewest=1000), sites, small(), 3)
    assert all(bool((t == 0).all()) for letter in letters for t in letter.answer.tensors["features"].values())


# Engines


@pytest.mark.parametrize(
    "options",
    [{}, {"variant": "paper"}, {"balanced": False}, {"completion": False}, {"alignment": False}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_it_stacks_with_dropout(options: dict[str, Any]) -> None:
    algorithm = FedMP(Training(Optimiser("sgd", 0.1), batch=8, epochs=2), fewest=1, **options)
    sites = clinics(*SIZES, dtype=torch.float64)
    played = same_on_both(algorithm, sites, 1e-9, torch.float64, dropout=0.5)
    assert together(played) == {len(SIZES)}


@pytest.mark.parametrize("cut", [1, 2])
def test_it_stacks_wherever_the_network_is_cut(cut: int) -> None:
    algorithm = FedMP(Training(Optimiser("sgd", 0.1), batch=8, epochs=2), fewest=1)
    sites = clinics(*SIZES, dtype=torch.float64)
    alone, stacked = (play(algorithm, sites, deep(cut), 3, wrap) for wrap in (lambda e: e, on_the_stack()))
    assert_close(stacked.outcome.state, alone.outcome.state, 1e-9)
    assert together(stacked) == {len(SIZES)}
    assert not same(alone.weights, play(FedAvg(algorithm.training), sites, deep(cut), 3).weights)
