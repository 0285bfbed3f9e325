"""The cache of prepared images: right or made anew, made once however many ask, silent about whose images they are."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch

from polyclinic.core.errors import DataError, StoreError
from polyclinic.data.loading.cache import VARIABLE, Pixels, cache_folder, load_cached, trim_cache
from polyclinic.data.loading.image_options import Preparation
from polyclinic.data.records import Record
from tests.data.caching import SMALL, Asked, anew, the_set

NAME = "Quirina Nebelthau"
Disk = namedtuple("Disk", "total used free")


@pytest.mark.parametrize(
    "preparation",
    [
        SMALL,
        Preparation(size=17, channels=3),
        Preparation(size=16, channels=1, fit="stretch", crop_borders=True),
        Preparation(size=9, channels=3, fit="crop"),
    ],
)
def test_the_cache_gives_what_decoding_gives_and_decodes_once(
    home: Path, records: list[Record], preparation: Preparation
) -> None:
    ask = Asked(records, preparation)
    assert all(ask.is_right() for _ in range(3))
    assert ask.decoded == 1
    assert ask().dtype == torch.uint8


def test_rows_of_an_array_are_cached_alike(home: Path, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 10, 10), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", images=images)
    rows = [Record(tmp_path / "set.npz", "a", array="images", row=row) for row in (4, 0, 5)]
    ask, other = Asked(rows), Asked([replace(rows[0], row=3), *rows[1:]])
    assert ask.is_right()
    assert other.is_right()
    assert (ask.decoded, other.decoded) == (1, 1)


def touched(records: list[Record]) -> list[Record]:
    state = records[1].path.stat()
    os.utime(records[1].path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    return records


def enlarged(records: list[Record]) -> list[Record]:
    """Another size at the same time of change."""
    state = records[1].path.stat()
    with records[1].path.open("ab") as file:
        file.write(b"\0")
    os.utime(records[1].path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return records


def elsewhere(records: list[Record]) -> list[Record]:
    copy = records[1].path.with_name("copy.png")
    shutil.copy2(records[1].path, copy)
    return [records[0], replace(records[1], path=copy), records[2]]


@pytest.mark.parametrize(
    "change",
    [touched, enlarged, elsewhere, lambda records: records[::-1], lambda records: records[:2], lambda r: [*r, r[0]]],
)
def test_other_files_or_another_order_make_another_set(
    home: Path, records: list[Record], change: Callable[[list[Record]], list[Record]]
) -> None:
    assert Asked(records).is_right()
    ask = Asked(change(records))
    assert ask.is_right()
    assert ask.decoded == 1


@pytest.mark.parametrize(
    "change", [{"size": 9}, {"channels": 3}, {"fit": "stretch"}, {"fit": "crop"}, {"crop_borders": True}, {"bits": 12}]
)
def test_another_preparation_makes_another_set(home: Path, records: list[Record], change: dict[str, Any]) -> None:
    assert Asked(records).is_right()
    ask = Asked(records, SMALL.model_copy(update=change))
    assert ask.is_right()
    assert ask.decoded == 1
    assert len(list(home.glob("*/index.json"))) == 2


def test_another_version_of_the_decoder_makes_another_set(
    home: Path, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Asked(records).is_right()
    monkeypatch.setattr(PIL, "__version__", f"{PIL.__version__}.1")
    ask = Asked(records)
    assert ask.is_right()
    assert ask.decoded == 1


def test_what_is_said_of_the_images_makes_no_other_set(home: Path, records: list[Record]) -> None:
    Asked(records)()
    said = [replace(record, label="b", site="x", patient="p", split="test", where="elsewhere") for record in records]
    ask = Asked(said)
    assert ask.is_right()
    assert ask.decoded == 0


def test_nobody_changes_the_cache_through_what_it_gives(home: Path, records: list[Record]) -> None:
    ask = Asked(records)
    ask().add_(1)
    assert ask.is_right()
    assert ask.decoded == 1


def test_every_flipped_byte_is_noticed(home: Path, records: list[Record]) -> None:
    ask = Asked(records[:2])
    ask()
    pixels = the_set(home) / "pixels"
    assert pixels.stat().st_size == 2 * 8 * 8
    for position in range(2 * 8 * 8):
        damaged = bytearray(pixels.read_bytes())
        damaged[position] ^= 1 << position % 8
        pixels.write_bytes(damaged)
        assert ask.is_right()
        assert ask.decoded == 2 + position


def test_no_flipped_byte_of_the_index_gives_wrong_pixels(home: Path, records: list[Record]) -> None:
    ask = Asked(records[:2])
    ask()
    index = the_set(home) / "index.json"
    for position in range(index.stat().st_size):
        damaged = bytearray(index.read_bytes())
        damaged[position] ^= 1 << position % 7
        index.write_bytes(damaged)
        assert ask.is_right()


def as_other_shape(folder: Path) -> None:
    """Sound in itself, and just as long, but of one image."""
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "shape": [1, 3, 8, 8]}))


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "pixels", 191),
        lambda folder: os.truncate(folder / "pixels", 0),
        lambda folder: (folder / "pixels").write_bytes((folder / "pixels").read_bytes() + b"\0"),
        lambda folder: (folder / "pixels").unlink(),
        lambda folder: as_folder(folder / "pixels"),
        lambda folder: (folder / "index.json").unlink(),
        lambda folder: as_folder(folder / "index.json"),
        lambda folder: (folder / "index.json").write_bytes(b""),
        lambda folder: (folder / "index.json").write_bytes(b"\xff"),
        lambda folder: (folder / "index.json").write_text("null"),
        lambda folder: (folder / "index.json").write_text("{}"),
        as_other_shape,
        shutil.rmtree,
    ],
)
def test_a_damaged_set_is_made_anew(home: Path, records: list[Record], damage: Callable[[Path], object]) -> None:
    ask = Asked(records)
    ask()
    damage(the_set(home))
    assert ask.is_right()
    assert ask.decoded == 2
    assert ask.is_right()
    assert ask.decoded == 2


@pytest.mark.parametrize("error", [DataError("a file is broken"), KeyboardInterrupt(), RuntimeError("a bug")])
def test_a_failing_decoder_leaves_nothing(home: Path, records: list[Record], error: BaseException) -> None:
    def fail(pixels: Pixels) -> None:
        pixels[:1] = 9
        raise error

    with pytest.raises(type(error)) as caught:
        load_cached(records, SMALL, fail)
    assert caught.value is error
    assert [path.suffix for path in home.rglob("*")] == [".lock"]
    assert Asked(records).is_right()


def test_only_the_owner_may_look(
    home: Path, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        Asked(records)()
        (tmp_path / "open").mkdir(mode=0o777)
        monkeypatch.setenv(VARIABLE, str(tmp_path / "open"))
        Asked(records)()
    finally:
        os.umask(before)
    assert home.stat().st_mode & 0o077 == 0
    for place in (home, tmp_path / "open"):
        assert the_set(place).stat().st_mode & 0o077 == 0
        assert all(path.stat().st_size == 0 for path in place.iterdir() if path.is_file())


def test_the_cache_tells_no_name(home: Path, records: list[Record], tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    moved = [record.path.rename(tmp_path / NAME / f"{NAME} {record.path.name}") for record in records]
    Asked([Record(path, NAME, NAME, NAME, NAME, NAME, NAME) for path in moved])()
    told = b"".join(str(path.relative_to(home)).encode() + path.read_bytes() for path in home.rglob("*.*"))
    told += (the_set(home) / "pixels").read_bytes()
    for spelling in (NAME, NAME.upper(), NAME.lower(), *NAME.split()):
        assert not any(spelling.encode(coding) in told for coding in ("utf-8", "utf-16-le", "utf-16-be"))


def test_a_file_that_vanishes_is_told_without_its_name(home: Path, records: list[Record]) -> None:
    gone = replace(records[0], path=records[0].path.with_name(f"{NAME}.png"))
    with pytest.raises(DataError, match=r"^The file of row 0 cannot be read \(No such file") as caught:
        Asked([gone])()
    assert caught.value.__suppress_context__
    assert NAME not in str(caught.value)


def test_a_full_disk_is_told_before_anything_is_decoded(
    home: Path, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Asked(records)
    held()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(2**30, 2**30, 2**20))
    ask = Asked(records, Preparation(size=2048))
    with pytest.raises(StoreError, match=rf"need 36 MiB but {home} has 1 MiB left; make room, set {VARIABLE}"):
        ask()
    assert ask.decoded == 0
    assert not list(home.glob("*.draft"))
    assert held.is_right()
    assert held.decoded == 1


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({VARIABLE: "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({VARIABLE: "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/polyclinic"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/polyclinic"),
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/polyclinic"),
        ({"HOME": "/c"}, "/c/.cache/polyclinic"),
    ],
)
def test_where_it_lies(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_a_cache_beyond_its_bound_loses_what_was_not_used_for_longest(home: Path, records: list[Record]) -> None:
    asks = [Asked(records, Preparation(size=size, channels=1)) for size in (8, 9, 10)]
    folders = []
    for number, ask in enumerate(asks):
        before = set(home.glob("*/index.json"))
        ask()
        (index,) = set(home.glob("*/index.json")) - before
        folders.append(index.parent)
        os.utime(folders[-1], (number + 1, number + 1))
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    assert trim_cache(sum(sizes)) == []
    mapped = asks[1]()
    os.utime(folders[1], (2, 2))
    asks[0]()  # used again, so that the second is now the oldest
    assert trim_cache(sum(sizes) - 1) == [folders[1].name]
    assert np.array_equal(mapped.numpy(), anew(records, asks[1].preparation)), "what a run has open stays readable"
    assert trim_cache(0) == [folders[2].name], "the set that was used last stays"
    assert asks[1].is_right()
    assert [ask.decoded for ask in asks] == [1, 2, 1]
