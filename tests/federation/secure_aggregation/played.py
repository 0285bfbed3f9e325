"""Masked rounds between sites in this process, whose messages are encoded, recorded, lost or changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from torch import nn

from polyclinic import Recipe
from polyclinic.core.errors import Refused
from polyclinic.core.jobs import Failure
from polyclinic.core.types import Bundle, SiteId
from polyclinic.federation.progress import Outcome
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.secure_aggregation.assembly import simulate_identities
from polyclinic.models import MODELS, register_model
from polyclinic.models.classifier import Classifier
from polyclinic.runs.assemble import round_options
from polyclinic.runs.experiment import Experiment
from polyclinic.runs.sites import FederatedDataset, load_sites
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from tests.federation.mock_engine import MockEngine
from tests.small import tiny

SITES = 5
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {},
    "scaffold": {"training__optimiser": {"name": "sgd", "lr": 0.1}},
    "fedbn": {},
    "fedcycle": {},
    "fedper": {},
}
"""The algorithms whose sums are compared, with what each asks of a recipe."""
MODEL = "masked_cnn"
Change = Callable[[SiteId, messages.Message], messages.Message]


@pytest.fixture(scope="module", autouse=True)
def network_with_statistics() -> Iterator[None]:
    """Register a small network with statistics and a counter, for the tests of one file."""

    @register_model(MODEL, min_size=4)
    def build(*, classes: int, channels: int, size: int, dropout: float) -> Classifier:
        """A small network with statistics and a counter."""
        layers = nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        return Classifier(nn.Sequential(*layers), nn.Linear(4 * (size // 2) ** 2, classes))

    yield
    del MODELS[MODEL]


def masked(masks: bool = True, sites: int = SITES, options: dict[str, Any] | None = None, **settings: Any) -> Recipe:
    """A recipe of sites that have unequal numbers of images, and a network with statistics."""
    return tiny(
        **{
            "data__partition": {"by": "quantity", "sites": sites, "alpha": 2.0},
            "model": MODEL,
            "training__epochs": None,
            "training__steps": 2,
            "training__batch": 8,
            "evaluate__every": 0,
            "stages": [{"name": "mask", "masks": masks, **(options or {})}],
            **settings,
        }
    )


@cache
def dataset_of(sites: int) -> FederatedDataset:
    """The images of all recipes with so many sites."""
    return load_sites(masked(sites=sites))


@dataclass
class Play:
    """A run, what was said in it, and what goes wrong: `lost` names the purposes that a site does not answer."""

    recipe: Recipe
    lost: set[tuple[SiteId, str]] = field(default_factory=set)
    change_order: Change = lambda _, message: message
    change_reply: Change = lambda _, message: message
    sent: list[tuple[SiteId, messages.Message]] = field(default_factory=list)
    replies: list[tuple[SiteId, str, bytes]] = field(default_factory=list)
    refusals: dict[tuple[SiteId, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sites = self.recipe.data.partition.options["sites"]
        self.made = Experiment(self.recipe, dataset=dataset_of(sites))
        self.runners = self.made.setup.make_runners(RamMemory(), self.made.secret_of_plan)

    @property
    def sites(self) -> list[SiteId]:
        return list(self.runners)

    def answer(self, site: SiteId, data: bytes) -> bytes | Failure:
        order = self.change_order(site, messages.decode(data))
        purpose = order.fields["purpose"]
        self.sent.append((site, order))
        if (site, purpose) in self.lost:
            return Failure("dead", "its process ended")
        try:
            reply = self.change_reply(site, self.runners[site].reply(order))
        except Refused as refusal:
            self.refusals[site, purpose] = str(refusal)
            return Failure("refused", str(refusal))
        encoded = messages.encode(reply.fields, reply.tensors)
        self.replies.append((site, purpose, encoded))
        return encoded

    def rounds(self, **options: Any) -> Rounds:
        setup, recipe = self.made.setup, self.recipe
        peers = next(iter(simulate_identities(recipe.seed, self.sites).values())).peers
        return Rounds(
            setup.federation,
            setup.algorithm,
            MockEngine(self.answer, **options),
            round_options(recipe, "run"),
            RamJournal(),
            transforms=setup.transforms,
            peers=peers,
        )

    def play(self, **options: Any) -> Outcome:
        return self.rounds(**options).play_all()

    def said(self, purpose: str) -> list[bytes]:
        """The replies to messages of a purpose."""
        return [data for _, asked, data in self.replies if asked == purpose]


def largest_difference(one: Bundle, other: Bundle) -> float:
    """The largest difference of any value of two bundles with the same names."""
    assert {kind: list(group) for kind, group in one.items()} == {kind: list(group) for kind, group in other.items()}
    return max(
        float((tensor.double() - other[kind][name].double()).abs().max())
        for kind, group in one.items()
        for name, tensor in group.items()
        if tensor.numel()
    )


def same_bits(one: Bundle, other: Bundle) -> bool:
    return messages.hash_tensors(one) == messages.hash_tensors(other)
