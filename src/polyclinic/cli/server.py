"""The commands of a server of real sites: `serve` and `status`."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import polyclinic
from polyclinic.cli.common import (
    Data,
    Json,
    Seed,
    Settings,
    Track,
    find_recipe,
    number_columns,
    out,
    parse_settings,
    plain_table,
    print_json,
)
from polyclinic.cli.display import Display, print_result
from polyclinic.core import EngineError, PolyclinicError, RecipeError, RoundFailed, StoreError, read_yaml

if TYPE_CHECKING:
    from polyclinic.deploy.processes import SiteRegistration
    from polyclinic.deploy.recipe_queue import RecipeQueue
    from polyclinic.runs.result import RunResult


Out = Annotated[Path, typer.Option("--out", help="The folder of the run. An interrupted run in it is continued.")]


def serve(
    server: Annotated[Path, typer.Argument(metavar="SERVER.yaml", help="The configuration file in the server's kit.")],
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|DIR",
            help="A recipe, or a folder of recipes: all are run in turn, and further ones awaited.",
        ),
    ],
    folder: Out,
    wait: Annotated[
        float | None,
        typer.Option("--wait", min=0, help="Seconds to wait for all sites before the recipe's quorum is enough."),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", min=1, help="Seconds that a round waits for a site's reply (default: no limit)."),
    ] = None,
    times_slower: Annotated[
        float,
        typer.Option(
            "--times-slower",
            min=1,
            help="With a quorum: how many times as long as those that answered a silent site may take, from 10 min.",
        ),
    ] = 20,
    settings: Settings = None,
    data: Data = None,
    seed: Seed = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run a recipe between real sites: start the server, wait for the sites, and run the rounds."""
    from polyclinic.deploy.config import ServerConfig
    from polyclinic.deploy.processes import open_server, terminate_as_interrupt

    config, patience = ServerConfig.load(server), ServePatience(wait, deadline, times_slower)
    values, terminal = parse_settings(settings, seed=seed, track=track or None), ServerTerminal(config.log == "json")
    try:
        with terminate_as_interrupt(), terminal.report_errors():
            if Path(recipe).is_dir():
                with open_server(config, file=server, report=terminal.show_logged) as reception:
                    _serve_queue(reception, terminal, Path(recipe), folder, values, patience, data)
            loaded = polyclinic.Recipe.load(find_recipe(recipe), values)
            if _is_finished(loaded, list(config.sites), folder, terminal, as_json):
                return
            with open_server(config, folder, file=server, report=terminal.show_logged) as reception:
                result = _play_and_notify(reception, terminal, loaded, folder, patience, data)
    except KeyboardInterrupt:
        terminal.say("stopped; no finished round is lost: continue with the same command")
        raise typer.Exit(130) from None
    terminal.show_result(result, folder, as_json)


class ServerTerminal:
    """Where `serve` writes: sentences, progress and tables; or, with `log: json`, one JSON object a line only."""

    def __init__(self, as_lines: bool) -> None:
        self.as_lines, self.console = as_lines, Console(stderr=True, quiet=as_lines)

    def say(self, sentence: str, level: int = logging.INFO, fields: Mapping[str, object] | None = None) -> None:
        """Write a sentence. `fields`: what a JSON line has beside it."""
        if not self.as_lines:
            self.console.print(Text(sentence), soft_wrap=True)
            return
        from polyclinic.deploy.notices import JsonLines

        record = logging.LogRecord(__name__, level, "", 0, sentence, None, None)
        record.fields = fields or {}
        print(JsonLines().format(record), file=sys.stderr, flush=True)

    def show_logged(self, sentence: str) -> None:
        """Write a sentence that is logged as well, and so is on a terminal of JSON lines already."""
        if not self.as_lines:
            self.say(sentence)

    def show_result(self, result: RunResult, folder: Path, as_json: bool) -> None:
        """Write the figures of a finished run; as a JSON line, those of `--json`."""
        if not self.as_lines:
            print_result(result, folder, as_json)
            return
        summary = result.summary
        fields = {"event": "finished", "folder": str(folder), "summary": summary.to_json()}
        self.say(f"{summary.name}: {summary.rounds} rounds; the run is in {folder}", fields=fields)
        if as_json:
            print(json.dumps(summary.to_json(), allow_nan=False))

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Write errors as JSON lines, and end with exit code 1; a terminal of sentences leaves them to `main`."""
        try:
            yield
        except (PolyclinicError, OSError) as error:
            if not self.as_lines:
                raise
            self.say(f"error: {error}", logging.ERROR)
            raise typer.Exit(1) from None


@dataclass(frozen=True)
class ServePatience:
    """How long a server waits: for all sites before a run, and for a reply in a round; None: for ever."""

    wait: float | None
    deadline: float | None
    times_slower: float = 20.0
    """With a quorum: how many times as long as those that answered a silent site may take."""


def _is_finished(
    recipe: polyclinic.Recipe, sites: list[str], folder: Path, terminal: ServerTerminal, as_json: bool
) -> bool:
    """Raise for what cannot be run, before any site has joined; print the result of a run that has finished."""
    from polyclinic.deploy.serve import check_servable
    from polyclinic.runs.result import read_result

    check_servable(recipe, sites, folder)
    if not (result_file := folder / "result.json").exists():
        return False
    ended = datetime.fromtimestamp(result_file.stat().st_mtime)
    terminal.say(f"this run finished on {ended:%Y-%m-%d %H:%M}; no site was contacted")
    terminal.show_result(read_result(folder, recipe), folder, as_json)
    return True


def _serve_queue(
    reception: SiteRegistration,
    terminal: ServerTerminal,
    recipes: Path,
    out: Path,
    values: Mapping[str, Any],
    patience: ServePatience,
    data: Path | None,
) -> NoReturn:
    """Run every recipe of a folder in turn, and wait for further ones. A run that fails does not end the server."""
    from polyclinic.deploy.recipe_queue import RecipeQueue

    queue, is_idle = RecipeQueue(recipes, out), False
    while True:
        if (path := queue.next_recipe(_list_connections(reception))) is None:
            if not is_idle:
                waiting = queue.waiting_recipes()
                told = f"{', '.join(waiting)} wait{'s' * (len(waiting) == 1)} for sites" if waiting else ""
                told = told or f"all recipes in {recipes} have been run"
                terminal.say(f"{told}; waiting for further ones")
                is_idle = True
            time.sleep(1)
            continue
        is_idle = False
        play_queued(reception, terminal, queue, path, values, patience, data)


def _list_connections(reception: SiteRegistration) -> tuple[tuple[str, str], ...]:
    """The connected sites and since when, which changes whenever one connects or goes."""
    return tuple(sorted(reception.link.connected_since().items()))


def play_queued(
    reception: SiteRegistration,
    terminal: ServerTerminal,
    queue: RecipeQueue,
    path: Path,
    values: Mapping[str, Any],
    patience: ServePatience,
    data: Path | None,
) -> None:
    """Run a recipe of a folder; if that fails, set it aside, and tell people unless they know the reason already."""
    from polyclinic.deploy.notices import FAILED
    from polyclinic.deploy.recipe_queue import RETRY
    from polyclinic.deploy.serve import check_servable

    folder = queue.run_folder(path)
    try:
        recipe = polyclinic.Recipe.load(path, values)
        check_servable(recipe, reception.link.registered_sites(), folder)
        terminal.show_result(_play_recipe(reception, terminal, recipe, folder, patience, data), folder, False)
    except PolyclinicError as error:
        waits = isinstance(error, RoundFailed | EngineError)
        if queue.set_aside(path, str(error), waits, _list_connections(reception)):
            again = "its file changes or the server restarts"
            if waits:
                again = f"a site connects or goes, and otherwise every {RETRY / 60:g} minutes"
            terminal.say(f"error: {path.name}: {error}; it is tried again when {again}", logging.ERROR)
            reception.board.notifier.send(FAILED, f"{path.name}: {error}")
    finally:
        reception.board.await_run(reception.link)


def _play_and_notify(
    reception: SiteRegistration,
    terminal: ServerTerminal,
    recipe: polyclinic.Recipe,
    folder: Path,
    patience: ServePatience,
    data: Path | None,
) -> RunResult:
    """Run the only recipe; if that fails, people are told before the server ends."""
    from polyclinic.deploy.notices import FAILED

    try:
        return _play_recipe(reception, terminal, recipe, folder, patience, data)
    except PolyclinicError as error:
        reception.board.notifier.send_and_wait(FAILED, f"{recipe.name}: {error}")
        raise


def _play_recipe(
    reception: SiteRegistration,
    terminal: ServerTerminal,
    recipe: polyclinic.Recipe,
    folder: Path,
    patience: ServePatience,
    data: Path | None,
) -> RunResult:
    """Wait for sites, and run a recipe with them; the status says how it goes, and people are told of its end."""
    from polyclinic.deploy.notices import FAILED, FINISHED
    from polyclinic.deploy.processes import PATIENCE

    board, config = reception.board, reception.board.config
    reception.engine.patience = PATIENCE if recipe.quorum else math.inf
    board.begin_run(recipe.name, recipe.rounds, folder)
    with Display(terminal.console) as display:
        terminal.say(f"{config.federation}: listening for sites on {config.host}:{config.port}")
        try:
            result = _run_rounds(reception, terminal, display, recipe, folder, patience, data)
        except PolyclinicError as error:
            board.facts.update(state=FAILED, why=str(error))
            raise
    board.facts.update(state="finished")
    board.notifier.send_and_wait(FINISHED, f"{recipe.name}: {recipe.rounds} rounds; the run is in {folder}")
    return result


def _run_rounds(
    reception: SiteRegistration,
    terminal: ServerTerminal,
    display: Display,
    recipe: polyclinic.Recipe,
    folder: Path,
    patience: ServePatience,
    data: Path | None,
) -> RunResult:
    """Wait for sites, and run the recipe with the connected ones."""
    from polyclinic.deploy.flower.silence import SilenceRule
    from polyclinic.deploy.serve import run_deployed
    from polyclinic.federation.engines import RemoteExecution

    board = reception.board
    reception.engine.silence = SilenceRule(recipe.quorum, patience.times_slower)
    reception.engine.report_silence = board.report_silence
    board.report, board.patient = terminal.show_logged, recipe.quorum is None
    missing = reception.wait_for_sites(patience.wait, recipe.quorum, terminal.say)
    board.begin_enrolment(reception.link.connected_sites())

    def watch(event: str, info: Mapping[str, Any]) -> None:
        board.record_event(event, info)
        display.on_event(event, info)

    display.start_run(recipe, 0, 1)
    remote = RemoteExecution(reception.engine, "flower", patience.deadline, most_images=board.config.images)
    sites = reception.link.registered_sites()
    return run_deployed(recipe, remote, sites, folder, watch, data, missing, reception.read_peers)


FAILED = "failed"
Status: TypeAlias = dict[str, Any]


def status(
    where: Annotated[
        Path, typer.Argument(metavar="DIR|YAML", help="The folder of a run, or the SERVER.yaml or SITE.yaml of a kit.")
    ],
    as_json: Json = False,
) -> None:
    """Show the status of a server or a site: connections, rounds, traffic, refusals and failures."""
    from polyclinic.deploy.status import read_status

    folder = where if where.is_dir() else _state_folder(where)
    found = read_status(folder)
    if found is None:
        if (folder / "recipe.yaml").exists():
            raise StoreError(f"{folder} holds a simulation, without real sites; use: polyclinic report {folder}")
        raise StoreError(f"{folder} holds no status.json: no server or site has been started with it yet")
    if "sites" not in found:
        _print_site(found, folder, as_json)
        return
    whole = found | {"history": _site_history(Path(found.get("folder", folder)))}
    if as_json:
        print_json(whole)
        return
    out.print(Text(_status_line(whole)), soft_wrap=True)
    _print_warnings(found)
    out.print(_sites_table(whole))
    for refusal in found["refusals"]:
        out.print(
            Text(f"refused {refusal['site'] or 'a stranger'}, {refusal['times']} times: {refusal['why']}"),
            soft_wrap=True,
        )


def _print_warnings(found: Status) -> None:
    for warning in found.get("warnings", ()) if found["alive"] else ():
        out.print(Text(f"warning: {warning}"), soft_wrap=True)


def _state_folder(path: Path) -> Path:
    """Return the state folder that a configuration file names."""
    from polyclinic.deploy.config import ServerConfig
    from polyclinic.deploy.site.config import SiteConfig

    if not path.is_file():
        raise RecipeError(f"there is no file or folder {path}; give a run's folder, SERVER.yaml or SITE.yaml")
    values = read_yaml(path, "site.yaml or server.yaml", "give the one of a kit", "federation")
    return (SiteConfig if "site" in values else ServerConfig).load(path).folder


def _site_history(folder: Path) -> dict[str, Status]:
    """Return the traffic and the outcomes of every site's rounds, by the run's ledger."""
    from polyclinic.evaluation.rows import CostRow
    from polyclinic.storage.run_folder import RunFolder

    history: dict[str, Status] = {}
    for row in (row for row in RunFolder(folder).ledger() if isinstance(row, CostRow)):
        for site, sent in row.sites.items() if row.event in ("round", "failed round") else ():
            entry = history.setdefault(site, {"down": 0, "up": 0, "outcomes": Counter()})
            entry["down"] += sent.down
            entry["up"] += sent.up
            entry["outcomes"][sent.outcome or "silent"] += 1
    return history


def _status_line(found: Status) -> str:
    over = f"stopped: {found['why']}" if found["state"] == FAILED else f"stopped while {found['state']}"
    running = found["state"] if found["state"] == "finished" or (found["alive"] and found["state"] != FAILED) else over
    round = f", round {found['round']} of {found['rounds']}" if "round" in found else ""
    recipe = f", {found['recipe']}" if "recipe" in found else ""
    return f"{found['federation']} at {found['server']}{recipe}: {running}{round}"


def _sites_table(found: Status) -> Table:
    figures = number_columns("seen", "accepted", "failed", "MB to", "MB from")
    table = plain_table("site", Column("now", no_wrap=True), *figures)
    for site, there in found["sites"].items():
        rounds = found["history"].get(site, {"down": 0, "up": 0, "outcomes": {}})
        good, sizes = rounds["outcomes"].get("accepted", 0), (rounds["down"], rounds["up"])
        counts = map(str, (good, sum(rounds["outcomes"].values()) - good))
        state = there["state"] if found["alive"] else "–"
        table.add_row(*map(Text, [site, state, _format_age(there["seen"]), *counts, *map(_format_megabytes, sizes)]))
    kinds = ("absent", "doubted", "last failure", "outlier", "silent")
    notes = [f"{site} {why}" for kind in kinds for site, why in found.get(kind, {}).items()]
    versions = ((site, there["version"]) for site, there in found["sites"].items() if "version" in there)
    notes += [f"{site} runs polyclinic {version}, this server {polyclinic.__version__}" for site, version in versions]
    table.caption = Text("\n".join(notes)) if notes else None
    table.caption_justify = "left"
    return table


def _print_site(found: Status, folder: Path, as_json: bool) -> None:
    """Print the status of a site: its connection, and the data that it has sent."""
    from polyclinic.deploy.site.release_log import ReleaseLog, last_trouble
    from polyclinic.deploy.status import STOPPED

    rows = ReleaseLog(folder).read_entries()
    left = {"messages": len(rows), "bytes": sum(int(row.get("bytes", 0)) for row in rows)}
    trouble = last_trouble(folder)
    if as_json:
        notes = trouble and dict(zip(("time", "sentence"), trouble, strict=True))
        print_json({**found, "released": left, "last": rows[-5:], "last refusal or failure": notes})
        return
    over = found["alive"] or found["state"].startswith(STOPPED)
    state = found["state"] if over else f"its process ended without a message; its last state was: {found['state']}"
    out.print(Text(f"{found['site']}: {state}"), soft_wrap=True)
    _print_warnings(found)
    if trouble is not None:
        when, sentence = trouble
        out.print(Text(f"last refusal or failure, {_format_age(when)} ({when}): {sentence}"), soft_wrap=True)
    sent = f"{left['messages']} messages, {_format_megabytes(left['bytes'])} MB"
    out.print(Text(f"sent so far: {sent}; see {folder / 'releases.jsonl'}"), soft_wrap=True)


def _format_megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"


def _format_age(when: str | None) -> str:
    if when is None:
        return "–"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
