"""Schedules over rounds: the learning rate, and early stopping."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True)
class Schedule:
    """The learning rate over ROUNDS (a schedule that starts anew inside each round would never anneal)."""

    name: Literal["constant", "cosine", "plateau"] = "constant"
    period: Annotated[int, Field(ge=1)] | None = None
    """cosine: rounds from the full rate to `minimum` (default: the whole run)."""
    patience: Annotated[int, Field(ge=0)] = 3
    """plateau: rounds without improvement of the validation loss before the rate is cut …"""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """… by this factor."""
    minimum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate never falls below this share of the initial one."""

    def lr_factor(self, round: int, rounds: int, reductions: int) -> float:
        """Return what the initial rate is multiplied by in `round` of `rounds`, after so many `reductions`."""
        if self.name == "cosine":
            angle = math.pi * (round - 1) / (self.period or rounds)
            return self.minimum + (1 - self.minimum) * (1 + math.cos(angle)) / 2
        return max(self.minimum, self.factor**reductions) if self.name == "plateau" else 1.0


@dataclass(frozen=True)
class EarlyStop:
    """Stop when `metric` on the validation parts has not improved by `min_delta` for `patience` rounds."""

    patience: Annotated[int, Field(ge=1)] = 5
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    metric: str = "loss"
