"""A run between sites is followed as a simulation is, and sites are not told where."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyclinic.deploy.serve import run_deployed
from polyclinic.federation.engines import RemoteExecution
from polyclinic.runs.tracking.backends import TensorBoard
from tests.deploy.example_sites import EVERYTHING, SITES, Crossing, desks, recipe
from tests.federation.mock_engine import MockEngine


@pytest.mark.parametrize("figures", [True, False])
def test_a_deployed_run_is_tracked(home: Path, tmp_path: Path, figures: bool) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    kinds = [kind for kind in EVERYTHING["kinds"] if figures or kind not in ("metrics", "predictions")]
    crossing = Crossing(desks(home, f"{tmp_path.name}-{figures}", allow={**EVERYTHING, "kinds": kinds}))
    found = recipe(track="tensorboard", evaluate__every=int(figures))
    summary = run_deployed(found, RemoteExecution(MockEngine(crossing.answer), "mock"), SITES, tmp_path).summary
    told = TensorBoard(tmp_path).written_points()
    rounds = set(range(found.rounds + 1))
    assert {step for name, step in told if name == f"site/{SITES[0]}/accuracy"} == (rounds if figures else set())
    assert (("test/accuracy", found.rounds) in told) == figures
    assert summary.headline.part == "test"
