"""Features that never change are computed once, before the first round."""

from __future__ import annotations

import pytest
import torch

from polyclinic import run
from polyclinic.runs import sites
from tests.small import tiny


def test_fixed_features_computed_beforehand_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(model="scattering_linear", privacy={"noise": 1.0, "delta": 1e-4, "clip": 5.0, "randomness": "seed"})
    once = run(recipe).state["model"]
    monkeypatch.setattr(sites, "MOST_FEATURES", 0)
    anew = run(recipe).state["model"]
    for name, value in once.items():
        torch.testing.assert_close(value, anew[name], rtol=1e-4, atol=1e-5)
