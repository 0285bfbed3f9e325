"""How fast, and how long: the learning rate over rounds, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over ROUNDS (a fresh schedule inside each round would never anneal)."""

    name: Literal["constant", "cosine", "plateau"] = "constant"
    period: int | None = None
    """cosine: rounds from full rate to `minimum` (default: the whole run)."""
    patience: int = 3
    """plateau: rounds without improvement of the validation loss before the rate is cut …"""
    factor: float = 0.1
    """… by this factor."""
    minimum: float = 0.0
    """The rate never falls below this share of the initial one."""

    def lr_factor(self, round: int, rounds: int, cuts: int) -> float:
        if self.name == "cosine":
            angle = math.pi * (round - 1) / (self.period or rounds)
            return self.minimum + (1 - self.minimum) * (1 + math.cos(angle)) / 2
        return max(self.minimum, self.factor**cuts) if self.name == "plateau" else 1.0


@dataclass(frozen=True)
class EarlyStop:
    """Stop when `metric` on the validation parts has not improved by `min_delta` for `patience` rounds."""

    patience: int = 5
    min_delta: float = 0.0
    metric: str = "loss"
