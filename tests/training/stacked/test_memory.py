"""How much a stack takes is known before it is made, and too much is not the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from polyclinic.algorithms import ALGORITHMS
from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images
from polyclinic.federation.engines import stacked
from polyclinic.models.classifier import Classifier
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked import memory
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import fit_stacked
from tests.laws.bench import clinics, play, small
from tests.laws.test_stacked import on_the_stack

PIXELS, CLASSES = 400, 10


def seat(batch: int) -> tuple[StackMember, LiveNetwork]:
    module = Classifier(nn.Flatten(), nn.Linear(PIXELS, CLASSES))
    data = Images(torch.rand(64, 1, 20, 20), torch.arange(64) % CLASSES)
    job = Fit(copy_module_weights(module), task_loss, Training(Optimiser("sgd", 0.1), batch=batch))
    return StackMember(job, data, Site("a", 64, 1, 1, 0.1), Stream(0)), LiveNetwork(module)


@pytest.mark.parametrize("batch", [4, 8, 32])
def test_what_a_linear_model_keeps_is_its_images_its_logits_and_its_labels(batch: int) -> None:
    """Images for the weights' gradient, log-probabilities and labels for the loss; the weights are counted apart."""
    kept = memory.activation_bytes(*seat(batch))
    images, logits = batch * PIXELS * 4, batch * CLASSES * 4
    assert images + logits <= kept <= images + logits + batch * 8 + 4 * (PIXELS + 1) * CLASSES + 64


def test_room_is_free_memory_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (memory.max_stack_size(*seat(batch)) for batch in (32, 4))
    assert many > few > 100
    monkeypatch.setattr(memory, "free_memory", lambda _: 1000)
    assert memory.max_stack_size(*seat(4)) == 1


def test_looking_changes_nothing() -> None:
    sites = clinics(8, 8)
    network = small()
    before = copy_module_weights(network.module)
    first = next(iter(sites.values())).train
    job = Fit(before, task_loss, Training(Optimiser("sgd", 0.1), batch=4))
    memory.activation_bytes(StackMember(job, first, Site("a", 8, 1, 1, 0.1), Stream(0)), network)
    after = copy_module_weights(network.module)
    assert all(torch.equal(before[k][n], after[k][n]) for k in before for n in before[k])
    assert not any(t.requires_grad for t in before["model"].values())


def test_a_stack_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    honest = fit_stacked

    def cramped(seats: Any, *rest: Any) -> Any:
        tried.append(len(seats))
        if len(seats) > 2:
            raise torch.OutOfMemoryError("no more")
        return honest(seats, *rest)

    monkeypatch.setattr(stacked, "fit_stacked", cramped)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    algorithm = replace(ALGORITHMS["fedavg"](), training=Training(Optimiser("sgd", 0.1), batch=4))
    sites = clinics(8, 8, 8, 8, 8)
    played = play(algorithm, sites, small(), 2, on_the_stack())
    assert tried[0] == 5
    assert max(tried[-3:]) <= 2, "what was learnt in the first round is kept"
    alone = play(algorithm, sites, small(), 2)
    for name, tensor in alone.model.items():
        torch.testing.assert_close(played.model[name], tensor)
