"""Drivers: processes that have loaded everything and fork a child for each job, one JSON job per line.

Importing PyTorch takes seconds, a fork takes none. A driver only forks and waits; it has one thread, so its children
may do whatever they like.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import psutil

Ask: TypeAlias = Callable[..., str]
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def sync_nothing() -> None:
    """Wait for no disk: a test kills processes, which loses nothing that was written; nobody cuts the power."""
    os.fsync = os.fstat  # type: ignore[assignment]  # which refuses what is no open file, too


def serve(**deeds: Callable[..., object]) -> NoReturn:
    """A driver's life, once it has loaded what its children need; whoever asks for `ready` waits until then."""
    gc.freeze()
    assert psutil.Process().num_threads() == 1, "a process with threads cannot be forked safely"
    deeds["ready"] = os.getpid
    for line in sys.stdin:
        job = json.loads(line)
        print(deeds[job.pop("do")](**job), flush=True)
    os._exit(0)


@contextmanager
def driving(
    module: str, *arguments: str, environment: Mapping[str, str], before: Callable[[], None] | None = None
) -> Iterator[Ask]:
    """A driver at work: give it a job, and hear what comes of it. `before`: what its process does first of all."""
    driver = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=before,
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    requests, replies = driver.stdin, driver.stdout

    def ask(**job: Any) -> str:
        print(json.dumps(job), file=requests, flush=True)
        line = replies.readline().strip()
        assert line, "the driver has ended"
        return line

    try:
        yield ask
    finally:
        requests.close()
        try:
            driver.wait(timeout=30)
        finally:
            driver.kill()
            driver.wait()
            replies.close()
