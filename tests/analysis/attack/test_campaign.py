"""The command: a table, a document, galleries; one sentence for every mistake."""

from __future__ import annotations

import csv
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import polyclinic
from polyclinic.analysis.attack.campaign import format_verdict
from polyclinic.analysis.attack.feature_inversion import InversionScores
from polyclinic.core.rng import Stream
from polyclinic.runs.finished_run import open_run
from tests import commands
from tests.small import TINY

HOSPITALS = [
    {"name": "harbour", "vendor": "film", "patients": 20, "malignant": 0.5},
    {"name": "Hill Side", "vendor": "silicon", "patients": 16, "malignant": 0.5},
    {"name": "small", "vendor": "film", "patients": 4, "malignant": 0.5},
]
PHANTOM = {**TINY, "data": {"name": "phantom", "size": 32, "hospitals": HOSPITALS}, "model": {"name": "cnn_c"}}
QUICK = ("--steps", "4", "--iterations", "3")


def finish(folder: Path, **values: Any) -> Path:
    polyclinic.run(polyclinic.Recipe.from_values({**PHANTOM, "rounds": 1, **values}), out=folder)
    return folder


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(tmp_path_factory.mktemp("runs") / "phantom")


@pytest.fixture
def run(phantom: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    shutil.copytree(phantom, tmp_path / "run")
    return tmp_path / "run"


call, refused = partial(commands.call, "attack"), partial(commands.refused, "attack")


def test_a_run_is_attacked_shown_and_kept(run: Path) -> None:
    sites = ("--site", "harbour", "--site", "Hill Side")
    shown = call(run, *sites, *QUICK, "--stages", "1,3", "--clip", "1", "--noise", "1", "--inversion")
    assert shown.exit_code == 0, shown.output
    assert "images from features, at harbour, Hill Side" in shown.stdout
    assert "images from gradients" in shown.stdout
    *_, sentence, written = [line for line in shown.stdout.splitlines() if line.strip()]
    assert written.startswith("written: ")
    table = shown.stdout.splitlines()[:-2]
    assert max(map(len, table)) <= 80
    answer = json.loads((run / "attack" / "attack.json").read_text(), parse_constant=pytest.fail)
    assert answer["verdict"] == sentence
    assert answer["frechet_network"] == "the last stage of the run's own network"
    assert list(answer["sites"]) == ["harbour", "Hill Side"]
    assert list(answer["mean"]) == list(answer["leaks"]) == ["1", "3"]
    for found in answer["sites"].values():
        assert [row["features"] for row in found["stages"].values()] == [[8, 16, 16], [32]]
        assert all(
            set(row["guesses"]) == {"decoder", "protected", "untrained", "nearest", "mean"}
            for row in found["stages"].values()
        )
        assert found["gradients"]["method"] == "search"
        assert found["gradients"]["label_accuracy"] == 1.0
    names = [(site, what) for site in ("harbour", "hill-side") for what in ("stage1", "stage3", "gradient")]
    kept = {f"gallery-{site}-{what}.png" for site, what in names}
    assert {path.name for path in (run / "attack").iterdir()} == kept | {"attack.json"}
    with Image.open(run / "attack" / "gallery-harbour-stage1.png") as picture:
        assert picture.info["Title"].startswith("harbour, features of stage 1")


def test_the_seed_decides_everything(run: Path) -> None:
    arguments = (run, "--site", "harbour", "--stages", "2", *QUICK, "--inversion", "--batch", "4", "--json")
    first, again, other = call(*arguments), call(*arguments), call(*arguments, "--seed", "9")
    assert json.loads(first.stdout) == json.loads((run / "attack" / "attack.json").read_text()) | json.loads(
        again.stdout
    )
    assert first.stdout == again.stdout != other.stdout
    assert list(json.loads(other.stdout)["mean"]) == ["2"]
    gradients = json.loads(other.stdout)["sites"]["harbour"]["gradients"]
    assert (gradients["images"], gradients["attacked"]) == (4, 12)


def test_a_dense_network_gives_images_away_by_its_gradients(tmp_path: Path) -> None:
    run = finish(tmp_path / "run", model={"name": "mlp"})
    found = json.loads(call(run, "--site", "harbour", *QUICK, "--inversion", "--json").stdout)
    gradients = found["sites"]["harbour"]["gradients"]
    assert gradients["method"] == "exact"
    assert gradients["guesses"]["plain"]["l2"] < 1e-3
    assert gradients["guesses"]["protected"]["l2"] > gradients["guesses"]["mean"]["l2"]
    assert "gradients give images away; clipped and noised they do not" in found["verdict"]


def card(share: float) -> dict[str, float]:
    return dict.fromkeys(("cpu", "memory", "battery", "network"), share)


CLUSTERS = {
    "clusters": {"high": {"min_score": 0.5, "model": "cnn_c"}, "low": {"min_score": 0, "model": "mlp"}},
    "capability": {"profiles": {"harbour": card(0.9), "small": card(0.1)}},
}


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "fedbn", "model": {"name": "mobilenet_v2"}},
        {"algorithm": "local"},
        {"model": {"name": "cnn_c", "split_after": 1}},
        CLUSTERS,
    ],
    ids=["fedbn", "local", "cut", "clusters"],
)
def test_a_site_is_attacked_with_the_weights_it_computes_with(values: dict[str, Any], tmp_path: Path) -> None:
    """Whole, they predict what the run says its model predicts."""
    run = finish(tmp_path / "run", **values)
    past = open_run(run, None)
    for site in ("harbour", "small"):
        name, module = past.site_network(site)
        holdings = past.dataset.sites[site].test
        images, labels = holdings.batch(torch.arange(len(holdings)))
        accuracy = float((module(images).argmax(1) == labels).double().mean())
        assert accuracy == pytest.approx(past.summary.sites[site][name]["test"].value("accuracy"))
        other = past.untrained_network(site, Stream(5))
        assert [p.shape for p in other.parameters()] == [p.shape for p in module.parameters()]
        assert not torch.equal(next(other.parameters()), next(module.parameters()))


def test_the_frechet_distance_may_be_that_of_mobilenet(run: Path, tmp_path: Path) -> None:
    module = polyclinic.models.build_model("mobilenet_v2", classes=2, channels=3, size=32, seed=Stream(1))
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    arguments = (run, "--site", "harbour", "--stages", "1", "--images", "16", *QUICK, "--json")
    found = json.loads(call(*arguments, "--fid-weights", tmp_path / "weights.safetensors").stdout)
    assert "MobileNetV2 (weights.safetensors)" in found["frechet_network"]
    assert "no weights file" in refused(*arguments[:-1], "--fid-weights", tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--site", "nowhere"], "there is no site 'nowhere' in this run; choose among Hill Side, harbour, small"),
        (["--stages", "4"], "--stages has 4, but the network of Hill Side has stages 1 to 3"),
        (["--stages", "0"], "--stages has 0"),
        (["--stages", "first"], "write numbers separated by commas"),
        (["--site", "small"], "site small has"),
        (["--noise", "1"], "also give --clip"),
        (["--clip", "-1"], "--clip is -1.0; choose a positive norm"),
        (["--clip", "nan"], "choose a positive norm"),
        (["--device", "tpu"], "engine.device is 'tpu'"),
    ],
)
def test_a_bad_argument_gets_one_sentence(arguments: list[str], answer: str, run: Path) -> None:
    assert answer in refused(run, *arguments)
    assert not (run / "attack").exists()


def test_a_folder_that_is_no_finished_run_gets_one_sentence(run: Path, tmp_path: Path) -> None:
    assert "nowhere holds no run" in refused(tmp_path / "nowhere")
    (run / "result.json").rename(run / "elsewhere.json")
    assert "has not ended; go on with: polyclinic resume" in refused(run)
    (run / "elsewhere.json").rename(run / "result.json")
    weights = load_file(run / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, run / "model.safetensors")
    assert "is not the model of this run" in refused(run)
    (run / "model.safetensors").write_bytes(b"nothing")
    assert "model.safetensors cannot be read" in refused(run)
    (run / "model.safetensors").unlink()
    assert "model.safetensors cannot be read" in refused(run)


def test_images_that_are_gone_or_others_get_one_sentence(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    write_images(place, 60)
    data = {"name": "table", "path": str(place / "labels.csv"), "size": 8, "partition": {"by": "iid", "sites": 2}}
    run = finish(tmp_path / "run", data=data)
    write_images(place, 48)
    assert "are not those of the run" in refused(run)
    shutil.rmtree(place)
    assert "labels.csv" in refused(run)


def write_images(folder: Path, number: int) -> None:
    generator = np.random.default_rng(number)
    with open(folder / "labels.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "patient"])
        for row in range(number):
            Image.fromarray(generator.integers(0, 255, (12, 12), np.uint8)).save(folder / f"{row}.png")
            table.writerow([f"{row}.png", "ab"[row % 2], f"p{row}"])


def figures(ssim: float) -> InversionScores:
    return InversionScores(ssim, ssim, 0.1, 0.1, 0.5, 0.5, 1.0)


def test_the_verdict_is_one_sentence_about_every_stage() -> None:
    means = {n: {"decoder": figures(0.9 - n / 10), "mean": figures(0.2), "nearest": figures(0.3)} for n in (1, 2, 3)}
    answer = format_verdict(means, {1: {"decoder": 2}, 2: {"decoder": 1}, 3: {"decoder": 0}}, [])
    assert answer.startswith(
        "Features of stages 1 and 2 give images away (stage 1: SSIM 0.80, L2 0.10, 50% recognised; without a decoder "
        "at best SSIM 0.30, L2 0.10, 50% recognised)"
    )
    assert "makes nothing of stage 3" in answer
    hidden = format_verdict(means, {n: {"decoder": 1, "protected": n == 1} for n in means}, [])
    assert hidden.endswith("as protected here, stage 1 still leaks.")
    assert "as protected here, none leaks" in format_verdict(
        means, {n: {"decoder": 1, "protected": 0} for n in means}, []
    )
