"""W1: what is malformed is refused by name, and the round goes on without it, as if that site had not been there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from polyclinic.core.errors import Refused, RoundFailed
from polyclinic.core.jobs import Failure
from polyclinic.core.rng import Stream
from polyclinic.core.types import SiteId
from polyclinic.federation import update_check
from polyclinic.federation.update_check import check_report
from polyclinic.storage import messages
from tests.wire.frames import REGISTERED, asked_round, expected, honest, notes, played, weights
from tests.wire.malformed import MALFORMED, Make, fields

CASES = [pytest.param(kind, make, id=name) for name, (kind, make) in MALFORMED.items()]


def answer_honestly(site: SiteId, data: bytes) -> bytes:
    return honest(site, asked_round(data)).frame


def sending(bad: SiteId, make: Make) -> Any:
    def answer(site: SiteId, data: bytes) -> bytes:
        reply = honest(site, asked_round(data))
        return make(reply) if site == bad else reply.frame

    return answer


@cache
def state_without(bad: SiteId) -> str:
    outcome, _ = played(answer_honestly, others(bad))
    return messages.hash_tensors(outcome.state)


def others(bad: SiteId) -> Mapping[SiteId, int]:
    return {site: n for site, n in REGISTERED.items() if site != bad}


def test_the_honest_reply_is_accepted() -> None:
    """Otherwise everything below would be refused for nothing."""
    reply = update_check.check_update(honest().frame, expected())
    assert messages.hash_tensors(reply.update.tensors) == messages.hash_tensors(honest().tensors)
    assert check_report(reply.fields, expected()) == honest().fields["report"]
    _, journal = played(answer_honestly)
    assert {site: note["outcome"] for site, note in notes(journal).items()} == dict.fromkeys(REGISTERED, "accepted")
    assert len(MALFORMED) >= 24


@pytest.mark.parametrize(("kind", "make"), CASES)
def test_refused_by_name(kind: str, make: Make) -> None:
    with pytest.raises(Refused) as refusal:
        update_check.check_update(make(honest()), expected())
    assert refusal.value.kind == kind
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("bad", REGISTERED)
@pytest.mark.parametrize(("kind", "make"), CASES)
def test_the_round_goes_on_with_the_rest(kind: str, make: Make, bad: SiteId) -> None:
    outcome, journal = played(sending(bad, make))
    assert messages.hash_tensors(outcome.state) == state_without(bad)
    found = notes(journal)
    assert (found[bad]["outcome"], found[bad]["kind"]) == ("refused", kind)
    assert all(found[site]["outcome"] == "accepted" for site in others(bad))


@pytest.mark.parametrize("bad", REGISTERED)
def test_the_rest_is_weighed_by_its_own_examples(bad: SiteId) -> None:
    """Σ n_k·w_k / Σ n_k over the other two, worked out in double precision."""
    outcome, _ = played(sending(bad, fields(run="another")))
    total = sum(others(bad).values())
    for name, found in outcome.state["model"].items():
        each = [weights(Stream(1, ("site", site)))["model"][name].double() * n for site, n in others(bad).items()]
        torch.testing.assert_close(found.double(), sum(each) / total, rtol=1e-6, atol=1e-7)
    everybody, _ = played(answer_honestly)
    assert messages.hash_tensors(outcome.state) != messages.hash_tensors(everybody.state)


def test_a_reply_is_not_accepted_again_in_the_next_round() -> None:
    first: dict[SiteId, bytes] = {}

    def replay(site: SiteId, data: bytes) -> bytes:
        reply = honest(site, asked_round(data)).frame
        return first.setdefault(site, reply) if site == "east" else reply

    outcome, journal = played(replay, rules={"rounds": 2})
    silent, _ = played(silent_in_round_two, rules={"rounds": 2})
    assert notes(journal)["east"]["kind"] == "round"
    assert messages.hash_tensors(outcome.state) == messages.hash_tensors(silent.state)


def silent_in_round_two(site: SiteId, data: bytes) -> bytes | Failure:
    if (site, asked_round(data)) == ("east", 2):
        return Failure("dead", "nobody there")
    return answer_honestly(site, data)


@pytest.mark.parametrize("twice", REGISTERED)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_duplicate_counts_once(twice: SiteId, at_once: bool) -> None:
    """The first reply counts; a second one, even a better one, is refused as a duplicate."""

    def tamper(round: int, replies: list[tuple[SiteId, Any]]) -> list[tuple[SiteId, Any]]:
        second = (twice, messages.encode(honest(twice).fields, weights(Stream(99))))
        position = 1 + next(i for i, (site, _) in enumerate(replies) if site == twice)
        return [*replies[:position], second, *replies[position:]] if at_once else [*replies, second]

    outcome, journal = played(answer_honestly, tamper=tamper)
    once, _ = played(answer_honestly)
    assert messages.hash_tensors(outcome.state) == messages.hash_tensors(once.state)
    assert notes(journal)[twice]["extra"] == ["duplicate"]


def test_two_sites_cannot_trade_places() -> None:
    """East sends what south would have sent, and the other way round: both are refused."""
    swapped = {"east": "south", "south": "east", "north": "north"}
    outcome, journal = played(lambda site, data: answer_honestly(swapped[site], data))
    alone, _ = played(answer_honestly, {"north": REGISTERED["north"]})
    assert messages.hash_tensors(outcome.state) == messages.hash_tensors(alone.state)
    assert [notes(journal)[site]["kind"] for site in ("east", "south")] == ["site", "site"]


@pytest.mark.parametrize("quorum", [1, 3])
def test_a_stranger_changes_nothing(quorum: int) -> None:
    def tamper(round: int, replies: list[tuple[SiteId, Any]]) -> list[tuple[SiteId, Any]]:
        return [("stranger", honest().frame), *replies]

    outcome, journal = played(answer_honestly, tamper=tamper, rules={"quorum": quorum})
    alone, _ = played(answer_honestly)
    assert messages.hash_tensors(outcome.state) == messages.hash_tensors(alone.state)
    assert notes(journal)["stranger"]["extra"] == ["site"]


def test_below_quorum_the_round_fails_closed_and_says_why() -> None:
    def tamper(round: int, replies: list[tuple[SiteId, Any]]) -> list[tuple[SiteId, Any]]:
        return [("stranger", b""), *replies]

    with pytest.raises(RoundFailed, match=r"2 acceptable updates where the quorum is 3.*east: schema"):
        played(sending("east", fields(schema=0)), tamper=tamper, rules={"quorum": 3})
    with pytest.raises(RoundFailed, match="0 acceptable updates"):
        played(lambda site, data: b"", tamper=tamper)


@pytest.mark.parametrize("seconds", ["1", True, None, [1], 10**400, -(10**400), {"a": 1}])
def test_seconds_are_only_noted(seconds: object) -> None:
    """They steer nothing, so nonsense is noted as nothing instead of costing a site its update."""
    _, journal = played(sending("east", fields(seconds=seconds)))
    assert (notes(journal)["east"]["outcome"], notes(journal)["east"]["seconds"]) == ("accepted", 0.0)


def test_which_sites_misbehave_makes_no_difference_to_the_others() -> None:
    """Every subset of misbehaving sites, each with another malformed update: the state is that of the rest."""
    makes = [make for _, make in list(MALFORMED.values())[:3]]
    for bad in itertools.chain(itertools.combinations(REGISTERED, 1), itertools.combinations(REGISTERED, 2)):
        wrong = dict(zip(bad, makes, strict=False))

        def answer(site: SiteId, data: bytes, wrong: dict[SiteId, Make] = wrong) -> bytes:
            return wrong[site](honest(site)) if site in wrong else honest(site).frame

        outcome, _ = played(answer)
        rest, _ = played(answer_honestly, {s: n for s, n in REGISTERED.items() if s not in bad})
        assert messages.hash_tensors(outcome.state) == messages.hash_tensors(rest.state)
