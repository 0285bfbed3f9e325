"""The test's side: small recipes, a driver to run them with, and what it means that two runs ended alike."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.storage.ledger import Ledger
from tests.driving import Ask

Values = dict[str, Any]
KILLED = -9
RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory where there is one: it is processes that die here, the disk need not be waited for."""
COMMON: Values = {
    "name": "crash",
    "seed": 11,
    "rounds": 4,
    "data": {"name": "digits", "partition": {"by": "iid", "sites": 3}},
    "model": {"name": "mlp", "dropout": 0.2},
    "evaluate": {"bootstrap": 20},
}
SGD: Values = {"optimiser": {"name": "sgd", "lr": 0.1}, "batch": 32, "epochs": None, "steps": 4}
ADAM: Values = {"optimiser": {"name": "adam", "lr": 0.005}, "batch": 32, "epochs": None, "steps": 4}
RECIPES: dict[str, Values] = {
    # control variates at the sites, sites that sit a round out, more than one round lost by a crash
    "scaffold": {**COMMON, "algorithm": "scaffold", "training": SGD, "cohort": 2, "snapshot_every": 2},
    "scaffold each round": {**COMMON, "algorithm": "scaffold", "training": SGD, "cohort": 2},
    # weights and optimiser at the sites, a learning rate that depends on what was measured before the crash
    "single": {**COMMON, "algorithm": "single", "training": ADAM, "schedule": {"name": "plateau", "patience": 0}},
    # noise and samples that must be the same again
    "private": {
        **COMMON,
        "algorithm": "fedavg",
        "training": SGD,
        "cohort": 2,
        "privacy": {"noise": 1.5, "delta": 1e-4, "randomness": "secret"},
    },
    # noise of the server's own, which no repeated round has again, and no ε to spare
    "promised": {
        **COMMON,
        "algorithm": "fedavg",
        "training": SGD,
        "rounds": 2,
        "privacy": {"unit": "site", "noise_at": "server", "epsilon": 20, "delta": 1e-2},
    },
    # an order of cases by what was right before, which an epoch of several rounds keeps; scores in files of their own
    "curriculum": {
        **COMMON,
        "rounds": 6,
        "algorithm": "scaffold",
        "training": {**SGD, "steps": 9, "curriculum": {"by": "forgotten", "strength": 4.0}},
        "cohort": 2,
        "snapshot_every": 2,
        "evaluate": {"bootstrap": 20, "forgetting": True},
    },
    # sums behind masks, with what a site remembers, and more than one round lost by a crash
    "masked": {
        **COMMON,
        "algorithm": "scaffold",
        "training": SGD,
        "stages": [{"name": "mask"}],
        "snapshot_every": 2,
    },
    # nothing remembered
    "fedavg": {**COMMON, "algorithm": "fedavg", "training": SGD},
    # little measured, so that the ledger is the longest file until the first snapshot
    "quiet": {**COMMON, "algorithm": "fedavg", "training": SGD, "evaluate": {"every": 0}, "snapshot_every": 4},
}


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (minus the signal), and the error it named."""

    code: int
    error: str = ""
    sentence: str = ""


@dataclass(frozen=True)
class Driver:
    """Starts children through `tests.driver`. The test knows their process numbers and may kill them."""

    ask: Ask
    report: Path
    """Where a child that fails writes why."""

    def start(self, recipe: Values, folder: Path, **how: Any) -> int:
        return int(self.ask(do="play", recipe=recipe, folder=str(folder), report=str(self.report), **how))

    def wait(self, pid: int) -> Ended:
        code = int(self.ask(do="wait", pid=pid))
        if code != 1:
            return Ended(code)
        named = json.loads(self.report.read_text())
        self.report.unlink()
        return Ended(code, **named)

    def run(self, recipe: Values, folder: Path, **how: Any) -> Ended:
        return self.wait(self.start(recipe, folder, **how))


def summary(folder: Path) -> Values:
    found: Values = json.loads((folder / "result.json").read_text())
    return found


def ledger_rows(folder: Path) -> list[Values]:
    """The ledger, its chain walked."""
    return Ledger(folder / "ledger.jsonl").read()


def measured(folder: Path) -> list[Values]:
    """The rows of metrics.jsonl without what a clock decides: seconds, and the room their digits take in a reply."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "up")} for row in rows]


def remembered(folder: Path) -> dict[str, bytes]:
    """What each site remembers last."""
    return {site.name: sorted(site.glob("*.pcl"))[-1].read_bytes() for site in (folder / "sites").glob("*")}


def assert_same_end(found: Path, wanted: Path) -> None:
    """The same final state, metrics and memories; nothing half-written lies about; the ledger's chain holds."""
    aside = ("cost", "versions")
    here, there = ({k: v for k, v in summary(f).items() if k not in aside} for f in (found, wanted))
    assert here["sha256"] == there["sha256"]
    assert here == there
    assert (found / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
    assert measured(found) == measured(wanted)
    assert remembered(found) == remembered(wanted)
    assert unfinished(found) == []
    assert_nothing_unpaid(found, wanted)


def unfinished(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def charges(folder: Path) -> list[tuple[int, tuple[str, ...]]]:
    return [(row["round"], tuple(row["sites"])) for row in ledger_rows(folder) if row["event"] == "charge"]


def assert_nothing_unpaid(found: Path, wanted: Path) -> None:
    """Every round was charged before it was played, and a run that was cut short never looks cheaper."""
    open_charge: Mapping[str, Any] = {}
    for row in ledger_rows(found):
        if row["event"] == "charge":
            open_charge = row
        if row["event"] == "round":
            assert (row["round"], sorted(row["sites"])) == (open_charge["round"], sorted(open_charge["sites"]))
            open_charge = {}
    paid = charges(found)
    assert all(paid.count(charge) >= 1 for charge in charges(wanted))
    failed = sum(row["event"] == "failed round" for row in ledger_rows(found))
    cost, least = summary(found)["cost"], summary(wanted)["cost"]
    assert cost["bytes_down"] >= least["bytes_down"]
    if len(paid) > len(charges(wanted)) + failed:
        assert cost["bytes_down"] > least["bytes_down"]
        assert cost["bytes_up"] > least["bytes_up"]
