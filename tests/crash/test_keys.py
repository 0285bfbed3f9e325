"""The life of a key, killed at every named point: none covers two runs, none is lost in a run, none is left behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyclinic import Recipe
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.keys import CHAIN, RUN
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.deploy.site.policy import read_approvals
from polyclinic.storage import messages
from tests.crash.runs import KILLED, RECIPES, Driver, summary
from tests.deploy.example_sites import (
    ApprovingHandler,
    Crossing,
    beginning,
    config,
    deployed,
    desks,
    recipe,
    said,
    simulation,
    write_hospitals,
)

pytestmark = pytest.mark.usefixtures("_privacy_loaded")
BEGIN = ("run-key-written", "chain-key-moved", "run-begun")
Answer = Callable[..., int]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        write_hospitals(Path(folder))
        yield Path(folder)


def private(noise: float) -> Recipe:
    return recipe(privacy={"noise": noise, "delta": 1e-3}, rounds=2)


@pytest.fixture(scope="module")
def orders(home: Path) -> list[bytes]:
    """The begin and both rounds of a run at hill."""
    crossing = Crossing(desks(home, "probe"))
    deployed(private(1.0), home, crossing)
    return [
        beginning(simulation(private(1.0), home), "hill"),
        *(data for site, data in crossing.sent if site == "hill"),
    ]


@pytest.fixture
def answer(driver: Driver, place: Path) -> Answer:
    """A site's process: how it ended."""

    def play(site: SiteConfig, sent: Sequence[bytes], fault: str = "") -> int:
        paths = [place / f"message {number}" for number in range(len(sent))]
        for path, data in zip(paths, sent, strict=True):
            path.write_bytes(data)
        armed = {"fault": (fault, 1)} if fault else {}
        values = site.model_dump(mode="json", exclude_none=True)
        child = driver.ask(do="answer", config=values, messages=[str(p) for p in paths], replies=str(place), **armed)
        return driver.wait(int(child)).code

    return play


def key_of(site: SiteConfig) -> str:
    (path,) = site.folder.glob(f"runs/*/{RUN}")
    return path.read_text()


def everything_in(folder: Path) -> bytes:
    return b"|".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def answered(site: SiteConfig, data: bytes) -> str:
    return messages.hash_tensors(messages.decode(ApprovingHandler(site).answer_message(data)).tensors)


@pytest.mark.parametrize("point", BEGIN)
def test_killed_as_a_run_begins(answer: Answer, home: Path, orders: list[bytes], point: str) -> None:
    site = config(home, "hill", point)
    assert answer(site, orders[:1], point) == KILLED
    left = key_of(site)
    unlike = shutil.copytree(site.folder, site.folder.with_name(f"{point} other terms"))
    assert said(ApprovingHandler(site).answer_message(orders[0]))["ready"], "the run goes on, or begins again"
    assert (key_of(site) == left) == (point != "chain-key-moved"), "once the chain has moved, it moves again"
    assert answered(site, orders[1]) == answered(site, orders[1])
    assert not list(site.folder.rglob("*.tmp"))
    # Other terms of the same name have another key, whatever the kill has left.
    other = site.model_copy(update={"folder": unlike})
    begun = said(ApprovingHandler(other).answer_message(beginning_again(home)))
    if point == "run-begun":
        assert "under other terms" in begun["why"]
    else:
        assert begun["ready"]
        assert key_of(other) != left


def beginning_again(home: Path) -> bytes:
    """The begin of a run of the same name with other noise."""
    first, other = simulation(private(1.0), home), simulation(private(2.0), home)
    return beginning(other, "hill", {"run": first.run_id()})


def test_killed_as_a_run_takes_its_approval(answer: Answer, home: Path, orders: list[bytes]) -> None:
    """It is this run's, and no other's, from before anything of the run is kept."""
    site = config(home, "hill", "approval")
    assert answer(site, orders[:1], "approval-bound") == KILLED
    strict = SiteMessageHandler(site)
    (approval,) = read_approvals(site.folder)
    assert (approval.run, approval.finished) == (messages.decode(orders[0]).fields["run"], "")
    other = beginning(simulation(private(1.0), home), "hill", {"run": "other"})
    assert "is in use by its run" in said(strict.answer_message(other))["why"]
    assert said(strict.answer_message(orders[0]))["ready"]
    assert read_approvals(site.folder) == [approval]


@pytest.mark.parametrize("point", ["site-received", "site-trained"])
def test_killed_in_a_round_the_noise_is_the_same(answer: Answer, home: Path, orders: list[bytes], point: str) -> None:
    site = config(home, "hill", point)
    assert answer(site, orders[:1]) == 0
    spared = site.model_copy(update={"folder": shutil.copytree(site.folder, site.folder.with_name(f"{point} spared"))})
    assert answer(site, orders[1:2], point) == KILLED
    assert answered(site, orders[1]) == answered(spared, orders[1])
    assert answered(site, orders[2]) == answered(spared, orders[2])


def test_killed_as_a_run_ends(answer: Answer, home: Path, orders: list[bytes]) -> None:
    site = config(home, "hill", "ending")
    begun = messages.decode(orders[0]).fields
    end = messages.encode({"purpose": "end", "run": begun["run"], "site": "hill"}, {})
    assert answer(site, orders[:2]) == 0
    key = key_of(site)
    assert answer(site, [end], "key-overwritten") == KILLED
    assert key.encode() not in everything_in(site.folder)
    assert "cannot" in said(ApprovingHandler(site).answer_message(orders[2]))["why"], "no noise without a key"
    assert said(ApprovingHandler(site).answer_message(end))["ended"]
    assert not list(site.folder.glob(f"runs/*/{RUN}"))
    assert said(ApprovingHandler(site).answer_message(orders[0]))["ready"]
    assert key_of(site) != key, "the same run again is a run of its own"


@pytest.mark.parametrize("point", ["order-recorded", "site-received", "site-trained"])
def test_a_kill_makes_no_site_forget_what_it_was_asked(
    answer: Answer, home: Path, orders: list[bytes], point: str
) -> None:
    """Before an order is recorded no image is used for it; from then on its round has these contents."""
    site = config(home, "hill", f"order {point}")
    assert answer(site, orders[:2]) == 0
    assert answer(site, orders[2:3], point) == KILLED
    assert len((site.folder / "releases.jsonl").read_text().splitlines()) == 1, "nothing of round 2 has left"
    message = messages.decode(orders[2])
    moved = {kind: {name: tensor * 1.01 for name, tensor in group.items()} for kind, group in message.tensors.items()}
    reply = said(ApprovingHandler(site).answer_message(messages.encode(message.fields, moved)))
    assert "was answered before, and comes again with other contents" in reply["why"]
    assert "failure" not in said(ApprovingHandler(site).answer_message(orders[2]))


def test_an_unfinished_key_of_a_kill_is_erased(home: Path, orders: list[bytes]) -> None:
    site = config(home, "hill", "unfinished")
    site.folder.mkdir()
    (site.folder / f".{CHAIN}.123.tmp").write_text("ab" * 32)
    assert said(ApprovingHandler(site).answer_message(orders[0]))["ready"]
    assert b"ab" * 32 not in everything_in(site.folder)


@pytest.mark.parametrize("point", ["result-written", "key-overwritten"])
def test_a_simulation_killed_as_it_ends_leaves_no_key(driver: Driver, place: Path, point: str) -> None:
    folder = place / "run"
    assert driver.run(RECIPES["private"], folder, fault=(point, 1)).code == KILLED
    assert (folder / "secret").exists()
    assert set((folder / "secret").read_bytes()) == {0} or point == "result-written"
    ended = summary(folder)["sha256"]
    assert driver.run(RECIPES["private"], folder).code == 0
    assert not (folder / "secret").exists()
    assert summary(folder)["sha256"] == ended


def test_a_private_run_that_has_ended_does_not_go_on(driver: Driver, place: Path) -> None:
    folder = place / "run"
    assert driver.run(RECIPES["private"], folder).code == 0
    assert not (folder / "secret").exists()
    (folder / "result.json").unlink()
    refused: Any = driver.run(RECIPES["private"], folder)
    assert (refused.code, refused.error) == (1, "StoreError")
    assert "as it is when a run has ended" in refused.sentence
