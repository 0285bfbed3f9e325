"""Predictions of finished runs: equal to the run's own on its images, and an error for each unreadable file."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import polyclinic
from polyclinic.analysis.predict import Prediction, find_image_files, fit_calibration, open_catalogue, predict_files
from polyclinic.core.rng import Stream
from polyclinic.evaluation.calibration import Calibration, apply_temperature, log_probabilities
from polyclinic.models import build_model
from polyclinic.runs.finished_run import open_run
from polyclinic.storage.predictions import load_predictions
from polyclinic.storage.run_folder import RunFolder
from tests import commands
from tests.data.dicoms import SECRETS, dataset, save
from tests.runs.test_networks import PUBLIC, hospitals
from tests.small import TINY

SITES = ("site-1", "site-2", "site-3")
UNEQUAL = {"train": 0.6, "validation": 0.3, "test": 0.1}
"""Validation and test parts of different sizes, so that a mix-up of the two shows in the counts."""
DIGITS = {**TINY, "data": {**TINY["data"], "split": UNEQUAL}, "evaluate": {"bootstrap": 0}}
CARDS = {f"site-{n}": dict.fromkeys(("cpu", "memory", "battery", "network"), n / 4) for n in (1, 2, 3)}
CLUSTERS = {"high": {"min_score": 0.5, "model": "cnn_b"}, "low": {"min_score": 0, "model": "cnn_c"}}
WISHES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "local": {"algorithm": "local"},
    "cross-site": {"algorithm": "cross-site"},
    "both": {"algorithm": {"name": "pfedcdp", "head_epochs": 0, "keep": 0}, "model": "cnn_c"},
    "ensemble": {"ensemble": True},
    "clusters": {"clusters": CLUSTERS, "capability": {"profiles": CARDS}},
    "cut": {"model": {"name": "cnn_c", "split_after": 1}},
    "fixed features": {"model": "scattering_linear"},
    "phantom": {
        "data": {
            "name": "phantom",
            "size": 32,
            "hospitals": [{"name": name, "vendor": "film", "patients": 20, "malignant": 0.5} for name in SITES],
        },
        "model": "cnn_c",
    },
}

call, refused = partial(commands.call, "predict"), partial(commands.refused, "predict")
predict_json = partial(commands.document, "predict")


def stored(examples: Any) -> Tensor:
    found: Tensor = examples.stored_batch(torch.arange(len(examples)))[0]
    return found


def write_images(images: Tensor, folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{number:04d}.png" for number in range(len(images))]
    for path, image in zip(paths, images.numpy(), strict=True):
        Image.fromarray(image[0]).save(path)
    return paths


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    for name, values in WISHES.items():
        polyclinic.run(polyclinic.Recipe.from_values({**DIGITS, "name": name, **values}), out=place / name)
    refined = {"public": PUBLIC, "finish": {"name": "refine", "epochs": 1, "batch": 64}, "data": {"name": "digits"}}
    recipe = polyclinic.Recipe.from_values({**DIGITS, "name": "refined", **refined})
    polyclinic.run(recipe, out=place / "refined", dataset=hospitals())
    return {path.name: path for path in place.iterdir()}


@pytest.fixture(scope="module")
def files(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every site's test images as files, by the first run on them and site."""
    place = tmp_path_factory.mktemp("files")
    owners = {"fedavg": open_run(runs["fedavg"], None).dataset, "phantom": open_run(runs["phantom"], None).dataset}
    owners["refined"] = hospitals()
    found = {}
    for run, consortium in owners.items():
        for site, data in consortium.sites.items():
            found[run, site] = place / run / site
            write_images(stored(data.test), place / run / site)
    return found


def said(rows: Mapping[str, Any], key: str = "probabilities") -> np.ndarray[Any, Any]:
    return np.array([list(row[key].values()) for row in rows["predictions"]])


@pytest.mark.parametrize(
    ("run", "arguments", "site", "key"),
    [
        ("fedavg", [], "site-2", "global"),
        ("phantom", [], "site-1", "global"),
        ("local", ["--site", "site-3"], "site-3", "personal"),
        ("both", ["--site", "site-1"], "site-1", "personal"),
        ("both", ["--model", "global"], "site-1", "global"),
        ("cross-site", ["--site", "site-2"], "site-1", "site-2"),
        ("ensemble", [], "site-1", "ensemble"),
        ("ensemble", ["--model", "global"], "site-1", "global"),
        ("clusters", ["--model", "high"], "site-3", "global"),
        ("clusters", ["--site", "site-1"], "site-1", "global"),
        ("cut", [], "site-1", "global"),
        ("fixed features", [], "site-1", "global"),
        ("refined", [], "lakeview", "student"),
        ("refined", ["--model", "global"], "harbour", "global"),
    ],
)
def test_the_runs_own_images_get_the_runs_own_predictions(
    run: str,
    arguments: list[str],
    site: str,
    key: str,
    runs: dict[str, Path],
    files: dict[tuple[str, str], Path],
) -> None:
    """Without its data, from files, by whichever model."""
    kept = load_predictions(RunFolder(runs[run]).predictions_file)[site, key, "test"]
    folder = files[run if (run, site) in files else "fedavg", site]
    np.testing.assert_allclose(said(predict_json(runs[run], folder, *arguments)), kept.probabilities, rtol=0, atol=1e-6)


def test_first_weights_need_not_be_there_any_more(files: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    first = tmp_path / "first.safetensors"
    save_file(build_model("cnn_c", classes=10, channels=1, size=8, seed=Stream(5)).state_dict(), first)
    began = {"name": "cnn_c", "weights": str(first)}
    values = {**WISHES["clusters"], "clusters": {**CLUSTERS, "low": {"min_score": 0, "model": began}}, "model": began}
    polyclinic.run(polyclinic.Recipe.from_values({**DIGITS, **values}), out=tmp_path / "run")
    first.unlink()
    kept = load_predictions(RunFolder(tmp_path / "run").predictions_file)["site-1", "global", "test"]
    found = predict_json(tmp_path / "run", files["fedavg", "site-1"], "--model", "low")
    np.testing.assert_allclose(said(found), kept.probabilities, rtol=0, atol=1e-6)
    assert open_run(tmp_path / "run", None).site_network("site-1")[0] == "global"


def test_a_batch_is_one_image_after_the_other(runs: dict[str, Path], files: dict[tuple[str, str], Path]) -> None:
    run = open_catalogue(runs["phantom"])
    paths, _ = find_image_files([files["phantom", site] for site in SITES])
    together = list(predict_files(run.load_model(), run.preprocessing, paths, 1.5))
    for number in (0, 7, len(paths) - 1):
        (alone,), whole = predict_files(run.load_model(), run.preprocessing, [paths[number]], 1.5), together[number]
        assert isinstance(alone, Prediction)
        assert isinstance(whole, Prediction)
        assert alone.file == whole.file == paths[number]
        np.testing.assert_allclose(alone.probabilities, whole.probabilities, atol=1e-6)
        assert alone.calibrated is not None
        assert whole.calibrated is not None
        np.testing.assert_allclose(alone.calibrated, whole.calibrated, atol=1e-6)


def prepared(options: dict[str, Any], place: Path) -> Path:
    """A run on oblong files in colour and grey, PNG, JPEG and DICOM, prepared as `options` say."""
    rng = np.random.default_rng(5)
    for site in ("north", "south"):
        for number in range(60):
            kind, label = number % 3, "dark" if number % 2 else "bright"
            folder = place / "files" / site / label
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.zeros((44, 30 + number % 4), np.uint8)
            pixels[8:36, 4:24] = rng.integers(30, 130, (28, 20)) + (0 if number % 2 else 120)
            if kind == 2:
                save(folder, dataset(pixels.astype(np.uint16), 12)).rename(folder / f"{number}.dcm")
            else:
                colours = np.stack([pixels, pixels // 2, 255 - pixels], -1) if kind else pixels
                Image.fromarray(colours).save(folder / f"{number}.{'jpg' if kind else 'png'}")
    data = {"name": "folder", "path": str(place / "files"), "levels": ["site", "label"], **options}
    values = {**DIGITS, "name": "files", "data": data, "model": "cnn_c"}
    polyclinic.run(polyclinic.Recipe.from_values(values), out=place / "run")
    return place / "run"


@pytest.mark.parametrize(
    "options",
    [
        {"size": 24, "channels": 1, "normalise": "imagenet", "crop_borders": True},
        {"size": 20, "channels": 3, "normalise": "imagenet", "fit": "crop"},
        {"size": 16, "channels": 3, "normalise": "half", "fit": "stretch"},
        {"size": 16, "channels": 1},
    ],
)
def test_files_are_prepared_as_the_run_prepared_them(options: dict[str, Any], tmp_path: Path) -> None:
    run = open_catalogue(prepared(options, tmp_path))
    paths, _ = find_image_files([tmp_path / "files"])
    found = [each for each in predict_files(run.load_model(), run.preprocessing, paths) if isinstance(each, Prediction)]
    assert len(found) == len(paths) == 120
    assert {path.suffix for path in paths} == {".png", ".jpg", ".dcm"}
    by_pixels = {each.image.numpy().tobytes(): each for each in found}
    kept = load_predictions(run.files.predictions_file)
    for site, data in open_run(run.folder, None).dataset.sites.items():
        images = stored(data.test)
        assert len(images)
        for image, expected in zip(images, kept[site, "global", "test"].probabilities, strict=True):
            one = by_pixels[image.numpy().tobytes()]
            assert one.file.is_relative_to(tmp_path / "files" / site)
            np.testing.assert_allclose(one.probabilities, expected, rtol=0, atol=1e-6)


def test_wrong_files_get_a_sentence_each_and_the_others_are_predicted(
    runs: dict[str, Path], files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    good = files["fedavg", "site-1"] / "0000.png"
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "half.png").write_bytes(good.read_bytes()[:60])
    Image.new("L", (8, 8), 7).save(tmp_path / "blank.png")
    made = dataset(np.zeros((2, 8, 8), np.uint8)[0])
    made.NumberOfFrames = 2
    scan = save(tmp_path, made)
    wrong = [tmp_path / name for name in ("empty", "text.png", "half.png", "blank.png", "missing.png")] + [scan]
    result = call(runs["fedavg"], *wrong, good, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["predictions"] == predict_json(runs["fedavg"], good)["predictions"]
    lines = result.stderr.splitlines()
    assert [line.split(": ")[:2] for line in sorted(lines)] == sorted(["error", str(path)] for path in wrong)
    assert not any(secret in result.output for secret in SECRETS)
    assert {each["file"] for each in json.loads(result.stdout)["failures"]} == set(map(str, wrong))
    nothing = call(runs["fedavg"], tmp_path / "text.png")
    assert (nothing.exit_code, nothing.stdout) == (1, "")


def test_folders_are_walked_and_every_file_counts_once(tmp_path: Path) -> None:
    write_images(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), tmp_path / "a" / "deeper")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "a" / "round").symlink_to(tmp_path, target_is_directory=True)
    one, two = (tmp_path / "a" / "deeper" / name for name in ("0000.png", "0001.png"))
    assert find_image_files([two, tmp_path]) == ([two, one], [])


def test_calibration_is_fitted_on_the_validation_images(
    runs: dict[str, Path], files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """From what the run kept, or from its images: the same temperature; and the order of classes stays."""
    found = predict_json(runs["fedavg"], files["fedavg", "site-1"])
    temperature = found["calibration"]["temperature"]
    sites = _sites(runs["fedavg"])
    validation, test = sum(len(site.validation) for site in sites), sum(len(site.test) for site in sites)
    assert validation > 2 * test > 0, "else the counts could not tell the parts apart"
    assert (found["calibration"]["images"], found["calibration"]["test_images"]) == (validation, test)
    np.testing.assert_allclose(
        said(found, "calibrated"), apply_temperature(log_probabilities(said(found)), temperature), atol=1e-5
    )
    np.testing.assert_array_equal(said(found, "calibrated").argmax(1), said(found).argmax(1))
    bare = tmp_path / "bare"
    shutil.copytree(runs["fedavg"], bare)
    RunFolder(bare).predictions_file.unlink()
    run = open_catalogue(bare)
    again = fit_calibration(run, run.load_model(), tmp_path)
    assert isinstance(again, Calibration)
    assert (again.images, again.test_images) == (validation, test)
    assert again.temperature == pytest.approx(temperature, rel=1e-3)
    assert again.test_ece == pytest.approx(found["calibration"]["test_ece"], abs=1e-4)
    without = predict_json(bare, files["fedavg", "site-1"])
    assert without["predictions"][0]["calibrated"] is None
    shown = call(bare, files["fedavg", "site-1"])
    assert "uncalibrated: the run kept no predictions of validation images; give its images with --data" in shown.stdout


def _sites(folder: Path) -> list[Any]:
    return list(open_run(folder, None).dataset.sites.values())


def test_a_personal_models_temperature_is_its_own_sites(runs: dict[str, Path]) -> None:
    run = open_catalogue(runs["local"])
    counts = {}
    for site in SITES:
        found = fit_calibration(run, run.load_model(site=site))
        assert isinstance(found, Calibration)
        counts[site] = found.images
    assert counts == {row.site: row.validation for row in run.summary.site_sizes}


def test_the_table_has_eighty_columns(runs: dict[str, Path], files: dict[tuple[str, str], Path]) -> None:
    shown = call(runs["fedavg"], files["fedavg", "site-1"])
    assert shown.exit_code == 0
    *table, model, remark = shown.stdout.splitlines()
    assert max(map(len, table)) <= 80
    assert len(table) == 1 + len(list(files["fedavg", "site-1"].iterdir()))
    assert model.startswith(f"global model of {runs['fedavg']}; calibrated by a temperature of")
    assert "not a medical device" in remark


def test_heat_maps_are_drawn_and_tell_themselves_in_words(
    runs: dict[str, Path], files: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    place = files["phantom", "site-1"]
    found = predict_json(runs["phantom"], place / "0000.png", place / "0001.png", "--grad-cam", tmp_path / "maps")
    assert stat.S_IMODE((tmp_path / "maps").stat().st_mode) == 0o700
    for row in found["predictions"]:
        with Image.open(row["grad_cam"]) as picture:
            assert row["class"] in picture.info["Title"]
            assert "The network looks " in picture.info["Description"]
    assert len({row["grad_cam"] for row in found["predictions"]}) == 2
    assert not (tmp_path / "none").exists()
    assert "needs a network with convolutions" in refused(runs["fedavg"], place, "--grad-cam", tmp_path / "none")
    assert "an ensemble is several" in refused(runs["ensemble"], place, "--grad-cam", tmp_path / "none")


@pytest.mark.parametrize(
    ("run", "arguments", "sentence"),
    [
        ("fedavg", ["--model", "student"], "this run has no model 'student'; choose with --model: global"),
        ("fedavg", ["--site", "site-9"], "--site is 'site-9', which is no site of this run; there are: site-1, site-2"),
        ("fedavg", ["--site", "site-1"], "the global model is the same for all its sites; leave --site out\n"),
        ("both", ["--model", "global", "--site", "site-1"], "leave --site out, or set --model personal"),
        ("local", [], "sites have models of their own; say whose with --site NAME\n"),
        ("both", [], "say whose with --site NAME, or choose with --model: global"),
        ("clusters", [], "say which with --model high or low, or whose with --site NAME"),
        ("fedavg", ["--device", "tpu"], "engine.device is 'tpu'"),
    ],
)
def test_a_bad_argument_gets_one_sentence(run: str, arguments: list[str], sentence: str, runs: dict[str, Path]) -> None:
    assert sentence in refused(runs[run], "some.png", *arguments)


def test_a_damaged_run_gets_one_sentence(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "holds no run" in refused(tmp_path, "some.png")
    for name in ("local", "fedavg", "refined"):
        shutil.copytree(runs[name], tmp_path / name)
    shutil.rmtree(tmp_path / "local" / "sites")
    assert "the memory of site site-1 is not in" in refused(tmp_path / "local", "some.png", "--site", "site-1")
    shutil.copy(runs["ensemble"] / "model.safetensors", tmp_path / "fedavg")
    assert "is not the model of this run" in refused(tmp_path / "fedavg", "some.png")
    (tmp_path / "fedavg" / "result.json").unlink()
    assert "has not ended" in refused(tmp_path / "fedavg", "some.png")
    (tmp_path / "refined" / "student.safetensors").write_bytes(b"nothing")
    assert "student.safetensors cannot be read" in refused(tmp_path / "refined", "some.png")
