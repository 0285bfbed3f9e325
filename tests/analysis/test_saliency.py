"""Where networks look: Grad-CAM against its closed form, the choice of cases, and the command."""

from __future__ import annotations

import json
import stat
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor, nn

from polyclinic.analysis.saliency import (
    BINS,
    CaseGroup,
    RunPredictions,
    SaliencyOptions,
    explain_runs,
    grad_cam,
    group_by_agreement,
    measure_intensities,
    predict_test_images,
    resize_map,
    split_at_stage,
)
from polyclinic.analysis.saliency_figure import describe_map, locate_map
from polyclinic.core.rng import Stream
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.models.groupnorm_cnn import ResidualExtractor
from polyclinic.runs.finished_run import open_run
from tests import commands
from tests.analysis.test_features import DIGITS, HOSPITALS, finish

CLASSES = 3


class Branching(nn.Module):
    """A convolution and pooling, not written as a chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.conv(images)).flatten(1)
        return pooled


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=Stream(7).generator())


def one_convolution(a_chain: bool) -> tuple[Classifier, nn.Conv2d, nn.Linear]:
    branching, head = Branching(), nn.Linear(5, CLASSES)
    for weights in (branching.conv.weight, head.weight):
        weights.data = noise(*weights.shape)
    layers = OrderedDict(conv=branching.conv, pool=branching.pool, flatten=nn.Flatten())
    network = Classifier(nn.Sequential(layers) if a_chain else branching, head)
    return network.eval().requires_grad_(False), branching.conv, head


@pytest.mark.parametrize("a_chain", [True, False])
def test_one_convolution_has_a_closed_form(a_chain: bool) -> None:
    network, conv, head = one_convolution(a_chain)
    images, classes = noise(4, 2, 6, 7), torch.tensor([0, 2, 1, 2])
    weighted = torch.einsum("nk,nkij->nij", head.weight[classes], conv(images))
    torch.testing.assert_close(grad_cam(network, images, classes), weighted.clamp(min=0) / (6 * 7))
    assert (weighted > 0).any()
    assert (weighted < 0).any()


def test_a_network_with_a_skip_connection_gives_maps_where_both_paths_meet() -> None:
    network = (
        build_model("groupnorm_cnn", classes=CLASSES, channels=1, size=24, seed=Stream(2)).eval().requires_grad_(False)
    )
    extractor, images = network.extractor, noise(3, 1, 24, 24)
    assert isinstance(extractor, ResidualExtractor)
    early = extractor.block1(images)
    late = extractor.pool3(extractor.block3(extractor.pool2(extractor.block2(extractor.pool1(early)))))
    maps = (late + extractor.skip(early)).requires_grad_()
    logits = network.head(extractor.relu(extractor.dense(maps.flatten(1))))
    (slope,) = torch.autograd.grad(logits[:, 1].sum(), maps)
    expected = (slope.mean((2, 3), keepdim=True) * maps).sum(1).clamp(min=0).detach()
    torch.testing.assert_close(grad_cam(network, images, torch.tensor([1, 1, 1])), expected)


@pytest.mark.parametrize(
    ("name", "places"),
    [("cnn_b", 8), ("groupnorm_cnn", 4), ("resnet22", 2), ("mobilenet_v2", 2)],
)
def test_the_last_maps_with_several_places_are_shown_and_nothing_is_negative(name: str, places: int) -> None:
    network = build_model(name, classes=CLASSES, channels=1, size=32, seed=Stream(1)).eval().requires_grad_(False)
    images = noise(2, 1, 32, 32)
    torch.testing.assert_close(split_at_stage(network, images)[0](images), network(images))
    found = grad_cam(network, images, torch.tensor([0, 2]))
    assert found.shape == (2, places, places)
    assert float(found.min()) >= 0


def test_an_earlier_stage_has_finer_maps() -> None:
    network = build_model("resnet22", classes=CLASSES, channels=1, size=64, seed=Stream(1)).eval().requires_grad_(False)
    sides = [grad_cam(network, noise(1, 1, 64, 64), torch.tensor([0]), stage).shape[-1] for stage in range(1, 6)]
    assert sides == sorted(sides, reverse=True)
    assert sides[0] > sides[1] > sides[2]


@pytest.mark.parametrize("a_chain", [True, False])
def test_a_constant_network_looks_nowhere(a_chain: bool) -> None:
    network, _, head = one_convolution(a_chain)
    head.weight.zero_()
    (found,) = grad_cam(network, noise(1, 2, 6, 6), torch.tensor([1]))
    assert not found.any()
    heat = resize_map(found, torch.zeros(1, 12, 12))
    assert heat.shape == (12, 12)
    assert not heat.any()
    assert locate_map(heat) is None
    assert describe_map(heat).startswith("nowhere")


def test_a_map_is_described_in_words() -> None:
    corner = torch.zeros(4, 4)
    corner[0, 3] = 5
    heat = resize_map(corner, torch.zeros(3, 16, 16))
    assert heat.max() == 1
    assert describe_map(heat).startswith("to the upper right, at ")
    assert describe_map(np.ones((8, 8))) == "at the centre, at 100% of the image"


def made_up(runs: int, images: int, seed: int) -> RunPredictions:
    rng = np.random.default_rng(seed)
    site = np.sort(rng.integers(0, 4, images))
    row = np.arange(images) - np.searchsorted(site, site)
    return RunPredictions(site, row, rng.integers(0, 2, images), rng.dirichlet([1, 1], (runs, images)))


def refuse_uneven(group: CaseGroup, answers: RunPredictions, belongs: Any, most: int) -> None:
    """All of the group, at most so many, and no site has two more than another that had some left."""
    there = np.flatnonzero([belongs(image) for image in range(len(answers.truth))])
    assert set(group.shown.tolist()) <= set(there.tolist())
    assert len(set(group.shown.tolist())) == len(group.shown) == min(most, len(there))
    had, shown = (np.bincount(answers.site[some], minlength=4) for some in (there, group.shown))
    assert shown[shown < had].min(initial=most) >= shown.max() - 1


@given(st.integers(2, 4), st.integers(1, 60), st.integers(1, 6), st.integers(0, 99))
def test_cases_are_grouped_by_agreement_of_runs(runs: int, images: int, most: int, seed: int) -> None:
    answers = made_up(runs, images, seed)
    right = [[answers.probabilities[r, i].argmax() == answers.truth[i] for r in range(runs)] for i in range(images)]
    names = [*map(str, range(runs - 1)), "ours"]
    belongs = {
        "right by all": lambda i: all(right[i]),
        "wrong by all": lambda i: not any(right[i]),
        "right by ours alone": lambda i: right[i][-1] and not any(right[i][:-1]),
        "wrong by ours alone": lambda i: not right[i][-1] and all(right[i][:-1]),
    }
    found = group_by_agreement(answers, names, most, Stream(seed))
    assert [group.name for group in found] == list(belongs)
    for group in found:
        refuse_uneven(group, answers, belongs[group.name], most)
        assert group.images == sum(map(belongs[group.name], range(images)))
    for group, again in zip(found, group_by_agreement(answers, names, most, Stream(seed)), strict=True):
        np.testing.assert_array_equal(group.shown, again.shown)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 99))
def test_one_run_shows_its_most_and_least_certain_cases(images: int, most: int, seed: int) -> None:
    answers = made_up(1, images, seed)
    certain, right = answers.probabilities[0].max(axis=1), answers.is_correct[0]
    groups = {group.name: group for group in group_by_agreement(answers, ["alone"], most, Stream(0))}
    for explain_json, mask in (("right", right), ("wrong", ~right)):
        middle = np.median(certain[mask]) if mask.any() else 0.5
        high, low = groups[f"{explain_json}, most certain"], groups[f"{explain_json}, least certain"]
        refuse_uneven(high, answers, lambda i, mask=mask, middle=middle: mask[i] and certain[i] >= middle, most)
        refuse_uneven(low, answers, lambda i, mask=mask, middle=middle: mask[i] and certain[i] < middle, most)
        assert high.images == low.images == mask.sum()
        if mask.sum() > 1:
            assert certain[mask].max() in certain[high.shown]
            assert certain[mask].min() in certain[low.shown]
        for group, sign in ((high, 1), (low, -1)):
            for site in np.unique(answers.site[group.shown]):
                shown, here = (some[answers.site[some] == site] for some in (group.shown, np.flatnonzero(mask)))
                np.testing.assert_array_equal(
                    np.sort(sign * certain[shown]), np.sort(sign * certain[here])[-len(shown) :]
                )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    cards = {f"site-{n}": dict.fromkeys(("cpu", "memory", "battery", "network"), n / 4) for n in (1, 2, 3)}
    clusters = {"high": {"min_score": 0.5, "model": "cnn_b"}, "low": {"min_score": 0, "model": "cnn_c"}}
    no_test = {"train": 0.8, "validation": 0.2, "test": 0.0}
    wishes: dict[str, dict[str, Any]] = {
        "fedavg": {},
        "longer": {"rounds": 4},
        "local": {"algorithm": "local", "rounds": 2},
        "clusters": {"clusters": clusters, "capability": {"profiles": cards}, "rounds": 2},
        "cut": {"model": {"name": "cnn_c", "split_after": 1}},
        "mlp": {"model": {"name": "mlp"}},
        "other seed": {"seed": 5},
        "no test": {"data": {**DIGITS["data"], "split": no_test}},
        "phantom": {"data": {"name": "phantom", "size": 32, "hospitals": HOSPITALS}},
    }
    return {name: finish(place / name, name=name, **values) for name, values in wishes.items()}


call, refused = partial(commands.call, "explain"), partial(commands.refused, "explain")
explain_json = partial(commands.document, "explain")


@pytest.mark.parametrize("name", ["fedavg", "local", "clusters", "cut"])
def test_predictions_equal_the_evaluated_ones_of_the_run(name: str, runs: dict[str, Path]) -> None:
    """At every site: with its own model where sites have their own, and its cluster's network."""
    past = open_run(runs[name], None)
    answers = predict_test_images([past], SaliencyOptions())
    for number, site in enumerate(past.dataset.sites):
        here = answers.site == number
        (judged,) = (found["test"].value("accuracy") for found in past.summary.sites[site].values())
        assert answers.is_correct[0, here].mean() == pytest.approx(judged)
        np.testing.assert_array_equal(answers.truth[here], past.dataset.sites[site].test.labels)


@pytest.mark.parametrize("of", ["truth", "prediction", "7"])
def test_the_class_that_is_explained_can_be_chosen(of: str, runs: dict[str, Path]) -> None:
    past = open_run(runs["local"], None)
    found = explain_runs([past], SaliencyOptions(of=of, cases=2), Stream(1))
    for case in found.cases:
        (look,) = case.saliencies
        assert look.explained == {"truth": case.truth, "prediction": look.predicted, "7": 7}[of]
        image, label = past.dataset.sites[case.site].test.batch(torch.tensor([case.row]))
        assert case.truth == int(label)
        network = past.site_network(case.site)[1]
        torch.testing.assert_close(grad_cam(network, image, torch.tensor([look.explained]))[0], look.map)
        assert look.probability == pytest.approx(float(network(image).softmax(1).max()), abs=1e-6)


def test_runs_are_shown_side_by_side(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "here" / "explained"
    shown = call(runs["fedavg"], runs["clusters"], runs["longer"], "--cases", "2", "--out", folder)
    assert shown.exit_code == 0, shown.output
    *lines, written = shown.stdout.splitlines()
    assert written == f"written: {folder} (the figures show patients' images; do not share them)"
    assert max(len(line) for line in lines if line.startswith((" ", "right", "wrong"))) <= 80
    assert "fedavg: maps of 2 × 2 positions show little" in shown.stdout
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = json.loads((folder / "explain.json").read_text())
    for group in found["groups"]:
        assert f"{group['name']}: " in shown.stdout
        assert group["shown"] == sum(case["group"] == group["name"] for case in found["cases"])
    for case in found["cases"]:
        right = [run["prediction"] == case["truth"] for run in case["runs"]]
        assert right == [run["right"] for run in case["runs"]]
        if case["group"] == "right by longer alone":
            assert right == [False, False, True]
    with Image.open(folder / "gallery.png") as picture:
        assert picture.info["Description"] == found["pictures"]["gallery.png"]["alternative"]
        assert all(case["alternative"] in picture.info["Description"] for case in found["cases"])
    assert not (folder / "histograms.png").exists()


def test_the_seed_decides_everything(runs: dict[str, Path], tmp_path: Path) -> None:
    both = (runs["fedavg"], runs["longer"], "--cases", "1")
    first, again = (explain_json(*both, "--out", tmp_path / name) for name in ("first", "again"))
    assert first == again
    assert first["seed"] == 0
    assert (tmp_path / "first/gallery.png").read_bytes() == (tmp_path / "again/gallery.png").read_bytes()
    past_runs = [open_run(runs[name], None) for name in ("fedavg", "longer")]
    draws = {
        tuple((case.site, case.row) for case in explain_runs(past_runs, SaliencyOptions(cases=1), Stream(seed)).cases)
        for seed in range(4)
    }
    assert len(draws) > 1


def test_histograms_count_the_stored_pixels(runs: dict[str, Path], tmp_path: Path) -> None:
    found = explain_json(runs["phantom"], "--histograms", "--cases", "1", "--out", tmp_path)
    assert (tmp_path / "histograms.png").stat().st_size > 10_000
    assert "harbour mean" in found["pictures"]["histograms.png"]["alternative"]
    consortium = open_run(runs["phantom"], None).dataset
    parts: dict[str, Any] = {name: site.train for name, site in consortium.sites.items()}
    stored = {name: part.stored_batch(torch.arange(len(part)))[0] for name, part in parts.items()}
    low, high = min(float(v.min()) for v in stored.values()), max(float(v.max()) for v in stored.values())
    for name, site in measure_intensities(consortium, Stream(0)).items():
        pixels = stored[name].double().numpy().ravel()
        assert site.images == len(stored[name])
        assert site.mean == pytest.approx(pixels.mean())
        assert site.std == pytest.approx(pixels.std())
        assert site.black == pytest.approx((pixels == low).mean())
        share = np.histogram(pixels[pixels > low], BINS, (low, high))[0] / (pixels > low).sum()
        np.testing.assert_allclose([y for _, y in site.curve], 100 * share, atol=1e-9)


@pytest.mark.parametrize(
    ("run", "arguments", "sentence"),
    [
        ("fedavg", ["--of", "cat"], "--of is 'cat', which is no class; choose truth, prediction, or one of 0, 1, 2"),
        ("fedavg", ["--stage", "4"], "--stage is 4, but the network of"),
        ("fedavg", ["--stage", "0"], "has stages 1 to 3"),
        ("fedavg", ["--device", "tpu"], "engine.device is 'tpu'"),
        ("fedavg", ["--out", "/dev/null/here"], "cannot write"),
        ("mlp", [], "has no convolution, so there is no map to show"),
        ("no test", [], "no site has a test image"),
    ],
)
def test_a_bad_argument_gets_one_sentence(run: str, arguments: list[str], sentence: str, runs: dict[str, Path]) -> None:
    assert sentence in refused(runs[run], *arguments)
    assert not (runs[run] / "explain").exists()


def test_runs_that_cannot_be_compared_get_one_sentence(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "holds no run" in refused(tmp_path)
    assert "has other classes than that in" in refused(runs["fedavg"], runs["phantom"])
    assert "runs with the same data and the same seed" in refused(runs["fedavg"], runs["other seed"])
