"""A federation small enough for a law: tiny data and networks around the real round loop, runners, fit and wire."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.algorithms.base import Algorithm
from polyclinic.core.jobs import Failure, Federation
from polyclinic.core.names import POOLED
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, SiteId
from polyclinic.data.examples import Images, SiteData
from polyclinic.evaluation.rows import Row
from polyclinic.federation.engines import Answer, Engine
from polyclinic.federation.engines.local import LocalEngine
from polyclinic.federation.progress import Outcome, RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models.classifier import Classifier
from polyclinic.runs.experiment import pool_sites
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.data_order import draw_epoch_batches
from polyclinic.training.network import (
    LiveNetwork,
    copy_module_weights,
    feature_shape,
    normalisation_names,
    with_auxiliary,
)

SIDE, CLASSES = 4, 3
Sites: TypeAlias = Mapping[SiteId, SiteData]
Weighting: TypeAlias = Literal["examples", "uniform"]


def site(name: SiteId, train: Images, validation: Images | None = None, test: Images | None = None) -> SiteData:
    nothing = train.subset(torch.arange(0))
    return SiteData(name, train, validation or nothing, test or nothing)


def noise(count: int, *path: str | int, dtype: torch.dtype = torch.float32) -> Images:
    """Random pictures with random labels: a law does not care whether there is anything to learn."""
    generator = Stream(7, ("noise", *path)).generator()
    images = torch.randn(count, 1, SIDE, SIDE, generator=generator).to(dtype)
    return Images(images, torch.randint(CLASSES, (count,), generator=generator))


def clinics(*counts: int, dtype: torch.dtype = torch.float32) -> dict[SiteId, SiteData]:
    """Sites `clinic-1`, `clinic-2`, … with so many training images, and six each for validation and test."""
    names = {f"clinic-{number}": count for number, count in enumerate(counts, 1)}
    return {
        n: site(
            n, noise(count, n, dtype=dtype), noise(6, n, "validation", dtype=dtype), noise(6, n, "test", dtype=dtype)
        )
        for n, count in names.items()
    }


def small(norm: bool = True, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> LiveNetwork:
    """One convolution, BatchNorm if wanted, and a linear head; its first weights are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        layers: dict[str, nn.Module] = {"conv": nn.Conv2d(1, 4, 3, padding=1)}
        layers |= {"norm": nn.BatchNorm2d(4)} if norm else {}
        layers |= {"relu": nn.ReLU(), "pool": nn.MaxPool2d(2), "dropout": nn.Dropout(dropout), "flatten": nn.Flatten()}
        module = Classifier(nn.Sequential(OrderedDict(layers)), nn.Linear(SIDE**2, CLASSES))
    return LiveNetwork(module.to(dtype))


class QuadraticNetwork(LiveNetwork):
    """One float64 weight w; a site's loss is a/2·(w − b)², its images are the pairs (a, b)."""

    def __init__(self, start: float) -> None:
        super().__init__(Classifier(nn.Flatten(), nn.Linear(1, 1, bias=False, dtype=torch.float64)))
        nn.init.constant_(self.module.head.weight, start)  # type: ignore[arg-type]

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        a, b = batch[0].flatten(1).unbind(1)
        return (a / 2 * (weights["model"]["head.weight"].squeeze() - b) ** 2).mean()


def quadratic(name: SiteId, a: float, b: float, count: int = 1) -> SiteData:
    """A site whose every example has the loss a/2·(w − b)², so that any batch gives the full gradient."""
    pair = torch.tensor([a, b], dtype=torch.float64).reshape(1, 2, 1, 1)
    return site(name, Images(pair.repeat(count, 1, 1, 1), torch.zeros(count, dtype=torch.int64)))


@dataclass(frozen=True)
class Letter:
    """One message to a site and its answer."""

    round: int
    site: SiteId
    sent: messages.Message
    answer: messages.Message


@dataclass
class Tap:
    """An engine that reads every letter on its way."""

    engine: Engine
    letters: list[Letter] = field(default_factory=list)

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        for name, answer in self.engine.exchange(round, sent, deadline):
            assert not isinstance(answer, Failure), answer
            reply = answer if isinstance(answer, messages.Message) else messages.decode(answer)
            self.letters.append(Letter(round, name, messages.decode(sent[name]), reply))
            yield name, answer


@dataclass(frozen=True)
class Played:
    """A finished run, with everything that a law may want to look at."""

    outcome: Outcome
    journal: RamJournal
    memory: RamMemory
    rounds: Rounds

    @property
    def model(self) -> dict[str, Tensor]:
        return self.outcome.state["model"]

    @property
    def weights(self) -> Bundle:
        return {kind: self.outcome.state.get(kind, {}) for kind in ("model", "buffers")}

    @property
    def sha256(self) -> str:
        return messages.hash_tensors(self.outcome.state)

    def cohorts(self) -> list[list[SiteId]]:
        return [row["sites"] for row in as_json(self.journal.costs) if row["event"] == "charge"]

    def remembered(self, name: SiteId) -> Bundle | None:
        return self.memory.load(name, self.outcome.rounds + 1)


def federation(algorithm: Algorithm, sites: Sites, network: LiveNetwork) -> tuple[Federation, Sites]:
    everyone = {**sites, POOLED: pool_sites(sites)} if algorithm.pooled else dict(sites)
    classes = tuple(str(number) for number in range(CLASSES))
    registered = {name: len(held.train) for name, held in everyone.items()}
    start, norms = network.copy_weights(), normalisation_names(network.module)
    return Federation(classes, registered, start, norms, features(sites, network)), everyone


def features(sites: Sites, network: LiveNetwork) -> tuple[int, ...]:
    return feature_shape(network, next(iter(sites.values())).train.batch(torch.tensor([0]))[0])


def with_beside(algorithm: Algorithm, sites: Sites, network: LiveNetwork) -> LiveNetwork:
    """The same network, and what the algorithm trains beside it; always the same first weights."""
    return with_auxiliary(network, algorithm.auxiliary, features(sites, network), CLASSES, Stream(11, ("beside",)))


def play(
    algorithm: Algorithm,
    sites: Sites,
    network: LiveNetwork,
    rounds: int,
    wrap: Callable[[Engine], Engine] = lambda engine: engine,
    **rules: Any,
) -> Played:
    """Play `rounds` rounds from the network's own weights, which are put back afterwards."""
    network = with_beside(algorithm, sites, network)
    known, everyone = federation(algorithm, sites, network)
    memory, journal = RamMemory(), RamJournal()
    runners = {name: SiteRunner(name, held, algorithm, network, memory) for name, held in everyone.items()}
    engine = wrap(LocalEngine(runners))
    loop = Rounds(known, algorithm, engine, RoundOptions(rounds, **{"evaluate_every": 0, **rules}), journal)
    outcome = loop.play_all()
    network.load_weights(known.initial)
    return Played(outcome, journal, memory, loop)


def tapped(
    algorithm: Algorithm, sites: Sites, network: LiveNetwork, rounds: int = 1, **rules: Any
) -> tuple[Played, list[Letter]]:
    """The same, and every letter."""
    letters: list[Letter] = []
    return play(algorithm, sites, network, rounds, lambda engine: Tap(engine, letters), **rules), letters


def new_optimiser(module: nn.Module, options: Optimiser) -> torch.optim.Optimizer:
    if options.name == "adam":
        return torch.optim.Adam(module.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    return torch.optim.SGD(
        module.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )


def plain_training(
    network: LiveNetwork, data: Images, training: Training, name: SiteId, periods: Sequence[Sequence[int]]
) -> Bundle:
    """An ordinary PyTorch loop with nothing of ours but the order of the data: a new optimiser for each period."""
    module, start = network.module, copy_module_weights(network.module)
    module.train().requires_grad_(True)
    for epochs in periods:
        optimiser = new_optimiser(module, training.optimiser)
        for epoch in epochs:
            for index in draw_epoch_batches(data.labels, training, Stream(0, ("site", name, "order", epoch))):
                optimiser.zero_grad()
                torch.autograd.backward(F.cross_entropy(module(data.images[index]), data.labels[index]))
                optimiser.step()
    trained = copy_module_weights(module)
    network.load_weights(start)
    return trained


def as_json(rows: Iterable[Row]) -> list[Any]:
    """The rows of a journal as a run's folder holds them."""
    return [row.to_json() for row in rows]


def same(one: Bundle, other: Bundle) -> bool:
    """Equal names, shapes, dtypes and bits."""
    return messages.hash_tensors(one) == messages.hash_tensors(other)
