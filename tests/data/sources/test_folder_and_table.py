from __future__ import annotations

import csv
import io
import os
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from polyclinic.core.errors import RecipeError
from polyclinic.data.listings import open_source
from polyclinic.data.sources.folder import Level, is_image, parse_part, read_folder
from polyclinic.data.sources.table import Columns, read_table
from tests.data.written import NAME, counts, pictures, real, refused, saved, table, touch

FIELDS = ("path", "label", "site", "patient", "split")
words = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=8)
names = words.map(str.strip).filter(lambda text: text.strip("./\\") and text.isprintable())


def one_form(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


@given(
    rows=st.lists(st.tuples(names, words, words, words), min_size=1, max_size=8),
    delimiter=st.sampled_from(",;\t"),
    bom=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_what_a_csv_writer_writes_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str, str]], delimiter: str, bom: bool, end: str
) -> None:
    rows = [row for row in rows if all(text.strip().isprintable() for text in row)]
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    writer.writerow(FIELDS[:4])
    writer.writerows((f"a/{path}", *rest) for path, *rest in rows)
    file = table(tmp_path_factory.mktemp("table"), ("\ufeff" if bom else "") + text.getvalue())
    if not rows:
        assert "no rows" in refused(lambda: read_table(file, name="t"))
        return
    records = read_table(file, name="t").records
    assert [(r.label, r.site) for r in records] == [(one_form(label), one_form(site)) for _, label, site, _ in rows]
    same = [[one_form(a[3]) == one_form(b[3]) for a in rows] for b in rows]
    assert [[a.patient == b.patient for a in records] for b in records] == same


def test_every_field_of_a_row_reaches_its_record(tmp_path: Path) -> None:
    text = 'split,note,path,patient,label,site\nTraining,"a, b",images\\x\\1.png,P7, benign ,Lyon\nval,,2.png,,,\n'
    first, second = read_table(table(tmp_path, text), name="t").records
    assert first.path == tmp_path / "images" / "x" / "1.png"
    assert (first.label, first.site, first.patient, first.split) == ("benign", "Lyon", "patient-1", "train")
    assert (second.label, second.site, second.patient, second.split) == ("", "", "", "validation")


def test_rows_are_numbered_as_a_spreadsheet_shows_them(tmp_path: Path) -> None:
    text = 'path,label,note\n1.png,a,"two\nlines"\n\n2.png,b,\n'
    records = read_table(table(tmp_path, text, "cases.csv"), name="t").records
    assert [record.where for record in records] == ["cases.csv row 2", "cases.csv row 4"]


@pytest.mark.parametrize(
    ("text", "part"),
    [("TRAINING", "train"), ("val", "validation"), ("Valid", "validation"), ("testing", "test"), ("fold 3", "fold 3")],
)
def test_parts_have_one_name(text: str, part: str) -> None:
    assert parse_part(text) == part


def test_classes_are_collected_or_declared(tmp_path: Path) -> None:
    file = table(tmp_path, "path,label\n1.png,10\n2.png,9\n3.png,\n")
    collected, declared = read_table(file, name="t"), read_table(file, name="t", classes=("9", "10", "11"))
    assert (collected.classes, collected.declared) == (("9", "10"), False)
    assert (declared.classes, declared.declared) == (("9", "10", "11"), True)
    assert len(declared.records) == 3


def test_columns_may_have_other_names_or_be_left_out(tmp_path: Path) -> None:
    file = table(tmp_path, "file,class,site,patient_pair\n1.png,a,Lyon,p1\n2.png,a,Lyon,p1\n")
    records = read_table(
        file, name="t", columns=Columns(path="file", label="class", site=None, patient="patient_pair")
    ).records
    assert [(r.label, r.site, r.patient) for r in records] == [("a", "", "patient-1")] * 2


def test_unknown_column_options_are_refused() -> None:
    with pytest.raises(RecipeError, match="no option 'paths'"):
        Columns.model_validate({"paths": "x"})


def test_a_header_is_sniffed_where_another_delimiter_is_more_frequent(tmp_path: Path) -> None:
    file = table(tmp_path, 'path,label,"a;b;c;d;e"\n1.png,x,"1;2"\n')
    assert [record.label for record in read_table(file, name="t").records] == ["x"]


def test_paths_start_at_the_root_that_is_given(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    file = table(tmp_path / "tables", "path,label\na/../b/1.png,x\n/else/2.png,x\n")
    listing = read_table(file, name="t", root=tmp_path / "pictures")
    assert listing.root == tmp_path / "pictures"
    assert [record.path for record in listing.records] == [tmp_path / "pictures/b/1.png", Path("/else/2.png")]


def test_the_same_file_in_two_rows_is_kept(tmp_path: Path) -> None:
    assert len(read_table(table(tmp_path, "path,label\n1.png,a\n1.png,b\n"), name="t").records) == 2


def test_images_beside_listed_ones_are_unlisted(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "a/2.PNG", "a/notes.txt", "a/.3.png", "b/4.png", "5.png")
    listing = read_table(table(tmp_path, "path,label\n./a\\1.png,x\nmissing/6.png,x\n"), name="t")
    assert listing.unlisted == (tmp_path / "a" / "2.PNG",)


TABLE_FAULTS: dict[str, tuple[str | bytes, list[str]]] = {
    "empty file": ("", ["first line is empty"]),
    "no rows": ("path,label\n\n", ["no rows"]),
    "no label column": ("path,class,site\n1.png,a,b\n", ["no column 'label'", "the 3 cells of its first row"]),
    "column twice": ("path,label,site,site\n1.png,a,b,c\n", ["more than one column called site"]),
    "short and long rows": ("path,label\n1.png\n2.png,a\n3.png,a,b\n", ["2 row(s)", "(row 2, 4)", "cells"]),
    "seven empty paths": ("path,label\n" + " ,a\n" * 7, ["7 row(s)", "row 2, 3, 4, 5, 6 and 2 more"]),
    "the root itself": ("path,label\na/..,x\n", ["1 row(s) without a path"]),
    "out by ..": ("path,label\n../1.png,a\n", ["1 row(s)", "leaves its folder", "row 2"]),
    "out by \\..": ("path,label\na\\..\\..\\1.png,a\n", ["leaves its folder"]),
    "two faults": ("path,label\n,a\n../1.png,a\n", ["without a path (row 2)", "'..' (row 3)"]),
    "NUL byte": ("path,label\n1.png,a\n2\0.png,a\n", ["NUL byte in line 3"]),
    "Latin-1": ("path,label\n1.png,b\u00e9nin\n".encode("latin-1"), ["not UTF-8"]),
    "UTF-16": ("path,label\n1.png,a\n".encode("utf-16"), ["not UTF-8"]),
    "open quote": ('path,label\n"1.png,a\n2.png,b\n', ["quote that is not closed"]),
    "endless cell": ("path,label\n1.png," + "a" * 200_000 + "\n", ["cannot be read as a table near line 2"]),
    "escape codes": ("path,label\n1.png,\x1b[31mred\n", ["1 row(s)", "cannot be printed"]),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_faults_of_a_table_are_told_in_a_sentence(tmp_path: Path, fault: str) -> None:
    text, expected = TABLE_FAULTS[fault]
    file = table(tmp_path, text)
    sentence = refused(lambda: read_table(file, name="t"))
    assert str(file) in sentence
    assert [part for part in expected if part not in sentence] == []


@pytest.mark.parametrize("field", ["site", "patient", "split"])
def test_an_optional_column_named_by_hand_must_be_there(tmp_path: Path, field: str) -> None:
    file = table(tmp_path, "path,label\n1.png,a\n")
    assert len(read_table(file, name="t").records) == 1
    sentence = refused(lambda: read_table(file, name="t", columns=Columns.model_validate({field: field})))
    assert f"no column '{field}'" in sentence
    assert "path, label" in sentence


@pytest.mark.parametrize("name", ["missing.csv", "."])
def test_a_table_that_cannot_be_opened_is_told(tmp_path: Path, name: str) -> None:
    assert "cannot be read" in refused(lambda: read_table(tmp_path / name, name="t"))


def test_long_tables_are_listed_fast(tmp_path: Path) -> None:
    lines = (f"images/{row % 10}/{row}.png,{row % 3},{row % 5},p{row // 4},train\n" for row in range(100_000))
    file = table(tmp_path, ",".join(FIELDS) + "\n" + "".join(lines))
    start = time.process_time()
    listing = read_table(file, name="t")
    assert time.process_time() - start < 5  # a million rows would be ten times this
    assert len({record.patient for record in listing.records}) == 25_000


# Folders


def test_levels_say_what_folders_mean(tmp_path: Path) -> None:
    touch(tmp_path, "Lyon/raw/p1/Training/benign/b.png", "Lyon/raw/p1/Training/benign/a.JPG")
    touch(tmp_path, "Lyon/raw/p2/Training/benign/c.png", "Turin/raw/p1/test/normal/d.dcm")
    listing = read_folder(tmp_path, name="f", levels=("site", "skip", "patient", "split", "label"))
    assert [(r.path.name, r.site, r.patient, r.split, r.label, r.where) for r in listing.records] == [
        ("a.JPG", "Lyon", "patient-1", "train", "benign", "Lyon/Training/benign, file 1"),
        ("b.png", "Lyon", "patient-1", "train", "benign", "Lyon/Training/benign, file 2"),
        ("c.png", "Lyon", "patient-2", "train", "benign", "Lyon/Training/benign, file 3"),
        ("d.dcm", "Turin", "patient-1", "test", "normal", "Turin/test/normal, file 1"),
    ]
    assert listing.classes == ("benign", "normal")


@pytest.mark.parametrize(
    ("name", "content", "image"),
    [
        (f"x.{suffix}", b"", True)
        for suffix in ("png", "JPG", "jpeg", "bmp", "tif", "TIFF", "webp", "pgm", "dcm", "dicom")
    ]
    + [("IM0001", bytes(128) + b"DICM", True), ("1.2.840.10008", bytes(128) + b"DICM", True)]
    + [("IM0001", bytes(132), False), ("README", b"DICM", False), ("x.gif", b"", False), ("x.csv", b"", False)]
    + [(".x.png", b"", False), ("DICOMDIR", bytes(128) + b"DICM", False), ("x.txt", bytes(128) + b"DICM", False)],
)
def test_images_are_told_by_suffix_or_dicom_mark(tmp_path: Path, name: str, content: bytes, image: bool) -> None:
    (tmp_path / name).write_bytes(content)
    assert is_image(tmp_path / name) is image


def test_every_image_is_either_listed_or_unlisted(tmp_path: Path) -> None:
    listed = ["a/1.png", "a/2.png", "b/1.png"]
    unlisted = ["top.png", "a/deeper/3.png", "b/deeper/still/4.png"]
    touch(tmp_path, *listed, *unlisted, ".hidden/5.png", "__MACOSX/6.png", "a/._1.png", "a/list.txt")
    listing = read_folder(tmp_path, name="f")
    assert [record.path for record in listing.records] == [tmp_path / name for name in listed]
    assert listing.unlisted == tuple(tmp_path / name for name in unlisted)


def test_a_pattern_leaves_masks_out(tmp_path: Path) -> None:
    touch(tmp_path, "benign/benign (1).png", "benign/benign (1)_mask.png", "benign/Benign (2).PNG")
    listing = read_folder(tmp_path, name="f", pattern="*).png")
    assert {record.path.name for record in listing.records} == {"benign (1).png", "Benign (2).PNG"}
    assert listing.unlisted == ()


def test_links_are_listed_even_when_they_dangle_and_never_followed_for_ever(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png")
    (tmp_path / "a" / "2.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "a" / "round").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "a" / "3.png")
    os.mkfifo(tmp_path / "a" / "IM0004")
    listing = read_folder(tmp_path, name="f")
    assert [record.path.name for record in listing.records] == ["1.png", "2.png"]


FOLDER_FAULTS: dict[str, tuple[list[str], tuple[Level, ...], str]] = {
    "no image": (["a/1.txt"], ("label",), "holds no image as <label>/<file>"),
    "too deep": (["a/b/1.png"], ("label",), "holds no image as <label>/<file>"),
    "empty classes": (
        [f"c{number}/x.txt" for number in range(7)] + ["a/1.png"],
        ("label",),
        "7 label folder(s) without an image (counted by name: folder 2, 3, 4, 5, 6 and 2 more)",
    ),
    "empty site": (
        ["Lyon/a/1.png", "Turin/x.txt"],
        ("site", "label"),
        "1 site folder(s) without an image (counted by name: folder 2)",
    ),
    "level twice": (["a/b/1.png"], ("label", "label"), "name one level twice"),
    "not UTF-8": ([os.fsdecode(b"b\xe9nin/1.png")], ("label",), "1 label folder(s) whose name is not printable"),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_faults_of_a_folder_are_told_in_a_sentence(tmp_path: Path, fault: str) -> None:
    files, levels, expected = FOLDER_FAULTS[fault]
    touch(tmp_path, *files)
    assert expected in refused(lambda: read_folder(tmp_path, name="f", levels=levels))


def test_a_site_may_lack_a_class(tmp_path: Path) -> None:
    touch(tmp_path, "Lyon/a/1.png", "Lyon/b/1.png", "Turin/a/1.png", "Turin/b/x.txt")
    assert len(read_folder(tmp_path, name="f", levels=("site", "label")).records) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", f"a/{NAME}/1.png")
    (tmp_path / "a" / NAME).chmod(0)
    sentence = refused(lambda: read_folder(tmp_path, name="f", levels=("label", "patient")))
    (tmp_path / "a" / NAME).chmod(0o700)
    assert "cannot be read" in sentence
    assert NAME not in sentence


# What a path means


@pytest.mark.parametrize(
    ("files", "levels"),
    [
        (["a/1.png", "b/1.png"], "label"),
        (["a/1.png", "b/1.png", "b/c/2.png"], "label"),
        (["Train/a/1.png", "valid/a/1.png", "TEST/b/1.png"], "split/label"),
        (["Lyon/a/1.png", "Turin/b/1.png"], "site/label"),
        (["train/a/1.png", "Lyon/b/1.png"], "site/label"),
    ],
)
def test_folder_levels_are_guessed_and_told(tmp_path: Path, files: list[str], levels: str) -> None:
    touch(tmp_path, *files)
    listing = open_source(tmp_path)
    assert listing.name == f"folder {tmp_path} read as {levels}"
    assert bool(listing.records[0].split) == levels.startswith("split")
    assert bool(listing.records[0].site) == levels.startswith("site")


def test_files_and_folders_with_a_table_are_opened(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "b/1.png")
    file = table(tmp_path, "path,label\na/1.png,x\n")
    saved(tmp_path, {"images": pictures(3), "labels": np.arange(3)})
    for path, images in ((tmp_path, 1), (file, 1), (tmp_path / "set.npz", 3)):
        assert len(open_source(path).records) == images


@pytest.mark.parametrize(
    ("files", "path", "expected"),
    [
        ([], "missing", "does not exist"),
        ([], "missing.csv", "does not exist"),
        ([], ".", "is an empty folder"),
        (["1.png", "2.png"], ".", "holds files but no class folders"),
        (["a/b/c/1.png"], ".", "no images one or two levels down"),
        (["notes.txt"], "notes.txt", "neither a folder nor a CSV or npz file"),
        (["a/1.png", "docs/x.txt"], ".", "1 label folder(s) without an image (counted by name: folder 2)"),
    ],
)
def test_a_path_without_images_is_refused(tmp_path: Path, files: list[str], path: str, expected: str) -> None:
    touch(tmp_path, *files)
    sentence = refused(lambda: open_source(tmp_path / path))
    assert expected in sentence
    assert str(tmp_path / path) in sentence


# Real sets; the figures are those of the data folder's README

TABLES: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "busi": (780, {"benign": 437, "malignant": 210, "normal": 133}, {}),
    "mias": (322, {"normal": 207, "benign": 63, "malignant": 52}, {}),
    "ddsm_views": (2225, {}, {"MGH": 1822, "WFU": 312, "ISMD": 91}),
    "deepdrid": (2243, {"0": 980, "1": 294, "2": 465, "3": 382, "4": 116, "5": 6}, {"Nicheng": 1497, "Nation": 56}),
    "covid_cxr": (1426, {"pneumonia": 661, "normal": 511, "covid": 243, "tuberculosis": 11}, {}),
    "office_caltech10": (2533, {}, {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295}),
    "breakhis_sample": (12, {"benign": 8, "malignant": 4}, {}),
}


@pytest.mark.parametrize("name", TABLES)
def test_real_tables_have_the_published_counts(name: str) -> None:
    images, labels, sites = TABLES[name]
    columns = Columns(patient="patient_pair") if name == "mias" else Columns()
    listing = read_table(real(name) / "labels.csv", name=name, columns=columns)
    assert len(listing.records) == images
    assert labels in ({}, counts(record.label for record in listing.records))
    found = {site: sum(site in record.site for record in listing.records) for site in sites}
    assert found == sites
    assert all(record.path.is_file() for record in listing.records)
    assert len(open_source(real(name)).records) == images


def test_mias_pairs_are_patients() -> None:
    listing = read_table(real("mias") / "labels.csv", name="mias", columns=Columns(patient="patient_pair"))
    assert set(counts(record.patient for record in listing.records).values()) == {2}


@pytest.mark.parametrize(("name", "levels"), [("busi", "label"), ("office_caltech10", "site/label")])
def test_real_folders_say_what_their_tables_say(name: str, levels: str) -> None:
    folder = real(f"{name}/images")
    by_folder, by_table = open_source(folder), open_source(folder.parent)
    assert by_folder.name.endswith(f"read as {levels}")
    said = {record.path: (record.label, levels == "label" or record.site) for record in by_folder.records}
    assert said == {record.path: (record.label, levels == "label" or record.site) for record in by_table.records}
    assert by_folder.unlisted == by_table.unlisted == ()
