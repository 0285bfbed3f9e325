"""What arrives: the same from every source, of one shape whatever it was, and of public sets all that is published."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyclinic.core.rng import Stream
from polyclinic.data import DATASETS
from polyclinic.data.examples import Collection
from polyclinic.data.loading.cache import cache_folder
from polyclinic.data.loading.loader import load_pixels
from polyclinic.data.partitioning.partitions import Iid, Natural, Partition
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.sources.folder import Level, read_folder
from polyclinic.data.sources.npz import read_npz
from polyclinic.data.splits import Fractions
from tests.data.clinics import OPTIONS, Rows, clinic, listed, loaded, noise
from tests.data.written import counts, real

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return clinic(tmp_path)


def same(one: Collection, other: Collection) -> bool:
    fields = ("classes", "patients", "sites", "split", "mean", "std")
    alike = all(getattr(one, name) == getattr(other, name) for name in fields)
    return alike and torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


def test_folder_table_and_npz_give_the_same(tmp_path: Path) -> None:
    levels: tuple[Level, ...] = ("site", "split", "label", "patient")
    images = noise(0, 24, 11, 11, 3)
    said: Rows = []
    for number in range(24):
        patient = number // 2
        site, split = ("north", "south")[patient // 6], ("test", "train")[patient // 3 % 2]
        label = ("a", "b")[number % 2]
        path = tmp_path / "set" / site / split / label / f"p{patient:02}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(path)
        said.append({"path": str(path), "label": label, "site": site, "patient": f"p{patient:02}", "split": split})
    said.sort(key=lambda row: row["path"])
    order = [int(Path(row["path"]).stem) for row in said]
    columns = {name: np.array([row[name] for row in said]) for name in ("site", "patient", "split")}
    np.savez(
        tmp_path / "set.npz", allow_pickle=False, images=images[order], labels=[row["label"] for row in said], **columns
    )
    sources = (
        read_folder(tmp_path / "set", name="folder", levels=levels),
        listed(tmp_path, said),
        read_npz(tmp_path / "set.npz", name="npz"),
    )
    found = [loaded(source, channels=3) for source in sources]
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert counts(found[0].split or ()) == {"train": 12, "test": 12}
    assert not same(found[0], loaded(replace(sources[0], official=False), channels=3))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_cache_changes_nothing(rows: Rows, tmp_path: Path, channels: int) -> None:
    listing = listed(tmp_path, rows)
    plain = loaded(listing, cache=False, channels=channels, normalise="imagenet")
    assert not cache_folder().exists()
    for _ in range(2):
        assert same(loaded(listing, channels=channels, normalise="imagenet"), plain)


MIXED: dict[str, tuple[Image.Image, int, tuple[int, int, int]]] = {
    "red.jpg": (Image.new("RGB", (10, 10), (254, 0, 0)), 76, (254, 0, 0)),
    "deep.png": (Image.fromarray(np.full((50, 50), 65535 // 3, np.uint16)), 85, (85, 85, 85)),
    "glass.png": (Image.new("RGBA", (90, 90), (255, 255, 0, 102)), 90, (102, 102, 0)),
    "palette.png": (Image.new("RGB", (8, 8), (0, 0, 255)).quantize(2), 29, (0, 0, 255)),
    "bit.bmp": (Image.new("1", (200, 200), 1), 255, (255, 255, 255)),
    "cmyk.tif": (Image.new("CMYK", (31, 31), (0, 255, 0, 0)), 105, (255, 0, 255)),
}
"""A picture of one colour, its grey value by ITU-R 601 (0.299 R + 0.587 G + 0.114 B), its colour."""


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_colour_of_any_size_come_out_alike(tmp_path: Path, channels: int) -> None:
    for name, (image, _, _) in MIXED.items():
        image.save(tmp_path / name)
    options = OPTIONS.model_copy(update={"channels": channels})
    found = load_pixels(listed(tmp_path, [{"path": name, "label": "a"} for name in MIXED]), options)
    for image, (_, grey, colour) in zip(found, MIXED.values(), strict=True):
        wanted = torch.tensor([grey] if channels == 1 else colour).reshape(-1, 1, 1)
        assert (image.int() - wanted).abs().max() <= 1


def test_a_wide_picture_keeps_its_shape_between_black_bars(tmp_path: Path) -> None:
    rows: Rows = []
    for number, (width, height) in enumerate([(40, 20), (20, 40), (400, 200)]):
        Image.new("L", (width, height), 200).save(tmp_path / f"{number}.png")
        rows.append({"path": f"{number}.png", "label": "a"})
    wide = torch.zeros(1, 16, 16, dtype=torch.uint8)
    wide[:, 4:12] = 200
    assert torch.equal(load_pixels(listed(tmp_path, rows), OPTIONS), torch.stack([wide, wide.mT, wide]))


GREY = {"none": (0.0, 1.0), "half": (0.5, 0.5), "imagenet": (0.449, 0.226)}
COLOUR = {**GREY, "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("normalise", GREY)
def test_normalisation_is_its_formula(rows: Rows, tmp_path: Path, normalise: str, channels: int) -> None:
    found = loaded(listed(tmp_path, rows), normalise=normalise, channels=channels)
    batch, _ = found.to_images().batch(torch.tensor([5, 0, 5]))
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (GREY if channels == 1 else COLOUR)[normalise])
    assert torch.allclose(batch, (found.images[[5, 0, 5]] / 255 - mean) / std, atol=1e-6)


# Public sets, by the counts in their own description; what a loader leaves out by name is taken off.

CLASSES = {
    "mnist": dict(zip("0123456789", (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949), strict=True)),
    "busi": {"benign": 437 - 1, "malignant": 210 - 1, "normal": 133},
    "mias": {"normal": 207, "benign": 63, "malignant": 52},
    "deepdrid": {"0": 980, "1": 294, "2": 465, "3": 382, "4": 116},
    "covid_cxr": {"pneumonia": 661, "normal": 511, "covid": 243, "tuberculosis": 11},
    "breakhis": {"benign": 8, "malignant": 4},
}
SITES = {
    "mnist": {},
    "busi": {"BUSI-Cairo": 780 - 2},
    "mias": {"MIAS-UK": 322},
    "ddsm_views": {"DDSM-A-MGH": 1822, "DDSM-B-WFU-Lumisys": 312, "DDSM-D-ISMD-Howtek": 91},
    "deepdrid": {
        "DeepDRiD-Nicheng": 1497,
        "DeepDRiD-UWF": 254 - 6,
        "DeepDRiD-Nation": 56,
        "DeepDRiD-Shanghai": 36,
        "unstated": 400,
    },
    "covid_cxr": {"NIH-ChestXray8": 1000, "radiopaedia.org": 200, "eurorad.org": 117, "Hannover-ml-workgroup": 81},
    "office_caltech10": {"amazon": 958 - 25, "caltech": 1123 - 1, "dslr": 157, "webcam": 295},
    "medmnist": {"Guangzhou": 4708 + 524 + 624},
    "breakhis": {"BreakHis-P&D": 12},
}
FOLDERS = {"breakhis": "breakhis_sample", "medmnist": "pneumoniamnist"}
TOTAL = {name: sum(sites.values()) for name, sites in SITES.items()} | {"mnist": 60_000, "covid_cxr": 1426}
NATURAL = ("ddsm_views", "deepdrid", "office_caltech10")
"""Sets whose every site has images enough for three parts."""


@pytest.mark.parametrize("name", SITES)
def test_a_public_set_loads_as_published_and_divides_by_patient(name: str) -> None:
    folder = real(FOLDERS.get(name, name)).parent
    spec = DATASETS[name]
    options = spec.options.model_validate({} if name == "mnist" else {"size": 32, "channels": 1})
    found = spec.load(options, Stream(0), folder)
    assert len(found) == TOTAL[name]
    assert found.images.shape[1:] == ((1, 28, 28) if name == "mnist" else (1, 32, 32))
    assert found.images.flatten(1).amax(1).min() > 0, "an image of zeros"
    if name in CLASSES:
        assert counts(found.classes[label] for label in found.labels.tolist()) == CLASSES[name]
    assert SITES[name].items() <= counts(found.sites or ()).items()
    if name == "breakhis":
        return  # nine patients are too few for three sites of three parts
    divisions: list[Partition] = [Iid(sites=3), *([Natural()] if name in NATURAL else [])]
    for partition in divisions:
        assert_divided_by_patient(found, partition)


def assert_divided_by_patient(collection: Collection, partition: Partition) -> None:
    sites = build_site_data(collection, partition, Fractions(official=False), Stream(0))
    parts = [part for site in sites.values() for part in (site.train, site.validation, site.test)]
    people = [set(part.patients or ()) for part in parts]
    assert all(people)
    assert len(set().union(*people)) == sum(map(len, people)), "a patient is in two parts"
    assert sum(map(len, parts)) == len(collection)
    everybody = Counter(label for part in parts for label in part.labels.tolist())
    assert everybody == Counter(collection.labels.tolist())
