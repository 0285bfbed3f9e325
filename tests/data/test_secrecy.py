"""A patient's name, planted in file names, DICOM tags and cells of the table, appears in no file of a run, prepared
image, message on the wire, printed or logged line, error or traceback.

The names of classes and sites and the path of the dataset are no secret, since results mention them. A folder that is
declared as a class is one. A rare undeclared label is not: it may be a name in the wrong column.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pydicom
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import polyclinic
from polyclinic.cli.main import app
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import PolyclinicError
from polyclinic.core.jobs import Failure
from polyclinic.data.loading.cache import VARIABLE, cache_folder
from polyclinic.experiments.compare import compare
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.runs.assemble import round_options
from polyclinic.runs.experiment import Experiment, run
from polyclinic.storage.journal import FolderJournal
from polyclinic.storage.site_memory import DiskMemory
from tests.data.dicoms import dataset
from tests.federation.mock_engine import MockEngine

WORDS = ("Quetzalcoatl", "Testperson")
NAME = " ".join(WORDS)
SITES = ("north", "south", "west")
Rows: TypeAlias = list[dict[str, str]]
RECIPE: dict[str, Any] = {
    "name": "secret",
    "rounds": 2,
    "data": {
        "name": "table",
        "path": "hospital/labels.csv",
        "size": 32,
        "channels": 1,
        "split": {"train": 0.6, "validation": 0.2, "test": 0.2},
    },
    "model": "cnn_a",
    "algorithm": "scaffold",
    "training": {"batch": 8, "optimiser": {"lr": 0.01}},
    "evaluate": {"bootstrap": 20},
}


def hits(data: bytes) -> int:
    """How often either half of the name is there, in any case, in UTF-8 or UTF-16."""
    lowered = data.lower()
    codings = ("utf-8", "utf-16-le", "utf-16-be")
    return sum(lowered.count(word.lower().encode(coding)) for word in WORDS for coding in codings)


def told_in(folder: Path) -> int:
    """Hits in every byte and every name of all that lies there, hidden files among it."""
    paths = list(folder.rglob("*"))
    assert paths, f"nothing was written to {folder}"
    contents = [path.read_bytes() for path in paths if path.is_file()]
    return sum(map(hits, contents)) + sum(hits(os.fsencode(path.relative_to(folder))) for path in paths)


def tags(number: int) -> dict[str, Any]:
    """Return all tags by which a file may name its patient or the staff."""
    return {
        "PatientName": f"{WORDS[1]}^{WORDS[0]}",
        "PatientID": f"{NAME} {number}",
        "AccessionNumber": WORDS[1],
        "InstitutionName": f"{NAME} Memorial",
        "ReferringPhysicianName": f"{WORDS[1].upper()}^{WORDS[0].upper()}",
        "OtherPatientNames": NAME,
        "PatientComments": NAME,
        "StudyDescription": NAME,
        "SeriesDescription": NAME,
        "ImageComments": NAME,
        "StudyID": WORDS[0],
    }


def picture(number: int, benign: bool) -> pydicom.FileDataset:
    rng = np.random.default_rng(number)
    stored = rng.integers(0, 2000 if benign else 4000, (24, 24), dtype=np.uint16)
    made = dataset(stored, 12, **tags(number))
    block = made.private_block(0x1001, f"{WORDS[1]} Systems", create=True)
    block.add_new(1, "LO", NAME)
    return made


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Three sites of 12 patients with a DICOM file each, or two, in folders with their names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
    home, made = tmp_path / "hospital", []
    for number in range(48):
        patient, site = number // 4 * 3 + min(number % 4, 2), SITES[number // 16]
        path = home / f"{NAME} {patient}" / f"{WORDS[1].lower()}_{WORDS[0]}-{number}.dcm"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, patient % 2 == 0).save_as(path, enforce_file_format=True)
        label = "malignant" if patient % 2 else "benign"
        cells = {"path": str(path.relative_to(home)), "label": label, "site": site, "patient": f"{NAME} {patient}"}
        made.append({**cells, "doctor": NAME.upper(), "note": NAME})
    write_table(made)
    return made


def write_table(rows: Rows) -> None:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    Path("hospital/labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def recipe(**settings: Any) -> Recipe:
    return Recipe.from_values(RECIPE, {key.replace("__", "."): value for key, value in settings.items()})


def test_the_search_finds_what_is_there(rows: Rows, tmp_path: Path) -> None:
    assert told_in(tmp_path / "hospital") > 48 * 20
    assert all(hits(f"xx{NAME.upper()}yy".encode(coding)) for coding in ("utf-16", "utf-16-le", "utf-16-be"))
    assert hits(f"a{WORDS[0].lower()}b".encode()) == 1
    assert hits(b"Quetzal Person") == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_tells_nobody(
    rows: Rows, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    caplog.set_level(logging.DEBUG)
    result = run(recipe(engine__workers=workers), tmp_path / "run")
    assert sorted(result.summary.sites) == list(SITES)
    assert len(list((tmp_path / "run" / "sites").rglob("*.pcl"))) >= 3, "no site remembered anything"
    assert list(cache_folder().glob("*/pixels"))
    assert told_in(tmp_path / "run") == 0
    assert told_in(tmp_path / "cache") == 0
    said = capfd.readouterr()
    assert hits((said.out + said.err + caplog.text + str(result)).encode()) == 0


def test_the_wire_carries_no_name(rows: Rows, tmp_path: Path) -> None:
    made = Experiment(recipe())
    memory = DiskMemory(tmp_path / "sites")
    runners = {
        n: SiteRunner(n, site, made.setup.algorithm, made.setup.networks.first, memory)
        for n, site in made.setup.sites.items()
    }
    crossed: list[bytes] = []

    def answer(site: str, message: bytes) -> bytes | Failure:
        crossed.extend([message, runners[site].answer(message)])
        return crossed[-1]

    journal = FolderJournal(tmp_path / "journal")
    rounds = Rounds(
        made.setup.federation, made.setup.algorithm, MockEngine(answer), round_options(recipe(), made.run_id()), journal
    )
    rounds.collect_predictions(rounds.play_all(), ["train", "validation", "test"])
    assert len(crossed) == 2 * 3 * 3, "three sites, two rounds and the predictions, there and back"
    assert all(any(site.encode() in message for site in SITES) for message in crossed)
    assert hits(b"".join(crossed)) == 0
    assert told_in(tmp_path / "journal") + told_in(tmp_path / "sites") == 0


def test_a_comparison_and_its_report_tell_nobody(rows: Rows, tmp_path: Path) -> None:
    methods = {"FedAvg": {"algorithm": "fedavg"}, "Alone": {"algorithm": "single"}, "All": {"algorithm": "centralised"}}
    compare([recipe(methods=methods, rounds=1)], 1, tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.md", "comparison.json"} <= written
    assert "north" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert told_in(tmp_path / "out") == 0


def test_the_command_line_tells_nobody(rows: Rows, tmp_path: Path) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    command = [sys.executable, "-m", "polyclinic", "run", "recipe.yaml", "--out", "run"]
    source = str(Path(polyclinic.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "always"}
    ended = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"north" in ended.stdout
    assert hits(ended.stdout + ended.stderr) == 0
    assert told_in(tmp_path / "run") + told_in(tmp_path / "cache") == 0


def spoilt(rows: Rows, *numbers: int) -> Iterator[Path]:
    return (Path("hospital") / rows[number]["path"] for number in numbers)


def no_file(rows: Rows) -> None:
    for path in spoilt(rows, 3, 30):
        path.unlink()


def folder_for_a_file(rows: Rows) -> None:
    for path in spoilt(rows, 3):
        path.unlink()
        path.mkdir()


def cut_dicom(rows: Rows) -> None:
    for number, path in enumerate(spoilt(rows, 3, 10, 30)):
        path.write_bytes(path.read_bytes()[: (-200, 500, 140)[number]])


def name_for_a_number(rows: Rows) -> None:
    """Plant the name in tags that should hold a number or a character set."""
    for path, tag in zip(spoilt(rows, 3, 10), (b"\x28\0\x50\x10DS", b"\x08\0\x05\0CS"), strict=True):
        data = path.read_bytes()
        at = data.index(b"\x08\0\x50\0SH")  # the accession number; tags are in order, as decoders need not check
        value = NAME.ljust(24).encode()
        path.write_bytes(data[:at] + tag + len(value).to_bytes(2, "little") + value + data[at:])


def no_dicom(rows: Rows) -> None:
    for path in spoilt(rows, 3):
        path.write_text(NAME)


def label_once(rows: Rows) -> None:
    rows[5]["label"] = NAME


def label_of_a_patient(rows: Rows) -> None:
    for row in rows[4:6]:
        row["label"] = NAME


def label_beside_the_class(rows: Rows) -> None:
    rows[5]["label"] = f"benign {WORDS[1]}"


def too_long(rows: Rows) -> None:
    rows[5]["path"] = f"{NAME * 20}.dcm"


def out_of_the_folder(rows: Rows) -> None:
    rows[5]["path"] = f"../{NAME}.dcm"


def comma_in_the_name(rows: Rows) -> None:
    rows[5]["patient"] = f"{WORDS[1]}, {WORDS[0]}"


def open_quote(rows: Rows) -> None:
    rows[5]["doctor"] = f'"{NAME}'


def unknown_part(rows: Rows) -> None:
    for row in rows:
        row["split"] = NAME


def patient_at_two_sites(rows: Rows) -> None:
    rows[2]["site"] = "south"


def site_of_a_patient(rows: Rows) -> None:
    for row in rows[6:8]:
        row["site"] = f"{WORDS[1]}; {WORDS[0]}"


def no_header(rows: Rows) -> None:
    rows.insert(0, {value if value not in SITES else f"{key} of {value}": "" for key, value in rows[0].items()})


def no_label_column(rows: Rows) -> None:
    for row in rows:
        row["diagnosis"] = row.pop("label")


FAILURES: list[tuple[Callable[[Rows], None], str]] = [
    (no_file, "2 listed files cannot be found"),
    (folder_for_a_file, "1 listed file cannot be found"),
    (cut_dicom, "3 files cannot be read"),
    (name_for_a_number, "cannot be read: the DICOM file is damaged"),
    (no_dicom, "1 file cannot be read: it is not a DICOM file"),
    (label_once, "1 class has a single image"),
    (label_of_a_patient, "1 class has fewer than 3 patients"),
    (label_beside_the_class, "1 class has a single image"),
    (too_long, "1 listed file cannot be found"),
    (out_of_the_folder, "row(s) with a path that leaves its folder"),
    (comma_in_the_name, "row(s) with more or fewer cells"),
    (open_quote, "cannot be read as a table"),
    (unknown_part, "The official split names 1 part(s) other than train, validation and test"),
    (patient_at_two_sites, "1 patients have images at more than one natural site"),
    (site_of_a_patient, "Site 1 of 4, with 2 images, has no images left for its "),
    (no_header, "cells of its first row do not look like a header"),
    (no_label_column, "has no column 'label'"),
]


@pytest.mark.parametrize(("spoil", "words"), FAILURES)
def test_no_error_tells_the_name(
    spoil: Callable[[Rows], None], words: str, rows: Rows, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(rows)
    write_table(rows)
    with pytest.raises(PolyclinicError) as caught:
        run(recipe(), tmp_path / "run")
    assert words in str(caught.value)
    printed = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    said = capfd.readouterr()
    assert hits((printed + said.out + said.err).encode()) == 0
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    ended = CliRunner().invoke(app, ["run", "recipe.yaml", "--out", "run"])
    assert ended.exit_code == 1
    assert hits(ended.output.encode()) == 0
    if cache_folder().exists():
        assert told_in(tmp_path / "cache") == 0


def test_a_task_tells_no_label_that_may_be_a_name(rows: Rows, tmp_path: Path) -> None:
    label_once(rows)
    write_table(rows)
    with pytest.raises(PolyclinicError, match="names the label 'cancer'") as caught:
        run(recipe(data__task={"a": ["benign"], "b": ["cancer"]}), tmp_path / "run")
    assert hits("".join(traceback.format_exception(caught.value)).encode()) == 0
    run(recipe(data__task={"a": ["benign"], "b": ["malignant"]}, rounds=1), tmp_path / "run")
    assert told_in(tmp_path / "run") == 0


def test_folders_of_patients_are_not_told(rows: Rows, tmp_path: Path) -> None:
    data = {**RECIPE["data"], "name": "folder", "path": "set", "levels": ["site", "label", "patient"]}
    for number, row in enumerate(rows):
        path = tmp_path / "set" / row["site"] / row["label"] / row["patient"] / f"{NAME}{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 20), dtype=np.uint8)).save(path)
    found = Recipe.from_values({**RECIPE, "data": data})
    run(found, tmp_path / "run")
    assert told_in(tmp_path / "run") + told_in(tmp_path / "cache") == 0
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PolyclinicError, match=r"1 file cannot be read: the PNG is truncated \(1\) \(west/") as caught:
        run(found, tmp_path / "again")
    assert hits("".join(traceback.format_exception(caught.value)).encode()) == 0


def test_folders_of_patients_taken_for_classes_are_not_told(rows: Rows, tmp_path: Path) -> None:
    for number, row in enumerate(rows):
        path = tmp_path / "set" / row["patient"] / row["label"] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image")
    checked = CliRunner().invoke(app, ["data", "check", "set", "--out", "check.json"])
    assert checked.exit_code == 1
    assert "folder 1/benign, file 1" in Path("check.json").read_text(encoding="utf-8")
    assert hits(checked.output.encode() + Path("check.json").read_bytes()) == 0
    (tmp_path / "set" / f"{NAME} alone").mkdir()
    refused = CliRunner().invoke(app, ["data", "check", "set"])
    assert "1 site folder(s) without an image" in " ".join(refused.output.split())
    assert hits(refused.output.encode()) == 0


def test_check_and_diagnose_tell_nobody(rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "hospital" / f"{NAME} 0" / f"unlisted {NAME}.png").write_bytes(b"")
    good = CliRunner().invoke(app, ["data", "diagnose", "hospital", "--size", "32", "--channels", "1"])
    assert good.exit_code == 0, good.output
    assert told_in(tmp_path / "diagnosis") + hits(good.output.encode()) == 0
    site_of_a_patient(rows)
    write_table(rows)
    numbered = CliRunner().invoke(app, ["data", "diagnose", "hospital", "--size", "32", "--channels", "1"])
    assert numbered.exit_code == 0, numbered.output
    assert "site 1 (2 images)" in (tmp_path / "diagnosis" / "diagnosis.json").read_text(encoding="utf-8")
    assert told_in(tmp_path / "diagnosis") + hits(numbered.output.encode()) == 0
    cut_dicom(rows)
    label_of_a_patient(rows)
    rows[20]["site"] = NAME
    write_table(rows)
    checked = CliRunner().invoke(app, ["data", "check", "hospital", "--out", "check.json"])
    assert checked.exit_code == 1
    assert len(json.loads(Path("check.json").read_text())["findings"]) > 4
    assert hits(checked.output.encode() + Path("check.json").read_bytes()) == 0
    assert hits(CliRunner().invoke(app, ["data", "check", "hospital", "--show-names"]).output.encode()) > 0
