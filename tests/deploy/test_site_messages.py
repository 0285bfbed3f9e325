"""What a hospital's own people are told: every refusal and failure in a sentence, with a remedy that a site has."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic import Recipe
from polyclinic.cli.server import status
from polyclinic.cli.site import join
from polyclinic.config.identity import predicted_parts
from polyclinic.core.errors import PolyclinicError, RecipeError, StoreError
from polyclinic.deploy.processes import serve_site
from polyclinic.deploy.site.config import SiteConfig, config_warnings
from polyclinic.deploy.site.participation import ReleasePreview
from polyclinic.deploy.site.release_log import last_trouble
from polyclinic.deploy.status import STATUS
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.storage import messages
from polyclinic.storage.files import write_json
from tests.deploy.example_sites import (
    EVERYTHING,
    TABLE,
    ApprovingHandler,
    Crossing,
    answers_of,
    asked,
    beginning,
    config,
    deployed,
    desks,
    recipe,
    refusal,
    said,
    simulation,
    write_hospitals,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospitals")
    write_hospitals(folder)
    return folder


def full(state: Path) -> None:
    """A disk on which nothing more can be written down: the log of releases is in the way of itself."""
    (state / "releases.jsonl").mkdir(parents=True)


TROUBLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an algorithm": ({"algorithm": "scaffold"}, {"allow": {**EVERYTHING, "algorithms": ["fedavg"]}}, "does not allow"),
    "no such name": ({"data__path": "scans"}, {}, "has no data called 'scans'"),
    "a table that is gone": ({}, {"data": {TABLE: Path("/nowhere/t.csv")}}, r"/nowhere/t.csv .* `data` in site.yaml"),
    "a label": ({"data__classes": ["benign", "cyst"]}, {}, "clinic.csv row 2, 3, 5"),
    "a device": (
        {"rounds": 1},
        {"device": "abacus"},
        "'abacus' is not available on this machine; correct `device` in site.yaml",
    ),
    "a full disk": ({}, {}, "make room.* `folder` in site.yaml"),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_refusals_and_failures_are_reported_in_one_sentence_and_kept(case: str, home: Path) -> None:
    changes, settings, sentence = TROUBLE[case]
    found, told = recipe(**changes), list[str]()
    place = config(home, "hill", f"trouble {case}", **settings)
    if case == "a full disk":
        full(place.folder)
    desk = ApprovingHandler(place, told.append)
    if case == "a device":
        desk.answer_message(beginning(simulation(found, home), "hill"))
    else:
        desk.answer_message(asked("enrol", "hill", found))
    assert re.match("(refused|failed), ", told[-1])
    assert re.search(sentence, told[-1])
    assert told[-1].isprintable()
    assert not re.search("--out|--data|--device|data.path", told[-1]), "options that a site does not have"
    when, kept = last_trouble(place.folder) or ("", "")
    assert kept == told[-1]
    write_json(place.folder / STATUS, {"site": "hill", "state": "connected to x:1", "pid": os.getpid()})
    (home / f"{case}.yaml").write_text(yaml.safe_dump({"federation": "f", "site": "hill", "folder": str(place.folder)}))
    if case != "a full disk":  # whose releases cannot be read either
        shown = command("status", home / f"{case}.yaml")
        assert "hill: connected" in shown
        assert f"({when}): {told[-1]}" in shown.replace("\n", "")


def command(*arguments: object) -> str:
    app = typer.Typer(rich_markup_mode=None)
    app.command("status")(status)
    app.command("join")(join)
    found = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "80"})
    if found.exception is not None:
        raise found.exception
    return found.output


def test_successes_are_reported_and_are_no_failures(home: Path) -> None:
    told: list[str] = []
    desk = ApprovingHandler(config(home, "hill", "well"), told.append)
    made = simulation(recipe(), home)
    desk.answer_message(asked("enrol", "hill", made.recipe))
    resting = [desk.is_idle]
    desk.answer_message(beginning(made, "hill"))
    resting.append(desk.is_idle)
    desk.answer_message(messages.encode({"purpose": "end", "run": made.run_id(), "site": "hill"}, {}))
    assert [sentence.split()[0] for sentence in told] == ["enrolled", "began", "ended"]
    resting.append(desk.is_idle)
    assert last_trouble(desk.config.folder) is None
    desk.answer_message(asked("enrol", "hill", made.recipe))
    assert [*resting, desk.is_idle] == [True, False, True, True]


def test_what_a_server_writes_cannot_forge_lines(home: Path) -> None:
    told: list[str] = []
    desk = ApprovingHandler(config(home, "hill", "forged"), told.append)
    forged = "2030-01-01T00:00:00+00:00 refused, nothing\n\x1b[2J"
    desk.answer_message(asked("enrol", "hill", recipe(name=f"law\n{forged}")))
    desk.answer_message(messages.encode({"purpose": forged, "site": "hill", "run": forged}, {}))
    assert all(sentence.isprintable() for sentence in told)
    assert len(desk.site_log.read_lines()) == len(told) == 2


SERVERS = [
    "127.0.0.1:abc",
    "https://127.0.0.1:1",
    "127.0.0.1",
    "x:0",
    "x:65536",
    ":1",
    "x_y:1",
    "::1:9",
    "x:1/y",
    "[x]:1",
]


@pytest.mark.parametrize("server", SERVERS)
def test_an_address_that_cannot_be_is_refused_before_anything_starts(server: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump({"federation": "north-sea", "site": "hill", "server": server}))
    with pytest.raises(RecipeError, match=r"server is '.*', but it should be HOST:PORT") as error:
        SiteConfig.load(path)
    assert "\n" not in str(error.value)


def test_addresses_of_every_kind_are_taken() -> None:
    for server in ("fl.example.org:9443", "127.0.0.1:1", "[::1]:65535", "localhost:80"):
        found = SiteConfig.model_validate({"federation": "north-sea", "site": "hill", "server": server})
        assert found.server == server


def test_what_site_yaml_lacks_is_named(tmp_path: Path) -> None:
    whole = {"server": "127.0.0.1:9443", "key": tmp_path / "k", "ca": tmp_path / "c"}
    for name in whole:
        given = {"federation": "f", "site": "hill", **{key: value for key, value in whole.items() if key != name}}
        with pytest.raises(RecipeError, match=f"lacks the key '{name}'"):
            serve_site(SiteConfig.model_validate(given), bytes, lambda _: None)


def test_probable_mistakes_are_reported_at_the_start(home: Path) -> None:
    assert list(config_warnings(config(home, "hill"))) == []
    slips: dict[str, Any] = {"allow": {"kinds": ["modell", "buffers"]}, "data": {"scans": Path("/nowhere")}}
    first, second = config_warnings(config(home, "hill", **slips))
    assert "'modell' (did you mean 'model'?)" in first
    assert "'scans' lies at /nowhere" in second


def test_files_and_folders_that_will_not_do_have_the_remedy_of_a_site(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- site\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"federation": "f", "site": "hill", "folder": "file/state"}))
    expected: dict[str, tuple[type[PolyclinicError], str]] = {
        "none.yaml": (RecipeError, "cannot read the site.yaml .* give the one of the site's kit"),
        "list.yaml": (RecipeError, "is not a site.yaml"),
        "site.yaml": (StoreError, "make room, or let .* `folder` in site.yaml"),
    }
    for name, (kind, sentence) in expected.items():
        with pytest.raises(kind, match=sentence) as error:
            command("join", tmp_path / name)
        assert not re.search("recipe|--out", str(error.value))


@pytest.mark.parametrize("train", [True, False])
def test_predictions_are_of_the_images_that_the_dry_run_names(train: bool, home: Path) -> None:
    """Of test images alone; scores are of the parts that a simulation scores, others are refused to whoever asks."""
    found, state = recipe(rounds=1, evaluate__train=train), f"predictions {train}"
    row = previewed(found, config(home, "hill", f"{state} alone"))["predictions"]
    own = simulation(found, home).setup.dataset.sites["hill"]
    assert re.findall(r"(\d+) (training|validation|test) images", row.protection) == [(str(len(own.test)), "test")]
    crossing = Crossing(desks(home, state))
    rounds, outcome = deployed(found, home, crossing)
    told = answers_of(found, home, rounds, outcome)["hill"]
    assert crossing.desks["hill"].releases.read_entries()[-1]["kinds"]["predictions"] == row.bytes
    assert told.predictions.keys() == {"global|test"}
    simulated = simulation(found, home).run().summary.sites["hill"]["global"]
    assert told.scores is not None
    assert told.scores.models["global"].keys() == simulated.keys()
    assert {part for part in simulated if part in ("train", "validation", "test")} == set(predicted_parts(found))


def previewed(found: Recipe, site: SiteConfig) -> dict[str, ReleasePreview]:
    return {row.kind: row for row in ApprovingHandler(site).preview_releases(found)}


WISH = {"noise": 2.0, "delta": 1e-3}
THREE = epsilon([Spend(2.0, 0.5, 6)], 1e-3) + 1e-6
"""Of three rounds of the recipe at hill: 8 training images in batches of 4, so two steps an epoch, at a rate of ½."""


def test_an_insufficient_budget_is_reported_before_the_site_enrols(home: Path) -> None:
    budget: dict[str, Any] = {"budget": {"unit": "image", "delta": 1e-3, "epsilon": THREE}}
    found = recipe(privacy=WISH, rounds=3)
    crossing = Crossing(desks(home, "spent", **budget))
    desk = crossing.desks["hill"]

    def enrol(run: Recipe) -> dict[str, Any]:
        return said(desk.answer_message(asked("enrol", "hill", run)))

    assert "card" in enrol(found)
    assert "privacy budget of hill" in refusal(enrol(recipe(privacy=WISH, rounds=4)))
    rounds, _ = deployed(found, home, crossing)
    assert "card" in enrol(found), "a run that is under way has paid for itself already"
    assert "privacy budget of hill" in refusal(enrol(recipe(privacy=WISH, rounds=1)))
    desk.answer_message(messages.encode({"purpose": "end", "run": rounds.rules.run, "site": "hill"}, {}))
    assert "privacy budget of hill" in refusal(enrol(found))
