"""Messages that are handed over within a process end in the same bits as messages that travel as bytes."""

from __future__ import annotations

from typing import Any

import pytest

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Site, Work
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.federation.engines.local import WorkerEngine, call_or_failure
from polyclinic.storage.messages import ALIGNMENT
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import Played, as_json, clinics, play, small


def over_bytes(engine: Any) -> MockEngine:
    return MockEngine(lambda site, data: call_or_failure(lambda: engine.runners[site].answer(data)))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_ends_in_the_same_bits_and_counts_the_same_bytes(name: str) -> None:
    algorithm = ALGORITHMS[name](training=Training(Optimiser("sgd", 0.1), batch=4))
    sites = clinics(12, 7, 16)
    handed, sent = play(algorithm, sites, small(), 2), play(algorithm, sites, small(), 2, over_bytes)
    assert handed.sha256 == sent.sha256
    for one, other in zip(notes(handed), notes(sent), strict=True):
        assert one["down"] == other["down"]
        # A reply says how long it took, in as many digits as that has.
        assert abs(one["up"] - other["up"]) <= ALIGNMENT


def notes(played: Played) -> list[dict[str, Any]]:
    return [note for row in as_json(played.journal.costs) if row["event"] == "round" for note in row["sites"].values()]


class Mistaken(FedAvg):
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        raise ZeroDivisionError("a mistake of the author's")


@pytest.mark.parametrize("workers", [False, True])
def test_a_mistake_in_an_algorithm_surfaces_wherever_it_runs(workers: bool) -> None:
    engines: list[WorkerEngine] = []

    def engine(local: Any) -> Any:
        if workers:
            engines.append(WorkerEngine(local.runners, 1))
        return engines[0] if workers else local

    try:
        with pytest.raises((ZeroDivisionError, RuntimeError), match="a mistake of the author's"):
            play(Mistaken(Training(Optimiser("sgd", 0.1), batch=4)), clinics(8, 8), small(), 1, engine)
    finally:
        for one in engines:
            one.close()
