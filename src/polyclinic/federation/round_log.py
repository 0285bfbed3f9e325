"""The book of one round: what every site sent, what became of it, and what it told of the model it received."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyclinic.core.contract import Failure, SiteId

HELD_OUT: SiteId = "held-out"


@dataclass
class RoundLog:
    """Book-keeping of one round: by site, bytes both ways, seconds, drift, what became of the reply, its report."""

    sites: dict[SiteId, dict[str, Any]] = field(default_factory=dict)
    reports: dict[SiteId, list[dict[str, Any]]] = field(default_factory=dict)
    accepted: int = 0
    accepted_weights: list[float] = field(default_factory=list)
    """The accepted updates' weights."""
    sites_with_memory: set[SiteId] = field(default_factory=set)


def failure_entry(reply: object) -> dict[str, Any]:
    """Why there is no reply, as the book has it; nothing of a reply."""
    return {"outcome": reply.kind, "why": reply.sentence} if isinstance(reply, Failure) else {}


def mean_report(log: RoundLog, metric: str) -> float | None:
    """Mean of a metric over the sites' validation parts, weighted by their size, of personal models where there are
    some; None when nobody reported it."""
    told = [r for report in log.reports.values() for r in report if r.get(metric) is not None]
    rows = [r for r in told if r["model"] == "personal"] or told
    total = sum(r["n"] for r in rows)
    return sum(r[metric] * r["n"] for r in rows) / total if total else None


def clusters_without_updates(log: RoundLog, clusters: Mapping[SiteId, str]) -> list[str]:
    """The clusters of which no site's update was accepted, so that their models stay as they were."""
    heard = {clusters[site] for site, note in log.sites.items() if note.get("outcome") == "accepted"}
    return [cluster for cluster in dict.fromkeys(clusters.values()) if cluster not in heard]


def metric_rows(round: int, log: RoundLog, held_out: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A row per round and site: how it worked in this round, and how the model of the round before did there."""
    rows: list[dict[str, Any]] = []
    for site, note in log.sites.items():
        rows.append({"round": round, "site": site, "event": "train", **note})
        rows += [{"round": round - 1, "site": site, "event": "evaluate", **r} for r in log.reports.get(site, [])]
    if held_out is not None:
        rows.append(
            {
                "round": round - 1,
                "site": HELD_OUT,
                "event": "evaluate",
                "model": "global",
                "part": "test",
                **held_out,
            }
        )
    return rows


def format_failure(round: int, log: RoundLog, quorum: int) -> str:
    failed = [f"{site}: {n.get('why')}" for site, n in log.sites.items() if n.get("outcome", "accepted") != "accepted"]
    return (
        f"round {round} had {log.accepted} acceptable updates where the quorum is {max(1, quorum)}, so the state was "
        f"left as it was ({'; '.join(failed[:3])}); mend that and resume, or set a lower quorum"
    )
