"""Flower's simulation on Ray: the bits of the local engine, failures as there, and nothing left behind.

Most of it goes through Flower's messages and the one ClientApp here; a real Ray runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic import run
from polyclinic.core.errors import EngineError, RecipeError
from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.evaluation.summary import RunSummary
from polyclinic.federation.engines import Answer, RemoteExecution
from polyclinic.runs.engines import ray_engine
from polyclinic.runs.engines.ray_engine import (
    ActorSetup,
    actor_resources,
    make_actor_setup,
    make_request,
    make_site_app,
    parse_reply,
)
from polyclinic.runs.experiment import Experiment
from tests.small import SITES, tiny

PRIVATE = {"noise": 1.0, "delta": 1e-4}
HOSPITAL = {"name": "harbour", "vendor": "film", "patients": 10, "malignant": 0.5}
LAWS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"algorithm": "scaffold"},
    "fedmp": {"algorithm": "fedmp", "model__name": "mlp"},
    "private": {"privacy": {**PRIVATE, "randomness": "seed"}},
    "patients": {
        "privacy": {**PRIVATE, "unit": "patient", "randomness": "seed"},
        "data": {"name": "phantom", "size": 32, "hospitals": [HOSPITAL, {**HOSPITAL, "name": "hill"}]},
        "training__batch": 8,
    },
}
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra polyclinic[ray]")


class InProcess:
    """An engine whose one actor is this process."""

    assignment: ActorSetup

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        for node, site in enumerate(sent, 1):
            yield site, self.answer(site, node, sent[site])

    def answer(self, site: SiteId, node: int, data: bytes) -> bytes | Failure:
        return parse_reply(make_site_app(self.assignment)(*make_request(site, node, data)))


@pytest.fixture
def engine() -> InProcess:
    return InProcess()


def played(engine: InProcess, folder: Path, **settings: Any) -> RunSummary:
    experiment = Experiment(tiny(rounds=3, **settings), None, remote=RemoteExecution(engine, "ray"))
    engine.assignment = make_actor_setup(
        experiment.setup, experiment.folder, experiment.data, folder, experiment.secret_of_plan
    )
    return experiment.run().summary


@pytest.mark.parametrize("name", LAWS)
def test_the_application_gives_the_bits_of_the_local_engine(name: str, engine: InProcess, tmp_path: Path) -> None:
    there = played(engine, tmp_path, **LAWS[name])
    assert there.sha256 == run(tiny(rounds=3, **LAWS[name])).summary.sha256


def test_without_a_folder_actors_share_the_noise_of_the_run(engine: InProcess, tmp_path: Path) -> None:
    """An actor that drew noise of its own would not give the bits of a run with that very secret."""
    lent, own = tmp_path / "lent", tmp_path / "own"
    lent.mkdir()
    own.mkdir()
    there = played(engine, lent, privacy=PRIVATE)
    assert (lent / "secret").stat().st_mode & 0o777 == 0o600
    (own / "secret").write_text((lent / "secret").read_text())
    assert there.sha256 == run(tiny(rounds=3, privacy=PRIVATE), own).summary.sha256


def test_a_sites_refusal_is_its_failure(engine: InProcess, tmp_path: Path) -> None:
    played(engine, tmp_path)
    answer = engine.answer(SITES[0], 1, b"no message of ours")
    assert isinstance(answer, Failure)
    assert answer.kind == "refused"


def test_a_mistake_surfaces(engine: InProcess, tmp_path: Path) -> None:
    played(engine, tmp_path)
    with pytest.raises(RuntimeError, match=r"in an actor of Ray's(.|\n)*KeyError: 'nobody'"):
        engine.answer("nobody", 1, b"")


def test_other_images_than_the_runs_are_not_trained_on(engine: InProcess, tmp_path: Path) -> None:
    played(engine, tmp_path)
    engine.assignment = replace(engine.assignment, images="of another day")
    with pytest.raises(EngineError, match="cannot run the sites: the images there are not those"):
        engine.answer(SITES[0], 1, b"")


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("workers", range(17))
def test_every_actor_sits_on_one_gpu_and_no_gpu_is_idle(workers: int, gpus: int) -> None:
    actors, share = actor_resources(workers, 1, 4, gpus)
    on_each = round(1 / share)
    assert on_each * share == 1.0
    assert on_each * gpus >= actors > (on_each - 1) * gpus
    assert actors == (workers or gpus)


def test_without_gpus_threads_are_counted() -> None:
    assert actor_resources(0, 2, 8, None) == (4, 0.0)
    assert actor_resources(0, 16, 8, None) == (1, 0.0)
    assert actor_resources(3, 2, 8, None) == (3, 0.0)
    with pytest.raises(EngineError, match=r"no GPU here; set engine\.device: cpu"):
        actor_resources(2, 1, 8, 0)


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda _: None)
    with pytest.raises(EngineError, match=r"not installed; pip install 'polyclinic\[ray\]'$"):
        run(tiny(engine__name="ray"))


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda _: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        for name in ray_engine.QUIET:
            monkeypatch.setenv(name, "")  # so that they are put back
        with pytest.raises(EngineError, match=r"no Ray answers at 127\.0\.0\.1:\d+ \(.*\); check RAY_ADDRESS"):
            run(tiny(engine__name="ray"))


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
def test_ray_chooses_the_gpu(device: str) -> None:
    with pytest.raises(RecipeError, match="ray assigns GPUs itself"):
        tiny(engine__name="ray", engine__device=device)


SCRIPT = """
import json, os, sys
from polyclinic import Recipe, run
from polyclinic.runs.engines.ray_engine import RayEngine

def dying(): os._exit(1)

def close(engine):
    engine.backend.app_fn = dying
    answers.extend(answer.kind for _, answer in engine.exchange(4, {"site-1": b""}, None))
    closed(engine)

if __name__ == "__main__":
    closed, answers = RayEngine.close, []
    RayEngine.close = close
    recipe = Recipe.load(f"{sys.argv[1]}/recipe.yaml")
    print(json.dumps([run(recipe, f"{sys.argv[1]}/run").summary.sha256, *answers]))
"""
"""A run; and before its actors are dismissed, one message more, over which they die."""


def on_ray(folder: Path, fault: str = "", **settings: Any) -> Any:
    """In a process of its own, for Ray warns of this and that; what it started has ended with it."""
    (folder / "recipe.yaml").write_text(tiny(rounds=3, engine__name="ray", engine__workers=2, **settings).to_yaml())
    (folder / "play.py").write_text(SCRIPT)
    with ExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory())  # Ray's sockets need short names
        environment = os.environ | {"OMP_NUM_THREADS": "1", "POLYCLINIC_FAULT": fault, "TMPDIR": short}
        environment.pop("RAY_ADDRESS", None)
        process = subprocess.Popen(
            [sys.executable, folder / "play.py", folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        said, complaint = process.communicate(timeout=300)
        assert process.returncode == 0, complaint
        assert list(Path(short).glob("ray*")) == []
    left = [other for other in psutil.process_iter() if _session(other) == process.pid]
    assert psutil.wait_procs(left, timeout=15)[1] == []
    return json.loads(said)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


@needs_ray
def test_a_real_run_has_the_bits_of_the_local_engine_and_who_kills_actors_is_dead(tmp_path: Path) -> None:
    local = run(tiny(rounds=3, algorithm="scaffold")).summary.sha256
    assert on_ray(tmp_path, algorithm="scaffold") == [local, "dead"]


@needs_ray
@pytest.mark.heavy
@pytest.mark.parametrize("name", LAWS)
def test_killed_actors_change_no_bit(name: str, tmp_path: Path) -> None:
    """Each actor dies over its third site; the next one takes the message up."""
    there, _ = on_ray(tmp_path, "site-trained:3", **LAWS[name])
    assert there == run(tiny(rounds=3, **LAWS[name])).summary.sha256
