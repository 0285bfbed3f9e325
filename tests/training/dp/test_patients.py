"""Patients who join a step with all their images: who is drawn, what is clipped, how far one of them moves a sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from polyclinic.core.errors import EngineError
from polyclinic.core.options import Augment, Private, Training
from polyclinic.core.types import Bundle
from polyclinic.data.examples import Images
from polyclinic.models.classifier import Classifier
from polyclinic.training.data_order import schedule_steps
from polyclinic.training.dp.dp_sgd import PrivateGradients, draw_poisson_batches
from polyclinic.training.fit import fit, prepare_rows
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.fit import why_not_stackable
from tests.training.dp.test_dp_sgd import SECRET, SGD, STREAM, apart, model, noise, summed, twice, way_of
from tests.training.jobs import at_round, job

OWNERS = tuple("abacbcadddebfgbgeb") + ("h",) * 5
"""Patients with 1 to 5 images, which lie apart."""


def owned(owners: tuple[str, ...] = OWNERS, seed: int = 0) -> Images:
    return replace(noise(len(owners), seed=seed), patients=owners)


def moved(module: Classifier, data: Images, training: Training, **options: object) -> dict[str, Tensor]:
    """How far one step at a learning rate of 1 moves every parameter."""
    start = copy_module_weights(module)["model"]
    network = LiveNetwork(module)
    end = fit(job(network, training, **options), network, data, at_round(1, 1.0), STREAM, SECRET).weights["model"]
    return {name: start[name] - tensor for name, tensor in end.items()}


def mean_gradient(module: Classifier, data: Images, rows: list[int]) -> dict[str, Tensor]:
    """The mean of the images' own gradients, in a plain loop."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    each = []
    for row in rows:
        loss = F.cross_entropy(module(data.images[row : row + 1]), data.labels[row : row + 1])
        each.append(torch.autograd.grad(loss, parameters))
    return {name: torch.stack(some).mean(0) for name, some in zip(names, zip(*each, strict=True), strict=True)}


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("make", [lambda: model("groupnorm_cnn"), twice], ids=["tape", "vmap"])
@pytest.mark.parametrize(("batch", "whole"), [(18, False), (2, True)])
def test_a_step_is_the_sum_of_the_patients_clipped_mean_gradients(
    make: Callable[[], Classifier], views: int, batch: int, whole: bool
) -> None:
    """With batches of 2 most patients have more images than fit into a batch."""
    data, people = owned(), list(dict.fromkeys(OWNERS))
    rate = 1.0 if whole else batch / len(data)
    drawn = [people[p] for p in draw_poisson_batches(len(people), rate, 1, SECRET.child("sample"))[0].tolist()]
    rows = [[row for row, owner in enumerate(OWNERS) if owner == name] for name in drawn]
    assert len({len(own) for own in rows}) > 2, "several numbers of images are needed here"
    gradients = [mean_gradient(make(), data, own) for own in rows]
    lengths = [float(torch.cat([t.flatten() for t in g.values()]).norm()) for g in gradients]
    clip = float(np.median(lengths))
    each = {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}
    private = Private(clip, 0.0, views=views, unit="patient")
    found = moved(make(), data, Training(SGD, batch, epochs=None, steps=1, private=private), full_batch=whole)
    expected = rate * len(people)
    assert apart(found, {name: t / expected for name, t in summed(each, clip).items()}) <= 1e-9


def test_a_full_batch_takes_every_patient() -> None:
    """With a clip that nobody reaches, the step is the mean over patients of the mean over their images."""
    data = owned()
    found = moved(
        model("mlp"),
        data,
        Training(SGD, 4, private=Private(1e9, 0.0, unit="patient")),
        full_batch=True,
    )
    people = sorted(set(OWNERS))
    each = [mean_gradient(model("mlp"), data, [r for r, o in enumerate(OWNERS) if o == name]) for name in people]
    assert apart(found, {name: torch.stack([g[name] for g in each]).mean(0) for name in each[0]}) <= 1e-9


def test_no_batch_is_larger_than_asked_but_for_one_patient_s_images() -> None:
    data, network = owned(), LiveNetwork(model("linear"))
    work = job(network, Training(SGD, 4, private=Private(1.0, 1.0, unit="patient")), full_batch=True)
    ((_, batches),) = schedule_steps(work, data.labels, STREAM, SECRET, 1, data.patients)
    assert sorted(row for index in batches for row in index.flatten().tolist()) == list(range(len(data)))
    assert all(index.numel() <= 4 or len(index) == 1 for index in batches)
    assert max(len(index) for index in batches) > 1, "small patients share a batch"


def test_m5_poisson_draws_every_patient_alike_and_by_itself() -> None:
    owners = tuple("abcdefghijkl") + tuple("abcdef") * 2 + tuple("aab")
    data, steps, people = owned(owners), 10_000, sorted(set(owners))
    training = Training(SGD, 9, epochs=None, steps=steps, private=Private(1.0, 1.0, unit="patient"))
    rate = 9 / len(owners)
    joined = np.zeros((steps, len(people)))
    network = LiveNetwork(model("linear"))
    for number, batches in schedule_steps(job(network, training), data.labels, STREAM, SECRET, 1, owners):
        rows = [row for index in batches for row in index.flatten().tolist()]
        who = {owners[row] for row in rows}
        assert len(rows) == sum(owners.count(name) for name in who), "all images of a patient, each once"
        assert all(len({owners[row] for row in one}) == 1 for index in batches for one in index.tolist())
        joined[number, [people.index(name) for name in who]] = 1
    marginal = ((joined.sum(0) - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum()
    assert stats.chi2.sf(marginal, len(people)) > 1e-3
    standard = (joined - rate) / math.sqrt(rate * (1 - rate))
    pairs = (standard.T @ standard / math.sqrt(steps))[np.triu_indices(len(people), 1)]
    assert stats.chi2.sf((pairs**2).sum(), len(pairs)) > 1e-3


def test_m3_a_patient_moves_the_clipped_sum_by_the_clip_at_most() -> None:
    """1,000 pairs of neighbours that differ in one whole patient."""
    clip, farthest, generator = 0.3, 0.0, STREAM.generator()
    training = Training(SGD, 16, private=Private(clip, 0.0, unit="patient"))
    owners = tuple("abcdefghbcdefcdecd")
    start = copy_module_weights(model("linear"))["model"]
    network = LiveNetwork(model("linear"))

    def clipped_sum(data: Images) -> dict[str, Tensor]:
        begun: Bundle = {"model": start, "buffers": {}}
        asked = job(network, training, weights=begun, full_batch=True)
        end = fit(asked, network, data, at_round(1, 1.0), STREAM, SECRET).weights["model"]
        return {name: (start[name] - end[name]) * len(set(data.patients or ())) for name in start}

    for number in range(125):
        data = owned(owners, seed=number)
        scales = torch.logspace(-3, 3, 200)[torch.randint(200, (len(owners), 1, 1, 1), generator=generator)]
        data = replace(data, images=data.images * scales)
        whole = clipped_sum(data)
        for gone in "abcdefgh":
            left = data.subset(torch.tensor([row for row, owner in enumerate(owners) if owner != gone]))
            farthest = max(farthest, way_of(whole, clipped_sum(left)))
    assert 0.99 * clip < farthest <= clip * (1 + 1e-6)


@pytest.mark.parametrize("way", ["_sum_with_tape", "_sum_with_vmap"])
def test_with_views_augmentation_and_dropout_a_patient_moves_the_sum_by_a_clip_at_most(way: str) -> None:
    """Three patients of two images; the last is taken out, and all else of the step stays as it was."""
    data, network, clip = owned(tuple("aabbcc")), LiveNetwork(model("mlp", dropout=0.4)), 1e-3
    augment = Augment(rotation=20, brightness=0.5, flip=True)
    training = Training(SGD, 6, augment=augment, private=Private(clip, 0.0, views=3, unit="patient"))
    names = frozenset(network.live["model"])
    network.set_training_mode(names)
    network.require_gradients(names)
    private = PrivateGradients(job(network, training), network, network.live, 6, SECRET, 3)

    def clipped_sum(rows: list[int]) -> Tensor:
        index = torch.tensor(rows)
        (batch,) = prepare_rows(iter([data.batch(index)]), [index], network, training, SECRET, 3)
        _, sums = getattr(private, way)(task_loss, names, batch, {}, len(rows) // 2)
        return torch.cat([sums[name].flatten() for name in sorted(sums)])

    whole, left = clipped_sum([0, 1, 2, 3, 4, 5]), clipped_sum([0, 1, 4, 5])
    assert float((whole - left).norm()) == pytest.approx(clip, rel=1e-9), "this patient's mean is longer than the clip"
    assert torch.allclose(whole, clipped_sum([4, 5, 0, 1, 2, 3]), rtol=0, atol=1e-14)


def test_patients_are_needed_and_not_stacked() -> None:
    network, training = LiveNetwork(model("mlp")), Training(SGD, 4, private=Private(1.0, 1.0, unit="patient"))
    asked = job(network, training)
    assert "patients" in why_not_stackable(asked, network)
    with pytest.raises(EngineError, match="without patients"):
        fit(asked, network, noise(16), at_round(1), STREAM, SECRET)


def test_only_the_mean_is_clipped_once_per_patient() -> None:
    """Fifty equal images of one patient move the sum as far as one of them: not fifty times, not √50 times."""
    one = replace(noise(1), patients=("a",))
    many = Images(one.images.repeat(50, 1, 1, 1), one.labels.repeat(50), ("a",) * 50)
    training = Training(SGD, 1, private=Private(1e-2, 0.0, unit="patient"))
    for data in (one, many):
        step = moved(model("mlp"), data, training, full_batch=True)
        assert float(torch.cat([t.flatten() for t in step.values()]).norm()) == pytest.approx(1e-2, rel=1e-6)
    apart_by = way_of(*(moved(model("mlp"), data, training, full_batch=True) for data in (one, many)))
    assert apart_by <= 1e-9


def test_loss_is_the_mean_over_patients() -> None:
    data = owned(tuple("aaab"))
    network = LiveNetwork(model("mlp"))
    asked = job(network, Training(SGD, 4, private=Private(1.0, 0.0, unit="patient")), full_batch=True)
    loss = fit(asked, network, data, at_round(1), STREAM, SECRET).loss
    module = model("mlp")
    alone = [F.cross_entropy(module(data.images[rows]), data.labels[rows]).item() for rows in ([0, 1, 2], [3])]
    assert loss == pytest.approx(sum(alone) / 2, rel=1e-6)
