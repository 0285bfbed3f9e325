"""Messages that are handed over within a process end in the same bits as messages that travel as bytes."""

from __future__ import annotations

from typing import Any

import pytest

from polyclinic.algorithms import ALGORITHMS
from polyclinic.core import Optimiser, Training
from polyclinic.engines.local import attempt
from polyclinic.engines.mock import MockEngine
from polyclinic.wire import ALIGNMENT
from tests.laws.bench import Played, clinics, play, small


def over_bytes(engine: Any) -> MockEngine:
    return MockEngine(lambda site, data: attempt(engine.runners[site], data))


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
    return [note for row in played.journal.costs if row["event"] == "round" for note in row["sites"].values()]
