"""A start that the server has trained on its public set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit, Site
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.models.scattering import FixedFeatures
from polyclinic.runs import sites
from polyclinic.runs.experiment import Experiment, run
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import copy_module_weights
from tests.small import tiny

PUBLIC = {"name": "digits", "split": {"train": 0.8, "validation": 0.1, "test": 0.1}}


def experiment(**settings: Any) -> Experiment:
    """Digits are the sites' as well: under a plan nobody compares them, so that there are public ones."""
    plan = {"noise": 1.0, "delta": 1e-3, "randomness": "seed"}
    return Experiment(tiny(public=PUBLIC, privacy=plan, **settings))


def test_it_is_so_many_epochs_of_the_recipes_training_on_public_images() -> None:
    plain, ready = experiment(), experiment(model__pretrain=2)
    assert plain.setup.public is not None
    training = replace(plain.recipe.training, epochs=2)
    server, stream = (
        Site("server", len(plain.setup.public.train), 1, 1, training.optimiser.lr),
        Stream(0, ("pretrain", "")),
    )
    job = Fit(copy_module_weights(plain.setup.module), task_loss, training)
    wanted = fit(job, plain.setup.networks.first, plain.setup.public.train, server, stream).weights
    for name, tensor in wanted["model"].items():
        assert torch.equal(ready.setup.federation.initial["model"][name], tensor)


def test_features_that_never_change_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And give the same start as if they were computed in every step."""
    seen: list[int] = []
    forward = FixedFeatures.forward

    def count(part: FixedFeatures, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images) if images.shape[1:] != part.shape and not images.is_meta else 0)
        return forward(part, images)

    monkeypatch.setattr(FixedFeatures, "forward", count)
    start: dict[tuple[int, int], Bundle] = {}
    counts: dict[tuple[int, int], int] = {}
    room = sites.MOST_FEATURES
    for most, epochs in ((0, 2), (room, 1), (room, 2)):
        monkeypatch.setattr(sites, "MOST_FEATURES", most)
        seen.clear()
        ready = experiment(model="scattering_linear", model__pretrain=epochs)
        start[most, epochs], counts[most, epochs] = ready.setup.federation.initial, sum(seen)
    assert counts[room, 1] == counts[room, 2]
    for name, value in start[0, 2]["model"].items():
        torch.testing.assert_close(value, start[room, 2]["model"][name], rtol=1e-5, atol=1e-6)


def test_a_pretrained_start_is_better_and_repeats() -> None:
    losses = [
        experiment(model__pretrain=epochs, rounds=1).run().summary.headline.scores.value("loss")
        for epochs in (5, 5, None)
    ]
    assert losses[0] == losses[1] < losses[2]


def test_each_cluster_may_have_its_own() -> None:
    clusters = {
        "high": {"min_score": 0.5, "model": {"name": "mlp", "pretrain": 1}},
        "low": {"min_score": 0, "model": "linear"},
    }
    cards = {f"site-{n}": dict.fromkeys(("cpu", "memory", "battery", "network"), n / 4) for n in (1, 2, 3)}
    plain, ready = (
        experiment(clusters=clusters, capability={"profiles": cards}, clusters__high__model__pretrain=epochs)
        for epochs in (None, 1)
    )
    states = [each.setup.algorithm.init(each.setup.federation) for each in (plain, ready)]
    same = {kind: all(torch.equal(t, states[1][kind][n]) for n, t in states[0][kind].items()) for kind in states[0]}
    assert not same["model@high"]
    assert same["model@low"]


def test_what_cannot_be_played_is_told_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.runs.assemble.pretrain_networks", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(RecipeError, match="a cohort of 4 is asked of 3 sites"):
        experiment(model__pretrain=2, cohort=4)


def test_without_public_images_it_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model.pretrain trains on images at the server; add"):
        run(tiny(model__pretrain=2))
