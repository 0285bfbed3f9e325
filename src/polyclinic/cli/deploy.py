"""Between real hospitals: `polyclinic serve`, `polyclinic join`, `polyclinic status`."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.cli.common import (
    Data,
    Json,
    Seed,
    Settings,
    Track,
    err,
    find_recipe,
    out,
    parse_settings,
    print_json,
    print_message,
)
from polyclinic.cli.display import Display, result_table
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import PolyclinicError, RecipeError, StoreError
from polyclinic.core.strict_yaml import read_yaml
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.processes import PATIENCE, STOPPED, open_server, read_status, serve_site, terminate_as_interrupt
from polyclinic.deploy.site.config import SiteConfig, config_warnings, with_remedy
from polyclinic.deploy.site.participation import KEPT, ReleasePreview
from polyclinic.deploy.site.policy import recipe_digest
from polyclinic.deploy.site.release_log import ReleaseLog, last_trouble
from polyclinic.reporting.run_folder import RunResult, read_result
from polyclinic.storage.run_files import Ledger

if TYPE_CHECKING:
    from polyclinic.deploy.processes import SiteRegistration
    from polyclinic.deploy.site.message_handler import SiteMessageHandler

FAILED = "failed"
Out = Annotated[Path, typer.Option("--out", help="The run's folder; one that was interrupted goes on.")]


def serve(
    server: Annotated[Path, typer.Argument(metavar="SERVER.yaml", help="The file of the server's kit.")],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one of ours.")],
    folder: Out,
    wait: Annotated[
        float | None,
        typer.Option("--wait", min=0, help="Seconds to wait for all sites; then the recipe's quorum is enough."),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", min=1, help="Seconds a round waits for a site's reply (default: until it comes)."),
    ] = None,
    settings: Settings = None,
    data: Data = None,
    seed: Seed = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run a recipe between real sites: open the server, wait for them, and play the rounds."""
    from polyclinic.deploy.serve import check_servable

    config = ServerConfig.load(server)
    loaded = Recipe.load(find_recipe(recipe), parse_settings(settings, seed=seed, track=track or None))
    check_servable(loaded, list(config.sites), folder)
    if (folder / "result.json").exists():
        ended = datetime.fromtimestamp((folder / "result.json").stat().st_mtime)
        print_message(f"this run was finished on {ended:%Y-%m-%d %H:%M}; no site was asked anything now")
        _print_result(read_result(folder, loaded), folder, as_json)
        return
    patience = PATIENCE if loaded.quorum else math.inf
    try:
        with terminate_as_interrupt(), open_server(config, folder, patience) as reception, Display(err) as display:
            reception.board.update_facts(recipe=loaded.name, rounds=loaded.rounds, folder=str(folder.resolve()))
            display.print_line(f"{config.federation}: listening for sites on {config.host}:{config.port}")
            try:
                result = _run_rounds(reception, display, loaded, folder, wait, deadline, data)
            except PolyclinicError as error:
                reception.board.update_facts(state=FAILED, why=str(error))
                raise
            reception.board.update_facts(state="finished")
    except KeyboardInterrupt:
        print_message("stopped; no finished round is lost: go on with the same command")
        raise typer.Exit(130) from None
    _print_result(result, folder, as_json)


def _run_rounds(
    reception: SiteRegistration,
    display: Display,
    recipe: Recipe,
    folder: Path,
    wait: float | None,
    deadline: float | None,
    data: Path | None,
) -> RunResult:
    """Wait for sites, and run the recipe between those who come."""
    from polyclinic.deploy.serve import run_deployed
    from polyclinic.federation.engines import RemoteExecution

    board, sites = reception.board, list(reception.link.nodes)
    board.tell, board.patient = display.print_line, recipe.quorum is None
    missing = reception.wait_for_sites(wait, recipe.quorum or len(sites), display.print_line)
    board.begin_enrolment(reception.connected_sites())

    def watch(event: str, info: Mapping[str, Any]) -> None:
        board.record_event(event, info)
        display.on_event(event, info)

    display.start_run(recipe, 0, 1)
    return run_deployed(
        recipe, RemoteExecution(reception.engine, "flower", deadline), sites, folder, watch, data, missing
    )


def _print_result(result: RunResult, folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(result.summary)
        return
    out.print(result_table(result.summary))
    out.print(Text(f"run: {folder}"), soft_wrap=True)


def join(
    site: Annotated[Path, typer.Argument(metavar="SITE.yaml", help="The file of the site's kit.")],
    rehearsed: Annotated[
        str | None,
        typer.Option("--dry-run", metavar="RECIPE", help="Show what this recipe would send from here; send nothing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Take part with this site's images: connect, and answer what the policy in SITE.yaml allows, until stopped."""
    from polyclinic.deploy.site.message_handler import SiteMessageHandler

    config = SiteConfig.load(site)

    def said(sentence: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone, or a log on a full disk, shall not end the work
            print_message(f"{_local_time()} {config.site}: {sentence}")

    for remark in config_warnings(config):
        said(remark)
    with with_remedy():
        _serve_site(config, SiteMessageHandler(config, said), said, rehearsed, as_json)


def _serve_site(
    config: SiteConfig, desk: SiteMessageHandler, said: Callable[[str], None], rehearsed: str | None, as_json: bool
) -> None:
    if rehearsed is not None:
        loaded = Recipe.load(find_recipe(rehearsed))
        rows, mark = desk.preview_releases(loaded), recipe_digest(loaded)
        if as_json:
            print_json({"recipe": mark, "leaves": [asdict(row) for row in rows]})
        else:
            out.print(_release_table(rows))
            out.print(Text(f"to allow this recipe alone, put into allow.recipes:\n{mark}"), soft_wrap=True)
        return
    try:
        serve_site(config, desk.answer_message, said, lambda: desk.is_idle)
    except KeyboardInterrupt:
        said("stopped")
        raise typer.Exit(0) from None


def status(
    where: Annotated[
        Path, typer.Argument(metavar="DIR|YAML", help="A run's folder, or SERVER.yaml or SITE.yaml of a kit.")
    ],
    as_json: Json = False,
) -> None:
    """Who is there, which round it is, what has travelled, what was refused and what failed."""
    folder = where if where.is_dir() else _state_folder(where)
    found = read_status(folder)
    if found is None:
        if (folder / "recipe.yaml").exists():
            raise StoreError(
                f"{folder} holds a simulation, which no site joined; see it by: polyclinic report {folder}"
            )
        raise StoreError(f"{folder} holds no {'status.json'}: nothing has been started there yet")
    if "sites" not in found:
        _print_site(found, folder, as_json)
        return
    run = Path(found["folder"]) if "folder" in found else folder
    whole = found | {"history": _site_history(run)}
    if as_json:
        print_json(whole)
        return
    out.print(Text(_status_line(whole)), soft_wrap=True)
    out.print(_sites_table(whole))
    for refusal in found["refusals"]:
        who = refusal["site"] or "a stranger"
        out.print(Text(f"refused {who}, {refusal['times']} times: {refusal['why']}"), soft_wrap=True)


def _state_folder(path: Path) -> Path:
    """The state folder that a kit's file names."""
    if not path.is_file():
        raise RecipeError(f"there is no file or folder {path}; give a run's folder, SERVER.yaml or SITE.yaml")
    values = read_yaml(path, "site.yaml or server.yaml", "give the one of a kit", "federation")
    kind = SiteConfig if "site" in values else ServerConfig
    return kind.load(path).folder


def _site_history(folder: Path) -> dict[str, dict[str, Any]]:
    """What became of every site's rounds, by the run's ledger."""
    path = folder / "ledger.jsonl"
    found: dict[str, dict[str, Any]] = {}
    for row in Ledger(path).read() if path.exists() else []:
        for site, note in row["sites"].items() if row["event"] in ("round", "failed round") else ():
            entry = found.setdefault(site, {"down": 0, "up": 0, "outcomes": Counter()})
            entry["down"] += note.get("down", 0)
            entry["up"] += note.get("up", 0)
            entry["outcomes"][note.get("outcome", "silent")] += 1
    return found


def _status_line(found: Mapping[str, Any]) -> str:
    over = f"stopped: {found['why']}" if found["state"] == FAILED else f"stopped while {found['state']}"
    running = found["state"] if found["state"] == "finished" or (found["alive"] and found["state"] != FAILED) else over
    round = f", round {found['round']} of {found['rounds']}" if "round" in found else ""
    recipe = f", {found['recipe']}" if "recipe" in found else ""
    return f"{found['federation']} at {found['server']}{recipe}: {running}{round}"


def _sites_table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("site", "now", "seen", "accepted", "failed", "MB to", "MB from"):
        table.add_column(name, justify="left" if name in ("site", "now") else "right", no_wrap=name != "site")
    for site, there in found["sites"].items():
        past = found["history"].get(site, {"down": 0, "up": 0, "outcomes": {}})
        good = past["outcomes"].get("accepted", 0)
        bad = sum(past["outcomes"].values()) - good
        state = there["state"] if found["alive"] else "–"
        cells = [
            site,
            state,
            _format_age(there["seen"]),
            str(good),
            str(bad),
            _format_megabytes(past["down"]),
            _format_megabytes(past["up"]),
        ]
        table.add_row(*map(Text, cells))
    told = [f"{site} {why}" for kind in ("absent", "last failure") for site, why in found.get(kind, {}).items()]
    table.caption = Text("\n".join(told)) if told else None
    table.caption_justify = "left"
    return table


def _print_site(found: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    """A site's own view: its connection, and what has left."""
    rows = ReleaseLog(folder).read_entries()
    left = {"messages": len(rows), "bytes": sum(int(row.get("bytes", 0)) for row in rows)}
    trouble = last_trouble(folder)
    if as_json:
        told = trouble and dict(zip(("time", "sentence"), trouble, strict=True))
        print_json({**found, "released": left, "last": rows[-5:], "last refusal or failure": told})
        return
    over = found["alive"] or found["state"].startswith(STOPPED)
    state = found["state"] if over else f"its process ended without a word; the last was: {found['state']}"
    out.print(Text(f"{found['site']}: {state}"), soft_wrap=True)
    if trouble is not None:
        when, sentence = trouble
        out.print(Text(f"last refusal or failure, {_format_age(when)} ({when}): {sentence}"), soft_wrap=True)
    out.print(
        Text(
            f"left so far: {left['messages']} messages, {_format_megabytes(left['bytes'])} MB; each is in {folder / 'releases.jsonl'}"
        ),
        soft_wrap=True,
    )


def _release_table(rows: Sequence[ReleasePreview]) -> Table:
    """What would leave, kind by kind."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("kind", "when", "MB", "tensors", "protection"):
        table.add_column(name, justify="right" if name in ("MB", "tensors") else "left", overflow="fold")
    for row in rows:
        size = f"{row.bytes / 1e6:.3f}" if row.bytes else "–" if row.when == KEPT else "as asked"
        kind = f"{row.kind} ({row.cluster})" if row.cluster else row.kind
        table.add_row(*map(Text, (kind, row.when, size, str(len(row.shapes)), row.protection)))
    prices = {row.epsilon for row in rows if row.epsilon is not None}
    table.caption = Text("\n".join(f"ε of the whole run: {price:.3g}" for price in sorted(prices)))
    return table


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


def _local_time() -> str:
    return f"{datetime.now():%H:%M:%S}"
