"""What a server looks after while it runs: keys and certificates that were replaced, and certificates that will expire.

`polyclinic provision` may write into the server's folder, or a person may copy a new server kit over it, at any time.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from polyclinic.core import EngineError, PolyclinicError, SiteId
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.provisioning.certificates import (
    SOON,
    PublicKey,
    check_server_files,
    current_time,
    read_certificate,
    read_revoked_keys,
)

RELOADED = ("sites", "certificate", "key", "ca")
"""The keys of server.yaml that are taken while the server runs."""
DAY = timedelta(days=1)
COPYING = 5
"""How often files that do not match are looked at before they are reported: they may just be being copied."""


class Register(Protocol):
    """Who takes changed keys: `deploy/flower/key_register.py`."""

    def revoke_keys(self, revoked: Iterable[tuple[PublicKey, str]]) -> list[str]: ...

    def register_keys(self, keys: Mapping[SiteId, Path]) -> list[str]: ...


def describe_expiry(what: str, until: datetime, remedy: str, now: datetime) -> str | None:
    """A warning if a certificate has ended or ends within 30 days; None otherwise. `remedy`: what to do about it."""
    if until > now + SOON:
        return None
    when = f"ended on {until:%Y-%m-%d}" if until < now else f"ends on {until:%Y-%m-%d}, in {(until - now).days} days"
    return f"{what} {when}; {remedy}"


def server_expiries(config: ServerConfig) -> dict[str, datetime]:
    """When the server's certificate and its authority's end, by name; without TLS, or of a damaged file, nothing."""
    found: dict[str, datetime] = {}
    for name, path in (("server", config.certificate), ("authority", config.ca)):
        with contextlib.suppress(EngineError):
            if not config.insecure:
                found[name] = read_certificate(path).not_valid_after_utc
    return found


REMEDIES = {
    "server": "run `polyclinic provision rotate KITS server` and copy the new server kit here",
    "authority": "run `polyclinic provision rotate KITS --all` and hand out new kits",
}


def server_warnings(config: ServerConfig, now: datetime) -> list[str]:
    """Sentences about the server's certificates that have ended or end within 30 days."""
    expiries = server_expiries(config).items()
    found = (describe_expiry(f"the certificate of the {name}", end, REMEDIES[name], now) for name, end in expiries)
    return [sentence for sentence in found if sentence is not None]


def site_warnings(authority: Path | None, server_end: datetime | None, now: datetime) -> list[str]:
    """Sentences about the certificates that a site relies on: of the authority in its kit, and of the server."""
    found = []
    if server_end is not None:
        remedy = "ask the coordinator to run `polyclinic provision rotate KITS server`"
        found.append(describe_expiry("the server's certificate", server_end, remedy, now))
    with contextlib.suppress(EngineError):
        if authority is not None:
            end = read_certificate(authority).not_valid_after_utc
            found.append(describe_expiry(f"{authority.name}", end, "ask the coordinator for a new kit", now))
    return [sentence for sentence in found if sentence is not None]


class Daily:
    """Lets through, once a day each, sentences that hold for long."""

    def __init__(self) -> None:
        self.told: dict[str, datetime] = {}

    def due(self, sentences: Iterable[str], now: datetime) -> list[str]:
        """Those of the sentences that have not been let through in the last 24 hours."""
        found = [sentence for sentence in sentences if now - self.told.get(sentence, now - DAY) >= DAY]
        self.told |= dict.fromkeys(found, now)
        return found


class Upkeep:
    """Takes changed keys and certificates without a restart, and warns once a day before a certificate expires.

    Args:
        config: server.yaml as it was when the server started.
        file: The path of server.yaml, which is read again when it has changed; None: never.
        register: Takes changed keys.
        take_certificate: Is called with the files of a changed certificate and its key.
        report: Is called with a sentence about every change.
        call_people: Is called with a sentence when somebody has to mend something.
    """

    def __init__(
        self,
        config: ServerConfig,
        file: Path | None,
        register: Register,
        take_certificate: Callable[[Path, Path], None],
        report: Callable[[str], None],
        call_people: Callable[[str], None],
    ) -> None:
        self.config, self.file = config, file
        self.register, self.take_certificate = register, take_certificate
        self.report, self.call_people = report, call_people
        self.taken, self.server_end = self._file_states(), server_expiries(config).get("server")
        self.failures, self.daily = 0, Daily()
        self.warnings: list[str] = []
        """What a person should know before it is too late."""

    def look(self, now: datetime | None = None) -> None:
        """Take what has changed since the last look, and give the warnings of the day. Raises nothing expected."""
        now = now or current_time()
        if (states := self._file_states()) != self.taken:
            try:
                self._take_changes(now)
                self.taken, self.failures = states, 0
            except PolyclinicError as error:
                self.failures += 1
                if self.failures == COPYING:
                    self.report(f"the changed files are not taken: {error}")
                    self.call_people(f"the changed files are not taken: {error}")
        self.warnings = server_warnings(self.config, now)
        for sentence in self.daily.due(self.warnings, now):
            self.report(f"warning: {sentence}")
            self.call_people(sentence)

    def _take_changes(self, now: datetime) -> None:
        """Read server.yaml and all keys again. Revoked keys are cut off even if the rest cannot be read yet."""
        self._report_all(self.register.revoke_keys(read_revoked_keys(self.config.revoked)))
        found = self.config if self.file is None else ServerConfig.load(self.file)
        self.config = self.config.model_copy(update={name: getattr(found, name) for name in RELOADED})
        self._report_all(self.register.register_keys(self.config.sites))
        config = self.config
        if not config.insecure:
            check_server_files(config.certificate, config.key, config.ca, config.host, now)
            self.take_certificate(config.certificate, config.key)
            if (end := server_expiries(config)["server"]) != self.server_end:
                self.server_end = end
                self.report(f"the server shows its new certificate, which is valid until {end:%Y-%m-%d}")

    def _report_all(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            self.report(sentence)

    def _file_states(self) -> list[tuple[str, int, int, int]]:
        """Size, time and number of every file that may change; a missing one counts as changed when it appears."""
        config = self.config
        paths = [config.revoked, config.certificate, config.key, config.ca, *config.sites.values()]
        return [_file_state(path) for path in ([self.file] if self.file is not None else []) + paths]


def _file_state(path: Path) -> tuple[str, int, int, int]:
    try:
        found = os.stat(path)
        return str(path), found.st_mtime_ns, found.st_size, found.st_ino
    except OSError:
        return str(path), 0, 0, 0
