"""`polyclinic data check` and a run agree: what the one lets pass the other trains on, and the other way round."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from click.testing import Result
from PIL import Image

from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import DataError
from polyclinic.data.loading.cache import VARIABLE as CACHE
from polyclinic.runs.experiment import load_sites
from tests import commands
from tests.data import planted
from tests.small import write_recipe

Rows: TypeAlias = list[list[str]]
COLUMNS = ["path", "label", "site", "patient", "split"]


@pytest.fixture(scope="session")
def crops() -> dict[str, list[planted.Bytes]]:
    return planted.cut_crops()


@pytest.fixture
def rows(crops: dict[str, list[planted.Bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """A clean set: 120 pictures of two sites in the folder `images`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    Path("images").mkdir()
    records = planted.save_records(crops, Path("images"))
    return [[record.path.name, record.label, record.site, record.patient, record.split] for record in records]


def written(rows: Rows, columns: list[str] = COLUMNS) -> None:
    with open("images/labels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


def recipe(**data: Any) -> dict[str, Any]:
    wanted = {"name": "table", "path": "images/labels.csv", "size": 16, "channels": 1, **data}
    return {"name": "trial", "rounds": 1, "data": wanted, "model": "linear", "algorithm": "fedavg"}


call = partial(commands.call, "data", "check")


def flat(text: str) -> str:
    return " ".join(text.split())


def check_and_run(**data: Any) -> tuple[Result, bool]:
    """What check says of a recipe, and whether a run would start."""
    write_recipe(Path(), recipe(**data), "trial.yaml")
    result = call("trial.yaml")
    try:
        load_sites(Recipe.load("trial.yaml"))
    except DataError:
        return result, False
    return result, True


def blank(rows: Rows) -> None:
    Image.new("L", (40, 30), 90).save(f"images/{rows[4][0]}")


def copied_to_another_class(rows: Rows) -> None:
    Path("images", rows[75][0]).write_bytes(Path("images", rows[3][0]).read_bytes())


def listed_twice(rows: Rows) -> None:
    rows.append([rows[7][0], "flower", *rows[7][2:]])


def one_class(rows: Rows) -> None:
    del rows[60:]


def few_patients(rows: Rows) -> None:
    for position in (60, 75):
        rows[position][1] = "temple"


def patient_at_two_sites(rows: Rows) -> None:
    rows[15][2] = "clinic 1"


def site_of_one_class(rows: Rows) -> None:
    for position in range(30):
        rows[position][2] = "clinic 2"


def no_site(rows: Rows) -> None:
    rows[2][2] = rows[17][2] = ""


def no_part(rows: Rows) -> None:
    rows[2][4] = rows[17][4] = ""


def nothing(rows: Rows) -> None:
    """A clean set."""


STOPS = [blank, copied_to_another_class, listed_twice, one_class, few_patients]
IID: dict[str, Any] = {"partition": {"by": "iid", "sites": 2}}
DIVISIONS: dict[Callable[[Rows], None], dict[str, Any]] = {
    patient_at_two_sites: IID,
    site_of_one_class: {"allow_single_class": True},
    no_site: IID,
    no_part: {"split": {"official": False}},
}
"""Faults that only a recipe with the usual settings cannot take, and settings that can."""


@pytest.mark.parametrize("fault", [nothing, *STOPS, *DIVISIONS])
def test_a_recipe_with_the_usual_settings_runs_if_check_lets_it(fault: Callable[[Rows], None], rows: Rows) -> None:
    fault(rows)
    written(rows)
    result, runs = check_and_run()
    assert result.exit_code == (0 if runs else 1), result.output
    assert runs == (fault is nothing)


@pytest.mark.parametrize("fault", STOPS)
def test_what_no_recipe_can_take_stops_without_one(fault: Callable[[Rows], None], rows: Rows) -> None:
    fault(rows)
    written(rows)
    result = call("images")
    assert result.exit_code == 1
    assert "training must NOT start: 1 to fix first" in result.stdout
    assert not check_and_run(**IID)[1]


@pytest.mark.parametrize("fault", DIVISIONS)
def test_a_fault_that_another_division_tolerates_is_reported_and_does_not_stop(
    fault: Callable[[Rows], None], rows: Rows
) -> None:
    fault(rows)
    written(rows)
    result = call("images")
    assert result.exit_code == 0
    assert "warn  cannot be divided as it is: 1\n" in result.stdout
    assert "training may start, but not with its own sites and parts: 0 to fix first" in flat(result.stdout)
    result, runs = check_and_run(**DIVISIONS[fault])
    assert (result.exit_code, runs) == (0, True), result.output
    assert result.stdout.splitlines()[-1].startswith("training may start: 0 to fix first")


def test_a_recipe_is_checked_with_its_columns_and_its_task(rows: Rows) -> None:
    for position in range(10):
        rows[position][1] = "blurred"
    Path("images", rows[0][0]).unlink()  # not part of the task, so that nobody misses it
    written(rows, ["datei", "diagnose", "klinik", "person", "teil"])
    columns = dict(zip(COLUMNS, ["datei", "diagnose", "klinik", "person", "teil"], strict=True))
    task = {"city": ["city"], "flower": ["flower"]}
    assert "has no column 'path'" in call("images").stderr
    result, runs = check_and_run(columns=columns, task=task)
    assert (result.exit_code, runs) == (0, True), result.output
    assert "classes: city 50, flower 60 sites: clinic 0 50, clinic 1 60" in flat(result.stdout)
    result, runs = check_and_run(columns=columns)
    assert (result.exit_code, runs) == (1, False)
    assert "stop  missing file: 1\n" in result.stdout


def test_a_table_is_checked_with_columns_named_by_hand(rows: Rows) -> None:
    written(rows, ["datei", "diagnose", "klinik", "person", "split"])
    named = "path=datei, label=diagnose,site=klinik,patient=person"
    for what in ("images", "images/labels.csv"):
        result = call(what, "--columns", named)
        assert result.exit_code == 0, result.output
        assert "sites: clinic 0 60, clinic 1 60" in flat(result.stdout)
    write_recipe(Path(), recipe(), "trial.yaml")
    for arguments, message in (
        (["images", "--columns", "path"], "--columns needs names of columns, such as path=file"),
        (["images", "--columns", "path=datei,label=befund"], "has no column 'befund' for the label"),
        (["images", "--columns", "pfad=datei"], "Columns has no option 'pfad'; it has: path, label,"),
        (["nowhere", "--columns", named], "--columns is for a table, but 'nowhere' is neither a CSV file nor"),
        (["trial.yaml", "--columns", named], "A recipe names the columns of its table; leave out --columns."),
    ):
        result = call(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr


def test_one_seed_may_refuse_a_partition_that_another_accepts(rows: Rows) -> None:
    written([row for row in rows if row[3][-2:] in ("-0", "-1", "-2", "-3", "-4")])
    found = {}
    for seed in range(8):
        values = recipe(partition={"by": "dirichlet", "sites": 3, "alpha": 1}, split={"official": False})
        write_recipe(Path(), {**values, "seed": seed}, "trial.yaml")
        try:
            load_sites(Recipe.load("trial.yaml"))
            found[seed] = 0
        except DataError:
            found[seed] = 1
        assert call("trial.yaml").exit_code == found[seed], seed
    assert set(found.values()) == {0, 1}


def test_every_method_is_checked_and_every_listing_once(rows: Rows) -> None:
    written(rows)
    many = {"data.partition": {"by": "iid", "sites": 100}}
    methods = {"plain": {}, "again": {"rounds": 2}, "half": {"data.limit": 60}}
    write_recipe(Path(), {**recipe(), "methods": methods}, "trial.yaml")
    result = call("trial.yaml", "--json", "--out", "found.json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [checked["name"] for checked in document] == ["labels.csv, as in plain", "labels.csv, as in half"]
    assert json.loads(Path("found.json").read_text()) == document
    write_recipe(Path(), {**recipe(), "methods": {"plain": {}, "many": many}}, "trial.yaml")
    result = call("trial.yaml", "--json")
    assert result.exit_code == 1
    (found,) = [finding for finding in json.loads(result.stdout)["findings"] if finding["level"] == "stop"]
    assert "could not be divided among 100 sites" in found["sentence"]


def test_what_has_no_files_has_nothing_to_check(rows: Rows) -> None:
    written(rows)
    write_recipe(Path(), {**recipe(), "data": {"name": "digits", "partition": {"by": "iid", "sites": 2}}}, "d.yaml")
    result = call("d.yaml")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "d.yaml: its images are not in files, so there is nothing to check\n"
    assert json.loads(call("demo", "--json").stdout) == []


def test_joined_copies_are_divided_as_a_run_does(rows: Rows) -> None:
    """One picture of each class, saved for many patients: joined, they are two, too few for three parts."""
    few = rows[:6] + rows[60:66]
    for number, row in enumerate(few):
        row[2:] = ["", f"p{number}", ""]
        Path("images", row[0]).write_bytes(Path("images", few[number // 6 * 6][0]).read_bytes())
    written(few)
    for join in (False, True):
        result, runs = check_and_run(merge_near_duplicates=join, partition={"by": "iid", "sites": 1})
        assert (result.exit_code, runs) == (int(join), not join), result.output


def test_help_fits_the_page() -> None:
    message = call("--help").stdout
    assert "--columns" in message
    assert max(map(len, message.splitlines())) <= 80
