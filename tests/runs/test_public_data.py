"""The server's public set: one site in the sites' own classes and shape, and no image that a site holds too."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.config.recipe import DataSection
from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.core.types import Examples
from polyclinic.data import DATASETS
from polyclinic.data.examples import SiteData
from polyclinic.data.loading.cache import VARIABLE
from polyclinic.data.partitioning.partitions import Dirichlet
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.splits import Fractions
from polyclinic.runs.public_data import load_public
from tests.data.clinics import Rows, clinic, listed
from tests.data.written import real, refused

CLASSES = ("benign", "malignant")
STREAM = Stream(0).child("public")
HALVES = {"train": 0.5, "validation": 0.25, "test": 0.25}
TWO = {"benign": ["benign"], "malignant": ["malignant"]}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return clinic(tmp_path)


def section(name: str, **options: Any) -> DataSection:
    return DataSection(name=name, **options)


def table(folder: Path, rows: Rows, **options: Any) -> DataSection:
    listed(folder, rows)
    said = {"path": str(folder / "labels.csv"), "size": 20, "channels": 1, "split": HALVES}
    return section("table", **said | options)


def gathered(made: DataSection, classes: tuple[str, ...] = CLASSES, channels: int = 1, size: int = 20) -> SiteData:
    return load_public(made, None, classes, channels, size, STREAM)


def parts(site: SiteData) -> tuple[Examples, Examples, Examples]:
    return site.train, site.validation, site.test


def patients(site: SiteData) -> list[set[str]]:
    return [set(part.patients or ()) for part in parts(site)]


def hashes(sites: Iterable[SiteData]) -> set[str]:
    """Of the images as a network gets them."""
    found = (part.batch(torch.arange(len(part)))[0] for site in sites for part in parts(site))
    return {hashlib.sha256(image.numpy().tobytes()).hexdigest() for images in found for image in images}


def names_by_image(site: SiteData, classes: tuple[str, ...]) -> dict[bytes, str]:
    batches = [part.batch(torch.arange(len(part))) for part in parts(site)]
    return {
        image.numpy().tobytes(): classes[label]
        for images, labels in batches
        for image, label in zip(images, labels.tolist(), strict=True)
    }


def test_everything_is_one_site_and_pairs_stay_together(rows: Rows, tmp_path: Path) -> None:
    site = gathered(table(tmp_path, rows))
    assert site.name == "public"
    assert sum(map(len, parts(site))) == len(hashes([site])) == 24
    assert all(map(len, parts(site)))
    assert sum(map(len, patients(site))) == len(set().union(*patients(site))) == 12


def test_the_stream_decides(rows: Rows, tmp_path: Path) -> None:
    made = table(tmp_path, rows)
    one, again = gathered(made), gathered(made)
    others = [load_public(made, None, CLASSES, 1, 20, Stream(seed)) for seed in range(5)]
    assert patients(one) == patients(again)
    assert any(patients(one) != patients(other) for other in others)


@pytest.mark.parametrize("order", [*itertools.permutations(("benign", "malignant", "normal"))])
def test_another_order_of_the_classes_renumbers_the_labels(
    rows: Rows, tmp_path: Path, order: tuple[str, str, str]
) -> None:
    for number, row in enumerate(rows):
        row["label"] = ("benign", "malignant", "normal")[number // 2 % 3]
    made = table(tmp_path, rows, classes=["benign", "malignant", "normal"])
    own, theirs = gathered(made, ("benign", "malignant", "normal")), gathered(made, order)
    assert names_by_image(own, ("benign", "malignant", "normal")) == names_by_image(theirs, order)


def test_other_classes_are_told_beside_the_sites_with_the_way_out(rows: Rows, tmp_path: Path) -> None:
    made = table(tmp_path, rows)
    sentence = refused(lambda: gathered(made, ("normal", "benign", "malignant")))
    for word in ("benign, malignant, the", "normal, benign, malignant;", "public.task", "data.task"):
        assert word in sentence
    renamed = table(tmp_path, rows, task={"well": ["benign"], "sick": ["malignant"]})
    assert Counter(names_by_image(gathered(renamed, ("sick", "well")), ("sick", "well")).values()) == {
        "well": 12,
        "sick": 12,
    }


@pytest.mark.parametrize(("channels", "size"), [(3, 20), (1, 28)])
def test_another_shape_is_told_with_what_to_set(rows: Rows, tmp_path: Path, channels: int, size: int) -> None:
    made = table(tmp_path, rows)
    sentence = refused(lambda: gathered(made, CLASSES, channels, size))
    for word in (
        "1 × 20 × 20",
        f"{channels} × {size} × {size}",
        f"public.channels: {channels}",
        f"public.size: {size}",
    ):
        assert word in sentence


def test_a_set_without_files_can_be_public() -> None:
    site = load_public(section("digits"), None, DATASETS["digits"].classes, 1, 8, STREAM)
    assert sum(map(len, parts(site))) == 1797


def official(rows: Rows, *names: str) -> Rows:
    """The patients take turns between these parts."""
    return [row | {"split": names[number // 2 % len(names)]} for number, row in enumerate(rows)]


def private(made: DataSection, data: Path | None = None, count: int = 2) -> dict[str, SiteData]:
    spec = DATASETS[made.name]
    collection = spec.load(spec.options.model_validate(made.options), Stream(0).child("data"), data)
    partition = Dirichlet(sites=count, alpha=0.5, minimum=6, top_up=True)
    return build_site_data(collection, partition, made.split, Stream(0).child("sites"), allow_single_class=True)


def shared_out(folder: Path, rows: Rows) -> tuple[dict[str, SiteData], DataSection]:
    """One table between the sites (its training part) and the server (its validation part)."""
    parted = official(rows, "train", "train", "validation", "validation")
    sites = private(table(folder, parted, official_parts=["train"]))
    return sites, table(folder, parted, official_parts=["validation"])


def test_official_parts_share_a_set_between_sites_and_server(rows: Rows, tmp_path: Path) -> None:
    sites, made = shared_out(tmp_path, rows)
    site = load_public(made, None, CLASSES, 1, 20, STREAM, sites)
    assert not hashes(sites.values()) & hashes([site])
    assert len(hashes(sites.values()) | hashes([site])) == 24
    assert all(map(len, parts(site))), "a single official part is split anew"


def test_official_parts_with_training_keep_the_official_split(rows: Rows, tmp_path: Path) -> None:
    listed(tmp_path, official(rows, "train", "validation", "test"))
    spec = DATASETS["table"]
    for wanted in (["train", "test"], ["train"], ["test"]):
        said = {"path": str(tmp_path / "labels.csv"), "classes": list(CLASSES), "official_parts": wanted}
        split = spec.load(spec.options.model_validate(said), Stream(0), None).split
        assert split is None if wanted == ["test"] else set(split or ()) == set(wanted)


def test_wrong_official_parts_are_told(rows: Rows, tmp_path: Path) -> None:
    sentence = refused(
        lambda: gathered(table(tmp_path, official(rows, "train", "test"), official_parts=["validation"]))
    )
    assert "labels.csv has no official validation part (it has: train, test); correct official_parts." in sentence
    assert "(it has: none)" in refused(lambda: gathered(table(tmp_path, rows, official_parts=["train"])))
    for row, part in zip(rows, itertools.cycle(["train", "test"]), strict=False):
        row["split"] = part
    sentence = refused(lambda: gathered(table(tmp_path, rows, official_parts=["train"])))
    assert "12 patients of labels.csv would be in the official_parts and outside of them" in sentence
    with pytest.raises(RecipeError, match="official_parts"):
        gathered(table(tmp_path, rows, official_parts=["exam"]))


def test_what_a_site_holds_leaves_the_public_set_with_its_patient(
    rows: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fifth picture, of a public patient, is copied over the first, of a private one."""
    (tmp_path / rows[4]["path"]).write_bytes((tmp_path / rows[0]["path"]).read_bytes())
    sites, made = shared_out(tmp_path, rows)
    with caplog.at_level(logging.WARNING):
        site = load_public(made, None, CLASSES, 1, 20, STREAM, sites)
    assert not hashes(sites.values()) & hashes([site])
    assert sum(map(len, parts(site))) == 10
    assert len(set().union(*patients(site))) == 5
    assert "1 of 12 images of the public set are at the sites too" in caplog.text


def test_a_public_set_that_is_all_private_is_refused(rows: Rows, tmp_path: Path) -> None:
    made = table(tmp_path, rows)
    with pytest.raises(DataError, match=r"24 of 24 images .* so none is left; choose another public set"):
        load_public(made, None, CLASSES, 1, 20, STREAM, private(made))


@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("task", [None, TWO])
def test_real_mias_and_busi_have_the_same_classes(size: int, task: dict[str, list[str]] | None) -> None:
    data = real("mias").parent
    options: dict[str, Any] = {"size": size, "channels": 1, **({"task": task} if task else {})}
    spec = DATASETS["busi"]
    listing = spec.read and spec.read(spec.options.model_validate(options), real("busi").parent)
    assert listing is not None
    classes = tuple(task or listing.classes)
    site = load_public(section("mias", crop_borders=True, **options), data, classes, 1, size, STREAM)
    counts = Counter(classes[label] for part in parts(site) for label in part.labels.tolist())
    assert counts == {name: {"normal": 207, "benign": 63, "malignant": 52}[name] for name in classes}
    assert sum(map(len, patients(site))) == len(set().union(*patients(site))) == (108 if task else 161)
    assert all(set(part.labels.tolist()) == set(range(len(classes))) for part in parts(site))


def test_no_real_chest_image_is_both_public_and_at_one_of_a_hundred_sites() -> None:
    data = real("pneumoniamnist").parent
    own = Fractions(official=False)
    medmnist = DATASETS["medmnist"]
    options = medmnist.options.model_validate({"channels": 1, "official_parts": ["train", "test"]})
    loaded = medmnist.load(options, Stream(0), data)
    partition = Dirichlet(sites=100, alpha=0.5, minimum=10, top_up=True)
    sites = build_site_data(loaded, partition, own, Stream(0), allow_single_class=True)
    made = section("medmnist", channels=1, official_parts=["validation"])
    site = load_public(made, data, loaded.classes, 1, 28, STREAM, sites)
    assert len(sites) == 100
    assert sum(len(part) for held in sites.values() for part in parts(held)) == 4708 + 624
    assert not hashes(sites.values()) & hashes([site])
    assert 500 < sum(map(len, parts(site))) <= 524
