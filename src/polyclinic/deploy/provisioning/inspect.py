"""Lists and checks the keys and certificates of a federation's kits (`polyclinic provision show`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from polyclinic.core import EngineError, SiteId
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.provision import KitFolder


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
    checks: list[Callable[[], object]] = [lambda: _check_authorities(kits)]
    files = (server / "server.crt", server / "server.key", server / "ca.crt")
    checks.append(lambda: certificates.check_server_files(*files, kits.federation.server.host, now))
    for site in kits.federation.sites:
        checks.append(lambda site=site: _check_site(kits, site, now))  # type: ignore[misc]
    problems = tuple(dict.fromkeys(sentence for check in checks for sentence in _collect_problem(check)))
    rows = [row for name, path in shown.items() for row in _certificate_rows(name, path)]
    rows += [row for site in kits.federation.sites for row in _key_rows(site, kits.public_key(site))]
    ending = tuple(warning for name, path in shown.items() for warning in _warn_of_expiry(name, path, folder, now))
    return Inspection(tuple(rows), tuple(kits.revoked), ending, problems)


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
            again = f"run `polyclinic provision rotate {kits.folder} --all`"
            raise EngineError(f"{place / 'ca.crt'} is another authority than {kits.folder / 'ca' / 'ca.crt'}; {again}")


def _check_site(kits: KitFolder, site: SiteId, now: datetime) -> None:
    again = f"run `polyclinic provision rotate {kits.folder} {site}`"
    folder = kits.site_folder(site)
    certificates.check_site_files(folder / "ca.crt", folder / "site.key", now)
    if certificates.read_private_key(folder / "site.key").public_key() != certificates.read_public_key(
        kits.public_key(site)
    ):
        raise EngineError(f"the key in {folder} is not the one that the server knows; {again}")
    mark = certificates.key_file_fingerprint(kits.public_key(site))
    if mark in {row.get("fingerprint") for row in kits.revoked}:
        raise EngineError(f"the server still takes the revoked key {mark} of {site}; {again}")


def _certificate_rows(name: str, path: Path) -> Iterator[InspectionRow]:
    for found in _check_readable(path):
        yield InspectionRow(name, certificates.certificate_fingerprint(found), f"{found.not_valid_after_utc:%Y-%m-%d}")


def _key_rows(site: SiteId, path: Path) -> Iterator[InspectionRow]:
    try:
        yield InspectionRow(site, certificates.key_file_fingerprint(path), "")
    except EngineError:  # among the problems already
        return


def _check_readable(path: Path) -> Iterator[certificates.Certificate]:
    try:
        yield certificates.read_certificate(path)
    except EngineError:  # among the problems already
        return


def _warn_of_expiry(name: str, path: Path, folder: Path, now: datetime) -> Iterator[str]:
    for found in _check_readable(path):
        left = found.not_valid_after_utc - now
        if now <= found.not_valid_after_utc and left <= certificates.SOON:
            who = "--all" if name == "authority" else "server"
            day = f"{found.not_valid_after_utc:%Y-%m-%d}"
            yield (
                f"the certificate of the {name} ends on {day}, in {left.days} days; "
                f"run `polyclinic provision rotate {folder} {who}`"
            )
