"""The command line: one sentence for every mistake, one JSON document on request, and Ctrl-C that loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import polyclinic
from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.distillation.refine import RefinementOptions
from polyclinic.config.bundled import bundled_recipes
from polyclinic.config.recipe import Recipe
from polyclinic.data import DATASETS
from polyclinic.models import MODELS
from tests import commands
from tests.commands import call, document
from tests.small import TINY, tiny, write_recipe

COMMAND = [sys.executable, "-c", "from polyclinic.cli.main import main; main()"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
    write_recipe(tmp_path)


def refused(*arguments: str) -> str:
    """The one sentence a mistake gets; nothing is written."""
    before = sorted(Path().rglob("*"))
    message = commands.refused(*arguments)
    assert sorted(Path().rglob("*")) == before
    return message


SETTINGS = [
    ("rouds=3", "'rouds' (did you mean 'rounds'?)"),
    ("training.optimiser.lrr=3", "'training.optimiser.lrr' (did you mean 'lr'?)"),
    ("algorithm.mu=3", "there is no key 'algorithm.mu'"),
    ("data.siz=8", "'data.siz' (did you mean 'size'?)"),
    ("data.partition.site=8", "'data.partition.site' (did you mean 'sites'?)"),
    ("data.split.tets=0.1", "'data.split.tets' (did you mean 'test'?)"),
    ("schedule.factr=1", "'schedule.factr' (did you mean 'factor'?)"),
    ("early_stop.patienc=1", "'early_stop.patienc' (did you mean 'patience'?)"),
    ("engine.worker=1", "'engine.worker' (did you mean 'workers'?)"),
    ("evaluate.evry=1", "'evaluate.evry' (did you mean 'every'?)"),
    ("rounds=many", "rounds is 'many'"),
    ("rounds=.nan", "rounds is nan"),
    ("rounds", "--set 'rounds' is not key=value"),
    ("=3", "--set '=3' is not key=value"),
    ("rounds=[1", "the value is not valid YAML"),
    ("rounds=2024-99-99", "the value is not valid YAML"),
    ("algorithm=fedvag", "did you mean 'fedavg'?"),
    ("model=cnn_d", "did you mean 'cnn_"),
    ("data.name=digitz", "did you mean 'digits'?"),
    ("data.partition.by=idd", "did you mean 'iid'?"),
    ("training.steps=3", "either epochs or steps"),
    ("cohort=7", "a cohort of 7 is asked of 3 sites"),
    ("quorum=7", "a quorum of 7 is asked of 3 sites"),
    ("model=inception_v3", "at least 75 pixels a side, not 8"),
    ("model.weights=none.safetensors", "no weights file at none.safetensors"),
    ("model.weights=tiny.yaml", "tiny.yaml cannot be read as safetensors"),
    ("data={name: mnist, partition: {by: iid, sites: 2}}", "give --data DIR"),
    ("data.partition={by: shards, sites: 10, classes_per_site: 1}", "allow_single_class"),
    ("data.partition={by: iid, sites: 5000}", "could not be divided among 5000 sites"),
    ("data.split={train: 1, validation: 0, test: 0}", "nothing could be reported"),
    ("methods={A: {}}", "use `polyclinic compare`"),
]


@pytest.mark.parametrize(("setting", "message"), SETTINGS)
def test_a_bad_setting_gets_one_sentence(setting: str, message: str) -> None:
    assert message in refused("run", "tiny.yaml", "--out", "out", "--set", setting)


@pytest.mark.parametrize("algorithm", ["fednova", "scaffold", "fedsgd"])
def test_methods_made_for_sgd_refuse_adam(algorithm: str) -> None:
    message = refused("run", "tiny.yaml", "--set", f"algorithm={algorithm}", "--set", "training.optimiser.name=adam")
    assert algorithm in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.yaml"], "there is no recipe 'nowhere.yaml': no file /"),
        (["run", "tyni.yaml"], "there is no recipe 'tyni.yaml' (did you mean tiny.yaml?): no file /"),
        (["run", "fedcicle/s1"], "(did you mean fedcycle/s1"),
        (["run", "x" * 300], "error: "),
        (["run", "."], ". is a folder; give a recipe file"),
        (["run", "tiny.yaml", "--seed", "-1"], "seed is -1"),
        (
            ["run", "tiny.yaml", "--engine", "flower"],
            "engine.name is 'flower', but real sites run a recipe by `polyclinic serve`",
        ),
        (["run", "tiny.yaml", "--device", "tpu"], "engine.device is 'tpu'; choose cpu"),
        (["run", "tiny.yaml", "--out", "tiny.yaml/below"], "cannot write tiny.yaml/below"),
        (["run", "tiny.yaml", "--out", "tiny.yaml"], "cannot write tiny.yaml"),
        (["run", "demo"], "use `polyclinic compare`"),
        (["resume", "nowhere"], "nowhere holds no run"),
        (["resume", "tiny.yaml"], "tiny.yaml holds no run"),
        (["resume", "."], ". holds no run"),
        (["compare", "nowhere"], "there is no recipe 'nowhere'"),
        (["compare", "."], ". holds no finished run"),
        (["compare", ".", "tiny.yaml"], "not both"),
        (["compare", ".", "--set", "rounds=1"], "leave out --set"),
        (["compare", "tiny.yaml", "tiny.yaml"], "give each a name of its own"),
        (["compare", "tiny.yaml", "--out", "tiny.yaml/below"], "cannot write tiny.yaml/below"),
        (["list", "everything"], "there is no list of 'everything'; choose one of algorithms, models"),
        (["reproduce", "fedcicle"], "there are no recipes for 'fedcicle'; there are some for: adaptive-dp, fed-"),
        (["reproduce", "fedcycle", "--quick", "--rebuild", "--out", "nowhere"], "without --rebuild first"),
        (["demo", "--seed", "-3"], "seed is -3"),
        (["demo", "--out", "tiny.yaml/below"], "cannot write tiny.yaml/below"),
    ],
)
def test_a_bad_argument_gets_one_sentence(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_gets_one_sentence() -> None:
    assert "--device cpu or --device auto" in refused("run", "tiny.yaml", "--device", "cuda", "--out", "out")


@pytest.mark.parametrize("content", ["name: [", "- a list", "", "name: tiny\nname: tiny", "{}"])
def test_a_bad_file_gets_one_sentence(content: str) -> None:
    Path("bad.yaml").write_text(content)
    assert "bad.yaml" in refused("run", "bad.yaml")
    assert "bad.yaml" in refused("compare", "bad.yaml")


def test_weights_of_another_network_get_one_sentence() -> None:
    save_file({"head.0.weight": torch.zeros(2, 2)}, "other.safetensors")
    message = refused("run", "tiny.yaml", "--set", "model.weights=other.safetensors", "--out", "out")
    assert "other.safetensors do not fit this network" in message


@pytest.mark.parametrize("name", ["a/b", "a@b", "a|b", "pooled"])
def test_a_site_with_an_impossible_name_gets_one_sentence(name: str) -> None:
    hospital = {"vendor": "film", "patients": 6, "malignant": 0.5}
    data = {"name": "phantom", "size": 32, "hospitals": [{"name": name, **hospital}, {"name": "b", **hospital}]}
    write_recipe(Path(), {**TINY, "data": data}, "names.yaml")
    assert "rename the site" in refused("run", "names.yaml", "--out", "out")


def test_a_run_is_shown_resumed_and_kept_from_other_recipes() -> None:
    first = call("run", "tiny.yaml", "--out", "out")
    assert first.exit_code == 0
    assert "tiny: 2 rounds, test images of all sites" in first.stdout
    assert "run: out" in first.stdout
    assert first.stderr.splitlines()[0] == "tiny, seed 0"
    assert len(first.stderr.splitlines()) == 1 + 2
    again = call("resume", "out")
    assert (again.exit_code, again.stdout, again.stderr) == (0, first.stdout, "")
    assert "holds a run of another recipe" in refused("run", "tiny.yaml", "--out", "out", "--seed", "1")
    Path("out/recipe.yaml").write_text("name: [")
    assert "out/recipe.yaml cannot be read as YAML" in refused("resume", "out")
    assert "out/recipe.yaml cannot be read as YAML" in refused("run", "tiny.yaml", "--out", "out")


def test_an_end_that_failed_is_repeated_with_other_options() -> None:
    clinics = [{"name": n, "vendor": "film", "patients": 30, "malignant": 0.5} for n in ("hill", "harbour", "sea")]
    data, public = ({"name": "phantom", "size": 32, "hospitals": some} for some in (clinics[:2], clinics[2:]))
    finish = {"name": "refine", "epochs": 1, "lr": 1e37}
    write_recipe(Path(), {**TINY, "data": data, "public": public, "finish": finish}, "taught.yaml")
    failed = call("run", "taught.yaml", "--out", "out")
    assert failed.exit_code == 1
    assert failed.stderr.splitlines()[-1].endswith("the loss is not finite; lower finish.lr.")
    assert "holds a run of another recipe" in refused("resume", "out", "--set", "rounds=3")
    assert "holds a run of another recipe" in refused("resume", "out", "--set", "finish=null")
    ended = call("resume", "out", "--set", "finish.lr=0.001")
    assert ended.exit_code == 0, ended.output
    assert "round" not in ended.stderr, "none is played again"
    assert "public (student)" in ended.stdout
    assert Recipe.load("out/recipe.yaml").finish == RefinementOptions(epochs=1, lr=0.001)
    whole = document("run", "taught.yaml", "--set", "finish.lr=0.001", "--out", "whole")
    found = document("resume", "out")
    assert all(found[key] == whole[key] for key in ("sha256", "finish", "public", "merged", "headline"))
    assert "remove its result.json to repeat the end alone" in refused("resume", "out", "--set", "finish.lr=0.01")
    Path("out/result.json").unlink()
    assert document("resume", "out", "--set", "finish.lr=0.01")["finish"] != whole["finish"]


def test_flags_and_settings_reach_the_recipe() -> None:
    arguments = ["--set", "rounds=1", "--set", "training.batch=64", "--set", "training.optimiser.lr=1e-2"]
    summary = document("run", "tiny.yaml", *arguments, "--seed", "7", "--device", "cpu", "--engine", "local")
    recipe = Recipe.load("runs/tiny/recipe.yaml")
    assert recipe == tiny(rounds=1, training__batch=64, training__optimiser__lr=0.01, seed=7)
    assert (summary["rounds"], summary["seed"]) == (1, 7)
    assert document("resume", "runs/tiny") == summary == json.loads(Path("runs/tiny/result.json").read_text())


def test_a_name_never_leads_out_of_the_folder() -> None:
    write_recipe(Path(), {**TINY, "name": "../../over there", "rounds": 1}, "sly.yaml")
    assert call("run", "sly.yaml").exit_code == 0
    assert Path("runs/over-there/result.json").exists()


def test_a_comparison_in_a_table_and_as_json() -> None:
    write_recipe(Path(), {**TINY, "methods": {"FedAvg": {}, "Local": {"algorithm": "local"}}}, "two.yaml")
    shown = call("compare", "two.yaml", "--seeds", "2", "--set", "rounds=1")
    assert shown.exit_code == 0
    assert "written: runs/tiny/report.html  runs/tiny/report.md\n" in shown.stdout
    assert [line for line in shown.stderr.splitlines() if "seed" in line] == [
        f"{name}, seed {seed} ({number} of 4)"
        for number, (name, seed) in enumerate([(n, s) for n in ("FedAvg", "Local") for s in (0, 1)], 1)
    ]
    found = document("compare", "two.yaml", "--seeds", "2", "--set", "rounds=1")
    assert [(method["name"], method["seeds"]) for method in found["methods"]] == [("FedAvg", 2), ("Local", 2)]
    by_folder = document("compare", "runs/tiny/fedavg", "runs/tiny/local", "--out", "side by side")
    assert [m["figures"] for m in by_folder["methods"]] == [m["figures"] for m in found["methods"]]
    assert Path("side by side/report.md").exists()


def test_the_demo_and_a_paper_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = tmp_path / "ours"
    (recipes / "paper").mkdir(parents=True)
    values = {**TINY, "about": "Tiny.", "rounds": 1, "methods": {"FedAvg": {}}}
    write_recipe(recipes, values, "demo.yaml")
    write_recipe(recipes / "paper", values, "quick.yaml")
    monkeypatch.setattr("polyclinic.config.bundled.recipes_folder", lambda: recipes)
    monkeypatch.setattr("polyclinic.experiments.reproduce.recipes_folder", lambda: recipes)
    assert document("demo", "--seed", "4")["title"] == "tiny"
    assert Path("polyclinic-demo/fedavg/seed-4/result.json").exists()
    assert call("demo", "--seed", "5").stderr.startswith("Tiny.\nFedAvg, seed 5\n")
    found = document("reproduce", "paper", "--quick")
    assert found["page"] == "runs/paper-quick/paper.md"
    assert found == document("reproduce", "paper", "--quick", "--rebuild")
    assert "page: runs/paper-quick/paper.md" in call("reproduce", "paper", "--quick").stdout
    assert document("list", "recipes") == [
        {"name": "demo", "about": "Tiny."},
        {"name": "paper/quick", "about": "Tiny."},
    ]


@pytest.mark.parametrize(
    ("what", "names"),
    [("algorithms", ALGORITHMS), ("models", MODELS), ("datasets", DATASETS), ("recipes", bundled_recipes())],
)
def test_lists_contain_the_names_that_recipes_can_give(what: str, names: dict[str, Any]) -> None:
    rows = document("list", what)
    assert [row["name"] for row in rows] == list(names)
    assert all(row["about"] for row in rows)
    shown = call("list", what).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in shown for name in names)


def test_an_algorithm_lists_the_options_a_recipe_can_give_it() -> None:
    options = {row["name"]: row["options"] for row in document("list", "algorithms")}
    assert options["fedprox"] == ["mu"]
    assert options["fedavg"] == []


def test_an_error_of_the_disk_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/locked")

    monkeypatch.setattr("polyclinic.run", fail)
    assert "/locked: Permission denied" in refused("run", "tiny.yaml")


def test_ctrl_c_before_the_first_round_says_how_to_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyclinic.run", stop)
    result = call("run", "tiny.yaml", "--out", "out")
    assert result.exit_code == 130
    assert result.stderr == "stopped; no finished round is lost: continue with the same command\n"
    assert not Path("out").exists()


def environment() -> dict[str, str]:
    source = str(Path(polyclinic.__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_tells_the_way_on_and_resuming_ends_the_same(workers: int) -> None:
    settings = ["--set", "rounds=8", "--set", f"engine.workers={workers}", "--set", "training.epochs=8"]
    settings += ["--set", "evaluate.every=0", "--set", "snapshot_every=2"]
    arguments = ["run", "tiny.yaml", *settings, "--out", "my run"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )
    wait_for(lambda: len(list(Path("my run/snapshots").glob("*"))) >= 2, process)
    process.send_signal(signal.SIGINT)
    printed, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == ""
    *progress, last = message.splitlines()
    assert last == "stopped; no finished round is lost: continue with polyclinic resume 'my run'"
    assert all(line.startswith(("no image", "tiny, seed 0", "  round ")) for line in progress), message
    assert not Path("my run/result.json").exists()
    resumed = document("resume", "my run")
    whole = document("run", "tiny.yaml", *settings, "--set", "engine.workers=0", "--out", "whole")
    assert resumed["sha256"] == whole["sha256"], "or other numbers in one process than in workers"


def test_the_installed_command_fails_and_succeeds_like_any_other() -> None:
    wrong = subprocess.run(
        [*COMMAND, "run", "tiny.yaml", "--set", "rouds=1"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: tiny.yaml: there is no key 'rouds' (did you mean 'rounds'?)")
    assert wrong.stderr.count("\n") == 1


def test_listing_needs_nothing_heavy_but_torch_and_no_greek() -> None:
    heavy = ["matplotlib", "sklearn", "scipy.stats", "torchvision", "pandas", "torch._dynamo"]
    code = f"""
import sys
from polyclinic.cli.main import main
try:
    main()
finally:
    print([name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""
    ascii_only = {**environment(), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code, "list", "datasets"]
    found = subprocess.run(command, capture_output=True, text=True, env=ascii_only, check=False)
    assert (found.returncode, found.stderr) == (0, "[]\n")
    assert "8 ? 8" in found.stdout
