"""L3: replies may come in any order; the state's bytes may not depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.scaffold import Scaffold
from polyclinic.core.jobs import Update
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.types import SiteId
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.storage import messages as wire
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import clinics, federation, small

TRAINING = Training(Optimiser(lr=0.1), batch=5)


class Replay:
    """Real sites that work once for each different message, and repeat themselves after that."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, network, memory = algorithm, small(), RamMemory()
        self.federation, sites = federation(algorithm, clinics(12, 7, 16, 9, 5), network)
        self.runners = {n: SiteRunner(n, held, algorithm, network, memory) for n, held in sites.items()}
        self.replies: dict[bytes, bytes] = {}

    def answer(self, site: SiteId, message: bytes) -> bytes:
        if message not in self.replies:
            self.replies[message] = self.runners[site].answer(message)
        return self.replies[message]

    def play(self, arrival: Sequence[int] | None, rounds: int = 2) -> str:
        engine = MockEngine(self.answer, arrival)
        return wire.hash_tensors(
            Rounds(self.federation, self.algorithm, engine, RoundOptions(rounds), RamJournal()).play_all().state
        )


@pytest.mark.parametrize("algorithm", [FedAvg(TRAINING), Scaffold(TRAINING)])
def test_all_120_arrival_orders_of_five_sites_give_the_same_bytes(algorithm: Algorithm) -> None:
    replay = Replay(algorithm)
    expected = replay.play(arrival=None)
    worked = len(replay.replies)
    found = [replay.play(order) for order in permutations(range(5))]
    assert len(found) == 120
    assert set(found) == {expected}
    assert len(replay.replies) == worked == 10, "a second round with other bytes would have asked the sites anew"


def test_the_order_of_summation_would_have_mattered() -> None:
    """The law is not empty: the same replies, added up in another order, give other bytes."""
    replay = Replay(FedAvg(TRAINING))
    replay.play(arrival=None, rounds=1)
    messages = [wire.decode(reply) for reply in replay.replies.values()]
    state = replay.federation.initial
    updates = [Update(m.tensors, m.fields["examples"], m.fields["site"]) for m in messages]
    digests = {wire.hash_tensors(replay.algorithm.aggregate(state, order)) for order in permutations(updates)}
    assert len(digests) > 1
