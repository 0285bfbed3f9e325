"""C3: a disk that is full, or a folder that cannot be written, stops a run with one sentence and costs nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.runs import RECIPES, Driver, assert_same_end, unfinished
from tests.crash.test_damage import assert_refused

Whole = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "limit", "victim"),
    [
        ("fedavg", 500, "recipe.yaml"),
        ("quiet", 1_800, "ledger.jsonl"),
        ("fedavg", 1_500, "metrics.jsonl"),
        ("fedavg", 15_000, "round-000001.pcl"),
        ("scaffold", 12_000, "000001.pcl"),
        ("scaffold", 30_000, "round-000002.pcl"),
        ("single", 40_000, "000001.pcl"),
        ("fedavg", 21_000, "predictions.safetensors"),
    ],
)
def test_a_file_that_may_not_grow(
    driver: Driver, whole: Whole, place: Path, name: str, limit: int, victim: str
) -> None:
    """RLIMIT_FSIZE: the system refuses to write beyond a file size, as a full disk does, whatever file it is."""
    folder = place / "run"
    ended = driver.run(RECIPES[name], folder, file_limit=limit)
    assert_refused(ended, f"/{victim}: the disk is full", "make room", "go on with the same command")
    assert unfinished(folder) == []
    assert driver.run(RECIPES[name], folder).code == 0
    assert_same_end(folder, whole(name))


def test_a_worker_finds_the_disk_full(driver: Driver, whole: Whole, place: Path) -> None:
    recipe, folder = {**RECIPES["single"], "engine": {"workers": 2}}, place / "run"
    assert_refused(driver.run(recipe, folder, file_limit=40_000), "/000001.pcl: the disk is full")
    assert driver.run(recipe, folder).code == 0
    assert_same_end(folder, whole("single"))


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["fedavg", "quiet", "scaffold", "single"])
def test_any_limit(driver: Driver, whole: Whole, place: Path, name: str) -> None:
    for limit in [*range(100, 8_000, 131), *range(8_000, 70_000, 1_999)]:
        folder = place / str(limit)
        ended = driver.run(RECIPES[name], folder, file_limit=limit)
        if ended.code:
            assert_refused(ended, "the disk is full")
        assert unfinished(folder) == []
        assert driver.run(RECIPES[name], folder).code == 0
        assert_same_end(folder, whole(name))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A real file system of a given size; called again, it is made larger."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> Path:
        again = ["-o", f"remount,{options}"] if os.path.ismount(disk) else ["-o", options]
        command = ["mount", "-t", "tmpfs", *again, "polyclinic-test", str(disk)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a small file system cannot be mounted here ({error}); it takes root")
        return disk

    yield mount
    if os.path.ismount(disk):
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("options", ["size=24k", "size=120k", "size=220k", "size=320k", "nr_inodes=12,size=1m"])
def test_a_disk_that_is_really_full(
    driver: Driver, whole: Whole, small_disk: Callable[[str], Path], options: str
) -> None:
    folder = small_disk(options) / "run"
    assert_refused(driver.run(RECIPES["single"], folder), "the disk is full")
    assert unfinished(folder) == []
    assert_refused(driver.run(RECIPES["single"], folder), "the disk is full")
    small_disk("size=10m,nr_inodes=1000")
    assert driver.run(RECIPES["single"], folder).code == 0
    assert_same_end(folder, whole("single"))


def test_a_folder_below_a_file(driver: Driver, place: Path) -> None:
    (place / "file").write_text("")
    ended = driver.run(RECIPES["fedavg"], place / "file" / "run")
    assert_refused(ended, f"cannot write {place}/file/run: Not a directory", "--out")


@pytest.mark.parametrize("name", ["snapshots", "sites"])
def test_a_file_where_a_folder_should_be(driver: Driver, whole: Whole, place: Path, name: str) -> None:
    folder = place / "run"
    folder.mkdir()
    (folder / name).write_text("")
    assert_refused(driver.run(RECIPES["single"], folder), f"cannot write {folder}")
    (folder / name).unlink()
    assert driver.run(RECIPES["single"], folder).code == 0
    assert_same_end(folder, whole("single"))


def test_a_folder_where_a_file_should_be(driver: Driver, place: Path) -> None:
    folder = place / "run"
    (folder / "ledger.jsonl").mkdir(parents=True)
    assert_refused(driver.run(RECIPES["fedavg"], folder), f"cannot read {folder}/ledger.jsonl: Is a directory")
