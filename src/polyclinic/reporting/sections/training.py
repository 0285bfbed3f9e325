"""Curves over rounds (accuracy, drift, forgetting), and the gap between training and validation images."""

import math
from collections.abc import Mapping, Sequence

from polyclinic.core import HELD_OUT, POOLED, SiteId
from polyclinic.evaluation.comparison import mean_of_known, metric_value
from polyclinic.evaluation.rounds import convergence_round, final_rows
from polyclinic.evaluation.rows import EvaluateRow, TrainRow, group_pairs
from polyclinic.evaluation.statistics import summarise_sample, wilson_interval
from polyclinic.evaluation.summary import generalisation_gap
from polyclinic.reporting.blocks import Block, Figure, Paragraph, Section, Table
from polyclinic.reporting.charts import LineAxes, line_chart, without_band
from polyclinic.reporting.formatting import format_digits, format_number
from polyclinic.reporting.html.svg import Banded
from polyclinic.reporting.report_data import ReportData, Run, format_sample

Curve = Mapping[int, tuple[float, int]]
"""By round: a share, and the number of images that it is of."""


def learning_section(data: ReportData) -> Section | None:
    """The main metric on validation images over rounds."""
    series = _method_curves(data)
    known = {name: points for name, points in series.items() if len(points) > 1}
    if not known:
        return None
    axes = LineAxes("round", data.columns[data.main_metric])
    band = (
        "Bands: Student's 95 % interval over seeds."
        if data.has_several_seeds
        else "Bands: 95 % intervals (Wilson), as if every image were of another patient."
    )
    note = "A round's point is of the model that it left behind, reported by sites when they next received it."
    if missing := [name for name in series if name not in known]:
        note += f" Not shown, as no site reported figures by round: {', '.join(missing)}."
    blocks: list[Block] = [
        Paragraph(note, "note"),
        line_chart(
            "learning", f"{data.label(data.main_metric)} on the sites' validation images, by round", known, axes, band
        ),
    ]
    if data.is_single and (chart := _site_curves(data, axes)):
        blocks.append(chart)
    if rounds := _convergence_rounds(data):
        when = f"Rounds until validation {data.columns[data.main_metric]}, where it was measured often enough,"
        blocks.append(Paragraph(f"{when} is within a point of its best (mean): {rounds}."))
    return Section(
        "learning",
        "Learning curves",
        blocks,
        {"Engineer": "Did it converge?", "Statistician": "How steady was learning?"},
    )


def _method_curves(data: ReportData) -> dict[str, list[Banded]]:
    """By method; where only summaries are known, by method and cluster at the seeds that all methods share."""
    if data.is_from_folders:
        return {
            m.name: _mean_over_seeds([_validation_curve(run, data.main_metric) for run in m.runs]) for m in data.methods
        }
    found: dict[str, list[Banded]] = {}
    for name, runs in _at_shared_seeds(data, "progress").items():
        for cluster in runs[0]:
            curves = [{at: (value, 0) for at, value in run[cluster]} for run in runs if cluster in run]
            found[f"{name}: {cluster}" if cluster else name] = _mean_over_seeds(curves)
    return found


def _at_shared_seeds(data: ReportData, field: str) -> dict[str, list[dict[str, list[tuple[int, float]]]]]:
    """A field of the summaries, at the seeds that all methods share: an easy seed is easy for all of them."""
    every = {
        m.name: {run.seed: getattr(run, field) for run in m.summaries if getattr(run, field)} for m in data.methods
    }
    known = {name: found for name, found in every.items() if found}
    shared = set.intersection(*(set(found) for found in known.values())) if known else set()
    return {name: [found[seed] for seed in sorted(shared or found)] for name, found in known.items()}


def _site_curves(data: ReportData, axes: LineAxes) -> Figure | None:
    run = data.first
    curves = {site: _mean_over_seeds([_validation_curve(run, data.main_metric, site)]) for site in run.summary.sites}
    shown = {site: points for site, points in curves.items() if len(points) > 1}
    if len(shown) < 2:
        return None
    return line_chart(
        "learning-by-site",
        "The same at each site",
        shown,
        axes,
        f"Wilson's 95 % intervals.{' First seed.' if data.has_several_seeds else ''}",
    )


def _validation_curve(run: Run, metric: str, site: SiteId | None = None) -> Curve:
    """The mean over sites' validation images, of personal models if there are some, with the final model's point."""
    rows = [row for row in run.metric_rows if isinstance(row, EvaluateRow) and row.site not in (HELD_OUT, POOLED)]
    found = _pool_rows(rows, metric, site)
    return {**found, **(_pool_rows(final_rows(run.summary), metric, site) if found else {})}


def _pool_rows(rows: Sequence[EvaluateRow], metric: str, site: SiteId | None) -> Curve:
    known = [row for row in rows if row.part == "validation" and row.metrics.get(metric) is not None]
    model = "personal" if any(row.model == "personal" for row in known) else "global"
    sums: dict[int, tuple[float, int]] = {}
    for row in known:
        if row.model == model and site in (None, row.site):
            total, images = sums.get(row.round, (0.0, 0))
            sums[row.round] = total + (row.metrics[metric] or 0.0) * row.n, images + row.n
    return {at: (total / images, images) for at, (total, images) in sorted(sums.items()) if images}


def _mean_over_seeds(curves: Sequence[Curve]) -> list[Banded]:
    """The mean at the rounds that all seeds have, with an interval over seeds, or over images where there is one."""
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    points: list[Banded] = []
    for at in common:
        values = [curve[at][0] for curve in curves]
        found = summarise_sample(values)
        interval = (found.low, found.high) if len(values) > 1 else wilson_interval(*curves[0][at])
        points.append((float(at), found.mean, *interval))
    return points


def _convergence_rounds(data: ReportData) -> str:
    """Mean rounds until convergence of the methods all of whose seeds have it."""
    found = {m.name: [convergence_round(run.progress.get("", [])) for run in m.summaries] for m in data.methods}
    means = {name: [at for at in rounds if at is not None] for name, rounds in found.items()}
    return ", ".join(
        f"{n} {mean_of_known([*map(float, known)]):.1f}" for n, known in means.items() if len(known) == len(found[n])
    )


def drift_section(data: ReportData) -> Section | None:
    """The distance that sites' weights move in a round."""
    if data.is_single:
        run = data.first
        series = {site: without_band(_drift_by_round(run, site).items()) for site in run.summary.sites}
    else:
        series = {
            method.name: _mean_over_seeds(
                [{at: (moved, 0) for at, moved in _drift_by_round(run).items()} for run in method.runs]
            )
            for method in data.methods
        }
    known = {name: points for name, points in series.items() if len(points) > 1}
    if not known:
        return None
    chart = line_chart(
        "drift",
        f"Distance of a site's weights from the shared ones, by {'site' if data.is_single else 'method'}",
        known,
        LineAxes.from_zero("round", "distance", known, format_digits),
        "No unit: the Euclidean norm of the difference of all weights.",
    )
    return Section(
        "drift",
        "Drift",
        [
            Paragraph(
                "Drift is ‖w_k − w‖₂: how far a site's training moved from the model that it was sent. Sites that "
                "drift far pull the average apart."
            ),
            chart,
        ],
        {"Engineer": "Do sites pull it apart?"},
    )


def _drift_by_round(run: Run, site: SiteId | None = None) -> dict[int, float]:
    trained = (row for row in run.metric_rows if isinstance(row, TrainRow) and row.site != POOLED)
    found = group_pairs((row.round, row.drift) for row in trained if row.drift is not None and site in (None, row.site))
    return {round: sum(values) / len(values) for round, values in sorted(found.items())}


def forgetting_section(data: ReportData) -> Section | None:
    """Training images that a deployed model gets wrong and the site's model before it got right, and vice versa."""
    if (chart := forgetting_chart(data)) is None:
        return None
    return Section(
        "forgetting",
        "Forgetting",
        [
            Paragraph(
                "Forgotten: training images that a site's model had right before it received the shared one, and "
                "wrong after; gained: the other way round."
            ),
            chart,
        ],
        {"Engineer": "What is forgotten?"},
    )


def gap_section(data: ReportData) -> Section | None:
    """The main metric on training and on validation images."""
    rows = _gap_by_site(data) if data.is_single else _gap_by_method(data)
    if not rows:
        return None
    head = ["site" if data.is_single else "method", "training", "validation", "gap"]
    return Section(
        "gap",
        "Train–validation gap",
        [
            Paragraph(
                "The gap is how much better a model is on training images than on validation images: large where it "
                "memorises."
            ),
            Table(
                f"{data.label(data.main_metric)} on training and validation images"
                f"{'' if data.is_single else data.spread_note}",
                head,
                rows,
            ),
        ],
        {
            "Engineer": "Does it memorise?",
            "Data-protection officer": "Does it memorise training images?",
        },
    )


def _gap_by_site(data: ReportData) -> list[list[str]]:
    summary, metric = data.first.summary, data.main_metric
    places = {**summary.sites, "all": summary.merged}
    scores = {site: models.get(summary.headline.model, {}) for site, models in places.items()}
    return [
        [
            site,
            format_number(parts["train"].value(metric)),
            format_number(parts["validation"].value(metric)),
            format_number(generalisation_gap(parts, metric)),
        ]
        for site, parts in scores.items()
        if "train" in parts and "validation" in parts
    ]


def _gap_by_method(data: ReportData) -> list[list[str]]:
    known = [method for method in data.methods if not math.isnan(metric_value(method.summaries[0], "gap"))]
    scores = {method: [run.merged[run.headline.model] for run in method.summaries] for method in known}
    return [
        [
            method.name,
            format_sample([parts["train"].value(data.main_metric) for parts in found]),
            format_sample([parts["validation"].value(data.main_metric) for parts in found]),
            method.format_spread("gap"),
        ]
        for method, found in scores.items()
    ]


def forgetting_chart(data: ReportData) -> Figure | None:
    """Training images lost and gained by deployments, of one run; by method, images lost."""
    series: dict[str, list[Banded]] = {}
    for name, runs in _at_shared_seeds(data, "forgetting").items():
        for kind in ("forgotten", "gained") if data.is_single else ("forgotten",):
            points = _mean_over_seeds([{at: (share, 0) for at, share in run[kind]} for run in runs if run.get(kind)])
            clipped = [(x, y, max(low, 0.0), min(high, 1.0)) for x, y, low, high in points]  # NaN stays
            series[kind if data.is_single else name] = clipped
    known = {name: points for name, points in series.items() if points}
    if not known:
        return None
    axes = LineAxes("round whose model was deployed", "share of training images")
    change = "lost and gained" if data.is_single else "forgotten, by method"
    return line_chart("forgetting", f"Training images {change} when a model is deployed", known, axes)
