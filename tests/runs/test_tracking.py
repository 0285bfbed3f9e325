"""What TensorBoard and MLflow were told, read back by their own libraries, is what the run's own files say."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from polyclinic import Recipe, RunResult, run
from polyclinic.config.identity import identity, method_identity
from polyclinic.core.errors import EngineError, RecipeError, StoreError
from polyclinic.deploy.serve import recipe_for_sites
from polyclinic.deploy.site.policy import recipe_digest
from polyclinic.evaluation.metrics import METRICS
from polyclinic.evaluation.rounds import metric_by_cluster
from polyclinic.runs.tracking import backends, events as tracking
from polyclinic.storage.run_folder import RunFolder
from tests.commands import call, refused
from tests.small import SITES, tiny, write_recipe

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's own

Told = dict[tuple[str, int], float]
BOTH = ["tensorboard", "mlflow"]
TIMED = ("seconds", "site_seconds", "bytes_up")
"""Times, and the bytes of messages that hold them."""


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A store whose tables MLflow has made, which takes it seconds."""
    if find_spec("mlflow") is None:
        return None
    import mlflow

    path: Path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}")
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path | None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if empty_store is not None:
        shutil.copy(empty_store, tmp_path)


def client() -> Any:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    return mlflow.MlflowClient(f"sqlite:///{Path('mlflow.db').resolve()}")


def on_tensorboard(folder: Path) -> Told:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    events.Reload()
    every = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    return once(every)


def in_mlflow(name: str) -> Told:
    (found,) = [one for one in kept_runs() if one.info.run_name == name]
    histories = [client().get_metric_history(found.info.run_id, key) for key in found.data.metrics]
    return once([(one.key, one.step, one.value) for history in histories for one in history])


def kept_runs() -> list[Any]:
    return list(client().search_runs([client().get_experiment_by_name("polyclinic").experiment_id]))


def once(every: list[tuple[str, int, float]]) -> Told:
    """No step twice."""
    assert max(Counter((name, step) for name, step, _ in every).values()) == 1
    return {(name, step): value for name, step, value in every}


def without_times(told: Told) -> Told:
    return {at: value for at, value in told.items() if at[0].split("/")[-1] not in TIMED}


def needed(*names: str) -> None:
    for name in names:
        pytest.importorskip(name, reason=f"needs the extra {name}")


def interrupted(recipe: Recipe, folder: Path, event: str, round: int | None) -> None:
    """Stops it at this event."""

    def watch(happened: str, info: Mapping[str, Any]) -> None:
        if (happened, info.get("round")) == (event, round):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, folder, watch=watch)


def test_both_are_told_the_same_and_it_is_what_the_run_says_of_itself(tmp_path: Path) -> None:
    needed(*BOTH)
    result = run(tiny(rounds=3, track=BOTH), tmp_path / "run")
    told, also = in_mlflow("tiny"), on_tensorboard(tmp_path / "run")
    assert also == pytest.approx(told, rel=1e-6)  # its files hold single precision
    for metric in METRICS:
        assert told.get((f"test/{metric}", 3)) == result.headline.scores.value(metric)
        for site in SITES:
            here = result.summary.sites[site]["global"]
            assert told.get((f"test/site/{site}/{metric}", 3)) == here["test"].value(metric)
            assert told.get((f"site/{site}/{metric}", 3)) == pytest.approx(here["validation"].value(metric))
    for name, total in result.summary.cost.model_dump().items():
        if name != "run_seconds":
            assert sum(value for (key, _), value in told.items() if key == name) == pytest.approx(total)
    curve = {step: value for (name, step), value in told.items() if name == "accuracy" and step < 3}
    assert curve == pytest.approx(dict(metric_by_cluster(RunFolder(tmp_path / "run").metrics(), "accuracy")[""]))


def test_it_changes_nothing_in_a_run(tmp_path: Path) -> None:
    needed(*BOTH)
    plain, followed = tiny(), tiny(track=BOTH)
    found, expected = run(followed, tmp_path / "followed"), run(plain, tmp_path / "plain")
    assert found.summary.sha256 == expected.summary.sha256
    assert found.summary.sites == expected.summary.sites
    assert identity(followed) == identity(plain)
    assert recipe_digest(followed) == recipe_digest(plain)
    assert method_identity(followed) == method_identity(plain)
    assert recipe_for_sites(followed) == recipe_for_sites(plain)
    assert "track" not in identity(plain)  # so folders that are older than the key go on


@pytest.mark.parametrize(("event", "round"), [("site", 3), ("round done", 3), ("evaluated", None)])
def test_a_run_that_was_interrupted_goes_on_without_a_step_twice(
    tmp_path: Path, event: str, round: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed(*BOTH)
    recipe = tiny(rounds=4, snapshot_every=2, track=BOTH, name="broken")
    interrupted(recipe, tmp_path / "broken", event, round)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the store is found again from anywhere
    run(Recipe.load(tmp_path / "broken" / "recipe.yaml"), tmp_path / "broken")
    monkeypatch.chdir(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())
    run(tiny(rounds=4, snapshot_every=2, track=BOTH, name="whole"), tmp_path / "whole")
    whole, broken = in_mlflow("whole"), in_mlflow("broken")
    assert broken.keys() == whole.keys()
    figures = [at for at in whole if at[0].split("/")[-1] in METRICS]
    assert {at: broken[at] for at in figures} == {at: whole[at] for at in figures}
    assert on_tensorboard(tmp_path / "broken") == pytest.approx(broken, rel=1e-6)
    spent = json.loads((tmp_path / "broken" / "result.json").read_text())["cost"]["bytes_up"]
    assert sum(value for (name, _), value in broken.items() if name == "bytes_up") == spent  # repeated rounds too


def test_only_what_a_snapshot_keeps_is_told(tmp_path: Path) -> None:
    needed("tensorboard")
    interrupted(tiny(rounds=4, snapshot_every=3, track="tensorboard"), tmp_path / "run", "round", 3)
    assert not (tmp_path / "run" / "tensorboard").exists()
    interrupted(tiny(rounds=5, snapshot_every=3, track="tensorboard"), tmp_path / "other", "round", 5)
    assert {step for name, step in on_tensorboard(tmp_path / "other") if name == "seconds"} == {1, 2, 3}


def test_a_run_that_has_ended_can_be_told_afterwards(tmp_path: Path) -> None:
    needed("tensorboard")
    run(tiny(track="tensorboard"), tmp_path / "live")
    result = run(tiny(), tmp_path / "ended")
    again = run(tiny(track="tensorboard"), tmp_path / "ended")
    assert again.summary.sha256 == result.summary.sha256
    live, ended = on_tensorboard(tmp_path / "live"), on_tensorboard(tmp_path / "ended")
    assert without_times(ended) == without_times(live)
    files = list((tmp_path / "ended" / "tensorboard").iterdir())
    run(tiny(track="tensorboard"), tmp_path / "ended")
    assert list((tmp_path / "ended" / "tensorboard").iterdir()) == files  # there was nothing to add


def test_what_a_killed_process_had_half_written_is_written_again(tmp_path: Path) -> None:
    needed("tensorboard")
    run(tiny(track="tensorboard"), tmp_path / "run")
    whole = on_tensorboard(tmp_path / "run")
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    os.truncate(file, file.stat().st_size // 2)
    assert 0 < len(on_tensorboard(tmp_path / "run")) < len(whole)
    run(tiny(track="tensorboard"), tmp_path / "run")
    assert on_tensorboard(tmp_path / "run") == whole


def test_epsilon_rises_to_what_the_run_has_cost(tmp_path: Path) -> None:
    needed("tensorboard")
    wish = {"epsilon": 3}
    result = run(tiny(rounds=3, privacy=wish, track="tensorboard"), tmp_path / "run")
    told = on_tensorboard(tmp_path / "run")
    values = [told["epsilon", round] for round in (1, 2, 3)]
    assert sorted(set(values)) == values
    assert values[-1] == pytest.approx(result.summary.epsilon, rel=1e-6)


def test_workers_and_personal_models(tmp_path: Path) -> None:
    needed("tensorboard")
    recipe = tiny(algorithm="fedper", model="cnn_c", engine__workers=2, track="tensorboard")
    result = run(recipe, tmp_path / "run")
    told = on_tensorboard(tmp_path / "run")
    personal = result.summary.sites["site-1"]["personal"]["validation"]
    assert told["site/site-1/accuracy", 2] == pytest.approx(personal.value("accuracy"), rel=1e-6)


def test_commands_take_it_and_mlflow_holds_one_run_for_each(tmp_path: Path) -> None:
    needed("mlflow")
    recipe = write_recipe(tmp_path)
    assert call("compare", recipe, "--seeds", "2", "--track", "mlflow", "--out", tmp_path / "two").exit_code == 0
    assert call("compare", recipe, "--seeds", "2", "--track", "mlflow", "--out", tmp_path / "two").exit_code == 0
    found = kept_runs()
    assert sorted(one.data.params["seed"] for one in found) == ["0", "1"]
    assert {one.data.params["algorithm.name"] for one in found} == {"fedavg"}
    assert {one.info.status for one in found} == {"FINISHED"}
    assert {one.info.user_id for one in found} == {"unknown"}
    interrupted(tiny(track="mlflow", name="stopped"), tmp_path / "stopped", "round", 2)
    (stopped,) = [o for o in kept_runs() if o.info.run_name == "stopped"]
    assert stopped.info.status == "FAILED"
    assert call("resume", tmp_path / "stopped").exit_code == 0
    (stopped,) = [o for o in kept_runs() if o.info.run_name == "stopped"]
    assert stopped.info.status == "FINISHED"


def test_the_seed_of_a_private_run_is_not_told() -> None:
    assert "seed" in tracking.recipe_parameters(tiny())
    assert "seed" not in tracking.recipe_parameters(tiny(privacy={"epsilon": 3}))


@pytest.mark.parametrize("name", BOTH)
def test_a_missing_extra_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda package: None)
    recipe = write_recipe(tmp_path)
    for command in ("run", "compare"):
        told = refused(command, recipe, "--track", name, "--out", tmp_path / "run")
        assert f"pip install 'polyclinic[{name}]'" in told
    assert not (tmp_path / "run").exists()
    with pytest.raises(EngineError, match="pip install"):
        run(tiny(track=name), tmp_path / "run")


def test_what_cannot_be_tracked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="this run has none"):
        run(tiny(track="tensorboard"))
    with pytest.raises(RecipeError, match=r"track\.0 is 'wandb', but should be 'tensorboard' or 'mlflow'"):
        tiny(track="wandb")


def test_a_store_that_cannot_be_used_stops_a_run_before_round_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path
) -> None:
    needed("mlflow")
    for name in ("ours.db", "theirs.db"):
        shutil.copy(empty_store, tmp_path / name)
    (tmp_path / "mlflow.db").write_bytes(b"no database " * 100)
    with pytest.raises(StoreError, match="MLflow's store cannot be used"):
        run(tiny(track="mlflow"), tmp_path / "run")
    assert (tmp_path / "run" / "ledger.jsonl").read_text() == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/ours.db")
    run(tiny(track="mlflow"), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "mlflow.json").read_text())["store"] is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/theirs.db")
    with pytest.raises(StoreError, match="does not have the run"):
        run(tiny(track="mlflow"), tmp_path / "run")


def test_a_store_that_fails_later_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needed("mlflow")
    recipe = tiny(rounds=4, track="mlflow")

    def watch(event: str, info: Mapping[str, Any]) -> None:
        if (event, info.get("round")) == ("round", 2):
            with sqlite3.connect(tmp_path / "mlflow.db") as database:
                database.execute("ALTER TABLE metrics RENAME TO lost")
            database.close()

    with caplog.at_level(logging.WARNING, logger="polyclinic"):
        result: RunResult = run(recipe, tmp_path / "run", watch=watch)
    assert result.summary.sha256 == run(tiny(rounds=4)).summary.sha256
    (warning,) = [record for record in caplog.records if record.name == "polyclinic.runs.tracking.events"]
    assert "the same command adds what is missing" in warning.getMessage()
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("ALTER TABLE lost RENAME TO metrics")
    database.close()
    run(recipe, tmp_path / "run")
    run(tiny(rounds=4, track="mlflow", name="whole"), tmp_path / "whole")
    assert without_times(in_mlflow("tiny")) == without_times(in_mlflow("whole"))


@pytest.mark.parametrize(
    ("site", "name"), [("St. Mary", "St. Mary"), ("Zürich-2", "Zürich-2"), ("a/b", "a_b"), ("..", "_"), ("β#1", "β_1")]
)
def test_names_of_sites_are_such_as_mlflow_takes(site: str, name: str) -> None:
    needed("mlflow")
    from mlflow.utils.validation import _validate_metric_name

    assert tracking.sanitize_name(site) == name
    _validate_metric_name(f"site/{tracking.sanitize_name(site)}/auc")  # type: ignore[no-untyped-call]
