"""Models for other programs: the same function from plain files, and a card that says what it must and no more."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import polyclinic
from polyclinic.analysis.export import NEEDED, OPSET, RealScattering, build_onnx, collect_weights, export_model
from polyclinic.analysis.predict import Preprocessing, RunModel, open_catalogue
from polyclinic.config.recipe import ModelSection
from polyclinic.core.rng import Stream
from polyclinic.data.loading.image_options import Preparation
from polyclinic.evaluation.calibration import Uncalibrated
from polyclinic.models import MODELS, build_model
from polyclinic.models.modifications import enable_checkpointing
from polyclinic.models.scattering import Scattering
from tests import commands
from tests.small import TINY

call, refused = partial(commands.call, "export"), partial(commands.refused, "export")
with_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason='ONNX is not installed: pip install "polyclinic[export]"'
)
PLAN = {"noise": 1.0, "delta": 1e-4, "randomness": "seed"}
HOSPITALS = [{"name": name, "vendor": "film", "patients": 30, "malignant": 0.5} for name in ("harbour", "hillside")]
PHANTOM = {"name": "phantom", "size": 32, "hospitals": HOSPITALS}
WISHES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "alone": {"algorithm": "local"},
    "other": {"algorithm": "local", "seed": 3},
    "together": {"ensemble": True},
    "private": {"privacy": PLAN, "seed": 8675309},
    "phantom": {"data": PHANTOM, "model": {"name": "cnn_c", "split_after": 1}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    for name, values in WISHES.items():
        polyclinic.run(polyclinic.Recipe.from_values({**TINY, "name": name, **values}), out=place / name)
    return {name: place / name for name in WISHES}


def exported(run: Path, folder: Path, *arguments: str | Path) -> Path:
    result = call(run, "--out", folder, *arguments)
    assert result.exit_code == 0, result.output
    return folder


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=Stream(4).generator())


def test_the_weights_equal_the_plain_network(runs: dict[str, Path], tmp_path: Path) -> None:
    """By its own names, wherever the recipe cuts it; built from what preprocessing.json says, it is the same."""
    folder = exported(runs["phantom"], tmp_path / "out")
    says = json.loads((folder / "preprocessing.json").read_text())
    _, channels, size, _ = says["input"]["shape"]
    network = build_model(
        says["network"]["name"], classes=len(says["classes"]), channels=channels, size=size, seed=Stream(99)
    )
    network.load_state_dict(load_file(folder / "model.safetensors"))
    images = noise(3, channels, size, size)
    with torch.no_grad():
        torch.testing.assert_close(
            network.eval()(images), open_catalogue(runs["phantom"]).load_model().compute_probabilities(images)[1]
        )
    assert says["classes"] == ["benign", "malignant"]


def test_an_ensembles_members_are_all_there_without_their_sites_names(runs: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(exported(runs["together"], tmp_path / "out") / "model.safetensors")
    assert {name.split(".")[1] for name in tensors} == {"0", "1", "2"}
    assert not any("site" in name for name in tensors)
    run = open_catalogue(runs["together"])
    images = noise(2, 1, 8, 8)
    logits = [
        images.flatten(1) @ tensors[f"members.{n}.head.weight"].T + tensors[f"members.{n}.head.bias"] for n in range(3)
    ]
    mean = torch.stack([torch.softmax(each, -1) for each in logits]).mean(0)
    torch.testing.assert_close(run.load_model("ensemble").compute_probabilities(images)[0], mean)


def test_what_is_said_of_preparing_is_all_that_is_needed(runs: dict[str, Path], tmp_path: Path) -> None:
    says = json.loads((exported(runs["phantom"], tmp_path / "out") / "preprocessing.json").read_text())
    prepared = open_catalogue(runs["phantom"]).preprocessing
    stored = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8, generator=Stream(1).generator())
    scale = says["scale"]
    by_hand = (stored.float() / scale["divide_by"] - scale["mean"]) / scale["std"]
    torch.testing.assert_close(by_hand, prepared.normalise(stored))
    assert (says["resize"]["size"], says["resize"]["fit"]) == (32, prepared.preparation.fit)
    assert says["input"]["shape"] == ["batch", 1, 32, 32]


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 1), (33, 3)])
def test_scattering_in_real_numbers_is_scattering(size: int, channels: int) -> None:
    fixed = Scattering(channels, size)
    images = noise(2, channels, size, size)
    torch.testing.assert_close(RealScattering(fixed)(images), fixed(images), atol=1e-5, rtol=1e-4)


QUICK = ("cnn_c", "scattering_linear")
"""One with and one without scattering; `linear` is exported below."""


@with_onnx
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.heavy) for name in MODELS]
)
def test_every_network_is_the_same_function_as_onnx(name: str) -> None:
    """Of any number of images at a time; its nodes tell nothing of the machine that wrote them."""
    import onnx
    from onnxruntime import InferenceSession

    size = max(16, MODELS[name].min_size)
    network = build_model(name, classes=3, channels=1, size=size, seed=Stream(1)).eval().requires_grad_(False)
    section, device = ModelSection(name=name), torch.device("cpu")
    model = RunModel(
        "global",
        None,
        "global",
        (),
        (enable_checkpointing(network) if name == "resnet22" else network,),
        (section,),
        device,
    )
    preprocessing = Preprocessing(Preparation(size=size, channels=1), 0.0, 1.0)
    data = build_onnx(model, preprocessing, ("a", "b", "c"), 1.7)
    session = InferenceSession(data, providers=["CPUExecutionProvider"])
    images = noise(5, 1, size, size)
    logits, probabilities = (np.asarray(found) for found in session.run(None, {"images": images.numpy()}))
    expected = model.compute_probabilities(images)[1].double()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    np.testing.assert_allclose(probabilities, torch.softmax(expected / 1.7, -1), rtol=0, atol=1e-5)
    proto = onnx.load_model_from_string(data)
    onnx.checker.check_model(proto)
    assert {entry.version for entry in proto.opset_import if not entry.domain} == {OPSET}
    assert {prop.key: prop.value for prop in proto.metadata_props}["temperature"] == "1.7"
    for weights in proto.graph.initializer:
        weights.ClearField("raw_data")  # whose bytes may spell anything
    assert b".py" not in proto.SerializeToString()


@with_onnx
@pytest.mark.parametrize("run", ["fedavg", "together"])
def test_onnx_gives_the_predictions_of_predict(run: str, runs: dict[str, Path], tmp_path: Path) -> None:
    from onnxruntime import InferenceSession

    folder = exported(runs[run], tmp_path / "out", "--onnx")
    session = InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    images = noise(4, 1, 8, 8)
    logits, probabilities = (np.asarray(found) for found in session.run(None, {"images": images.numpy()}))
    temperature = json.loads((folder / "preprocessing.json").read_text())["output"]["temperature"]
    plain, raw = open_catalogue(runs[run]).load_model().compute_probabilities(images)
    assert temperature != 1
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), plain, atol=1e-5)
    np.testing.assert_allclose(probabilities, torch.softmax(raw / temperature, -1), atol=1e-5)


def card_of(run: Path, folder: Path, *arguments: str | Path) -> str:
    return (exported(run, folder, *arguments) / "MODEL_CARD.md").read_text()


def test_the_card_has_every_sites_figures_with_intervals(runs: dict[str, Path], tmp_path: Path) -> None:
    found, summary = card_of(runs["fedavg"], tmp_path / "out"), open_catalogue(runs["fedavg"]).summary
    for site in summary.site_sizes:
        scores = summary.sites[site.site]["global"]["test"]
        low, high = scores.interval("accuracy")
        row = f"| {site.site} | {scores.n} | {scores.value('accuracy'):.3f} [{low:.3f}, {high:.3f}] |"
        assert row in found
        assert f"| {site.site} | ✓ | {site.train} | {site.validation} | {site.test} |" in found
    for words in ("not a medical device", "Temperature scaling", "**Nothing is claimed.**", summary.sha256):
        assert words in found
    assert found.count("\n# ") == 0


def test_the_card_names_the_sums_of_the_files(runs: dict[str, Path], tmp_path: Path) -> None:
    found = card_of(runs["fedavg"], tmp_path / "out")
    sums = dict(re.findall(r"\| (\S+) \| `([0-9a-f]{64})` \|", found.split("## Files")[1]))
    assert sums == {
        name: hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "preprocessing.json")
    }


def test_the_card_lists_sites_that_are_worse_off_than_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    unknown = card_of(runs["fedavg"], tmp_path / "unknown")
    assert "better off training alone is not known" in unknown
    found = card_of(runs["fedavg"], tmp_path / "out", "--alone", runs["alone"])
    ours, theirs = (open_catalogue(runs[name]).summary.sites for name in ("fedavg", "alone"))
    worse = []
    for site in ours:
        change = ours[site]["global"]["test"].value("accuracy") - theirs[site]["personal"]["test"].value("accuracy")
        assert f"| {change:+.3f} | {'worse off' if change < 0 else 'better off' if change > 0 else 'as good'}" in found
        worse += [site] if change < 0 else []
    limit = f"Worse off than when training alone: {', '.join(worse)}."
    assert (limit in found) == bool(worse)
    assert "a run on other images" in refused(runs["fedavg"], "--out", tmp_path / "no", "--alone", runs["other"])
    assert "a run of fedavg; give one of `local`" in refused(
        runs["fedavg"], "--out", tmp_path / "no", "--alone", runs["fedavg"]
    )
    assert not (tmp_path / "no").exists()


def test_a_private_runs_card_keeps_the_classes_back(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = exported(runs["private"], tmp_path / "out")
    found = (folder / "MODEL_CARD.md").read_text()
    for words in (
        "ε would be ",
        "no guarantee: the noise comes from a public seed",
        "What is NOT protected",
        "| withheld |",
    ):
        assert words in found
    for site in open_catalogue(runs["private"]).summary.site_sizes:
        assert ", ".join(f"{name} {count}" for name, count in site.classes.items()) not in found


def test_nothing_of_patients_or_of_the_disk_is_in_any_file(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = exported(runs["phantom"], tmp_path / "out")
    for path in folder.iterdir():
        data = path.read_bytes()
        assert not re.search(rb"(harbour|hillside)-\d", data)
        assert str(tmp_path).encode() not in data
        assert str(runs["phantom"]).encode() not in data


def test_names_cannot_change_the_markup_of_the_card(runs: dict[str, Path], tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script> | **certified**\n# A medical device"
    run = open_catalogue(runs["fedavg"])
    run = replace(run, summary=run.summary.model_copy(update={"name": nasty}))
    export_model(run, run.load_model(), Uncalibrated("nothing was kept"), tmp_path / "out")
    found = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "<script>" not in found
    assert "\n# A" not in found
    assert "**certified**" not in found
    assert "**Uncalibrated**: nothing was kept" in found


def test_a_personal_models_card_is_about_its_site(runs: dict[str, Path], tmp_path: Path) -> None:
    found = card_of(runs["alone"], tmp_path / "out", "--site", "site-2")
    figures = found.split("## How good it is")[1].split("## ")[0]
    assert "| site-2 |" in figures
    assert "| site-1 |" not in figures
    assert "the personal model of site-2" in found


def test_nothing_is_overwritten_unless_asked(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = exported(runs["fedavg"], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "holds model.safetensors already" in refused(runs["together"], "--out", folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "model.onnx").write_bytes(b"of another model")
    (folder / "notes.txt").write_text("mine")
    exported(runs["together"], folder, "--force")
    assert {path.name for path in folder.iterdir()} == {*before, "notes.txt"}
    assert (folder / "model.safetensors").read_bytes() == collect_weights(open_catalogue(runs["together"]).load_model())
    assert "cannot write" in refused(runs["fedavg"], "--out", "/dev/null/here")


def test_without_onnx_an_error_names_the_packages_to_install(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyclinic.analysis.export.find_spec", lambda name: None)
    message = refused(runs["fedavg"], "--out", tmp_path / "out", "--onnx")
    assert 'pip install "polyclinic[export]"' in message
    assert not (tmp_path / "out").exists()
