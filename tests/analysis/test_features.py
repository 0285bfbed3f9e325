"""What features tell of sites: laws of both figures, the picture, and the command."""

from __future__ import annotations

import json
import shutil
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial.distance import cdist, directed_hausdorff
from scipy.stats import ortho_group
from torch import nn

import polyclinic
from polyclinic.analysis.features import (
    FeatureOptions,
    FeaturePoints,
    FeatureScores,
    choose_images,
    class_distance,
    compare_features,
    divide_evenly,
    embed_tsne,
    hausdorff_distances,
    measure_features,
    reduce_dimensions,
    score_site_classifier,
)
from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream
from polyclinic.evaluation import claims
from polyclinic.evaluation.comparison import mean_of_known
from polyclinic.experiments.compare import compare
from polyclinic.runs.finished_run import open_run
from tests import commands
from tests.small import TINY

SITES, CLASSES, EACH = 3, 2, 12
DIGITS = {**TINY, "rounds": 1, "model": {"name": "cnn_c"}}

HOSPITALS = [{"name": name, "vendor": "film", "patients": 8, "malignant": 0.5} for name in ("harbour", "hillside")]


def grid(each: int = EACH) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Site and class of `each` images of every class at every site."""
    site, label, _ = np.indices((SITES, CLASSES, each)).reshape(3, -1)
    return site, label


def scattered(seed: int = 0, shift: float = 0.0, opposite: bool = False) -> FeaturePoints:
    """Classes ten apart; sites of a class apart by `shift`, in other directions for other classes if `opposite`."""
    site, label = grid()
    values = np.random.default_rng(seed).normal(size=(len(site), 5))
    values[:, 0] += 10 * label
    values[:, 1] += shift * site * np.where(label == 1, -1 if opposite else 1, 1)
    return FeaturePoints(values, site, label, np.arange(len(site)))


def figures(points: FeaturePoints) -> FeatureScores:
    found = measure_features(points, class_distance(points), Stream(3))
    assert found is not None
    return found


@pytest.mark.parametrize("opposite", [False, True])
def test_sites_that_lie_apart_are_recognised(opposite: bool) -> None:
    near, far = figures(scattered(shift=8, opposite=opposite)), figures(scattered(shift=16, opposite=opposite))
    assert near.recognised.value > 0.97
    assert far.recognised.value == 1
    assert near.recognised.p == pytest.approx(1 / 201)
    assert near.apart is not None
    assert far.apart is not None
    assert near.apart.value > near.apart.chance
    assert far.apart.value > near.apart.value


def test_mixed_sites_are_recognised_as_often_as_chance_says() -> None:
    found = [figures(scattered(seed)) for seed in range(8)]
    others_at_home = (EACH - 1) / (SITES * EACH - 1)
    for one in found:
        assert one.recognised.chance == pytest.approx(others_at_home, abs=0.02)
    assert np.mean([one.recognised.value for one in found]) == pytest.approx(others_at_home, abs=0.06)
    assert np.mean([one.apart.value / one.apart.chance for one in found if one.apart]) == pytest.approx(1, abs=0.05)
    assert min(one.recognised.p for one in found) > 0.01


@pytest.mark.parametrize("change", ["scale", "turn", "move", "more dimensions"])
def test_scale_and_rotation_change_nothing(change: str) -> None:
    points = scattered(shift=2)
    values = {
        "scale": points.values * 1e-3,
        "turn": points.values @ ortho_group.rvs(5, random_state=1),
        "move": points.values + 7,
        "more dimensions": reduce_dimensions(points.values @ ortho_group.rvs(200, random_state=1)[:5]),
    }[change]
    other = figures(FeaturePoints(values, points.site, points.label, points.patient))
    for mine, theirs in zip(astuple(figures(points)), astuple(other), strict=True):
        assert mine == pytest.approx(theirs)


@pytest.mark.parametrize("dimensions", [3, 20, 400])
def test_fewer_dimensions_keep_every_distance(dimensions: int) -> None:
    values = np.random.default_rng(1).normal(size=(20, dimensions)) + 5
    turned = reduce_dimensions(values)
    assert turned.shape == (20, min(20, dimensions))
    np.testing.assert_allclose(cdist(turned, turned), cdist(values, values), atol=1e-10)


def test_hausdorff_is_that_of_scipy() -> None:
    rng = np.random.default_rng(5)
    values, site = rng.normal(size=(30, 4)), np.repeat([4, 0, 2], [17, 3, 10])
    sets = [values[site == number] for number in (0, 2, 4)]
    expected = [
        max(directed_hausdorff(sets[a], sets[b])[0], directed_hausdorff(sets[b], sets[a])[0])
        for a, b in ((0, 1), (0, 2), (1, 2))
    ]
    np.testing.assert_allclose(hausdorff_distances(cdist(values, values), site), expected)


def test_a_second_image_of_a_patient_recognises_nobody() -> None:
    once = scattered(2)
    twice = once.select_rows(np.repeat(np.arange(len(once.site)), 2))
    assert figures(twice).recognised.value == pytest.approx(figures(once).recognised.value)


def test_sites_with_one_patient_of_a_class_are_left_out() -> None:
    points = scattered(shift=16)
    alone = points.select_rows(np.flatnonzero((points.site > 0) | ((points.label == 0) & (points.patient < 1))))
    assert (figures(alone).sites, figures(alone).classes) == (2, 2)
    assert measure_features(points.select_rows(np.flatnonzero(points.site == 1)), 1.0, Stream(1)) is None
    one = points.select_rows(np.flatnonzero(points.label == 0))
    assert figures(one).apart is None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 100))
def test_shares_are_even(sizes: list[int], most: int) -> None:
    given_ = divide_evenly(sizes, most)
    assert sum(given_) == min(most, sum(sizes))
    for mine, size in zip(given_, sizes, strict=True):
        assert mine <= size
        assert mine == size or mine >= max(given_) - 1


def test_the_picture_keeps_neighbours_and_is_the_same_again() -> None:
    points = scattered(shift=40)
    first, again = (embed_tsne(points.values, Stream(1)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    group = points.site * CLASSES + points.label
    distance = cdist(first, first) + np.diag(np.full(len(first), np.inf))
    assert (group[distance.argmin(1)] == group).mean() > 0.95


def finish(folder: Path, **values: Any) -> Path:
    polyclinic.run(polyclinic.Recipe.from_values({**DIGITS, **values}), out=folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    wishes: dict[str, dict[str, Any]] = {
        "fedavg": {},
        "fedmp": {"algorithm": "fedmp", "rounds": 2},
        "fedper": {"algorithm": "fedper"},
        "local": {"algorithm": "local"},
        "early": {"model": {"name": "cnn_c", "split_after": 1}},
        "other seed": {"seed": 5},
        "other classes": {"data": {"name": "phantom", "size": 32, "hospitals": HOSPITALS}},
    }
    return {name: finish(place / name, name=name, **values) for name, values in wishes.items()}


call, refused = partial(commands.call, "features"), partial(commands.refused, "features")


def test_features_are_the_input_of_the_head(runs: dict[str, Path]) -> None:
    past_runs = [open_run(runs[name], None) for name in ("fedavg", "early")]
    wishes = FeatureOptions(most=40)
    found = compare_features(past_runs, wishes, Stream(0))
    rows = choose_images(past_runs[0].dataset, wishes, Stream(0, ("images",)))
    assert [view.stage for view in found] == [3, 1]
    for past, view in zip(past_runs, found, strict=True):
        network = past.site_network("site-1")[1]
        layers = dict(network.extractor.named_children())
        early = [layer for name, layer in layers.items() if list(layers).index(name) <= list(layers).index("relu1")]
        handed = network.extractor if view.stage == 3 else nn.Sequential(*early)
        images = torch.cat([past.dataset.sites[site].test.batch(own)[0] for site, own in rows.items()])
        expected = handed(images).flatten(1).double().numpy()
        assert view.dimensions == expected.shape[1]
        np.testing.assert_allclose(
            cdist(view.points.values, view.points.values), cdist(expected, expected), atol=1e-4 * np.abs(expected).max()
        )


@pytest.mark.parametrize(("name", "shared"), [("fedavg", True), ("fedmp", True), ("fedper", True), ("local", False)])
def test_the_output_names_sites_with_their_own_extractor(name: str, shared: bool, runs: dict[str, Path]) -> None:
    (view,) = compare_features([open_run(runs[name], None)], FeatureOptions(most=12), Stream(0))
    assert view.shared == shared


def test_runs_are_shown_side_by_side(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "fedavg"
    shutil.copytree(runs["fedavg"], folder)
    shown = call(folder, runs["local"], "--most", "30")
    assert shown.exit_code == 0, shown.output
    assert "Features of 30 test images" in shown.stdout
    *table, own, written = [line for line in shown.stdout.splitlines() if line.strip()]
    assert max(map(len, table)) <= 80
    assert own.startswith("local: each site has a feature extractor of its own")
    assert written == f"written: {folder / 'features.png'}"
    with Image.open(folder / "features.png") as picture:
        assert "fedavg: site recognised" in picture.info["Description"]
        assert picture.width >= 2000


def test_the_seed_decides_everything(runs: dict[str, Path], tmp_path: Path) -> None:
    wanted = (runs["fedavg"], "--label", "3", "--part", "train", "--most", "45", "--stage", "2", "--json")
    first, again, other = (tmp_path / f"{name}.png" for name in ("first", "again", "other"))
    answer = [json.loads(call(*wanted, "--out", path).stdout) for path in (first, again)]
    assert first.read_bytes() == again.read_bytes()
    assert answer[0] == {**answer[1], "picture": str(first)}
    assert set(answer[0]["runs"][0]["images"].values()) == {15}
    assert answer[0]["runs"][0]["figures"]["classes"] == 1
    assert answer[0]["runs"][0]["figures"]["apart"]["value"] > 0
    call(*wanted, "--out", other, "--seed", "9")
    assert first.read_bytes() != other.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--part", "all"], "--part is 'all'; choose test, validation or train"),
        (["--label", "cat"], "there is no class 'cat'; choose among 0, 1, 2"),
        (["--stage", "4"], "has stages 1 to 3"),
        (["--stage", "0"], "--stage is 0"),
        (["--device", "tpu"], "engine.device is 'tpu'"),
        (["--out", "nowhere/at/all.png"], "cannot write nowhere"),
    ],
)
def test_a_bad_argument_gets_one_sentence(arguments: list[str], answer: str, runs: dict[str, Path]) -> None:
    assert answer in refused(runs["fedavg"], "--most", "12", *arguments)
    assert not (runs["fedavg"] / "features.png").exists()


def test_runs_that_cannot_be_compared_get_one_sentence(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "holds no run" in refused(tmp_path)
    assert "has other classes than that in" in refused(runs["fedavg"], runs["other classes"])
    assert "runs with the same data and the same seed" in refused(runs["fedavg"], runs["other seed"])
    clusters = {"high": {"min_score": 0.5, "model": "cnn_c"}, "low": {"min_score": 0, "model": "mlp"}}
    cards = {f"site-{n}": dict.fromkeys(("cpu", "memory", "battery", "network"), n / 4) for n in (1, 2, 3)}
    clustered = finish(tmp_path / "clusters", clusters=clusters, capability={"profiles": cards})
    assert "has a network for each of its clusters" in refused(clustered)


def test_a_claim_about_features_equals_the_command_and_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = {"claim": "it differs", "test": "lower", "metric": "site_classifier_accuracy", "methods": ["Fed", "Local"]}
    methods = {"Fed": {}, "Local": {"algorithm": "local"}, "Silent": {}}
    recipe = polyclinic.Recipe.from_values({**DIGITS, "methods": methods, "claims": [claim]})
    found = compare([recipe], 1, tmp_path)
    for name in ("Fed", "Local"):
        for seed, result in enumerate(found.results[name]):
            folder = tmp_path / name.lower() / f"seed-{seed}"
            answer = commands.document("features", folder, "--out", tmp_path / "picture.png")["runs"][0]["figures"]
            assert result.site_classifier_accuracy is not None
            assert 0 < result.site_classifier_accuracy == answer["site_classifier_accuracy"] < 1
    assert all(run.site_classifier_accuracy is None for run in found.results["Silent"]), "nobody asked"
    [judged] = claims.evaluate_claims(recipe.claims, found.results)
    assert judged.figures == tuple(
        mean_of_known([run.site_classifier_accuracy or np.nan for run in found.results[name]])
        for name in claim["methods"]
    )
    monkeypatch.setattr(
        "polyclinic.experiments.compare.load_sites", lambda *_: pytest.fail("the images are not needed again")
    )
    again = compare([recipe], 1, tmp_path).results
    assert [run.site_classifier_accuracy for run in again["Fed"]] == [
        run.site_classifier_accuracy for run in found.results["Fed"]
    ]


def test_a_claim_about_features_of_clusters_is_refused_before_anything_runs(tmp_path: Path) -> None:
    claim = {"claim": "it differs", "test": "lower", "metric": "site_classifier_accuracy", "methods": ["Fed", "Local"]}
    clusters = {"high": {"min_score": 0.5, "model": "cnn_c"}, "low": {"min_score": 0, "model": "mlp"}}
    methods = {"Fed": {"clusters": clusters}, "Local": {"algorithm": "local"}}
    with pytest.raises(RecipeError, match="Fed has a network for each cluster"):
        compare([polyclinic.Recipe.from_values({**DIGITS, "methods": methods, "claims": [claim]})], 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_part_without_images_gets_one_sentence(tmp_path: Path) -> None:
    split = {"train": 0.8, "validation": 0.0, "test": 0.2}
    run = finish(tmp_path / "run", data={**DIGITS["data"], "split": split})
    assert "the sites have 0 validation images" in refused(run, "--part", "validation")


@pytest.mark.parametrize(("shift", "least", "most"), [(0.0, 0.2, 0.5), (8.0, 0.99, 1.0)])
def test_the_site_classifier_is_accurate_where_they_differ_and_only_there(
    shift: float, least: float, most: float
) -> None:
    found = figures(scattered(shift=shift)).site_classifier_accuracy
    assert found is not None
    assert least <= found <= most


def test_the_site_classifier_is_not_helped_by_images_of_the_same_patients() -> None:
    """Two sites alike, each patient's images alike: known patients would be recognised, new ones are not."""
    rng = np.random.default_rng(3)
    person = np.repeat(np.arange(60), 10)
    values = rng.normal(size=(60, 8))[person] + 0.01 * rng.normal(size=(600, 8))
    found = score_site_classifier(values, (person % 2).astype(np.int64), person, Stream(0))
    assert found is not None
    assert 0.3 < found < 0.7
