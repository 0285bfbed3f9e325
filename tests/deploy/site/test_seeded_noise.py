"""Noise from the recipe's seed at a real site: allowed for rehearsals, and never taken for protection."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from polyclinic.cli.privacy import spent_command
from polyclinic.deploy.site.privacy_account import price_site_ledger
from tests.deploy.example_sites import (
    ApprovingHandler,
    Crossing,
    asked,
    config,
    deployed,
    desks,
    recipe,
    refusal,
    said,
    write_hospitals,
)

SEEDED: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-3, "randomness": "seed"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeded")
    write_hospitals(folder)
    return folder


def test_a_rehearsal_is_charged_without_end(home: Path) -> None:
    """Whoever has the recipe can take its noise away: no later run may build upon the ε that it would have had."""
    crossing = Crossing(desks(home, "rehearsal"))
    _, outcome = deployed(recipe(privacy=SEEDED, rounds=2), home, crossing)
    assert outcome.rounds == 2
    assert price_site_ledger(home / "hill" / "rehearsal", 1e-3)["image"] == math.inf
    (app := typer.Typer()).command()(spent_command)
    given = [str(home / "hill" / "rehearsal" / "ledger.jsonl"), "--delta", "0.001"]
    assert "infinite" in CliRunner().invoke(app, given).output
    assert json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)["epsilon"]["image"] == "infinite"
    assert [row["epsilon"] for row in crossing.desks["hill"].releases.read_entries()][-1] == "infinite"
    budget = config(home, "hill", "rehearsal", budget={"unit": "image", "epsilon": 1000, "delta": 1e-3})
    later = asked("enrol", "hill", recipe(privacy={"epsilon": 3.0, "delta": 1e-3}, rounds=1))
    assert "privacy budget of hill" in refusal(said(ApprovingHandler(budget).answer_message(later)))


def test_a_budget_refuses_it(home: Path) -> None:
    site = config(home, "lake", "budget", budget={"unit": "image", "epsilon": 8, "delta": 1e-3})
    found = asked("enrol", "lake", recipe(privacy=SEEDED))
    assert "no privacy guarantee" in refusal(said(ApprovingHandler(site).answer_message(found)))


def test_a_preview_promises_nothing(home: Path) -> None:
    rows = ApprovingHandler(config(home, "hill", "preview")).preview_releases(recipe(privacy=SEEDED))
    (model,) = (row for row in rows if row.kind == "model")
    assert model.epsilon is None
    assert model.protection == "noised, but without a guarantee: the noise comes from a public seed"
