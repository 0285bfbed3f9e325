"""The log of one round: what every site sent, the outcome, and the metrics it reported of the model it received."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polyclinic.core import HELD_OUT, Refused, SiteId
from polyclinic.evaluation.rows import CostRow, LedgerRow, SiteOutcome
from polyclinic.federation.robust.rules import FEWEST, PLAIN_MEAN, Aggregation, cap_weights
from polyclinic.federation.update_check import ReportRow, is_number


@dataclass
class RoundLog:
    """By site: the outcome (bytes both ways, seconds, drift …) and the report that came with its update."""

    sites: dict[SiteId, SiteOutcome] = field(default_factory=dict)
    reports: dict[SiteId, Sequence[ReportRow]] = field(default_factory=dict)
    accepted: int = 0
    accepted_weights: list[float] = field(default_factory=list)
    """The weights of the accepted updates in the mean."""
    sites_with_memory: set[SiteId] = field(default_factory=set)

    def add(self, site: SiteId, **fields: object) -> None:
        """Add these fields of `SiteOutcome` to the outcome of a site."""
        self.sites[site] = self.sites.get(site, SiteOutcome()).model_copy(update=fields)

    def add_refusal(self, site: SiteId, refusal: Refused) -> None:
        """Add the kind of a further message that was refused."""
        self.add(site, extra=[*self.sites.get(site, SiteOutcome()).extra, refusal.kind])

    def to_json(self) -> dict[SiteId, dict[str, object]]:
        return {site: outcome.to_json() for site, outcome in self.sites.items()}


def accepted_fields(
    fields: Mapping[str, object], scalars: Mapping[str, float], drift: float | None
) -> dict[str, object]:
    """Return the outcome of an accepted reply with these `fields`; whatever is malformed in them is left out."""
    seconds, size, reason = (fields.get(name) for name in ("seconds", "stack_size", "unstacked_reason"))
    found: dict[str, object] = {"outcome": "accepted", "seconds": float(seconds) if is_number(seconds) else 0.0}
    if isinstance(size, int) and size > 1:
        found["stack_size"] = size
    if isinstance(reason, str) and reason.isprintable() and reason:
        found["unstacked_reason"] = reason[:200]
    if scalars:
        found["scalars"] = dict(scalars)
    return found if drift is None else found | {"drift": drift}


def mean_report(log: RoundLog, metric: str, rule: Aggregation = PLAIN_MEAN) -> float | None:
    """Return the mean of a metric over the sites' validation parts, weighted by their size: of personal models where
    there are some; None if no site reported it. Outliers of the round are left out, and one site's weight is bounded,
    as in the mean of updates."""
    found = _values_by_site(log, metric)
    weights = [float(images) for _, images in found]
    if rule.name != "mean" and len(found) >= FEWEST:
        weights = cap_weights(weights, rule.most_share)
    total = sum(weights)
    return sum(value * weight for (value, _), weight in zip(found, weights, strict=True)) / total if total else None


def middle_report(log: RoundLog, metric: str, rule: Aggregation = PLAIN_MEAN) -> float | None:
    """Return the median of a metric over three or more sites, which no single one of them can move far; None with fewer
    sites, or where nothing is bounded."""
    values = [value for value, _ in _values_by_site(log, metric)]
    return statistics.median(values) if rule.name != "mean" and len(values) >= FEWEST else None


def _values_by_site(log: RoundLog, metric: str) -> list[tuple[float, int]]:
    """Return one value and its number of images for each site that is no outlier and reported the metric: of its
    personal model if it has one, else the mean over its models."""
    found = []
    for site, rows in log.reports.items():
        own = [r for r in rows if r["model"] == "personal"] or rows
        values = [float(r[metric]) for r in own if r.get(metric) is not None]
        if values and log.sites.get(site, SiteOutcome()).outlier is None:
            found.append((statistics.fmean(values), max(int(r["n"]) for r in own)))
    return found


def outlier_streaks(rows: Iterable[LedgerRow], last: int) -> dict[SiteId, int]:
    """Return the rounds running, up to round `last`, in which each site was an outlier, by the rows of a ledger."""
    played = {row.round: row for row in rows if isinstance(row, CostRow) and row.event == "round" and row.round <= last}
    found: dict[SiteId, int] = {}
    for _, row in sorted(played.items()):
        found |= {site: there.outlier_rounds for site, there in row.sites.items() if there.outcome == "accepted"}
    return {site: rounds for site, rounds in found.items() if rounds}


def clusters_without_updates(log: RoundLog, clusters: Mapping[SiteId, str]) -> list[str]:
    """Return the clusters of which no update was accepted, so that their models did not change."""
    heard = {clusters[site] for site, found in log.sites.items() if found.outcome == "accepted"}
    return [cluster for cluster in dict.fromkeys(clusters.values()) if cluster not in heard]


def metric_rows(round: int, log: RoundLog, held_out: Mapping[str, float | None] | None) -> list[Mapping[str, object]]:
    """Return the rows of metrics.jsonl: per site, its work in this round and the metrics of the model of the round
    before; `held_out`: the metrics of that model on images that belong to no site."""
    rows: list[Mapping[str, object]] = []
    for site, outcome in log.to_json().items():
        rows.append({"round": round, "site": site, "event": "train", **outcome})
        rows += [{"round": round - 1, "site": site, "event": "evaluate", **r} for r in log.reports.get(site, [])]
    if held_out is not None:
        rows.append(
            {"round": round - 1, "site": HELD_OUT, "event": "evaluate", "model": "global", "part": "test", **held_out}
        )
    return rows


def format_failure(round: int, log: RoundLog, quorum: int) -> str:
    """Return the sentence for a round that missed its quorum."""
    failed = [f"{site}: {found.why}" for site, found in log.sites.items() if found.outcome not in (None, "accepted")]
    remedy = "correct that and resume, or set a lower quorum"
    if sum(found.kind == "finite" for found in log.sites.values()) > 1:
        remedy = (
            "several sites diverged at once, so the cause is more likely the model that all of them received than any "
            "of these sites: go back to an earlier round (polyclinic rollback), or lower the learning rate"
        )
    return (
        f"round {round} had {log.accepted} acceptable updates where the quorum is {max(1, quorum)}, so the state was "
        f"left unchanged ({'; '.join(failed[:3])}); {remedy}"
    )
