"""The status of one run: its state, rounds, time, sites, curves and cost."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from polyclinic.config.recipe import Recipe
from polyclinic.core import HELD_OUT, SiteId
from polyclinic.evaluation.rounds import metric_by_cluster, metric_over_rounds, sum_costs
from polyclinic.evaluation.rows import (
    ChargeRow,
    CostRow,
    EvaluateRow,
    LedgerRow,
    MetricRow,
    SiteOutcome,
    TrainRow,
    group_pairs,
)
from polyclinic.evaluation.summary import Cost, RunSummary
from polyclinic.reporting.sections.costs import LOST
from polyclinic.storage.journal import add_interrupted_rounds
from polyclinic.storage.run_folder import PATIENCE, State

RECENT = 10
"""Rounds whose median says how long one takes."""
METRICS = ("accuracy", "auc", "loss")
Curve = Sequence[tuple[int, float]]
ALL, HELD_OUT_IMAGES = "validation images", "held-out test images"


@dataclass(frozen=True)
class SiteStatus:
    """How one site has taken part so far."""

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
    """A failure that one site had in several rounds."""

    site: SiteId
    kind: str
    why: str
    """The last reason given."""
    rounds: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RunStatus:
    """A run as its folder shows it; `number` counts the runs of a method."""

    method: str
    number: int = 1
    rounds: int = 0
    recipe: Recipe | None = None
    summary: RunSummary | None = None
    ledger: Sequence[LedgerRow] = ()
    rows: Sequence[MetricRow] = ()
    status: Mapping[str, Any] | None = None
    working: bool | None = False
    written: float | None = None
    """When it was last heard of."""
    problem: str = ""

    @property
    def seconds_since_news(self) -> float | None:
        return None if self.written is None else max(0.0, time.time() - self.written)

    @property
    def state(self) -> State:
        if self.problem:
            return "unreadable"
        if self.summary is not None:
            return "finished"
        if self.ledger and self.ledger[-1].event == "failed round":
            return "failed"
        if self.working or (self.working is None and self.seconds_since_news is not None and not self.is_slow):
            return "running"
        return "stopped" if self.ledger else "waiting"

    @cached_property
    def _last_rounds(self) -> tuple[int, int]:
        """The last round that counts, and the last that was begun; a resumed run goes back some rounds."""
        done = begun = 0
        for row in self.ledger:
            if row.event in ("round", "resumed"):
                done = begun = row.round
            elif isinstance(row, ChargeRow):
                begun = row.round
        return min(done, self.rounds), begun

    @property
    def rounds_done(self) -> int:
        return self.summary.rounds if self.summary is not None else self._last_rounds[0]

    @property
    def is_testing(self) -> bool:
        """Whether all rounds are played and the final model is being tested."""
        tested = bool(self.ledger) and self.ledger[-1].event == "evaluation"
        return self.state == "running" and (tested or self._last_rounds[1] > self.rounds)

    @property
    def current_round(self) -> int:
        """The round that is being played, or the last one that was."""
        return self.rounds_done if self.state == "finished" else min(max(self._last_rounds), self.rounds)

    @cached_property
    def round_times(self) -> Curve:
        """How long each round took."""
        return [(row.round, row.seconds) for row in self.ledger if isinstance(row, CostRow) and row.event == "round"]

    @property
    def median_round_seconds(self) -> float | None:
        return median(seconds for _, seconds in self.round_times[-RECENT:]) if self.round_times else None

    @property
    def seconds_left(self) -> float | None:
        """For the rounds alone; None before the first round has ended, and where nothing goes on."""
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
        """The state in words. It changes from round to round, not from second to second, since it is read aloud."""
        played = f"{self.rounds_done} of {self.rounds} rounds"
        if self.state == "unreadable":
            return f"Its files cannot be read: {self.problem}."
        if self.state == "waiting":
            waits = (self.status or {}).get("state") == "waiting for sites" and (self.status or {}).get("alive")
            return "Waiting for sites to connect." if waits else "Not yet started."
        if self.state == "finished":
            return f"Finished: {played} played{self._describe_early_stop()}."
        if self.state == "failed":
            return f"Failed in round {self.ledger[-1].round} of {self.rounds}: too few updates could be accepted."
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
        if self.summary.privacy is not None and self.summary.privacy.stopped_by_budget:
            return "; the next would have cost more privacy than was allowed"
        return "; it stopped early, as the recipe asks" if self.summary.stopped_early else ""

    @cached_property
    def charged_ledger(self) -> Sequence[LedgerRow]:
        """The ledger with the possible cost of interrupted rounds."""
        return add_interrupted_rounds(self.ledger)

    @cached_property
    def cost(self) -> Cost:
        return sum_costs(self.charged_ledger)

    @cached_property
    def sites(self) -> list[SiteStatus]:
        """Every site that was ever asked."""
        there = (self.status or {}).get("sites", {})
        asked = (site for row in self.ledger if isinstance(row, ChargeRow | CostRow) for site in row.sites)
        trained = (row for row in self.rows if isinstance(row, TrainRow))
        counted = group_pairs((row.site, row.round) for row in trained if row.outcome == "accepted")
        costs = (row for row in self.charged_ledger if isinstance(row, CostRow))
        replies = group_pairs(pair for row in costs for pair in row.sites.items())
        return [
            self._site_status(site, counted.get(site, []), replies.get(site, []), there.get(site, {}))
            for site in dict.fromkeys([*there, *asked])
        ]

    def _site_status(
        self, site: SiteId, counted: Sequence[int], replies: Sequence[SiteOutcome], there: Mapping[str, Any]
    ) -> SiteStatus:
        outcomes = [reply.outcome for reply in replies]
        return SiteStatus(
            site,
            last=max(counted, default=None),
            counted=len(counted),
            refused=outcomes.count("refused"),
            lost=sum(outcomes.count(kind) for kind in LOST if kind != "refused"),
            down=sum(reply.down for reply in replies),
            up=sum(reply.up for reply in replies),
            seconds=sum(reply.seconds for reply in replies),
            now=str(there.get("state", "")) if (self.status or {}).get("alive") else "",
        )

    @cached_property
    def failures(self) -> list[RepeatedFailure]:
        """Grouped by kind: the reasons may differ in a figure from round to round."""
        costs = (row for row in self.ledger if isinstance(row, CostRow))
        replies = ((row.round, site, reply, reply.why or "–") for row in costs for site, reply in row.sites.items())
        found = group_pairs(
            ((site, str(reply.outcome), reply.kind or why), (round, why))
            for round, site, reply, why in replies
            if reply.outcome in LOST
        )
        return [
            RepeatedFailure(*key[:2], times[-1][1], tuple(round for round, _ in times)) for key, times in found.items()
        ]

    @cached_property
    def curves(self) -> dict[str, dict[str, Curve]]:
        """By metric: on validation images, over all sites or those of a cluster; and on test images of no site."""
        return {metric: self._metric_curves(metric) for metric in METRICS}

    def _metric_curves(self, metric: str) -> dict[str, Curve]:
        clusters = metric_by_cluster(self.rows, metric)
        found: dict[str, Curve] = {f"cluster {name}": curve for name, curve in clusters.items() if name}
        if found:
            merged = [row.model_copy(update={"cluster": ""}) if isinstance(row, TrainRow) else row for row in self.rows]
            clusters = metric_by_cluster(merged, metric)
        whole = self._append_final(metric, clusters.get("", []))
        held_out = [row for row in self.rows if isinstance(row, EvaluateRow) and row.site == HELD_OUT]
        curves = {ALL: whole} | found | {HELD_OUT_IMAGES: list(metric_over_rounds(held_out, metric, "test").items())}
        return {name: curve for name, curve in curves.items() if curve}

    def _append_final(self, metric: str, curve: Curve) -> Curve:
        """Add the final model's point, which no later round reports."""
        merged = self.summary.merged if self.summary is not None else {}
        models = [merged[model] for model in ("personal", "global") if "validation" in merged.get(model, {})]
        last = next((v for parts in models if (v := parts["validation"][metric].value) is not None), None)
        return (
            [*curve, (self.rounds_done, last)]
            if curve and last is not None and curve[-1][0] < self.rounds_done
            else curve
        )

    @cached_property
    def by_site(self) -> dict[SiteId, Curve]:
        """Accuracy on each site's validation images."""
        rows = group_pairs((row.site, row) for row in self.rows)
        curves = {site: metric_by_cluster(own, "accuracy") for site, own in rows.items()}
        return {site: sorted(point for part in found.values() for point in part) for site, found in curves.items()}

    def to_json(self) -> dict[str, Any]:
        """The status for programs."""
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
            "cost": self.cost.model_dump(),
        }
