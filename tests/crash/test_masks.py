"""Masked rounds whose server or whose sites are killed at every named point: recovered to the bit, or failed closed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyclinic.core.errors import RoundFailed
from polyclinic.core.jobs import Failure
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.secure_aggregation.cohort import MASKS
from polyclinic.storage import messages
from polyclinic.storage.journal import FolderJournal
from tests.crash.masked import OF_SERVERS, OF_SITES
from tests.crash.runs import KILLED, RECIPES, Driver, measured, remembered, summary, unfinished
from tests.deploy.example_sites import (
    ApprovingHandler,
    Crossing,
    beginning,
    config,
    loop,
    recipe,
    said,
    simulation,
    write_hospitals,
)
from tests.deploy.masking import FIVE, keyring, masking_desks

RECIPE = recipe(rounds=2, stages=[{"name": "mask"}])


def assert_same_bits(found: Path, wanted: Path) -> None:
    """The same state, figures and memories. What was sent again counts as sent, so bytes differ."""
    here, there = ({k: v for k, v in summary(f).items() if k not in ("cost", "versions")} for f in (found, wanted))
    assert here == there
    assert (found / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
    rows = [[{k: v for k, v in row.items() if k != "down"} for row in measured(f)] for f in (found, wanted)]
    assert rows[0] == rows[1]
    assert remembered(found) == remembered(wanted)
    assert unfinished(found) == []


@pytest.mark.heavy
@pytest.mark.parametrize("point", [*OF_SERVERS, *OF_SITES])
def test_a_killed_run_ends_in_the_same_bits(
    driver: Driver, whole: Callable[[str], Path], place: Path, point: str
) -> None:
    """Server and sites in one process, killed in the third round, after a snapshot of the second.

    One command: `./scripts/test --heavy tests/crash/test_masks.py`."""
    count = 3 if point in OF_SERVERS and point != "masked-update-added" else 8
    wanted, folder = whole("masked"), place / "run"
    assert driver.run(RECIPES["masked"], folder, fault=(point, count)).code == KILLED
    assert driver.run(RECIPES["masked"], folder).code == 0
    assert_same_bits(folder, wanted)


def test_a_run_killed_at_one_point_after_another(driver: Driver, whole: Callable[[str], Path], place: Path) -> None:
    folder = place / "run"
    for point in (*OF_SITES, *OF_SERVERS):
        assert driver.run(RECIPES["masked"], folder, fault=(point, 1)).code == KILLED
    assert driver.run(RECIPES["masked"], folder).code == 0
    assert_same_bits(folder, whole("masked"))


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        write_hospitals(Path(folder), FIVE)
        yield Path(folder)


@pytest.fixture(scope="module")
def played(home: Path) -> tuple[Path, list[tuple[bytes, bytes]]]:
    """A whole run: the folder of hill just after it began, and what hill was sent and answered in both rounds."""
    crossing, made = Crossing(masking_desks(home, "played")), simulation(RECIPE, home)
    for site in FIVE:
        assert said(crossing.desks[site].answer_message(beginning(made, site)))["ready"]
    kept = Path(shutil.copytree(crossing.desks["hill"].config.folder, home / "hill" / "begun"))
    loop(made, crossing).play_all()
    pairs = zip(crossing.sent, crossing.replies, strict=True)
    return kept, [(order, reply) for (site, order), reply in pairs if site == "hill"]


def without_signature(reply: bytes) -> tuple[Any, str]:
    """What a reply says about masks, but for a signature, which is drawn anew; and the hash of its tensors."""
    message = messages.decode(reply)
    masks = {name: value for name, value in message.fields[MASKS].items() if name != "signature"}
    return masks, messages.hash_tensors(message.tensors)


@pytest.mark.parametrize(
    "point", ["update-masked", *(pytest.param(p, marks=pytest.mark.heavy) for p in OF_SITES if p != "update-masked")]
)
def test_a_killed_site_gives_the_same_keys_shares_and_masked_update(
    driver: Driver, home: Path, place: Path, played: tuple[Path, list[tuple[bytes, bytes]]], point: str
) -> None:
    begun, spoken = played
    site = config(home, "hill", point)
    shutil.copytree(begun, site.folder)
    paths = [place / f"message {number}" for number in range(5)]
    for path, (order, _) in zip(paths, spoken, strict=False):
        path.write_bytes(order)
    values = site.model_dump(mode="json", exclude_none=True)
    child = driver.ask(
        do="answer",
        config=values,
        messages=list(map(str, paths)),
        replies=str(place),
        fault=(point, 1),
        sites=list(FIVE),
    )
    assert driver.wait(int(child)).code == KILLED
    again = ApprovingHandler(site, keyring=keyring("hill"))
    for order, reply in spoken[:10]:
        assert without_signature(again.answer_message(order)) == without_signature(reply)


def resumable(home: Path, crossing: Crossing, folder: Path) -> Rounds:
    """The server's rounds, with a folder from which they go on."""
    rounds = loop(simulation(RECIPE, home), crossing)
    rounds.journal = FolderJournal(folder)
    return rounds


class Gone(Exception):  # noqa: N818
    """A server that ends."""


@pytest.mark.parametrize(
    "last", ["agree", *(pytest.param(p, marks=pytest.mark.heavy) for p in ("keys", "shares", "train", "unmask"))]
)
def test_the_server_and_then_a_site_are_gone(home: Path, place: Path, last: str) -> None:
    """The server ends as it asks the last site for something; when it is back, another site is gone for good."""
    crossing = Crossing(masking_desks(home, f"gone {last}"))
    made = simulation(RECIPE, home)
    for site in FIVE:
        assert said(crossing.desks[site].answer_message(beginning(made, site)))["ready"]
    answer, gone = crossing.answer, list[str]()

    def interrupted(site: str, data: bytes) -> bytes | Failure:
        if site in gone:
            return Failure("dead", "its machine is gone")
        if not gone and site == "lake" and messages.decode(data).fields["purpose"] == last:
            raise Gone
        return answer(site, data)

    crossing.answer = interrupted  # type: ignore[method-assign]
    with pytest.raises(Gone):
        resumable(home, crossing, place / "run").play_all()
    gone.append("fjord")
    found = resumable(home, crossing, place / "run").play_all()
    assert found.rounds == 2


def test_a_round_that_lost_too_many_goes_on_when_they_are_back(home: Path, place: Path) -> None:
    crossing = Crossing(masking_desks(home, "back"))
    made = simulation(RECIPE, home)
    for site in FIVE:
        assert said(crossing.desks[site].answer_message(beginning(made, site)))["ready"]
    answer, gone = crossing.answer, ["fjord", "lake"]

    def lossy(site: str, data: bytes) -> bytes | Failure:
        lost = site in gone and messages.decode(data).fields["purpose"] == "train"
        return Failure("dead", "its machine is gone") if lost else answer(site, data)

    crossing.answer = lossy  # type: ignore[method-assign]
    with pytest.raises(RoundFailed, match="3 of 5 sites sent their updates, and 4 are needed"):
        resumable(home, crossing, place / "run").play_all()
    gone.clear()
    found = resumable(home, crossing, place / "run").play_all()
    wanted = simulation(RECIPE, home).run().state
    assert messages.hash_tensors(found.state) == messages.hash_tensors(wanted)
