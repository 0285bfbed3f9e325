"""`polyclinic data …`: its output, its files, the privacy of names, and the deletion of cached images."""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyclinic.config.recipe import Recipe
from polyclinic.core.rng import Stream
from polyclinic.data import NAMED_DATASETS, describe_datasets
from polyclinic.data.datasets.base import Download, NamedDataset
from polyclinic.data.listings import open_source
from polyclinic.data.loading.cache import VARIABLE as CACHE
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.loading.loader import load_collection
from polyclinic.data.records import Listing
from polyclinic.runs.experiment import load_sites
from tests import commands
from tests.data import planted
from tests.data.web import served
from tests.small import write_recipe

NAME = "Zebulon_Quast"
"""A patient, named by every file, who must not be named where nobody asked."""
COLUMNS = ("path", "label", "site", "patient", "split")


@pytest.fixture(scope="session")
def crops() -> dict[str, list[planted.Bytes]]:
    return planted.cut_crops()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.fixture
def images(crops: dict[str, list[planted.Bytes]], tmp_path: Path) -> Path:
    """A clean set: 120 pictures of two sites, with a table."""
    folder = tmp_path / "images"
    folder.mkdir()
    rows = []
    for record in planted.save_records(crops, folder):
        path = record.path.rename(folder / f"{NAME}_{record.path.name}")
        rows.append((path.name, record.label, record.site, record.patient, record.split))
    write_table(folder, rows)
    return folder


def write_table(folder: Path, rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> None:
    with open(folder / "labels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


def read_table(folder: Path) -> list[list[str]]:
    with open(folder / "labels.csv", newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


call = partial(commands.call, "data")


def refused(*arguments: str) -> str:
    """The one sentence a mistake gets; nothing else is printed, nothing is written."""
    before = files()
    message = commands.refused("data", *arguments)
    assert NAME not in message
    assert files() == before
    return message


def files() -> set[Path]:
    """All that lies here, less prepared images: those were there for the taking before the mistake was seen."""
    return {path for path in Path().rglob("*") if path.parts[0] != "cache"}


def document(*arguments: str, code: int = 0) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=pytest.fail)


def words(text: str) -> set[str]:
    return set(text.split())


def flat(text: str) -> str:
    return " ".join(text.split())


def test_help_names_every_command_and_fits_the_page() -> None:
    for name in ("list", "check", "diagnose", "fetch", "cache"):
        assert f" {name} " in call("--help").stdout
        result = call(name, "--help")
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= 80
    assert "may contain patients' names" in flat(call("check", "--help").stdout.replace("│", " "))


def test_the_list_fits_eighty_columns_and_breaks_no_word() -> None:
    result = call("list")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for name, named in NAMED_DATASETS.items():
        assert re.search(rf"^{name} ", result.stdout, re.MULTILINE)
        assert words(f"{describe_datasets()[name]} terms: {named.licence}") <= words(result.stdout)


def test_the_list_shows_downloaded_datasets(images: Path) -> None:
    rows = document("list")
    assert [row["name"] for row in rows] == list(NAMED_DATASETS)
    assert not any(row["here"] for row in rows), "no data folder is set"
    assert {row["name"] for row in rows if row["fetch"]} == {
        n for n, named in NAMED_DATASETS.items() if named.downloads
    }
    (images / "mias").mkdir()
    photo = next(images.glob("*.png"))
    photo.rename(images / "mias" / photo.name)
    write_table(images / "mias", [(photo.name, NAMED_DATASETS["mias"].classes[0], "", "", "")])
    assert {row["name"] for row in document("list", "--data", str(images)) if row["here"]} == {"mias"}
    here = re.findall(r"^(\w+) +(yes|fetch|no) ", call("list", "--data", str(images)).stdout, re.MULTILINE)
    assert dict(here) == {
        name: "yes" if name == "mias" else "fetch" if named.downloads else "no"
        for name, named in NAMED_DATASETS.items()
    }


def test_a_clean_set_may_be_trained_on(images: Path) -> None:
    result = call("check", str(images), "--out", "new/found.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{images}: 120 images classes: city 60, flower 60 sites: clinic 0 60, clinic 1 60" in flat(result.stdout)
    assert result.stdout.endswith("training may start: 0 to fix first, 0 to note\n")
    found = json.loads(Path("new/found.json").read_text())
    assert (found["may_train"], found["images"]) == (True, 120)
    assert found == document("check", str(images))


def broken(folder: Path) -> list[str]:
    """A file that is no image, and one picture under two labels: the paths."""
    rows = read_table(folder)
    (folder / rows[5][0]).write_text("no image")
    (folder / rows[75][0]).write_bytes((folder / rows[3][0]).read_bytes())
    return [rows[5][0], rows[3][0], rows[75][0]]


def test_a_faulty_set_may_not_and_nobody_is_named(images: Path) -> None:
    broken(images)
    result = call("check", str(images), "--out", "found.json")
    assert result.exit_code == 1
    assert result.stderr == ""
    assert re.search("^stop  unreadable file: 1$", result.stdout, re.MULTILINE)
    assert re.search("^stop  duplicate with another label: 1$", result.stdout, re.MULTILINE)
    assert "where: labels.csv row 5 = 77" in result.stdout
    assert result.stdout.endswith("training must NOT start: 2 to fix first, 0 to note\n")
    assert max(len(line) for line in result.stdout.splitlines()[1:]) <= 80
    found = json.loads(Path("found.json").read_text())
    assert not found["may_train"]
    assert found == document("check", str(images), code=1)
    assert [f["positions"] for f in found["findings"] if f["level"] == "stop"] == [[5], [3, 75]]
    for said in (result.stdout, Path("found.json").read_text()):
        assert NAME not in said


def test_names_are_shown_on_request(images: Path) -> None:
    paths = broken(images)
    (images / f"{NAME}_unlisted.png").write_bytes((images / paths[1]).read_bytes())
    shown = call("check", str(images), "--show-names", "--out", "found.json")
    assert shown.exit_code == 1
    assert all(f": {images / path}\n" in shown.stdout for path in [*paths, f"{NAME}_unlisted.png"])
    assert NAME not in Path("found.json").read_text()
    with_json = call("check", str(images), "--show-names", "--json")
    assert NAME not in with_json.stdout
    assert json.loads(with_json.stdout) == json.loads(Path("found.json").read_text())
    assert all(f": {images / path}\n" in with_json.stderr for path in paths)


def test_a_long_path_stays_in_one_piece(images: Path) -> None:
    deep = images.rename(images.parent / ("x" * 100))
    assert str(deep) in call("check", str(deep)).stdout


def test_folders_of_classes_are_read_without_a_table(images: Path) -> None:
    for path, label, site, *_ in read_table(images):
        target = images / "by site" / site / label
        target.mkdir(parents=True, exist_ok=True)
        (images / path).rename(target / path)
    found = document("check", str(images / "by site"))
    assert (found["images"], found["sites"]) == (120, {"clinic 0": 60, "clinic 1": 60})


@pytest.mark.parametrize("command", ["check", "diagnose"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("bussi", "There is no dataset and no path 'bussi'"),
        ("nowhere/images", "There is no dataset and no path 'nowhere/images'"),
        ("busi", "No data folder is set; give --data DIR or set POLYCLINIC_DATA"),
        ("digits", "'digits' is not in files"),
        ("empty", "'empty' is an empty folder"),
        ("texts", "'texts' holds files but no class folders"),
        ("texts/a.txt", "'texts/a.txt' is neither a folder nor a CSV or npz file"),
        ("bad.csv", "'bad.csv' has no column 'path'"),
        ("bad.npz", "bad.npz"),
        ("x" * 300, "error: "),
    ],
)
def test_a_path_without_images_gets_one_sentence(command: str, what: str, message: str) -> None:
    Path("empty").mkdir()
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("a")
    Path("bad.csv").write_text("file,label\n1.png,a\n")
    Path("bad.npz").write_text("no zip")
    assert message in refused(command, what)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--data", "nowhere"], "The data folder 'nowhere' does not exist"),
        (["check", "busi", "--data", "nowhere"], "The data folder 'nowhere' does not exist"),
        (["check", "busi", "--data", "."], "The set busi was not found in busi"),
        (["check", "images", "--out", "images/labels.csv/found.json"], "labels.csv"),
        (["check", "images", "--out", "images"], "cannot write images"),
        (["diagnose", "nowhere.yaml"], "cannot read the recipe nowhere.yaml"),
        (["diagnose", "images", "--channels", "2"], "The option 'channels' of ImageOptions should be 1 or 3"),
        (["diagnose", "images", "--out", "images/labels.csv"], "labels.csv"),
        (["fetch", "bussi"], "There is no dataset 'bussi'; there are: aptos2019, "),
        (["fetch", "busi"], "No data folder is set; give --data DIR"),
        (["fetch", "busi", "--data", "nowhere"], "The data folder 'nowhere' does not exist"),
        (["fetch", "inbreast"], "not for automatic download; put it into your data folder/inbreast: "),
        (["fetch", "inbreast", "--data", "images"], "not for automatic download; put it into images/inbreast: "),
    ],
)
def test_a_bad_argument_gets_one_sentence(images: Path, arguments: list[str], message: str) -> None:
    few = [row for row in read_table(images) if row[3][-2:] in ("-0", "-1", "-2", "-3")]
    write_table(images, few)  # too few patients for the part of a diagnosis that takes long
    assert message in refused(*arguments)


@pytest.mark.parametrize("arguments", [[], ["chek"], ["check"], ["diagnose", "x", "--size", "7"], ["list", "--nmae"]])
def test_what_is_no_command_gets_its_usage(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output
    assert "Traceback" not in result.output


def test_two_sites_are_compared(images: Path) -> None:
    result = call("diagnose", str(images), "--size", "16", "--channels", "1", "--out", "new/folder")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    message = flat(result.stdout)
    for kind in ("Label skew", "Size skew", "Intensity shift", "Feature shift"):
        assert f"{kind} (" in message
    assert result.stdout.splitlines()[-1] == "written: new/folder/diagnosis.png  new/folder/diagnosis.json"
    with Image.open("new/folder/diagnosis.png") as picture:
        picture.verify()
    found = json.loads(Path("new/folder/diagnosis.json").read_text(), parse_constant=pytest.fail)
    assert {site["name"]: site["images"] for site in found["sites"]} == {"clinic 0": 60, "clinic 1": 60}
    assert all(site["counts"] == {"city": 30, "flower": 30} for site in found["sites"])
    assert found["labels"]["observed"] == pytest.approx(0, abs=1e-12)
    assert NAME not in result.stdout + json.dumps(found)


def test_one_site_has_nothing_to_be_compared_with(images: Path) -> None:
    rows = read_table(images)
    for site in ("", "clinic 0"):
        write_table(images, [(path, label, site, *rest) for path, label, _, *rest in rows])
        message = refused("diagnose", "images")
        assert "names fewer than two sites, so there is nothing to compare; give a recipe" in message


def test_a_table_that_names_only_some_sites_gets_one_sentence(images: Path) -> None:
    rows = read_table(images)
    rows[0][2] = ""
    write_table(images, rows)
    assert "site" in refused("diagnose", "images", "--size", "16")


FILMS = {"vendor": "film", "patients": 9}
PHANTOM: dict[str, Any] = {
    "name": "skewed",
    "rounds": 1,
    "data": {
        "name": "phantom",
        "size": 32,
        "hospitals": [{"name": "north", "malignant": 0.1, **FILMS}, {"name": "south", "malignant": 0.9, **FILMS}],
    },
    "model": "linear",
    "algorithm": "fedavg",
}


def test_a_recipe_determines_the_images_of_each_site(tmp_path: Path) -> None:
    write_recipe(tmp_path, PHANTOM, "skewed.yaml")
    found = document("diagnose", "skewed.yaml")
    sites = load_sites(Recipe.load("skewed.yaml"), None).sites
    assert {site["name"]: site["images"] for site in found["sites"]} == {n: len(s.train) for n, s in sites.items()}
    assert found["labels"]["observed"] > found["labels"]["expected"]
    assert json.loads(Path("diagnosis/diagnosis.json").read_text()) == found
    assert Path("diagnosis/diagnosis.png").exists()


def test_our_recipes_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic.config.bundled.recipes_folder", lambda: tmp_path / "ours")
    (tmp_path / "ours").mkdir()
    alone = {"name": "digits", "partition": {"by": "iid", "sites": 1}}
    write_recipe(tmp_path / "ours", PHANTOM | {"data": alone}, "one.yaml")
    assert "compares sites, and this federation has fewer than two" in refused("diagnose", "one")
    (tmp_path / "one").mkdir()
    assert "'one' is an empty folder" in refused("diagnose", "one"), "what lies here comes first"


def unread(_: Any, __: Path) -> Listing:
    raise AssertionError("fetching reads nothing")


def test_fetch_reports_a_file_and_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with served() as site:
        site.files["/images.bin"] = b"pixels"
        download = Download(f"{site.address}/images.bin", "", "images.bin")
        named = NamedDataset("demo-set", "none", ("a",), unread, "ask.", downloads=(download,))
        monkeypatch.setattr("polyclinic.cli.data.NAMED_DATASETS", {"demo-set": named})
        result = call("fetch", "demo-set", "--data", str(tmp_path))
        again = call("fetch", "demo-set", "--data", str(tmp_path))
    assert result.exit_code == again.exit_code == 0
    assert result.stdout == again.stdout == f"here: {tmp_path}/demo-set/images.bin\n"
    total = hashlib.sha256(b"pixels").hexdigest()
    assert result.stderr == f"images.bin has the SHA-256 sum {total}: compare it with the publisher's\n"
    assert again.stderr == "images.bin is already there\n"


def prepared(images: Path, home: Path) -> list[Path]:
    """A real prepared set and its lock."""
    load_collection(open_source(images), ImageOptions(size=8), Stream(0))
    return sorted(home.iterdir())


def test_the_cache_is_listed_and_cleared(images: Path, tmp_path: Path) -> None:
    home = tmp_path / "cache"
    assert call("cache").stdout == f"{home}: 0 prepared sets, 0.0 MiB\n"
    assert len(prepared(images, home)) == 2
    assert [row["bytes"] for row in document("cache")["sets"]] == [120 * 3 * 8 * 8]
    assert call("cache").stdout == f"{home}: 1 prepared sets, {120 * 3 * 64 / 2**20:.1f} MiB\n"
    assert call("cache", "--clear").stdout.endswith("MiB; cleared\n")
    assert list(home.iterdir()) == []
    assert document("cache")["sets"] == []
    assert len(list(images.iterdir())) == 121, "the images themselves stay"


def test_only_our_own_is_cleared(images: Path, tmp_path: Path) -> None:
    """POLYCLINIC_CACHE may have been set to a folder in which other things lie."""
    home, digits = tmp_path / "cache", "0123456789abcdef" * 2
    ours = prepared(images, home)
    draft = home / f"{digits[::-1]}.draft"
    draft.mkdir()
    for name in ("pixels", ".index.json.4711.tmp"):
        (draft / name).write_bytes(b"half of it")
    foreign = ["thesis.txt", "photos/pixels", f"{digits}/thesis.txt", f"{digits}/pixels", "a.lock", ".draft/pixels"]
    foreign += [f"{'a' * 32}.lock", f"{'A' * 32}/pixels", f"{'b' * 31}/pixels", f"{'c' * 32}-old/pixels"]
    for name in foreign:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("somebody's work")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "pixels").write_text("somebody's work")
    (home / ("d" * 32)).symlink_to(outside, target_is_directory=True)
    found = document("cache", "--clear")
    assert {row["set"] for row in found["sets"]} == {ours[0].name, draft.name}
    assert all((home / name).read_text() == "somebody's work" for name in foreign)
    assert (outside / "pixels").exists()
    assert (home / ("d" * 32)).is_symlink()
    assert not any(path.exists() for path in (*ours, draft))


def test_a_set_that_is_being_made_is_left_alone(images: Path, tmp_path: Path) -> None:
    folder, lock = prepared(images, tmp_path / "cache")
    with open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert document("cache", "--clear")["in_use"] == [folder.name]
        assert call("cache", "--clear").stdout.endswith("; cleared, except 1 that are being prepared\n")
        assert (folder / "pixels").exists()
    assert document("cache", "--clear")["in_use"] == []
    assert not folder.exists()
