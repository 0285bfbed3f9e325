"""A connected site that never answers: it is said, and with a quorum the round goes on without it."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy.flower.silence import SilenceRule, SilenceWatch
from tests.deploy.memory_grid import SITES, MemoryGrid, echo, engine_of, orders, said


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(rule: SilenceRule) -> tuple[SilenceWatch, Clock, list[str]]:
    clock, told = Clock(), list[str]()

    def note(_: SiteId, sentence: str) -> None:
        told.append(sentence)

    return SilenceWatch(rule, note, clock), clock, told


def test_a_silent_site_is_said_ever_more_rarely() -> None:
    watch, clock, told = watched(SilenceRule())
    clock.now += 0.3
    watch.note_answer()
    for _ in range(3600):
        clock.now += 1
        watch.report_silence(["dune"])
    assert told[0] == "dune has been at work for 60.3 s; the others took 0.3 s"
    assert len(told) == 6, "after 1, 2, 4, 8, 16 and 32 minutes"
    assert not watch.is_over(), "without a quorum a run waits for every site"


def test_slow_sites_are_not_silent_ones() -> None:
    """Where the others take half an hour, one that takes an hour is not said."""
    watch, clock, told = watched(SilenceRule(quorum=1))
    clock.now += 1800
    watch.note_answer()
    clock.now += 1800
    watch.report_silence(["dune"])
    assert not told
    assert not watch.is_over()


def test_with_a_quorum_nobody_is_waited_for_for_ever() -> None:
    """Twenty times as long as the slowest of those that answered, but at least ten minutes."""
    for slowest, limit in ((0.3, 600.0), (60.0, 1200.0)):
        watch, clock, told = watched(SilenceRule(quorum=2))
        begun = clock.now
        clock.now += slowest
        watch.note_answer()
        clock.now = begun + 10 * limit
        assert not watch.is_over(), "one answer is no quorum"
        clock.now = begun + slowest
        watch.note_answer()
        clock.now = begun + limit - 1
        assert not watch.is_over()
        watch.report_silence(["dune"])
        assert "the round goes on without it after" in told[0]
        clock.now = begun + limit
        assert watch.is_over()


def test_a_round_with_a_quorum_goes_on_without_a_site_that_is_lost() -> None:
    """Its message was taken, and no answer ever comes; the others' answers are there long before."""
    engine, told = engine_of({site: echo(site) for site in SITES}), list[str]()
    engine.silence = SilenceRule(quorum=2, times=2.0, least=2.5, notice=1.0)
    engine.report_silence = lambda _site, sentence: told.append(sentence)
    cast(MemoryGrid, engine.link).lost.add("lake")
    found = said(engine, orders(), deadline=None)
    assert isinstance(found["lake"], Failure)
    assert found["lake"].kind == "late"
    assert all(isinstance(found[site], bytes) for site in SITES if site != "lake")
    assert told
    assert told[0].startswith("lake has been at work for ")
