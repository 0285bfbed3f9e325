"""Forward secrecy: what a site's folder tells after a run's end about the run's noise, which is nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyclinic import Recipe
from polyclinic.deploy.site.keys import CHAIN, RUN, SiteKeys, _derive_key
from polyclinic.deploy.site.message_checks import read_terms
from polyclinic.deploy.site.participation import Participation
from polyclinic.storage import messages
from polyclinic.storage.files import erase_file
from polyclinic.storage.site_memory import RamMemory
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


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    write_hospitals(folder)
    return folder


def private() -> Recipe:
    return recipe(privacy={"noise": 1.0, "delta": 1e-3}, rounds=1)


def known_keys(folder: Path) -> Iterator[bytes]:
    """Everything in a folder that may be a key: 32 bytes in hexadecimal, and what HKDF makes of each."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield from (bytes.fromhex(found.decode()) for found in re.findall(rb"[0-9a-f]{64}", path.read_bytes()))


def test_a_copy_of_the_folder_after_the_end_does_not_reveal_the_noise(home: Path) -> None:
    found = private()
    made, crossing = simulation(found, home), Crossing(desks(home, "copied"))
    deployed(found, home, crossing)
    site, desk = config(home, "hill", "copied"), crossing.desks["hill"]
    number = next(n for n, (to, _) in enumerate(crossing.sent) if to == "hill")
    order, reply = messages.decode(crossing.sent[number][1]), messages.decode(crossing.replies[number])
    terms = read_terms(messages.decode(beginning(made, "hill")).fields, "hill")
    own = desk._load_images(terms.recipe)

    def replies_with(key: bytes) -> str:
        part = Participation(site, terms, own, RamMemory(), lambda: int.from_bytes(key))
        part.runner.check_order(order)
        return messages.hash_tensors(part.runner.reply(order).tensors)

    def guesses(folder: Path) -> set[str]:
        keys = set(known_keys(folder))
        keys |= {_derive_key(key, f"run {terms.digest}") for key in keys}
        return {replies_with(key) for key in keys}

    released = messages.hash_tensors(reply.tensors)
    assert released in guesses(site.folder), "while the run lasts, its key tells its noise"
    end = messages.encode({"purpose": "end", "run": made.run_id(), "site": "hill"}, {})
    assert said(desk.answer_message(end))["ended"]
    copy = Path(shutil.copytree(site.folder, site.folder.with_name("taken")))
    assert (copy / CHAIN).exists()
    assert released not in guesses(copy)


def test_every_run_has_a_key_of_its_own(tmp_path: Path) -> None:
    keys, seen = SiteKeys(tmp_path), set()
    for run, terms in (("a", "x"), ("a", "x"), ("a", "y"), ("b", "y")):
        keys.begin_run(tmp_path / "runs" / run, terms)
        seen |= {(tmp_path / CHAIN).read_text(), (tmp_path / "runs" / run / RUN).read_text()}
        assert (tmp_path / CHAIN).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "runs" / run / RUN).stat().st_mode & 0o777 == 0o600
    assert len(seen) == 8
    marks = {keys.mark_images("images"), keys.mark_images("images")}
    keys.begin_run(tmp_path / "runs" / "c", "z")
    assert marks == {keys.mark_images("images")}, "which stays, so that a run knows its images"


def test_an_erased_key_is_overwritten_before_it_is_removed(tmp_path: Path) -> None:
    chain, other = tmp_path / CHAIN, tmp_path / "linked"
    SiteKeys(tmp_path).begin_run(tmp_path / "runs" / "a", "x")
    other.hardlink_to(chain)
    SiteKeys(tmp_path).begin_run(tmp_path / "runs" / "b", "x")
    assert set(other.read_bytes()) == {0}
    assert len(bytes.fromhex(chain.read_text())) == 32
    linked = tmp_path / "run key"
    linked.hardlink_to(tmp_path / "runs" / "b" / RUN)
    erase_file(tmp_path / "runs" / "b" / RUN)
    assert set(linked.read_bytes()) == {0}
    assert not (tmp_path / "runs" / "b" / RUN).exists()
    erase_file(tmp_path / "nothing")


def test_a_damaged_key_is_named(home: Path) -> None:
    site = config(home, "lake", "damaged")
    begin = beginning(simulation(private(), home), "lake")
    assert said(ApprovingHandler(site).answer_message(begin))["ready"]
    (site.folder / CHAIN).write_text("abc")
    other = beginning(simulation(private(), home), "lake", {"run": "another"})
    assert "cannot" in said(ApprovingHandler(site).answer_message(other))["why"]
    assert "end" not in said(ApprovingHandler(site).answer_message(begin))
