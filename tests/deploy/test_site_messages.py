"""What a hospital's own people are told: every refusal and failure in a sentence, with a remedy that a site has."""

from __future__ import annotations

import json
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
from polyclinic.cli.common import out
from polyclinic.cli.server import status
from polyclinic.cli.site import join, site_app
from polyclinic.config.identity import predicted_parts
from polyclinic.core.errors import PolyclinicError, RecipeError, StoreError
from polyclinic.deploy.processes import serve_site
from polyclinic.deploy.site.config import SiteConfig, config_warnings
from polyclinic.deploy.site.images import build_site_profile
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.deploy.site.policy import recipe_digest
from polyclinic.deploy.site.preview import WITHHELD, ReleasePreview
from polyclinic.deploy.site.release_log import ReleaseLog, last_trouble
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
    (told,) = config_warnings(config(home, "hill", data={"scans": Path("/nowhere")}))
    assert "'scans' lies at /nowhere" in told


def test_a_budget_that_comes_after_runs_without_a_plan_says_so(home: Path) -> None:
    """At every start, and before an approval: it does not count them."""
    budget: dict[str, Any] = {"budget": {"epsilon": 8, "delta": 1e-3}}
    crossing = Crossing(desks(home, "late"))
    deployed(recipe(rounds=1), home, crossing)
    for state, cost in (("late", None), ("early", 1.0)):
        log = ReleaseLog(config(home, "hill", state).folder)
        log.record_release(b"", {"model": 1}, run="other", round=1, purpose="train", epsilon=cost)
    (told,) = config_warnings(config(home, "hill", "late", **budget))
    assert told.startswith("2 runs left without a plan (2 updates); no epsilon bounds them")
    assert list(config_warnings(config(home, "hill", "late"))) == []
    assert list(config_warnings(config(home, "hill", "early", **budget))) == []


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


@pytest.fixture
def page(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """hill's site.yaml and a recipe, in a folder of their own, and a terminal of 80 columns."""
    monkeypatch.setattr(out, "width", 80)
    monkeypatch.chdir(tmp_path)
    allow = {**EVERYTHING, "kinds": ["model", "buffers", "metrics"]}
    values = {"federation": "north-sea", "site": "hill", "allow": allow, "data": {TABLE: str(home / "hill" / TABLE)}}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(values))
    return Page(tmp_path)


class Page:
    """Commands of a site, called in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, found: Recipe, name: str = "recipe.yaml") -> str:
        (self.folder / name).write_text(found.to_yaml())
        return name

    def site(self, *words: str, code: int = 0, answer: str = "") -> str:
        result = CliRunner().invoke(site_app, [words[0], "site.yaml", *words[1:]], input=answer)
        assert result.exit_code == code, result.output
        assert max(map(len, result.output.splitlines()), default=0) <= 80 or "approve" in words
        return result.output

    def dry_run(self, *words: str) -> str:
        (app := typer.Typer()).command()(join)
        result = CliRunner().invoke(app, ["site.yaml", "--dry-run", *words])
        assert result.exit_code == 0, result.output
        return result.stdout


def test_the_dry_run_tells_all_that_leaves_and_what_was_asked_for(page: Page, home: Path) -> None:
    """The card to the last key, as the server gets it; and the keys of the recipe that people agreed upon."""
    name = page.write(found := recipe(rounds=3, seed=7, privacy={**WISH, "metrics": "suppress"}))
    told = page.dry_run(name)
    assert max(map(len, told.splitlines())) <= 80
    words = " ".join(told.split())
    for shown in ("method fedavg", "network mlp", "rounds 3", "seed 7", f"data {TABLE}", "protects one image"):
        assert shown in words
    assert re.search(r"ε of the whole run: \S+ at δ = 0.001, for one image at a site", told)
    asked_of = json.loads(page.dry_run(name, "--json"))
    desk = ApprovingHandler(config(home, "hill", "card"))
    card = said(desk.answer_message(asked("enrol", "hill", found)))
    sent = {**card["card"], "least_sites": card["least_sites"]}
    assert {**asked_of["card"], "fingerprint": sent["fingerprint"]} == sent
    assert asked_of["card"].keys() == build_site_profile(desk._load_images(found), "hill", "0", "mark").keys() | {
        "least_sites"
    }
    for key in ("channels", "size", "classes", "train"):
        assert key in words
    assert "of no named patient: train, validation, test 0, 0, 0" in words
    assert asked_of["privacy"] == {"unit": "image", "delta": 1e-3}


def test_what_the_hospital_keeps_is_said_without_a_nudge_to_let_it_go(page: Page) -> None:
    rows = {row["kind"]: row for row in json.loads(page.dry_run(page.write(recipe()), "--json"))["releases"]}
    assert rows["predictions"]["when"] == WITHHELD == "stays here"
    assert not re.search("add it|set |not allowed", rows["predictions"]["protection"])
    assert rows["card"]["when"] == "before the run"


@pytest.mark.parametrize("masked", [True, False])
def test_figures_beside_masks_are_said_to_be_bare(masked: bool, home: Path) -> None:
    stages = {"stages": [{"name": "mask"}]} if masked else {}
    rows = previewed(recipe(**stages), config(home, "hill", f"bare {masked}"))
    assert ("masked: the server learns the sum" in rows["model"].protection) == masked
    for kind in ("metrics", "final scores", "predictions"):
        assert ("not masked" in rows[kind].protection) == masked
    assert ("masks" in rows) == masked


def test_numbers_of_a_method_are_in_the_dry_run(home: Path) -> None:
    assert "steps" in previewed(recipe(algorithm="fednova"), config(home, "hill", "numbers"))


def test_an_approval_can_be_declined_listed_and_names_the_command_that_works_here(page: Page) -> None:
    name = page.write(found := recipe(name="law of the sea"))
    assert page.site("approve", name, code=1, answer="n\n").endswith("nothing was approved\n")
    assert json.loads(page.site("approve", "--json")) == []
    assert "polyclinic site approve site.yaml recipe.yaml" in page.dry_run(name)
    (page.folder / "start.sh").write_text("")
    assert "to approve it: sh start.sh approve recipe.yaml\n" in page.dry_run(name)
    desk = SiteMessageHandler(SiteConfig.load(page.folder / "site.yaml"))
    why = refusal(said(desk.answer_message(asked("enrol", "hill", found))))
    assert why.endswith("run at the site: sh start.sh approve RECIPE.yaml")
    page.site("approve", name, "--yes", "--by", "Dr. A. Person")
    (row,) = json.loads(page.site("approve", "--json"))
    assert row["digest"] == recipe_digest(found)
    line = next(line for line in page.site("approve").splitlines() if row["digest"][:12] in line)
    assert line.split()[-1] == row["digest"][:12]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d ", line), "a whole time"
    assert "…" not in line


def test_scores_fit_a_terminal_and_name_the_positive_class(page: Page, home: Path) -> None:
    found = recipe(rounds=1)
    rounds, outcome = deployed(found, home, crossing := Crossing(desks(home, "scored")))
    answers_of(found, home, rounds, outcome)
    values = yaml.safe_load((page.folder / "site.yaml").read_text())
    folder = crossing.desks["hill"].config.folder
    (page.folder / "site.yaml").write_text(yaml.safe_dump({**values, "folder": str(folder)}))
    result = CliRunner().invoke(site_app, ["scores", "site.yaml"])
    head, line, positive, what, _ = result.output.splitlines()
    (kept,) = json.loads(CliRunner().invoke(site_app, ["scores", "site.yaml", "--json"]).output)
    assert line.split()[0] == kept["run"][:12] != kept["run"]
    assert max(len(head), len(line)) <= 80
    assert positive == "sensit.: the share of malignant that was found; specif.: of benign"
    assert what.startswith(f"{kept['run'][:12]} law (global), ")
