from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.datasets import load_digits

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.data import DATASETS, describe_datasets
from polyclinic.data.builtin.digits import DigitsOptions, load_digit_images
from polyclinic.data.data_dir import data_folder
from polyclinic.data.datasets.mnist.dataset import MnistOptions, load_mnist
from polyclinic.data.examples import Collection
from polyclinic.data.partitioning.partitions import Iid
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.splits import Fractions

PUBLISHED = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize("name", ["phantom", "digits", "drawn_digits"])
def test_sets_that_need_no_files_load_and_federate(name: str) -> None:
    dataset = DATASETS[name]
    options = dataset.options.model_validate({"size": 32})
    data = dataset.load(options, Stream(0), None)
    assert data.classes == dataset.classes
    assert len(data.images) == len(data.labels) == len(data.patients)
    assert set(data.labels.tolist()) == set(range(len(data.classes)))
    assert len(build_site_data(data, Iid(sites=4), Fractions(), Stream(0))) == 4


PARTS = [{"set": "busi", "site": "a", "task": {}}, {"set": "mias", "site": "b", "task": {}}]
NEEDED: dict[str, dict[str, object]] = {
    **{name: {"path": "images"} for name in ("folder", "table", "npz")},
    "multi": {"parts": PARTS},
}
"""Options without a default."""


@pytest.mark.parametrize("name", DATASETS)
def test_options_are_frozen_and_closed(name: str) -> None:
    options = DATASETS[name].options
    with pytest.raises(RecipeError, match=f"{options.__name__} has no option 'colour'"):
        options.model_validate({"colour": True, **NEEDED.get(name, {})})
    field = next(iter(options.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(options.model_validate(NEEDED.get(name, {})), field, 64)


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_says_what_it_is_and_under_which_terms(name: str) -> None:
    assert describe_datasets()[name]
    assert DATASETS[name].licence


def test_digits_are_scikit_learns() -> None:
    data, theirs = load_digit_images(DigitsOptions(), Stream(0)), load_digits()
    assert np.abs(data.images[:, 0].numpy() / 255 - theirs.images / 16).max() < 0.5 / 255 + 1e-9
    assert data.labels.tolist() == theirs.target.tolist()
    assert len(set(data.patients)) == len(data) == 1797


def test_resized_digits_keep_their_brightness() -> None:
    plain, large = (load_digit_images(DigitsOptions(size=size), Stream(0)).images.float() for size in (8, 32))
    assert large.shape == (1797, 1, 32, 32)
    assert torch.allclose(large.mean((1, 2, 3)), plain.mean((1, 2, 3)), atol=8)


def test_the_data_folder_is_the_argument_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    (tmp_path / "other").mkdir()
    assert data_folder(tmp_path / "other") == tmp_path / "other"
    with pytest.raises(DataError, match=r"'.*nowhere' does not exist; correct --data DIR or POLYCLINIC_DATA"):
        data_folder(tmp_path / "nowhere")


def test_a_missing_data_folder_says_how_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
    with pytest.raises(DataError, match="give --data DIR or set POLYCLINIC_DATA"):
        load_mnist(MnistOptions(), Stream(0))


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small MNIST: 20 training and 5 test images."""
    rng = np.random.default_rng(0)
    home = tmp_path / "mnist"
    home.mkdir()
    for prefix, count in (("train", 20), ("t10k", 5)):
        (home / f"{prefix}-images-idx3-ubyte").write_bytes(idx(rng.integers(0, 256, (count, 28, 28))))
        (home / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(count) % 10))
    return tmp_path


def loaded(folder: Path, limit: int | None = None, seed: int = 0) -> Collection:
    return load_mnist(MnistOptions(limit=limit), Stream(seed), folder)


def test_idx_files_are_read_as_written(folder: Path) -> None:
    data = loaded(folder)
    written = (folder / "mnist" / "train-images-idx3-ubyte").read_bytes()[16:]
    assert data.images.numpy().tobytes() == written
    assert data.images.shape == (20, 1, 28, 28)
    assert data.labels.tolist() == [number % 10 for number in range(20)]
    assert data.held_out is not None
    assert data.held_out.labels.tolist() == [0, 1, 2, 3, 4]


def test_gzipped_files_are_read_alike(folder: Path) -> None:
    plain = loaded(folder)
    for path in list((folder / "mnist").iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    assert torch.equal(loaded(folder).images, plain.images)


def test_a_limit_draws_training_images_by_the_stream(folder: Path) -> None:
    whole, one, again, other = loaded(folder), loaded(folder, 7), loaded(folder, 7), loaded(folder, 7, seed=1)
    assert len(one) == 7
    assert torch.equal(one.images, again.images)
    assert not torch.equal(one.images, other.images)
    known = {image.numpy().tobytes(): int(label) for image, label in zip(whole.images, whole.labels, strict=True)}
    assert [known[image.numpy().tobytes()] for image in one.images] == one.labels.tolist()
    assert one.held_out is not None
    assert len(one.held_out) == 5
    assert torch.equal(loaded(folder, 60_000).images, whole.images)


def edited(content: bytes, position: int, value: int) -> bytes:
    return content[:position] + struct.pack(">I", value) + content[position + 4 :]


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], "is truncated: its header promises 15680 bytes"),
        ("train-images-idx3-ubyte", lambda b: b + b"x", "has bytes after its end"),
        ("train-images-idx3-ubyte", lambda b: b[:10], "is truncated within its header"),
        ("train-images-idx3-ubyte", lambda b: b"", "is truncated within its header"),
        ("train-images-idx3-ubyte", lambda b: edited(b, 0, 0x801), "starts with 0x00000801, not 0x00000803"),
        (
            "train-images-idx3-ubyte",
            lambda b: edited(b, 4, 2**32 - 1),
            "claims 4294967295 items, where there can be 60000",
        ),
        ("train-images-idx3-ubyte", lambda b: edited(b, 4, 0), "claims 0 items"),
        ("train-images-idx3-ubyte", lambda b: edited(b, 8, 32), "has images of 32 × 28 pixels, not 28 × 28"),
        ("t10k-images-idx3-ubyte", lambda b: edited(b, 4, 60_000), "claims 60000 items, where there can be 10000"),
        ("train-labels-idx1-ubyte", lambda b: edited(b[:-1], 4, 19), "has 19 labels for 20 images"),
        ("train-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "has a label 10, not a digit"),
        ("t10k-labels-idx1-ubyte", lambda b: edited(b, 0, 0x803), "starts with 0x00000803, not 0x00000801"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_damaged_file_is_named(folder: Path, name: str, damage: object, words: str, zipped: bool) -> None:
    path = folder / "mnist" / name
    content = damage(path.read_bytes())  # type: ignore[operator]
    if zipped:
        path.unlink()
        path = path.with_name(name + ".gz")
        content = gzip.compress(content, mtime=0)
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        loaded(folder)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"not gzip at all", gzip.compress(b"a" * 9000, mtime=0)[:-20]])
def test_a_broken_archive_is_named(folder: Path, content: bytes) -> None:
    path = folder / "mnist" / "train-images-idx3-ubyte"
    path.unlink()
    path.with_name(path.name + ".gz").write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz' (cannot be read|starts with)"):
        loaded(folder)


def test_a_missing_file_is_named_with_where_it_belongs(folder: Path) -> None:
    (folder / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte' is missing, plain and \.gz; put MNIST's four idx files"
    ):
        loaded(folder)


@pytest.mark.parametrize("limit", [0, 60_001])
def test_an_impossible_limit_is_refused(limit: int) -> None:
    with pytest.raises(RecipeError, match="'limit' of MnistOptions"):
        MnistOptions(limit=limit)


def test_mnist_has_the_published_counts() -> None:
    folder = os.environ.get("POLYCLINIC_DATA")
    if folder is None or not (Path(folder) / "mnist").is_dir():
        pytest.skip("set POLYCLINIC_DATA to the folder that holds mnist/")
    data = loaded(Path(folder))
    assert torch.bincount(data.labels).tolist() == PUBLISHED
    assert data.held_out is not None
    assert torch.bincount(data.held_out.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert float(data.images.float().mean() / 255) == pytest.approx(0.1307, abs=1e-4)
    assert float(data.images.float().std() / 255) == pytest.approx(0.3081, abs=1e-4)
