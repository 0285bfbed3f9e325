"""The driver of all tests that fork, which each worker of pytest starts once: `python -m tests.driver`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from polyclinic import run
from tests.crash import driver
from tests.driving import serve, sync_nothing
from tests.small import tiny


def main() -> None:
    torch.set_num_threads(1)
    sync_nothing()
    deeds: dict[str, Callable[..., object]] = {}
    with suppress(ModuleNotFoundError):  # without the extra polyclinic[flower]
        from tests.deploy import forks

        deeds |= {"start": forks.start, "code": forks.code}
    with tempfile.TemporaryDirectory() as folder:
        run(tiny(), Path(folder) / "run")  # whatever is loaded at first use, for training and for reports
    serve(**deeds, play=driver.start, load=driver.load, wait=driver.wait, answer=driver.answer)


if __name__ == "__main__":
    main()
