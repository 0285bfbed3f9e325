from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from polyclinic.data.sources import npz
from polyclinic.data.sources.npz import read_npz
from tests.data.written import NAME, counts, pictures, real, refused, saved


def npy_bytes(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=array.dtype.hasobject)
    return stream.getvalue()


def header_only(text: str, version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode()


def zipped(folder: Path, members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(folder / "set.npz", "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return folder / "set.npz"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (4, 6, 1), (4, 6, 3)])
@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2"])
def test_medmnist_arrays_are_listed_row_by_row(
    tmp_path: Path, compressed: bool, shape: tuple[int, ...], dtype: str
) -> None:
    labels = {"train": [[0], [2], [1]], "val": [[1]], "test": [[2], [0]]}
    arrays = {f"{part}_images": pictures(len(rows), dtype, shape) for part, rows in labels.items()}
    arrays |= {f"{part}_labels": np.array(rows, dtype="uint8") for part, rows in labels.items()}
    file = saved(tmp_path, arrays, compressed)
    listing = read_npz(file, name="m", label_names=("normal", "benign"))
    assert [(r.array, r.row, r.label, r.split) for r in listing.records] == [
        ("train_images", 0, "normal", "train"),
        ("train_images", 1, "2", "train"),
        ("train_images", 2, "benign", "train"),
        ("val_images", 0, "benign", "validation"),
        ("test_images", 0, "2", "test"),
        ("test_images", 1, "normal", "test"),
    ]
    assert (listing.classes, listing.declared) == (("normal", "benign"), True)
    assert all(r.path == file and r.where == f"{r.array} row {r.row}" for r in listing.records)
    assert read_npz(file, name="m").classes == ("0", "1", "2")


def test_plain_arrays_come_with_site_patient_and_split(tmp_path: Path) -> None:
    columns = {"labels": np.array(["b", " a ", "b"]), "site": np.array([b"Lyon", b"Turin", b"Lyon"])}
    columns |= {"patient": np.array([7, 7, 9]), "split": np.array(["training", "", "Val"])}
    listing = read_npz(saved(tmp_path, columns | {"images": pictures(3)}), name="m")
    assert [(r.label, r.site, r.patient, r.split) for r in listing.records] == [
        ("b", "Lyon", "patient-1", "train"),
        ("a", "Turin", "patient-1", ""),
        ("b", "Lyon", "patient-2", "validation"),
    ]
    assert (listing.classes, listing.declared) == (("a", "b"), False)


def test_a_patient_in_two_parts_is_one_patient(tmp_path: Path) -> None:
    arrays = {f"{part}_{kind}": np.array([1]) for part in ("train", "test") for kind in ("labels", "patient")}
    arrays |= {"train_images": pictures(1), "test_images": pictures(1)}
    first, second = read_npz(saved(tmp_path, arrays), name="m").records
    assert first.patient == second.patient != ""


WRONG_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "float images": ({"images": pictures(2, "float32"), "labels": [0, 1]}, "float32; images must be uint8 or uint16"),
    "signed images": ({"images": pictures(2, "int16"), "labels": [0, 1]}, "int16; images must be"),
    "volumes": ({"images": pictures(2, shape=(4, 4, 4)), "labels": [0, 1]}, "shape 2 × 4 × 4 × 4"),
    "no height": ({"images": pictures(2, shape=(0, 4)), "labels": [0, 1]}, "shape 2 × 0 × 4"),
    "a single number": ({"images": np.uint8(3), "labels": [0]}, "shape of a single number"),
    "too few labels": ({"images": pictures(3), "labels": [0, 1]}, "'labels' has the shape 2 for 3 images"),
    "many labels each": ({"images": pictures(2), "labels": np.zeros((2, 14), int)}, "shape 2 × 14 for 2 images"),
    "too few sites": ({"images": pictures(2), "labels": [0, 1], "site": ["Lyon"]}, "'site' has the shape 1 for 2"),
    "fractions": ({"images": pictures(2), "labels": [0.5, 1]}, "float64; it must hold whole numbers or texts"),
    "no labels": ({"images": pictures(2)}, "no 'labels' beside it"),
    "no images": ({"pictures": pictures(2), "labels": [0, 1]}, "none of its arrays is called images"),
    "unknown part": ({"images": pictures(1), "labels": [0], "x_images": pictures(1)}, "1 of its arrays of images"),
    "nothing": ({"images": pictures(0), "labels": np.zeros(0, int)}, "no image in them"),
    "broken UTF-8": ({"images": pictures(1), "labels": np.array([b"\xff"])}, "'labels' is damaged"),
    "half a surrogate": ({"images": pictures(1), "labels": np.array(["\ud800"])}, "cannot be printed"),
}


@pytest.mark.parametrize("fault", WRONG_ARRAYS)
def test_wrong_arrays_are_told_in_a_sentence(tmp_path: Path, fault: str) -> None:
    arrays, expected = WRONG_ARRAYS[fault]
    file = saved(tmp_path, arrays)
    sentence = refused(lambda: read_npz(file, name="m"))
    assert str(file) in sentence
    assert expected in sentence


LABELS = npy_bytes(np.array([0, 1]))
SHAPE = "{'descr': '|u1', 'fortran_order': False, 'shape': %s, }"
HOSTILE: dict[str, tuple[dict[str, bytes], str]] = {
    "pickled images": (
        {"images.npy": npy_bytes(np.array([{}, {}], dtype=object)), "labels.npy": LABELS},
        "'images' holds Python objects",
    ),
    "pickled labels": (
        {"images.npy": npy_bytes(pictures(2)), "labels.npy": npy_bytes(np.array([{}, {}], dtype=object))},
        "'labels' holds Python objects",
    ),
    "huge shape": ({"images.npy": header_only(SHAPE % "(10**12, 28, 28)")}, "damaged"),
    "larger shape": ({"images.npy": header_only(SHAPE % "(1000000000000, 28, 28)")}, "claims another size"),
    "smaller shape": ({"images.npy": header_only(SHAPE % "(1, 1, 1)") + b"12345"}, "claims another size"),
    "negative shape": ({"images.npy": header_only(SHAPE % "(-1, -1, 1)") + b"1"}, "claims another size"),
    "deep header": ({"images.npy": header_only("(" * 9000)}, "damaged"),
    "long header": ({"images.npy": header_only(" " * 10**6, 2)}, "damaged"),
    "header of nothing": ({"images.npy": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{"}, "damaged"),
    "later version": ({"images.npy": b"\x93NUMPY\x09\x00" + bytes(90)}, "damaged"),
    "no array": ({"images.npy": b"GIF89a"}, "damaged"),
    "empty member": ({"images.npy": b""}, "damaged"),
    "two headers that differ": (
        {"images.npy": npy_bytes(pictures(2)), "labels.npy": LABELS[:-1]},
        "the header of 'labels' claims another size",
    ),
    "not .npy": ({"images": npy_bytes(pictures(2)), "labels": LABELS}, "none of its arrays"),
}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, fault: str, method: int) -> None:
    members, expected = HOSTILE[fault]
    file = zipped(tmp_path, members, method)
    sentence = refused(lambda: read_npz(file, name="m"))
    assert expected in sentence


def test_a_member_twice_is_refused(tmp_path: Path) -> None:
    file = zipped(tmp_path, {"images.npy": npy_bytes(pictures(2)), "labels.npy": LABELS})
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("images.npy", npy_bytes(pictures(2)))
    assert "same name" in refused(lambda: read_npz(file, name="m"))


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    members = {"images.npy": npy_bytes(pictures(2)), "labels.npy": LABELS}
    assert "does not write" in refused(lambda: read_npz(zipped(tmp_path, members, zipfile.ZIP_LZMA), name="m"))


def test_sizes_beyond_the_caps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path, {"images": pictures(2), "labels": [0, 1]})
    monkeypatch.setitem(npz.MOST_BYTES, "images", 100)
    assert "more than the 100 that are read" in refused(lambda: read_npz(file, name="m"))
    monkeypatch.setitem(npz.MOST_BYTES, "images", 8 * 2**30)
    monkeypatch.setattr(npz, "MOST_IMAGES", 1)
    assert "2 images, more than the 1" in refused(lambda: read_npz(file, name="m"))


@pytest.mark.parametrize(("field", "value"), [("uncompressed", 2**31), ("compressed", 2**31)])
def test_a_zip_that_lies_about_a_size_is_refused(tmp_path: Path, field: str, value: int) -> None:
    """A directory entry that claims gigabytes in a file of a few hundred bytes (zip's APPNOTE 4.3.12)."""
    file = zipped(tmp_path, {"images.npy": npy_bytes(pictures(2)), "labels.npy": LABELS})
    content = bytearray(file.read_bytes())
    entry = content.index(b"PK\x01\x02")
    struct.pack_into("<I", content, entry + {"compressed": 20, "uncompressed": 24}[field], value)
    file.write_bytes(content)
    assert "more than the file can hold" in refused(lambda: read_npz(file, name="m"))


def test_labels_whose_checksum_is_wrong_are_refused(tmp_path: Path) -> None:
    file = zipped(tmp_path, {"images.npy": npy_bytes(pictures(2)), "labels.npy": LABELS})
    content = file.read_bytes()
    file.write_bytes(content.replace(LABELS, LABELS[:-8] + b"\x07" + LABELS[-7:]))
    assert "'labels' is damaged" in refused(lambda: read_npz(file, name="m"))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_archive_is_refused(tmp_path: Path, share: float) -> None:
    file = saved(tmp_path, {"images": pictures(50), "labels": np.zeros(50, int)})
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert "not an npz file, or only a part" in refused(lambda: read_npz(file, name="m"))


@pytest.mark.parametrize("bomb", ["images", "header"])
def test_listing_asks_for_little_memory(tmp_path: Path, bomb: str) -> None:
    """64 MiB of images, or of a header that never ends, in a file of 64 KiB."""
    size = 2**26
    images = header_only(" " * size, 2) if bomb == "header" else npy_bytes(pictures(1, shape=(2**13, 2**13)))
    file = zipped(tmp_path, {"images.npy": images, "labels.npy": npy_bytes(np.array([0]))}, zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < size / 500
    tracemalloc.start()
    try:
        if bomb == "header":
            refused(lambda: read_npz(file, name="m"))
        else:
            assert len(read_npz(file, name="m").records) == 1
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=400))
def test_no_bytes_make_the_reader_fall_over(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = zipped(tmp_path_factory.mktemp("npz"), {"images.npy": b"\x93NUMPY\x01\x00" + content, "labels.npy": LABELS})
    refused(lambda: read_npz(file, name="m"))


def test_a_planted_name_is_not_in_a_listing(tmp_path: Path) -> None:
    arrays = {"images": pictures(1), "labels": [0], "patient": [NAME], NAME: [NAME]}
    listing = read_npz(saved(tmp_path, arrays), name="m")
    assert [record.patient for record in listing.records] == ["patient-1"]
    assert NAME not in repr(listing)


NAMED = header_only(f"{{'{NAME}': 1}}")


@pytest.mark.parametrize(
    "members",
    [
        {"images.npy": NAMED},
        {"images.npy": npy_bytes(pictures(2)), "labels.npy": LABELS, f"{NAME}_images.npy": b""},
        {f"{NAME}_images.npy": NAMED},
        {"images.npy": npy_bytes(pictures(2)), "labels.npy": LABELS, "patient.npy": npy_bytes(np.array([NAME]))},
        {"images.npy": npy_bytes(pictures(1)), "labels.npy": npy_bytes(np.array([f"\x1b{NAME}"]))},
    ],
)
def test_a_planted_name_is_not_in_an_error(tmp_path: Path, members: dict[str, bytes]) -> None:
    file = zipped(tmp_path, members)
    assert "Quast" not in refused(lambda: read_npz(file, name="m"))


def test_a_real_npz_has_the_published_counts() -> None:
    file = next(real("pneumoniamnist").glob("*.npz"))
    listing = read_npz(file, name="pneumoniamnist", label_names=("normal", "pneumonia"))
    assert counts(record.split for record in listing.records) == {"train": 4708, "validation": 524, "test": 624}
    with np.load(file) as arrays:
        sick = {part: int(arrays[f"{part}_labels"].sum()) for part in ("train", "val", "test")}
    found = counts(record.array.removesuffix("_images") for record in listing.records if record.label == "pneumonia")
    assert found == sick
