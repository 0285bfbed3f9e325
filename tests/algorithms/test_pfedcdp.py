"""PFedCDP, one cluster of it: masks (4, 5), the blend (6), distillation (11), and what is left with everything off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.special import log_softmax, softmax
from torch import Tensor

from polyclinic.algorithms.base import with_prefix, without_prefix
from polyclinic.algorithms.personalisation.fedper import HEAD, FedPer
from polyclinic.algorithms.personalisation.pfedcdp import PFedCDP, squared_gradients, squared_mean_gradient
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit, Fitted, Job, Score
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, SiteId, Tensors
from polyclinic.data.examples import Images
from polyclinic.federation.site_runner import SiteRound, SiteRunner
from polyclinic.storage import messages
from polyclinic.training.fit import score
from polyclinic.training.losses import distillation_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import clinics, noise, play, same, small, tapped

SGD = Training(Optimiser(lr=0.1), batch=5)
ADAM = Training(Optimiser("adam", lr=0.01), batch=5, epochs=2)
SIZES = (12, 7, 16)
NETWORKS: list[Callable[[], LiveNetwork]] = [small, lambda: small(norm=False), lambda: small(dropout=0.4)]
WITH_EACH_NETWORK = pytest.mark.parametrize("network", NETWORKS, ids=["batchnorm", "plain", "dropout"])


# Masks, equations 4 and 5


def fisher_values(most: int) -> st.SearchStrategy[list[float]]:
    """With many ties, as where a ReLU is dead."""
    return st.lists(st.sampled_from([0.0, 1e-9, 0.01, 0.02, 5.0]) | st.floats(0, 10), min_size=1, max_size=most)


@given(fisher_values(60), st.floats(0, 1))
def test_the_share_that_is_kept_is_the_one_of_most_information(values: list[float], keep: float) -> None:
    fisher = torch.tensor(values, dtype=torch.float64)
    mask = PFedCDP(keep=keep).importance_mask(fisher)
    assert (mask.dtype, mask.shape) == (torch.bool, fisher.shape)
    assert int(mask.sum()) == round(keep * len(values))
    if mask.any() and not mask.all():
        assert fisher[mask].min() >= fisher[~mask].max()


@given(fisher_values(60), st.sampled_from([0.0, 0.01, 0.02, 3.0, 1e30]))
def test_as_printed_a_threshold_decides(values: list[float], threshold: float) -> None:
    fisher = torch.tensor(values, dtype=torch.float64)
    mask = PFedCDP(variant="paper", threshold=threshold).importance_mask(fisher)
    assert mask.tolist() == [value >= threshold for value in values]


@pytest.mark.parametrize("shape", [(4, 1, 3, 3), (7,), (3, 16)])
def test_every_tensor_has_its_own_share(shape: tuple[int, ...]) -> None:
    fisher = torch.rand(shape, generator=Stream(1).generator())
    mask = PFedCDP(keep=0.25).importance_mask(fisher)
    assert (mask.shape, int(mask.sum())) == (fisher.shape, round(0.25 * fisher.numel()))


# Where a round starts, equations 3 and 6


@dataclass(frozen=True)
class Deed:
    """A job at a site, what it had then, and what came out."""

    round: int
    site: SiteId
    number: int
    job: Job
    received: Bundle
    memory: Bundle | None
    found: Fitted | Tensors


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch) -> list[Deed]:
    """Every job that a site runs from now on."""
    noted: list[Deed] = []
    run = SiteRunner.run_job

    def spied(self: SiteRunner, job: Job, visit: SiteRound, number: int) -> Fitted | Tensors:
        found = run(self, job, visit, number)
        noted.append(Deed(visit.site.round, self.name, number, job, visit.order.tensors, visit.memory, found))
        return found

    monkeypatch.setattr(SiteRunner, "run_job", spied)
    return noted


def first_jobs(deeds: list[Deed]) -> list[tuple[Deed, Fit]]:
    return [(deed, deed.job) for deed in deeds if deed.number == 0 and isinstance(deed.job, Fit)]


@pytest.mark.parametrize(
    "algorithm", [PFedCDP(SGD, keep=0.3), PFedCDP(SGD, variant="paper", threshold=1e-2)], ids=["corrected", "paper"]
)
def test_the_blend_changes_the_start_from_round_two_on(algorithm: PFedCDP, deeds: list[Deed]) -> None:
    """Just where the mask is 1 and the site's own weight is another: masks are disjoint and together everything."""
    play(algorithm, clinics(*SIZES), small(), 3)
    for deed, job in first_jobs(deeds):
        start, received = job.weights["model"], deed.received["model"]
        if deed.round == 1:
            assert deed.memory is None
            assert same({"m": start}, {"m": {**received, **deed.received["head"]}})
            continue
        assert deed.memory is not None
        mask, own = deed.memory["mask"], deed.memory["model"]
        assert mask.keys() == own.keys() == received.keys()
        for name, global_one in received.items():
            assert torch.equal(start[name][mask[name]], own[name][mask[name]])
            assert torch.equal(start[name][~mask[name]], global_one[~mask[name]])
            assert torch.equal(start[name] != global_one, mask[name] & (own[name] != global_one))
        assert any(not torch.equal(start[name], t) for name, t in received.items()), "the blend does nothing"
        assert any(not torch.equal(start[name], own[name]) for name in own), "the server's work is lost"
        assert same({"head": with_prefix(HEAD, start)}, {"head": deed.memory["head"]})


@pytest.mark.parametrize(
    ("algorithm", "function"),
    [
        (PFedCDP(SGD, keep=0.3), squared_gradients),
        (PFedCDP(SGD, variant="paper", threshold=1e-3), squared_mean_gradient),
    ],
    ids=["corrected", "paper"],
)
def test_fishers_information_is_of_the_weights_before_the_download(algorithm: PFedCDP, function: Any) -> None:
    """Remembered are the site's own weights at the end of the round before, and the mask that follows from them."""
    sites = clinics(*SIZES)
    played, letters = tapped(algorithm, clinics(*SIZES), small(), 2)
    for site, held in sites.items():
        memory = played.remembered(site)
        assert memory is not None
        letter = next(letter for letter in letters if (letter.round, letter.site) == (2, site))
        sent, own = letter.answer.tensors, Stream(letter.sent.fields["seed"], ("site", site))
        order = torch.randperm(len(held.train), generator=own.child("fisher batches", 2).generator())
        assert same({"model": memory["model"]}, {"model": sent["model"]})
        weights = {"model": {**memory["model"], **memory["head"]}, "buffers": sent["buffers"]}
        job = Score(weights, function, reduce="mean", order=order)
        fisher = score(job, small(), held.train, batch=algorithm.training.batch)
        for name, mask in memory["mask"].items():
            kept, dropped = fisher[name][mask], fisher[name][~mask]
            if algorithm.variant == "paper":
                assert torch.equal(mask, fisher[name] >= 1e-3)
            else:
                assert len(kept) == round(0.3 * mask.numel())
                assert kept.min() >= dropped.max() * (1 - 1e-5), "the same images, summed in other batches"


# With everything off


OFF = {
    "corrected": PFedCDP(keep=0.0, head_epochs=0),
    "paper": PFedCDP(variant="paper", distil=0.0, threshold=1e30),
}


@WITH_EACH_NETWORK
@pytest.mark.parametrize("training", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("variant", OFF)
def test_with_everything_off_it_is_fedper(network: Callable[[], LiveNetwork], training: Training, variant: str) -> None:
    """Bit for bit: what the server has, what sites remember of their heads and predict with, what crosses the wire.

    As printed too: (1 − 0)·CE + 0·KL has the gradient of CE, and no information is infinite.
    """
    off, fedper = replace(OFF[variant], training=training), FedPer(training)
    (mine, letters), (theirs, wanted) = (tapped(kind, clinics(*SIZES), network(), 3) for kind in (off, fedper))
    assert mine.sha256 == theirs.sha256
    for one, other in zip(letters, wanted, strict=True):
        assert (one.round, one.site) == (other.round, other.site)
        assert bytes(messages.encode_body(one.answer.tensors).data) == bytes(
            messages.encode_body(other.answer.tensors).data
        )
    for site in clinics(*SIZES):
        own, others = (
            algorithm.models(played.outcome.state, played.remembered(site))["personal"]
            for algorithm, played in ((off, mine), (fedper, theirs))
        )
        assert same(own, others)


@WITH_EACH_NETWORK
@pytest.mark.parametrize(
    "on",
    [
        PFedCDP(SGD, keep=0.1, head_epochs=0),
        PFedCDP(SGD, keep=0.0, head_epochs=1),
        PFedCDP(SGD, variant="paper", distil=0.3, threshold=1e30),
        PFedCDP(SGD, variant="paper", distil=0.0, threshold=1e-3),
    ],
    ids=["masks", "distillation", "paper: distillation", "paper: masks"],
)
def test_every_part_that_is_on_makes_it_another(network: Callable[[], LiveNetwork], on: PFedCDP) -> None:
    mine, theirs = (play(algorithm, clinics(*SIZES), network(), 3) for algorithm in (on, FedPer(SGD)))
    assert mine.sha256 != theirs.sha256


# Distillation, equation 11


def by_hand(student: Tensor, teacher: Tensor, labels: Tensor, share: float, temperature: float) -> float:
    """Of logits, by SciPy."""
    z, t, y = student.detach().numpy(), teacher.detach().numpy(), labels.numpy()
    entropy = -log_softmax(z, -1)[np.arange(len(y)), y].mean()
    p = softmax(t / temperature, -1)
    apart = (p * (log_softmax(t / temperature, -1) - log_softmax(z / temperature, -1))).sum(-1).mean()
    return float((1 - share) * entropy + share * temperature**2 * apart)


def lesson(share: float, temperature: float) -> tuple[LiveNetwork, Bundle, Images]:
    """A network in training mode, with a teacher that has weights and statistics of its own."""
    network = small(dropout=0.5, dtype=torch.float64)
    generator = Stream(3).generator()
    other = copy_module_weights(network.module)
    for group in other.values():
        for tensor in group.values():
            if tensor.is_floating_point():
                tensor += 0.3 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    said = {"share": share, "temperature": temperature}
    scalars = {name: torch.tensor(value, dtype=torch.float64) for name, value in said.items()}
    reference = {"teacher": other["model"], "teacher buffers": other["buffers"], "scalars": scalars}
    network.set_training_mode(frozenset(network.live["model"]))
    network.set_dropout_key(12345)
    return network, reference, noise(9, "lesson", dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 1), st.floats(0.5, 10))
def test_the_loss_is_the_formula(share: float, temperature: float) -> None:
    """The student drops units and takes the batch's statistics, the teacher does neither."""
    network, reference, data = lesson(share, temperature)
    found = distillation_loss(network, network.live, (data.images, data.labels), reference)
    student = network(network.live, data.images)
    judge = small(dropout=0.5, dtype=torch.float64)
    judge.load_weights({"model": reference["teacher"], "buffers": reference["teacher buffers"]})
    teacher = judge.module.eval()(data.images)
    assert float(found.detach()) == pytest.approx(by_hand(student, teacher, data.labels, share, temperature), abs=1e-12)
    judge.module.train()
    others = judge.module(data.images)
    assert not torch.allclose(others, teacher), "in training mode this teacher would have said something else"


def test_a_teacher_gets_no_gradient_and_keeps_its_statistics() -> None:
    network, reference, data = lesson(0.3, 3.0)
    for tensor in reference["teacher"].values():
        tensor.requires_grad_()
    before = {name: tensor.clone() for name, tensor in reference["teacher buffers"].items()}
    seen = network.live["buffers"]["extractor.norm.running_mean"].clone()
    network.module.requires_grad_(True)
    torch.autograd.backward(distillation_loss(network, network.live, (data.images, data.labels), reference))
    assert all(parameter.grad is not None for parameter in network.module.parameters())
    assert all(tensor.grad is None for tensor in reference["teacher"].values())
    assert same({"b": before}, {"b": reference["teacher buffers"]})
    assert not torch.equal(seen, network.live["buffers"]["extractor.norm.running_mean"]), "the student's do move"


def test_a_student_that_says_what_its_teacher_says_has_nothing_to_learn_from_it() -> None:
    network, reference, data = lesson(1.0, 3.0)
    network.load_weights({"model": reference["teacher"], "buffers": reference["teacher buffers"]})
    network.set_eval_mode()
    loss = distillation_loss(network, network.live, (data.images, data.labels), reference)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-14)


@WITH_EACH_NETWORK
def test_first_everything_trains_then_the_head_alone(network: Callable[[], LiveNetwork], deeds: list[Deed]) -> None:
    """From the second round on: before, the teacher has learnt nothing."""
    play(PFedCDP(SGD, keep=0.0, head_epochs=2), clinics(*SIZES), network(), 3)
    by_round = {r: [deed for deed in deeds if deed.round == r] for r in (1, 2, 3)}
    assert {r: [deed.number for deed in found] for r, found in by_round.items()} == {
        1: [0] * 3,
        2: [0, 1] * 3,
        3: [0, 1] * 3,
    }
    for deed in deeds:
        assert isinstance(deed.job, Fit)
        assert isinstance(deed.found, Fitted)
        before, after = deed.job.weights, deed.found.weights
        moved = {name for name, tensor in after["model"].items() if not torch.equal(tensor, before["model"][name])}
        if deed.number == 0:
            assert moved >= {name for name in after["model"] if name.endswith("weight")}, "but a bias before BatchNorm"
            continue
        assert moved == set(with_prefix(HEAD, after["model"]))
        assert same({"b": dict(before["buffers"])}, {"b": dict(after["buffers"])}), (
            "frozen layers keep their statistics"
        )
        teacher = {**deed.received["model"], **deed.received["head"]}
        assert same({"t": deed.job.reference["teacher"]}, {"t": teacher})
        assert deed.job.training.epochs == 2


def test_as_printed_one_training_of_everything_from_the_first_round_on(deeds: list[Deed]) -> None:
    play(PFedCDP(SGD, variant="paper"), clinics(*SIZES), small(), 2)
    fits = [deed for deed in deeds if isinstance(deed.job, Fit)]
    assert [(deed.round, deed.number) for deed in fits] == [(1, 0)] * 3 + [(2, 0)] * 3
    assert all(deed.job.sequence[0].objective is distillation_loss for deed in fits if isinstance(deed.job, Fit))


def test_it_predicts_with_the_blend_at_home_and_the_fitted_head_at_the_server() -> None:
    algorithm = PFedCDP(SGD, keep=0.3)
    played = play(algorithm, clinics(*SIZES), small(), 2)
    state, memory = played.outcome.state, played.remembered("clinic-1")
    assert memory is not None
    found = algorithm.models(state, memory)
    assert same(found["personal"], algorithm.start_weights(state, memory))
    assert same({"m": found["global"]["model"]}, {"m": {**state["model"], **state["head"]}})
    assert not same({"m": without_prefix(HEAD, found["personal"]["model"])}, {"m": state["model"]})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("keep", 1.5),
        ("keep", -0.1),
        ("threshold", -1.0),
        ("distil", 2.0),
        ("temperature", 0.0),
        ("head_epochs", -1),
        ("server_epochs", 0),
    ],
)
def test_impossible_options_are_told_with_what_to_choose(option: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"algorithm\.{option} is {value}, but should be "):
        PFedCDP(**{option: value})
