"""The commands of `provision`: keys, certificates and kits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from rich.text import Text
from typer.core import TyperGroup

from polyclinic.cli.common import (
    Json,
    out,
    plain_table,
    print_json,
    print_message,
)

if TYPE_CHECKING:
    pass


MAKE = "make"


class DefaultCommandGroup(TyperGroup):
    """A group in which `provision FILE` means `provision make FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [MAKE, *args]
        return super().parse_args(ctx, args)


provision_app = typer.Typer(
    cls=DefaultCommandGroup, no_args_is_help=True, help="Make and renew the keys, certificates and kits of real sites."
)


Folder = Annotated[Path, typer.Argument(metavar="KITS", help="The folder that `provision FILE --out KITS` made.")]


@provision_app.command(MAKE)
def make(
    file: Annotated[
        Path, typer.Argument(metavar="FEDERATION.yaml", help="The file that lists the sites (docs/deploy.md).")
    ],
    folder: Annotated[Path, typer.Option("--out", metavar="KITS", help="The output folder.")] = Path("kits"),
    wheel: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.whl", help="A wheel of polyclinic for the kits, if sites cannot install it from an index."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a certificate authority, the server's certificate, and a kit with a key for each site (the default)."""
    from polyclinic.deploy.config import FederationConfig
    from polyclinic.deploy.provisioning.provision import (
        provision_federation,
        read_wheel,
    )

    provision_federation(FederationConfig.load(file), folder, None if wheel is None else read_wheel(wheel))
    _print_kits(folder, as_json)
    if not as_json:
        _print_next_steps(
            f"copy to the server: {folder / 'server'}",
            f"send to each site by a secure channel (it holds a private key): {folder / 'sites' / 'NAME.zip'}",
            f"keep here, and give to nobody: {folder / 'ca'}",
        )


@provision_app.command()
def rotate(
    folder: Folder,
    who: Annotated[
        str | None, typer.Argument(metavar="[SITE|server]", help="The site, or `server`, whose key to renew.")
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="Renew the authority, the server and every site.")] = False,
) -> None:
    """Renew the key of a site, of the server, or of all. Old site keys are revoked."""
    from polyclinic.deploy.provisioning import provision

    if everybody == (who is not None):
        raise typer.BadParameter("name the key to renew: a site, server, or --all", param_hint="SITE")
    if who is None:
        provision.rotate_all(folder)
        _print_next_steps(
            f"copy to the server: {folder / 'server'}", f"send to every site: its zip in {folder / 'sites'}"
        )
    elif who == "server":
        provision.rotate_server(folder)
        _print_next_steps(f"copy to the server: {folder / 'server'}; sites need nothing")
    else:
        provision.rotate_site(folder, who)
        _print_next_steps(
            f"copy to the server: {folder / 'server'}", f"send to {who}: {provision.zip_path(folder, who)}"
        )


@provision_app.command()
def revoke(folder: Folder, site: Annotated[str, typer.Argument(metavar="SITE", help="The name of the site.")]) -> None:
    """Revoke a site's key: remove it from the server's list."""
    from polyclinic.deploy.provisioning import provision

    provision.revoke_site(folder, site)
    _print_next_steps(f"copy to the server at once: {folder / 'server'}; until then it still accepts the key of {site}")


@provision_app.command()
def add(folder: Folder, site: Annotated[str, typer.Argument(metavar="SITE", help="The name of the site.")]) -> None:
    """Make a kit for another site, or a new one for a revoked site."""
    from polyclinic.deploy.provisioning import provision

    provision.add_site(folder, site)
    _print_next_steps(f"copy to the server: {folder / 'server'}", f"send to {site}: {provision.zip_path(folder, site)}")


@provision_app.command()
def show(folder: Folder, as_json: Json = False) -> None:
    """Show fingerprints and expiry dates. The exit code is 1 if files do not match or have expired."""
    if _print_kits(folder, as_json):
        raise typer.Exit(1)


def _print_next_steps(*lines: str) -> None:
    for line in lines:
        out.print(Text(line), soft_wrap=True)
    out.print(Text("then restart the server or site; the README.md in each kit says how"), soft_wrap=True)


def _print_kits(folder: Path, as_json: bool) -> bool:
    """Print the keys and certificates; return whether there is a problem."""
    from polyclinic.deploy.provisioning.inspect import inspect_kits

    found = inspect_kits(folder)
    if as_json:
        print_json(asdict(found))
        return bool(found.problems)
    table = plain_table(
        Column("", overflow="fold"),
        Column("fingerprint (SHA-256)", max_width=50, overflow="fold"),
        Column("valid until", no_wrap=True),
    )
    for row in found.rows:
        table.add_row(*map(Text, (row.name, row.fingerprint, row.until)))
    out.print(table)
    for gone in found.revoked:
        out.print(Text(f"{gone.get('why')} on {gone.get('date')}: {gone.get('site')}, {gone.get('fingerprint')}"))
    for message in [f"warning: {w}" for w in found.warnings] + [f"error: {p}" for p in found.problems]:
        print_message(message)
    return bool(found.problems)
