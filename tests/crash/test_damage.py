"""C3: what was damaged on disk is noticed, and either an older copy serves or one sentence says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.runs import RECIPES, Driver, Ended, assert_same_end, ledger_rows

Whole = Callable[[str], Path]
Stopped = Callable[[str, Path], Path]
Damage = Callable[[bytes], bytes]


def flipped(share: float) -> Damage:
    """One bit, at this share of the file's length."""

    def flip(data: bytes) -> bytes:
        place = min(int(share * len(data)), len(data) - 1)
        return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]

    return flip


def truncated(share: float) -> Damage:
    return lambda data: data[: int(share * len(data))]


DAMAGES = {
    "emptied": truncated(0),
    "truncated": truncated(0.6),
    "flipped in the header": flipped(0.01),
    "flipped in the middle": flipped(0.5),
    "flipped at the end": flipped(1),
}


def spoil(path: Path, damage: Damage) -> None:
    path.write_bytes(damage(path.read_bytes()))


def snapshots(folder: Path) -> list[Path]:
    return sorted((folder / "snapshots").iterdir())


def assert_refused(ended: Ended, *words: str) -> None:
    """Stopped by a StoreError whose one sentence names all of `words`."""
    assert (ended.code, ended.error) == (1, "StoreError")
    assert "\n" not in ended.sentence
    for word in words:
        assert word in ended.sentence


@pytest.mark.parametrize("name", ["scaffold each round", "single"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_the_previous_snapshot_serves(
    driver: Driver, whole: Whole, stopped: Stopped, place: Path, name: str, kind: str
) -> None:
    folder = stopped(name, place)
    assert [path.name for path in snapshots(folder)] == [f"round-{number:06}.pcl" for number in (1, 2, 3)]
    spoil(snapshots(folder)[-1], DAMAGES[kind])
    assert driver.run(RECIPES[name], folder).code == 0
    assert ledger_rows(folder)[-7]["event"] == "resumed"
    assert ledger_rows(folder)[-7]["round"] == 2
    assert_same_end(folder, whole(name))


def test_no_sound_snapshot_is_left(driver: Driver, stopped: Stopped, place: Path) -> None:
    folder = stopped("single", place)
    for path in snapshots(folder):
        spoil(path, flipped(0.5))
    ended = driver.run(RECIPES["single"], folder)
    assert_refused(ended, f"every snapshot in {folder}/snapshots is damaged", "start the run anew")


def test_without_any_snapshot_the_run_begins_anew_and_keeps_its_ledger(
    driver: Driver, whole: Whole, stopped: Stopped, place: Path
) -> None:
    folder = stopped("scaffold", place)
    spent = ledger_rows(folder)
    shutil.rmtree(folder / "snapshots")
    assert driver.run(RECIPES["scaffold"], folder).code == 0
    assert ledger_rows(folder)[: len(spent)] == spent
    assert_same_end(folder, whole("scaffold"))


@pytest.mark.parametrize("row", [1, 4, 7])
def test_a_flipped_bit_in_the_ledger(driver: Driver, stopped: Stopped, place: Path, row: int) -> None:
    folder = stopped("single", place)
    ledger = folder / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    lines[row - 1] = flipped(0.3)(lines[row - 1])
    ledger.write_bytes(b"".join(lines))
    assert_refused(driver.run(RECIPES["single"], folder), str(ledger), f"damaged at row {row} ")


def test_a_half_written_last_row_of_the_ledger(driver: Driver, whole: Whole, stopped: Stopped, place: Path) -> None:
    folder = stopped("single", place)
    spoil(folder / "ledger.jsonl", lambda data: data[:-20])
    assert driver.run(RECIPES["single"], folder).code == 0
    assert_same_end(folder, whole("single"))


@pytest.mark.parametrize("kept", [0, 3, 5])
def test_rows_missing_at_the_end_of_the_ledger(driver: Driver, stopped: Stopped, place: Path, kept: int) -> None:
    """Three rounds were charged and played when the snapshot was taken: six rows."""
    folder = stopped("single", place)
    spoil(folder / "ledger.jsonl", lambda data: b"".join(data.splitlines(keepends=True)[:kept]))
    ended = driver.run(RECIPES["single"], folder)
    assert_refused(ended, "ledger.jsonl lacks rows that the snapshot of round 3 counts")


def test_a_missing_ledger(driver: Driver, stopped: Stopped, place: Path) -> None:
    folder = stopped("single", place)
    (folder / "ledger.jsonl").unlink()
    assert_refused(driver.run(RECIPES["single"], folder), "lacks rows")


@pytest.mark.parametrize("kind", ["truncated", "flipped in the middle"])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_site_remembers_is_damaged(
    driver: Driver, whole: Whole, stopped: Stopped, place: Path, kind: str, workers: int
) -> None:
    """The run stops at once rather than go on without the site; with the file restored it ends as it should."""
    folder, recipe = stopped("single", place), {**RECIPES["single"], "engine": {"workers": workers}}
    rewrite_recipe(folder, "workers: 0", f"workers: {workers}")
    sites = sorted((folder / "sites").iterdir())
    newest = [max(path for path in site.iterdir() if path.stem <= "000003") for site in sites]
    sound = newest[1].read_bytes()
    spoil(newest[1], DAMAGES[kind])
    ended = driver.run(recipe, folder)
    assert_refused(ended, "the memory of site site-", f"{newest[1]} is damaged", "restore the file")
    newest[1].write_bytes(sound)
    assert driver.run(recipe, folder).code == 0
    assert_same_end(folder, whole("single"))


def rewrite_recipe(folder: Path, old: str, new: str) -> None:
    path = folder / "recipe.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("kind", ["emptied", "truncated"])
def test_metrics_shorter_than_the_snapshot_says(driver: Driver, stopped: Stopped, place: Path, kind: str) -> None:
    folder = stopped("single", place)
    spoil(folder / "metrics.jsonl", DAMAGES[kind])
    assert_refused(driver.run(RECIPES["single"], folder), "metrics.jsonl is shorter than its snapshot says")


def test_a_flipped_bit_in_the_metrics(driver: Driver, stopped: Stopped, place: Path) -> None:
    folder = stopped("single", place)
    spoil(folder / "metrics.jsonl", flipped(0.5))
    assert_refused(driver.run(RECIPES["single"], folder), "metrics.jsonl is damaged (checksum)")


def test_a_damaged_result_is_made_again(driver: Driver, whole: Whole, place: Path) -> None:
    folder = Path(shutil.copytree(whole("single"), place / "run"))
    spoil(folder / "result.json", truncated(0.5))
    assert_refused(driver.run(RECIPES["single"], folder), "result.json is damaged", "remove it")
    (folder / "result.json").unlink()
    assert driver.run(RECIPES["single"], folder).code == 0
    assert_same_end(folder, whole("single"))


def test_the_folder_of_another_recipe(driver: Driver, stopped: Stopped, place: Path) -> None:
    folder = stopped("single", place)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    ended = driver.run({**RECIPES["single"], "seed": 12}, folder)
    assert_refused(ended, "holds a run of another recipe")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_damaged_recipe(driver: Driver, stopped: Stopped, place: Path) -> None:
    folder = stopped("single", place)
    (folder / "recipe.yaml").write_text("{")
    ended = driver.run(RECIPES["single"], folder)
    assert (ended.code, ended.error) == (1, "RecipeError")
    assert f"{folder}/recipe.yaml cannot be read as YAML" in ended.sentence


def test_a_stopped_run_leaves_plain_files(stopped: Stopped, place: Path) -> None:
    """Whoever looks into a folder after a crash can read it: JSON lines, and no result."""
    folder = stopped("scaffold", place)
    assert not (folder / "result.json").exists()
    for name in ("ledger.jsonl", "metrics.jsonl"):
        assert all(isinstance(json.loads(line), dict) for line in (folder / name).read_text().splitlines())
