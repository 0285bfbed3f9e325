"""FedPer: a shared extractor, a head of one's own, which no byte that leaves a site tells of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from polyclinic.algorithms.base import Algorithm, with_prefix, without_prefix
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.personalisation.fedper import HEAD, FedPer
from polyclinic.algorithms.personalisation.pfedcdp import PFedCDP
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.types import Bundle, SiteId, Tensors
from polyclinic.data.examples import Images
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.transforms.bit_packing import packed_size
from polyclinic.privacy.transforms.clip import Clip
from polyclinic.privacy.transforms.noise import Noise
from polyclinic.privacy.transforms.quantise import VALUES, Quantise
from polyclinic.storage import messages as wire
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.network import copy_module_weights
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import (
    Weighting,
    clinics,
    federation,
    plain_training,
    play,
    same,
    small,
    tapped,
)
from tests.laws.test_stacked import SIZES, same_on_both, together

SGD = Training(Optimiser(lr=0.1), batch=5)
MOMENTUM = Training(Optimiser(lr=0.1, momentum=0.9), batch=5, epochs=2)


@pytest.mark.parametrize("training", [SGD, MOMENTUM, Training(Optimiser("adam", lr=0.01), batch=5)])
def test_one_site_is_ordinary_training(training: Training) -> None:
    """The extractor comes back from the server, the head from the site's own memory: together, nothing is lost."""
    sites, network, each = clinics(23), small(), training.epochs or 1
    played = play(FedPer(training), sites, network, 3)
    train, kept = sites["clinic-1"].train, played.remembered("clinic-1")
    assert isinstance(train, Images)
    assert kept is not None
    periods = [range(round * each, (round + 1) * each) for round in range(3)]
    whole = {"model": {**played.model, **kept["head"]}, "buffers": played.outcome.state["buffers"]}
    assert same(whole, plain_training(network, train, training, "clinic-1", periods))


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_in_the_first_round_sites_do_what_they_do_in_fedavg(weights: Weighting) -> None:
    training = replace(MOMENTUM, weights=weights)
    for rounds, equal in ((1, True), (2, False)):
        fedper, fedavg = (play(kind(training), clinics(12, 7, 16), small(), rounds) for kind in (FedPer, FedAvg))
        mine, theirs = fedper.outcome.state, fedavg.outcome.state
        assert same({"model": mine["model"]}, {"model": without_prefix(HEAD, theirs["model"])}) is equal
        assert same({"buffers": mine["buffers"]}, {"buffers": theirs["buffers"]}) is equal


def test_the_extractor_is_the_mean_by_examples_and_heads_stay_apart() -> None:
    played, letters = tapped(FedPer(SGD), clinics(12, 7, 16), small(), 2)
    last = [letter.answer.tensors["model"] for letter in letters if letter.round == 2]
    for name, tensor in played.model.items():
        mean = sum(n / 35 * update[name].double() for n, update in zip((12, 7, 16), last, strict=True))
        torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=1e-7)
    heads = [memory["head"] for site in clinics(12, 7, 16) if (memory := played.remembered(site))]
    assert len({wire.hash_tensors({"head": each}) for each in heads}) == 3
    first = with_prefix(HEAD, copy_module_weights(small().module)["model"])
    assert same({"head": played.outcome.state["head"]}, {"head": first}), "the server's is as it was drawn"


def test_a_site_predicts_with_the_extractor_of_all_and_its_own_head() -> None:
    played = play(FedPer(SGD), clinics(12, 7), small(), 2)
    for site in ("clinic-1", "clinic-2"):
        memory = played.remembered(site)
        assert memory is not None
        (name, found), *others = FedPer(SGD).models(played.outcome.state, memory).items()
        assert (name, others) == ("personal", [])
        assert same(found, {"model": {**played.model, **memory["head"]}, "buffers": played.outcome.state["buffers"]})


def test_a_site_that_comes_late_starts_with_the_common_head() -> None:
    state = FedPer(SGD).init(federation(FedPer(SGD), clinics(8), small())[0])
    found = FedPer(SGD).models(FedPer(SGD).broadcast(state, "late"), None)["personal"]
    assert same(found, copy_module_weights(small().module))


@pytest.mark.parametrize(
    "algorithm",
    [FedPer(SGD), PFedCDP(SGD, keep=0.3), PFedCDP(SGD, variant="paper", threshold=1e-4)],
    ids=["fedper", "pfedcdp", "pfedcdp as printed"],
)
def test_it_stacks_with_dropout(algorithm: Algorithm) -> None:
    """Means that teachers in a stack drop nothing either."""
    algorithm = replace(algorithm, training=Training(Optimiser("sgd", 0.1), batch=4, epochs=2))
    sites = clinics(*SIZES, dtype=torch.float64)
    played = same_on_both(algorithm, sites, 1e-10, torch.float64, dropout=0.5)
    assert together(played) == {len(SIZES)}
    assert play(algorithm, sites, small(dtype=torch.float64), 3).sha256 != played.sha256


class Diary(RamMemory):
    """Keeps all that sites ever remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Bundle] = []

    def save(self, site: SiteId, round: int, memory: Bundle, oldest_snapshot: int) -> None:
        self.all.append(memory)
        super().save(site, round, memory, oldest_snapshot)


def crossing(algorithm: Algorithm, stages: Sequence[UpdateTransform]) -> tuple[list[bytes], list[Bundle], Bundle]:
    """Every byte that leaves sites in three rounds and their evaluation; what they remembered; the last state."""
    network, diary, crossed = small(), Diary(), list[bytes]()
    known, sites = federation(algorithm, clinics(12, 9), network)
    runners = {n: SiteRunner(n, held, algorithm, network, diary, stages) for n, held in sites.items()}

    def answer(site: SiteId, message: bytes) -> bytes:
        crossed.append(runners[site].answer(message))
        return crossed[-1]

    rounds = Rounds(known, algorithm, MockEngine(answer), RoundOptions(3), RamJournal(), transforms=stages)
    outcome = rounds.play_all()
    rounds.collect_predictions(outcome, ["train", "validation", "test"])
    return crossed, diary.all, outcome.state


def traces(tensors: Tensors) -> Iterator[bytes]:
    """The tensors' rows as they lie in memory: parts of at least three numbers."""
    for tensor in tensors.values():
        rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[None]
        yield from (row.contiguous().numpy().tobytes() for row in rows)


STAGES: dict[str, list[UpdateTransform]] = {
    "as they are": [],
    "clipped, noised and quantised": [Clip(0.5, noise=0.01), Noise(0.01), Quantise(bits=6)],
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize(
    "algorithm",
    [FedPer(SGD), PFedCDP(SGD), PFedCDP(SGD, variant="paper", threshold=1e-4)],
    ids=["fedper", "pfedcdp", "pfedcdp as printed"],
)
def test_no_byte_of_a_head_leaves_a_site(algorithm: Algorithm, stages: list[UpdateTransform]) -> None:
    messages, remembered, state = crossing(algorithm, stages)
    assert (len(messages), len(remembered)) == (2 * (3 + 1), 2 * 3)
    first, size = copy_module_weights(small().module), sum(t.numel() for t in state["model"].values())
    heads = [with_prefix(HEAD, first["model"]), *(memory["head"] for memory in remembered)]
    for message in messages:
        assert HEAD.encode() not in message
        assert not any(trace in message for each in heads for trace in traces(each))
        sent = wire.decode(message).tensors
        assert set(sent) in ({"model", "buffers"}, {"predictions"})
        if stages and "model" in sent:
            assert sent["model"][VALUES].numel() == packed_size(6, size)
        elif "model" in sent:
            assert sent["model"].keys() == without_prefix(HEAD, first["model"]).keys() == state["model"].keys()


def test_it_would_be_found_if_it_did() -> None:
    messages, _, _ = crossing(FedAvg(SGD), [])
    sent = wire.decode(messages[0]).tensors["model"]
    assert HEAD.encode() in messages[0]
    assert all(trace in messages[0] for trace in traces(with_prefix(HEAD, sent)))
