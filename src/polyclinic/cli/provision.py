"""`polyclinic provision …`: keys, certificates and kits for real sites."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from polyclinic.cli.common import Json, out, print_json, print_message

MAKE = "make"


class DefaultCommandGroup(TyperGroup):
    """`provision federation.yaml` means `provision make federation.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [MAKE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=DefaultCommandGroup, no_args_is_help=True, help="Keys, certificates and kits for real sites.")
Folder = Annotated[Path, typer.Argument(metavar="KITS", help="The folder that `provision FILE --out KITS` made.")]


@app.command(MAKE)
def make(
    file: Annotated[Path, typer.Argument(metavar="FEDERATION.yaml", help="Who takes part (docs/deploy.md).")],
    folder: Annotated[Path, typer.Option("--out", metavar="KITS", help="The folder to make.")] = Path("kits"),
    wheel: Annotated[
        Path | None, typer.Option(metavar="FILE.whl", help="polyclinic itself, if sites cannot get it from an index.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an authority, the server's certificate, a key per site, and a kit for each (`make` may be left out)."""
    from polyclinic.deploy.config import FederationConfig
    from polyclinic.deploy.provisioning.provision import provision_federation, read_wheel

    federation = FederationConfig.load(file)
    provision_federation(federation, folder, None if wheel is None else read_wheel(wheel))
    _print_kits(folder, as_json)
    if not as_json:
        _print_next_steps(
            f"to the server: {folder / 'server'}",
            f"to each site, on a safe way (it holds a secret key): {folder / 'sites' / 'NAME.zip'}",
            f"to nobody: {folder / 'ca'}",
        )


@app.command()
def rotate(
    folder: Folder,
    who: Annotated[str | None, typer.Argument(metavar="[SITE|server]", help="Whose key to renew.")] = None,
    everybody: Annotated[bool, typer.Option("--all", help="The authority, the server and every site.")] = False,
) -> None:
    """Renew keys: of a site, of the server, or of all; old site keys are listed as revoked."""
    from polyclinic.deploy.provisioning import provision

    if everybody == (who is not None):
        raise typer.BadParameter("say whose key to renew: a site's name, server, or --all", param_hint="SITE")
    if who is None:
        provision.rotate_all(folder)
        _print_next_steps(f"to the server: {folder / 'server'}", f"to every site: its zip in {folder / 'sites'}")
    elif who == "server":
        provision.rotate_server(folder)
        _print_next_steps(f"to the server: {folder / 'server'}; sites need nothing")
    else:
        provision.rotate_site(folder, who)
        _print_next_steps(f"to the server: {folder / 'server'}", f"to {who}: {provision.zip_path(folder, who)}")


@app.command()
def revoke(folder: Folder, site: Annotated[str, typer.Argument(metavar="SITE")]) -> None:
    """Take a site's key off the server's list."""
    from polyclinic.deploy.provisioning import provision

    provision.revoke_site(folder, site)
    _print_next_steps(f"to the server, at once: {folder / 'server'}; until then it still takes the key of {site}")


@app.command()
def add(folder: Folder, site: Annotated[str, typer.Argument(metavar="SITE")]) -> None:
    """Make a kit for one more site, or for one that was revoked."""
    from polyclinic.deploy.provisioning import provision

    provision.add_site(folder, site)
    _print_next_steps(f"to the server: {folder / 'server'}", f"to {site}: {provision.zip_path(folder, site)}")


@app.command()
def show(folder: Folder, as_json: Json = False) -> None:
    """Fingerprints and expiry dates; exit code 1 if files do not fit together or have expired."""
    if _print_kits(folder, as_json):
        raise typer.Exit(1)


def _print_next_steps(*lines: str) -> None:
    for line in lines:
        out.print(Text(line), soft_wrap=True)
    out.print(Text("then restart what is running; the README.md in each kit says how"), soft_wrap=True)


def _print_kits(folder: Path, as_json: bool) -> bool:
    """Print what is there; whether something is wrong with it."""
    from polyclinic.deploy.provisioning.inspect import inspect_kits

    found = inspect_kits(folder)
    if as_json:
        print_json(asdict(found))
        return bool(found.problems)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", overflow="fold")
    for title in ("fingerprint (SHA-256)", "good until"):
        table.add_column(title, no_wrap=True)
    for row in found.rows:
        table.add_row(*map(Text, (row.name, row.fingerprint[:50], row.until)))
    out.print(table)
    for gone in found.revoked:
        out.print(Text(f"{gone.get('why')} on {gone.get('date')}: {gone.get('site')}, {gone.get('fingerprint')}"))
    for sentence in found.warnings:
        print_message(f"warning: {sentence}")
    for sentence in found.problems:
        print_message(f"error: {sentence}")
    return bool(found.problems)
