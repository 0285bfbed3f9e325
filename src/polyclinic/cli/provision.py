"""The commands of `provision`: keys, certificates and kits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from polyclinic.cli.common import (
    Json,
    out,
    print_json,
    print_message,
)

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
        typer.Option(metavar="FILE.whl", help="A wheel of polyclinic for the kits (default: of what runs here)."),
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Packages with hashes, by `provision lock` (default: ask pip's index now)."),
    ] = None,
    without_hashes: Annotated[
        bool, typer.Option("--without-hashes", help="Make kits whose other packages have no hashes.")
    ] = False,
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="Make the sites' private keys here: for rehearsals.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a certificate authority, the server's certificate, and a kit for each site (the default)."""
    from polyclinic.deploy.config import FederationConfig
    from polyclinic.deploy.provisioning.provision import check_vacant, provision_federation
    from polyclinic.deploy.provisioning.software import (
        Software,
        build_wheel,
        lock_requirements,
        read_requirements,
        read_wheel,
    )

    federation = FederationConfig.load(file)
    check_vacant(folder)  # before minutes are spent on the package index
    ours = build_wheel() if wheel is None else read_wheel(wheel)
    if requirements is not None:
        packages = read_requirements(requirements)
    elif without_hashes:
        packages = ""
    else:
        print_message("asking the package index for hashes; this takes a minute or two")
        packages = lock_requirements(ours)
    provision_federation(federation, folder, Software(ours, packages), site_keys=with_keys)
    _print_kits(folder, as_json)
    if as_json:
        return
    if not packages:
        print_message(f"warning: the kits have no hashes of other packages; start.sh refuses them unless told. {HOW}")
    sent = "by a secure channel (it holds a private key)" if with_keys else "by any channel (it holds no secret)"
    _print_next_steps(
        f"copy to the server: {folder / 'server'}",
        f"send to each site {sent}: {folder / 'sites' / 'NAME.zip'}",
        "tell each site the whole fingerprint of the authority by telephone",
        *([] if with_keys else [f"then register their keys: polyclinic provision accept {folder} REQUEST …"]),
        f"keep here, and give to nobody: {folder / 'ca'}",
    )


HOW = "Make a list with hashes by `polyclinic provision lock`, then the kits anew with --requirements"


@provision_app.command()
def lock(
    file: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")] = Path("requirements.txt"),
) -> None:
    """Write the packages that kits install, with a SHA-256 for each, as pip's index gives them."""
    from polyclinic.deploy.provisioning.software import build_wheel, lock_requirements
    from polyclinic.storage.files import write_atomically

    packages = lock_requirements(build_wheel())
    write_atomically(file, packages.encode())
    print_message(f"wrote {file}: {len(packages.splitlines())} packages with hashes; use it by --requirements {file}")


@provision_app.command()
def accept(
    folder: Folder,
    files: Annotated[list[Path], typer.Argument(metavar="REQUEST…", help="The files that sites have sent.")],
    yes: Annotated[bool, typer.Option("--yes", help="The fingerprints were compared; do not ask.")] = False,
) -> None:
    """Register the keys that sites have made, after comparing fingerprints by telephone."""
    from polyclinic.deploy.provisioning.kit_folder import KitFolder
    from polyclinic.deploy.provisioning.provision import accept_requests, check_request
    from polyclinic.deploy.provisioning.requests import read_request

    requests, kits = [read_request(file) for file in files], KitFolder.open(folder)
    for request in requests:
        check_request(kits, request)
        former = kits.registered.get(request.site)
        word = "" if former is None else ", as before" if former == request.key else ", instead of its former key"
        out.print(Text(f"{request.site} asks for the key {request.fingerprint}{word}"), soft_wrap=True)
    if not yes and not typer.confirm("Did each site read the same fingerprint to you by telephone?"):
        out.print("nothing was registered")
        raise typer.Exit(1)
    accept_requests(folder, requests)
    _print_next_steps(
        f"copy to the server: {folder / 'server'}; sites need nothing, the server gives them the new list of sites"
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
            f"copy to the server: {folder / 'server'}",
            f"send to every site: its zip in {folder / 'sites'}",
            "tell each site the whole fingerprint of the new authority by telephone",
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
def add(
    folder: Folder,
    site: Annotated[str, typer.Argument(metavar="SITE", help="The name of the site.")],
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="Make the site's private key here: for rehearsals.")
    ] = False,
) -> None:
    """Make a kit for another site, or a new one for a revoked site."""
    from polyclinic.deploy.provisioning import provision

    provision.add_site(folder, site, with_keys)
    _print_next_steps(f"copy to the server: {folder / 'server'}", f"send to {site}: {provision.zip_path(folder, site)}")


@provision_app.command()
def show(folder: Folder, as_json: Json = False) -> None:
    """Show fingerprints and expiry dates. The exit code is 1 if files do not match or have expired."""
    if _print_kits(folder, as_json):
        raise typer.Exit(1)


def _print_next_steps(*lines: str) -> None:
    for line in lines:
        out.print(Text(line), soft_wrap=True)
    out.print(
        Text("the README.md in each kit says what to do with it; a server that runs takes changes within seconds"),
        soft_wrap=True,
    )


def _print_kits(folder: Path, as_json: bool) -> bool:
    """Print the keys and certificates; return whether there is a problem."""
    from polyclinic.deploy.provisioning.inspect import inspect_kits

    found = inspect_kits(folder)
    if as_json:
        print_json(asdict(found))
        return bool(found.problems)
    for row in found.rows:
        until = f", valid until {row.until}" if row.until else ""
        out.print(Text(f"{row.name}: {row.fingerprint}{until}"), soft_wrap=True)
    for gone in found.revoked:
        out.print(Text(f"{gone.get('why')} on {gone.get('date')}: {gone.get('site')}, {gone.get('fingerprint')}"))
    for message in [f"warning: {w}" for w in found.warnings] + [f"error: {p}" for p in found.problems]:
        print_message(message)
    return bool(found.problems)
