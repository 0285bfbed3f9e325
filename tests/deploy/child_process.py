"""Processes that end with the program that starts them, for rehearsals, tests and benchmarks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic.deploy.flower import ENVIRONMENT


class ChildProcess:
    """A process started by a program that also ends it; it dies with its parent, however that ends."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @staticmethod
    def start_polyclinic(
        *arguments: str | Path, log: Path, environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        return ChildProcess([sys.executable, "-m", "polyclinic", *map(str, arguments)], log, environment)

    def kill(self) -> None:
        """Kill the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, seconds: float = 10) -> int:
        """Terminate the process, kill it after `seconds`, and return its exit code."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()
        return self.process.returncode

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def die_with_parent() -> None:
    set_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
