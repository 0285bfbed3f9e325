"""From a recipe to a run's folder: what is written, that its figures add up, and what cannot run."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import polyclinic
import polyclinic.runs.engines.choice
from polyclinic import Recipe, RunResult, run
from polyclinic.cli.display import comparison_table, result_table
from polyclinic.core.errors import DataError, EngineError, PolyclinicError, RecipeError, StoreError, WeightsError
from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.data.examples import Selection
from polyclinic.evaluation.flops import training_step_flops
from polyclinic.experiments.compare import compare_folders
from polyclinic.federation.engines.local import LocalEngine
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_results_page
from polyclinic.runs.experiment import build_network, load_sites
from polyclinic.runs.result import read_result
from polyclinic.storage import messages
from tests.small import SITES, TINY, WEIGHTS, tiny

PHANTOM: dict[str, Any] = {
    "data": {
        "name": "phantom",
        "size": 32,
        "hospitals": [{"name": name, "vendor": "film", "patients": 12, "malignant": 0.5} for name in ("a", "b")],
    }
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "tiny"
    run(tiny(), path)
    return path


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_writes_the_promised_files_and_no_others(folder: Path) -> None:
    promised = {
        "recipe.yaml",
        "metrics.jsonl",
        "result.json",
        "privacy.md",
        "ledger.jsonl",
        "model.safetensors",
        "predictions.safetensors",
        "snapshots",
    }
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == promised
    assert [path.name for path in (folder / "snapshots").iterdir()] != []
    assert Recipe.load(folder / "recipe.yaml") == tiny()


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(tiny())
    assert found.folder is None
    assert list(tmp_path.iterdir()) == []


def test_metrics_have_a_row_for_every_round_and_site(folder: Path) -> None:
    rows = read_rows(folder / "metrics.jsonl")
    trained = [(row["round"], row["site"]) for row in rows if row["event"] == "train"]
    assert trained == [(round, site) for round in (1, 2) for site in SITES]
    assert all(row["outcome"] == "accepted" and row["drift"] > 0 for row in rows if row["event"] == "train")
    judged = [(row["round"], row["site"], row["part"]) for row in rows if row["event"] == "evaluate"]
    assert judged == [(round, site, "validation") for round in (0, 1) for site in SITES]


def test_the_result_tells_everything(result: dict[str, Any]) -> None:
    assert set(result["sites"]) == set(SITES)
    for site in SITES:
        metrics = result["sites"][site]["global"]["test"]["metrics"]
        assert {"accuracy", "balanced_accuracy", "f1", "auc", "pr_auc", "ece"} <= set(metrics)
        assert all(metrics[name]["low"] is not None for name in ("accuracy", "auc"))
    merged = result["merged"]["global"]
    assert merged["test"]["n"] == sum(result["sites"][s]["global"]["test"]["n"] for s in SITES)
    assert sum(map(sum, merged["test"]["details"]["confusion"])) == merged["test"]["n"]
    assert result["headline"] == {"model": "global", "part": "test", "scores": merged["test"]}
    assert set(result["drift"]) == set(SITES)
    assert [e["kind"] for e in result["released"]] == ["model", "metrics", "predictions"], "no buffers here"
    assert all("plan" in e["protection"] for e in result["released"])
    assert (result["rounds"], result["seed"], result["stopped_early"]) == (2, 0, False)
    assert sum(h["train"] + h["validation"] + h["test"] for h in result["site_sizes"]) == 1797


def test_the_result_names_the_models_weights_flops_and_hash(folder: Path, result: dict[str, Any]) -> None:
    recipe = tiny()
    module = build_network(recipe, load_sites(recipe))
    flops = training_step_flops(module, (128, 1, 8, 8))
    assert result["model"] == {"name": "linear", "parameters": WEIGHTS, "flops_per_step": flops, "clusters": {}}
    # forward and the weights' gradient: two products of 128 × 64 by 64 × 10, each a multiplication and an addition
    assert flops == 2 * 2 * 128 * 64 * 10
    weights = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in weights.values()) == WEIGHTS
    assert messages.hash_tensors(messages.unflatten(weights)) == result["sha256"]


def test_cost_is_the_sum_of_the_ledger(folder: Path, result: dict[str, Any]) -> None:
    notes = [
        note
        for row in read_rows(folder / "ledger.jsonl")
        if isinstance(row.get("sites"), dict)
        for note in row["sites"].values()
    ]
    assert result["cost"]["bytes_down"] == sum(note["down"] for note in notes) > 0
    assert result["cost"]["bytes_up"] == sum(note["up"] for note in notes) > 0
    assert result["cost"]["refused"] == result["cost"]["failed"] == 0


class Counting(LocalEngine):
    """Weighs every message on its way."""

    down = up = 0

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, bytes | Failure]]:
        weighed = {site: sent[site] for site in sent}
        Counting.down += sum(map(len, weighed.values()))
        for site, answer in super().exchange(round, weighed, deadline):
            assert isinstance(answer, messages.Message)
            travelling = messages.encode(answer.fields, answer.tensors)
            Counting.up += len(travelling)
            yield site, travelling


def test_bytes_are_those_of_the_messages_really_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polyclinic.runs.engines.choice, "LocalEngine", Counting)
    spent = run(tiny()).summary.cost
    assert (spent.bytes_down, spent.bytes_up) == (Counting.down, Counting.up)
    # two rounds and the final evaluation carry 650 four-byte weights to each of three sites, two carry them back
    assert 9 * 4 * WEIGHTS < spent.bytes_down < 9 * (4 * WEIGHTS + 1500)
    assert spent.bytes_up > 6 * 4 * WEIGHTS


def test_from_python_in_five_lines(tmp_path: Path) -> None:
    found = run(tiny(training__epochs=5), tmp_path / "mine")
    low, high = found.headline.scores.interval("auc")
    assert 0.9 < low <= found.headline.scores.value("auc") <= high, (
        "five epochs of logistic regression read digits well"
    )
    assert found.summary.cost.bytes_up > 0


def interrupted(recipe: Recipe, folder: Path, at: int) -> None:
    def watch(event: str, info: Mapping[str, Any]) -> None:
        if event == "site" and info["round"] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, folder, watch=watch)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "local", "centralised"])
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path: Path, algorithm: str) -> None:
    recipe = tiny(algorithm=algorithm, rounds=3)
    interrupted(recipe, tmp_path / "cut", at=2)
    assert not (tmp_path / "cut" / "result.json").exists()
    again, whole = run(recipe, tmp_path / "cut").summary, run(recipe, tmp_path / "whole").summary
    assert again.sha256 == whole.sha256
    assert again.merged == whole.merged
    assert read_figures(tmp_path / "cut") == read_figures(tmp_path / "whole")
    assert again.cost.bytes_down > whole.cost.bytes_down, "what the interruption cost is not forgotten"


def read_figures(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in ("seconds", "up", "down")} for row in rows]


def test_a_finished_run_is_read_back_not_repeated(folder: Path, result: dict[str, Any]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert run(tiny(), folder).summary.to_json() == result
    assert read_result(folder).summary.to_json() == result
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_folder_of_another_recipe_is_left_alone(folder: Path, tmp_path: Path) -> None:
    interrupted(tiny(), tmp_path / "cut", at=1)
    for place in (folder, tmp_path / "cut"):
        with pytest.raises(StoreError, match="another recipe"):
            run(tiny(seed=1), place)


def test_a_tuple_in_python_is_a_list_in_the_file(tmp_path: Path) -> None:
    """A recipe from Python values must recognise its own folder."""
    recipe = Recipe.from_values({**TINY, **PHANTOM}, {"data.views": (1, 2), "data.partition": {"by": "natural"}})
    interrupted(recipe, tmp_path / "cut", at=1)
    assert run(recipe, tmp_path / "cut").summary.rounds == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"headline": {}}', "null", "\x00"])
def test_a_damaged_result_is_refused_and_can_be_made_again(folder: Path, tmp_path: Path, content: str) -> None:
    run(tiny(), tmp_path / "r")
    (tmp_path / "r" / "result.json").write_text(content)
    with pytest.raises(StoreError, match=r"is damaged|was written by another version"):
        run(tiny(), tmp_path / "r")
    (tmp_path / "r" / "result.json").unlink()
    assert run(tiny(), tmp_path / "r").summary.sha256 == read_result(folder).summary.sha256


def same_but_intervals(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return {k: v for k, v in a.items() if k != "intervals"} == {k: v for k, v in b.items() if k != "intervals"}


@pytest.fixture(scope="module")
def yardsticks() -> dict[str, RunResult]:
    return {name: run(tiny(algorithm=name)) for name in ("local", "cross-site", "centralised", "single")}


def test_local_is_judged_by_own_models_on_own_images(yardsticks: dict[str, RunResult]) -> None:
    summary = yardsticks["local"].summary
    assert summary.headline.model == "personal"
    assert all(list(models) == ["personal"] for models in summary.sites.values())
    assert [e.kind for e in summary.released] == ["metrics", "predictions"]
    assert summary.cost.bytes_down < run(tiny()).summary.cost.bytes_down


def test_cross_site_tests_every_model_everywhere(yardsticks: dict[str, RunResult]) -> None:
    cross, local = yardsticks["cross-site"].summary, yardsticks["local"].summary
    for site in SITES:
        assert set(cross.sites[site]) == {*SITES, "transfer"}
        at_home = cross.sites[site][site]
        assert at_home["test"].values == local.sites[site]["personal"]["test"].values, "the diagonal is Local"
    assert cross.headline.model == "transfer"
    assert cross.headline.scores.n == 2 * local.headline.scores.n, (
        "each image is judged by the two models from elsewhere"
    )
    pairs = [cross.sites[at][of]["test"] for at in SITES for of in SITES if at != of]
    right = sum(pair.value("accuracy") * pair.n for pair in pairs)
    assert cross.headline.scores.value("accuracy") == pytest.approx(right / cross.headline.scores.n)


def test_centralised_is_tested_at_the_hospitals(yardsticks: dict[str, RunResult]) -> None:
    summary = yardsticks["centralised"].summary
    assert set(summary.sites) == set(SITES)
    assert summary.headline.model == "global"
    assert summary.drift == {}, "nobody drifts where nobody is apart"


def test_single_averages_what_local_trained(yardsticks: dict[str, RunResult]) -> None:
    cross, single = yardsticks["cross-site"].state, yardsticks["single"].state
    sizes = {h.site: h.train for h in yardsticks["single"].summary.site_sizes}
    for name, mean in single["model"].items():
        wanted = sum(cross[f"model@{site}"][name].double() * sizes[site] for site in SITES) / sum(sizes.values())
        torch.testing.assert_close(mean.double(), wanted, rtol=0, atol=1e-6)


def write_idx(path: Path, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    header = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a stand-in for MNIST: a class is a bright row, so it is easily learned."""
    home = tmp_path_factory.mktemp("data")
    (home / "mnist").mkdir()
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 300), ("t10k", 70)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), 2 * labels + 4] = 255
        write_idx(home / "mnist" / f"{prefix}-images-idx3-ubyte", images)
        write_idx(home / "mnist" / f"{prefix}-labels-idx1-ubyte", labels)
    return home


MNIST = {"data__name": "mnist", "data__partition": {"by": "iid", "sites": 2}, "training__epochs": 4}


def test_a_held_out_set_is_evaluated_every_round_and_at_the_end(mnist: Path, tmp_path: Path) -> None:
    summary = run(tiny(**MNIST), tmp_path / "m", mnist).summary
    held_out = summary.merged["held-out"]["test"]
    assert held_out.n == 70
    assert held_out.value("accuracy") > 0.9
    assert summary.headline.model == "global"
    rows = [row for row in read_rows(tmp_path / "m" / "metrics.jsonl") if row["site"] == "held-out"]
    assert [(row["round"], row["n"]) for row in rows] == [(0, 70), (1, 70)]
    assert rows[0]["accuracy"] < rows[1]["accuracy"]


def test_without_test_images_of_its_own_a_run_is_judged_by_the_held_out_ones(mnist: Path) -> None:
    split = {"train": 0.8, "validation": 0.2, "test": 0}
    summary = run(tiny(**MNIST, data__split=split), data=mnist).summary
    assert (summary.headline.model, summary.headline.scores.n) == ("held-out", 70)
    everything = {"train": 1, "validation": 0, "test": 0}
    assert run(tiny(**MNIST, data__split=everything), data=mnist).summary.headline.scores.n == 70
    local = run(tiny(**MNIST, data__split=split, algorithm="local"), data=mnist).summary
    assert (local.headline.model, local.headline.part) == ("personal", "validation")


def test_without_any_test_images_validation_is_reported() -> None:
    summary = run(tiny(data__split={"train": 0.8, "validation": 0.2, "test": 0})).summary
    assert (summary.headline.model, summary.headline.part) == ("global", "validation")
    assert summary.headline["auc"].low is None


def test_with_nothing_to_judge_by_nothing_is_trained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.split"):
        run(tiny(data__split={"train": 1, "validation": 0, "test": 0}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a/b", "a@b", "a|b", "a\nb", "x" * 101, "pooled", "held-out", "global", "transfer"])
def test_site_names_that_mean_something_elsewhere_are_refused(name: str) -> None:
    hospitals = [
        {**hospital, "name": name if hospital["name"] == "a" else "b"} for hospital in PHANTOM["data"]["hospitals"]
    ]
    recipe = Recipe.from_values({**TINY, **PHANTOM}, {"data.hospitals": hospitals})
    with pytest.raises(DataError, match="rename the site"):
        run(recipe)


@pytest.mark.parametrize(
    ("settings", "kind", "told"),
    [
        ({"cohort": 4}, RecipeError, "a cohort of 4 is asked of 3 sites"),
        ({"quorum": 4}, RecipeError, "a quorum of 4 is asked of 3 sites"),
        ({"model": "inception_v3"}, RecipeError, "at least 75 pixels a side, not 8"),
        ({"model__weights": "no/such.safetensors"}, WeightsError, "no weights file at no/such.safetensors"),
        ({"data__partition": {"by": "natural"}}, DataError, "no natural sites"),
        ({"data__partition": {"by": "iid", "sites": 2000}}, DataError, "could not be divided among 2000 sites"),
        ({"data__partition": {"by": "quantity", "sites": 60, "alpha": 0.01, "minimum": 0}}, DataError, "has no images"),
        ({"data__partition": {"by": "shards", "sites": 10, "classes_per_site": 1}}, DataError, "allow_single_class"),
        ({"methods": {"A": {}}}, RecipeError, "use `polyclinic compare`"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], kind: type[PolyclinicError], told: str
) -> None:
    with pytest.raises(kind) as error:
        run(tiny(**settings), tmp_path / "out")
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--device cpu"):
        run(tiny(engine__device="cuda"), tmp_path / "out")
    assert run(tiny(engine__device="auto")).summary.rounds == 2


def test_mnist_without_a_data_folder_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
    with pytest.raises(DataError, match="give --data DIR or set POLYCLINIC_DATA"):
        run(tiny(**MNIST))


def test_weights_of_another_network_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not weights")
    save_file({"x": torch.zeros(3)}, tmp_path / "other.safetensors")
    for path, told in (
        (tmp_path / "notes.txt", "cannot be read as safetensors"),
        (tmp_path / "other.safetensors", "do not fit this network"),
        (folder / "model.safetensors", "do not fit this network"),
    ):
        with pytest.raises(WeightsError, match=told) as error:
            run(tiny(model={"name": "mlp", "weights": str(path)}), tmp_path / "out")
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_runs_model_is_where_the_next_run_can_start(folder: Path, result: dict[str, Any], tmp_path: Path) -> None:
    run(tiny(model__weights=str(folder / "model.safetensors")), tmp_path / "next")
    first = next(row for row in read_rows(tmp_path / "next" / "metrics.jsonl") if row["event"] == "evaluate")
    assert first["accuracy"] == result["sites"]["site-1"]["global"]["validation"]["metrics"]["accuracy"]["value"]


@pytest.mark.parametrize("below", ["file/run", "file/a/b"])
def test_an_unwritable_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("a regular file")
    with pytest.raises(StoreError, match="choose another folder") as error:
        run(tiny(), tmp_path / below)
    assert str(tmp_path / below) in str(error.value)
    assert (tmp_path / "file").read_text() == "a regular file"


def test_one_seed_one_result_and_another_seed_another() -> None:
    hashes = [run(tiny(seed=seed)).summary.sha256 for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_worker_processes_change_nothing(result: dict[str, Any]) -> None:
    assert run(tiny(engine__workers=2)).summary.sha256 == result["sha256"]


def test_early_stopping_is_told() -> None:
    summary = run(tiny(rounds=9, early_stop={"patience": 1, "metric": "auc", "min_delta": 1})).summary
    assert summary.stopped_early
    assert summary.rounds == 2


def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    recipe = tiny(rounds=4)
    interrupted(recipe, tmp_path, at=3)
    mine = load_sites(recipe)
    name, site = next(iter(mine.sites.items()))
    assert isinstance(site.train, Selection)
    others = replace(site, train=replace(site.train, rows=site.train.rows.roll(1)))
    with pytest.raises(StoreError, match="other data"):
        run(recipe, tmp_path, dataset=replace(mine, sites={**mine.sites, name: others}))
    assert run(recipe, tmp_path).summary.sha256 == run(recipe).summary.sha256


def test_a_run_may_go_on_elsewhere(tmp_path: Path) -> None:
    recipe = tiny(rounds=4, algorithm="scaffold")
    interrupted(recipe, tmp_path, at=3)
    moved = tiny(rounds=4, algorithm="scaffold", engine__workers=2, about="moved to two processes")
    assert run(moved, tmp_path).summary.sha256 == run(recipe).summary.sha256


@pytest.mark.parametrize("algorithm", ["scaffold", "local"])
def test_a_site_that_lost_its_memory_does_not_go_on_as_if_it_were_new(tmp_path: Path, algorithm: str) -> None:
    recipe = tiny(rounds=4, algorithm=algorithm)
    interrupted(recipe, tmp_path, at=3)
    shutil.rmtree(next((tmp_path / "sites").iterdir()))
    with pytest.raises(StoreError, match="lost its memory"):
        run(recipe, tmp_path)


def test_refused_hospitals_are_seen_in_the_tables(tmp_path: Path) -> None:
    partition = {"by": "quantity", "sites": 4, "alpha": 0.7, "minimum": 30}
    recipe = tiny(data__partition=partition, max_norm=0.2)
    result = run(recipe, tmp_path / "run")
    lost = result.summary.cost.refused
    assert lost > 0
    assert f"{lost} updates" in str(result_table(result.summary).caption)
    comparison = compare_folders([tmp_path / "run"], None)
    assert f"{lost} updates" in to_markdown(build_results_page(comparison))
    assert f"{lost} updates" in str(comparison_table(comparison).caption)
