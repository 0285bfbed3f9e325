"""Lists and checks the keys and certificates of a federation's kits (`polyclinic provision show`)."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from polyclinic.core import EngineError, SiteId
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.kit_folder import KitFolder
from polyclinic.deploy.provisioning.manifest import check_kit

WAITING = "no key yet; run `polyclinic provision accept` with the site's request"


@dataclass(frozen=True)
class InspectionRow:
    name: str
    fingerprint: str
    until: str
    """The last day of validity; "" for a site's key, which does not expire."""


@dataclass(frozen=True)
class Inspection:
    rows: tuple[InspectionRow, ...]
    revoked: tuple[dict[str, str], ...]
    warnings: tuple[str, ...]
    """Certificates that expire within 30 days."""
    problems: tuple[str, ...]
    """Problems that keep a site from connecting now."""


def inspect_kits(folder: Path, now: datetime | None = None) -> Inspection:
    """List all keys and certificates in a folder of kits, with warnings and problems."""
    kits, now = KitFolder.open(folder), now or certificates.current_time()
    server = kits.folder / "server"
    shown = {"authority": kits.folder / "ca" / "ca.crt", "server": server / "server.crt"}
    files = (server / "server.crt", server / "server.key", server / "ca.crt")
    checks = [
        partial(_check_authorities, kits),
        partial(certificates.check_server_files, *files, kits.federation.server.host, now),
        partial(check_kit, server),
        *(partial(_check_site, kits, site, now) for site in kits.federation.sites),
    ]
    problems = dict.fromkeys(problem for check in checks for problem in _collect_problem(check))
    rows: list[InspectionRow] = []
    warnings: list[str] = []
    for name, path in shown.items():
        with suppress(EngineError):  # a damaged file is among the problems
            found = certificates.read_certificate(path)
            until = found.not_valid_after_utc
            rows.append(InspectionRow(name, certificates.certificate_fingerprint(found), f"{until:%Y-%m-%d}"))
            if now <= until <= now + certificates.SOON:
                warnings.append(
                    f"the certificate of the {name} ends on {until:%Y-%m-%d}, in {(until - now).days} days; run "
                    f"`polyclinic provision rotate {folder} {'--all' if name == 'authority' else 'server'}`"
                )
    for site in kits.federation.sites:
        if not kits.public_key(site).exists():
            rows.append(InspectionRow(site, WAITING, ""))
            continue
        with suppress(EngineError):
            rows.append(InspectionRow(site, certificates.key_file_fingerprint(kits.public_key(site)), ""))
    return Inspection(tuple(rows), tuple(kits.revoked), tuple(warnings), tuple(problems))


def _collect_problem(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except EngineError as error:
        yield str(error)


def _check_authorities(kits: KitFolder) -> None:
    """Raise `EngineError` unless all kits have one authority; an interrupted `rotate --all` leaves two."""
    ours = certificates.read_certificate(kits.folder / "ca" / "ca.crt")
    for place in (kits.folder / "server", *map(kits.site_folder, kits.federation.sites)):
        if certificates.read_certificate(place / "ca.crt") != ours:
            raise EngineError(
                f"{place / 'ca.crt'} is another authority than {kits.folder / 'ca' / 'ca.crt'}; run `polyclinic "
                f"provision rotate {kits.folder} --all`"
            )


def _check_site(kits: KitFolder, site: SiteId, now: datetime) -> None:
    again = f"run `polyclinic provision rotate {kits.folder} {site}`"
    folder = kits.site_folder(site)
    if (folder / "site.key").exists():
        certificates.check_site_files(folder / "ca.crt", folder / "site.key", now)
        if certificates.read_private_key(folder / "site.key").public_key() != certificates.read_public_key(
            kits.public_key(site)
        ):
            raise EngineError(f"the key in {folder} is not the one that the server knows; {again}")
    check_kit(folder)
    if not kits.public_key(site).exists():
        return
    mark = certificates.key_file_fingerprint(kits.public_key(site))
    if mark in {row.get("fingerprint") for row in kits.revoked}:
        raise EngineError(f"the server still takes the revoked key {mark} of {site}; {again}")
