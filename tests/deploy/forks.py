"""Our commands as processes, forked where PyTorch and Flower are loaded: deeds of `tests.driver`."""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr.supercore.date

import polyclinic.__main__
import polyclinic.cli.main
import polyclinic.deploy.flower.server  # what commands load only when they need it
import polyclinic.deploy.serve
import polyclinic.deploy.site.message_handler
from polyclinic.core import PROTOCOL, failpoints
from tests.deploy.child_process import ChildProcess, die_with_parent

BUG = 70
NETWORK = 0x40000000
"""CLONE_NEWNET of the kernel's interface."""


def code(pid: int) -> str:
    """How a child ended, minus the signal; nothing where it has not."""
    found, how = os.waitpid(pid, os.WNOHANG)
    return str(os.waitstatus_to_exitcode(how)) if found else "running"


def start(
    arguments: Sequence[str],
    log: str,
    fault: str = "",
    network: str = "",
    environment: Mapping[str, str] | None = None,
    ahead: float = 0.0,
    protocol: int = 0,
) -> int:
    """`ahead`: seconds by which the child's clock is ahead; `protocol`: what it speaks as a server, if not ours."""
    pid = os.fork()
    if pid:
        return pid
    ended = BUG
    try:
        _settle(log, network)
        os.environ.update(environment or {})
        _set_clock(ahead)
        ours: Any = polyclinic.deploy.flower.server
        ours.PROTOCOL = protocol or PROTOCOL
        name, _, count = fault.partition(":")
        failpoints.arm_failpoint(name, int(count or 1))
        ended = _play(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)


def _settle(log: str, network: str) -> None:
    """A session and files of its own, as `Child` gives to what it starts; in another network if one is named."""
    os.setsid()
    die_with_parent()
    output, nothing = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    if network:
        with open(network) as found:
            if ctypes.CDLL(None, use_errno=True).setns(found.fileno(), NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {network}")


def _set_clock(ahead: float) -> None:
    """Let this process take it to be later: Python's clock, and Flower's."""
    if ahead:
        true_time, true_now = time.time, datetime.datetime.now
        time.time = lambda: true_time() + ahead
        later = SimpleNamespace(now=lambda tz=None: true_now(tz) + datetime.timedelta(seconds=ahead))
        flower: Any = flwr.supercore.date
        flower.datetime = SimpleNamespace(datetime=later, UTC=datetime.UTC)


def _play(arguments: Sequence[str]) -> int:
    """A command of polyclinic's; or `parent LOG`, a program that has started a process and waits."""
    if arguments[0] == "parent":
        print(ChildProcess(["sleep", "60"], Path(arguments[1])).process.pid, flush=True)
        time.sleep(60)
    sys.argv = ["polyclinic", *arguments]
    try:
        polyclinic.__main__.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
