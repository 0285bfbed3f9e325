"""C2: of ten sites some die before, during or after their upload; the run is the one planned with who is left."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic import Recipe
from polyclinic.core.errors import RoundFailed
from polyclinic.core.types import SiteId
from polyclinic.deploy.flower.server import FlowerEngine
from polyclinic.deploy.serve import run_deployed
from polyclinic.evaluation.summary import RunSummary
from polyclinic.federation import rounds
from polyclinic.federation.engines import RemoteExecution
from polyclinic.storage import messages
from polyclinic.storage.ledger import Ledger
from tests.crash.runs import RAM
from tests.deploy.example_sites import desks, recipe, simulation, write_hospitals
from tests.deploy.memory_grid import MemoryGrid

TEN = tuple(f"site-{number}" for number in range(10))
WAYS = ("before", "during", "after")
FATAL = 2
"""The round in which they die."""
QUICK: dict[str, Any] = {
    "algorithm": "scaffold",
    "rounds": 3,
    "model__name": "linear",
    "evaluate__every": 0,
    "quorum": 1,
}
"""With something that sites remember, and told to go on without whoever dies."""


class Mortal(MemoryGrid):
    """Sites that end as they answer the order of one round: before they read it, when all is done but nothing has
    left, or just after their reply has."""

    def __init__(self, home: Path, state: str, ends: Mapping[SiteId, str]) -> None:
        self.desks = desks(home, state, TEN)
        super().__init__({site: desk.answer_message for site, desk in self.desks.items()})
        self.ends = dict(ends)

    def reply(self, name: str) -> bytes | None:
        site, data = self.sent[name]
        way = self.ends.get(site, "") if fatal(data) else ""
        reply = None if way == "before" else super().reply(name)
        if way:
            self.disconnect(site)
        return None if way == "during" else reply

    def disconnect(self, site: SiteId) -> None:
        """End a site's connection, which its own process notices when it connects again."""
        self.away.add(site)
        self.desks[site].note_absence()


def fatal(data: bytes) -> bool:
    fields = messages.decode(data).fields
    return bool(fields["purpose"] == "train" and fields["round"] == FATAL)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        write_hospitals(Path(folder), TEN)
        yield Path(folder)


@pytest.fixture
def out() -> Iterator[Path]:
    """An empty folder for a run; nobody needs to wait for a disk."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> str:
    return str(simulation(recipe(**QUICK), home).run().summary.sha256)


def planned(found: Recipe, home: Path, cohorts: Sequence[Sequence[SiteId]], patch: pytest.MonkeyPatch) -> str:
    """The end of the run in which each round is asked of these sites from the first."""
    with patch.context() as only:
        only.setattr(rounds, "draw_cohort", lambda sites, rules, round: list(cohorts[round - 1]))
        return str(simulation(found, home).run().summary.sha256)


def played(found: Recipe, grid: Mortal, folder: Path) -> RunSummary:
    return run_deployed(found, RemoteExecution(FlowerEngine(grid, 0.0), "flower", 60), TEN, folder).summary


def those_that_end(k: int, first: int) -> dict[SiteId, str]:
    """Every third site or so, each in another way than the one before it."""
    return {TEN[(3 * number + first) % 10]: WAYS[(number + first) % 3] for number in range(k)}


@pytest.mark.parametrize(("k", "first"), [(0, 0), (1, 0), (1, 1), (1, 2), (2, 2), (4, 4), (7, 7), (9, 9)])
def test_who_dies_leaves_the_run_that_was_planned_without_it(
    k: int, first: int, home: Path, undisturbed: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ends = recipe(**QUICK), those_that_end(k, first)
    assert len(ends) == k
    grid = Mortal(home, f"churn {k} {first}", ends)
    result = played(found, grid, out)
    assert grid.away == set(ends)
    heard = [site for site in TEN if ends.get(site, "after") == "after"]
    alive = [site for site in TEN if site not in ends]
    assert result.sha256 == planned(found, home, [TEN, heard, alive], monkeypatch)
    assert (result.sha256 == undisturbed) == (k == 0), "it must have mattered"


def test_below_quorum_the_round_fails_closed_and_goes_on_when_they_are_back(
    home: Path, undisturbed: str, out: Path
) -> None:
    found, ends = recipe(**{**QUICK, "quorum": 7}), those_that_end(6, 0)
    grid = Mortal(home, "quorum", ends)
    with pytest.raises(RoundFailed, match="6 acceptable updates where the quorum is 7"):
        played(found, grid, out)
    events = [row["event"] for row in Ledger(out / "ledger.jsonl").read()]
    assert (events.count("round"), events[-1]) == (1, "failed round")
    assert not (out / "result.json").exists()
    grid.away, grid.ends = set(), {}
    assert played(found, grid, out).sha256 == undisturbed


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_who_comes_back_a_round_later_was_planned_for_then(
    algorithm: str, home: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did in the round that never heard of it counts for nothing."""
    found, ends = recipe(**{**QUICK, "algorithm": algorithm, "rounds": 4}), those_that_end(6, 0)
    grid = Mortal(home, f"back {algorithm}", ends)

    def watch(event: str, info: Mapping[str, Any]) -> None:
        if event == "round" and info["round"] == FATAL + 1:
            grid.away = set()

    engine = RemoteExecution(FlowerEngine(grid, 0.0), "flower", 60)
    result = run_deployed(found, engine, TEN, out, watch).summary
    heard = [site for site in TEN if ends.get(site, "after") == "after"]
    assert result.sha256 == planned(found, home, [TEN, heard, TEN, TEN], monkeypatch)
