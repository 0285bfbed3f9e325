"""One word written in two ways (accents, case), the finding about it, and how places are shortened."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.data.check import check_listing
from polyclinic.data.findings import Finding, format_places
from polyclinic.data.quality.cohort import cohort_findings
from polyclinic.data.quality.files import missing_file_findings
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.folder import read_folder
from polyclinic.data.sources.npz import read_npz
from polyclinic.data.sources.table import Columns, read_table
from tests.data.dicoms import dataset
from tests.data.written import pictures, refused, saved, table, touch

ONE, TWO = (unicodedata.normalize(form, "gutärtig") for form in ("NFC", "NFD"))
assert ONE != TWO


def by_table(folder: Path) -> Listing:
    text = f"path,{TWO},site,patient,split\n1.png,{ONE},{ONE},{ONE},{ONE}\n2.png,{TWO},{TWO},{TWO},{TWO}\n"
    return read_table(table(folder, text), name="t", columns=Columns(label=ONE), classes=(TWO,))


def by_folder(folder: Path) -> Listing:
    touch(folder, *(f"site {text}/split {text}/{text}/{text}/1.png" for text in (ONE, TWO)))
    return read_folder(folder, name="f", levels=("site", "split", "patient", "label"), classes=(TWO,))


def by_npz(folder: Path) -> Listing:
    said = np.array([ONE, TWO])
    arrays = {"images": pictures(2), "labels": np.arange(2), "site": said, "patient": said, "split": said}
    return read_npz(saved(folder, arrays), name="n", label_names=(TWO, "b"))


@pytest.mark.parametrize("read", [by_table, by_folder, by_npz])
def test_accents_have_one_form(tmp_path: Path, read: Callable[[Path], Listing]) -> None:
    listing = read(tmp_path)
    one, two = listing.records
    assert listing.classes[0] == one.label == ONE
    assert (one.site, one.patient, one.split) == (two.site, two.patient, two.split)
    assert all(unicodedata.is_normalized("NFC", text) for text in (one.site, one.split, two.label))


def missing(folder: Path, *names: str) -> Finding:
    records = tuple(Record(folder / name, "a", where=f"row {number}") for number, name in enumerate(names, 2))
    (found,) = missing_file_findings(Listing("m", folder, records, ("a",)), range(len(records)))
    return found


def test_a_missing_file_may_be_there_under_another_spelling(tmp_path: Path) -> None:
    touch(tmp_path, f"{TWO}/1.JPG", f"{TWO}/{TWO}.png", "Other/x.png")
    (tmp_path / "folder.png").mkdir()
    found = missing(
        tmp_path, f"{ONE}/1.jpg", f"{ONE}/{ONE}.png", "OTHER/X.png", "OTHER/y.png", "folder.png", "no/z.png"
    )
    assert found.count == 6
    assert found.sentence.endswith(
        "cannot be found, 3 of them differ from a file that is there only in case or accents"
    )
    assert "Other" not in found.sentence


def test_files_that_are_just_missing_are_not_said_to_be_misspelt(tmp_path: Path) -> None:
    touch(tmp_path, "a.png")
    assert missing(tmp_path, "b.png", "c/d.png", f"{'long' * 99}.png").sentence == "3 listed files cannot be found"


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (["labels.csv row 2", "labels.csv row 17"], "labels.csv row 2, 17"),
        (["labels.csv row 2 = 7", "labels.csv row 2 = 9 = …"], "labels.csv row 2 = 7, 2 = 9 = …"),
        (["Unterordner 0, file 2", "Unterordner 2, file 12"], "Unterordner 0, file 2, Unterordner 2, file 12"),
        (["Unterordner 0, file 2", "Unterordner 0, file 12"], "Unterordner 0, file 2, 12"),
        (["clinic 1 (3)", "clinic 1 (4)"], "clinic 1 (3), clinic 1 (4)"),
        (["grade two", "grade three"], "grade two, grade three"),
        (["row 2", "train_images row 3"], "row 2, train_images row 3"),
        (["a 2 = b 3", "a 2 = b 4"], "a 2 = b 3, a 2 = b 4"),
        (["7", "9"], "7, 9"),
        (["row 3"], "row 3"),
        ([], ""),
    ],
)
def test_places_share_what_they_begin_with_only_if_numbers_remain(places: list[str], words: str) -> None:
    assert format_places(places, len(places)) == words
    assert format_places(places, len(places) + 2) == f"{words} and 2 more"


@pytest.mark.parametrize("path", ["", "../x.png"])
def test_a_table_refused_for_its_paths_says_that_nothing_else_was_looked_at(tmp_path: Path, path: str) -> None:
    file = table(tmp_path, f"path,label\n1.png,\n{path},a\n")
    assert "Nothing else of the set was checked" in refused(lambda: read_table(file, name="t"))


def at(folder: Path, **sites: int) -> Listing:
    """Images at sites, in two classes."""
    column = [site.replace("_", " ") for site, count in sites.items() for _ in range(count)]
    records = [Record(folder / f"{n}.png", "ab"[n % 2], site, where=f"row {n}") for n, site in enumerate(column)]
    return Listing("s", folder, tuple(records), ("a", "b"))


def misspelt_sites(listing: Listing) -> list[Finding]:
    return [finding for finding in cohort_findings(listing) if finding.kind == "misspelt site"]


def test_sites_that_differ_in_spelling_only_are_told(tmp_path: Path) -> None:
    (found,) = misspelt_sites(at(tmp_path, Köln=40, koeln=30, KÖLN=20, Bonn=40, St_Gallen=30, Stgallen=3))
    assert (found.level, found.count, len(found.where)) == ("warn", 53, 5)
    for text in ("'koeln' (did you mean 'Köln'?)", "'KÖLN' (did you mean 'Köln'?)", "'Stgallen' (did"):
        assert text in found.sentence
    assert "Bonn" not in found.sentence


def test_sites_that_are_others_are_not_misspelt(tmp_path: Path) -> None:
    assert misspelt_sites(at(tmp_path, Hospital_North=100, Hospital_South=9, clinic_1=40, clinic_2=2)) == []


def test_a_rare_site_that_may_be_a_name_is_not_quoted(tmp_path: Path) -> None:
    (found,) = misspelt_sites(at(tmp_path, Bonn=40, Zebulon=4, zebulon=2))
    assert found.count == 2
    assert "ebulon" not in found.sentence


def test_the_parts_that_copies_lie_in_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 16, 16), dtype=np.uint8)
    images[4], images[5], images[9] = images[0], images[1], images[2]
    parts = np.array(["train"] * 4 + ["val"] * 4 + ["Zebulon"] * 4)
    file = saved(tmp_path, {"images": images, "labels": np.zeros(12, int), "split": parts})
    (found,) = [
        finding for finding in check_listing(read_npz(file, name="n")).findings if finding.kind == "duplicate image"
    ]
    assert "2 in train and validation, 1 in train and other parts" in found.sentence


def test_dicom_files_say_themselves_how_deep_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(4):
        dataset(rng.integers(0, 4096, (16, 16), dtype=np.uint16), 12).save_as(
            tmp_path / f"{number}.dcm", enforce_file_format=True
        )
        Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    names = [f"{number}.{suffix}" for number in range(4) for suffix in ("dcm", "png")]
    listing = Listing("d", tmp_path, tuple(Record(tmp_path / name, "a") for name in names), ("a",))
    assert "several bit depths" not in {finding.kind for finding in check_listing(listing).findings}
    Image.fromarray(rng.integers(0, 2**16, (16, 16), dtype=np.uint16)).save(tmp_path / "3.png")
    (found,) = [finding for finding in check_listing(listing).findings if finding.kind == "several bit depths"]
    assert found.sentence.endswith(": 3 with 8 bits, 1 with 16 bits")
