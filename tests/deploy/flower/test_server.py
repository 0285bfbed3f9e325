"""The engine that plays rounds with sites elsewhere, its messages handed over in memory."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy.flower.server import MAX_ATTEMPTS
from polyclinic.deploy.serve import run_deployed
from polyclinic.federation.engines import RemoteExecution
from polyclinic.federation.mailbox import Outbox
from polyclinic.storage import messages
from tests.deploy.example_sites import EVERY, desks, recipe, simulation
from tests.deploy.memory_grid import SITES, MemoryGrid, echo, engine_of, orders, said


def failed(site: SiteId, kind: str, why: object) -> Callable[[bytes], bytes]:
    return lambda _: messages.encode({"run": "r", "site": site, "failure": kind, "why": why}, {})


def test_every_site_gets_its_own_message_and_its_reply_comes_back_bit_for_bit() -> None:
    sent = orders(size=2_000_000)
    found = said(engine_of({site: echo(site) for site in SITES}), sent)
    assert found.keys() == set(SITES)
    for site, reply in found.items():
        assert reply == echo(site)(sent[site])
        assert messages.decode(reply).fields["by"] == site


def test_messages_are_encoded_once_and_only_when_sent() -> None:
    asked: list[SiteId] = []

    class Counting(dict[SiteId, bytes]):
        def __getitem__(self, site: SiteId) -> bytes:
            asked.append(site)
            return super().__getitem__(site)

    said(engine_of({site: echo(site) for site in SITES}), Counting(orders()))
    assert asked == list(SITES)


@pytest.mark.parametrize(("kind", "expected"), [("refused", "refused"), ("error", "error"), ("a lie", "error")])
def test_a_refusal_by_a_site_is_a_failure_with_its_sentence(kind: str, expected: str) -> None:
    engine = engine_of({"harbour": failed("harbour", kind, "not\nallowed \x1b[31mhere"), "hill": echo("hill")})
    found = said(engine, {site: data for site, data in orders().items() if site != "lake"})
    assert found["harbour"] == Failure(cast(Any, expected), "not allowed  [31mhere")
    assert isinstance(found["hill"], bytes)


def test_a_failure_without_words_or_with_far_too_many_is_still_one() -> None:
    engine = engine_of({"harbour": failed("harbour", "error", ["x"] * 9), "hill": failed("hill", "error", "x" * 9999)})
    found = said(engine, {site: data for site, data in orders().items() if site != "lake"})
    assert found.keys() == {"harbour", "hill"}
    assert all(isinstance(answer, Failure) and 0 < len(answer.sentence) <= 500 for answer in found.values())


def test_a_site_that_is_away_is_dead_and_the_others_are_heard() -> None:
    engine = engine_of({site: echo(site) for site in SITES}, patience=0.5)
    cast(MemoryGrid, engine.link).away.add("hill")
    found = said(engine, orders())
    assert isinstance(found["hill"], Failure)
    assert found["hill"].kind == "dead"
    assert isinstance(found["harbour"], bytes)
    assert isinstance(found["lake"], bytes)


def test_who_has_been_away_for_long_keeps_no_later_round_waiting() -> None:
    engine = engine_of({site: echo(site) for site in SITES}, patience=1.0)
    cast(MemoryGrid, engine.link).away.add("hill")
    seconds = []
    for _ in range(3):
        begun = time.monotonic()
        assert said(engine, orders())["hill"].kind == "dead"
        seconds.append(time.monotonic() - begun)
    assert seconds[0] >= 1.0
    assert max(seconds[1:]) < 0.5
    cast(MemoryGrid, engine.link).away.clear()
    assert all(isinstance(answer, bytes) for answer in said(engine, orders()).values())


def test_silence_is_late_at_the_deadline_and_not_before() -> None:
    engine = engine_of({site: echo(site) for site in SITES})
    cast(MemoryGrid, engine.link).lost.add("lake")
    begun = time.monotonic()
    found = said(engine, orders(), deadline=1.0)
    assert found["lake"] == Failure("late", "no reply within 1 s")
    assert 1.0 <= time.monotonic() - begun < 3
    assert isinstance(found["hill"], bytes)


def test_a_site_that_comes_back_within_the_round_gets_its_message_again() -> None:
    """C5: its process died with the message; the new one answers the same bytes."""
    engine = engine_of({site: echo(site) for site in SITES}, patience=10)
    grid = cast(MemoryGrid, engine.link)
    grid.lost.add("hill")

    def restart() -> None:
        grid.came["hill"] = "again"
        while len(grid.names) < 4:
            time.sleep(0.01)
        grid.lost.discard("hill")

    told: list[str] = []
    engine.report = told.append
    threading.Timer(0.3, restart).start()
    found = said(engine, orders())
    assert found["hill"] == echo("hill")(orders()["hill"])
    assert len(grid.names) == 4
    (sentence,) = told
    assert re.fullmatch(
        "hill went away while at work and is back: it gets the message of [01] s ago once more", sentence
    )


def test_a_site_that_dies_of_every_attempt_is_given_up() -> None:
    engine = engine_of({"hill": echo("hill")}, patience=10)
    grid = cast(MemoryGrid, engine.link)
    grid.lost.add("hill")
    visits: list[str] = []

    def come_and_go() -> str:
        visits.append("")
        return f"{len(visits)}"

    class Restless(dict[SiteId, str]):
        def items(self) -> Any:
            return [("hill", come_and_go())]

    grid.came = Restless()
    found = said(engine, {"hill": orders()["hill"]}, deadline=None)
    assert found["hill"] == Failure("dead", f"it went away {MAX_ATTEMPTS} times while at work on this")
    assert len(grid.names) == MAX_ATTEMPTS


def test_an_outbox_travels() -> None:
    fields = {site: {"run": "r", "round": 1, "site": site} for site in SITES}
    outbox = Outbox(fields, lambda _: {"model": {"w": torch.ones(3)}})
    found = dict(engine_of({site: echo(site) for site in SITES}).exchange(1, outbox, 20))
    assert {messages.decode(cast(bytes, reply)).fields["by"] for reply in found.values()} == set(SITES)
    assert outbox.sizes.keys() == set(SITES)


NOISE_BY_SITE: dict[str, Any] = {"cohort": 2, "privacy": {"epsilon": 8, "delta": 1e-3, "randomness": "seed"}}


@pytest.mark.parametrize("case", [*EVERY, "noise by site"])
def test_every_algorithm_ends_in_the_bits_of_the_simulation(case: str, home: Path, tmp_path: Path) -> None:
    """L4: enrolment, five rounds, test and farewell of three sites, each message in bytes."""
    found = recipe(**EVERY.get(case, NOISE_BY_SITE))
    engine = engine_of({site: desk.answer_message for site, desk in desks(home, f"flower {case}").items()})
    result = run_deployed(found, RemoteExecution(engine, "flower", 60), SITES, tmp_path / "run")
    assert result.summary.sha256 == simulation(found, home).run().summary.sha256
    assert result.summary.rounds == 5
    assert len(cast(MemoryGrid, engine.link).names) >= 3 * (1 + 1 + 1 + 1) + 5 * (found.cohort or 3)
