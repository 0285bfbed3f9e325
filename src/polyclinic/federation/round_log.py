"""The log of one round: what every site sent, the outcome, and the metrics it reported of the model it received."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyclinic.core import HELD_OUT, Failure, SiteId
from polyclinic.federation.update_check import is_number


@dataclass
class RoundLog:
    """By site: an entry (bytes both ways, seconds, drift, outcome) and the report that came with its update."""

    sites: dict[SiteId, dict[str, Any]] = field(default_factory=dict)
    reports: dict[SiteId, list[dict[str, Any]]] = field(default_factory=dict)
    accepted: int = 0
    accepted_weights: list[float] = field(default_factory=list)
    """The weights of the accepted updates in the mean."""
    sites_with_memory: set[SiteId] = field(default_factory=set)


def failure_entry(reply: object) -> dict[str, Any]:
    """Return the log entry of a site without a reply, {} for a reply."""
    return {"outcome": reply.kind, "why": reply.sentence} if isinstance(reply, Failure) else {}


def accepted_entry(fields: Mapping[str, Any], scalars: Mapping[str, float], drift: float | None) -> dict[str, Any]:
    """Return the log entry of an accepted reply with these `fields`; whatever is malformed in them is left out."""
    seconds = fields.get("seconds")
    entry: dict[str, Any] = {"outcome": "accepted", "seconds": float(seconds) if is_number(seconds) else 0.0}
    if isinstance(together := fields.get("together"), int) and together > 1:
        entry["together"] = together
    if isinstance(alone := fields.get("alone"), str) and alone.isprintable() and alone:
        entry["alone"] = alone[:200]
    if scalars:
        entry["scalars"] = dict(scalars)
    return entry if drift is None else entry | {"drift": drift}


def mean_report(log: RoundLog, metric: str) -> float | None:
    """Return the mean of a metric over the sites' validation parts, weighted by their size: of personal models where
    there are some; None if no site reported it."""
    reported = [r for report in log.reports.values() for r in report if r.get(metric) is not None]
    rows = [r for r in reported if r["model"] == "personal"] or reported
    total = sum(r["n"] for r in rows)
    return sum(r[metric] * r["n"] for r in rows) / total if total else None


def clusters_without_updates(log: RoundLog, clusters: Mapping[SiteId, str]) -> list[str]:
    """Return the clusters of which no update was accepted, so that their models did not change."""
    heard = {clusters[site] for site, entry in log.sites.items() if entry.get("outcome") == "accepted"}
    return [cluster for cluster in dict.fromkeys(clusters.values()) if cluster not in heard]


def metric_rows(round: int, log: RoundLog, held_out: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl: per site, its work in this round and the metrics of the model of the round
    before; `held_out`: the metrics of that model on images that belong to no site."""
    rows: list[dict[str, Any]] = []
    for site, entry in log.sites.items():
        rows.append({"round": round, "site": site, "event": "train", **entry})
        rows += [{"round": round - 1, "site": site, "event": "evaluate", **r} for r in log.reports.get(site, [])]
    if held_out is not None:
        where = {"round": round - 1, "site": HELD_OUT, "event": "evaluate", "model": "global", "part": "test"}
        rows.append({**where, **held_out})
    return rows


def format_failure(round: int, log: RoundLog, quorum: int) -> str:
    """Return the sentence for a round that missed its quorum."""
    failed = [f"{site}: {e.get('why')}" for site, e in log.sites.items() if e.get("outcome", "accepted") != "accepted"]
    return (
        f"round {round} had {log.accepted} acceptable updates where the quorum is {max(1, quorum)}, so the state was "
        f"left unchanged ({'; '.join(failed[:3])}); correct that and resume, or set a lower quorum"
    )
