"""Comparison of all methods: a table with notes, and charts of accuracy against cost."""

import math
from collections.abc import Iterator, Sequence

from polyclinic.evaluation.comparison import MethodSummary, MetricEstimate, mean_of_known, metric_value, pair_by_seed
from polyclinic.evaluation.rows import group_pairs
from polyclinic.reporting.blocks import Block, Cell, Figure, Grid, Heading, Paragraph, Section, Table
from polyclinic.reporting.charts import (
    CostPoint,
    Estimate,
    LineAxes,
    cost_scatter,
    interval_chart,
    line_chart,
    without_band,
)
from polyclinic.reporting.formatting import (
    format_digits,
    format_names,
    format_number,
    format_signed,
    format_spread,
)
from polyclinic.reporting.remarks import describe_pooling
from polyclinic.reporting.report_data import Method, ReportData
from polyclinic.reporting.sections.tasks import task_report

WORTH = 0.99
"""A method sends less if it sends below this share of the first method's bytes."""
COSTS = {
    "megabytes": "megabytes sent, both ways",
    "seconds": "seconds (wall-clock)",
    "epsilon": "ε of the worst-placed unit",
}


def methods_section(data: ReportData) -> Section:
    """The table of all methods with its notes."""
    comparison, first = data.comparison, data.first.summary
    head = [
        "method",
        "seeds",
        "rounds",
        *(_pooled_label(data, metric) for metric in data.columns),
        f"worst-served site ({data.task.info(data.task.ranking_metric).label})",
        "drift",
        "MB sent",
        "s",
        *(["paper"] if data.paper else []),
    ]
    rows = [_method_row(data, method, line) for method, line in zip(data.methods, comparison.lines, strict=True)]
    blocks: list[Block] = [
        Paragraph(
            f"{first.data} data, {_describe_networks(data.methods[0])}. Figures on {comparison.judged_on} together, "
            f"with the 95 % interval over {comparison.interval_description}."
        ),
        Table("All methods", head, rows),
        Paragraph(" ".join(_collect_notes(data)), "note"),
    ]
    if not data.is_single and data.is_from_folders:
        charts = [_metric_chart(data, metric) for metric in dict.fromkeys((data.main_metric, data.task.ranking_metric))]
        blocks.append(Grid([chart for chart in charts if chart is not None]))
    return Section(
        "methods",
        "Results" if data.is_single else "Comparison of methods",
        blocks,
        {"Clinician": "How do the methods compare?", "Engineer": "Figures of every method?"},
    )


def _pooled_label(data: ReportData, metric: str) -> str:
    """The metric's label; of figures that sites computed at home it says which are means of the sites' own."""
    info = data.task.info(metric)
    at_home = any(run.pooled_from == "scores" for method in data.methods for run in method.summaries)
    return f"{info.label} (mean of sites)" if at_home and info.pooled_by == "sites" else info.label


def _method_row(data: ReportData, method: Method, line: MethodSummary) -> list[str | Cell]:
    worst = f"{line.worst_site} {format_number(line.worst_score)}" if line.worst_site else "–"
    figures = [line.figures[metric] for metric in data.columns]
    sent = "images" if line.pools_images else format_number(line.megabytes, 1)
    return [
        line.name,
        str(line.seeds),
        str(method.first.summary.rounds),
        *(Cell(format_spread(found.mean, found.std), (found.low, found.high)) for found in figures),
        worst,
        format_number(line.drift, 2),
        sent,
        format_number(line.seconds, 1),
        *([data.paper.get(method.name, "–")] if data.paper else []),
    ]


def _describe_networks(method: Method) -> str:
    """The network, or the network of each cluster."""
    model = method.first.summary.model
    return ", ".join(
        f"{f'cluster {cluster}: ' if cluster else ''}{network.name} ({network.parameters:,} parameters, "
        f"{network.flops_per_step / 1e9:.2g} GFLOP a training step)"
        for cluster, network in (model.clusters or {"": model}).items()
    )


def _collect_notes(data: ReportData) -> Iterator[str]:
    comparison = data.comparison
    yield from (f"{failure}." for failure in data.failures)
    yield from (
        f"{line.name}: {line.lost} updates of sites were refused or lost." for line in comparison.lines if line.lost
    )
    yield f"Figures are of {comparison.judged_by}."
    yield from dict.fromkeys(words for method in data.methods for words in describe_pooling(method.first.summary))
    if len({line.judged_on for line in comparison.lines}) > 1:
        yield from (f"{line.name} is judged on {line.judged_on}." for line in comparison.lines)
    if any(line.seeds > 1 for line in comparison.lines):
        yield "± is the standard deviation over seeds."
    yield "Drift is the mean distance ‖w_k − w‖₂ that a site's weights travel in one round."
    if len(comparison.lines) > 1:
        yield "Intervals that overlap do not show that two methods are alike."
    if pooled := [line.name for line in comparison.lines if line.pools_images]:
        yield f"{', '.join(pooled)}: all images in one place, which sites may not do; a baseline."
    yield from task_report(data.first.summary).warn({method.name: method.first.summary for method in data.methods})
    warned = group_pairs((warning, method.name) for method in data.methods for warning in method.first.summary.warnings)
    yield from (f"{format_names(names)}: {warning}." for warning, names in warned.items())
    if any(run.headline.model in ("personal", "transfer") for method in data.methods for run in method.summaries):
        yield "Where several models are judged together, their AUC also reflects how classes are spread over sites."
    if not data.has_privacy:
        yield "Nothing here is private in the sense of a guarantee: no recipe has a privacy plan."


def _metric_chart(data: ReportData, metric: str) -> Figure | None:
    rows = [
        Estimate(line.name, found.mean, found.low, found.high)
        for line in data.comparison.lines
        if not math.isnan((found := line.figures[metric]).mean)
    ]
    if not rows:
        return None
    label = data.columns[metric]
    return interval_chart(
        metric,
        f"{label[0].upper()}{label[1:]} of all methods",
        rows,
        label,
        f"95 % intervals over {data.comparison.interval_description}.",
    )


def trade_section(data: ReportData) -> Section | None:
    """Accuracy against megabytes, seconds and ε."""
    if data.is_single:
        return None
    points = {method.name: found for method in data.methods if (found := _costs(method)) is not None}
    scatters = [_cost_chart(points, at, label) for at, label in enumerate(COSTS.values())]
    charts: list[Block] = [chart for chart in scatters if chart is not None]
    blocks: list[Block] = []
    if charts:
        best = [
            name
            for name, (figure, cost) in points.items()
            if not _is_dominated((figure.mean, cost), [(f.mean, c) for f, c in points.values()])
        ]
        blocks = [
            Paragraph(
                f"Counting accuracy, megabytes, ε and seconds at once, nothing here surpasses {format_names(best)}: "
                "each other method is matched or outdone in all four by one of them. That is by means; the tests "
                "show what may be chance."
            ),
            Grid(charts),
            Paragraph(
                "Ringed and joined: no other method costs less and is right more often, by means. Log scale.", "note"
            ),
        ]
    blocks += _price_blocks(data)
    return (
        Section("trade", "Accuracy against cost", blocks, {"Engineer": "What does accuracy cost?"}) if blocks else None
    )


def prices_section(data: ReportData) -> Section | None:
    """Accuracy against ε and megabytes, for pages of results."""
    blocks = _price_blocks(data)
    return Section("trade", "Accuracy against cost", blocks) if blocks else None


def _price_blocks(data: ReportData) -> list[Block]:
    chart = _privacy_chart(data)
    return [*([chart] if chart else []), *_traffic_blocks(data)]


def _costs(method: Method) -> tuple[MetricEstimate, tuple[float, ...]] | None:
    """Mean accuracy, and mean cost of each kind; infinite where it cannot be compared."""
    found = MetricEstimate.estimate(method.summaries, "accuracy")
    if math.isnan(found.mean):
        return None
    moved, seconds = (
        mean_of_known([metric_value(run, name) for run in method.summaries]) for name in ("megabytes", "seconds")
    )
    spent = [run.privacy.epsilon for run in method.summaries if run.privacy and not run.privacy.no_guarantee_reason]
    paid = [epsilon for epsilon in spent if epsilon is not None]
    complete = len(paid) == len(method.runs)
    pools = method.first.summary.pooled  # images themselves: no number of bytes makes that comparable
    return found, (math.inf if pools else moved, seconds, mean_of_known(paid) if complete else math.inf)


def _is_dominated(one: tuple[float, tuple[float, ...]], others: Sequence[tuple[float, tuple[float, ...]]]) -> bool:
    """Whether another is at least as good in everything, and better in something."""
    return any(
        other != one and other[0] >= one[0] and all(a <= b for a, b in zip(other[1], one[1], strict=True))
        for other in others
    )


def _cost_chart(points: dict[str, tuple[MetricEstimate, tuple[float, ...]]], at: int, label: str) -> Figure | None:
    shown = {n: (found, cost[at]) for n, (found, cost) in points.items() if math.isfinite(cost[at]) and cost[at] > 0}
    if len(shown) < 2:
        return None
    sides = [(found.mean, (cost,)) for found, cost in shown.values()]
    drawn = [
        CostPoint(name, found.mean, found.low, found.high, cost, not _is_dominated((found.mean, (cost,)), sides))
        for name, (found, cost) in shown.items()
    ]
    left = [name for name in points if name not in shown]
    words = f"Not shown, since this cost is unknown or zero: {', '.join(left)}." if left else ""
    short = label.partition(" (")[0].partition(",")[0]
    name = f"accuracy-{list(COSTS)[at]}"
    return cost_scatter(name, f"Accuracy against {short}", drawn, label, "accuracy", words)


def _privacy_chart(data: ReportData) -> Figure | None:
    """Accuracy against ε, a line for methods that differ only in their noise."""
    series: dict[str, list[tuple[float, float]]] = {}
    for method in data.methods:
        plans = [run.privacy for run in method.summaries if run.privacy]
        known = [plan.epsilon for plan in plans if plan.epsilon is not None]
        if known:
            accuracy = mean_of_known([run.headline.scores.value("accuracy") for run in method.summaries])
            unsure = ", no guarantee" if plans[0].no_guarantee_reason else ""
            series.setdefault(method.name.partition(" σ=")[0].partition(" ε=")[0] + unsure, []).append(
                (mean_of_known(known), accuracy)
            )
    lines = {name: without_band(sorted(points)) for name, points in series.items() if len(points) > 1}
    if not lines:
        return None
    return line_chart(
        "privacy", "Accuracy against ε", lines, LineAxes(COSTS["epsilon"], "accuracy", format_digits, whole=False)
    )


def _traffic_blocks(data: ReportData) -> list[Block]:
    """Accuracy gained by the first method's extra megabytes, against each method that sends less."""
    first, *others = data.comparison.lines
    cheaper = [other for other in others if not other.pools_images and other.megabytes < WORTH * first.megabytes]
    if not cheaper or first.pools_images:
        return []
    rows = []
    for line in cheaper:
        ours, theirs = (data.method(name).summaries for name in (first.name, line.name))
        mine, other = map(mean_of_known, pair_by_seed(ours, theirs, "megabytes"))
        gained, lost = map(mean_of_known, pair_by_seed(ours, theirs, "accuracy"))
        more, gain, times = mine - other, gained - lost, mine / other if other else math.nan
        rows.append(
            [
                line.name,
                format_number(more, 1),
                f"{format_number(times, 1)} ×",
                format_signed(gain),
                format_signed(gain / more * 1000, 4),
            ]
        )
    title = f"Accuracy gained by the extra megabytes of {first.name}"
    return [
        Heading(title),
        Table(title, ["against", f"MB that {first.name} sends more", "times", "accuracy gained", "per GB"], rows),
        Paragraph(
            "Bytes are measured on the wire, both ways, the weights of the final evaluation included, which the usual "
            "estimate (2 × sites × rounds × model size) leaves out.",
            "note",
        ),
    ]
