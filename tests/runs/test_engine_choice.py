"""`engine: auto`: measures, tells why, and stays with its choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.cli.display import result_table
from polyclinic.core.errors import StoreError
from polyclinic.federation.engines.local import LocalEngine
from polyclinic.runs.engines import choice as engine_choice
from polyclinic.runs.experiment import run
from tests.small import tiny


def times(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """What the measurement is said to find, apart and stacked."""
    found = iter(seconds)
    monkeypatch.setattr(engine_choice, "_time_steps", lambda *_: next(found))


@pytest.mark.parametrize(
    ("apart", "stacked", "name"), [(1.0, 0.5, "stacked"), (1.0, 0.95, "local"), (1.0, 2.0, "local")]
)
def test_the_faster_engine_is_taken_and_the_figures_told(
    monkeypatch: pytest.MonkeyPatch, apart: float, stacked: float, name: str
) -> None:
    times(monkeypatch, apart, stacked)
    told = run(tiny(engine__name="auto")).summary.engine
    assert told is not None
    assert told.name == name
    assert told.reason == f"2 steps of 3 sites took {apart * 1e3:.1f} ms apart and {stacked * 1e3:.1f} ms stacked"


def test_a_choice_that_was_made_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times(monkeypatch, 1.0, 0.5)
    first = run(tiny(engine__name="auto"), tmp_path).summary
    for name in ("result.json", "model.safetensors"):
        (tmp_path / name).unlink()
    again = run(tiny(engine__name="auto"), tmp_path).summary
    assert again.engine == first.engine is not None
    assert first.engine.name == json.loads((tmp_path / "engine.json").read_text())["name"]
    assert again.sha256 == first.sha256


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"algorithm": "centralised"}, "one place trains"),
        ({"data__partition__sites": 1}, "one place trains"),
        ({"cohort": 1}, "one place trains"),
    ],
)
def test_what_cannot_stack_is_not_measured(settings: dict[str, Any], why: str) -> None:
    told = run(tiny(engine__name="auto", **settings)).summary.engine
    assert told is not None
    assert told.name == "local"
    assert why in told.reason


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"name": "cloud", "why": ""}', '{"name": "local"}'])
def test_a_choice_that_cannot_be_read_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "engine.json").write_text(text)
    with pytest.raises(StoreError, match=r"engine\.json is damaged .* measured anew"):
        run(tiny(engine__name="auto"), tmp_path)


def test_the_table_of_a_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    times(monkeypatch, 1.0, 0.5)
    told = str(result_table(run(tiny(engine__name="auto")).summary).caption)
    assert "engine stacked: 2 steps of 3 sites took 1000.0 ms apart and 500.0 ms stacked" in told
    assert "engine" not in str(result_table(run(tiny()).summary).caption)


def test_measuring_changes_nothing() -> None:
    """Whichever it takes, the run is that engine's."""
    chosen = run(tiny(engine__name="auto")).summary
    assert chosen.engine is not None
    assert chosen.sha256 == run(tiny(engine__name=chosen.engine.name)).summary.sha256


def test_after_a_gpu_was_used_sites_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first step backwards fails in every worker. The result is the same without them."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert isinstance(engine_choice.make_engine("local", {}, workers=2, threads=1), LocalEngine)
