"""L5: sites trained as one stack give what they give one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torchvision.ops import StochasticDepth

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm, network_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.errors import EngineError
from polyclinic.core.jobs import Fit, Site, Update, Work
from polyclinic.core.network import Network, Objective
from polyclinic.core.options import Augment, Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle
from polyclinic.data.examples import Images, Selection, SiteData
from polyclinic.federation.engines.local import LocalEngine
from polyclinic.federation.engines.stacked import Compile, StackedEngine
from polyclinic.runs.experiment import run
from polyclinic.training.stacked.batching import StackSchedule
from tests.laws.bench import Played, Sites, as_json, clinics, play, small
from tests.laws.test_handed_over import over_bytes
from tests.small import tiny

SIZES = (12, 7, 16, 16, 5)
"""Unequal: with batches of four, sites end at different steps and with batches of different length."""
BARS = {"fraug": 1e-8}
"""Networks that pull against each other magnify rounding: 1e-13 apart after one round, 1e-9 after three."""


def on_the_stack(most: int | None = None, compile: Compile = "auto") -> Any:
    def wrap(engine: Any) -> StackedEngine:
        assert isinstance(engine, LocalEngine)
        return StackedEngine(engine.runners, max_stack=most, compile=compile)

    return wrap


def tensors(bundle: Bundle) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, group in bundle.items():
        for name, tensor in group.items():
            yield f"{kind}/{name}", tensor


def assert_close(mine: Bundle, theirs: Bundle, bar: float) -> None:
    found, wanted = dict(tensors(mine)), dict(tensors(theirs))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = float(tensor.double().abs().max()) if tensor.numel() else 0.0
        apart = float((found[name].double() - tensor.double()).abs().max()) if tensor.numel() else 0.0
        assert apart <= bar * max(scale, 1), f"{name} is {apart} apart"


def same_on_both(algorithm: Algorithm, sites: Sites, bar: float, dtype: torch.dtype, **network: Any) -> Played:
    alone = play(algorithm, sites, small(dtype=dtype, **network), 3)
    stacked = play(algorithm, sites, small(dtype=dtype, **network), 3, on_the_stack())
    assert_close(stacked.outcome.state, alone.outcome.state, bar)
    for name in sites:
        one, other = alone.remembered(name), stacked.remembered(name)
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert_close(other, one, bar)
    return stacked


def together(played: Played) -> set[int]:
    rounds = [row for row in as_json(played.journal.costs) if row["event"] == "round"]
    return {note.get("stack_size", 1) for row in rounds for note in row["sites"].values()}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_gives_the_same_on_both_engines(name: str, norm: bool) -> None:
    training = Training(Optimiser("sgd", 0.1), batch=4, epochs=2)
    algorithm = ALGORITHMS[name](training=training)
    bar = BARS.get(name, 1e-10)
    played = same_on_both(algorithm, clinics(*SIZES, dtype=torch.float64), bar, torch.float64, norm=norm)
    if name != "centralised":
        assert together(played) == {len(SIZES)}


@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser("sgd", 0.1, 0.9, 0.01),
        Optimiser("adam", 0.01, 0.0, 0.01),
        Optimiser("adamw", 0.01, 0.0, 0.1),
    ],
    ids=lambda o: o.name,
)
@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_every_optimiser_steps_as_torch_does(name: str, optimiser: Optimiser) -> None:
    """Without BatchNorm: before it a bias has no gradient but rounding, which Adam would magnify."""
    algorithm = ALGORITHMS[name](training=Training(optimiser, batch=4, epochs=2))
    played = same_on_both(algorithm, clinics(*SIZES, dtype=torch.float64), 1e-10, torch.float64, norm=False)
    assert together(played) == {len(SIZES)}


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_in_single_precision_they_agree_to_its_rounding(name: str) -> None:
    algorithm = ALGORITHMS[name](training=Training(Optimiser("sgd", 0.1), batch=4, epochs=1))
    played = same_on_both(algorithm, clinics(*SIZES), 1e-5, torch.float32)
    assert together(played) == {len(SIZES)}


@pytest.mark.parametrize(
    "training",
    [
        Training(Optimiser("sgd", 0.1), batch=4, epochs=None, steps=3),
        Training(Optimiser("sgd", 0.1), batch=4, fine_tune=0.3),
        Training(Optimiser("sgd", 0.1), batch=4, oversample=True),
        Training(Optimiser("sgd", 0.1), batch=4, augment=Augment(rotation=20, flip=True, brightness=0.2, blur=0.5)),
    ],
    ids=["steps", "fine-tuning", "oversampling", "augmentation"],
)
def test_every_way_of_training_stacks(training: Training) -> None:
    sites = clinics(*SIZES, dtype=torch.float64)
    played = same_on_both(ALGORITHMS["fedavg"](training=training), sites, 1e-10, torch.float64)
    assert together(played) == {len(SIZES)}


def test_sites_that_share_their_images_are_gathered_at_once() -> None:
    apart = clinics(*SIZES, dtype=torch.float64)
    pools = [held.train for held in apart.values() if isinstance(held.train, Images)]
    shared = Images(torch.cat([p.images for p in pools]), torch.cat([p.labels for p in pools]))
    starts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    joined = {
        name: SiteData(name, Selection.from_rows(shared, torch.arange(start, start + size)), held.validation, held.test)
        for (name, held), start, size in zip(apart.items(), starts, SIZES, strict=True)
    }
    algorithm = ALGORITHMS["fedavg"](training=Training(Optimiser("sgd", 0.1), batch=4))
    one = play(algorithm, apart, small(dtype=torch.float64), 2)
    other = play(algorithm, joined, small(dtype=torch.float64), 2, on_the_stack())
    assert_close(other.outcome.state, one.outcome.state, 1e-10)


def test_images_that_are_fetched_ahead_are_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a device that does not hold them."""
    (pool,) = clinics(24, dtype=torch.float64).values()
    shared = pool.train
    assert isinstance(shared, Images)
    parts = [Selection.from_rows(shared, torch.arange(start, start + 8)) for start in (0, 8, 16)]
    sites = {f"clinic-{n}": SiteData(f"clinic-{n}", part, part, part) for n, part in enumerate(parts)}
    training = Training(Optimiser("sgd", 0.1), batch=3, augment=Augment(rotation=20))
    algorithm = ALGORITHMS["fedavg"](training=training)
    one = play(algorithm, sites, small(dtype=torch.float64), 2, on_the_stack())
    begin = StackSchedule.__init__

    def elsewhere(self: StackSchedule, *given: Any) -> None:
        begin(self, *given)
        self.needs_transfer = True

    monkeypatch.setattr(StackSchedule, "__init__", elsewhere)
    other = play(algorithm, sites, small(dtype=torch.float64), 2, on_the_stack())
    assert one.sha256 == other.sha256


@pytest.mark.parametrize("most", [1, 2, 3])
def test_stacks_that_must_be_smaller_change_nothing(most: int) -> None:
    sites = clinics(*SIZES, dtype=torch.float64)
    algorithm = ALGORITHMS["scaffold"](training=Training(Optimiser("sgd", 0.1), batch=4))
    whole = play(algorithm, sites, small(dtype=torch.float64), 2, on_the_stack())
    parts = play(algorithm, sites, small(dtype=torch.float64), 2, on_the_stack(most))
    assert_close(parts.outcome.state, whole.outcome.state, 1e-10)
    assert max(together(parts)) == most


@pytest.mark.parametrize("name", ["fedavg", "fedsgd"])
def test_dropout_drops_the_same_units_on_both_engines(name: str) -> None:
    algorithm = ALGORITHMS[name](training=Training(Optimiser("sgd", 0.1), batch=4, epochs=2))
    sites = clinics(*SIZES, dtype=torch.float64)
    played = same_on_both(algorithm, sites, 1e-10, torch.float64, dropout=0.5)
    assert together(played) == {len(SIZES)}
    without = play(algorithm, sites, small(dtype=torch.float64), 3)
    assert without.sha256 != played.sha256


def test_layers_that_draw_from_a_shared_generator_run_one_by_one_and_the_ledger_says_why() -> None:
    sites = clinics(*SIZES)
    networks = [small(dropout=0.5) for _ in range(2)]
    for network in networks:
        network.module.extractor.depth = StochasticDepth(0.5, "row")
    algorithm = ALGORITHMS["fedavg"](training=Training(Optimiser("sgd", 0.1), batch=4))
    one, other = play(algorithm, sites, networks[0], 2), play(algorithm, sites, networks[1], 2, on_the_stack())
    assert one.sha256 == other.sha256
    notes = [note for row in as_json(other.journal.costs) if row["event"] == "round" for note in row["sites"].values()]
    assert {note["unstacked_reason"] for note in notes} == {
        "StochasticDepth draws from a generator that sites would share"
    }


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_compiled_stacks_give_the_same(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of unequal size, so that one is computed only to keep the shape. Without inductor, whose C++ takes most of
    a minute, all is traced as with it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    sites = clinics(12, 8, 4, dtype=torch.float64)
    algorithm = ALGORITHMS["fedprox"](training=Training(Optimiser("sgd", 0.1, 0.9), batch=4))
    alone = play(algorithm, sites, small(dtype=torch.float64, dropout=0.3), 2)
    stacked = play(algorithm, sites, small(dtype=torch.float64, dropout=0.3), 2, on_the_stack(compile="always"))
    assert_close(stacked.outcome.state, alone.outcome.state, 1e-10)


def test_a_site_that_cannot_read_its_order_fails_alone() -> None:
    sites = clinics(8, 8, 8)
    algorithm = ALGORITHMS["fedavg"](training=Training(Optimiser("sgd", 0.1), batch=4))

    class Damaging:
        def __init__(self, engine: Any) -> None:
            self.engine = on_the_stack()(engine)

        def exchange(self, round: int, sent: Any, deadline: Any) -> Any:
            first = next(iter(sent))
            return self.engine.exchange(round, {**sent, first: sent[first][:-9]}, deadline)

        def close(self) -> None:
            self.engine.close()

    played = play(algorithm, sites, small(), 1, Damaging)
    row = next(row for row in as_json(played.journal.costs) if row["event"] == "round")
    assert [note["outcome"] for note in row["sites"].values()] == ["refused", "accepted", "accepted"]


def test_a_recipe_can_name_it() -> None:
    local, stacked = run(tiny()).summary, run(tiny(engine__name="stacked")).summary
    assert [found.engine and found.engine.name for found in (local, stacked)] == ["local", "stacked"]
    assert stacked.headline.scores.value("accuracy") == pytest.approx(local.headline.scores.value("accuracy"), abs=0.01)


def test_statistics_of_batches_move_where_all_sites_train_at_once() -> None:
    """Of equal size, so that nobody is ever left out; in single precision, whose weights lie side by side."""
    algorithm = ALGORITHMS["fedavg"](training=Training(Optimiser("sgd", 0.1), batch=4))
    sites = clinics(8, 8, 8)
    played = same_on_both(algorithm, sites, 1e-5, torch.float32)
    moved = played.outcome.state["buffers"]["extractor.norm.running_mean"]
    assert float(moved.abs().max()) > 1e-3


def distilled(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> torch.Tensor:
    """A teacher, in training mode as the network is, with statistics and dropout of its own."""
    images, _ = batch
    teacher = {"model": reference["teacher"], "buffers": reference["statistics"]}
    return network.loss(weights, batch) + (network(weights, images) - network(teacher, images)).pow(2).mean()


@dataclass(frozen=True)
class Distilling(FedAvg):
    objective: Objective = distilled

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        aside = {"teacher": received["model"], "statistics": received["buffers"]}
        fitted = yield Fit(received, self.objective, self.training, aside)
        return Update(fitted.weights, site.examples), None


def test_a_teacher_draws_as_its_site_does_and_keeps_its_statistics_to_itself() -> None:
    algorithm = Distilling(Training(Optimiser("sgd", 0.1), batch=4, epochs=2))
    sites = clinics(*SIZES, dtype=torch.float64)
    played = same_on_both(algorithm, sites, 1e-10, torch.float64, dropout=0.5)
    assert together(played) == {len(SIZES)}
    travelled = play(algorithm, sites, small(dtype=torch.float64, dropout=0.5), 3, over_bytes)
    local = play(algorithm, sites, small(dtype=torch.float64, dropout=0.5), 3)
    assert travelled.sha256 == local.sha256


def looks(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> torch.Tensor:
    loss = network.loss(weights, batch)
    return loss if loss > 0.5 else 2 * loss


def notes_down(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> torch.Tensor:
    loss = network.loss(weights, batch)
    return loss + 0 * loss.item()


@pytest.mark.parametrize("objective", [looks, notes_down])
def test_objectives_that_cannot_be_stacked_run_one_by_one_and_the_ledger_says_so(objective: Objective) -> None:
    algorithm = Distilling(Training(Optimiser("sgd", 0.1), batch=4), objective=objective)
    sites = clinics(*SIZES)
    alone, stacked = play(algorithm, sites, small(), 2), play(algorithm, sites, small(), 2, on_the_stack())
    assert alone.sha256 == stacked.sha256
    for row in (row for row in as_json(stacked.journal.costs) if row["event"] == "round"):
        assert all("vmap cannot map its objective" in note["unstacked_reason"] for note in row["sites"].values())


class Idle(FedAvg):
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        if site.name == "clinic-1":
            return Update(network_weights(received), site.examples), None
        return (yield from super().local(received, memory, site, rng))


def test_a_site_may_have_nothing_to_do() -> None:
    played = same_on_both(Idle(Training(Optimiser("sgd", 0.1), batch=4)), clinics(8, 8, 8), 1e-5, torch.float32)
    assert together(played) == {1, 2}


class Careless(FedAvg):
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        received["model"]["head.bias"].add_(1)
        return (yield from super().local(received, memory, site, rng))


@pytest.mark.parametrize("engine", [lambda engine: engine, on_the_stack()], ids=["local", "stacked"])
def test_what_sites_receive_is_not_to_be_changed(engine: Any) -> None:
    with pytest.raises(EngineError, match="changed tensors of 'model' in place"):
        play(Careless(Training(Optimiser("sgd", 0.1), batch=4)), clinics(8, 8), small(), 1, engine)


def test_what_a_site_spoils_after_training_is_found_in_a_stack_too() -> None:
    class Spoiling(FedAvg):
        def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
            update, memory = yield from super().local(received, memory, site, rng)
            if site.name == "clinic-1":
                update.tensors["model"]["head.bias"].mul_(float("nan"))
            return update, memory

    algorithm = Spoiling(Training(Optimiser("sgd", 0.1), batch=4))
    played = play(algorithm, clinics(8, 8, 8), small(), 1, on_the_stack())
    row = next(row for row in as_json(played.journal.costs) if row["event"] == "round")
    assert [note["outcome"] for note in row["sites"].values()] == ["refused", "accepted", "accepted"]


def test_scalars_that_are_no_numbers_are_refused_and_the_round_goes_on() -> None:
    class Boasting(FedAvg):
        def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
            update, memory = yield from super().local(received, memory, site, rng)
            return replace(update, scalars={"a": float("nan")} if site.name == "clinic-1" else {}), memory

    algorithm = Boasting(Training(Optimiser("sgd", 0.1), batch=4))
    for engine in (lambda engine: engine, on_the_stack(), over_bytes):
        row = next(
            r
            for r in as_json(play(algorithm, clinics(8, 8), small(), 1, engine).journal.costs)
            if r["event"] == "round"
        )
        assert [note["outcome"] for note in row["sites"].values()] == ["refused", "accepted"]
