"""The live board: it tells what the folder holds, to those who may ask, and changes nothing."""

from __future__ import annotations

import _thread
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import RoundFailed
from polyclinic.dashboard import BoardServer, Follower, open_board
from polyclinic.dashboard.follow import PageState
from polyclinic.dashboard.page import POLICY, render_page
from polyclinic.dashboard.run import RunStatus
from polyclinic.dashboard.server import state_json
from polyclinic.evaluation.rows import ChargeRow, CostRow, LedgerRow, SiteOutcome
from polyclinic.experiments.compare import compare
from polyclinic.runs.experiment import run
from polyclinic.storage.ledger import Ledger
from polyclinic.storage.run_folder import RunFolder
from tests import commands
from tests.deploy.child_process import ChildProcess
from tests.reporting.drawn import Page
from tests.small import SITES, tiny

PHANTOM = {
    "name": "live",
    "rounds": 6,
    "data": {"name": "phantom", "size": 32},
    "model": "cnn_b",
    "algorithm": "fedavg",
    "training": {"epochs": 1, "batch": 16, "optimiser": {"lr": 0.05}},
    "evaluate": {"bootstrap": 20},
}
TOKEN = "a-token_of.24~characters"
HOLD = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
Answer = tuple[int, Mapping[str, str], str]


@contextmanager
def served(folder: Path, host: str = "127.0.0.1", token: str | None = None) -> Iterator[BoardServer]:
    with open_board(folder, host, 0, token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: BoardServer, path: str, method: str = "GET", **headers: str) -> Answer:
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        link.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = link.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        link.close()


def told(folder: Path) -> dict[str, Any]:
    """The state of a folder, as programs get it."""
    found: dict[str, Any] = json.loads(state_json(Follower(folder).read_state()), parse_constant=pytest.fail)
    return found


def interrupted(recipe: Recipe, folder: Path, at: int) -> Path:
    """A run that was stopped as round `at` began."""

    def watch(event: str, info: Mapping[str, Any]) -> None:
        if event == "round" and info["round"] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, folder, watch=watch)
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """While a process has the folder's lock, as a run has."""
    command = [sys.executable, "-c", HOLD, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield
        finally:
            holder.communicate("\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "done"
    run(tiny(rounds=4), folder)
    return folder


@pytest.fixture(scope="module")
def server(finished: Path) -> Iterator[BoardServer]:
    with served(finished) as found:
        yield found


def test_a_real_run_is_followed_from_its_start_to_its_end(tmp_path: Path) -> None:
    folder, recipe = tmp_path / "run", tmp_path / "live.yaml"
    folder.mkdir()
    recipe.write_text(yaml.safe_dump(PHANTOM))
    seen: list[dict[str, Any]] = []
    with (
        served(folder) as server,
        ChildProcess.start_polyclinic("run", recipe, "--out", folder, log=tmp_path / "log") as child,
    ):
        until = time.monotonic() + 60
        while time.monotonic() < until and (not seen or seen[-1]["state"] != "finished"):
            seen.append(json.loads(ask(server, "/state.json")[2]))
            time.sleep(0.2)
        assert seen[-1]["state"] == "finished", child.read_log()
    states = list(dict.fromkeys(one["state"] for one in seen))
    assert states == ["waiting", "running", "finished"]
    rounds = [one["round"] for one in seen]
    assert rounds == sorted(rounds)
    assert rounds[-1] == seen[-1]["rounds"] == 6
    assert len(set(rounds)) >= 4, "too few rounds were seen"
    sent = [one["cost"]["bytes_up"] for one in seen]
    assert sent == sorted(sent)
    lefts = [one["seconds_left"] for one in seen if one["state"] == "running" and one["seconds_left"] is not None]
    assert len(set(lefts)) == 1 or lefts[-1] < lefts[0], "all may be of one reading"
    summary = json.loads((folder / "result.json").read_text())
    assert seen[-1]["cost"]["bytes_up"] == summary["cost"]["bytes_up"]
    assert [stay["last"] for stay in seen[-1]["sites"]] == [6] * 5
    curve = seen[-1]["curves"]["accuracy"]["validation images"]
    assert [round for round, _ in curve] == list(range(7))
    assert curve[-1][1] == summary["merged"]["global"]["validation"]["metrics"]["accuracy"]["value"]


def test_a_look_changes_nothing(finished: Path) -> None:
    def traces() -> list[tuple[Path, int, bytes]]:
        return [(p, p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(finished.rglob("*")) if p.is_file()]

    before = traces()
    with served(finished) as server:
        for path in ("/", "/state.json", "/result.json", "/../recipe.yaml"):
            ask(server, path)
    assert traces() == before


def test_a_run_is_at_work_as_long_as_its_process_lives_and_no_longer(tmp_path: Path) -> None:
    folder = interrupted(tiny(rounds=5), tmp_path / "run", at=4)
    assert told(folder)["state"] == "stopped"
    assert "Stopped after 3 of 5 rounds" in render_page(Follower(folder).read_state())
    with held(folder):
        assert RunFolder(folder).is_locked
        assert told(folder)["state"] == "running"
    assert RunFolder(folder).is_locked is False
    assert RunFolder(tmp_path).is_locked is False
    assert told(folder)["state"] == "stopped"


def test_silence_is_reported_in_seconds(tmp_path: Path) -> None:
    folder = interrupted(tiny(rounds=5), tmp_path / "run", at=4)
    past = time.time() - 1000
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (past, past))
    assert 1000 <= told(folder)["seconds_since_news"] < 1060
    assert "No news for 17 min" in render_page(Follower(folder).read_state())
    with held(folder):
        assert "takes longer than its rounds did" in render_page(Follower(folder).read_state())


def test_wherever_a_file_was_cut_off_the_whole_rows_count(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "result.json").unlink()
    ledger, rows = (finished / "ledger.jsonl").read_bytes(), (finished / "metrics.jsonl").read_bytes()
    for cut in range(0, len(ledger), 211):
        (folder / "ledger.jsonl").write_bytes(ledger[:cut])
        (folder / "metrics.jsonl").write_bytes(rows[: int(cut / len(ledger) * len(rows))])
        found = told(folder)
        assert found["runs"][0]["done"] == ledger[:cut].count(b'{"event": "round"') - _torn(ledger[:cut])
        assert found["state"] == ("stopped" if b"\n" in ledger[:cut] else "waiting")


def _torn(data: bytes) -> int:
    return data.rpartition(b"\n")[2].count(b'{"event": "round"')


def test_damage_is_reported_and_does_not_crash(finished: Path, tmp_path: Path) -> None:
    for number, (name, text) in enumerate(
        [("recipe.yaml", "name: ["), ("result.json", "{"), ("ledger.jsonl", '{"event": "round"}\n')]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(finished, folder)
        (folder / "result.json").unlink()
        (folder / name).write_text(text)
        assert told(folder)["state"] == "unreadable"
        assert "cannot be read" in render_page(Follower(folder).read_state())
    for text in ("{", "[]", '{"runs": [{}]}', '{"runs": [{"method": "m", "folder": "../x", "rounds": 1}]}'):
        (tmp_path / "planned").mkdir(exist_ok=True)
        (tmp_path / "planned" / "runs.json").write_text(text)
        assert told(tmp_path / "planned")["state"] == "waiting"
        assert "Not yet started." in render_page(Follower(tmp_path / "planned").read_state())


def test_who_resumes_may_go_back_some_rounds(tmp_path: Path) -> None:
    folder = interrupted(tiny(rounds=6, snapshot_every=2), tmp_path / "run", at=4)
    assert told(folder)["runs"][0]["done"] == 3
    Ledger(folder / "ledger.jsonl").append(event="resumed", round=2)
    assert told(folder)["runs"][0]["done"] == 2
    assert run(tiny(rounds=6, snapshot_every=2), folder).summary.rounds == told(folder)["round"] == 6
    assert [stay["counted"] for stay in told(folder)["sites"]] == [6, 6, 6]


def test_what_is_left_follows_from_what_rounds_took() -> None:
    rows: list[LedgerRow] = []
    for number in range(1, 5):
        rows.append(ChargeRow(round=number, sites=["a"]))
        rows.append(CostRow(event="round", round=number, seconds=float(number), sites={"a": SiteOutcome()}))
    between = RunStatus("m", rounds=10, ledger=rows, working=True, written=time.time())
    assert between.median_round_seconds == 2.5
    assert between.seconds_left == 6 * 2.5
    rows.append(ChargeRow(round=5, sites=["a"]))
    playing = RunStatus("m", rounds=10, ledger=rows, working=True, written=time.time() - 1)
    assert playing.current_round == 5
    assert playing.seconds_left == pytest.approx(6 * 2.5 - 1, abs=0.2)
    testing = [*rows, ChargeRow(round=11, sites=["a"])]
    assert RunStatus("m", rounds=10, ledger=testing, working=True, written=time.time()).is_testing


def test_a_failed_round_and_its_refusals_are_reported(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed):
        run(tiny(max_norm=1e-6), tmp_path / "run")
    found = told(tmp_path / "run")
    assert found["state"] == "failed"
    assert found["cost"]["refused"] == 3
    assert {(one["site"], one["kind"], tuple(one["rounds"])) for one in found["failures"]} == {
        (site, "refused", (1,)) for site in SITES
    }
    assert all(stay["refused"] == 1 and stay["last"] is None for stay in found["sites"])
    shown = render_page(Follower(tmp_path / "run").read_state())
    assert "more than 1e-06 in one round" in shown
    assert "continue with polyclinic resume" in shown


def test_bytes_by_site_and_of_the_run_are_those_of_its_result(single: Path) -> None:
    found, cost = told(single), json.loads((single / "result.json").read_text())["cost"]
    assert all(found["cost"][name] == cost[name] for name in ("bytes_down", "bytes_up", "refused", "failed"))
    for way in ("down", "up"):
        assert sum(stay[way] for stay in found["sites"]) == cost[f"bytes_{way}"]
    assert sum(stay["refused"] for stay in found["sites"]) == cost["refused"] > 0


def test_a_comparison_tells_what_is_done_and_what_waits(tmp_path: Path) -> None:
    recipe = tiny(methods={"One": {}, "Two": {"algorithm": "local"}, "Three": {"rounds": 7}})
    counted: Callable[[Recipe, int, int], None] = _stopping(after=3)
    with pytest.raises(KeyboardInterrupt):
        compare([recipe], 2, tmp_path, begin=counted)
    found = told(tmp_path)
    states = [(one["method"], one["run"], one["state"]) for one in found["runs"]]
    waiting = [("Two", 2, "waiting"), ("Three", 1, "waiting"), ("Three", 2, "waiting")]
    assert states == [("One", 1, "finished"), ("One", 2, "finished"), ("Two", 1, "finished"), *waiting]
    assert (found["kind"], found["title"], found["round"], found["rounds"]) == ("comparison", "tiny", 6, 22)
    assert found["sentence"] == "Running: 3 of 6 runs finished; the next is being prepared."
    assert found["seconds_left"] > 0
    assert list(found["curves"]["accuracy"]) == ["One", "Two", "Three"]
    with held(tmp_path / "one" / "seed-0"):
        (tmp_path / "one" / "seed-0" / "result.json").unlink()
        assert told(tmp_path)["state"] == "running"
    assert told(tmp_path)["state"] == "stopped"


def _stopping(after: int) -> Callable[[Recipe, int, int], None]:
    def begin(recipe: Recipe, done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    return begin


def test_privacy_spent_is_what_the_run_itself_reckons_and_the_seed_stays_secret(seeds: Path, tmp_path: Path) -> None:
    folder = next((seeds / "private").glob("seed-*"))
    claimed = json.loads((folder / "result.json").read_text())["privacy"]
    shutil.copytree(folder, tmp_path / "run")
    whole = told(tmp_path / "run")["runs"][0]["privacy"]
    (tmp_path / "run" / "result.json").unlink()
    begun = told(tmp_path / "run")["runs"][0]["privacy"]
    assert whole["epsilon"] == begun["epsilon"] == claimed["epsilon_by_accountant"][claimed["accountant"]]
    assert begun["charged_to_round"] == 2
    compared = told(seeds)
    assert [one["privacy"] is None for one in compared["runs"]] == [
        one["method"] != "Private" for one in compared["runs"]
    ]
    for place in (seeds, folder, tmp_path / "run", seeds / "private"):
        view = Follower(place).read_state()
        assert "87318" not in render_page(view) + state_json(view)


def test_names_of_strangers_stay_names() -> None:
    evil = "<img src=x onerror=alert(1)>"
    reply = SiteOutcome(outcome="error", why=f"{evil} failed")
    rows = [CostRow(event="round", round=1, seconds=1.0, sites={evil: reply})]
    shown = Page(render_page(PageState(evil, (RunStatus(evil, rounds=2, ledger=rows, working=True),), True)))
    assert shown.all("img") == []
    assert shown.text("h1") == evil
    assert len(shown.all("script")) == 1


def test_only_two_addresses_are_answered_and_only_to_get(server: BoardServer) -> None:
    for path in ("/", "/state.json", "/?x=1"):
        assert ask(server, path)[0] == 200
    for path in ("/recipe.yaml", "/../recipe.yaml", "/state.json/", "/index.html", "http://localhost/", "/%2e%2e/"):
        assert ask(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"):
        status, headers, _ = ask(server, "/", method)
        assert (status, headers["Allow"]) == (405, "GET")
    for status, headers, text in (ask(server, "/"), ask(server, "/nothing"), ask(server, "/", "PUT")):
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Server"] == "polyclinic"
        assert status == 200 or text.count(".") >= 1


def test_a_foreign_name_that_leads_here_is_refused(server: BoardServer) -> None:
    for name in ("localhost", "LOCALHOST:9000", "127.0.0.1", "127.0.0.1:1", "[::1]:8765"):
        assert ask(server, "/state.json", Host=name)[0] == 200, name
    for name in (
        "evil.example",
        "evil.example:8765",
        "localhost.evil.example",
        "10.0.0.1",
        "",
        "[::1",
        "127.0.0.1.nip.io",
    ):
        assert ask(server, "/state.json", Host=name)[0] == 403, name


def test_with_a_token_nobody_gets_anything_without(finished: Path) -> None:
    with served(finished, "0.0.0.0", TOKEN) as server:
        assert server.board_url.endswith(f":{server.server_port}/?token={TOKEN}")
        name = f"polyclinic-{server.server_port}"
        for path in ("/", "/state.json", "/nothing", "/?token=", f"/?token={TOKEN}x", f"/state.json?token={TOKEN}"):
            for method in ("GET", "POST"):
                assert ask(server, path, method)[0] == 401, path
        for wrong in (f"{name}={TOKEN[:-1]}", f"polyclinic-1={TOKEN}", f"{name}=", "a;;=b"):
            assert ask(server, "/", Cookie=wrong)[0] == 401
        assert ask(server, "/", Authorization=f"Basic {TOKEN}")[0] == 401
        assert ask(server, "/", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, text = ask(server, f"/?token={TOKEN}")
        assert (status, headers["Location"], text) == (303, "/", "")
        assert set(headers["Set-Cookie"].split("; ")) == {f"{name}={TOKEN}", "Path=/", "HttpOnly", "SameSite=Strict"}
        for path in ("/", "/state.json"):
            status, _, text = ask(server, path, Cookie=f"{name}={TOKEN}")
            assert status == 200
            assert TOKEN not in text
        assert ask(server, "/", Cookie=f"{name}={TOKEN}", Host="fl.example.org")[0] == 200


def test_every_mistake_gets_one_sentence(finished: Path, server: BoardServer, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    taken = str(server.server_port)
    for expected, arguments in {
        "there is no folder": [str(tmp_path / "absent")],
        "holds no run": [str(tmp_path)],
        "another program has that port": [str(finished), "--port", taken],
        "is not this machine alone": [str(finished), "--host", "0.0.0.0"],
        "is not this machine alone, and a board": [str(finished), "--host", "0.0.0.0", "--token", "none"],
        "a token has 16": [str(finished), "--token", "short"],
        "has no such address": [str(finished), "--host", "192.0.2.1", "--token", TOKEN],
    }.items():
        assert expected in commands.refused("board", *arguments)


@pytest.mark.parametrize(
    ("words", "secret"),
    [((), r"\?token=[\w-]{32}"), (("--token", "new"), r"\?token=[\w-]{32}"), (("--token", "none"), "")],
)
def test_the_command_tells_where_to_look_until_it_is_stopped(
    words: tuple[str, ...], secret: str, finished: Path
) -> None:
    """Without a word about it, other accounts of this machine are kept out."""
    stop = threading.Timer(1.0, _thread.interrupt_main)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    stop.start()
    try:
        result = commands.call("board", finished, "--port", "0", "--host", "localhost", *words)
    finally:
        stop.cancel()
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 0, result.output
    told = re.fullmatch(rf"board: http://localhost:\d+/{secret}\n", result.stdout)
    assert told is not None, result.stdout
