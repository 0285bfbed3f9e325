"""Local, Single, Cross-site and Centralised: what trains where, and what travels."""

from __future__ import annotations

import pytest
import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.baselines.centralised import Centralised
from polyclinic.algorithms.baselines.cross_site import CrossSite
from polyclinic.algorithms.baselines.local import Local
from polyclinic.algorithms.baselines.one_shot import OneShot
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.names import POOLED
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.types import Bundle, SiteId
from polyclinic.data.examples import Images
from polyclinic.federation.engines import Engine
from polyclinic.runs.experiment import pool_sites
from polyclinic.training.network import LiveNetwork
from tests.laws.bench import Letter, Played, Tap, as_json, clinics, plain_training, play, same, small

SITES = clinics(12, 7, 9)
TRAINING = Training(Optimiser("adam", lr=0.01), batch=5)
ROUNDS = 3


class Watched:
    """A finished run, every letter of it, and the final evaluation."""

    def __init__(self, algorithm: Algorithm, network: LiveNetwork, evaluate_every: int = 1) -> None:
        self.letters: list[Letter] = []
        self.played: Played = play(algorithm, SITES, network, ROUNDS, self.tap, evaluate_every=evaluate_every)
        self.training = list(self.letters)
        self.predictions = self.played.rounds.collect_predictions(self.played.outcome, ["test"])

    def tap(self, engine: Engine) -> Engine:
        return Tap(engine, self.letters)

    def models_down(self, site: SiteId) -> list[int]:
        return [letter.round for letter in self.training if letter.site == site and letter.sent.tensors]

    def models_up(self, site: SiteId) -> list[int]:
        return [letter.round for letter in self.training if letter.site == site and letter.answer.tensors]

    def remembered(self, site: SiteId) -> Bundle:
        memory = self.played.remembered(site)
        assert memory is not None
        return {kind: memory[kind] for kind in ("model", "buffers")}


def alone(site: SiteId) -> Bundle:
    """The site's own images, one optimiser over all rounds, an ordinary loop."""
    train = SITES[site].train
    assert isinstance(train, Images)
    return plain_training(small(), train, TRAINING, site, [range(ROUNDS)])


def predicted(weights: Bundle, site: SiteId) -> torch.Tensor:
    network, test = small(), SITES[site].test
    network.load_weights(weights)
    with torch.no_grad():
        return torch.softmax(network.module.eval()(test.batch(torch.arange(len(test)))[0]), -1)


def test_local_hands_the_start_out_once_and_nothing_ever_comes_back() -> None:
    watched = Watched(Local(TRAINING), small())
    assert Local(TRAINING).exchanges() == ()
    for site in SITES:
        assert watched.models_down(site) == [1]
        assert watched.models_up(site) == []
        assert same(watched.remembered(site), alone(site))


def test_local_predicts_with_the_sites_own_model_and_sends_none_to_do_so() -> None:
    watched = Watched(Local(TRAINING), small())
    evaluation = watched.letters[len(watched.training) :]
    assert len(evaluation) == len(SITES)
    assert not any(letter.sent.tensors for letter in evaluation)
    for site in SITES:
        assert set(watched.predictions[site]) == {"personal|test"}
        found = watched.predictions[site]["personal|test"]["probabilities"]
        torch.testing.assert_close(found, predicted(alone(site), site))


def test_single_downloads_once_uploads_once_and_averages_what_local_would_have() -> None:
    watched = Watched(OneShot(TRAINING), small())
    for site in SITES:
        assert watched.models_down(site) == [1]
        assert watched.models_up(site) == [ROUNDS]
    total = sum(len(held.train) for held in SITES.values())
    models = {site: alone(site)["model"] for site in SITES}
    for name, found in watched.played.model.items():
        mean = sum(models[site][name].double() * len(SITES[site].train) / total for site in SITES)
        torch.testing.assert_close(found.double(), mean, rtol=0, atol=1e-6)
    assert all(set(watched.predictions[site]) == {"global|test"} for site in SITES)


def test_single_in_one_round_is_one_shot_fedavg() -> None:
    single, fedavg = (play(kind(TRAINING), SITES, small(), 1) for kind in (OneShot, FedAvg))
    assert same(single.weights, fedavg.weights)


def test_singles_bytes_are_one_model_each_way_per_site() -> None:
    """Beside it, only envelopes: a few hundred bytes a message."""
    network = small()
    watched = Watched(OneShot(TRAINING), network, evaluate_every=0)
    model = sum(t.nbytes for group in network.live.values() for t in group.values())
    envelope = 2048
    for way in ("up", "down"):
        for site in SITES:
            rounds = [
                row["sites"][site][way] for row in as_json(watched.played.journal.costs) if row["event"] == "round"
            ]
            assert model <= sum(rounds) <= model + ROUNDS * envelope


def test_cross_site_tests_every_sites_model_everywhere() -> None:
    watched = Watched(CrossSite(TRAINING), small())
    for tested in SITES:
        assert watched.models_down(tested) == [1]
        assert watched.models_up(tested) == [ROUNDS]
        assert set(watched.predictions[tested]) == {f"{trained}|test" for trained in SITES}
        for trained in SITES:
            found = watched.predictions[tested][f"{trained}|test"]["probabilities"]
            torch.testing.assert_close(found, predicted(alone(trained), tested))


def test_cross_sites_diagonal_is_local() -> None:
    cross, local = Watched(CrossSite(TRAINING), small()), Watched(Local(TRAINING), small())
    for site in SITES:
        diagonal, own = cross.predictions[site][f"{site}|test"], local.predictions[site]["personal|test"]
        assert torch.equal(diagonal["probabilities"], own["probabilities"])


def test_centralised_trains_in_one_place_and_is_tested_at_every_hospital() -> None:
    watched = Watched(Centralised(TRAINING), small())
    assert {letter.site for letter in watched.training} == {POOLED}
    everything = pool_sites(SITES).train
    assert isinstance(everything, Images)
    assert len(everything) == sum(len(held.train) for held in SITES.values())
    expected = plain_training(small(), everything, TRAINING, POOLED, [range(ROUNDS)])
    assert same(watched.played.outcome.state, expected)
    assert set(watched.predictions) == set(SITES)
    for site in SITES:
        found = watched.predictions[site]["global|test"]["probabilities"]
        torch.testing.assert_close(found, predicted(expected, site))


@pytest.mark.parametrize("kind", [FedAvg, OneShot, Local, CrossSite])
def test_only_the_pooled_yardstick_pools(kind: type[Algorithm]) -> None:
    assert Centralised.pooled
    assert not kind.pooled
    assert POOLED not in play(kind(TRAINING), SITES, small(), 1).rounds.trainers
