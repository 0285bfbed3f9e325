"""A recipe is right, or refused in one sentence that says where and what to do; what is right survives a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from polyclinic import Recipe
from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.config.bundled import bundled_recipes
from polyclinic.config.recipe import with_settings
from polyclinic.core.errors import RecipeError
from tests.small import TINY, tiny, write_recipe

FULL: dict[str, Any] = {
    **TINY,
    "about": "every section, every key",
    "seed": 1,
    "data": {
        "name": "phantom",
        "size": 48,
        "task": "diagnosis",
        "views": [2, 3],
        "hospitals": [{"name": "north", "vendor": "film", "patients": 30, "malignant": 0.5}],
        "partition": {"by": "dirichlet", "sites": 2, "alpha": 0.5, "minimum": 5, "top_up": True},
        "split": {"train": 0.7, "validation": 0.1, "test": 0.2, "official": True},
        "allow_single_class": True,
    },
    "model": {
        "name": "cnn_c",
        "dropout": 0.1,
        "norm": "group",
        "weights": None,
        "sha256": "0" * 64,
        "split_after": 2,
        "pretrain": 1,
        "activation_checkpointing": False,
    },
    "algorithm": {"name": "fedprox", "mu": 0.1},
    "training": {
        "optimiser": {"name": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.0},
        "batch": 8,
        "batches": None,
        "first_epochs": None,
        "epochs": None,
        "steps": 4,
        "weights": "uniform",
        "fine_tune": 0.5,
        "oversample": True,
        "augment": {"rotation": 10, "flip": True, "brightness": 0.2, "contrast": 0.2, "crop": 0.1, "blur": 0.5},
        "curriculum": {"by": "random", "strength": 3.0, "warmup_rounds": 2},
        "precision": "bfloat16",
    },
    "schedule": {"name": "plateau", "period": 5, "patience": 2, "factor": 0.5, "minimum": 0.1},
    "early_stop": {"patience": 3, "min_delta": 0.01, "metric": "auc"},
    "cohort": None,
    "cohort_order": "cyclic",
    "quorum": 1,
    "max_norm": 1e5,
    "aggregate": {
        "name": "norm_bound",
        "bound": 5.0,
        "against": 3.0,
        "trim": 0.2,
        "hostile": 1,
        "choose": 1,
        "most_share": 0.6,
    },
    "evaluate": {"every": 1, "bootstrap": 10, "train": False, "forgetting": False, "headline": "student"},
    "engine": {"name": "local", "workers": 1, "threads": 1, "device": "cpu", "compile": "never"},
    "stages": [{"name": "quantise", "kinds": ["model"], "bits": 6, "per": "block", "block": 512, "stochastic": False}],
    "privacy": {
        "unit": "site",
        "epsilon": 5.0,
        "noise": 1.0,
        "delta": 1e-3,
        "clip": 2.0,
        "accountant": "rdp",
        "neighbours": "replace",
        "sampling": "shuffle",
        "amplification": False,
        "group": None,
        "augmentation_multiplicity": 2,
        "noise_per_site": False,
        "weigh_by_noise": True,
        "noise_at": "site",
        "max_sites_per_record": 2,
        "metrics": "open",
        "ledger": "ours.jsonl",
        "randomness": "secret",
    },
    "clusters": {
        "high": {
            "min_score": 0,
            "model": {
                "name": "cnn_c",
                "dropout": 0.1,
                "norm": "default",
                "weights": None,
                "sha256": "0" * 64,
                "split_after": 2,
                "pretrain": 1,
                "activation_checkpointing": False,
            },
            "lr_scale": 0.5,
        }
    },
    "capability": {
        "weights": {"cpu": 0.25, "memory": 0.25, "battery": 0.25, "network": 0.25},
        "profiles": {},
        "reassess_every": 2,
        "max_latency_ms": 100.0,
    },
    "public": {"name": "digits", "split": {"train": 0.7, "validation": 0.1, "test": 0.2, "official": True}},
    "finish": {
        "variant": "corrected",
        "epochs": 3,
        "batch": 16,
        "lr": 0.001,
        "weight_decay": 0.0,
        "patience": 2,
        "temperature": 3.0,
        "tau": 0.2,
        "ce": 1.0,
        "scl": 0.1,
        "kd": 0.1,
        "alpha": 0.5,
        "shapley": False,
        "augment": {"rotation": 10, "flip": True, "brightness": 0.2, "contrast": 0.2, "crop": 0.1, "blur": 0.5},
    },
    "ensemble": False,
    "snapshot_every": 2,
    "keep_snapshots": 3,
    "track": ["tensorboard", "mlflow"],
    "paper": {},
    "claims": [],
}


def keys_of(values: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*place, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*place, key))


PLACES = list(keys_of(FULL))
NAMES = {("algorithm", "name"), ("data", "name"), ("public", "name")}
OWN = {("clusters",), ("capability", "weights")}
"""Where keys are names of one's own, or numbers for names."""


def refused(values: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(RecipeError) as error:
        Recipe.from_values(values, changes)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert sentence.startswith("recipe: ")
    return sentence


def renamed(values: Mapping[str, Any], place: tuple[str, ...], name: str) -> dict[str, Any]:
    head, *rest = place
    if rest:
        return {**values, head: renamed(values[head], tuple(rest), name)}
    return {name if key == head else key: value for key, value in values.items()}


def test_the_recipe_with_every_key_is_right_and_complete() -> None:
    recipe = Recipe.from_values(FULL)
    dumped = set(keys_of(recipe.model_dump(mode="json")))
    assert dumped == {*PLACES, ("methods",), ("training", "private")}  # which follows from privacy


@pytest.mark.parametrize("place", [p for p in PLACES if p not in NAMES and p[:-1] not in OWN], ids=".".join)
def test_a_mistyped_key_is_found_at_every_depth(place: tuple[str, ...]) -> None:
    wrong = place[-1] + place[-1][-1]
    sentence = refused(renamed(FULL, place, wrong))
    assert f"there is no key {'.'.join([*place[:-1], wrong])!r}" in sentence
    assert f"did you mean {place[-1]!r}?" in sentence


@pytest.mark.parametrize("place", sorted(NAMES), ids=".".join)
def test_a_section_without_its_name_says_so(place: tuple[str, ...]) -> None:
    assert f"the key {'.'.join(place)!r} is missing" in refused(renamed(FULL, place, "nam"))


def test_a_mistyped_key_inside_a_list_is_found() -> None:
    hospitals = [{**FULL["data"]["hospitals"][0], "patient": 3}]
    assert "'data.hospitals.patient' (did you mean 'patients'?)" in refused(FULL, {"data.hospitals": hospitals})


def test_a_mistyped_key_of_a_method_names_the_method() -> None:
    sentence = refused(TINY, {"methods": {"ours": {"training.optimiser.lrr": 1}}})
    assert "method ours: there is no key 'training.optimiser.lrr' (did you mean 'lr'?)" in sentence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "fedprx"}, "no algorithm 'fedprx' (did you mean 'fedprox'?)"),
        ({"model": "mobilenet_v4"}, "no model 'mobilenet_v4' (did you mean 'mobilenet_v2'?)"),
        ({"data": {"name": "digit"}}, "no data set 'digit' (did you mean 'digits'?)"),
        ({"data.partition.by": "dirichlett"}, "no partition 'dirichlett' (did you mean 'dirichlet'?)"),
        ({"early_stop.metric": "accuracy_"}, "no metric 'accuracy_' (did you mean 'accuracy'?)"),
        ({"engine.name": "mpi"}, "engine.name is 'mpi', but should be 'local'"),
        ({"engine.name": "flower"}, "engine.name is 'flower', but real sites run a recipe by `polyclinic serve`"),
        ({"paper": {"tiny ": "0.9"}}, "no method 'tiny ' (did you mean 'tiny'?)"),
        ({"engine.device": "gpu"}, "engine.device is 'gpu'; choose cpu"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(changes: dict[str, Any], message: str) -> None:
    assert message in refused(TINY, changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rounds", "many", "rounds is 'many', but should be a valid integer"),
        ("rounds", 0, "rounds is 0, but should be greater than or equal to 1"),
        ("rounds", True, "rounds is true, but should be a number"),
        ("seed", -1, "seed is -1, but should be greater than or equal to 0"),
        ("seed", 2**53, "seed is 9007199254740992, but should be less than"),
        ("seed", float("nan"), "seed is nan"),
        ("name", "", "name is ''"),
        ("name", 5, "name is 5, but should be a valid string"),
        ("data", 5, "data is 5, but should hold keys of its own"),
        ("training", None, "training is None, but should hold keys"),
        ("training.batch", [1], "training.batch is [1]"),
        ("training.batch", 0, "training.batch is 0, but should be greater than or equal to 1"),
        ("training.epochs", 0, "training.epochs is 0, but should be greater than or equal to 1"),
        ("training.fine_tune", 0, "training.fine_tune is 0"),
        ("training.weights", "size", "training.weights is 'size', but should be 'examples' or 'uniform'"),
        ("training.oversample", "often", "training.oversample is 'often'"),
        ("training.augment", "some", "training.augment is 'some', but should hold keys"),
        ("training.augment.rotation", 181, "training.augment.rotation is 181"),
        ("training.augment.rotation", True, "training.augment.rotation is true, but should be a number"),
        ("training.augment.flip", "often", "training.augment.flip is 'often'"),
        ("training.augment.brightness", -1, "training.augment.brightness is -1"),
        ("training.augment.contrast", 2, "training.augment.contrast is 2"),
        ("training.augment.crop", 1, "training.augment.crop is 1"),
        ("training.augment.blur", float("inf"), "training.augment.blur is inf, but should be a finite number"),
        ("training.augment.blur", 21, "training.augment.blur is 21"),
        ("training.optimiser.lr", float("nan"), "training.optimiser.lr is nan, but should be a finite number"),
        ("training.optimiser.lr", 0, "training.optimiser.lr is 0, but should be greater than 0"),
        ("training.optimiser.momentum", 1, "training.optimiser.momentum is 1"),
        ("training.optimiser.weight_decay", -1, "training.optimiser.weight_decay is -1"),
        ("training.optimiser.name", "sdg", "training.optimiser.name is 'sdg', but should be 'sgd', 'adam' or 'adamw'"),
        ("max_norm", float("inf"), "max_norm is inf, but should be a finite number"),
        ("cohort", 0, "cohort is 0"),
        ("quorum", -2, "quorum is -2"),
        ("methods", ["FedAvg"], "methods is ['FedAvg'], but should hold keys"),
        ("methods", {"A": None}, "methods.A is None, but should hold keys"),
        ("data.size", 4, "'size'"),
        ("data.split", "most", "data.split:"),
        ("data.split.train", 0.5, "data.split: The fractions train, validation and test add up to 0.7"),
        ("data.split.train", float("nan"), "data.split:"),
        ("data.partition", "iid", "data.partition is 'iid', but should hold keys"),
        ("data.partition.by", None, "data.partition.by is None"),
        ("data.partition.sites", 0, "data.partition: The option 'sites' of Iid should be greater"),
        ("data.partition.sites", False, "data.partition.sites is false, but should be a number"),
        ("algorithm", {"name": "fedprox", "mu": "far"}, "algorithm.mu is 'far'"),
        ("algorithm", {"name": "fedprox", "mu": -1}, "algorithm.mu is -1"),
        ("algorithm", {"name": "fedprox", "training": {}}, "there is no key 'algorithm.training'"),
        ("model.dropout", 1, "model.dropout is 1, but should be less than 1"),
        ("schedule.period", 0, "schedule.period is 0"),
        ("schedule.factor", 2, "schedule.factor is 2"),
        ("schedule.minimum", -1, "schedule.minimum is -1"),
        ("early_stop.patience", 0, "early_stop.patience is 0"),
        ("early_stop.min_delta", -1, "early_stop.min_delta is -1"),
        ("engine.workers", -1, "engine.workers is -1"),
        ("evaluate.bootstrap", "no", "evaluate.bootstrap is 'no'"),
    ],
)
def test_wrong_values_are_refused_where_they_stand(key: str, value: Any, message: str) -> None:
    assert message in refused(TINY, {key: value})


@pytest.mark.parametrize("algorithm", ["fednova", "scaffold", "fedsgd"])
@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_methods_made_for_sgd_refuse_adam(algorithm: str, optimiser: str) -> None:
    sentence = refused(TINY, {"algorithm": algorithm, "training.optimiser.name": optimiser})
    assert algorithm in sentence
    assert "sgd" in sentence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.steps": 3}, "either epochs or steps"),
        ({"training.epochs": None}, "either epochs or steps"),
        ({"training.optimiser": {"name": "adam", "momentum": 0.9}}, "adam has no momentum"),
        ({"algorithm": "single", "early_stop": {}}, "set early_stop: null"),
        ({"algorithm": "cross-site", "early_stop": {}}, "set early_stop: null"),
        ({"algorithm": "single", "cohort": 2}, "set cohort: null"),
        ({"algorithm": "centralised", "quorum": 2}, "set quorum: 1"),
        ({"cohort": 2, "quorum": 3}, "lower quorum"),
        ({"cohort": 2, "early_stop": {"patience": 2}}, "set cohort: null"),
        ({"cohort": 2, "schedule": "plateau"}, "set cohort: null"),
        ({"rounds": 9, "schedule": {"name": "cosine", "period": 5}}, "schedule.minimum"),
        ({"algorithm": {"name": "scaffold", "global_lr": -1}}, "global_lr is -1"),
        ({"early_stop": {}, "evaluate.every": 2}, "set evaluate.every: 1"),
        ({"schedule": "plateau", "evaluate.every": 0}, "set evaluate.every: 1"),
        ({"early_stop": {}, "data.split": {"train": 0.8, "validation": 0, "test": 0.2}}, "data.split.validation"),
        ({"engine": {"workers": 2, "device": "auto"}}, "engine.workers: 0"),
        ({"methods": {"A": {"methods.B": {}}}}, "method A: a method cannot set methods"),
        ({"methods": {"A": {"algorithm": "fednova", "training.optimiser.name": "adam"}}}, "method A: fednova"),
    ],
)
def test_impossible_combinations_are_refused_with_the_way_out(changes: dict[str, Any], message: str) -> None:
    assert message in refused(TINY, changes)


def test_a_new_algorithm_is_closed_to_unknown_keys_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Cautious(FedAvg):
        care: float = 0.5

    monkeypatch.setitem(ALGORITHMS, "cautious", Cautious)
    assert "'algorithm.caree' (did you mean 'care'?)" in refused(TINY, {"algorithm": {"name": "cautious", "caree": 1}})
    assert "algorithm.care is nan" in refused(TINY, {"algorithm": {"name": "cautious", "care": float("nan")}})
    chosen = tiny(algorithm={"name": "cautious", "care": "1e-3"}).build_algorithm()
    assert isinstance(chosen, Cautious)
    assert chosen.care == 1e-3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**18) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(PLACES), value=JSON)
def test_whatever_is_written_anywhere_it_runs_or_gets_one_sentence(place: tuple[str, ...], value: Any) -> None:
    try:
        recipe = Recipe.from_values(FULL, {".".join(place): value})
    except RecipeError:
        return
    assert Recipe.from_values(yaml.safe_load(recipe.to_yaml())).to_yaml() == recipe.to_yaml()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: tiny\nrounds: [1\nmodel: x", "cannot be read as YAML"),
        (b"name: a\n\tb: c", "line 2"),
        (b"name: \xff\xfe", "cannot be read as YAML"),
        (b"\x00\x01\x02", "cannot be read as YAML"),
        (b"name: 2024-99-99", "cannot be read as YAML"),
        (b"name: a\nname: b", "the key 'name' occurs twice, at line 2"),
        (b"methods:\n  A: {}\n  A: {}", "the key 'A' occurs twice, at line 3"),
        (b"name: !!python/object/apply:os.getcwd []", "cannot be read as YAML"),
        (b"[" * 5000, "cannot be read as YAML"),
        (b"- name: tiny", "is not a recipe"),
        (b"tiny", "is not a recipe"),
        (b"", "is not a recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as error:
        Recipe.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError, match="cannot read the recipe") as error:
            Recipe.load(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("path", bundled_recipes().values(), ids=list(bundled_recipes()))
def test_our_recipes_and_their_methods_survive_a_file(tmp_path: Path, path: Path) -> None:
    recipe = Recipe.load(path)
    methods = [recipe.method_recipe(name) for name in recipe.methods]
    for found in (recipe, *methods[:1], *methods[-1:]):
        (tmp_path / "again.yaml").write_text(found.to_yaml(), encoding="utf-8")
        assert Recipe.load(tmp_path / "again.yaml") == found, found.name


def test_there_are_the_promised_recipes() -> None:
    ours = bundled_recipes()
    methods = Recipe.load(ours["demo"]).methods
    algorithms = {Recipe.load(ours["demo"]).method_recipe(name).algorithm.name for name in methods}
    papers = {"fedcycle", "fedmp", "fed-align", "pfedcdp", "adaptive-noise"}
    assert {"local", "fedavg", "centralised", *papers} <= algorithms, "the demo has every paper's method"
    assert any(name.startswith("fedcycle/quick") for name in ours)


def test_a_file_keeps_letters_as_they_are() -> None:
    assert "FedProx (μ = 0.1)" in tiny(methods={"FedProx (μ = 0.1)": {}}).to_yaml()


def test_a_method_is_the_recipe_with_its_keys_set() -> None:
    changes = {"rounds": 5, "training.epochs": 2, "algorithm": {"name": "fedprox", "mu": 0.2}}
    recipe = Recipe.from_values({**TINY, "methods": {"M": changes, "plain": {}}, "paper": {"M": "0.9"}})
    method = recipe.method_recipe("M")
    assert (method.name, method.rounds, method.training.epochs, method.training.batch) == ("M", 5, 2, 128)
    assert method.algorithm.options == {"mu": 0.2}
    assert method == Recipe.from_values(TINY, {**changes, "name": "M"})
    assert recipe.method_recipe("plain") == tiny(name="plain")
    with pytest.raises(RecipeError, match="did you mean 'plain'"):
        recipe.method_recipe("plane")


def test_a_name_alone_stands_for_a_section() -> None:
    assert tiny(model="mlp", schedule="cosine") == tiny(model={"name": "mlp"}, schedule={"name": "cosine"})
    assert tiny(algorithm="fedcycle") == tiny(algorithm={"name": "fedcycle"})


def test_settings_reach_any_depth_and_leave_the_values_alone() -> None:
    values = {"a": {"b": 1, "c": 2}, "d": 3}
    assert with_settings(values, {"a.b": 9, "x.y.z": 1}) == {"a": {"b": 9, "c": 2}, "d": 3, "x": {"y": {"z": 1}}}
    assert values == {"a": {"b": 1, "c": 2}, "d": 3}


@given(order=st.permutations(["algorithm.name", "algorithm.mu", "training", "training.batch"]))
def test_the_order_of_settings_does_not_matter(order: list[str]) -> None:
    given_values: dict[str, Any] = {
        "algorithm.name": "fedprox",
        "algorithm.mu": 0.3,
        "training": {"epochs": 2},
        "training.batch": 7,
    }
    recipe = Recipe.from_values(TINY, {key: given_values[key] for key in order})
    assert recipe.algorithm.options == {"mu": 0.3}
    assert (recipe.training.epochs, recipe.training.batch, recipe.training.optimiser.lr) == (2, 7, 0.01)


def test_another_algorithm_does_not_inherit_options() -> None:
    prox = tiny(algorithm={"name": "fedprox", "mu": 0.1}).model_dump(mode="json")
    assert Recipe.from_values(prox, {"algorithm.name": "fedavg"}).algorithm.options == {}
    assert Recipe.from_values(prox, {"algorithm": "fedavg"}).algorithm.options == {}
    assert Recipe.from_values(prox, {"algorithm.name": "fedprox"}).algorithm.options == {"mu": 0.1}
    assert Recipe.from_values(prox, {"algorithm.mu": 0.5}).algorithm.options == {"mu": 0.5}


def test_yaml_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace("lr: 0.1", "lr: 1e-3"))
    assert Recipe.load(path).training.optimiser.lr == 1e-3
