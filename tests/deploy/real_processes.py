"""A federation as real processes, with TLS and keys: kits in a folder, servers and sites started, and all ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import yaml

from polyclinic import Recipe
from polyclinic.core.types import SiteId
from polyclinic.deploy.config import FederationConfig, ServerSection
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.evaluation.summary import RunSummary
from polyclinic.storage.run_folder import RunFolder
from tests.deploy.child_process import ChildProcess
from tests.deploy.example_sites import EVERYTHING, SITES, TABLE, approve, simulation, write_hospitals
from tests.driving import ALONE, Ask


def until(found: Callable[[], object], what: str, seconds: float = 120) -> None:
    begun = time.monotonic()
    while not found():
        assert time.monotonic() - begun < seconds, f"{what} did not happen in time"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def furnish(
    folder: Path,
    sites: Sequence[SiteId] = SITES,
    host: str = "127.0.0.1",
    port: int | None = None,
    least_sites: int = 1,
) -> None:
    """Hospitals with images, and kits in `k`. `least_sites`: how many a site wants in every round."""
    write_hospitals(folder, sites)
    server = ServerSection(host=host, port=port or free_port())
    provision_federation(FederationConfig(federation="north-sea", server=server, sites=tuple(sites)), folder / "k")
    for site in sites:
        path = folder / "k" / "sites" / site / "site.yaml"
        values = yaml.safe_load(path.read_text())
        values |= {"data": {TABLE: str(folder / site / TABLE)}, "allow": {**EVERYTHING, "least_sites": least_sites}}
        path.write_text(yaml.safe_dump(values))


class Process(Protocol):
    """A command of ours at work, or ended."""

    log: Path

    @property
    def pid(self) -> int: ...

    def code(self) -> int | None: ...

    def kill(self) -> None: ...

    def stop(self, seconds: float = 10) -> int: ...


class Executed(ChildProcess):
    """Started as a hospital starts it: by a Python of its own."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def code(self) -> int | None:
        return self.process.poll()


@dataclass
class Forked:
    """Started by `tests.driver`."""

    pid: int
    log: Path
    ask: Ask
    ended: int | None = None

    def code(self) -> int | None:
        if self.ended is None and (told := self.ask(do="code", pid=self.pid)) != "running":
            self.ended = int(told)
        return self.ended

    def kill(self) -> None:
        if self.code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            until(lambda: self.code() is not None, "the end of a killed process", 10)

    def stop(self, seconds: float = 10) -> int:
        if self.code() is None:
            os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                until(lambda: self.code() is not None, "an end in good order", seconds)
        self.kill()
        assert self.ended is not None
        return self.ended


@dataclass
class Ward:
    """The processes of a furnished folder. `networks`: by role, the namespace it lives in."""

    folder: Path
    ask: Ask
    networks: Mapping[str, Path] = field(default_factory=dict)
    sites: dict[SiteId, Process] = field(default_factory=dict)
    server: Process | None = None
    started: list[Process] = field(default_factory=list)

    def command(
        self,
        *arguments: str | Path,
        role: str,
        fault: str = "",
        really: bool = False,
        alter: Mapping[str, float] | None = None,
    ) -> Process:
        """Start a command. `alter`: a clock or a protocol of its own, as `tests.deploy.forks.start` takes them."""
        log, words = self.folder / f"{role}.log", list(map(str, arguments))
        process: Process
        if really:
            environment = {"POLYCLINIC_FAULT": fault, **ALONE}
            process = Executed([sys.executable, "-m", "polyclinic", *words], log, environment)
        else:
            network = str(self.networks.get(role, ""))
            job = {"arguments": words, "log": str(log), "fault": fault, "network": network, **(alter or {})}
            told = self.ask(do="start", **job)
            process = Forked(int(told), log, self.ask)
        self.started.append(process)
        return process

    def join(self, site: SiteId, fault: str = "", really: bool = False) -> None:
        """Start a site's process; one that is at work is stopped before."""
        if site in self.sites:
            self.sites[site].stop()
        file = self.folder / "k" / "sites" / site / "site.yaml"
        self.sites[site] = self.command("join", file, role=site, fault=fault, really=really)

    def serve(self, found: Recipe, run: str, fault: str = "", really: bool = False) -> Process:
        """Start a server that plays a recipe into the folder `run`; the one before, if a test failed, gives way."""
        if self.server is not None:
            self.server.kill()
        path = self.folder / f"{run}.yaml"
        path.write_text(found.to_yaml())
        for site in (self.folder / "k" / "sites").glob("*/site.yaml"):
            approve(site.parent / "state", found)
        file = self.folder / "k" / "server" / "server.yaml"
        words = ("serve", file, path, "--out", self.folder / run)
        self.server = self.command(*words, role="server", fault=fault, really=really)
        return self.server

    def play(self, found: Recipe, run: str, server: Process | None = None) -> tuple[RunSummary, RunSummary]:
        """The result of a whole run, by a server that is at work already or a new one; and, meanwhile, of the same
        recipe with all images in one place, on the local engine."""
        server = server or self.serve(found, run)
        simulated = simulation(found, self.folder).run().summary
        self.until(lambda: server.code() is not None, f"the end of {run}")
        assert server.code() == 0, self.said()
        return RunFolder(self.folder / run).read_summary(), simulated

    def until(self, happened: Callable[[], object], what: str) -> None:
        try:
            until(happened, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        logs = {process.log for process in self.started if process.log.exists()}
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(logs))

    def pids(self) -> dict[SiteId, int]:
        """Of the sites that are at work."""
        return {site: process.pid for site, process in self.sites.items() if process.code() is None}

    def __enter__(self) -> Ward:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as all_of_them:
            for process in self.started:
                all_of_them.callback(process.kill)
