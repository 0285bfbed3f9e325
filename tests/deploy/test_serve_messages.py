"""What whoever runs a server is told: who takes no part and why, what is wrong before anybody comes, how it ended."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
import yaml
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")


from polyclinic import Recipe, run
from polyclinic.cli.display import result_table
from polyclinic.cli.server import ServePatience, ServerTerminal, play_queued, serve, status
from polyclinic.core.errors import EngineError, PolyclinicError, RecipeError, RoundFailed, StoreError
from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy import recipe_queue
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.flower.server import FlowerEngine
from polyclinic.deploy.processes import SiteRegistration, open_server
from polyclinic.deploy.provisioning.provision import rotate_site
from polyclinic.deploy.recipe_queue import RecipeQueue
from polyclinic.deploy.serve import run_deployed
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.deploy.site.preview import WITHHELD
from polyclinic.deploy.status import WAITING, ServerStatus
from polyclinic.federation import rounds
from polyclinic.federation.engines import RemoteExecution
from polyclinic.storage import messages
from polyclinic.storage.run_folder import RunFolder
from tests.deploy.example_sites import (
    EVERYTHING,
    SITES,
    TABLE,
    ApprovingHandler,
    Crossing,
    approve,
    config as example_config,
    desks,
    recipe,
)
from tests.deploy.flower.test_gateway import attending, until
from tests.deploy.memory_grid import MemoryGrid, echo, engine_of, orders, said as answers
from tests.deploy.real_processes import free_port, furnish
from tests.federation.mock_engine import MockEngine
from tests.reporting.drawn import Page, report_page

KITS = Path("k", "server", "server.yaml")
WITHOUT_PREDICTIONS: dict[str, Any] = {
    "allow": {**EVERYTHING, "kinds": [k for k in EVERYTHING["kinds"] if k != "predictions"]}
}

WITHOUT_FIGURES: dict[str, Any] = {
    "allow": {**EVERYTHING, "kinds": [k for k in EVERYTHING["kinds"] if k not in ("metrics", "predictions")]}
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hospitals with images and kits."""
    folder = tmp_path_factory.mktemp("place")
    furnish(folder)
    return folder


def said(command: Callable[..., None], *words: object) -> tuple[str, BaseException | None]:
    """What a command prints, and the error with which it ends."""
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    found = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})
    return re.sub(r"\s+", " ", found.output), found.exception


def served(place: Path, found: Recipe, out: Path, *options: object) -> tuple[str, BaseException | None]:
    path = out.with_suffix(".yaml")
    path.write_text(found.to_yaml())
    return said(serve, place / KITS, path, "--out", out, *options)


def altered(folder: Path, site: SiteId, name: str, label: str) -> Path:
    """A site's table with another word for one of its labels."""
    path = folder / site / name
    path.write_text((folder / site / TABLE).read_text().replace("malignant", label))
    return path


@contextmanager
def at_work(place: Path, tmp_path: Path, **settings: Mapping[str, Any]) -> Iterator[None]:
    """All sites, in threads, with other settings for those that are named."""
    with ExitStack() as leaving:
        for site in SITES:
            config = SiteConfig.load(place / "k" / "sites" / site / "site.yaml")
            given = SiteConfig.model_validate({**config.model_dump(), **settings.get(site, {})})
            desk = ApprovingHandler(given.model_copy(update={"folder": tmp_path / f"state {site}"}))
            assert config.ca is not None
            assert config.key is not None
            attendance = SiteConnection(config.server, config.ca, config.key, desk.config.folder, desk.answer_message)
            thread = threading.Thread(target=attendance.serve_forever, daemon=True)
            thread.start()
            leaving.callback(thread.join, 15)
            leaving.callback(attendance.stop.set)
        yield


def test_who_refuses_is_named_everywhere_and_a_federation_does_not_shrink_by_itself(
    place: Path, tmp_path: Path
) -> None:
    """Two refuse; by default nothing is trained, and with a quorum of one the rest says who is not in it."""
    refusing: dict[str, dict[str, Any]] = {
        "harbour": {"allow": {**EVERYTHING, "algorithms": ["fedprox"]}},
        "lake": {"data": {}},
    }
    both = (
        "harbour does not take part: refused: policy: harbour does not allow ",
        "lake does not take part: refused: data: ",
    )
    with at_work(place, tmp_path, **refusing):
        told, error = served(place, recipe(rounds=2), tmp_path / "all")
        assert isinstance(error, RoundFailed)
        assert re.search(r"1 of 3 sites enrolled, 3 are needed \(harbour: refused: .*; lake: refused: ", str(error))
        assert all(line in told for line in both)
        assert not RunFolder(tmp_path / "all").enrolment.exists()
        after, _ = said(status, tmp_path / "all")
        assert "stopped: 1 of 3 sites enrolled" in after
        told, error = served(place, recipe(rounds=2, quorum=1), tmp_path / "one")
    assert error is None, told
    assert all(line in told for line in both)
    assert re.search("without harbour: refused: policy: .* without lake: refused: data: ", told)
    summary = json.loads((tmp_path / "one" / "result.json").read_text())
    assert summary["absent"].keys() == {"harbour", "lake"}
    report = Page(report_page([tmp_path / "one"])).text("section", id="failures")
    assert "harbour took no part: refused" in report
    assert "lake took no part: refused" in report


def test_a_finished_run_says_that_nothing_was_run(place: Path, tmp_path: Path) -> None:
    found, out = recipe(rounds=1), tmp_path / "run"
    summary = run_deployed(
        found, RemoteExecution(MockEngine(Crossing(desks(place, "done")).answer), "mock"), SITES, out
    ).summary
    told, error = served(place, found, out)
    assert error is None
    assert re.match(r"this run finished on \d{4}-\d\d-\d\d \d\d:\d\d; no site was contacted", told)
    assert summary.name in told
    (out / "result.json").unlink()
    with pytest.raises(StoreError, match=r"between real sites.*go on with: polyclinic serve SERVER\.yaml"):
        run(found, out, place / "simulation")


def test_a_simulation_is_not_taken_for_a_run_between_sites(place: Path, tmp_path: Path) -> None:
    found, out = recipe(rounds=1), tmp_path / "simulated"
    run(found, out, place / "simulation")
    for _ in ("finished", "interrupted"):
        _, error = served(place, found, out, "--wait", 0)
        assert isinstance(error, StoreError)
        assert "holds a simulation, in which no site was asked" in str(error)
        (out / "result.json").unlink(missing_ok=True)
    _, error = said(status, out)
    assert isinstance(error, StoreError)
    assert "holds a simulation, without real sites" in str(error)


def test_with_a_json_log_the_terminal_has_one_object_a_line(place: Path, tmp_path: Path) -> None:
    """Events, sentences, the result and errors."""
    values = yaml.safe_load((place / KITS).read_text()) | {"log": "json", "folder": str(tmp_path / "state")}
    file, path = (place / KITS).with_name("lines.yaml"), tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))

    def lines(found: Recipe, *words: str) -> tuple[int, list[dict[str, Any]]]:
        path.write_text(found.to_yaml())
        app = typer.Typer()
        app.command()(serve)
        ended = CliRunner().invoke(app, [str(file), str(path), "--out", str(tmp_path / "run"), *words])
        return ended.exit_code, [json.loads(line) for line in ended.output.splitlines()]

    with at_work(place, tmp_path):
        code, told = lines(recipe(rounds=1))
    assert code == 0
    assert [line["round"] for line in told if line.get("event") == "round done"] == [1]
    assert any("listening for sites on" in line["message"] for line in told)
    assert told[-1]["event"] == "finished"
    assert told[-1]["summary"]["rounds"] == 1
    assert all({"time", "level", "source", "message"} <= line.keys() for line in told)
    code, told = lines(recipe(rounds=2), "--wait", "0")
    assert (code, [line["level"] for line in told]) == (1, ["error"])
    assert "another recipe" in told[0]["message"]


class RegisteredGrid(MemoryGrid):
    """A link whose sites are all registered and connected."""

    gate = SimpleNamespace(last_seen={}, versions={})

    def registered_sites(self) -> list[SiteId]:
        return list(self.answers)

    connected_sites = registered_sites


def test_a_recipe_of_a_folder_that_a_site_approves_later_is_played(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the others are told that no run begins, and people of the failures: a wrong key, and a refusal."""
    found, recipes, heard = recipe(rounds=1), tmp_path / "recipes", list[str]()
    recipes.mkdir()
    (recipes / "0.yaml").write_text("name: broken\nround: 3\n")
    (recipes / "a.yaml").write_text(found.to_yaml())
    handlers = desks(place, "later") | {"hill": SiteMessageHandler(example_config(place, "hill", "later"))}
    handlers["lake"].report = heard.append
    grid = RegisteredGrid({site: handlers[site].answer_message for site in SITES})
    config = ServerConfig.load(place / KITS)
    config = config.model_copy(update={"insecure": True, "peers": tmp_path / "none", "folder": tmp_path})
    reception, notices = SiteRegistration(cast(Any, grid), FlowerEngine(grid), ServerStatus(config, [])), list[str]()
    monkeypatch.setattr(reception.board.notifier, "send", lambda *words: notices.append(": ".join(words)))
    queue, terminal = RecipeQueue(recipes, tmp_path / "runs"), ServerTerminal(as_lines=True)
    connected = tuple(grid.connected_since().items())

    def play_next() -> str:
        path = queue.next_recipe(connected)
        assert path is not None
        play_queued(reception, terminal, queue, path, {}, ServePatience(None, None), None)
        return path.name

    assert play_next() == "0.yaml"
    assert "failed: 0.yaml: " in notices[0]
    assert "round" in notices[0]
    assert play_next() == "a.yaml"
    assert "failed: a.yaml: 2 of 3 sites enrolled, 3 are needed (hill: refused: " in notices[1]
    assert heard[-1] == "no run begins: 2 sites enrolled for law, 3 are needed"
    assert (queue.next_recipe(connected), queue.waiting_recipes()) == (None, ["a.yaml"])
    monkeypatch.setattr(recipe_queue, "RETRY", 0.0)
    assert play_next() == "a.yaml"
    assert len(notices) == 2, "this is known"
    approve(handlers["hill"].config.folder, found)
    assert play_next() == "a.yaml"
    assert RunFolder(tmp_path / "runs" / "a").is_finished
    assert queue.waiting_recipes() == []


FORESEEN: dict[str, tuple[dict[str, Any], type[PolyclinicError], str]] = {
    "pooled": ({"algorithm": "centralised"}, RecipeError, "needs all sites' images in one place"),
    "methods": ({"methods": {"a": {"rounds": 1}, "b": {"rounds": 2}}}, RecipeError, "compares 2 methods"),
    "quorum": ({"quorum": 9}, RecipeError, "a quorum of 9 is asked of 3 sites"),
    "cohort": ({"cohort": 4}, RecipeError, "a cohort of 4 is asked of 3 sites"),
}


@pytest.mark.parametrize(("settings", "kind", "sentence"), FORESEEN.values(), ids=FORESEEN)
def test_problems_known_in_advance_are_reported_before_any_site_joins(
    settings: dict[str, Any], kind: type[PolyclinicError], sentence: str, place: Path, tmp_path: Path
) -> None:
    told, error = served(place, recipe(**settings), tmp_path / "run", "--wait", 0)
    assert isinstance(error, kind), error
    assert sentence in str(error)
    assert "listening" not in told


def test_unusable_folders_are_reported_before_any_site_joins(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe().to_yaml())
    told, error = said(serve, place / KITS, path, "--out", tmp_path / "file" / "run", "--wait", 0)
    assert isinstance(error, StoreError)
    assert "cannot write" in str(error)
    assert "listening" not in told
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "recipe.yaml").write_text(recipe(rounds=77).to_yaml())
    told, error = served(place, recipe(), tmp_path / "other", "--wait", 0)
    assert isinstance(error, StoreError)
    assert "another recipe" in str(error)
    assert "listening" not in told


def test_waiting_ends_within_the_given_seconds(place: Path, tmp_path: Path) -> None:
    assert "Invalid value for '--wait'" in served(place, recipe(), tmp_path / "a", "--wait", -5)[0]
    _, error = served(place, recipe(), tmp_path / "b", "--wait", 0)
    assert isinstance(error, EngineError)
    assert "0 of 3 sites came within 0 s, 3 are needed" in str(error)


def test_who_did_not_come_is_not_asked_and_waited_for_again(place: Path, tmp_path: Path) -> None:
    crossing, seen = Crossing(desks(place, "gone")), []
    there = RemoteExecution(MockEngine(crossing.answer), "mock")
    missing = {"hill": "it did not come within 12 s"}
    found = recipe(rounds=1, quorum=2)
    summary = run_deployed(found, there, SITES, tmp_path, lambda *event: seen.append(event), missing=missing).summary
    assert summary.absent == {"hill": "dead: it did not come within 12 s"}
    assert {site for site, _ in crossing.sent} == {"harbour", "lake"}
    assert seen[0][0] == "absent"


def test_other_labels_at_one_site_are_logged_there_and_exclude_it(place: Path, tmp_path: Path) -> None:
    """It is told at its own desk; mended, it enters by the same command: nothing had begun."""
    path = altered(place, "lake", "wrong.csv", "Malign")
    wrong = desks(place, "wrong") | desks(place, "wrong lake", ("lake",), data={TABLE: path})
    heard: list[str] = []
    wrong["lake"].report = heard.append
    there = RemoteExecution(MockEngine(Crossing(wrong).answer), "mock")
    why = "it has classes Malign, benign, harbour has benign, malignant"
    with pytest.raises(RoundFailed, match=rf"2 of 3 sites enrolled, 3 are needed \(lake: refused: {why}"):
        run_deployed(recipe(rounds=1), there, SITES, tmp_path / "run")
    told = (
        "refused, .* other classes than this run .*have the classes Malign, benign, the run benign, malignant; correct"
    )
    assert re.match(told, heard[-1])
    smaller = run_deployed(recipe(rounds=1, quorum=2), there, SITES, tmp_path / "smaller").summary
    assert smaller.absent["lake"].startswith(f"refused: {why}")
    assert not list((place / "lake" / "wrong lake" / "runs").glob("*"))
    right = RemoteExecution(MockEngine(Crossing(desks(place, "right")).answer), "mock")
    assert run_deployed(recipe(rounds=1), right, SITES, tmp_path / "run").summary.absent == {}


def test_a_run_has_the_sites_that_it_began_with(place: Path, tmp_path: Path) -> None:
    """Who was not there cannot enter it; whoever was may be missing for a while, if the recipe says so."""
    crossing = Crossing(desks(place, "began"))

    def without(*away: SiteId) -> RemoteExecution:
        return RemoteExecution(
            MockEngine(lambda s, d: Failure("dead", "away") if s in away else crossing.answer(s, d)), "m"
        )

    found = recipe(rounds=1, quorum=2)
    run_deployed(found, without("hill"), SITES, tmp_path)
    (tmp_path / "result.json").unlink()
    again = run_deployed(found, without(), SITES, tmp_path).summary
    assert [row.site for row in again.site_sizes] == ["harbour", "lake"]
    assert again.absent == {"hill": "refused: it was not there when this run began; only a new run can have it"}
    (tmp_path / "result.json").unlink()
    fewer = run_deployed(recipe(rounds=1, quorum=1), without("lake"), SITES, tmp_path).summary
    assert fewer.absent.keys() == {"hill"}, "lake is in this run, wherever it is now"


def test_without_a_quorum_every_round_needs_all_and_a_lower_one_may_be_set_to_go_on(
    place: Path, tmp_path: Path
) -> None:
    crossing = Crossing(desks(place, "every"))

    def answer(site: SiteId, data: bytes) -> bytes | Failure:
        fields = messages.decode(data).fields
        lost = site == "hill" and fields["purpose"] == "train" and fields["round"] == 2
        return Failure("dead", "it is away") if lost else crossing.answer(site, data)

    there = RemoteExecution(MockEngine(answer), "mock")
    with pytest.raises(RoundFailed, match=r"2 acceptable updates where the quorum is 3.*hill: it is away"):
        run_deployed(recipe(rounds=3), there, SITES, tmp_path)
    assert run_deployed(recipe(rounds=3, quorum=2), there, SITES, tmp_path).summary.rounds == 3


def test_figures_that_were_kept_back_are_not_called_released_or_lost_updates(place: Path, tmp_path: Path) -> None:
    crossing = Crossing(desks(place, "kept", **WITHOUT_FIGURES))
    seen: list[tuple[str, Mapping[str, Any]]] = []
    there = RemoteExecution(MockEngine(crossing.answer), "mock")
    summary = run_deployed(
        recipe(rounds=1, evaluate__every=0), there, SITES, tmp_path, lambda *event: seen.append(event)
    ).summary
    assert [summary.cost.refused, summary.cost.failed, summary.cost.withheld] == [0, 0, 3]
    caption = str(result_table(summary).caption)
    assert "No figure of the final model left a site" in caption
    assert "updates" not in caption
    page = (tmp_path / "privacy.md").read_text()
    assert "| final scores | computed at each site after the last round; they stayed there |" in page
    assert "| predictions | asked of no site, and none left a site |" in page
    told = [info for event, info in seen if event == "evaluated"]
    assert all(info["outcome"] == "withheld" and "does not let metrics leave" in info["why"] for info in told)
    assert len(told) == 3
    status = board(place)
    for info in told:
        status.record_event("evaluated", info)
    assert all(why.startswith("withheld: policy: ") for why in status.last_failures.values())
    assert status.last_failures.keys() == set(SITES)
    assert "hill told no scores of the final model" in Page(report_page([tmp_path])).text("section", id="failures")
    rows = {row.kind: row for row in crossing.desks["hill"].preview_releases(recipe(evaluate__every=0))}
    assert all((rows[kind].when, rows[kind].bytes) == (WITHHELD, 0) for kind in ("final scores", "predictions"))


def test_predictions_of_some_sites_are_reported_as_such(place: Path, tmp_path: Path) -> None:
    open_ones = desks(place, "some") | desks(place, "some hill", ("hill",), **WITHOUT_PREDICTIONS)
    there = RemoteExecution(MockEngine(Crossing(open_ones).answer), "mock")
    summary = run_deployed(recipe(rounds=1), there, SITES, tmp_path).summary
    (said,) = (row.protection for row in summary.released if row.kind == "predictions")
    assert said.startswith("of test images only, once, in thousandths")
    assert "from harbour, lake;" in said
    assert summary.pooled_from == "scores", "predictions of some sites tell nothing of all"
    assert summary.sites.keys() == set(SITES)
    assert {site for site, _, _ in RunFolder(tmp_path).predictions()} == {"harbour", "lake"}


def test_a_silent_site_is_not_waited_for_for_ever_after_the_last_round(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a quorum and without a deadline, over Flower's own messages."""
    monkeypatch.setattr(rounds, "EVALUATION_PATIENCE", 5.0)
    monkeypatch.setattr(rounds, "EVALUATION_ROUNDS", 0.0)
    handlers = desks(place, "silent")
    engine = engine_of({site: handlers[site].answer_message for site in SITES}, patience=math.inf)
    grid = cast(MemoryGrid, engine.link)

    def watch(event: str, info: Mapping[str, Any]) -> None:
        if event == "round done":
            grid.lost.add("hill")
        if event == "evaluated" and info["site"] == "hill":
            grid.lost.clear()

    summary = run_deployed(recipe(rounds=1), RemoteExecution(engine, "flower"), SITES, tmp_path, watch).summary
    assert summary.withheld == {"hill": "late: no reply within 5 s"}
    assert summary.sites.keys() == {"harbour", "lake"}
    assert summary.headline.images == "test images of 2 of 3 sites"


def test_a_run_that_needs_all_sites_waits_for_absent_ones() -> None:
    engine = engine_of({site: echo(site) for site in SITES}, patience=math.inf)
    grid = cast(MemoryGrid, engine.link)
    grid.away.add("hill")
    back = threading.Timer(1.0, grid.away.clear)
    back.start()
    assert all(isinstance(answer, bytes) for answer in answers(engine, orders()).values())
    back.join()


def board(place: Path) -> ServerStatus:
    return ServerStatus(ServerConfig.load(place / KITS), [])


def test_disconnections_are_reported_once_all_sites_have_joined(place: Path) -> None:
    found, told = board(place), list[str]()
    found.report = told.append
    found.report_changes({"harbour"})
    assert found.facts["state"] == WAITING
    found.begin_enrolment(SITES)
    found.report_changes(set(SITES))
    assert told == [], "gathering tells who comes"
    found.report_changes({"harbour", "lake"})
    found.report_changes({"harbour", "lake"})
    found.report_changes(set(SITES))
    assert told == ["hill has gone away", "hill is back"]
    found.patient = True
    found.report_changes(set())
    assert told[2:] == [f"{s} has gone away; the run waits for it, as the recipe names no quorum" for s in SITES]


def test_a_site_that_lied_after_its_update_was_added_up_is_named(place: Path) -> None:
    status = board(place)
    facts = {"round": 3, "site": "hill", "outcome": "accepted"}
    status.record_event("site", facts)
    assert status.last_failures == {}
    status.record_event("site", {**facts, "kind": "shares", "why": "shares: hill has revealed another share"})
    assert status.last_failures == {"hill": "accepted: shares: hill has revealed another share"}


def test_a_status_that_cannot_be_written_ends_nothing(place: Path, tmp_path: Path) -> None:
    config = ServerConfig.load(place / KITS).model_copy(update={"folder": tmp_path / "state", "port": free_port()})
    (tmp_path / "in the way").write_text("")
    with open_server(config) as reception:
        reception.board.folders = [tmp_path / "in the way", tmp_path / "free"]
        (tmp_path / "free" / "status.json").mkdir(parents=True)
        reception.board.write_status(reception.link)


def test_who_uses_a_withdrawn_key_is_named(place: Path, tmp_path: Path) -> None:
    kits = tmp_path / "kits"
    furnish(tmp_path / "there")
    (tmp_path / "there" / "k").rename(kits)
    old = tmp_path / "old"
    (kits / "sites" / "hill").rename(old)
    (kits / "sites" / "hill").mkdir()
    for file in old.iterdir():
        (kits / "sites" / "hill" / file.name).write_bytes(file.read_bytes())
        (kits / "sites" / "hill" / file.name).chmod(file.stat().st_mode)
    rotate_site(kits, "hill")
    (kits / "sites" / "hill" / "site.key").write_bytes((old / "site.key").read_bytes())
    config = ServerConfig.load(kits / "server" / "server.yaml").model_copy(update={"folder": tmp_path / "state"})
    with open_server(config) as reception, attending(kits, reception, "hill", tmp_path / "site") as told:
        until(lambda: told)
        ((site, why),) = reception.board.refusals
    assert site == ""
    day = yaml.safe_load((kits / "server" / "revoked.yaml").read_text())["revoked"][0]["date"]
    assert why == f"the key of hill that was rotated on {day}, from 127.0.0.1"
    assert "its key is not registered, or was revoked" in told[0]
