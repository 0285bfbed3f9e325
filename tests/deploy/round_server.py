"""A server that plays tiny rounds for ever, as a process: `python -m tests.deploy.round_server SERVER.yaml SITES LOG`.

For every round it writes a line: when it ended, its seconds, the process's memory in MB and its open descriptors.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil

from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.processes import open_server
from tests.deploy.memory_grid import orders


def main(config: Path, count: int, log: Path) -> None:
    process = psutil.Process()
    with open_server(ServerConfig.load(config)) as reception, log.open("w") as file:
        reception.wait_for_sites(120, count, print)
        while True:
            begun = time.perf_counter()
            answers = dict(reception.engine.exchange(1, orders(size=1000), 60))
            seconds = time.perf_counter() - begun
            assert all(isinstance(answer, bytes) for answer in answers.values()), answers
            memory, descriptors = process.memory_info().rss / 1e6, len(os.listdir("/proc/self/fd"))
            print(time.time(), seconds, memory, descriptors, file=file, flush=True)
            time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
