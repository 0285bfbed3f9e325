"""Where a run's noise comes from: which runs share it, and how long its key lives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyclinic import Recipe, run
from polyclinic.core.errors import RecipeError
from polyclinic.core.types import SiteId
from polyclinic.data.examples import Images, Selection
from polyclinic.runs.experiment import Experiment
from polyclinic.runs.sites import FederatedDataset, load_sites
from polyclinic.storage import messages
from polyclinic.storage.site_memory import RamMemory
from tests.small import tiny

SEEDED: dict[str, Any] = {"noise": 20.0, "delta": 1e-4, "randomness": "seed"}
"""The review's set-up: much noise, and one step."""
ONE_STEP: dict[str, Any] = {"training__epochs": None, "training__steps": 1, "model__name": "mlp"}
SITE: SiteId = "site-1"


def update_of(recipe: Recipe, dataset: FederatedDataset | None = None, site: SiteId = SITE) -> Tensor:
    """What a site's first round adds to the model; with this noise it is noise almost alone."""
    experiment = Experiment(recipe, dataset=dataset)
    setup = experiment.setup
    runner = setup.make_runners(RamMemory(), experiment.secret)[site]
    sent = setup.algorithm.init(setup.federation)
    fields = {
        "run": experiment.run_id(),
        "seed": recipe.seed,
        "purpose": "train",
        "site": site,
        "round": 1,
        "rounds": 1,
    }
    order = messages.Message({**fields, "lr": 0.1, "parts": [], "oldest_snapshot": 0}, sent)
    found = runner.reply(order).tensors["model"]
    return torch.cat([(found[name] - sent["model"][name]).reshape(-1) for name in sorted(found)])


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def changed(dataset: FederatedDataset, what: str) -> FederatedDataset:
    """The data set with one label or one pixel of SITE's training images changed."""
    site = dataset.sites[SITE]
    train = site.train
    assert isinstance(train, Selection)
    row, shared = int(train.rows[0]), train.shared
    images, labels = shared.images.clone(), shared.labels.clone()
    if what == "label":
        labels[row] = (labels[row] + 1) % 10
    else:
        images[row, 0, 0, 0] += 1
    new: Images = replace(shared, images=images, labels=labels)

    def renewed(part: object) -> Any:
        return Selection.from_rows(new, part.rows) if isinstance(part, Selection) else part

    sites = {
        name: replace(one, train=renewed(one.train), validation=renewed(one.validation), test=renewed(one.test))
        for name, one in dataset.sites.items()
    }
    return replace(dataset, sites=sites)


def test_equal_recipes_on_equal_images_have_equal_noise() -> None:
    first, again = update_of(tiny(privacy=SEEDED, **ONE_STEP)), update_of(tiny(privacy=SEEDED, **ONE_STEP))
    assert torch.equal(first, again)
    elsewhere = update_of(tiny(privacy=SEEDED, **ONE_STEP, engine={"name": "stacked"}))
    assert torch.equal(first, elsewhere), "the engine is no part of what a run is"


@pytest.mark.parametrize(
    "other",
    [
        {"training__batch": 127},
        {"training__augment": {"flip": True}},
        {"training__optimiser__lr": 0.2},
        {"rounds": 3},
        {"seed": 1},
        {"privacy": {**SEEDED, "clip": 1.0001}},
    ],
    ids=str,
)
def test_d10_recipes_that_differ_have_unrelated_noise(other: dict[str, Any]) -> None:
    first = update_of(tiny(privacy=SEEDED, **ONE_STEP))
    assert len(first) > 4000
    assert abs(correlation(first, update_of(tiny(**{"privacy": SEEDED, **ONE_STEP, **other})))) < 0.05


@pytest.mark.parametrize("what", ["label", "image"])
def test_d10_sites_whose_images_differ_have_unrelated_noise(what: str) -> None:
    recipe = tiny(privacy=SEEDED, **ONE_STEP)
    dataset = load_sites(recipe)
    other = changed(dataset, what)
    assert abs(correlation(update_of(recipe, dataset), update_of(recipe, other))) < 0.05
    assert torch.equal(update_of(recipe, dataset, "site-2"), update_of(recipe, other, "site-2")), "the same release"


def test_secret_noise_is_another_in_every_run() -> None:
    recipe = tiny(privacy={**SEEDED, "randomness": "secret"}, **ONE_STEP)
    assert abs(correlation(update_of(recipe), update_of(recipe))) < 0.08, (
        "which fails by chance once in 30 million runs"
    )


def test_a_ledger_is_for_secret_noise_only() -> None:
    with pytest.raises(RecipeError, match=r"privacy.randomness: secret, or leave privacy.ledger out"):
        run(tiny(privacy={**SEEDED, "ledger": "ours.jsonl"}))


def test_the_key_of_a_run_is_overwritten_and_removed_when_it_ends(tmp_path: Path) -> None:
    kept: list[bytes] = []

    def link(event: str, _: Any) -> None:
        if event == "round" and not kept:
            kept.append((tmp_path / "run" / "secret").read_bytes())
            (tmp_path / "linked").hardlink_to(tmp_path / "run" / "secret")

    run(tiny(privacy={**SEEDED, "randomness": "secret"}), tmp_path / "run", watch=link)
    assert len(bytes.fromhex(kept[0].decode())) == 32
    assert not (tmp_path / "run" / "secret").exists()
    assert set((tmp_path / "linked").read_bytes()) == {0}
    assert not any(kept[0] in path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
