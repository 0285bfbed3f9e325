"""Servers and sites as real processes, with TLS and keys: killed, started again, and the result is the simulation's."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.cli.server import status
from polyclinic.cli.site import join, scores_command
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Failure
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.processes import open_server
from polyclinic.deploy.serve import ask_sites
from polyclinic.deploy.status import LOG_BYTES, LOG_FILES, ServerStatus, log_to_file, read_status
from polyclinic.storage import messages
from tests.deploy.example_sites import CLUSTERS, SITES, approve, asked, recipe
from tests.deploy.real_processes import Ward, furnish, until
from tests.driving import Ask
from tests.small import NEEDED

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kills process groups")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three hospitals with images and kits, and a recipe."""
    furnish(tmp_path, least_sites=3)
    (tmp_path / "recipe.yaml").write_text(recipe(rounds=3).to_yaml())
    return tmp_path


@pytest.fixture(scope="module")
def ward(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    """Three sites at work, for all tests here: one started as hospitals start it."""
    folder = tmp_path_factory.mktemp("ward")
    with Ward(folder, ask) as found:
        furnish(folder, least_sites=3)
        found.join("harbour", really=True)
        found.join("hill")
        found.join("lake")
        yield found


def test_killed_sites_and_servers_change_nothing(ward: Ward) -> None:
    """C2, C5: hill dies as it has trained in round 2, and comes back; the server dies in round 3, and goes on."""
    found, out = recipe(rounds=3), ward.folder / "killed"
    server = ward.serve(found, "killed", fault="aggregated:3", really=True)
    ward.join("hill", fault="site-trained:2")
    ward.until(lambda: ward.sites["hill"].code() is not None, "hill's death")
    assert [ward.sites["hill"].code(), server.code()] == [-9, None]
    ward.join("hill")
    ward.until(lambda: server.code() is not None, "the server's death")
    assert [ward.sites["hill"].code(), server.code()] == [None, -9]
    result, simulated = ward.play(found, "killed")
    assert result.sha256 == simulated.sha256
    _look(out)
    ward.until(lambda: "connected" not in told_of_hill(ward), "hill's notice that the server is gone")
    assert ward.sites["hill"].stop() == 0, ward.said()
    assert told_of_hill(ward).startswith("hill: stopped\nsent so far: ")
    ward.join("hill")
    state = ward.folder / "k" / "server" / "state"
    assert sum(path.stat().st_size for path in state.rglob("*")) < 1 << 20, "Flower keeps nothing on the disk"
    assert not list(ward.folder.rglob("*.fab"))


def told_of_hill(ward: Ward) -> str:
    return shown("status", ward.folder / "k" / "sites" / "hill" / "site.yaml")


@pytest.mark.heavy
def test_a_site_that_was_too_slow_takes_part_in_later_rounds(ask: Ask, tmp_path: Path) -> None:
    """Lake is held up as it has trained in round 2; its answer is too late, and it hears nothing of round 3.

    `./scripts/test --heavy tests/deploy/test_processes.py`
    """
    found, out = recipe(algorithm="scaffold", rounds=9, quorum=2), tmp_path / "slow"
    kits, path = tmp_path / "k", tmp_path / "slow.yaml"
    path.write_text(found.to_yaml())
    with Ward(tmp_path, ask) as few:
        furnish(tmp_path, least_sites=2)
        for site in SITES:
            approve(kits / "sites" / site / "state", found)
            few.join(site)
        words = ("serve", kits / "server" / "server.yaml", path, "--out", out, "--deadline", "3")
        server, memory = few.command(*words, role="slow"), kits / "sites" / "lake" / "state" / "runs"
        begun = time.monotonic()
        while not list(memory.rglob("000002.pcl")):
            assert time.monotonic() - begun < 60, few.said()
        os.kill(few.sites["lake"].pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(few.sites["lake"].pid, signal.SIGCONT)
        few.until(lambda: server.code() is not None, "the end of the run")
        assert server.code() == 0, few.said()
        rows = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
        lake = [row["sites"]["lake"]["outcome"] for row in rows if row["event"] == "round"]
        assert "late" in lake, "it must have mattered"
        assert (lake[-1], "refused" in lake) == ("accepted", False), few.said()


THREE: dict[str, dict[str, Any]] = {
    "scaffold": {"algorithm": "scaffold"},
    "fedmp": {"algorithm": "fedmp"},
    "pfedcdp in three clusters": {**NEEDED["pfedcdp"], **CLUSTERS},
}


def test_sites_that_stay_up_end_run_after_run_in_the_bits_of_the_simulation(ward: Ward) -> None:
    """L4: memory at the sites; features beside the model; three architectures in one run."""
    before = ward.pids()
    assert before.keys() == set(SITES)
    for name, settings in THREE.items():
        found = recipe(**settings)
        result, simulated = ward.play(found, name)
        assert result.rounds == 5
        assert result.sha256 == simulated.sha256, name
        assert result.sites == simulated.sites, "every figure of every site"
        for site in SITES:
            assert not list((ward.folder / "k" / "sites" / site / "state" / "runs").glob("*")), "a run that is over"
    assert ward.pids() == before, ward.said()
    kept = json.loads(shown("scores", ward.folder / "k" / "sites" / "hill" / "site.yaml", "--json"))
    assert {one["recipe"] for one in kept} >= {"law"}
    assert len(kept) >= len(THREE)
    told = shown("scores", ward.folder / "k" / "sites" / "hill" / "site.yaml")
    assert "scores sent to the server, with rounded predictions of the test images" in " ".join(told.split())


def test_sites_say_what_they_refuse_and_that_a_run_is_over(ward: Ward) -> None:
    found, log = recipe(data__path="elsewhere.csv"), ward.sites["hill"].log
    order = messages.decode(asked("enrol", "hill", found)).fields
    for site in SITES:
        approve(ward.folder / "k" / "sites" / site / "state", found)
    before = len(log.read_text())
    with open_server(ServerConfig.load(ward.folder / "k" / "server" / "server.yaml")) as reception:
        ward.until(lambda: len(reception.link.connected_sites()) == len(SITES), "all sites' coming")
        for _, answer in ask_sites(reception.engine, order, SITES, 20):
            assert isinstance(answer, Failure)
        assert "hill: connected to" in told_of_hill(ward)
        for _ in ask_sites(reception.engine, {"purpose": "end", "run": "some"}, SITES, 20):
            pass
    ward.until(lambda: log.read_text().endswith("has closed; waiting for the next run\n"), "hill's word on the end")
    told = log.read_text()[before:]
    sentence = "refused, no run: data: hill has no data called 'elsewhere.csv'"
    assert f"hill: {sentence}" in told
    assert "cannot be reached" not in told
    assert "last refusal or failure, " in told_of_hill(ward)
    assert f": {sentence}" in told_of_hill(ward)


def _look(out: Path) -> None:
    """What status and files say afterwards."""
    status = read_status(out)
    assert status is not None
    assert (status["state"], status["round"], status["rounds"], status["alive"]) == ("finished", 3, 3, False)
    assert status["sites"].keys() == set(SITES)
    assert all(there["seen"] for there in status["sites"].values())
    assert status["refusals"] == []
    rows = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    played = [row for row in rows if row["event"] == "round"]
    assert all(note["outcome"] == "accepted" for row in played for note in row["sites"].values())
    told = shown("status", out)
    assert all(site in told for site in SITES)
    assert "finished, round 3 of 3" in told
    assert max(map(len, told.splitlines())) <= 80


def shown(*arguments: object) -> str:
    """What a command prints into 80 columns."""
    return run_command(*arguments).stdout


def run_command(*arguments: object) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.command("status")(status)
    app.command("join")(join)
    app.command("scores")(scores_command)
    found = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "80"})
    assert found.exit_code == 0, found.output
    return found


def test_a_dry_run_tells_what_would_leave_and_sends_nothing(place: Path) -> None:
    file = place / "k" / "sites" / "hill" / "site.yaml"
    found = run_command("join", file, "--dry-run", place / "recipe.yaml")
    told = found.stdout
    assert "site.yaml allows more than when the coordinator made it (DELIVERED): allow.algorithms" in found.stderr
    assert {"model", "metrics", "final", "predictions"} <= set(told.split())
    *lines, command = told.splitlines()
    assert max(map(len, lines)) <= 80
    assert command.endswith(f" {place / 'recipe.yaml'}")
    rows = json.loads(shown("join", file, "--dry-run", place / "recipe.yaml", "--json"))["releases"]
    assert {row["kind"] for row in rows} >= {"model", "metrics", "final scores", "predictions", "card", "signatures"}
    assert not (file.parent / "state" / "releases.jsonl").exists()


def test_a_child_goes_with_its_parent(ward: Ward, tmp_path: Path) -> None:
    parent = ward.command("parent", tmp_path / "log", role="parent")
    ward.until(lambda: parent.log.exists() and parent.log.read_text().endswith("\n"), "the child's start")
    pid = int(parent.log.read_text())
    assert not _zombie(pid)
    parent.kill()
    until(lambda: _zombie(pid), "the child's end", 10)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def config(place: Path, **settings: Any) -> ServerConfig:
    return ServerConfig.load(place / "k" / "server" / "server.yaml").model_copy(update=settings)


def test_without_tls_a_server_stays_on_its_own_machine(place: Path) -> None:
    """S1."""
    with pytest.raises(RecipeError, match="without TLS"), open_server(config(place, host="0.0.0.0", insecure=True)):
        pass
    elsewhere = config(place, insecure=True, listen="0.0.0.0:9443")
    with pytest.raises(RecipeError, match="without TLS"), open_server(elsewhere):
        pass
    for host, address in (
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("fl.example.org", "0.0.0.0"),
        ("2001:db8::7", "::"),
    ):
        assert config(place, host=host, port=9000).listen_address == (address, 9000)
        assert config(place, host=host, listen="[::1]:443").listen_address == ("::1", 443)


def test_a_flood_of_refusals_fills_neither_memory_nor_log(place: Path) -> None:
    board = ServerStatus(config(place), [])
    for number in range(5000):
        board.count_refusal("", f"path {number}")
    assert len(board.refusals) <= 51
    assert sum(board.refusals.values()) == 5000
    board.count_refusal("hill", "its own mistake")
    assert board.refusals["hill", "its own mistake"] == 1, "no flood hides what a site should know"


def test_the_log_is_bounded(place: Path) -> None:
    path = place / "server.log"
    with log_to_file(path):
        for _ in range(4 * LOG_BYTES // 1000):
            logging.getLogger("flwr").info("x" * 1000)
    files = list(place.glob("server.log*"))
    assert len(files) == LOG_FILES
    assert sum(file.stat().st_size for file in files) <= LOG_FILES * LOG_BYTES
