"""Runs a command and measures it with all processes that it starts, and all that those start. Linux only.

CPU-seconds: the sum of every process's own CPU clock, read whenever a round is over and ten times a second. Memory:
the sum of all proportional set sizes (PSS: a page that k processes share counts 1/k in each), ten times a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAUSE = 0.1
GRACE = 15.0
"""Seconds that processes may outlive the one that started them."""


@dataclass
class Measured:
    marks: dict[int, float] = field(default_factory=dict)
    """CPU-seconds by the end of each round."""
    cpu: float = 0.0
    peak: int = 0
    """Bytes."""
    status: int | None = None
    """How the command ended; None: it was stopped after `limit` seconds."""

    def steady(self) -> float | None:
        """CPU-seconds of a round once the first two, which warm everything up, are over; None: too few rounds."""
        if len(self.marks) < 2:
            return None
        last = max(self.marks)
        first = min(mark for mark in self.marks if mark >= min(2, last - 1))
        return (self.marks[last] - self.marks[first]) / (last - first) if last > first else None


def run(command: Sequence[str], environment: Mapping[str, str], pipe: Path, log: Path, limit: float) -> Measured:
    """The command reports the number of rounds that are over, a line each, on the named pipe."""
    _adopt_orphans()
    os.mkfifo(pipe)
    reports = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    over = threading.Event()
    measured = Measured()
    watcher = threading.Thread(target=_watch_memory, args=(measured, over))
    watcher.start()
    try:
        _follow(process, reports, measured, limit)
    finally:
        _end_all()
        over.set()
        watcher.join()
        os.close(reports)
    return measured


def _follow(process: subprocess.Popen[bytes], reports: int, measured: Measured, limit: float) -> None:
    """Until the command and all that it started have ended."""
    own: dict[int, float] = {}
    reaped, text = 0.0, b""
    stop = time.monotonic() + limit
    while time.monotonic() < stop:
        ready, _, _ = select.select([reports], [], [], PAUSE)
        _read_clocks(own)
        if ready:
            *lines, text = (text + os.read(reports, 4096)).split(b"\n")
            for line in lines:
                measured.marks.setdefault(int(line), sum(own.values()))
        try:
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                reaped += ended[2].ru_utime + ended[2].ru_stime
                if ended[0] == process.pid:
                    process.returncode = measured.status = os.waitstatus_to_exitcode(ended[1])
                    stop = min(stop, time.monotonic() + GRACE)
        except ChildProcessError:
            break
    # Nobody waits for some processes (their time is in no parent's account), others live too short to be seen.
    measured.cpu = max(reaped, sum(own.values()))


def _read_clocks(own: dict[int, float]) -> None:
    for pid in descendants():
        with contextlib.suppress(OSError):
            own[pid] = time.clock_gettime((~pid << 3) | 2)  # the clock of another process, as clock_getcpuclockid(3)


def _watch_memory(measured: Measured, over: threading.Event) -> None:
    while not over.wait(PAUSE):
        measured.peak = max(measured.peak, sum(_proportional(pid) for pid in descendants()))


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as lines:
        for line in lines:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def descendants() -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                children.setdefault(int(stat.read().rpartition(")")[2].split()[1]), []).append(int(entry))
    found, below = [], [os.getpid()]
    while below:
        here = children.get(below.pop(), [])
        found += here
        below += here
    return found


def _adopt_orphans() -> None:
    """Processes whose parent ends become ours, so that none escapes the count, or lives on."""
    subreaper = 36
    ctypes.CDLL(None).prctl(subreaper, 1)


def _end_all() -> None:
    while left := descendants():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.wait4(-1, 0)[0]:
                pass
