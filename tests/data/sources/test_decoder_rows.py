"""Images in npz and idx files: the rows asked for, in their order, and nothing from a damaged file."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from polyclinic.data.sources.images import UnreadableImage
from polyclinic.data.sources.stacks import decode_rows, stream_rows

Array = NDArray[Any]
STACK = np.random.default_rng(7).integers(0, 256, (30, 8, 9), dtype=np.uint8)


def idx(values: Array, magic: int = 0x803) -> bytes:
    return struct.pack(">4I", magic, *values.shape) + values.tobytes()


def rows_reason(path: Path, array: str = "train_images", rows: tuple[int, ...] = (0,)) -> str:
    with pytest.raises(UnreadableImage) as caught:
        decode_rows(path, array, rows)
    assert "/" not in str(caught.value)
    return str(caught.value)


@given(rows=st.lists(st.integers(0, 29), max_size=12))
@pytest.mark.parametrize("kind", ["npz", "compressed.npz", "idx", "idx.gz"])
def test_rows_are_those_asked_for_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, kind: str, rows: list[int]
) -> None:
    path = tmp_path_factory.mktemp("stack") / f"a.{kind}"
    if kind.endswith("npz"):
        (np.savez_compressed if "compressed" in kind else np.savez)(path, other=np.zeros(3), train_images=STACK)
    else:
        path.write_bytes(idx(STACK) if kind == "idx" else gzip.compress(idx(STACK)))
    found = decode_rows(path, "train_images", rows)
    assert len(found) == len(rows)
    assert not rows or np.array_equal(found, STACK[rows])


@pytest.mark.parametrize("shape", [(5, 8, 9, 3), (5, 8, 9, 1), (5, 8, 9)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, ">u2"])
def test_stacks_of_colour_and_of_sixteen_bits(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    values = np.random.default_rng(8).integers(0, 256, shape).astype(dtype) * (1 if dtype == np.uint8 else 16)
    np.savez(tmp_path / "a.npz", images=values)
    found = decode_rows(tmp_path / "a.npz", "images", [4, 2], 12)
    expected = values if dtype == np.uint8 else np.rint(values * 255.0 / 4095)
    np.testing.assert_array_equal(found, (expected[..., 0] if shape[3:] == (1,) else expected)[[4, 2]])


def test_streamed_rows_are_read_once_from_front_to_back(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=STACK)
    np.testing.assert_array_equal(list(stream_rows(tmp_path / "a.npz", "images", [0, 3, 29])), STACK[[0, 3, 29]])
    with pytest.raises(ValueError, match="ascend"):
        list(stream_rows(tmp_path / "a.npz", "images", [3, 3]))


@pytest.mark.parametrize("kind", ["npz", "idx", "idx.gz"])
def test_truncated_and_damaged_stacks(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez_compressed(path, train_images=STACK)
    else:
        path.write_bytes(idx(STACK) if kind == "idx" else gzip.compress(idx(STACK)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    assert "truncated" in rows_reason(path, rows=(29,))
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    if kind != "idx":  # which has no checksum
        assert "damaged" in rows_reason(path, rows=(29,))
    path.write_bytes(b"")
    assert rows_reason(path) == "the file is empty"


def test_stacks_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for values, fault in (
        (np.array([{"a": 1}], object), "not whole numbers of 8 or 16 bits"),
        (np.zeros((2, 8, 8)), "not whole numbers of 8 or 16 bits"),
        (np.zeros((2, 8, 8, 8), np.uint8), "not the shape of images"),
        (np.zeros(5, np.uint8), "not the shape of images"),
        (np.zeros((2, 0, 8), np.uint8), "not the shape of images"),
        (np.asfortranarray(STACK), "column by column"),
    ):
        np.savez(path, train_images=values)
        assert fault in rows_reason(path)
    np.savez(path, train_images=STACK)
    assert "no array 'images'" in rows_reason(path, "images")
    assert "row 30 was requested, but it has 30" in rows_reason(path, rows=(3, 30))
    path.write_bytes(idx(STACK, 0x801))
    assert "not an idx file" in rows_reason(path)
    path.write_bytes(idx(STACK) + b"more")
    assert "after its last" in rows_reason(path, rows=(29,))


def test_stacks_that_announce_too_much(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(struct.pack(">4I", 0x803, 3, 60_000, 60_000))
    assert "megapixels" in rows_reason(path)
    header = io.BytesIO()
    np.lib.format.write_array_header_2_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 100, 100)})
    for content, fault in ((header.getvalue(), "truncated"), (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{", "damaged")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("train_images.npy", content)
        assert fault in rows_reason(path)
