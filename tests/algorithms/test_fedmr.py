"""FedMR: both losses by hand, prototypes weighted by counts, classes that sites lack; FedAvg with everything off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.func import grad_and_value, vmap

from polyclinic import run
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.fedmr import FedMR
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.core.jobs import Fit, Fitted, Job, Score, Site, Update
from polyclinic.core.options import Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, SiteId
from polyclinic.data.examples import Images, SiteData
from polyclinic.federation.site_runner import drive_jobs
from polyclinic.runs.experiment import Experiment
from polyclinic.training.losses import (
    inter_class_margin,
    intra_class_correlation,
    manifold_reshaping_loss,
    pairwise_distances,
)
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import CLASSES, clinics, federation, noise, play, same, site, small, tapped
from tests.laws.test_stacked import SIZES, same_on_both, together
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=5)
MOMENTUM = Training(Optimiser(lr=0.1, momentum=0.9), batch=5, epochs=2)
ADAM = Training(Optimiser("adam", lr=0.01), batch=5)
NETWORKS: list[Callable[[], LiveNetwork]] = [small, lambda: small(norm=False), lambda: small(dropout=0.4)]
WITH_EACH_NETWORK = pytest.mark.parametrize("network", NETWORKS, ids=["batchnorm", "plain", "dropout"])
Array = npt.NDArray[np.float64]


def drawn(*shape: int, name: str = "z") -> Tensor:
    return torch.randn(*shape, generator=Stream(5, (name, *shape)).generator(), dtype=torch.float64)


# Decorrelation, equation 1


def correlations_by_hand(z: Array, labels: Array) -> float:
    """Of every class with three images or more: the mean of NumPy's correlations, squared, off the diagonal."""
    found = []
    for label in np.unique(labels):
        rows = z[labels == label]
        if len(rows) > 2:
            spread = rows.var(0, ddof=1)
            gate = spread / (spread + spread.mean() / 100)
            squares = np.nan_to_num(np.corrcoef(rows.T)) ** 2 * np.outer(gate, gate)
            found.append(squares[~np.eye(len(squares), dtype=bool)].mean())
    return float(np.mean(found)) if found else 0.0


LABELS = [[0, 1, 0, 1, 0, 1, 1], [2, 2, 2, 2, 2], [0, 1, 2, 1, 2, 2, 0, 2], [0, 0, 1, 1], [0, 1, 2], [1]]


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("width", [2, 3, 20])
def test_decorrelation_is_the_mean_squared_correlation_within_classes(labels: list[int], width: int) -> None:
    z = drawn(len(labels), width) * 3 + 5
    found = intra_class_correlation(z, torch.tensor(labels))
    assert float(found) == pytest.approx(correlations_by_hand(z.numpy(), np.array(labels)), abs=1e-7)


def test_decorrelation_knows_its_extremes() -> None:
    """1 for features that are multiples of each other; 0 for orthogonal contrasts; between for a mixture."""
    line, labels = drawn(6, 1) * torch.tensor([1.0, -1.0, 1.0]), torch.zeros(6, dtype=torch.int64)
    contrasts = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
    assert float(intra_class_correlation(line, labels)) == pytest.approx(1 / 1.01**2, abs=1e-6)
    assert float(intra_class_correlation(contrasts, torch.zeros(4, dtype=torch.int64))) == pytest.approx(0, abs=1e-12)
    mixed = torch.cat([line, drawn(6, 3, name="other")], 1)
    assert 0.01 < float(intra_class_correlation(mixed, labels)) < 0.99


@settings(deadline=None)
@given(seed=st.integers(0, 2**20), images=st.integers(1, 12), width=st.integers(1, 6))
def test_decorrelation_lies_between_0_and_1_and_a_step_down_lowers_it(seed: int, images: int, width: int) -> None:
    generator = Stream(seed).generator()
    z = torch.randn(images, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (images,), generator=generator)
    slope, loss = grad_and_value(intra_class_correlation)(z, labels)
    assert -1e-12 <= float(loss) <= 1 + 1e-12
    assert bool(slope.isfinite().all())
    if float(slope.norm()) > 1e-3:
        step = 1e-4 / float(slope.norm())
        assert float(intra_class_correlation(z - step * slope, labels)) < float(loss)


def test_dead_features_and_lone_images_have_no_part_in_it() -> None:
    """A ReLU that is off for a whole class; classes with one or two images, whose correlations say nothing."""
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    z = drawn(7, 4)
    z[:4, 3] = 0.0
    slope, loss = grad_and_value(intra_class_correlation)(z, labels)
    with np.errstate(invalid="ignore"):
        wanted = correlations_by_hand(z.numpy(), labels.numpy())
    assert float(loss) == pytest.approx(wanted, abs=1e-9), "pairs with it count as 0"
    assert bool(slope.isfinite().all())
    assert bool((slope[4:] == 0).all())
    assert bool((slope[:4, 3] == 0).all())


# The margin, equation 2


def between(means: Tensor, known: list[bool]) -> Tensor:
    there = torch.tensor(known)
    others = there[:, None] & there & ~torch.eye(len(known), dtype=torch.bool)
    return torch.cdist(means, means) * others


@pytest.mark.parametrize("margin", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("known", [[True] * 4, [True, False, True, True], [False, True, False, False], [False] * 4])
def test_the_margin_by_hand(known: list[bool], margin: float) -> None:
    z, means = drawn(9, 5), drawn(4, 5, name="means")
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])
    total = 0.0
    for row, y in zip(z, labels.tolist(), strict=True):
        others = [c for c in range(4) if c != y and known[c]] if known[y] else []
        far = [float(np.linalg.norm(row - mean)) for mean in means]
        wanted = [margin * float(np.linalg.norm(means[y] - mean)) for mean in means]
        total += sum(max(0.0, wanted[c] + far[y] - far[c]) for c in others) / max(len(others), 1) / 9
    assert float(inter_class_margin(z, labels, means, between(means, known), margin)) == pytest.approx(total, abs=1e-12)
    assert (total > 0) == (sum(known) > 1)


def test_a_step_down_the_margin_takes_features_away_from_other_prototypes_and_stops_there() -> None:
    means = torch.tensor([[0.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    apart, labels = between(means, [True, True]), torch.tensor([0])
    z = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    path = [pairwise_distances(z, means)[0]]
    for _ in range(400):
        slope, _ = grad_and_value(inter_class_margin)(z, labels, means, apart, 0.5)
        z = z - 0.01 * slope
        path.append(pairwise_distances(z, means)[0])
    own, other = torch.stack(path).unbind(1)
    assert float(own[0]) > float(other[0]), "it began in the other class's space"
    assert float(other[-1]) > float(other[0])
    assert float(other[-1] - own[-1]) == pytest.approx(0.5 * 4, abs=0.03), "half the way between them, and no more"


def test_features_on_a_prototype_have_a_slope() -> None:
    means = drawn(3, 4, name="means")
    for on in (0, 1):
        slope, loss = grad_and_value(inter_class_margin)(
            means[on : on + 1], torch.tensor([0]), means, between(means, [True] * 3), 1.0
        )
        assert float(loss) >= 0
        assert bool(slope.isfinite().all())


@given(seed=st.integers(0, 2**20), offset=st.sampled_from([0.0, 30.0]))
def test_distances_are_torchs_even_far_from_the_origin(seed: int, offset: float) -> None:
    generator = Stream(seed).generator()
    rows, others = (torch.randn(n, 8, generator=generator) + offset for n in (5, 3))
    torch.testing.assert_close(pairwise_distances(rows, others), torch.cdist(rows, others), rtol=1e-4, atol=1e-4)


def test_the_objective_is_the_sum_of_its_three_losses_and_stacks() -> None:
    networks, data = [small(dtype=torch.float64) for _ in range(2)], noise(9, "batch", dtype=torch.float64)
    means = drawn(CLASSES, 16, name="means")
    numbers = {"intra": 0.3, "inter": 0.7, "margin": 0.5}
    scalars, apart = {name: means.new_tensor(n) for name, n in numbers.items()}, between(means, [True] * 3)
    reference: Bundle = {"scalars": scalars, "prototypes": {"means": means, "apart": apart}}
    weights = copy_module_weights(networks[0].module)
    found = manifold_reshaping_loss(
        networks[0], networks[0].load_weights(weights), (data.images, data.labels), reference
    )
    z = networks[1].module.extractor(data.images)
    task = F.cross_entropy(networks[1].module.head(z), data.labels)
    hand = (
        task
        + 0.3 * intra_class_correlation(z, data.labels)
        + 0.7 * inter_class_margin(z, data.labels, means, apart, 0.5)
    )
    assert found.item() == pytest.approx(hand.item(), rel=1e-12)
    pairs = torch.stack([z, 2 * z]), torch.stack([data.labels, data.labels.flip(0)])
    for loss in (intra_class_correlation, lambda z, y: inter_class_margin(z, y, means, apart, 0.5)):
        alone = torch.stack([loss(*pair) for pair in zip(*pairs, strict=True)])
        torch.testing.assert_close(vmap(loss)(*pairs), alone, rtol=1e-12, atol=1e-12)


# Where it is FedAvg


@WITH_EACH_NETWORK
@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_without_its_terms_it_is_fedavg(network: Callable[[], LiveNetwork], training: Training) -> None:
    sites = clinics(12, 7, 16)
    fedavg = play(FedAvg(training), sites, network(), 3).outcome.state
    assert same(play(FedMR(training, intra=0.0, inter=0.0), sites, network(), 3).outcome.state, fedavg)
    for options in ({"intra": 0.0, "inter": 1.0}, {"intra": 1.0, "inter": 0.0}):
        other = play(FedMR(training, **options), sites, network(), 3)
        assert not same(other.weights, fedavg)


@WITH_EACH_NETWORK
def test_without_decorrelation_the_first_round_is_fedavgs(network: Callable[[], LiveNetwork]) -> None:
    """There are no prototypes yet, so the margin is 0 and has no slope."""
    for rounds, equal in ((1, True), (2, False)):
        fedavg = play(FedAvg(SGD), clinics(12, 7, 16), network(), rounds)
        fedmr = play(FedMR(SGD, intra=0.0, inter=1.0), clinics(12, 7, 16), network(), rounds)
        assert same(fedmr.weights, fedavg.weights) is equal


# Prototypes, equation 5


def unequal() -> dict[SiteId, SiteData]:
    """Class 0 at two sites, class 1 at one, class 2 at nobody's."""
    labels = {"a": [0, 0, 0, 1, 1], "b": [0] * 7}
    return {
        name: site(name, Images(noise(len(y), name, dtype=torch.float64).images, torch.tensor(y)))
        for name, y in labels.items()
    }


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_prototypes_are_means_over_all_images_each_by_its_own_sites_model(weights: Any) -> None:
    sites = unequal()
    played, letters = tapped(FedMR(replace(SGD, weights=weights)), sites, small(dtype=torch.float64))
    rows, labels = [], []
    for letter in letters:
        network, train = small(dtype=torch.float64), sites[letter.site].train
        assert isinstance(train, Images)
        network.load_weights({kind: letter.answer.tensors[kind] for kind in ("model", "buffers")})
        rows.append(network.module.extractor.eval()(train.images).detach())
        labels.append(train.labels)
        assert set(letter.answer.tensors) == {"model", "buffers", "prototypes", "counts"}
    z, y = torch.cat(rows), torch.cat(labels)
    state = played.outcome.state
    assert state["counts"]["images"].tolist() == [10.0, 2.0, 0.0]
    for c in (0, 1):
        torch.testing.assert_close(state["prototypes"]["means"][c], z[y == c].mean(0), rtol=1e-12, atol=1e-12)
    assert bool((state["prototypes"]["means"][2] == 0).all())


def test_a_class_that_a_site_or_everybody_lacks_breaks_nothing() -> None:
    """In round 2 margins are known between classes 0 and 1 only; nothing of class 2's empty prototype is used."""
    algorithm = FedMR(SGD, inter=1.0)
    _, letters = tapped(algorithm, unequal(), small(dtype=torch.float64), 3)
    received = next(letter.sent.tensors for letter in letters if letter.round == 2)
    apart, means = algorithm._loss_reference(received)["prototypes"]["apart"], received["prototypes"]["means"]
    far = float((means[0] - means[1]).norm())
    wanted = torch.tensor([[0.0, far, 0.0], [far, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(apart, wanted, rtol=1e-9, atol=1e-12)
    assert all(
        bool(t.isfinite().all()) for letter in letters for g in letter.answer.tensors.values() for t in g.values()
    )


def test_what_a_site_without_images_of_a_class_says_of_it_does_not_count() -> None:
    state: Bundle = {
        "model": {"w": torch.zeros(1)},
        "buffers": {},
        "prototypes": {"means": torch.full((3, 2), 9.0)},
        "counts": {"images": torch.tensor([1.0, 1.0, 4.0])},
    }

    def update(means: list[list[float]], counts: list[float]) -> Update:
        own: Bundle = {
            "prototypes": {"means": torch.tensor(means).float()},
            "counts": {"images": torch.tensor(counts).float()},
        }
        return Update({"model": {"w": torch.ones(1)}, "buffers": {}, **own}, 4)

    sent = [update([[1, 2], [7, 7], [5, 5]], [3, 1, 0]), update([[5, 6], [-1e6, 1e6], [-5, 5]], [1, 0, 0])]
    found = FedMR(SGD).aggregate(state, iter(sent))
    assert found["prototypes"]["means"].tolist() == [[2.0, 3.0], [7.0, 7.0], [9.0, 9.0]], "(3·1 + 5)/4, (3·2 + 6)/4"
    assert found["counts"]["images"].tolist() == [4.0, 1.0, 4.0], "nobody had class 2: it stays as it was"


def test_without_the_margin_nothing_but_weights_is_sent() -> None:
    played, letters = tapped(FedMR(SGD, inter=0.0), unequal(), small(dtype=torch.float64))
    assert all(set(letter.answer.tensors) == {"model", "buffers"} for letter in letters)
    assert set(played.outcome.state) == {"model", "buffers"}


@pytest.mark.parametrize("counts", [[-1.0, 2.0], [3.0, 2.0]])
def test_counts_that_cannot_be_are_refused(counts: list[float]) -> None:
    FedMR(SGD).check_update(Update({"counts": {"images": torch.tensor([1.0, 3.0])}}, 4))
    with pytest.raises(Refused, match="counts of classes"):
        FedMR(SGD).check_update(Update({"counts": {"images": torch.tensor(counts)}}, 4))


@pytest.mark.parametrize("options", [{}, {"intra": 0.0}, {"inter": 0.0}], ids=["both", "margin", "decorrelation"])
def test_it_stacks_with_dropout(options: dict[str, float]) -> None:
    """Classes of three and more in a batch, so that there are correlations."""
    algorithm = FedMR(Training(Optimiser("sgd", 0.1), batch=8, epochs=2), **options)
    sites = clinics(*SIZES, dtype=torch.float64)
    played = same_on_both(algorithm, sites, 1e-9, torch.float64, dropout=0.5)
    assert together(played) == {len(SIZES)}


@pytest.mark.parametrize("name", ["intra", "inter", "margin", "clip", "noise"])
def test_impossible_options_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match=f"algorithm.{name}"):
        FedMR(SGD, **{name: -0.5})


# Under a privacy plan

IMAGE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-4}


def test_private_steps_cannot_correlate_images() -> None:
    with pytest.raises(RecipeError, match=r"set algorithm\.intra: 0"):
        Experiment(tiny(algorithm="fedmr", privacy=IMAGE))


def test_prototypes_are_charged_and_the_page_says_what_protects_them() -> None:
    method = {"name": "fedmr", "intra": 0}
    found = run(tiny(algorithm=method, privacy=IMAGE))
    told = {row.kind: row.protection for row in found.summary.released}
    assert "noise 20 × that; charged" in told["prototypes"]
    assert "in one release" in told["counts"]
    plan, without = (
        Experiment(tiny(algorithm={**method, **more}, privacy={"noise": 1.0, "delta": 1e-4})).setup.plan
        for more in ({}, {"inter": 0})
    )
    assert plan is not None
    assert without is not None
    assert plan.other_releases == {"prototypes": 20.0}
    assert without.other_releases == {}
    assert plan.epsilon > without.epsilon


def test_with_decorrelation_alone_a_whole_site_can_be_protected() -> None:
    wish = {"unit": "site", "epsilon": 30.0, "delta": 1e-3}
    assert Experiment(tiny(algorithm={"name": "fedmr", "inter": 0}, privacy=wish)).setup.plan is not None
    with pytest.raises(RecipeError, match="sends more"):
        Experiment(tiny(algorithm="fedmr", privacy=wish))


def private_reply(noise: float) -> tuple[Update, Tensor, Tensor]:
    """A site with 3000 images of class 0, 5 of class 1 and none of class 2, whose features are around their class."""
    algorithm = FedMR(replace(SGD, private=Private(1.0, 1.0)), intra=0.0, noise=noise)
    state = algorithm.init(federation(algorithm, clinics(8), small())[0])
    labels = torch.tensor([0] * 3000 + [1] * 5)
    features = drawn(3005, 16).float() * 0.1 + labels[:, None]

    def answer(job: Job, number: int) -> Any:
        if isinstance(job, Fit):
            return Fitted(job.weights, 1, 0.0, {})
        assert isinstance(job, Score)
        return {"features": features, "labels": labels}

    site = Site("here", 3005, 1, 3, 0.1, Stream(9, ("secret",)))
    update, _ = drive_jobs(algorithm.local(state, None, site, Stream(0)), answer)
    algorithm.check_update(update)
    return update, features, labels


def test_under_a_plan_means_are_noised_and_small_classes_withheld() -> None:
    update, features, labels = private_reply(noise=2.0)
    means, counts = update.tensors["prototypes"]["means"], update.tensors["counts"]["images"]
    wanted = features[labels == 0].mean(0)
    assert not torch.equal(means[0], wanted)
    torch.testing.assert_close(means[0], wanted, rtol=0, atol=6 * 2.0 * 10 / 3000)
    assert float(counts[0]) != 3000
    assert float(counts[0]) == pytest.approx(3000, abs=6 * 2.0 / 0.1**0.5)
    assert counts[1:].tolist() == [0.0, 0.0], "five images are within the noise of none"
    assert bool((means[1:] == 0).all())
    again, _, _ = private_reply(noise=2.0)
    assert same(update.tensors, again.tensors), "a repeated round tells the same numbers"
