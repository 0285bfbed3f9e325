"""A set of real photographs (crops of scikit-learn's two), and faults to plant in it, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from polyclinic.data.check import CheckResult, check_listing
from polyclinic.data.findings import Level
from polyclinic.data.partitioning.dry_run import UNDIVIDED
from polyclinic.data.records import Listing, Record

Bytes = NDArray[np.uint8]
SIDE = 40
PER_CLASS = 60
"""Images: at each of two sites 30, of 15 patients with two each: 9 in train, 3 in validation, 3 in test."""
PARTS = ["train"] * 9 + ["validation"] * 3 + ["test"] * 3


def cut_crops() -> dict[str, list[Bytes]]:
    """Grey squares of each photograph, the most contrasted first."""
    from sklearn.datasets import load_sample_image

    found = {}
    for label, photo in (("city", "china.jpg"), ("flower", "flower.jpg")):
        grey = np.asarray(Image.fromarray(load_sample_image(photo)).convert("L"))
        squares = [
            grey[top : top + SIDE, left : left + SIDE].copy()
            for top in range(0, grey.shape[0] - SIDE, SIDE)
            for left in range(0, grey.shape[1] - SIDE, SIDE)
        ]
        found[label] = sorted(squares, key=lambda square: -float(square.std()))
    return found


def save_records(crops: dict[str, list[Bytes]], folder: Path) -> list[Record]:
    made: list[Record] = []
    for label, squares in crops.items():
        for number in range(PER_CLASS):
            site, patient = divmod(number, 30)
            path = folder / f"{label}_{number}.png"
            Image.fromarray(squares[number]).save(path)
            where = f"labels.csv row {len(made) + 2}"
            person = f"{label}-{site}-{patient % 15}"
            made.append(Record(path, label, f"clinic {site}", person, PARTS[patient % 15], where))
    return made


@dataclass
class Bench:
    """A set to plant a fault in."""

    records: list[Record]
    crops: dict[str, list[Bytes]]
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    taken: int = PER_CLASS

    def change(self, position: int, **said: Any) -> int:
        self.records[position] = replace(self.records[position], **said)
        return position

    def fresh(self, label: str = "city") -> Image.Image:
        """A picture that is not in the set."""
        self.taken += 1
        return Image.fromarray(self.crops[label][self.taken])

    def put(self, position: int, image: Image.Image, name: str = "", **options: Any) -> int:
        """Another picture in place of this record's."""
        path = self.folder / (name or f"put_{position}.png")
        image.save(path, **options)
        return self.change(position, path=path)

    def opened(self, position: int) -> Image.Image:
        return Image.open(self.records[position].path)

    def listing(self) -> Listing:
        labels = tuple(sorted({record.label for record in self.records} - {""}))
        return Listing("bench", self.folder, tuple(self.records), **{"classes": labels} | self.options)

    def check(self) -> CheckResult:
        return check_listing(self.listing(), workers=2)


Plant = Callable[[Bench], list[int] | None]
"""Plants a fault; answers where it is to be found, or None where it is the whole set's."""
PLANTS: dict[str, tuple[Plant, str, Level, int, set[str]]] = {}


def plants(kind: str, level: Level, count: int = 1, *also: str) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        PLANTS[plant.__name__] = (plant, kind, level, count, set(also))
        return plant

    return keep


@plants("missing file", "stop", 7)
def missing(bench: Bench) -> list[int]:
    return [bench.change(position, path=bench.folder / f"gone_{position}.png") for position in range(3, 10)]


@plants("unreadable file", "stop", 3)
def unreadable(bench: Bench) -> list[int]:
    for position in (5, 40):
        bench.put(position, bench.fresh(), f"cut_{position}.jpg")
        path = bench.records[position].path
        path.write_bytes(path.read_bytes()[:-200])
    (bench.folder / "text.png").write_text("Not an image.")
    return [5, 40, bench.change(70, path=bench.folder / "text.png")]


@plants("blank image", "stop", 2)
def blank(bench: Bench) -> list[int]:
    return [bench.put(position, Image.new("L", (SIDE, SIDE), 90 + position)) for position in (4, 100)]


@plants("tiny image", "warn", 1, "several sizes")
def tiny(bench: Bench) -> list[int]:
    return [bench.put(8, bench.fresh().crop((0, 0, 7, 30)))]


@plants("unusual size", "warn", 2, "several sizes")
def unusual_size(bench: Bench) -> list[int]:
    return [bench.put(8, bench.fresh().resize((120, 120))), bench.put(90, bench.fresh().crop((0, 0, 40, 15)))]


@plants("several sizes", "note", 20)
def two_scanners(bench: Bench) -> list[int]:
    """At one site, both in daily use: that is no mistake."""
    places = [p for p, record in enumerate(bench.records) if record.site == "clinic 1" and p % 3 == 0]
    return [bench.put(position, bench.opened(position).resize((100, 100))) for position in places]


@plants("several bit depths", "warn")
def deep(bench: Bench) -> list[int]:
    return [bench.put(20, Image.fromarray(np.asarray(bench.fresh()).astype(np.uint16) * 257))]


@plants("grey and colour", "note", 2)
def coloured(bench: Bench) -> list[int]:
    tint = np.array([1, 0.8, 0.6])
    made = [(np.asarray(bench.fresh())[..., None] * tint).astype(np.uint8) for _ in range(2)]
    return [bench.put(position, Image.fromarray(image)) for position, image in zip((1, 61), made, strict=True)]


@plants("duplicate image", "warn", 2)
def copied(bench: Bench) -> list[int]:
    bench.put(1, bench.opened(0), "copy.bmp")
    bench.put(32, bench.opened(2).convert("RGB").convert("L"))
    bench.put(33, bench.opened(2))
    return [0, 1, 2, 32, 33]


@plants("duplicate with another label", "stop")
def copied_to_another_class(bench: Bench) -> list[int]:
    return [3, bench.put(75, bench.opened(3))]


@plants("duplicate image", "warn")
def copied_into_validation(bench: Bench) -> list[int]:
    assert bench.records[9].split == "validation"
    return [3, bench.put(9, bench.opened(3))]


@plants("duplicate in the test part", "stop")
def copied_into_test(bench: Bench) -> list[int]:
    assert bench.records[14].split == "test"
    return [3, bench.put(14, bench.opened(3))]


@plants("near duplicate", "warn", 5)
def saved_anew(bench: Bench) -> list[int]:
    bench.put(41, bench.opened(1), "again.jpg", quality=90)
    bench.put(42, bench.opened(2).point(lambda grey: grey * 0.8 + 20))
    bench.put(43, bench.opened(3).resize((38, 38), Image.Resampling.LANCZOS))
    noise = np.random.default_rng(0).normal(0, 2, (SIDE, SIDE))
    bench.put(44, Image.fromarray((np.asarray(bench.opened(4)) + noise).clip(0, 255).astype(np.uint8)))
    marked = bench.opened(5).convert("L")
    ImageDraw.Draw(marked).point([(20, 20), (21, 20), (20, 21)], fill=255)
    bench.put(45, marked)
    return [1, 41, 2, 42, 3, 43, 4, 44, 5, 45]


PLANTS["saved_anew"][4].add("several sizes")


@plants("near duplicate with another label", "warn")
def saved_anew_for_another_class(bench: Bench) -> list[int]:
    return [1, bench.put(61, bench.opened(1), "again.jpg", quality=90)]


@plants("file listed twice", "warn")
def listed_twice(bench: Bench) -> list[int]:
    bench.records.append(replace(bench.records[7], where="labels.csv row 122"))
    return [7, 120]


@plants("file listed twice with other labels", "stop")
def listed_twice_otherwise(bench: Bench) -> list[int]:
    bench.records.append(replace(bench.records[7], label="flower", where="labels.csv row 122"))
    return [7, 120]


@plants("names alike", "warn", 2)
def names_alike(bench: Bench) -> list[int]:
    places = [bench.put(p, bench.fresh(), name) for p, name in ((3, "a.png"), (4, "A.PNG"), (8, "b.png"), (9, "b.bmp"))]
    bench.put(20, bench.fresh(), "1.2.840.png")
    bench.put(21, bench.fresh(), "1.2.841.png")
    return places


@plants("unlisted image", "warn", 2)
def unlisted(bench: Bench) -> None:
    bench.options["unlisted"] = (bench.folder / "x.png", bench.folder / "y.png")


@plants("empty label", "stop")
def empty_label(bench: Bench) -> list[int]:
    return [bench.change(17, label="")]


@plants("misspelt label", "stop", 4)
def misspelt(bench: Bench) -> list[int]:
    return [bench.change(p, label=text) for p, text in ((8, "City"), (9, "citty"), (70, "flwoer"), (71, "flo wer"))]


@plants("label outside the task", "stop")
def outside_the_task(bench: Bench) -> list[int]:
    bench.options |= {"classes": ("city", "flower"), "declared": True}
    return [bench.change(16, label="Maria")]


@plants("class with one image", "stop", 1, "class imbalance")
def one_of_a_kind(bench: Bench) -> list[int]:
    return [bench.change(60, label="temple")]


@plants("class with few patients", "stop", 1, "class missing in a part", "class imbalance", "class missing at a site")
def few_patients(bench: Bench) -> list[int]:
    return [bench.change(position, label="temple") for position in (60, 75, 61)]


@plants("class without images", "warn")
def class_without_images(bench: Bench) -> None:
    bench.options |= {"classes": ("city", "flower", "temple"), "declared": True}


@plants("class imbalance", "note", 12, "too few images")
def imbalance(bench: Bench) -> list[int]:
    """Of the flowers one patient is left in each part of each site."""
    bench.records[:] = [r for p, r in enumerate(bench.records) if r.label == "city" or p % 15 in (0, 9, 12)]
    return list(range(60, 72))


@plants("too few images", "warn", 96)
def too_few(bench: Bench) -> None:
    bench.records[:] = [record for position, record in enumerate(bench.records) if position % 15 not in (0, 9, 12)]


@plants("unknown part", "stop", 2)
def unknown_part(bench: Bench) -> list[int]:
    return [bench.change(position, split="holdout") for position in (0, 15)]


@plants("patient in two parts", "stop", 2)
def leaking(bench: Bench) -> list[int]:
    return [0, bench.change(15, split="test"), 1, bench.change(16, split="validation")]


@plants("patient at two sites", "warn", 1, UNDIVIDED)
def two_sites(bench: Bench) -> list[int]:
    return [0, bench.change(15, site="clinic 1")]


@plants("no patients", "note", 120)
def no_patients(bench: Bench) -> None:
    bench.records[:] = [replace(record, patient="") for record in bench.records]


@plants("image without a patient", "warn", 3)
def some_without_patient(bench: Bench) -> list[int]:
    return [bench.change(position, patient="") for position in (2, 3, 4)]


@plants("image without a site", "warn", 2, UNDIVIDED)
def some_without_site(bench: Bench) -> list[int]:
    return [bench.change(position, site="") for position in (2, 17)]


@plants("image without a part", "warn", 2, UNDIVIDED)
def some_without_part(bench: Bench) -> list[int]:
    return [bench.change(position, split="") for position in (2, 17)]


@plants("few images at a site", "warn")
def small_site(bench: Bench) -> list[int]:
    places = [p for p in (*range(30), *range(60, 90)) if p % 15 < 4]
    return [bench.change(position, site="clinic 2") for position in places]


@plants("site with a single class", "warn", 1, "label follows site", UNDIVIDED)
def single_class(bench: Bench) -> list[int]:
    return [bench.change(position, site="clinic 2") for position in range(30) if position % 15 > 4]


@plants("class missing at a site", "warn", 1, "label follows site")
def class_missing(bench: Bench) -> None:
    for position in range(60):
        if bench.records[position].site == "clinic 0" and position % 2:
            bench.change(position, label="temple")
    for position in range(60, 120):
        if position % 2 and bench.records[position].site == "clinic 0":
            bench.change(position, label="temple")


@plants("class missing in a part", "warn")
def class_missing_in_a_part(bench: Bench) -> None:
    for position, record in enumerate(bench.records):
        if record.label == "flower" and record.split == "validation":
            bench.change(position, split="test")


@plants("label follows site", "warn", 2, UNDIVIDED)
def confounded(bench: Bench) -> None:
    for position in range(120):
        patient = position % 15
        bench.change(position, site=f"clinic {int((position < 60) == (patient < 12))}")
