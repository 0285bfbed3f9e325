"""The page: what it says, when it says it, and that nothing in it can do harm."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

from polyclinic.core.errors import StoreError
from polyclinic.core.types import Part
from polyclinic.evaluation.metrics import Predictions, measure
from polyclinic.reporting.figures import draw_curves
from polyclinic.reporting.html.render import render_section
from polyclinic.reporting.report_data import ReportData, read_report_data
from polyclinic.reporting.sections.summary import summary_section
from polyclinic.storage.predictions import load_predictions, save_predictions
from polyclinic.storage.run_folder import RunFolder
from tests.reporting.drawn import Page, method_of, report_page

NASTY = "<script>alert(1)<img src=x onerror=alert(2)>"
MEGABYTES = 3_000_000


def test_sections_appear_when_there_is_something_to_show(parsed: dict[str, Page]) -> None:
    always = {"answer", "by-site", "sites", "methods", "confusion", "costs", "privacy", "failures", "recipe", "again"}
    drawn = {"learning", "curves", "calibration", "drift"}
    assert {name: set(found.sections()) - always - drawn for name, found in parsed.items()} == {
        "two": {"tests", "trade", "gap"},
        "seeds": {"tests", "against-first", "trade", "gap"},
        "run": {"forgetting", "gap"},
        "one": {"gap"},
    }
    assert all(always | drawn <= set(found.sections()) for found in parsed.values())


def test_pages_are_whole_small_and_fetch_nothing(pages: dict[str, str]) -> None:
    for text in pages.values():
        assert len(text.encode()) < MEGABYTES
        assert not re.search(r"""(src|href|action)=["'](?!#|data:)""", text)
        assert not re.search(r"https?://|url\(|@import", text)
        assert "<script" not in text


def test_pages_can_be_read_by_ear_and_by_keyboard(parsed: dict[str, Page]) -> None:
    for found in parsed.values():
        ids = [attributes["id"] for _, attributes, _ in found.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        links = [str(a["href"]) for a in found.all("a")]
        assert links
        assert {link.removeprefix("#") for link in links} <= set(ids)
        assert [len(found.all(name)) for name in ("h1", "main", "header", "footer", "nav", "title")] == [1] * 6
        assert all(svg.get("aria-hidden") or (svg["role"] == "img" and svg["aria-label"]) for svg in found.all("svg"))
        assert all(image["alt"] for image in found.all("img"))
        assert len(found.all("caption")) == len(found.all("table")) > 0
        assert all(th["scope"] in ("col", "row") for th in found.all("th"))
        assert all(div["tabindex"] == "0" for div in found.all("div") if div.get("class") == "scroll")
        assert len(found.all("figcaption")) == len(found.all("figure"))
        levels = [int(name[1]) for name, *_ in found.elements if re.fullmatch("h[1-6]", name)]
        assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_reader_finds_a_question(parsed: dict[str, Page]) -> None:
    for found in parsed.values():
        contents = found.text("nav")
        assert all(
            reader in contents for reader in ("Clinician", "Statistician", "Engineer", "Data-protection officer")
        )


def test_the_headline_is_the_result_in_plain_words(compared: Path, parsed: dict[str, Page]) -> None:
    accuracy = RunFolder(compared / "together" / "seed-0").read_summary().headline["accuracy"]
    value, low, high = (one or math.nan for one in (accuracy.value, accuracy.low, accuracy.high))
    told = f"{100 * value:.0f} of 100 test images (95 % interval {100 * low:.0f} to {100 * high:.0f})"
    assert f"Together was right on {told} of 5 sites" in parsed["one"].text("section", id="answer")
    assert told in parsed["two"].text("section", id="answer")


def material(*methods: str, tmp_path: Path, right: dict[str, list[bool]]) -> ReportData:
    made = [method_of(name, tmp_path, {"x": right[name]}) for name in methods]
    return ReportData("drawn", "", tuple(made), (tmp_path,))


def plain(found: ReportData) -> str:
    return Page(render_section(summary_section(found))).text("section")


def test_nobody_is_called_better_without_the_test(tmp_path: Path) -> None:
    even, close = [True] * 30 + [False] * 10, [True] * 28 + [False] * 12
    told = plain(material("a", "b", tmp_path=tmp_path, right={"a": even, "b": close}))
    assert "better" not in told
    assert "may be chance, not decided" in told
    told = plain(material("a", "c", tmp_path=tmp_path, right={"a": even, "c": [False] * 40}))
    assert "a is better than c (p < 0.05 over 40 patients" in told


def test_training_alone_is_held_against_every_method_at_every_site(parsed: dict[str, Page], compared: Path) -> None:
    sites = RunFolder(compared / "alone" / "seed-0").read_summary().sites
    told = parsed["two"].text("section", id="by-site")
    assert "Gains and losses against training alone" in told
    assert all(site in told for site in sites)
    assert "corrected for 5 tests" in told  # one method that learns together, five sites


def test_names_from_files_cannot_become_elements(compared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    shutil.copytree(compared, folder)
    for path in folder.rglob("*.json*"):
        text = path.read_text().replace("harbour", NASTY).replace("malignant", f"{NASTY}</td></script>")
        path.write_text(text.replace("Together", NASTY))
    for path in folder.rglob("recipe.yaml"):
        values = yaml.safe_load(path.read_text())
        name = NASTY if values["name"] == "Together" else values["name"]
        path.write_text(yaml.safe_dump({**values, "name": name, "about": f"{NASTY}</p>"}))
    for path in folder.rglob("predictions.safetensors"):
        save_file({name.replace("harbour", NASTY): tensor for name, tensor in load_file(path).items()}, path)
    text = report_page([folder])
    found = Page(text)
    assert found.all("script") == found.all("img") == []
    assert NASTY in found.text("section", id="sites")
    assert NASTY in found.text("section", id="curves")
    assert f"{NASTY}</p>" in found.text("header")
    assert not any(name.startswith("on") for _, attributes, _ in found.elements for name in attributes)
    assert len(text.encode()) < MEGABYTES


def test_noise_from_a_seed_is_no_guarantee(parsed: dict[str, Page]) -> None:
    told = parsed["seeds"].text("section", id="privacy")
    assert "no guarantee: the noise comes from a public seed" in told
    assert re.search(r"no guarantee\s*2\s*\([\d.]+\)", told), "what ε would be stands in brackets"
    assert "8731873" in parsed["seeds"].text("section", id="recipe")


def test_what_was_claimed_and_released_is_told_by_unit_and_kind(parsed: dict[str, Page], seeds: Path) -> None:
    told = parsed["seeds"].text("section", id="privacy")
    result = RunFolder(seeds / "private" / "seed-8731873").read_summary()
    assert "one image at a site" in told
    assert "nothing is claimed" in told
    assert all(row.kind in told and row.protection in told for row in result.released)
    assert "What is NOT protected" in told
    assert "Nothing. No recipe here has a privacy plan" in parsed["one"].text("section", id="privacy")


def test_refusals_are_counted_and_explained(parsed: dict[str, Page], single: Path) -> None:
    refused = RunFolder(single).read_summary().cost.refused
    told = parsed["run"].text("section", id="failures")
    assert refused > 0
    assert "refused: the server would not take its reply" in told
    assert "every site that was asked answered" in parsed["one"].text("section", id="failures")


def test_runs_that_have_not_ended_are_named(compared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(compared, folder)
    (folder / "alone" / "seed-0" / "result.json").unlink()
    told = Page(report_page([folder])).text("section", id="failures")
    assert "Not ended: Alone: 2 of 2 rounds" in told


def test_methods_keep_the_order_of_their_comparison(compared: Path) -> None:
    found = read_report_data([compared])
    assert [method.name for method in found.methods] == ["Together", "Alone", "Pooled"]
    assert found.title == "tiny"
    given = read_report_data([compared / "pooled", compared / "together"])
    assert [method.name for method in given.methods] == ["Pooled", "Together"]


def test_runs_of_one_recipe_are_one_method_whatever_the_seed(seeds: Path) -> None:
    found = read_report_data([seeds])
    assert {method.name: len(method.runs) for method in found.methods} == {"Open": 3, "Private": 3}


def test_folders_without_a_finished_run_are_refused(tmp_path: Path, compared: Path) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        read_report_data([tmp_path / "absent"])
    with pytest.raises(StoreError, match=r"holds no run \(recipe.yaml is missing\)"):
        read_report_data([tmp_path])
    shutil.copytree(compared / "alone", tmp_path / "begun")
    (tmp_path / "begun" / "seed-0" / "result.json").unlink()
    with pytest.raises(StoreError, match=r"has finished; `polyclinic resume .*begun/seed-0` finishes it"):
        read_report_data([tmp_path / "begun"])
    shutil.copytree(compared / "alone", tmp_path / "torn")
    (tmp_path / "torn" / "seed-0" / "predictions.safetensors").write_bytes(b"torn")
    with pytest.raises(StoreError, match="is damaged"):
        report_page([tmp_path / "torn"])


def test_a_folder_is_only_read(compared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in compared.rglob("*")}
    report_page([compared])
    assert {path: path.stat().st_mtime_ns for path in compared.rglob("*")} == before


def test_runs_from_before_predictions_were_kept_still_have_a_report(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "old")
    for path in (tmp_path / "old").rglob("predictions.safetensors"):
        path.unlink()
    found = Page(report_page([tmp_path / "old"]))
    assert "curves" not in found.sections()
    assert "nothing was tested" in found.text("section", id="answer")
    assert "better" not in found.text("section", id="answer")


def test_pictures_of_other_commands_are_shown_and_patients_only_on_demand(compared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(compared / "together" / "seed-0", folder)
    draw_curves({"a": [(0.0, 0.0), (1.0, 1.0)]}, "Dots", "x", "y", folder / "features.png")
    (folder / "explain").mkdir()
    shutil.copy(folder / "features.png", folder / "explain" / "gallery.png")
    words = {"pictures": {"gallery.png": {"title": "Looks", "alternative": "case 1: bright"}}}
    (folder / "explain" / "explain.json").write_text(json.dumps(words))
    careful, open_ = (Page(report_page([folder], pictures)) for pictures in (False, True))
    assert [image["alt"] for image in careful.all("img")] == ["Lines of y against x. Last values: a 1.000."]
    assert "It shows patients, so it is left out" in careful.text("section", id="saliency")
    assert [image["alt"] for image in open_.all("img")][1:] == ["case 1: bright"]
    assert "shows patients, because --with-images" in open_.text("section", id="saliency")
    assert all(str(image["src"]).startswith("data:image/webp;base64,") for image in open_.all("img"))


def test_kept_predictions_are_those_that_the_result_was_measured_on(single: Path) -> None:
    result, kept = RunFolder(single).read_summary(), RunFolder(single).predictions()
    assert {part for _, _, part in kept} == {"validation", "test"}
    for (site, model, part), found in kept.items():
        known = measure(found.probabilities, found.labels)
        told = result.sites[site][model][cast("Part", part)]
        assert {name: told.value(name) for name in ("accuracy", "loss")} == pytest.approx(
            {name: known[name] for name in ("accuracy", "loss")}, abs=1e-12
        )
    merged = Predictions.merge([found for (_, _, part), found in kept.items() if part == "test"])
    assert measure(merged.probabilities, merged.labels)["auc"] == pytest.approx(result.headline.scores.value("auc"))


def test_test_images_of_no_site_are_kept_under_a_name_of_their_own(tmp_path: Path) -> None:
    apart = Predictions(np.array([[0.25, 0.75], [0.5, 0.5]]), np.array([1, 0]))
    save_predictions(tmp_path / "p", {}, apart)
    ((key, found),) = load_predictions(tmp_path / "p").items()
    assert key == ("held-out", "held-out", "test")
    assert found.probabilities.tolist() == apart.probabilities.tolist()
    assert found.labels.tolist() == [1, 0]


def test_where_no_site_lets_predictions_leave_no_file_is_kept(tmp_path: Path) -> None:
    save_predictions(tmp_path / "p", {}, None)
    assert list(tmp_path.iterdir()) == []
    assert load_predictions(tmp_path / "p") == {}
