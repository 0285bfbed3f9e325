"""Who computes with what: clusters from a recipe, and what cannot be, told before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polyclinic import Recipe, run
from polyclinic.algorithms.distillation.refine import FEDDF
from polyclinic.algorithms.wrappers.clustered import Clustered
from polyclinic.analysis.privacy_audit import network_of_site
from polyclinic.config.capability import RESOURCES
from polyclinic.core.errors import DataError, RecipeError, WeightsError
from polyclinic.core.rng import Stream
from polyclinic.data.builtin.digits import CLASSES, DigitsOptions, load_digit_images
from polyclinic.data.examples import SiteData
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.runs.experiment import Experiment, FederatedDataset
from polyclinic.training.network import copy_module_weights

SITES = ("harbour", "hillside", "lakeview")
PUBLIC: dict[str, Any] = {"name": "digits", "split": {"train": 0.15, "validation": 0.1, "test": 0.75}}
"""What is left of the digits when the sites have theirs."""


def card(share: float, **others: float) -> dict[str, float]:
    return dict.fromkeys(RESOURCES, share) | others


CLUSTERS: dict[str, Any] = {
    "high": {"min_score": 0.66, "model": "cnn_a"},
    "medium": {"min_score": 0.33, "model": {"name": "cnn_b", "dropout": 0.2}},
    "low": {"min_score": 0, "model": "cnn_c", "lr_scale": 0.5},
}
HALVES: dict[str, Any] = {
    "more": {"min_score": 0.5, "model": "cnn_c"},
    "less": {"min_score": 0, "model": "mlp"},
}
VALUES: dict[str, Any] = {
    "name": "unequal",
    "rounds": 2,
    "data": {"name": "digits"},
    "model": "mlp",
    "algorithm": "fedper",
    "clusters": CLUSTERS,
    "capability": {"profiles": {"harbour": card(0.9), "hillside": card(0.5), "lakeview": card(0.1)}},
    "training": {"batch": 16, "optimiser": {"name": "adam", "lr": 0.01}},
    "evaluate": {"bootstrap": 0},
}


def recipe(**settings: Any) -> Recipe:
    """With some keys set; a double underscore stands for a dot."""
    return Recipe.from_values(VALUES, {key.replace("__", "."): value for key, value in settings.items()})


@cache
def hospitals() -> FederatedDataset:
    """Three hospitals with 84 digits each."""
    images = load_digit_images(DigitsOptions(), Stream(0)).to_images()
    rows = torch.randperm(len(images), generator=Stream(9).generator())[: 84 * len(SITES)]
    shares = dict(zip(SITES, torch.split(rows, 84), strict=True))
    sites = {
        name: SiteData(name, *map(images.subset, torch.split(mine, [60, 12, 12]))) for name, mine in shares.items()
    }
    return FederatedDataset(CLASSES, sites, None, 1, 8)


@contextmanager
def warned(words: str) -> Iterator[None]:
    """Somebody is told so."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("polyclinic").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("polyclinic").removeHandler(handler)
    assert any(words in sentence for sentence in told)


def prepared(**settings: Any) -> Experiment:
    return Experiment(recipe(**settings), dataset=hospitals())


def sentence_of(error: BaseException, *words: str) -> None:
    """One sentence, with these words in it."""
    said = str(error)
    assert "\n" not in said
    assert ". " not in said
    assert len(said) < 400
    assert "; " in said or ", but should be " in said, "what is wrong, and what to do"
    assert all(word in said for word in words), said


# What can be seen in the recipe alone


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "weights beside 1": (
        {"capability__weights": dict.fromkeys(RESOURCES, 0.3)},
        ("capability.weights", "add up to 1.2"),
    ),
    "a weight is missing": ({"capability__weights": {"cpu": 1.0}}, ("capability.weights.memory", "is missing")),
    "T_M = T_H": (
        {"clusters": CLUSTERS | {"medium": {"min_score": 0.66, "model": "cnn_b"}}},
        ("high", "medium", "in falling order"),
    ),
    "T_M > T_H": (
        {"clusters": CLUSTERS | {"medium": {"min_score": 0.7, "model": "cnn_b"}}},
        ("high", "medium", "in falling order"),
    ),
    "some site is left out": (
        {"clusters": {"high": CLUSTERS["high"], "medium": CLUSTERS["medium"]}},
        ("cluster medium, the last", "set it to 0"),
    ),
    "a share beyond 1": (
        {"capability__profiles": {"harbour": card(1.5)}},
        ("capability.profiles.harbour", "less than or equal to 1"),
    ),
    "half a card": ({"capability__profiles": {"harbour": {"cpu": 0.5}}}, ("capability.profiles.harbour", "missing")),
    "never evaluated": ({"capability__reassess_every": 0}, ("capability.reassess_every", "greater than or equal to 1")),
    "a name that is taken": ({"clusters": {"student": {"min_score": 0, "model": "mlp"}}}, ("student", "letters")),
    "a name that is none": ({"clusters": {"a@b": {"min_score": 0, "model": "mlp"}}}, ("a@b", "letters and digits")),
    "an unknown key in a cluster": (
        {"clusters__high__modle": "cnn_a"},
        ("clusters.high.modle", "did you mean 'model'?"),
    ),
    "an unknown key in a cluster's model": (
        {"clusters__high__model": {"name": "cnn_a", "drop": 0.1}},
        ("clusters.high.model.drop", "did you mean 'dropout'?"),
    ),
    "an unknown model": ({"clusters__high__model": "cnn_d"}, ("clusters.high.model.name", "cnn_d", "did you mean")),
    "no rate": ({"clusters__low__lr_scale": 0}, ("clusters.low.lr_scale", "greater than 0")),
    "clusters of the pooled": ({"algorithm": "centralised"}, ("centralised", "one network", "clusters: {}")),
    "clusters of one average": ({"algorithm": "single"}, ("single", "one network", "clusters: {}")),
    "no images for the server's heads": ({"algorithm": "pfedcdp"}, ("pfedcdp", "public", "head_epochs: 0")),
    "no images for the student": ({"finish": "refine"}, ("finish", "add for example `public")),
    "an unknown way to finish": ({"finish": "refined", "public": PUBLIC}, ("finish.name", "did you mean 'refine'?")),
    "nothing trains the head": (
        {"finish": {"name": "refine", "ce": 0, "kd": 0}, "public": PUBLIC},
        ("finish.ce and finish.kd are 0", "distillation"),
    ),
    "judged on no public set": ({"evaluate__headline": "public"}, ("evaluate.headline", "add `public`")),
    "judged by no student": (
        {"evaluate__headline": "student", "public": PUBLIC},
        ("evaluate.headline", "add `finish: refine`"),
    ),
    "judged by whom": ({"evaluate__headline": "best"}, ("evaluate.headline", "'personal'")),
}


@pytest.mark.parametrize(("settings", "words"), WRONG.values(), ids=WRONG)
def test_a_recipe_that_cannot_be_is_told_in_one_sentence(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**settings)
    sentence_of(caught.value, *words)


def test_the_recipe_itself_is_fine() -> None:
    assert recipe().clusters["medium"].model.dropout == 0.2
    assert Recipe.from_values(recipe().model_dump(mode="json")) == recipe()
    assert recipe(algorithm="pfedcdp", public=PUBLIC, finish="refine").finish is not None
    for without in ({"variant": "paper"}, {"head_epochs": 0}):
        assert recipe(algorithm={"name": "pfedcdp", **without}).public is None


# What shows only beside the data


MISFITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a cluster without sites": (
        {"capability__profiles__hillside": card(0.8)},
        ("no site is in cluster 'medium'", "min_score"),
    ),
    "a card of nobody": (
        {"capability__profiles__riverside": card(0.5)},
        ("'riverside'", "harbour, hillside, lakeview"),
    ),
    "a model too large for a machine": (
        {"capability__profiles__harbour": card(0.9, memory=0.5, gigabytes=0.001)},
        ("site harbour", "'high'", "cnn_a", "GB", "smaller model"),
    ),
    "a student of nobody": ({"finish": "refine", "public": PUBLIC}, ("fedper", "no model", "finish: null")),
    "a student of sites that train alone": (
        {"finish": "feddf", "public": PUBLIC, "algorithm": "local"},
        ("local", "no model", "finish: null"),
    ),
    "judged by a server that has nothing": (
        {"evaluate__headline": "public", "public": PUBLIC},
        ("evaluate.headline", "fedper", "no model"),
    ),
    "one noise for three means": (
        {"algorithm": "fedavg", "privacy": {"unit": "site", "noise": 1.0, "delta": 1e-3, "noise_at": "server"}},
        ("privacy.noise_at: server", "privacy.noise_at: site"),
    ),
    "judged on public images that are none": (
        {
            "algorithm": "fedavg",
            "evaluate__headline": "public",
            "public": {**PUBLIC, "split": {"train": 0.8, "validation": 0.2, "test": 0}},
        },
        ("evaluate.headline", "public.split.test"),
    ),
}


@pytest.mark.parametrize(("settings", "words"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_the_sites_is_told_before_anything_trains(
    settings: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        run(recipe(**settings), tmp_path / "run", dataset=hospitals())
    sentence_of(caught.value, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("share", "fits"), [(0.99, False), (1.01, True)])
def test_a_machine_needs_four_copies_of_the_weights(share: float, fits: bool) -> None:
    module = build_model("cnn_a", classes=10, channels=1, size=8, seed=Stream(0))
    needed = share * 16 * sum(p.numel() for p in module.parameters())
    cards = {"harbour": card(1.0, memory=0.5, gigabytes=2 * needed / 1e9)}
    settings = {"capability__profiles": VALUES["capability"]["profiles"] | cards}
    if fits:
        assert prepared(**settings).setup.networks.cluster_members(hospitals().sites)["high"] == ["harbour"]
    else:
        with pytest.raises(RecipeError, match="smaller model"):
            prepared(**settings)


def test_a_public_set_with_other_classes_is_told_before_anything_trains(tmp_path: Path) -> None:
    binary = replace(hospitals(), classes=("even", "odd"))
    with pytest.raises(DataError, match=r"public set digits has the classes 0, 1, .*, the sites have even, odd"):
        run(recipe(public=PUBLIC), tmp_path / "run", dataset=binary)
    assert not (tmp_path / "run").exists()


# What comes of a recipe that can be


def test_every_cluster_has_its_network_and_every_site_its_cluster() -> None:
    experiment = prepared()
    assert experiment.setup.networks.cluster_members(hospitals().sites) == {
        "high": ["harbour"],
        "medium": ["hillside"],
        "low": ["lakeview"],
    }
    sizes = {name: live.live["model"]["extractor.conv1.weight"].shape[0] for name, live in named(experiment).items()}
    assert sizes == {"high": 32, "medium": 16, "low": 8}
    assert isinstance(experiment.setup.algorithm, Clustered)
    assert dict(experiment.setup.algorithm.rates) == {"high": 1.0, "medium": 1.0, "low": 0.5}
    assert isinstance(named(experiment)["medium"].module, Classifier)
    assert named(experiment)["medium"].dropouts, "cnn_b drops units"


def named(experiment: Experiment) -> Mapping[str, Any]:
    return experiment.setup.networks.by_cluster


def test_first_weights_follow_from_the_seed_and_the_cluster() -> None:
    alike: dict[str, Any] = {
        "clusters": {"high": {"min_score": 0.5, "model": "cnn_c"}, "low": {"min_score": 0, "model": "cnn_c"}}
    }
    first, again, other = (prepared(**alike, seed=seed) for seed in (3, 3, 4))
    weights = [
        copy_module_weights(live.module)["model"]["head.weight"]
        for e in (first, again, other)
        for live in named(e).values()
    ]
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[4])


def test_a_clusters_weights_may_come_from_a_file_in_the_data_folder(tmp_path: Path) -> None:
    wanted = build_model("cnn_c", classes=10, channels=1, size=8, seed=Stream(77))
    save_file(dict(wanted.state_dict()), tmp_path / "own.safetensors")
    model = {"name": "cnn_c", "weights": "own.safetensors"}
    experiment = Experiment(recipe(clusters__low__model=model), data=tmp_path, dataset=hospitals())
    found = copy_module_weights(named(experiment)["low"].module)["model"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.state_dict().items())


@pytest.mark.parametrize("algorithm", ["fedper", "fedavg"])
def test_a_cluster_may_start_where_the_cluster_of_its_name_ended(algorithm: str, tmp_path: Path) -> None:
    """In any run; the others start anew, and nobody is given the model of all clusters."""
    ended = run(recipe(rounds=1, algorithm=algorithm), tmp_path, dataset=hospitals())
    path = str(tmp_path / "model.safetensors")
    halves = {
        "low": {"min_score": 0.5, "model": {"name": "cnn_c", "weights": path}},
        "high": {"min_score": 0, "model": "cnn_c"},
    }
    found = named(prepared(clusters=halves))
    last = {**ended.state["model@low"], **ended.state.get("head@low", {})}
    start = {cluster: copy_module_weights(live.module)["model"] for cluster, live in found.items()}
    assert last.keys() == start["low"].keys()
    assert all(torch.equal(tensor, start["low"][name]) for name, tensor in last.items())
    assert not any(torch.equal(tensor, start["high"][name]) for name, tensor in last.items() if "weight" in name)
    halves["least"] = halves.pop("high") | {"model": {"name": "cnn_c", "weights": path}}
    words = r"each of the clusters high, low, medium; .*clusters\.NAME\.model\.weights"
    for settings in ({"clusters": halves}, {"model": {"name": "mlp", "weights": path}}):
        with pytest.raises(WeightsError, match=words):
            prepared(**settings)


def test_sites_stay_for_good_or_for_some_rounds() -> None:
    """Cards that are given never change, those that are drawn do with every evaluation, and by the seed alone."""
    drawn = {"capability__profiles": {"harbour": card(0.9)}, "clusters__low__min_score": 0}
    for seed in range(20):  # until nobody's cluster is empty in round 1
        try:
            once, often, again = (
                prepared(**drawn, capability__reassess_every=every, seed=seed) for every in (None, 2, 2)
            )
        except RecipeError:
            continue
        break
    rounds = range(1, 41)
    for site in SITES:
        places = [often.setup.networks.cluster_of(site, round) for round in rounds]
        assert places == [again.setup.networks.cluster_of(site, round) for round in rounds]
        assert places[::2] == places[1::2], "two rounds at a time"
        assert {once.setup.networks.cluster_of(site, round) for round in rounds} == {places[0]}
        assert len(set(places)) == 1 if site == "harbour" else len(set(places)) > 1


def test_sites_that_move_are_judged_where_they_trained_last() -> None:
    """The recipe of a run in which everyone is evaluated anew before every round."""
    wanted = recipe(capability__profiles={}, capability__reassess_every=1, clusters=HALVES, seed=4, rounds=3)
    experiment = Experiment(wanted, dataset=hospitals())
    seating = experiment.setup.networks.cluster_of
    path = {site: [seating(site, round) for round in (1, 2, 3, 4)] for site in SITES}
    assert any(places[2] != places[3] for places in path.values()), "else nothing is shown; take another seed"
    assert any(places[0] != places[1] for places in path.values())
    result = experiment.run()
    for site, places in path.items():
        assert experiment.setup.algorithm.cluster_of(result.state, site) == places[2]
        assert result.summary.sites[site]["personal"]["test"].n == 12
    assert result.summary.clusters == {c: [s for s, places in path.items() if places[0] == c] for c in HALVES}


def test_an_audit_attacks_the_network_that_a_site_trains() -> None:
    experiment = prepared()
    for site, cluster in zip(SITES, CLUSTERS, strict=True):
        assert network_of_site(experiment, site) is named(experiment)[cluster]


@pytest.mark.parametrize(
    ("finish", "words"),
    [
        ({"name": "refine", "epochs": "ten"}, ("finish.epochs", "integer")),
        ({"name": "refine", "epochs": 2.5}, ("finish.epochs", "integer")),
        ({"name": "refine", "variant": "foo"}, ("finish.variant", "'corrected'")),
        ({"name": "feddf", "shapley": "maybe"}, ("finish.shapley", "boolean")),
    ],
)
def test_what_a_named_finish_says_is_looked_at(finish: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(algorithm="fedavg", public=PUBLIC, finish=finish)
    assert all(word in str(caught.value) for word in words), caught.value


def test_naming_another_finish_drops_the_options_of_the_one_before() -> None:
    ours = recipe(
        algorithm="fedavg", public=PUBLIC, finish={"name": "refine", "augment": {"rotation": 5}, "lr": "8e-4"}
    )
    assert ours.finish is not None
    assert ours.finish.lr == 8e-4
    other = Recipe.from_values(ours.model_dump(mode="json"), {"finish.name": "feddf", "finish.epochs": 3})
    assert other.finish == replace(FEDDF, epochs=3)


def test_scaffold_counts_sites_that_do_not_move() -> None:
    with pytest.raises(RecipeError, match=r"capability\.reassess_every: null"):
        recipe(algorithm="scaffold", capability__reassess_every=1, training__optimiser={"name": "sgd", "lr": 0.1})


def test_under_a_privacy_plan_nobody_looks_whether_a_public_image_is_at_a_site() -> None:
    """The gap would tell for certain who was there, whatever ε says."""

    def count(**settings: Any) -> int:
        public = prepared(algorithm="fedavg", public=PUBLIC, **settings).setup.public
        assert public is not None
        return len(public.train) + len(public.validation) + len(public.test)

    with warned("at the sites too"):
        without = count()
    assert count(privacy={"epsilon": 3.0, "delta": 1e-3}) == without + 84 * len(SITES)
