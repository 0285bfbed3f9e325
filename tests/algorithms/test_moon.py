"""MOON: features are drawn to the global model's and away from those of the site's own previous model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.moon import Moon
from polyclinic.core.jobs import Fit, Fitted, Site
from polyclinic.core.options import Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.runs.experiment import run
from polyclinic.training.fit import fit
from polyclinic.training.losses import contrastive_loss, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.algorithms.test_clustered import another
from tests.algorithms.test_fedper import MOMENTUM, SGD
from tests.laws.bench import clinics, noise, play, same, small
from tests.laws.test_reductions import ADAM
from tests.laws.test_stacked import SIZES, assert_close, same_on_both, together
from tests.small import tiny

FLOAT64 = torch.float64
IMAGES, LABELS = noise(9, "moon", dtype=FLOAT64).batch(torch.arange(9))


def reference(one: Bundle, other: Bundle, mu: float = 1.0, tau: float = 0.5) -> Bundle:
    scalars = {"mu": torch.tensor(mu, dtype=FLOAT64), "tau": torch.tensor(tau, dtype=FLOAT64)}
    found = {f"global {kind}": group for kind, group in one.items()}
    return found | {f"previous {kind}": group for kind, group in other.items()} | {"scalars": scalars}


def weights(seed: int, **options: Any) -> Bundle:
    """Somebody's weights, with statistics of their own."""
    found = copy_module_weights(another(seed, dtype=FLOAT64, **options).module)
    generator = Stream(seed, ("statistics",)).generator()
    for name, tensor in found["buffers"].items():
        if tensor.is_floating_point():
            found["buffers"][name] = torch.rand(tensor.shape, generator=generator, dtype=FLOAT64) + 0.5
    return found


def calm_features(of: Bundle, **options: Any) -> Tensor:
    """What an ordinary module in evaluation makes of the images."""
    module = small(dtype=FLOAT64, **options).module
    module.load_state_dict({**of["model"], **of["buffers"]})
    with torch.no_grad():
        features: Tensor = module.eval().extractor(IMAGES)
    return features


def cosine(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1) / (one.square().sum(1).sqrt() * other.square().sum(1).sqrt())


# The loss


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 0.1), (0.3, 2.0)])
def test_the_loss_is_the_papers(mu: float, tau: float) -> None:
    """By the formula as printed, with the student in training: batch statistics, which move once."""
    network, mine, received, before = small(dtype=FLOAT64), weights(1), weights(2), weights(3)
    live = network.load_weights(mine)
    network.set_training_mode(frozenset(mine["model"]))
    found = contrastive_loss(network, live, (IMAGES, LABELS), reference(received, before, mu, tau))
    plain = small(dtype=FLOAT64).module
    plain.load_state_dict({**mine["model"], **mine["buffers"]})
    z = plain.train().extractor(IMAGES)
    near, far = (torch.exp(cosine(z, calm_features(other)) / tau) for other in (received, before))
    contrast = -torch.log(near / (near + far)).mean()
    cross_entropy = nn.functional.cross_entropy(plain.head(z), LABELS)
    torch.testing.assert_close(found, cross_entropy + mu * contrast, rtol=1e-12, atol=1e-12)
    moved = {name: buffer for name, buffer in plain.named_buffers() if name in live["buffers"]}
    assert_close({"buffers": live["buffers"]}, {"buffers": moved}, 1e-12)
    wanted = torch.autograd.grad(cross_entropy + mu * contrast, list(plain.parameters()))
    for mine_, theirs in zip(torch.autograd.grad(found, list(live["model"].values())), wanted, strict=True):
        torch.testing.assert_close(mine_, theirs, rtol=1e-10, atol=1e-12)


def test_teachers_compute_as_in_evaluation_and_learn_nothing() -> None:
    """Their statistics stay, they drop nothing, and no gradient reaches them."""
    network, live = small(dtype=FLOAT64, dropout=0.5), weights(1)
    network.load_weights(live)
    network.set_training_mode(frozenset(live["model"]))
    aside = reference(weights(2), weights(3))
    for kind in ("global model", "previous model"):
        for tensor in aside[kind].values():
            tensor.requires_grad_()
    before = {kind: {n: t.detach().clone() for n, t in group.items()} for kind, group in aside.items()}
    teacher = {"model": aside["global model"], "buffers": aside["global buffers"]}
    shown = network.teacher_features(teacher, IMAGES)
    torch.testing.assert_close(shown, calm_features(weights(2)), rtol=1e-12, atol=1e-12)
    assert not shown.requires_grad
    contrastive_loss(network, network.live, (IMAGES, LABELS), aside).backward()  # type: ignore[no-untyped-call]
    assert all(tensor.grad is None for group in aside.values() for tensor in group.values())
    assert same({kind: {n: t.detach() for n, t in g.items()} for kind, g in aside.items()}, before)


def test_features_and_head_are_the_network_in_two_parts() -> None:
    for network in (small(), small(dropout=0.5)):
        network.load_weights(copy_module_weights(another().module))
        network.set_training_mode(frozenset(network.live["model"]))
        network.set_dropout_key(77)
        images = IMAGES.float()
        for given in (network.live, copy_module_weights(another(6).module)):
            whole = network(given, images)
            assert torch.equal(network.head(given, network.features(given, images)), whole)


# What a step does


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_step_on_the_contrast_raises_likeness_to_the_global_model_over_that_to_the_previous(
    seed: int, norm: bool
) -> None:
    """The contrast alone: cross-entropy is taken away again."""
    network, mine = small(norm, dtype=FLOAT64), weights(seed, norm=norm)
    received, before = weights(seed + 10, norm=norm), weights(seed + 20, norm=norm)
    near, far = (calm_features(other, norm=norm) for other in (received, before))
    network.set_training_mode(frozenset(mine["model"]))

    def ahead() -> float:
        z = network.features(network.live, IMAGES)
        likeness = [nn.functional.cosine_similarity(z, other) for other in (near, far)]  # 0 of what has no direction
        return float((likeness[0] - likeness[1]).mean().detach())

    live = network.load_weights(mine)
    parameters = list(live["model"].values())
    batch, aside = (IMAGES, LABELS), reference(received, before)
    contrast = contrastive_loss(network, live, batch, aside) - task_loss(network, live, batch, {})
    gradient = torch.autograd.grad(contrast, parameters, allow_unused=True)
    first = ahead()
    with torch.no_grad():
        for parameter, slope in zip(parameters, gradient, strict=True):
            parameter.sub_(0.01 * (torch.zeros_like(parameter) if slope is None else slope))
    assert ahead() > first + 1e-6
    assert all(torch.equal(live["model"][n], mine["model"][n]) for n in ("head.weight", "head.bias"))


def test_the_contrast_of_one_model_with_itself_is_log_2_and_has_no_gradient() -> None:
    """So a site that trains for the first time may as well leave it out."""
    network, mine, other = small(dtype=FLOAT64), weights(1), weights(2)
    live = network.load_weights(mine)
    network.set_training_mode(frozenset(mine["model"]))
    contrast = contrastive_loss(network, live, (IMAGES, LABELS), reference(other, other, mu=5.0))
    task = task_loss(network, live, (IMAGES, LABELS), {})
    assert float((contrast - task).detach()) == pytest.approx(5 * math.log(2), abs=1e-12)
    parameters = list(live["model"].values())
    slopes = (torch.autograd.grad(loss, parameters) for loss in (contrast, task))
    for mine_, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine_, theirs, rtol=0, atol=1e-14)


def test_an_image_without_features_is_like_nothing_and_breaks_nothing() -> None:
    """All of a network's units may be silent on an image."""
    network, silent = small(norm=False, dtype=FLOAT64), weights(1, norm=False)
    silent["model"] = {**silent["model"], "extractor.conv.bias": torch.full((4,), -1e3, dtype=FLOAT64)}
    live = network.load_weights(silent)
    network.set_training_mode(frozenset(silent["model"]))
    loss = contrastive_loss(network, live, (IMAGES, LABELS), reference(weights(2, norm=False), silent))
    task = task_loss(network, live, (IMAGES, LABELS), {})
    assert float((loss - task).detach()) == pytest.approx(math.log(2))
    slopes = torch.autograd.grad(loss, list(live["model"].values()))
    assert all(bool(slope.isfinite().all()) for slope in slopes)


# The rounds


@pytest.mark.parametrize("options", [{}, {"norm": False}, {"dropout": 0.4}], ids=["batchnorm", "plain", "dropout"])
@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_without_its_term_it_is_fedavg(options: dict[str, Any], training: Training) -> None:
    sites = clinics(12, 7, 16)
    fedavg = play(FedAvg(training), sites, small(**options), 3).outcome.state
    assert same(play(Moon(training, mu=0.0), sites, small(**options), 3).outcome.state, fedavg)
    assert not same(play(Moon(training), sites, small(**options), 3).outcome.state, fedavg)


def test_the_first_round_is_fedavg() -> None:
    sites = clinics(12, 7, 16)
    for rounds, equal in ((1, True), (2, False)):
        moon, fedavg = (play(kind(MOMENTUM), sites, small(), rounds).outcome.state for kind in (Moon, FedAvg))
        assert same(moon, fedavg) is equal


def jobs(memory: Bundle | None, received: Bundle) -> tuple[Fit, Bundle | None]:
    """The job of a round, and what is remembered if training gives `weights(9)`."""
    work = Moon(SGD, mu=5.0, tau=0.25).local(received, memory, Site("a", 9, 2, 3, 0.1), Stream(0))
    job = next(work)
    assert isinstance(job, Fit)
    with pytest.raises(StopIteration) as end:
        work.send(Fitted(weights(9), 1, 0.0, {}))
    update, kept = end.value.value
    assert same(update.tensors, weights(9))
    return job, kept


def test_the_previous_model_is_what_the_site_had_when_it_last_trained() -> None:
    """However long ago that was, and whatever the server made of it since."""
    job, kept = jobs(None, weights(1))
    assert (job.steps, job.reference) == (task_loss, {})
    assert kept is not None
    assert same(kept, weights(9))
    job, kept = jobs(weights(7), weights(1))
    assert job.steps is contrastive_loss
    assert same(job.reference, reference(weights(1), weights(7), mu=5.0, tau=0.25))
    assert kept is not None
    assert same(kept, weights(9))


def test_a_site_that_comes_late_trains_as_in_its_first_round() -> None:
    """Sites take turns: nobody has trained before its own turn, so three rounds of three sites are FedAvg's."""
    sites = clinics(12, 7, 16)
    turns: dict[str, Any] = {"cohort": 1, "cohort_order": "cyclic"}
    for rounds, equal in ((3, True), (4, False)):
        moon, fedavg = (play(kind(SGD), sites, small(), rounds, **turns).outcome.state for kind in (Moon, FedAvg))
        assert same(moon, fedavg) is equal


# Where it runs


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"norm": False}], ids=["batchnorm and dropout", "plain"])
def test_it_stacks(options: dict[str, Any]) -> None:
    algorithm = Moon(Training(Optimiser("sgd", 0.1, 0.9), batch=4, epochs=2), mu=5.0)
    sites = clinics(*SIZES, dtype=FLOAT64)
    played = same_on_both(algorithm, sites, 1e-10, FLOAT64, **options)
    assert together(played) == {len(SIZES)}
    assert play(replace(algorithm, mu=0.0), sites, small(dtype=FLOAT64, **options), 3).sha256 != played.sha256


def test_private_steps_clip_each_image_by_itself() -> None:
    """With a clip that clips nothing and no noise, a private step is an ordinary one."""
    train = clinics(9, dtype=FLOAT64)["clinic-1"].train
    mine, aside = weights(1, norm=False), reference(weights(2, norm=False), weights(3, norm=False))
    found = []
    for private in (None, Private(1e9, 0.0, "shuffle")):
        training = Training(Optimiser(lr=0.5), batch=9, private=private)
        job = Fit(mine, contrastive_loss, training, aside)
        network: LiveNetwork = small(norm=False, dtype=FLOAT64)
        found.append(fit(job, network, train, Site("a", 9, 2, 3, 0.5), Stream(0), Stream(1)).weights)
    assert_close(found[0], found[1], 1e-10)
    assert not same(found[0], mine)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recipe = tiny(algorithm="moon", model__name="mlp", rounds=3, evaluate__bootstrap=0)

    def stop(event: str, fields: Any) -> None:
        if event == "round done" and fields["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "stopped", watch=stop)
    found, whole = run(recipe, tmp_path / "stopped"), run(recipe)
    assert found.summary.sha256 == whole.summary.sha256
    assert found.summary.headline.model == "global"
