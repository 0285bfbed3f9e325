"""Replies come in any order, twice, from strangers or never; the round loop sees each site once, in its place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from polyclinic.core.errors import Refused
from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.federation.engines import Answer
from polyclinic.federation.mailbox import ReorderBuffer, in_site_order

SITES = ("a", "b", "c", "d")
ORDERS = list(itertools.permutations(SITES))
Arrival = tuple[SiteId, Answer]
LATE = Failure("late", "no reply before the deadline")


def first_reply(site: SiteId) -> bytes:
    return f"reply of {site}".encode()


def delivered(arrivals: Sequence[Arrival]) -> tuple[list[Arrival], list[tuple[SiteId, str]]]:
    refused: list[tuple[SiteId, str]] = []
    found = list(in_site_order(arrivals, SITES, lambda site, refusal: refused.append((site, refusal.kind))))
    return found, refused


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_any_order_of_arrival_comes_out_in_site_order(order: tuple[SiteId, ...]) -> None:
    assert delivered([(site, first_reply(site)) for site in order]) == ([(s, first_reply(s)) for s in SITES], [])


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_the_first_reply_counts_and_a_second_is_refused(order: tuple[SiteId, ...]) -> None:
    """The duplicate follows at once, or up to three replies later."""
    for again, gap in itertools.product(SITES, range(4)):
        arrivals: list[Arrival] = [(site, first_reply(site)) for site in order]
        arrivals.insert(order.index(again) + 1 + gap, (again, b"something else"))
        assert delivered(arrivals) == ([(s, first_reply(s)) for s in SITES], [(again, "duplicate")])


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_strangers_are_refused_wherever_they_come(order: tuple[SiteId, ...]) -> None:
    for place in range(5):
        arrivals: list[Arrival] = [(site, first_reply(site)) for site in order]
        arrivals[place:place] = [("stranger", b"hello"), ("", b"")]
        assert delivered(arrivals) == ([(s, first_reply(s)) for s in SITES], [("stranger", "site"), ("", "site")])


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_silence_becomes_a_failure_in_its_place(order: tuple[SiteId, ...]) -> None:
    """Of each order the first few arrive; the rest are late, and nobody waits for them out of turn."""
    for number in range(4):
        arrived = order[:number]
        expected = [(s, first_reply(s) if s in arrived else LATE) for s in SITES]
        assert delivered([(site, first_reply(site)) for site in arrived]) == (expected, [])


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_a_failure_is_a_reply_like_any_other(order: tuple[SiteId, ...]) -> None:
    dead = Failure("dead", "the machine is gone")
    arrivals: list[Arrival] = [(site, dead if site == "b" else first_reply(site)) for site in order]
    assert delivered([*arrivals, ("b", first_reply("b"))]) == (
        [(s, dead if s == "b" else first_reply(s)) for s in SITES],
        [("b", "duplicate")],
    )


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_each_reply_is_handed_on_as_soon_as_its_turn_has_come(order: tuple[SiteId, ...]) -> None:
    """After k arrivals, out have come exactly the leading sites that are all among them."""
    came: list[SiteId] = []

    def arrive() -> Iterator[Arrival]:
        for site in order:
            came.append(site)
            yield site, first_reply(site)

    for place, (site, _) in enumerate(in_site_order(arrive(), SITES, _refuse_nobody)):
        assert site == SITES[place]
        waited_for = max(order.index(s) for s in SITES[: place + 1]) + 1
        assert len(came) == waited_for


def _refuse_nobody(site: SiteId, refusal: Refused) -> None:
    raise AssertionError(f"{site}: {refusal}")


def test_nobody_asked_nobody_answers() -> None:
    assert list(in_site_order([], [], _refuse_nobody)) == []


def on_disk(shelf: ReorderBuffer) -> int:
    return sum(not isinstance(kept, bytes | Failure) for kept in shelf._kept.values())


def test_the_shelf_keeps_what_fits_in_memory_and_the_rest_on_disk() -> None:
    shelf = ReorderBuffer(limit=1000)
    replies = {"a": b"a" * 600, "b": b"b" * 600, "c": b"", "d": bytes(range(256)) * 40, "e": b"e" * 400}
    for site, reply in replies.items():
        shelf.put(site, reply)
    shelf.put("f", LATE)
    assert shelf.buffered_bytes == 1000
    assert on_disk(shelf) == 2
    for site in ("d", "a", "f", "c", "b", "e"):
        assert site in shelf
        assert shelf.take(site) == replies.get(site, LATE)
        assert site not in shelf
    assert shelf.buffered_bytes == 0


def test_room_that_was_freed_is_used_again() -> None:
    shelf = ReorderBuffer(limit=100)
    for number in range(20):
        shelf.put(str(number), bytes(100))
        assert on_disk(shelf) == 0
        assert shelf.take(str(number)) == bytes(100)
    assert shelf.buffered_bytes == 0


def test_a_reply_whose_turn_has_come_never_touches_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is: only replies that must wait are kept."""

    def no_disk() -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr("polyclinic.federation.mailbox.tempfile.TemporaryFile", no_disk)
    large = bytes(65 << 20)
    found = list(in_site_order([("a", large), ("b", large)], ["a", "b"], _refuse_nobody))
    assert all(answer is large for _, answer in found)
    with pytest.raises(AssertionError, match="a file was opened"):
        list(in_site_order([("b", large), ("a", b"")], ["a", "b"], _refuse_nobody))
