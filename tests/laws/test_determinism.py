"""L6: same seed, same bytes; another seed, other bytes; nothing that was handed in is ever changed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic import Recipe, run
from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm
from polyclinic.core.jobs import Federation, Fitted, Job, Score, Site, Update
from polyclinic.core.names import POOLED
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Examples, SiteId, Tensors
from polyclinic.data.examples import Selection, SiteData
from polyclinic.federation.site_runner import drive_jobs
from polyclinic.models import build_model
from polyclinic.runs.experiment import FederatedDataset, load_sites
from polyclinic.storage import messages
from polyclinic.training.fit import fit, score
from polyclinic.training.network import LiveNetwork
from tests.laws.bench import clinics, federation, noise, play, site, small, with_beside
from tests.small import NEEDED

BASE = {
    "name": "determinism",
    "rounds": 3,
    "data": {"name": "digits", "partition": {"by": "iid", "sites": 3}},
    "model": {"name": "linear"},
    "algorithm": "fedavg",
    "evaluate": {"every": 2, "bootstrap": 0},
}


@cache
def digits() -> FederatedDataset:
    """Eighty digits to learn from at each of three sites, shared by all recipes here."""
    whole = load_sites(Recipe.from_values(BASE))
    sites = {name: SiteData(name, few(held.train), held.validation, held.test) for name, held in whole.sites.items()}
    return FederatedDataset(whole.classes, sites, None, whole.channels, whole.size)


def few(examples: Examples) -> Selection:
    assert isinstance(examples, Selection)
    return examples.subset(torch.arange(80))


def sha256(**settings: Any) -> str:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    found: str = run(Recipe.from_values(BASE, keys), dataset=digits()).summary.sha256
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_same_seed_same_bytes_other_seed_other_bytes(name: str) -> None:
    plan = {"algorithm": name, **NEEDED.get(name, {})}
    first = sha256(seed=3, **plan)
    assert sha256(seed=3, **plan) == first
    assert sha256(seed=4, **plan) != first


def test_the_order_of_the_data_comes_from_the_seed_too() -> None:
    """The seed also draws the first weights; here they are the same, and only the order can differ."""
    algorithm, network, sites = ALGORITHMS["fedavg"](Training(batch=5)), small(), clinics(12, 7)
    digests = [play(algorithm, sites, network, 2, seed=seed).sha256 for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_worker_processes_give_the_bytes_of_one_process() -> None:
    assert sha256(algorithm="scaffold", engine__workers=2) == sha256(algorithm="scaffold")


@dataclass
class RandomStates:
    """The generators of the whole process, which are other people's."""

    torch: torch.Tensor = field(default_factory=torch.get_rng_state)
    numpy: str = field(default_factory=lambda: str(np.random.get_state()))
    python: Any = field(default_factory=random.getstate)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomStates)
            and torch.equal(self.torch, other.torch)
            and (self.numpy, self.python) == (other.numpy, other.python)
        )


def test_a_run_with_dropout_repeats_itself_and_leaves_the_process_generators_alone() -> None:
    settings: dict[str, Any] = {"model__name": "mlp", "model__dropout": 0.5}
    before = RandomStates()
    first = sha256(**settings)
    assert RandomStates() == before
    torch.rand(3)
    assert RandomStates() != before
    assert sha256(**settings) == first
    assert sha256(model__name="mlp", model__dropout=0.0) != first


def test_dropout_masks_differ_between_sites_rounds_and_steps() -> None:
    """A stream that was reset too often would drop the same units for ever."""
    drawn = []
    network = small(norm=False, dropout=0.5)
    network.module.extractor.dropout.register_forward_hook(  # type: ignore[union-attr]
        lambda layer, _inputs, output: drawn.append((output == 0).flatten().tolist()) if layer.training else None
    )
    sites = {name: site(name, noise(10, "same")) for name in ("a", "b")}
    play(ALGORITHMS["fedavg"](Training(Optimiser(lr=0.0), batch=10)), sites, network, 3)
    assert len(drawn) == 6
    assert len({tuple(mask) for mask in drawn}) == 6


def test_networks_that_draw_without_a_dropout_layer_repeat_themselves_too() -> None:
    """EfficientNet drops whole branches (stochastic depth), also where the recipe sets dropout to 0."""
    module = build_model("efficientnet_b0", classes=2, channels=1, size=8, dropout=0.0, seed=Stream(0))
    network, algorithm = LiveNetwork(module), ALGORITHMS["fedavg"](Training(batch=4, fine_tune=0.1))
    images = noise(4, "two classes")
    sites = {"only": site("only", replace(images, labels=images.labels % 2))}
    before = RandomStates()
    first = play(algorithm, sites, network, 1).sha256
    assert RandomStates() == before
    torch.rand(1)
    assert play(algorithm, sites, network, 1).sha256 == first


class Witness:
    """Calls the parts of an algorithm by hand and compares every argument with what it was before."""

    def __init__(self, algorithm: Algorithm, network: LiveNetwork) -> None:
        sites = clinics(12, 7, 9)
        self.algorithm, self.network = algorithm, with_beside(algorithm, sites, network)
        self.federation, self.sites = federation(algorithm, sites, self.network)
        self.memories: dict[SiteId, Bundle | None] = dict.fromkeys(self.sites)

    def trainers(self) -> list[SiteId]:
        return [POOLED] if self.algorithm.pooled else list(self.sites)

    def unchanged(self, call: Callable[[], Any], *arguments: Bundle | None) -> Any:
        before = [described(argument) for argument in arguments]
        result = call()
        assert [described(argument) for argument in arguments] == before
        return result

    def round(self, state: Bundle, number: int, rounds: int) -> Bundle:
        updates = [self.visit(state, name, number, rounds) for name in self.trainers()]
        tensors = [update.tensors for update in updates]
        new: Bundle = self.unchanged(lambda: self.algorithm.aggregate(state, iter(updates)), state, *tensors)
        return new

    def visit(self, state: Bundle, name: SiteId, number: int, rounds: int) -> Update:
        """A site's round on a message whose tensors are views of its bytes."""
        sent: Bundle = self.unchanged(lambda: self.algorithm.broadcast(state, name), state)
        message = messages.encode({}, sent)
        fingerprint = hashlib.sha256(message).hexdigest()
        received, memory = messages.decode(message).tensors, self.memories[name]
        self.unchanged(lambda: self.algorithm.models(received, memory), received, memory)
        site = Site(name, len(self.sites[name].train), number, rounds, 0.1)
        work = self.algorithm.local(received, memory, site, Stream(0, ("site", name)))
        update, remembered = self.unchanged(
            lambda: drive_jobs(work, lambda job, number: self.run(job, site)), received, memory
        )
        assert hashlib.sha256(message).hexdigest() == fingerprint
        self.memories[name] = remembered
        return Update(
            messages.decode(messages.encode({}, update.tensors)).tensors, update.examples, name, update.scalars
        )

    def run(self, job: Job, site: Site) -> Fitted | Tensors:
        data = self.sites[site.name].train
        if isinstance(job, Score):
            return score(job, self.network, data, 8)
        optimiser = {"optimiser": job.optimiser_state} if job.optimiser_state else None
        fitted: Fitted = self.unchanged(
            lambda: fit(job, self.network, data, site, Stream(0, ("site", site.name))),
            job.weights,
            job.reference,
            optimiser,
        )
        return fitted


def described(bundle: Bundle | None) -> tuple[str, list[tuple[str, list[str]]]] | None:
    """Bits and structure: also an added or removed name is a change."""
    return (
        None
        if bundle is None
        else (messages.hash_tensors(bundle), [(kind, list(names)) for kind, names in bundle.items()])
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_changes_what_it_is_handed(name: str, momentum: float) -> None:
    if name in ("scaffold", "fedsgd") and momentum:
        pytest.skip(f"{name} refuses momentum")
    algorithm = ALGORITHMS[name](Training(Optimiser(lr=0.1, momentum=momentum), batch=5))
    witness = Witness(algorithm, small(dropout=0.2))
    start: Federation = witness.federation
    state: Bundle = witness.unchanged(lambda: algorithm.init(start), start.initial)
    first = described(start.initial)
    for number in (1, 2, 3):
        old = described(state)
        new = witness.round(state, number, rounds=3)
        assert described(state) == old
        assert described(start.initial) == first, "the state after a round may share tensors with the start"
        state = new
    witness.unchanged(lambda: algorithm.final_state(state), state)
