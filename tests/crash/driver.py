"""Runs recipes in forked children that may be killed: deeds of `tests.driver`."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from polyclinic import Recipe, run
from polyclinic.core import failpoints
from polyclinic.core.errors import PolyclinicError
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.federation.rounds import Watch
from polyclinic.runs.experiment import FederatedDataset, load_sites
from tests.deploy.example_sites import ApprovingHandler
from tests.deploy.masking import keyring

INTERRUPTED = 130
BUG = 70
consortium: FederatedDataset | None = None


def load(recipe: Mapping[str, Any]) -> str:
    """Load the images of all recipes of these tests, and whatever this recipe loads at first use."""
    global consortium
    found = Recipe.from_values(recipe)
    consortium = consortium or load_sites(found)
    run(found, dataset=consortium)
    return "loaded"


def start(**job: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # so that whatever the child leaves behind can be found by its group
    os._exit(play(**job))


def answer(
    config: Mapping[str, Any],
    messages: list[str],
    replies: str,
    fault: tuple[str, int] | None = None,
    sites: list[str] | None = None,
) -> int:
    """A child that answers messages (files) at a real site, and writes the replies into a folder.

    `sites`: all sites of the federation, if it knows their keys (`tests.deploy.masking`)."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    if fault:
        failpoints.arm_failpoint(*fault)
    try:
        site = SiteConfig.model_validate(config)
        handler = ApprovingHandler(site, keyring=keyring(site.site, sites) if sites else None)
        for number, path in enumerate(messages):
            (Path(replies) / str(number)).write_bytes(handler.answer_message(Path(path).read_bytes()))
    except BaseException:
        traceback.print_exc()
        os._exit(BUG)
    os._exit(0)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def play(
    recipe: Mapping[str, Any],
    folder: str,
    report: str,
    fault: tuple[str, int] | None = None,
    file_limit: int | None = None,
    act: str = "",
) -> int:
    """A child's whole life. What stops it, if it has a sentence, goes into `report`."""
    if fault:
        failpoints.arm_failpoint(*fault)
    if file_limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    try:
        run(Recipe.from_values(recipe), folder, watch=ACTS[act](), dataset=consortium)
    except PolyclinicError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        Path(report).write_text(json.dumps({"error": type(error).__name__, "sentence": str(error)}))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:
        traceback.print_exc()
        return BUG
    return 0


def nothing() -> Watch:
    return lambda *_: None


def interrupt() -> Watch:
    """Ctrl-C while the second site of round 2 is at work."""

    def watch(event: str, details: Mapping[str, Any]) -> None:
        if event == "site" and details["round"] == 2:
            raise KeyboardInterrupt

    return watch


def kill_busy_worker() -> Watch:
    """Round 2: hold the first worker, so that the site it is given stays unfinished; kill it when another is done."""

    def watch(event: str, details: Mapping[str, Any]) -> None:
        if event == "round" and details["round"] == 2:
            workers()[0].suspend()
        if event == "site" and details["round"] == 2:
            end(workers()[0])

    return once_each(watch)


def kill_idle_worker() -> Watch:
    """Round 2: kill the worker that has just handed in a reply and waits for the next site."""

    def watch(event: str, details: Mapping[str, Any]) -> None:
        if event == "round" and details["round"] == 2:
            workers()[0].suspend()
        if event == "site" and details["round"] == 2:
            held, idle = workers()
            end(idle)
            held.resume()

    return once_each(watch)


def kill_all_workers() -> Watch:
    def watch(event: str, details: Mapping[str, Any]) -> None:
        if event == "round" and details["round"] == 2:
            for worker in workers():
                end(worker)

    return watch


def once_each(watch: Watch) -> Watch:
    """Only the first event of each kind that concerns round 2."""
    seen: set[str] = set()

    def first(event: str, details: Mapping[str, Any]) -> None:
        if details.get("round") == 2 and event not in seen:
            seen.add(event)
            watch(event, details)

    return first


def workers() -> list[psutil.Process]:
    return sorted(psutil.Process().children(), key=lambda process: process.pid)


def end(process: psutil.Process) -> None:
    process.kill()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


ACTS: dict[str, Callable[[], Watch]] = {
    "": nothing,
    "interrupt": interrupt,
    "kill busy worker": kill_busy_worker,
    "kill idle worker": kill_idle_worker,
    "kill all workers": kill_all_workers,
}
