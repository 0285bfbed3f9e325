"""One run as its folder shows it: its state, rounds, time, sites, curves, cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Literal, get_args

from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import SiteId
from polyclinic.evaluation.summary import metric_by_cluster, sum_costs
from polyclinic.federation.round_log import HELD_OUT
from polyclinic.reporting.html.formatting import duration
from polyclinic.reporting.html.sections.costs import WRONG
from polyclinic.storage.journal import add_interrupted_rounds

State = Literal["finished", "running", "waiting", "failed", "stopped", "unreadable"]
STATES: tuple[State, ...] = get_args(State)
RECENT = 10
"""Rounds whose median says how long one takes."""
PATIENCE = 60.0
"""Seconds without news after which a run counts as stopped, or as slow, unless its rounds take longer."""
METRICS = ("accuracy", "auc", "loss")
Curve = Sequence[tuple[int, float]]
ALL, APART = "validation images", "held-out test images"


@dataclass(frozen=True)
class SiteStatus:
    """What is known of one site."""

    site: SiteId
    last: int | None
    """The last round in which its update counted."""
    counted: int
    refused: int
    lost: int
    down: int
    up: int
    seconds: float
    now: str
    """Between real sites: whether it is connected."""


@dataclass(frozen=True)
class RepeatedFailure:
    """The same thing going wrong at the same site."""

    site: SiteId
    kind: str
    why: str
    """As it was told the last time."""
    rounds: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RunStatus:
    """A run, as it was when its folder was looked at; numbered, since its seed may have to stay secret."""

    method: str
    number: int = 1
    rounds: int = 0
    recipe: Recipe | None = None
    summary: Mapping[str, Any] | None = None
    ledger: Sequence[Mapping[str, Any]] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    status: Mapping[str, Any] | None = None
    working: bool | None = False
    written: float | None = None
    """When it was last heard of."""
    problem: str = ""

    @property
    def seconds_since_news(self) -> float | None:
        """Seconds since the last news."""
        return None if self.written is None else max(0.0, time.time() - self.written)

    @property
    def state(self) -> State:
        if self.problem:
            return "unreadable"
        if self.summary is not None:
            return "finished"
        if self.ledger and self.ledger[-1]["event"] == "failed round":
            return "failed"
        if self.working or (self.working is None and self.seconds_since_news is not None and not self.is_slow):
            return "running"
        return "stopped" if self.ledger else "waiting"

    @cached_property
    def _last_rounds(self) -> tuple[int, int]:
        """The last round that counts, and the last that was begun: who resumes may go back some rounds."""
        done = begun = 0
        for row in self.ledger:
            if row["event"] in ("round", "resumed"):
                done = begun = int(row["round"])
            elif row["event"] == "charge":
                begun = int(row["round"])
        return min(done, self.rounds), begun

    @property
    def rounds_done(self) -> int:
        return int(self.summary["rounds"]) if self.summary is not None else self._last_rounds[0]

    @property
    def is_testing(self) -> bool:
        """All rounds are played, the final model is being tested."""
        tested = bool(self.ledger) and self.ledger[-1]["event"] == "evaluation"
        return self.state == "running" and (tested or self._last_rounds[1] > self.rounds)

    @property
    def current_round(self) -> int:
        """The round that is being played, or the last that was."""
        return self.rounds_done if self.state == "finished" else min(max(self._last_rounds), self.rounds)

    @cached_property
    def round_times(self) -> Curve:
        """How long each round took."""
        return [(int(row["round"]), float(row["seconds"])) for row in self.ledger if row["event"] == "round"]

    @property
    def median_round_seconds(self) -> float | None:
        return median(seconds for _, seconds in self.round_times[-RECENT:]) if self.round_times else None

    @property
    def seconds_left(self) -> float | None:
        """Of the rounds alone; None as long as no round tells, or where nothing goes on."""
        each = self.median_round_seconds
        if self.state != "running" or each is None or self.is_testing:
            return None
        begun = min(self.seconds_since_news or 0.0, each) if self.current_round > self.rounds_done else 0.0
        return max(0.0, each * (self.rounds - self.rounds_done) - begun)

    @property
    def is_slow(self) -> bool:
        """Whether the last news is older than rounds usually take."""
        return self.seconds_since_news is not None and self.seconds_since_news > max(
            PATIENCE, 3 * max((seconds for _, seconds in self.round_times), default=0.0)
        )

    @property
    def sentence(self) -> str:
        """What goes on. It changes from round to round and not from second to second: it is read aloud."""
        played = f"{self.rounds_done} of {self.rounds} rounds"
        if self.state == "unreadable":
            return f"Its files cannot be read: {self.problem}."
        if self.state == "waiting":
            waits = (self.status or {}).get("state") == "waiting for sites" and (self.status or {}).get("alive")
            return "Waiting for sites to connect." if waits else "Not yet started."
        if self.state == "finished":
            return f"Finished: {played} played{self._describe_early_stop()}."
        if self.state == "failed":
            row = self.ledger[-1]
            return f"Failed in round {row['round']} of {self.rounds}: too few updates could be accepted."
        if self.state == "stopped":
            still = "no process is at work" if self.working is False else "nothing is written any more"
            return f"Stopped after {played}: {still}."
        if self.is_testing:
            return f"Running: all rounds are played ({played}), the final model is being tested."
        return (
            f"Running: round {self.current_round} of {self.rounds}."
            if self.current_round
            else "Running: images are being prepared."
        )

    def _describe_early_stop(self) -> str:
        assert self.summary is not None
        if (self.summary.get("privacy") or {}).get("stopped_by_budget"):
            return "; the next would have cost more privacy than was allowed"
        return "; it stopped early, as the recipe asks" if self.summary.get("stopped_early") else ""

    @cached_property
    def charged_ledger(self) -> Sequence[Mapping[str, Any]]:
        """The ledger, with what rounds may have cost that were cut short."""
        return add_interrupted_rounds(self.ledger)

    @cached_property
    def cost(self) -> dict[str, Any]:
        return sum_costs(self.charged_ledger)

    @cached_property
    def sites(self) -> list[SiteStatus]:
        """Every site that was ever asked."""
        there = (self.status or {}).get("sites", {})
        names = dict.fromkeys([*there, *(site for row in self.ledger for site in row.get("sites", ()))])
        counted: dict[SiteId, list[int]] = {}
        for row in self.rows:
            if row["event"] == "train" and row.get("outcome") == "accepted":
                counted.setdefault(row["site"], []).append(int(row["round"]))
        return [self._site_status(site, counted.get(site, []), there.get(site, {})) for site in names]

    def _site_status(self, site: SiteId, counted: Sequence[int], there: Mapping[str, Any]) -> SiteStatus:
        notes = self._ledger_by_site.get(site, [])
        outcomes = [note.get("outcome") for note in notes]
        alive = bool((self.status or {}).get("alive"))
        return SiteStatus(
            site,
            last=max(counted, default=None),
            counted=len(counted),
            refused=outcomes.count("refused"),
            lost=sum(outcomes.count(kind) for kind in WRONG if kind != "refused"),
            down=sum(int(note.get("down", 0)) for note in notes),
            up=sum(int(note.get("up", 0)) for note in notes),
            seconds=sum(float(note.get("seconds", 0.0)) for note in notes),
            now=str(there.get("state", "")) if alive else "",
        )

    @cached_property
    def _ledger_by_site(self) -> dict[SiteId, list[Mapping[str, Any]]]:
        found: dict[SiteId, list[Mapping[str, Any]]] = {}
        for row in self.charged_ledger:
            for site, note in row["sites"].items() if isinstance(row.get("sites"), dict) else ():
                found.setdefault(site, []).append(note)
        return found

    @cached_property
    def failures(self) -> list[RepeatedFailure]:
        """Alike where the kind is: what is told may differ in a figure from round to round."""
        found: dict[tuple[SiteId, str, str], list[tuple[int, str]]] = {}
        for row in self.ledger:
            for site, note in row["sites"].items() if isinstance(row.get("sites"), dict) else ():
                if note.get("outcome") in WRONG:
                    why = str(note.get("why") or "–")
                    key = site, note["outcome"], str(note.get("kind") or why)
                    found.setdefault(key, []).append((int(row["round"]), why))
        return [
            RepeatedFailure(*key[:2], told[-1][1], tuple(round for round, _ in told)) for key, told in found.items()
        ]

    @cached_property
    def curves(self) -> dict[str, dict[str, Curve]]:
        """By metric: on validation images, over all sites, or those of a cluster; and on test images of no site."""
        return {metric: self._metric_curves(metric) for metric in METRICS}

    def _metric_curves(self, metric: str) -> dict[str, Curve]:
        clusters = metric_by_cluster(self.rows, metric)
        found: dict[str, Curve] = {f"cluster {name}": told for name, told in clusters.items() if name}
        if found:
            clusters = metric_by_cluster([{**row, "cluster": ""} for row in self.rows], metric)
        whole = self._append_final(metric, clusters.get("", []))
        apart = [row for row in self.rows if row["event"] == "evaluate" and row["site"] == HELD_OUT]
        held_out = [(int(row["round"]), float(row[metric])) for row in apart if row.get(metric) is not None]
        return {name: told for name, told in ({ALL: whole} | found | {APART: held_out}).items() if told}

    def _append_final(self, metric: str, told: Curve) -> Curve:
        """With the final model's point, which no later round tells of."""
        merged = (self.summary or {}).get("merged", {})
        models = (merged.get(model, {}).get("validation", {}) for model in ("personal", "global"))
        last = next((found[metric] for found in models if found.get(metric) is not None), None)
        return (
            [*told, (self.rounds_done, float(last))]
            if told and last is not None and told[-1][0] < self.rounds_done
            else told
        )

    @cached_property
    def by_site(self) -> dict[SiteId, Curve]:
        """Accuracy on each site's validation images."""
        rows: dict[SiteId, list[Mapping[str, Any]]] = {}
        for row in self.rows:
            rows.setdefault(row["site"], []).append(row)
        told = {site: metric_by_cluster(mine, "accuracy") for site, mine in rows.items()}
        return {site: sorted(point for part in found.values() for point in part) for site, found in told.items()}

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "method": self.method,
            "run": self.number,
            "state": self.state,
            "sentence": self.sentence,
            "round": self.current_round,
            "done": self.rounds_done,
            "rounds": self.rounds,
            "seconds_a_round": self.median_round_seconds,
            "seconds_left": self.seconds_left,
            "seconds_since_news": self.seconds_since_news,
            "cost": self.cost,
        }


def format_ago(seconds: float) -> str:
    """Whole seconds, where they are few."""
    return f"{seconds:.0f} s" if seconds < 100 else duration(seconds)
