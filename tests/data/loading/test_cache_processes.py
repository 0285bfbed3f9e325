"""The cache among others: processes that are killed or all come at once, and disks that are full."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyclinic.core.errors import StoreError
from polyclinic.data.loading.cache import VARIABLE, Pixels, load_cached
from polyclinic.data.loading.image_options import Preparation
from polyclinic.data.records import Record
from tests.data.caching import SMALL, Asked, anew


@pytest.fixture
def mounted(home: Path) -> Iterator[Callable[[str], None]]:
    """The cache on a real file system of a given size; called again, it is made larger."""
    home.mkdir()

    def mount(size: str) -> None:
        options = f"remount,size={size}" if os.path.ismount(home) else f"size={size}"
        try:
            command = ["mount", "-t", "tmpfs", "-o", options, "polyclinic-test", str(home)]
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a small file system cannot be mounted here ({error}); it takes root")

    yield mount
    if os.path.ismount(home):
        subprocess.run(["umount", "--lazy", str(home)], check=True)


@pytest.mark.parametrize("size", ["8k", "36k"])
def test_a_disk_that_is_really_full(
    home: Path, records: list[Record], mounted: Callable[[str], None], size: str
) -> None:
    """One disk is too small for the pixels, the other for the files written after them."""
    mounted(size)
    ask = Asked(records, Preparation(size=64, channels=3))
    with pytest.raises(StoreError, match=r"MiB left; make room|the disk is full; make room"):
        ask()
    assert [path.suffix for path in home.iterdir()] == [".lock"]
    mounted("1m")
    assert ask.is_right()


def test_a_disk_that_others_fill_meanwhile(
    home: Path, records: list[Record], mounted: Callable[[str], None], tmp_path: Path
) -> None:
    """A page that no longer fits raises no error but ends the process, so the test watches it from outside."""
    mounted("64k")
    process = child(fill_disk_then_decode, home, records, tmp_path)
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "told").read_text() == "right"


def child(deed: Callable[[Path, list[Record], Path], None], *given: Any) -> ForkServerProcess:
    """A process of its own, forked from one that has loaded everything already."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=deed, args=given, daemon=True)
    process.start()
    return process


def decode_slowly(home: Path, records: list[Record], told: Path) -> None:
    """Leaves a mark when it decodes, and the checksum of what it got."""
    os.environ[VARIABLE] = str(home)

    def fill(pixels: Pixels) -> None:
        (told / f"{os.getpid()}.decoding").touch()
        for row, image in enumerate(anew(records, SMALL)):
            time.sleep(0.1)
            pixels[row] = image

    got = load_cached(records, SMALL, fill).numpy()
    (told / f"{os.getpid()}.sum").write_text(hashlib.sha256(got.tobytes()).hexdigest())


def decode_for_ever(home: Path, records: list[Record], told: Path) -> None:
    os.environ[VARIABLE] = str(home)

    def fill(pixels: Pixels) -> None:
        pixels[:2] = anew(records, SMALL)[:2]
        pixels.base.flush()  # type: ignore[union-attr]
        (told / "half").touch()
        time.sleep(600)

    load_cached(records, SMALL, fill)


def fill_disk_then_decode(home: Path, records: list[Record], told: Path) -> None:
    os.environ[VARIABLE] = str(home)
    preparation = Preparation(size=64, channels=3)

    def fill(pixels: Pixels) -> None:
        room = shutil.disk_usage(home).free - 8192
        (home / "others").write_bytes(b"x" * max(0, room))
        pixels[:] = anew(records, preparation)

    right = np.array_equal(load_cached(records, preparation, fill).numpy(), anew(records, preparation))
    (told / "told").write_text("right" if right else "wrong")


def appeared(path: Path) -> bool:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def test_a_killed_process_leaves_nothing_that_looks_finished(home: Path, records: list[Record], tmp_path: Path) -> None:
    """And one that waits for it takes over."""
    victim = child(decode_for_ever, home, records, tmp_path)
    assert appeared(tmp_path / "half")
    heir = child(decode_slowly, home, records, tmp_path)
    assert victim.pid
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    heir.join(60)
    ask = Asked(records)
    assert (tmp_path / f"{heir.pid}.decoding").exists(), "what the killed one left was taken for finished"
    assert ask.is_right()
    assert ask.decoded == 0
    assert sorted(path.suffix for path in home.iterdir()) == ["", ".lock"]


def test_the_next_call_after_a_kill_succeeds(home: Path, records: list[Record], tmp_path: Path) -> None:
    victim = child(decode_for_ever, home, records, tmp_path)
    assert appeared(tmp_path / "half")
    victim.kill()
    victim.join(60)
    assert not list(home.rglob("index.json"))
    ask = Asked(records)
    assert ask.is_right()
    assert ask.decoded == 1


def test_four_processes_decode_once_and_get_the_same(home: Path, records: list[Record], tmp_path: Path) -> None:
    processes = [child(decode_slowly, home, records, tmp_path) for _ in range(4)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(tmp_path.glob("*.decoding"))) == 1
    sums = [path.read_text() for path in tmp_path.glob("*.sum")]
    assert sums == [hashlib.sha256(anew(records, SMALL).tobytes()).hexdigest()] * 4
