"""Methods side by side: the table, the tests, the paper's claims, and what accuracy costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyclinic.evaluation import claims
from polyclinic.evaluation.comparison import (
    SHOWN,
    MethodSummary,
    MetricEstimate,
    format_decimal,
    format_traffic,
    metric_value,
)
from polyclinic.reporting.html.charts import Dot, Spot, cost_scatter, interval_chart
from polyclinic.reporting.html.formatting import change, fixed, interval_of, points, series, with_interval
from polyclinic.reporting.html.pairwise_tests import UNTESTED, Difference, all_pairs, anova
from polyclinic.reporting.html.report_data import Method, ReportData
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.svg import share
from polyclinic.reporting.html.tags import Cell, fold_details, join_cells, paragraph, table, tag
from polyclinic.reporting.markdown.server import SIX


def methods_section(material: ReportData) -> Section | None:
    """The table of all methods."""
    if material.single:
        return None
    comparison = material.comparison
    several = any(line.seeds > 1 for line in comparison.lines)
    head = ["method", "seeds", "rounds", "accuracy", "balanced accuracy", "AUC", "lowest AUC, at", "MB sent", "seconds"]
    rows = [_row(line, material.methods[at]) for at, line in enumerate(comparison.lines)]
    drawn = [
        Dot(line.name, found.mean, found.low, found.high, f"{share(found.mean)}{_edges(found)}")
        for line in comparison.lines
        if not math.isnan((found := line.figures["accuracy"]).mean)
    ]
    spread = " ± is the standard deviation over seeds." if several else ""
    note = (
        f"Figures on {comparison.judged_on} together, of {comparison.judged_by}; below each its 95 % interval over "
        f"{comparison.interval_description}.{spread} Intervals that overlap do not show that two methods are alike: see the tests."
    )
    pooled = [line.name for line in comparison.lines if line.pools_images]
    yard = (
        f" {', '.join(pooled)} pools the images themselves, which hospitals may not do: a yardstick." if pooled else ""
    )
    alike = [method.name for method in material.methods if _undecided(method.first.summary)]
    if alike:
        yard += f" {', '.join(alike)} called all images by one class (first seed): look at AUC, not at accuracy."
    parts: list[Cell] = [table("All methods", head, rows), paragraph(note, yard, class_="note")]
    parts.append(
        interval_chart(
            "Accuracy of all methods", drawn, "accuracy", f"95 % intervals over {comparison.interval_description}."
        )
    )
    asked: Asked = {"Clinician": "How do the methods compare?", "Engineer": "Figures of every method?"}
    return Section("methods", "The methods side by side", join_cells(parts), asked)


def _undecided(summary: Mapping[str, Any]) -> bool:
    """Whether the model says the same of every image."""
    counts = summary["headline"].get("confusion") or []
    return len(counts) > 1 and sum(any(column) for column in zip(*counts, strict=True)) == 1


def _row(line: MethodSummary, method: Method) -> list[Cell]:
    cells: list[Cell] = [line.name, str(line.seeds), str(method.first.summary["rounds"])]
    cells += [_figure(line.figures[metric]) for metric in SHOWN]
    worst = f"{format_decimal(line.worst_auc)} {line.worst_site}" if line.worst_site else "–"
    return [*cells, worst, format_traffic(line), f"{line.seconds:,.0f}"]


def _figure(found: MetricEstimate) -> Markup:
    spread = "" if found.std is None or math.isnan(found.std) else f" ± {found.std:.3f}"
    return with_interval(format_decimal(found.mean) + spread, found.low, found.high)


def _edges(found: MetricEstimate) -> str:
    return "" if math.isnan(found.low) else f" ({share(found.low)} to {share(found.high)})"


def tests_section(material: ReportData) -> Section | None:
    """Every pair of methods, and the paper's claims."""
    if material.single:
        return None
    pairs = all_pairs(material.methods)
    known = [one for one in pairs if not math.isnan(one.p)]
    if not known:
        words = f"No pair of methods can be tested: {UNTESTED}."
        return Section("tests", "Tests", paragraph(words), {"Statistician": "Is it more than chance?"})
    seeds = any("seeds" in one.over for one in known)
    parts: list[Cell] = [_matrix(material.methods, pairs), paragraph(_how(known, seeds), class_="note")]
    if (found := anova(material.methods)) is not None:
        words = f"One-way ANOVA over all methods: F = {found[0]:.2f}, p {_chance(found[1])}."
        parts.append(paragraph(words))
    parts.append(fold_details("Every pair with its interval and tests", _exact(known)))
    parts += _claims(material)
    return Section(
        "tests", "Tests: is it more than chance?", join_cells(parts), {"Statistician": "Is it more than chance?"}
    )


def _how(known: Sequence[Difference], seeds: bool) -> str:
    test = (
        "Paired t-tests over seeds (Wilcoxon's signed ranks beside them in the list below)"
        if seeds
        else "Each patient's difference in images right, its sign flipped at random (two-sided), first seed"
    )
    only = "" if seeds else " One seed: this says how sure we are of these trained models, not of training again."
    return (
        f"Accuracy of the row minus that of the column, in percentage points. {test}; ▲ higher, ▼ lower beyond chance: "
        f"p < 0.05 after Holm's correction for all {len(known)} pairs. No mark: not decided, which is no proof that "
        f"two are alike.{only}"
    )


def _chance(p: float) -> str:
    told = claims.format_p_value(p)
    return told if told.startswith("<") else f"= {told}"


def _matrix(methods: Sequence[Method], pairs: Sequence[Difference]) -> Markup:
    found = {(one.a, one.b): one for one in pairs}
    rows: list[list[Cell]] = []
    for a in methods:
        cells: list[Cell] = [a.name]
        for b in methods:
            one = found.get((a.name, b.name)) or _turned(found.get((b.name, a.name)))
            cells.append(change(one) if one else "")
        rows.append(cells)
    return table("Differences in accuracy, percentage points", ["row − column", *(m.name for m in methods)], rows)


def _turned(one: Difference | None) -> Difference | None:
    if one is None:
        return None
    return Difference(one.b, one.a, one.site, -one.value, -one.high, -one.low, one.p, one.corrected)


def _exact(known: Sequence[Difference]) -> Markup:
    seeds = any("seeds" in one.over for one in known)
    head = [
        "pair",
        "difference",
        "95 % interval",
        "p",
        "p (Holm)",
        *(["Wilcoxon p", "effect d"] if seeds else []),
        "over",
    ]
    rows = []
    for one in known:
        more = [claims.format_p_value(one.wilcoxon), fixed(one.effect, 2)] if seeds else []
        chances = [claims.format_p_value(one.p), claims.format_p_value(one.corrected)]
        rows.append([f"{one.a} − {one.b}", points(one.value), interval_of(one), *chances, *more, one.over])
    return table("Pairs of methods, percentage points of accuracy", head, rows)


def _claims(material: ReportData) -> list[Cell]:
    results = {method.name: method.summaries for method in material.methods}
    found = claims.evaluate_claims(material.claims, results)
    if not found:
        return []
    head = ["the paper's claim", "paper", "difference (95 %)", "p", "p (Holm)", "our data"]
    rows = [
        [
            one.claim.claim,
            one.claim.paper or "–",
            one.effect,
            *map(claims.format_p_value, (one.p, one.corrected)),
            verdict,
        ]
        for one, verdict in zip(found, map(claims.format_verdict, found), strict=True)
    ]
    return [tag("h3", "The paper's claims, tested"), table("Claims", head, rows)]


def pareto_section(material: ReportData) -> Section | None:
    """Accuracy against megabytes, seconds and ε; who is at the edge of each and of all."""
    if material.single:
        return None
    spots = [spot for method in material.methods if (spot := _costs(method, material)) is not None]
    pictures = [
        _picture(spots, at, label)
        for at, label in enumerate(COSTS)
        if sum(math.isfinite(cost[at]) and cost[at] > 0 for _, _, cost in spots) > 1
    ]
    if not pictures:
        return None
    edge = [
        name for name, figure, cost in spots if not _beaten((figure.mean, cost), [(f.mean, c) for _, f, c in spots])
    ]
    words = (
        f"Counting accuracy, megabytes, ε and seconds at once, nothing here surpasses {series(edge)}: each other "
        "method is matched or outdone in all four by one of them. That is by means; the tests tell what is chance."
    )
    note = "Ringed and joined: no method shown costs less and is right more often, by means. Costs grow by factors."
    body = join_cells([paragraph(words), tag("div", *pictures, class_="figures"), paragraph(note, class_="note")])
    return Section("trade", "What accuracy costs", body, {"Engineer": "What does accuracy cost?"})


COSTS = ("megabytes sent, both ways", "seconds (wall-clock)", "ε of the worst-placed unit")


def _costs(method: Method, material: ReportData) -> tuple[str, MetricEstimate, tuple[float, ...]] | None:
    found = MetricEstimate.estimate(method.summaries, "accuracy")
    if math.isnan(found.mean):
        return None
    moved = [_mean([metric_value(run, metric) for run in method.summaries]) for metric in ("megabytes", "seconds")]
    if next(line for line in material.comparison.lines if line.name == method.name).pools_images:
        moved[0] = math.inf  # images themselves: no number of bytes makes that comparable
    paid = [run["privacy"] for run in method.summaries if run.get("privacy") and not run["privacy"]["caveat"]]
    spent = [one["epsilon"][one["accountant"]] for one in paid]
    complete = len(spent) == len(method.runs) and None not in spent
    return method.name, found, (*moved, _mean(spent) if complete else math.inf)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _beaten(one: tuple[float, tuple[float, ...]], others: Sequence[tuple[float, tuple[float, ...]]]) -> bool:
    """Whether another is at least as good in everything, and beyond it in something."""
    return any(
        other != one and other[0] >= one[0] and all(a <= b for a, b in zip(other[1], one[1], strict=True))
        for other in others
    )


def _picture(spots: Sequence[tuple[str, MetricEstimate, tuple[float, ...]]], at: int, label: str) -> Markup:
    shown = [(name, found, cost[at]) for name, found, cost in spots if math.isfinite(cost[at]) and cost[at] > 0]
    sides = [(found.mean, (cost,)) for _, found, cost in shown]
    drawn = [
        Spot(name, cost, found.mean, found.low, found.high, not _beaten((found.mean, (cost,)), sides))
        for name, found, cost in shown
    ]
    left = [name for name, *_ in spots if name not in {spot.name for spot in drawn}]
    words = f"Not shown, for want of such a figure: {', '.join(left)}." if left else ""
    short = label.partition(" (")[0].partition(",")[0]
    return cost_scatter(f"Accuracy against {short}", drawn, label, "accuracy", words)


def server_section(material: ReportData) -> Section | None:
    """The server's own models, on its public test images."""
    rows = []
    for method in material.methods:
        found = [run["public"] for run in method.summaries if run.get("public")]
        for model in found[0] if found else ():
            here = [run[model] for run in found if model in run]
            rows.append([f"{method.name}: {model}", *(_six(here, metric) for metric in SIX)])
    if not rows:
        return None
    body = table("Models on the server's public test images (mean over seeds)", ["method and model", *SIX], rows)
    return Section("server", "On the server's public images", body, {"Engineer": "How do the server's models do?"})


def _six(runs: Sequence[object], metric: str) -> str:
    known = [run[metric] for run in runs if isinstance(run, dict) and run.get(metric) is not None]
    return fixed(_mean(known) if known else None)
