"""A run's folder, piece by piece: what was written comes back; what was changed since is noticed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from polyclinic.core.errors import StoreError
from polyclinic.core.types import Bundle
from polyclinic.storage import files, messages
from polyclinic.storage.ledger import Ledger
from polyclinic.storage.metrics_file import MetricsFile
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.site_memory import DiskMemory, RamMemory, SiteMemory
from polyclinic.storage.snapshots import SnapshotStore
from tests.crash.runs import RAM

NAMES = st.text("abcxyz.-|é ", min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(NAMES.filter(lambda name: name != "chain"), VALUES, max_size=4), max_size=5)
TENSORS = st.dictionaries(
    NAMES,
    st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(torch.tensor),
    min_size=1,
    max_size=3,
)
BUNDLES = st.dictionaries(st.sampled_from(["model", "control", "optimiser"]), TENSORS, min_size=1)


@contextmanager
def somewhere() -> Iterator[Path]:
    """A folder for one example: pytest's own is shared by all examples of a property."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    with somewhere() as path:
        yield path


def without_chain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "chain"} for row in rows]


# The ledger


@given(ROWS, ROWS)
@settings(max_examples=60, deadline=None)
def test_the_ledger_gives_back_what_was_entered(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    with somewhere() as folder:
        ledger = Ledger(folder / "ledger.jsonl")
        for row in first:
            ledger.append(**row)
        before = ledger.path.read_bytes()
        opened = Ledger(ledger.path)
        assert (opened.rows, opened.chain) == (ledger.rows, ledger.chain) == (len(first), ledger.chain)
        for row in second:
            opened.append(**row)
        assert opened.path.read_bytes().startswith(before), "it only ever grows"
        assert without_chain(Ledger(ledger.path).read()) == first + second
        assert opened.includes(len(first), ledger.chain)


def three_rows(folder: Path) -> Ledger:
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.append(event="charge", round=1, sites=["a", "J"], privacy=None)
    ledger.append(event="round", round=1, seconds=0.5, sites={"a": {"down": 10, "up": 11}})
    ledger.append(event="charge", round=2, sites=[])
    return ledger


def test_every_flipped_bit_of_a_ledger_is_found_in_its_row(folder: Path) -> None:
    ledger = three_rows(folder)
    data = ledger.path.read_bytes()
    for place in range(len(data)):
        for bit in range(8):
            ledger.path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            row = data[:place].count(b"\n") + 1
            with pytest.raises(StoreError, match=rf"ledger\.jsonl is damaged at row {row} \(checksum\)"):
                Ledger(ledger.path)


def test_every_truncation_of_a_ledger_leaves_its_whole_rows(folder: Path) -> None:
    data = three_rows(folder).path.read_bytes()
    for length in range(len(data) + 1):
        path = folder / "cut.jsonl"
        path.write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        ledger = Ledger(path)
        assert ledger.rows == whole == len(ledger.read())
        ledger.append(event="resumed", round=0)
        assert Ledger(path).rows == whole + 1


def test_a_lost_line_end_before_a_half_written_row_is_damage(tmp_path: Path) -> None:
    """The row in front had been counted; to cut it off with the half would forget what was spent."""
    ledger = three_rows(tmp_path)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1] + b' {"event": "cha')
    with pytest.raises(StoreError, match="damaged at row 3"):
        Ledger(ledger.path)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (1, 2), (0, 1, 1, 2), (0, 0, 1, 2)])
def test_rows_moved_repeated_or_left_out_break_the_chain(tmp_path: Path, order: tuple[int, ...]) -> None:
    ledger = three_rows(tmp_path)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[number] for number in order))
    with pytest.raises(StoreError, match="damaged at row"):
        Ledger(ledger.path)


def test_the_ledger_knows_what_a_snapshot_has_seen(tmp_path: Path) -> None:
    ledger = three_rows(tmp_path)
    chains = [row["chain"] for row in ledger.read()]
    assert ledger.includes(0, "")
    assert all(ledger.includes(rows, chain) for rows, chain in enumerate(chains, 1))
    assert not ledger.includes(4, chains[-1])
    assert not ledger.includes(2, chains[-1])


# What the disk says


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond `size`, as if the disk were full: what fits is written, the rest is not."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def appended(book: Ledger | MetricsFile) -> None:
    book.append(event="charge") if isinstance(book, Ledger) else book.append([{"event": "charge"}])


@pytest.mark.parametrize("kind", [Ledger, MetricsFile])
def test_a_row_that_does_not_fit_is_not_added_at_all(folder: Path, kind: type[Ledger] | type[MetricsFile]) -> None:
    """Wherever the disk gives out: a row of which only a part fitted never passes for written."""
    book = kind(folder / "file.jsonl")
    appended(book)
    before = book.path.read_bytes()
    for room in range(len(before)):
        with files_up_to(len(before) + room), pytest.raises(StoreError, match=r"file\.jsonl: the disk is full"):
            appended(book)
        assert book.path.read_bytes() == before
    appended(book)
    assert book.path.read_bytes().count(b"\n") == 2
    assert kind is MetricsFile or Ledger(book.path).rows == 2


def test_the_error_is_the_disk_s_own_and_not_that_of_tidying_up(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(StoreError, match=r"cannot write .*metrics\.jsonl: No such file or directory"):
        appended(metrics)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        appended(MetricsFile(tmp_path / "metrics.jsonl"))


def test_a_full_device_is_named() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(StoreError, match=r"cannot write /dev/full: the disk is full; make room"),
        files.explain_os_errors(full),
    ):
        full.write_bytes(b"x")


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"old")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any other order a power cut can leave a name without its content, or the old name."""
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        calls.append(("rename", Path(target).name))
        replace(source, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not say what a handle is of")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    files.write_atomically(tmp_path / "file", b"new")
    (first, temporary), *rest = calls
    assert (first, temporary.startswith(".file.")) == ("sync", True)
    assert rest == [("rename", "file"), ("sync", tmp_path.name)]


def test_what_a_killed_process_left_is_swept_up_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sites" / "a").mkdir(parents=True)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "other").mkdir()
    left = [".result.json.17.tmp", "snapshots/.round-000001.pcl.17.tmp", "sites/a/.000001.pcl.17.tmp"]
    kept = ["notes.17.tmp", ".hidden.tmp", "sites/a/000001.pcl", "other/.result.json.17.tmp"]
    for name in left + kept:
        (tmp_path / name).write_bytes(b"x")
    RunFolder(tmp_path).prepare()
    assert [name for name in left + kept if (tmp_path / name).exists()] == kept


# Snapshots


def state(value: float) -> Bundle:
    return {"model": {"w": torch.tensor([value, -value])}}


@given(BUNDLES, st.dictionaries(st.text(max_size=6).filter(lambda n: n not in ("schema", "body")), VALUES, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_snapshot_gives_back_what_was_saved(bundle: Bundle, progress: dict[str, Any]) -> None:
    with somewhere() as folder:
        RunFolder(folder).prepare()
        SnapshotStore(folder / "snapshots").save(3, bundle, {"progress": progress})
        found = SnapshotStore(folder / "snapshots").load()
        assert found is not None
        assert found.fields["round"] == 3
        assert found.fields["progress"] == progress
        assert messages.hash_tensors(found.tensors) == messages.hash_tensors(bundle)


def test_no_snapshot_is_no_error(tmp_path: Path) -> None:
    RunFolder(tmp_path).prepare()
    assert SnapshotStore(tmp_path / "snapshots").load() is None
    assert SnapshotStore(tmp_path / "snapshots").oldest_round() == 0


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    RunFolder(tmp_path).prepare()
    snapshots = SnapshotStore(tmp_path / "snapshots")
    for round in (1, 2, 9, 10, 11):
        snapshots.save(round, state(round), {})
        assert snapshots.load().fields["round"] == round  # type: ignore[union-attr]
    assert [path.name for path in sorted(snapshots.folder.iterdir())] == ["round-000010.pcl", "round-000011.pcl"]
    assert snapshots.oldest_round() == 10


def test_every_flipped_bit_and_every_truncation_brings_the_snapshot_before(folder: Path) -> None:
    RunFolder(folder).prepare()
    snapshots = SnapshotStore(folder / "snapshots")
    snapshots.save(1, state(1), {})
    snapshots.save(2, state(2), {})
    newest = snapshots.folder / "round-000002.pcl"
    data = newest.read_bytes()
    flips = (data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in range(len(data)))
    for damaged in (*flips, *(data[:length] for length in range(len(data)))):
        newest.write_bytes(damaged)
        found = snapshots.load()
        assert found is not None
        assert (found.fields["round"], messages.hash_tensors(found.tensors)) == (1, messages.hash_tensors(state(1)))


def test_only_damaged_snapshots_are_an_error(tmp_path: Path) -> None:
    RunFolder(tmp_path).prepare()
    snapshots = SnapshotStore(tmp_path / "snapshots")
    for round in (1, 2):
        snapshots.save(round, state(round), {})
    for path in snapshots.folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"every snapshot in .*snapshots is damaged \(checksum\); start the run anew"):
        snapshots.load()


# Metrics


def read(metrics: MetricsFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.path.read_text().splitlines()]


@given(ROWS, ROWS)
@settings(max_examples=40, deadline=None)
def test_metrics_are_cut_back_to_what_a_snapshot_saw(seen: list[dict[str, Any]], later: list[dict[str, Any]]) -> None:
    with somewhere() as folder:
        metrics = MetricsFile(folder / "metrics.jsonl")
        metrics.append(seen)
        size, checksum = metrics.size(), metrics.checksum()
        metrics.append(later)
        opened = MetricsFile(metrics.path)
        opened.truncate(size, checksum)
        assert (opened.size(), opened.checksum(), read(opened)) == (size, checksum, seen)
        opened.append(later)
        assert (read(opened), opened.checksum()) == (seen + later, metrics.checksum())


def test_metrics_that_lack_or_changed_what_a_snapshot_saw_are_refused(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append([{"round": 1, "loss": 0.25}])
    size, checksum, data = metrics.size(), metrics.checksum(), metrics.path.read_bytes()
    for length in range(len(data)):
        metrics.path.write_bytes(data[:length])
        with pytest.raises(StoreError, match="shorter than its snapshot says"):
            MetricsFile(metrics.path).truncate(size, checksum)
    metrics.path.write_bytes(data.replace(b"0.25", b"0.35"))
    with pytest.raises(StoreError, match=r"damaged \(checksum\)"):
        MetricsFile(metrics.path).truncate(size, checksum)
    metrics.path.unlink()
    with pytest.raises(StoreError, match="shorter than its snapshot says"):
        MetricsFile(metrics.path).truncate(size, checksum)


# What sites remember


@given(st.sets(st.integers(1, 9), min_size=1), st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_a_site_remembers_the_last_round_before(rounds: set[int], before: int) -> None:
    with somewhere() as folder:
        memory = DiskMemory(folder)
        for round in sorted(rounds):
            memory.save("north", round, state(round), oldest_snapshot=0)
        found = DiskMemory(folder).load("north", before)
        last = max((round for round in rounds if round < before), default=None)
        assert (found is None) == (last is None)
        assert found is None or messages.hash_tensors(found) == messages.hash_tensors(state(last or 0))
        assert memory.load("south", before) is None


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_round_that_is_played_again_starts_from_the_same_memory(tmp_path: Path, kind: str) -> None:
    memory: SiteMemory = RamMemory() if kind == "ram" else DiskMemory(tmp_path)
    memory.save("north", 1, state(1), oldest_snapshot=0)
    memory.save("north", 2, state(2), oldest_snapshot=1)
    memory.save("north", 2, state(-2), oldest_snapshot=1)
    first, second = memory.load("north", 2), memory.load("north", 3)
    assert first is not None
    assert second is not None
    assert (messages.hash_tensors(first), messages.hash_tensors(second)) == (
        messages.hash_tensors(state(1)),
        messages.hash_tensors(state(-2)),
    )


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_what_a_resume_may_need_is_never_dropped(attends: list[bool], every: int) -> None:
    """A site that attends some rounds, snapshots every few: from either kept snapshot its memory is as it was then."""
    with somewhere() as folder:
        RunFolder(folder).prepare()
        memory, snapshots = DiskMemory(folder / "sites"), SnapshotStore(folder / "snapshots")
        then: dict[int, int] = {0: 0}
        for round, attending in enumerate(attends, 1):
            then[round] = round if attending else then[round - 1]
            if attending:
                memory.save("north", round, state(round), snapshots.oldest_round())
            if round % every == 0:
                snapshots.save(round, state(0), {})
            kept = [int(path.stem[6:]) for path in snapshots.folder.iterdir()] or [0]
            for back in kept:
                found = memory.load("north", back + 1)
                assert (found is None) == (then[back] == 0)
                assert found is None or messages.hash_tensors(found) == messages.hash_tensors(state(then[back]))
        assert len(list((folder / "sites").rglob("*.pcl"))) <= 2 * every + 1, "old memories are dropped"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 4])])
def test_a_damaged_memory_names_the_site_and_the_file(tmp_path: Path, damage: Any) -> None:
    memory = DiskMemory(tmp_path)
    memory.save("north", 1, state(1), oldest_snapshot=0)
    (path,) = tmp_path.rglob("*.pcl")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=rf"the memory of site north in {path} is damaged .*; restore the file"):
        memory.load("north", 2)


@pytest.mark.parametrize("site", ["..", "../../etc", "Überlingen", "a b", "x" * 300])
def test_a_site_s_name_never_leaves_the_folder(tmp_path: Path, site: str) -> None:
    memory = DiskMemory(tmp_path / "sites")
    memory.save(site, 1, state(1), oldest_snapshot=0)
    assert memory.load(site, 2) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]


def test_json_is_written_whole_and_finite(tmp_path: Path) -> None:
    files.write_json(tmp_path / "result.json", {"accuracy": 0.5})
    assert json.loads((tmp_path / "result.json").read_text()) == {"accuracy": 0.5}
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "result.json", {"accuracy": float("nan")})
    assert json.loads((tmp_path / "result.json").read_text()) == {"accuracy": 0.5}


def test_a_memory_holds_no_more_than_the_site_s_own() -> None:
    """A site of a stack of a hundred would otherwise keep all of it."""
    stack = torch.arange(300.0).reshape(100, 3)
    memory = RamMemory()
    memory.save("a", 1, {"model": {"w": stack[7]}, "alone": {"v": torch.ones(2)}}, 0)
    kept = memory.load("a", 2)
    assert kept is not None
    assert torch.equal(kept["model"]["w"], stack[7])
    assert kept["model"]["w"].untyped_storage().nbytes() == 3 * 4
