"""A division tried on labels alone is refused exactly when a run refuses it, in a run's own words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import DataError
from polyclinic.data.check import check_listing
from polyclinic.data.datasets.user_data import TableOptions, read_user_table
from polyclinic.data.findings import Finding
from polyclinic.data.loading.cache import VARIABLE
from polyclinic.data.partitioning.dry_run import UNDIVIDED, Division
from polyclinic.data.partitioning.partitions import Iid, Natural
from polyclinic.data.records import Listing, Record
from polyclinic.data.splits import Fractions
from polyclinic.runs.experiment import load_sites
from tests.data.clinics import NAME, Rows, clinic, listed

PARTS = {"train": 0.5, "validation": 0.25, "test": 0.25}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return clinic(tmp_path)


def run_refusal(recipe: Recipe) -> str:
    try:
        load_sites(recipe)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("by", ["dirichlet", "quantity", "iid"])
def test_a_random_division_is_refused_as_in_a_run(rows: Rows, tmp_path: Path, by: str) -> None:
    listed(tmp_path, rows)
    said = set()
    for seed in range(12):
        data: dict[str, Any] = {"name": "table", "path": str(tmp_path / "labels.csv"), "size": 8, "channels": 1}
        data |= {"limit": 20, "partition": {"by": by, "sites": 3}, "split": PARTS}
        recipe = Recipe.from_values(
            {"name": "x", "rounds": 1, "seed": seed, "data": data, "model": "linear", "algorithm": "fedavg"}
        )
        listing = read_user_table(TableOptions.model_validate(recipe.data.options), None)
        division = Division(recipe.build_partition(), recipe.data.split, limit=20, seed=seed)
        assert division.find_refusal(listing) == run_refusal(recipe)
        said.add(division.find_refusal(listing))
    assert len(said) > 1, "every seed has the same to say"


def made(count: int = 60, **said: Any) -> Listing:
    """Two sites, two classes, patients of one image each."""
    labels, sites = ("benign", "malignant"), ("north", "south")
    records = [
        Record(Path(f"{n}"), labels[n % 2], sites[n // 2 % 2], f"patient-{n}", where=f"labels.csv row {n + 2}")
        for n in range(count)
    ]
    return Listing("made", Path(), tuple(records), labels, **said)


def changed(listing: Listing, positions: range | list[int], **said: Any) -> Listing:
    records = [replace(r, **said) if n in positions else r for n, r in enumerate(listing.records)]
    return replace(listing, records=tuple(records))


def undivided(listing: Listing, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What check says of the division; there are no pictures to look at."""
    monkeypatch.setattr("polyclinic.data.check.file_findings", lambda *_: [])
    return [finding for finding in check_listing(listing).findings if finding.kind == UNDIVIDED]


def test_empty_cells_are_counted_with_their_rows() -> None:
    listing = changed(made(), [3, 4, 17], site="")
    told = Division(Natural()).find_refusal(listing)
    assert told.startswith("3 images have no site, while others have one (labels.csv row 5, 6, 19); write the site")
    assert Division(Iid(sites=2)).find_refusal(listing) == ""
    listing = changed(changed(made(), range(60), split="train"), [3], split="")
    told = Division(Natural()).find_refusal(listing)
    assert told.startswith("1 image has no split, while others have one (labels.csv row 5); write train, validation")
    assert Division(Natural(), Fractions(official=False)).find_refusal(listing) == ""


HELP = {
    "patient": "another data.partition (such as iid) lets training start",
    "class": "another data.partition (such as iid) or data.allow_single_class: true lets training start",
    "site": "another data.partition (such as iid) lets training start",
    "part": "data.split: {official: false} lets training start",
}


@pytest.mark.parametrize("fault", HELP)
def test_what_would_help_is_told_and_helps(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = {
        "patient": changed(made(), [0, 2], patient="patient-0"),
        "class": changed(made(), range(1, 60, 4), site="south"),
        "site": changed(made(), [5], site=""),
        "part": changed(changed(made(), range(60), split="train"), [3], split=""),
    }[fault]
    (found,) = undivided(listing, monkeypatch)
    assert (found.level, found.stops) == ("warn", False)
    assert found.remedy.endswith(f"; in a recipe, {HELP[fault]}")
    assert undivided(made(), monkeypatch) == []


def test_what_can_never_be_learned_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = undivided(replace(changed(made(), range(60), label="benign"), classes=("benign",)), monkeypatch)
    assert (found.stops, found.sentence) == (True, "all images are of one class, so there is nothing to learn")
    (found,) = undivided(changed(made(declared=True), range(60), patient="patient-0", site="north"), monkeypatch)
    assert found.stops, "one patient fills one part, whatever the division"


def test_rare_sites_and_labels_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = changed(made(), [1, 5, 9, 13], site=NAME)
    (found,) = undivided(listing, monkeypatch)
    assert NAME not in found.sentence
    assert "would train on class 'malignant' only" in found.sentence
    rare = changed(made(), [0, 4, 8, 12], site="east", label=NAME)
    (found,) = undivided(replace(rare, classes=(NAME, "benign", "malignant")), monkeypatch)
    assert NAME not in f"{found}"
    assert "would train on class (that of labels.csv row 2) only" in found.sentence
