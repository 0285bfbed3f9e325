"""Metrics, drift, forgetting and cost over the rounds of a run, from the rows that it wrote."""

from collections.abc import Iterable, Sequence

from polyclinic.core import POOLED, Part, SiteId
from polyclinic.evaluation.rows import CostRow, EvaluateRow, LedgerRow, MetricRow, TrainRow, group_pairs
from polyclinic.evaluation.summary import Cost, RunSummary

CLOSE = 0.01
MIN_POINTS = 3
FAILURES = ("dead", "late", "error")


def weighted_mean(rows: Iterable[EvaluateRow], metric: str) -> float | None:
    """The mean of a metric weighted by images; None where no row has it."""
    known = [(value, row.n) for row in rows if (value := row.metrics.get(metric)) is not None]
    images = sum(n for _, n in known)
    return sum(value * n for value, n in known) / images if images else None


def mean_over_sites(rows: Iterable[EvaluateRow], metric: str) -> float | None:
    """The mean of a metric over sites, of personal models where there are some."""
    known = [row for row in rows if row.metrics.get(metric) is not None]
    return weighted_mean([row for row in known if row.model == "personal"] or known, metric)


def metric_over_rounds(rows: Iterable[MetricRow], metric: str, part: Part = "validation") -> dict[int, float]:
    """The metric of each round's model on one part: the mean over the rows' sites (`mean_over_sites`)."""
    rounds = group_pairs((row.round, row) for row in rows if isinstance(row, EvaluateRow) and row.part == part)
    means = {round: mean_over_sites(found, metric) for round, found in sorted(rounds.items())}
    return {round: value for round, value in means.items() if value is not None}


def metric_by_cluster(rows: Sequence[MetricRow], metric: str) -> dict[str, list[tuple[int, float]]]:
    """The metric over rounds of each cluster's sites; without clusters all sites are one, called "".

    A site reports in a round on the model that it has received, which is that of the round before.
    """
    cluster_of = {(row.site, row.round - 1): row.cluster for row in rows if isinstance(row, TrainRow)}
    reports = ((row, cluster_of.get((row.site, row.round))) for row in rows if isinstance(row, EvaluateRow))
    clusters = group_pairs((cluster, row) for row, cluster in reports if cluster is not None)
    curves = {name: list(metric_over_rounds(clusters[name], metric).items()) for name in sorted(clusters)}
    return {name: curve for name, curve in curves.items() if curve}


def final_rows(summary: RunSummary) -> list[EvaluateRow]:
    """The final model's scores on each site's validation images, as rows of the last round."""
    return [
        EvaluateRow(round=summary.rounds, site=site, model=model, part="validation", n=scores.n, **scores.values)
        for site, models in summary.sites.items()
        for model in ("global", "personal")
        if (scores := models.get(model, {}).get("validation"))
    ]


def convergence_round(curve: Sequence[tuple[int, float]]) -> int | None:
    """The first round after which the metric is within a point of its best; None for fewer than three points."""
    if len(curve) < MIN_POINTS:
        return None
    best = max(value for _, value in curve)
    return next((round for round, value in curve if value >= best - CLOSE), None)


def mean_drift(rows: Iterable[MetricRow]) -> dict[SiteId, float]:
    """Mean distance ‖w_k − w‖₂ that a site's weights moved in a round."""
    trained = (row for row in rows if isinstance(row, TrainRow) and row.site != POOLED)
    moved = group_pairs((row.site, row.drift) for row in trained if row.drift is not None)
    return {site: sum(values) / len(values) for site, values in moved.items()}


def forgetting_by_round(rows: Iterable[MetricRow]) -> dict[str, list[tuple[int, float]]]:
    """The shares of all training images that each deployment lost ("forgotten") and gained, by the round whose model
    it was; {} where no site reported them."""
    reporting = (row for row in rows if isinstance(row, TrainRow) and "forgotten" in row.scalars)
    rounds = group_pairs((row.round - 1, row.scalars) for row in reporting)
    cases = {round: max(sum(site["cases"] for site in sites), 1) for round, sites in rounds.items()}
    return {
        name: [
            (round, sum(site[name] * site["cases"] for site in sites) / cases[round])
            for round, sites in sorted(rounds.items())
        ]
        for name in ("forgotten", "gained")
        if rounds
    }


def sum_costs(ledger: Iterable[LedgerRow], run_seconds: float | None = None) -> Cost:
    """Bytes both ways and seconds, over everything in the ledger, repeated rounds included."""
    rows = [row for row in ledger if isinstance(row, CostRow)]
    every = [site for row in rows for site in row.sites.values()]
    # A site that keeps its predictions to itself loses no update.
    updates = [site for row in rows if row.event != "evaluation" for site in row.sites.values()]
    tested = [site for row in rows if row.event == "evaluation" for site in row.sites.values()]
    return Cost(
        bytes_down=sum(site.down for site in every),
        bytes_up=sum(site.up for site in every),
        seconds=sum((row.seconds for row in rows), 0.0),
        site_seconds=sum((site.seconds for site in every), 0.0),
        refused=sum(site.outcome == "refused" for site in updates),
        failed=sum(site.outcome in FAILURES for site in updates),
        withheld=sum(site.outcome is not None for site in tested),
        run_seconds=run_seconds,
    )
