"""Clusters of sites with networks of their own: within one, all is as if there were no other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch

from polyclinic.algorithms.base import Algorithm, without_prefix
from polyclinic.algorithms.baselines.local import Local
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.scaffold import Scaffold
from polyclinic.algorithms.personalisation.fedbn import FedBN
from polyclinic.algorithms.personalisation.fedper import HEAD, FedPer
from polyclinic.algorithms.personalisation.pfedcdp import PFedCDP
from polyclinic.algorithms.representation.moon import Moon
from polyclinic.algorithms.wrappers.clustered import Clustered, ClusterSchedule
from polyclinic.core.jobs import Failure, Federation
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, SiteId
from polyclinic.federation.engines import Engine
from polyclinic.federation.engines.local import LocalEngine, call_or_failure
from polyclinic.federation.progress import Outcome, RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models import build_model
from polyclinic.runs.engines.choice import choose_engine
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.network import LiveNetwork, copy_module_weights, normalisation_names
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import CLASSES, SIDE, Letter, Sites, Tap, as_json, clinics, play as play_alone, same, small
from tests.laws.test_stacked import assert_close, on_the_stack

SGD = Training(Optimiser(lr=0.1), batch=5)
SIZES = (12, 7, 16, 9)
KINDS: dict[str, Callable[[Training], Algorithm]] = {
    "fedavg": FedAvg,
    "scaffold": Scaffold,
    "fedper": FedPer,
    "fedbn": FedBN,
    "moon": Moon,
    "pfedcdp": lambda training: PFedCDP(training, keep=0.3),
    "local": Local,
}
WITH_EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def around(
    inner: Algorithm,
    networks: Mapping[str, LiveNetwork],
    cluster_schedule: ClusterSchedule,
    rates: Mapping[str, float] | None = None,
) -> Clustered:
    initials = {name: copy_module_weights(network.module) for name, network in networks.items()}
    norms = {name: normalisation_names(network.module) for name, network in networks.items()}
    return Clustered(
        inner.training,
        inner=inner,
        initials=initials,
        norms=norms,
        cluster_schedule=cluster_schedule,
        rates=rates or {},
    )


@dataclass(frozen=True)
class Stage:
    """A federation with clusters, ready to play."""

    algorithm: Clustered
    networks: Mapping[str, LiveNetwork]
    sites: Sites
    memory: RamMemory
    journal: RamJournal

    @property
    def federation(self) -> Federation:
        classes = tuple(str(number) for number in range(CLASSES))
        first = next(iter(self.algorithm.initials.values()))
        return Federation(classes, {name: len(held.train) for name, held in self.sites.items()}, first)

    @property
    def runners(self) -> dict[SiteId, SiteRunner]:
        given = self.algorithm, self.networks, self.memory
        return {name: SiteRunner(name, held, *given) for name, held in self.sites.items()}

    def rounds(self, engine: Engine, count: int, **rules: Any) -> Rounds:
        return Rounds(
            self.federation, self.algorithm, engine, RoundOptions(count, **{"evaluate_every": 0, **rules}), self.journal
        )


def set_up(algorithm: Clustered, networks: Mapping[str, LiveNetwork], sites: Sites) -> Stage:
    return Stage(algorithm, networks, sites, RamMemory(), RamJournal())


def play(stage: Stage, rounds: int, wrap: Callable[[Any], Engine] = lambda engine: engine) -> Outcome:
    return stage.rounds(wrap(LocalEngine(stage.runners)), rounds).play_all()


def another(seed: int = 5, **options: Any) -> LiveNetwork:
    """The small network with other first weights."""
    network = small(**options)
    generator = Stream(seed).generator()
    with torch.no_grad():
        for parameter in network.module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return network


def of(bundle: Bundle | None, cluster: str) -> Bundle:
    """A cluster's part of a state or of a memory."""
    mark = f"@{cluster}"
    return {kind.removesuffix(mark): group for kind, group in (bundle or {}).items() if kind.endswith(mark)}


def odd_and_even(site: SiteId, round: int) -> str:
    return "odd" if int(site[-1]) % 2 else "even"


@WITH_EACH_KIND
@pytest.mark.parametrize("options", [{}, {"norm": False}, {"dropout": 0.4}], ids=["batchnorm", "plain", "dropout"])
def test_one_cluster_is_none(kind: Callable[[Training], Algorithm], options: dict[str, Any]) -> None:
    """Bit for bit: the state, and what sites remember."""
    sites, network = clinics(*SIZES), small(**options)
    stage = set_up(around(kind(SGD), {"all": network}, lambda *_: "all"), {"all": network}, sites)
    clustered = play(stage, 3)
    alone = play_alone(kind(SGD), sites, small(**options), 3)
    assert same(of(clustered.state, "all"), alone.outcome.state)
    assert all(same(of(stage.memory.load(site, 4), "all"), alone.remembered(site) or {}) for site in sites)


@WITH_EACH_KIND
def test_two_clusters_are_two_federations(kind: Callable[[Training], Algorithm]) -> None:
    """Bit for bit, though their sites take turns in the federation's order and one process plays both."""
    sites, networks = clinics(*SIZES), {"odd": small(), "even": another()}
    stage = set_up(around(kind(SGD), networks, odd_and_even), networks, sites)
    together = play(stage, 3)
    for cluster, network in {"odd": small(), "even": another()}.items():
        own = {name: held for name, held in sites.items() if odd_and_even(name, 1) == cluster}
        alone = play_alone(kind(SGD), own, network, 3)
        assert same(of(together.state, cluster), alone.outcome.state)
        assert all(same(of(stage.memory.load(site, 4), cluster), alone.remembered(site) or {}) for site in own)


@pytest.mark.parametrize("kind", [FedAvg, Scaffold, FedPer])
@pytest.mark.parametrize("wrap", [lambda engine: engine, on_the_stack()], ids=["local", "stacked"])
def test_a_clusters_learning_rate_is_its_own(kind: Callable[[Training], Algorithm], wrap: Any) -> None:
    """As if it trained apart at that rate, while the other goes on as before."""
    sites, networks = clinics(*SIZES), {"odd": small(), "even": another()}
    stage = set_up(around(kind(SGD), networks, odd_and_even, {"even": 0.25}), networks, sites)
    together = play(stage, 2, wrap)
    for cluster, network, rate in (("odd", small(), 0.1), ("even", another(), 0.025)):
        own = {name: held for name, held in sites.items() if odd_and_even(name, 1) == cluster}
        alone = play_alone(kind(replace(SGD, optimiser=Optimiser(lr=rate))), own, network, 2, wrap)
        assert same(of(together.state, cluster), alone.outcome.state)


def machines(dtype: torch.dtype = torch.float32) -> dict[str, LiveNetwork]:
    """The three networks of PFedCDP; the middle one drops half of its units."""
    shape = {"classes": CLASSES, "channels": 1, "size": SIDE}
    names = {"high": "cnn_a", "medium": "cnn_b", "low": "cnn_c"}
    return {c: LiveNetwork(build_model(n, **shape, seed=Stream(1, (c,))).to(dtype)) for c, n in names.items()}


def by_thirds(site: SiteId, round: int) -> str:
    return ("high", "medium", "low")[(int(site[-1]) - 1) % 3]


@pytest.mark.parametrize("kind", [KINDS["fedavg"], KINDS["pfedcdp"]], ids=["fedavg", "pfedcdp"])
def test_three_architectures_in_one_run_on_both_engines(kind: Callable[[Training], Algorithm]) -> None:
    sites = clinics(12, 7, 16, 9, 5, 8, dtype=torch.float64)
    found: list[tuple[Stage, Outcome, Rounds, list[Letter]]] = []
    for wrap in (lambda engine: engine, on_the_stack()):
        networks = machines(torch.float64)
        stage = set_up(around(kind(SGD), networks, by_thirds), networks, sites)
        tap = Tap(wrap(LocalEngine(stage.runners)))
        rounds = stage.rounds(tap, 3)
        found.append((stage, rounds.play_all(), rounds, tap.letters))
    (local, outcome, rounds, letters), (stacked, other, _, _) = found
    assert_close(other.state, outcome.state, 1e-10)
    for site in sites:
        assert_close(stacked.memory.load(site, 4) or {}, local.memory.load(site, 4) or {}, 1e-10)
    notes = [n for row in as_json(stacked.journal.costs) if row["event"] == "round" for n in row["sites"].values()]
    assert {note["stack_size"] for note in notes} == {2}, "sites of a cluster train as one stack"
    for letter in letters:
        initial = local.algorithm.initials[by_thirds(letter.site, 1)]["model"]
        own = initial if kind is FedAvg else without_prefix(HEAD, initial)
        shapes = {name: tensor.shape for name, tensor in letter.answer.tensors["model"].items()}
        assert shapes == {name: tensor.shape for name, tensor in own.items()}
    predicted = rounds.collect_predictions(outcome, ["validation", "test"])
    model = "global" if kind is FedAvg else "personal"
    for site, held in sites.items():
        for part in ("validation", "test"):
            rows = predicted[site][f"{model}|{part}"]["probabilities"]
            assert rows.shape == (len(getattr(held, part)), CLASSES)
            torch.testing.assert_close(rows.double().sum(1), torch.ones(6, dtype=torch.float64))


def test_a_personal_model_is_evaluated_on_its_clusters_network() -> None:
    """What a site says it predicts is what that network predicts with the cluster's extractor and the site's head."""
    sites, networks = clinics(12, 7, 16), machines()
    stage = set_up(around(FedPer(SGD), networks, by_thirds), networks, sites)
    rounds = stage.rounds(LocalEngine(stage.runners), 2)
    outcome = rounds.play_all()
    predicted = rounds.collect_predictions(outcome, ["test"])
    for site, held in sites.items():
        cluster = by_thirds(site, 1)
        share, memory = of(outcome.state, cluster), of(stage.memory.load(site, 3), cluster)
        network = machines()[cluster]
        network.load_weights({"model": {**share["model"], **memory["head"]}, "buffers": {}})
        with torch.no_grad():
            wanted = torch.softmax(network.module.eval()(held.test.batch(torch.arange(6))[0]), -1)
        torch.testing.assert_close(predicted[site]["personal|test"]["probabilities"], wanted, rtol=0, atol=1e-6)


def test_an_update_of_another_clusters_shape_is_refused() -> None:
    """And its cluster stays as it was, while the others go on."""
    sites, networks = clinics(12, 7, 16), machines()
    stage = set_up(around(FedAvg(SGD), networks, by_thirds), networks, sites)
    runners = stage.runners
    replies: dict[SiteId, bytes] = {}

    def answer(site: SiteId, message: bytes) -> bytes | Failure:
        reply = call_or_failure(lambda: runners[site].answer(message))
        assert isinstance(reply, bytes)
        replies[site] = reply
        if site != "clinic-2":
            return reply
        mine, theirs = messages.decode(reply), messages.decode(replies["clinic-1"])
        return messages.encode(mine.fields, theirs.tensors)

    outcome = stage.rounds(MockEngine(answer), 1).play_all()
    row = next(row for row in as_json(stage.journal.costs) if row["event"] == "round")
    assert {site: note["outcome"] for site, note in row["sites"].items()} == {
        "clinic-1": "accepted",
        "clinic-2": "refused",
        "clinic-3": "accepted",
    }
    changed = {c: not same(of(outcome.state, c), stage.algorithm.initials[c]) for c in networks}
    assert changed == {"high": True, "medium": False, "low": True}


@pytest.mark.parametrize("cohort", [None, 1])
def test_a_cluster_of_which_nobody_was_heard_is_told(cohort: int | None) -> None:
    """Its sites failed, or none was asked; the quorum is met by the others, and its model stays."""
    networks = {"odd": small(), "even": another()}
    stage = set_up(around(FedAvg(SGD), networks, odd_and_even), networks, clinics(*SIZES))
    runners, told = stage.runners, dict[int, list[str]]()

    def answer(site: SiteId, message: bytes) -> bytes | Failure:
        round = messages.decode(message).fields["round"]
        lost = cohort is None and round == 2 and odd_and_even(site, round) == "even"
        return Failure("dead", "no power") if lost else call_or_failure(lambda: runners[site].answer(message))

    rounds = stage.rounds(MockEngine(answer), 3, cohort=cohort, cohort_order="cyclic", quorum=1)

    def watch(event: str, info: Mapping[str, Any]) -> None:
        if event == "round done":
            told[info["round"]] = info["clusters_without_updates"]

    rounds.watch = watch
    rounds.play_all()
    assert told == ({1: [], 2: ["even"], 3: []} if cohort is None else {1: ["even"], 2: ["odd"], 3: ["even"]})


def test_a_place_in_a_cluster_that_a_site_does_not_know_is_refused() -> None:
    networks = {"odd": small(), "even": another()}
    stage = set_up(around(FedAvg(SGD), networks, odd_and_even), networks, clinics(8, 8))
    runners = {
        name: SiteRunner(name, held, stage.algorithm, {"odd": networks["odd"]}, stage.memory)
        for name, held in stage.sites.items()
    }
    stage.rounds(LocalEngine(runners), 1).play_all()
    row = next(row for row in as_json(stage.journal.costs) if row["event"] == "round")
    assert [note["outcome"] for note in row["sites"].values()] == ["accepted", "refused"]
    assert "no model" in row["sites"]["clinic-2"]["why"]


@pytest.mark.parametrize("kind", [FedAvg, Scaffold, FedPer])
def test_the_order_of_arrival_does_not_matter(kind: Callable[[Training], Algorithm]) -> None:
    """L3, where the sites of two clusters take turns: all 24 orders of four replies."""
    networks = {"odd": small(), "even": another()}
    stage = set_up(around(kind(SGD), networks, odd_and_even), networks, clinics(*SIZES))
    runners, known = stage.runners, dict[bytes, bytes]()

    def answer(site: SiteId, message: bytes) -> bytes:
        if message not in known:
            known[message] = runners[site].answer(message)
        return known[message]

    orders: list[Any] = [None, *permutations(range(4))]
    found = {
        messages.hash_tensors(
            replace(stage, journal=RamJournal()).rounds(MockEngine(answer, order), 2).play_all().state
        )
        for order in orders
    }
    assert len(found) == 1
    assert len(known) == 8, "a second round with other bytes would have asked the sites anew"


def test_a_site_that_moves_starts_from_the_new_cluster_and_finds_its_own_again() -> None:
    """clinic-1 goes odd, even, even, odd: what it remembered of the first is untouched when it comes back."""

    def cluster_schedule(site: SiteId, round: int) -> str:
        return ("even" if round in (2, 3) else "odd") if site == "clinic-1" else odd_and_even(site, round)

    networks = {"odd": small(), "even": another()}
    stage = set_up(around(FedPer(SGD), networks, cluster_schedule), networks, clinics(*SIZES))
    tap = Tap(LocalEngine(stage.runners))
    kept: dict[int, Bundle] = {}
    save = stage.memory.save

    def noting(site: SiteId, round: int, memory: Bundle, oldest_snapshot: int) -> None:
        save(site, round, memory, oldest_snapshot)
        if site == "clinic-1":
            kept[round] = memory

    stage.memory.save = noting  # type: ignore[method-assign]
    stage.rounds(tap, 4).play_all()
    places = [stage.algorithm.cluster_from_broadcast(x.sent.tensors) for x in tap.letters if x.site == "clinic-1"]
    assert places == ["odd", "even", "even", "odd"]
    received = {(x.round, x.site): {k: g for k, g in x.sent.tensors.items() if k != "cluster"} for x in tap.letters}
    assert same(received[2, "clinic-1"], received[2, "clinic-2"]), "what the new cluster has"
    assert not same(received[2, "clinic-1"], received[2, "clinic-3"])
    inner = stage.algorithm.inner
    moved = stage.algorithm.models(tap.letters[4].sent.tensors, kept[1])["personal"]
    assert tap.letters[4].round == 2
    assert same(moved, inner.models(received[2, "clinic-1"], None)["personal"]), "it starts there as a newcomer"
    assert [[bool(of(kept[round], c)) for c in networks] for round in (1, 2, 3, 4)] == [
        [True, False],
        *3 * [[True, True]],
    ]
    assert same(of(kept[3], "odd"), of(kept[1], "odd"))
    assert not same(of(kept[3], "even"), of(kept[2], "even"))
    back = stage.algorithm.models({**received[4, "clinic-1"], "cluster": {"odd": torch.ones(())}}, kept[3])
    assert same(back["personal"], inner.models(received[4, "clinic-3"], of(kept[1], "odd"))["personal"])
    assert not same(of(kept[4], "odd"), of(kept[1], "odd"))


def test_nobody_moves_after_the_last_round() -> None:
    """A site is judged in the cluster it trained in, not in one that it would enter next."""
    networks = {"odd": small(), "even": another()}
    turns: ClusterSchedule = lambda site, round: "odd" if round % 2 else "even"  # noqa: E731
    for rounds, last in ((1, "odd"), (2, "even"), (3, "odd")):
        stage = set_up(around(FedPer(SGD), networks, turns), networks, clinics(8, 8))
        outcome = play(stage, rounds)
        assert stage.algorithm.cluster_of(outcome.state, "clinic-1") == last


def test_clusters_alike_but_for_dropout_are_not_one_stack() -> None:
    """Equal weights do not make equal networks."""
    sites = clinics(*SIZES, dtype=torch.float64)
    found = []
    for wrap in (lambda engine: engine, on_the_stack()):
        networks = {"odd": small(dtype=torch.float64), "even": small(dropout=0.5, dtype=torch.float64)}
        found.append(play(set_up(around(FedAvg(SGD), networks, odd_and_even), networks, sites), 2, wrap).state)
    assert_close(found[1], found[0], 1e-10)
    assert not same(of(found[0], "odd"), of(found[0], "even"))


def test_the_choice_of_an_engine_looks_at_the_largest_cluster() -> None:
    networks = machines()
    everyone = clinics(8, 8, 8, 8)
    for cluster_schedule, count in (
        ((lambda s, r: "low"), 4),
        ((lambda s, r: "high" if s == "clinic-1" else "low"), 3),
    ):
        stage = set_up(around(FedAvg(SGD), networks, cluster_schedule), networks, everyone)
        choice = choose_engine(stage.runners, stage.algorithm, stage.algorithm.init(stage.federation))
        assert f"of {count} sites took" in choice.why
