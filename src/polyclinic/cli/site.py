"""The commands of a site: `join`, and those of `site`."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column
from rich.text import Text

import polyclinic
from polyclinic.cli.capability import capability_command
from polyclinic.cli.common import (
    Json,
    find_recipe,
    number_columns,
    out,
    plain_table,
    print_json,
    print_message,
)
from polyclinic.cli.display import describe_positive, format_scores
from polyclinic.core import RecipeError
from polyclinic.reporting.formatting import round_up

if TYPE_CHECKING:
    from polyclinic.deploy.site.config import SiteConfig
    from polyclinic.deploy.site.message_handler import SiteMessageHandler


SHOWN = 12
"""How many letters of a run's name or a recipe's SHA-256 tables show."""
CARD_WORDS = {
    "groups": "most of one patient: train, validation",
    "unnamed": "of no named patient: train, validation, test",
    "left_out": "training images beyond privacy.group",
    "least_sites": "fewest sites",
}
"""What people are shown for the keys of a site's card that do not speak for themselves."""
NO_RUN = 3
"""The exit code of `join --once` if no run began."""


def join(
    site: Annotated[Path, typer.Argument(metavar="SITE.yaml", help="The configuration file in the site's kit.")],
    rehearsed: Annotated[
        str | None,
        typer.Option(
            "--dry-run", metavar="RECIPE", help="Show what this recipe would send from this site, and send nothing."
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Take part in one run, then end: for the machines of a batch system.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", min=1, help=f"With --once: seconds to wait for a run; exit code {NO_RUN} if none began."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Take part with this site's images: connect, and answer requests that the policy in SITE.yaml allows."""
    from polyclinic.deploy.config import site_command
    from polyclinic.deploy.processes import serve_site
    from polyclinic.deploy.site.config import SiteConfig, config_warnings, with_remedy
    from polyclinic.deploy.site.keys import check_own_kit
    from polyclinic.deploy.site.message_handler import SiteMessageHandler

    config, begun = SiteConfig.load(site), time.monotonic()

    def log(sentence: str) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "site": config.site, "message": sentence}
        text = f"{datetime.now():%H:%M:%S} {config.site}: {sentence}"
        with contextlib.suppress(OSError):  # a terminal that is gone, or a log on a full disk, shall not end the work
            print_message(json.dumps(line, ensure_ascii=False) if config.log == "json" else text)

    for warning in (*config_warnings(config), *check_own_kit(config)):
        log(warning)
    with with_remedy():
        handler = SiteMessageHandler(config, log)
        if rehearsed is not None:
            _print_releases(handler, polyclinic.Recipe.load(find_recipe(rehearsed)), as_json)
            if not as_json:
                out.print(Text(f"to approve it: {site_command('approve', shlex.quote(rehearsed))}"), soft_wrap=True)
            return

        def is_done() -> bool:
            late = wait is not None and not handler.begun_runs and time.monotonic() > begun + wait
            return once and (handler.ended_runs > 0 or late)

        try:
            serve_site(
                config,
                handler.answer_message,
                log,
                lambda: handler.is_idle,
                handler.largest_message,
                handler.note_absence,
                is_done,
            )
        except KeyboardInterrupt:
            log("stopped")
            raise typer.Exit(0) from None
        if not handler.ended_runs:
            log(f"no run began within {wait:g} s")
            raise typer.Exit(NO_RUN)


def _print_releases(handler: SiteMessageHandler, recipe: polyclinic.Recipe, as_json: bool) -> None:
    """Print what a recipe asks for, and the data that it would send from the site, by kind."""
    from polyclinic.deploy.site.policy import recipe_digest
    from polyclinic.deploy.site.preview import WITHHELD
    from polyclinic.reporting.privacy_statement import UNITS

    rows, mark = handler.preview_releases(recipe), recipe_digest(recipe)
    asked, card, plan = _describe_recipe(recipe), handler.preview_card(recipe), recipe.privacy
    if as_json:
        priced = None if plan is None else {"unit": plan.unit, "delta": plan.delta}
        print_json(
            {"recipe": mark, "asked": asked, "privacy": priced, "card": card, "releases": [asdict(row) for row in rows]}
        )
        return
    _print_pairs("recipe", asked)
    table = plain_table(*(Column(name, overflow="fold") for name in ("kind", "when", "MB", "tensors", "protection")))
    for column in table.columns[2:4]:
        column.justify = "right"
    for row in rows:
        size = f"{row.bytes / 1e6:.3f}" if row.bytes else "–" if row.when == WITHHELD else "small"
        kind = f"{row.kind} ({row.cluster})" if row.cluster else row.kind
        table.add_row(*map(Text, (kind, row.when, size, str(len(row.shapes)), row.protection)))
    prices = sorted({row.epsilon for row in rows if row.epsilon is not None})
    out.print(table)
    claimed = "" if plan is None else f"at δ = {plan.delta:.2g}, for {UNITS[plan.unit]}"
    for price in prices:
        out.print(Text(f"ε of the whole run: {round_up(price)} {claimed}"), soft_wrap=True)
    _print_pairs("card: what this site tells of its images", {CARD_WORDS.get(k, k): value for k, value in card.items()})
    out.print(Text(f"SHA-256 of the recipe:\n{mark}"), soft_wrap=True)


def _describe_recipe(recipe: polyclinic.Recipe) -> dict[str, object]:
    """Return what a recipe asks for, in words that people compare with what was agreed."""
    given = recipe.data.options
    parts = [str(part["set"]) for part in given.get("parts", ())]
    return {
        "name": recipe.name,
        "method": recipe.algorithm.name,
        "network": list(dict.fromkeys(section.name for section in recipe.trained_models.values())),
        "rounds": recipe.rounds,
        "data": parts or [str(given.get("path", recipe.data.name))],
        "seed": recipe.seed,
        "privacy plan": "none" if recipe.privacy is None else f"protects one {recipe.privacy.unit}",
    }


def _print_pairs(title: str, values: Mapping[str, object]) -> None:
    """Print names and values in two columns."""
    table = plain_table(title, Column("", overflow="fold"))
    for name, value in values.items():
        shown = ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
        table.add_row(Text(name), Text(shown))
    out.print(table)


site_app = typer.Typer(no_args_is_help=True, help="A site's own people: approvals, key, log, scores and machine.")
SiteFile = Annotated[Path, typer.Argument(metavar="SITE.yaml", help="The configuration file in the site's kit.")]


@site_app.command("key")
def key_command(
    site: SiteFile,
    new: Annotated[bool, typer.Option("--new", help="Replace the key that is there; the old one is kept.")] = False,
) -> None:
    """Make this site's private key, and the request by which the coordinator registers it."""
    from polyclinic.deploy.provisioning.requests import make_site_key, write_request
    from polyclinic.deploy.site.config import SiteConfig

    config = SiteConfig.load(site)
    if config.key is None:
        raise RecipeError(f"{site} lacks the key 'key'; use the file of the kit")
    request = config.key.with_name("request.json")
    found = write_request(request, config.federation, config.site, make_site_key(config.key, new))
    out.print(Text(f"private key: {config.key} (give it to nobody)"), soft_wrap=True)
    out.print(Text(f"send to the coordinator by any channel: {request}"), soft_wrap=True)
    out.print(Text(f"and read to the coordinator by telephone: {found.fingerprint}"), soft_wrap=True)


@site_app.command("log")
def log_command(
    site: SiteFile,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no row of releases.jsonl was changed or is missing.")
    ] = False,
    last: Annotated[int, typer.Option("--last", min=0, metavar="N", help="How many rows to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Show what has left this site, by the log of releases."""
    from polyclinic.deploy.site.config import SiteConfig
    from polyclinic.deploy.site.release_log import ReleaseLog

    log = ReleaseLog(SiteConfig.load(site).folder)
    rows, chain = log.verify_chain() if verify else (0, "")
    entries = log.read_entries()
    if as_json:
        print_json({"rows": entries[-last:] if last else [], "verified": rows if verify else None, "chain": chain})
        return
    table = plain_table(
        "time", "run", Column("round", justify="right"), "for", "kinds", Column("bytes", justify="right")
    )
    for row in entries[-last:] if last else []:
        times = f" ({row['times']} times)" if "times" in row else ""
        cells = row["time"], row["run"], row["round"], row["purpose"] + times, ", ".join(row["kinds"]), row["bytes"]
        table.add_row(*(Text(str(cell)) for cell in cells))
    out.print(table)
    if verify:
        out.print(
            Text(f"{rows} rows, none changed or missing before the last; the chain ends in {chain or '–'}"),
            soft_wrap=True,
        )


@site_app.command("scores")
def scores_command(
    site: SiteFile,
    as_json: Json = False,
) -> None:
    """Show how the final models of all finished runs did on this site's own images, and what of it left the site."""
    from polyclinic.deploy.site.config import SiteConfig
    from polyclinic.deploy.site.scores import describe_release, read_kept_scores

    config = SiteConfig.load(site)
    found = read_kept_scores(config.folder)
    if as_json:
        print_json([kept.model_dump(mode="json") for kept in found])
        return
    if not found:
        out.print(Text(f"{config.site} has taken part in no run that was evaluated yet"), soft_wrap=True)
        return
    figures = number_columns("n", "accuracy [95 %]", "AUC [95 %]", "sensit.", "specif.")
    table = plain_table(Column("run", no_wrap=True), *figures)
    for kept in found:
        cells = ["–"] * 5 if kept.judged is None else format_scores(kept.judged)
        table.add_row(*map(Text, [kept.run[:SHOWN], *cells]))
    out.print(table)
    for note in dict.fromkeys(filter(None, (describe_positive(kept.classes) for kept in found))):
        out.print(Text(note), soft_wrap=True)
    for kept in found:
        what = f"{kept.run[:SHOWN]} {kept.recipe} ({kept.headline or 'no test images'}), {_shorten_time(kept.time)}"
        out.print(Text(f"{what}: {describe_release(kept)}"), soft_wrap=True)
    out.print(Text(f"all metrics, parts and models: {config.folder / 'scores'}"), soft_wrap=True)


@site_app.command("approve")
def approve_command(
    site: SiteFile,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="The recipe as agreed; none: list what is approved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Without a recipe: print the list as JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Approve without asking.")] = False,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Who approves; default: the user's name.")] = None,
    revoke: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Withdraw the approval of this recipe (or its first letters).")
    ] = None,
) -> None:
    """Let a recipe run at this site: shows what it would send and the policy in force, then asks."""
    from polyclinic.deploy.site.config import SiteConfig, with_remedy
    from polyclinic.deploy.site.message_handler import SiteMessageHandler
    from polyclinic.deploy.site.policy import approval_remarks, approve_recipe

    config = SiteConfig.load(site)
    with with_remedy():
        if revoke is not None:
            _revoke_approval(config.folder, revoke)
        if recipe is None:
            _print_approvals(config.folder, as_json)
            return
        if as_json:
            raise typer.BadParameter("--json is for the list of approvals; leave out the recipe", param_hint="--json")
        found = polyclinic.Recipe.load(find_recipe(recipe))
        _print_releases(SiteMessageHandler(config), found, as_json=False)
        _print_policy(config)
        for remark in approval_remarks(found, config.budget):
            out.print(Text(f"note: {remark}"), soft_wrap=True)
        if not yes and not typer.confirm(f"Shall {config.site} take part in {found.name!r} under this policy?"):
            out.print("nothing was approved")
            raise typer.Exit(1)
        digest = approve_recipe(
            config.folder, found, by or getpass.getuser(), datetime.now().astimezone().isoformat(timespec="seconds")
        )
    out.print(Text(f"{config.site} has approved {found.name!r}; to withdraw: --revoke {digest[:12]}"), soft_wrap=True)


def _revoke_approval(folder: Path, start: str) -> None:
    from polyclinic.deploy.site.policy import read_approvals, write_approvals

    known = read_approvals(folder)
    gone = [approval for approval in known if approval.digest.startswith(start.lower())]
    digests = {approval.digest for approval in gone}
    if len(digests) != 1 or not start:
        raise typer.BadParameter(
            f"{len(digests)} approved recipes begin with {start!r}; give more of the SHA-256 that is listed",
            param_hint="--revoke",
        )
    write_approvals(folder, [approval for approval in known if approval not in gone])
    out.print(Text(f"no longer approved: {gone[0].name!r} ({gone[0].digest})"), soft_wrap=True)


def _print_approvals(folder: Path, as_json: bool) -> None:
    from polyclinic.deploy.site.policy import read_approvals

    known = read_approvals(folder)
    if as_json:
        print_json([approval.model_dump() for approval in known])
        return
    name = Column("recipe", overflow="fold")
    table = plain_table(name, *(Column(n, no_wrap=True) for n in ("approved", "by", "its run", "SHA-256")))
    for approval in known:
        run = f"{approval.run[:SHOWN]} goes on" if approval.run else "not begun"
        run = f"ended {_shorten_time(approval.finished)}" if approval.finished else run
        cells = approval.name, _shorten_time(approval.date), approval.by, run, approval.digest[:SHOWN]
        table.add_row(*map(Text, cells))
    out.print(table if known else Text("no recipe is approved, so none can run here"))


def _shorten_time(text: str) -> str:
    """Return a time to the minute, on this machine's clock; a text that is no time as it is."""
    with contextlib.suppress(ValueError):
        return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M}"
    return text


def _print_policy(config: SiteConfig) -> None:
    """Print what `allow` and `budget` in site.yaml say, defaults included."""
    from polyclinic.deploy.site.config import budget_remarks

    allowed = {f"allow.{name}": value for name, value in config.allow.model_dump().items()}
    budget = "none: no bound on what a server can learn from updates" if config.budget is None else str(config.budget)
    _print_pairs("policy in force", {**allowed, "budget": budget})
    for remark in budget_remarks(config):
        out.print(Text(f"note: {remark}"), soft_wrap=True)


@site_app.command("allow-round")
def allow_round_command(
    site: SiteFile,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run, as the site's terminal names it.")],
    round: Annotated[int, typer.Argument(metavar="ROUND", min=1, help="The round that the server may ask for next.")],
) -> None:
    """Let the server of a run go back to a round, or leave rounds out: once, and only this site's own people can."""
    from polyclinic.deploy.site.config import SiteConfig, with_remedy
    from polyclinic.deploy.site.message_checks import read_terms
    from polyclinic.deploy.site.orders import allow_round
    from polyclinic.storage import messages

    config = SiteConfig.load(site)
    folder = config.folder / "runs" / run
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", run) or not (folder / "begin.pcl").exists():
        known = sorted(path.parent.name for path in (config.folder / "runs").glob("*/begin.pcl"))
        raise typer.BadParameter(
            f"{config.site} takes part in no run {run!r:.70}; there are: {', '.join(known) or 'none'}", param_hint="RUN"
        )
    with with_remedy():
        rounds = read_terms(messages.decode((folder / "begin.pcl").read_bytes()).fields, config.site).recipe.rounds
        if round > rounds + 1:  # the evaluation comes as the one after the last
            raise typer.BadParameter(f"{round} is none of run {run}, which has {rounds} rounds", param_hint="ROUND")
        allow_round(folder, round)
    out.print(Text(f"{config.site} will take round {round} of run {run} next, whatever it has answered"))


site_app.command("capability")(capability_command)
