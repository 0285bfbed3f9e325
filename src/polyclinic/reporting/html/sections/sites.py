"""The hospitals: how they differ, how each fares, and who gains or loses against training alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from polyclinic.evaluation.claims import format_p_value
from polyclinic.evaluation.summary import headline_at_site
from polyclinic.reporting.html.charts import Dot, interval_chart, stacked_bars
from polyclinic.reporting.html.formatting import bounds, change, figure_of, fixed, interval_of, points, series
from polyclinic.reporting.html.pairwise_tests import UNTESTED, Difference, at_sites
from polyclinic.reporting.html.report_data import Method, ReportData
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.svg import share
from polyclinic.reporting.html.tags import Cell, fold_details, join_cells, paragraph, table

MOST_DRAWN = 20
FEW = 30
"""Below so many test images an interval is wide whatever the method."""


def sites_section(material: ReportData) -> Section | None:
    """Sizes and mixes of classes."""
    sites = material.first.summary.get("hospitals")
    if not sites:
        return None
    classes = material.classes
    mixes = {site["site"]: [float(site["classes"].get(name, 0)) for name in classes] for site in sites}
    total = [sum(counts) for counts in zip(*mixes.values(), strict=True)]
    rows = [
        [
            site["site"],
            *(f"{site[part]:,}" for part in ("train", "validation", "test")),
            *(_part(count, sum(mixes[site["site"]])) for count in mixes[site["site"]]),
            share(total_variation(mixes[site["site"]], total)),
        ]
        for site in sites
    ]
    every = ["all", *(f"{sum(site[part] for site in sites):,}" for part in ("train", "validation", "test"))]
    rows.append([*every, *(_part(count, sum(total)) for count in total), "–"])
    head = ["hospital", "train", "validation", "test", *classes, "classes apart"]
    note = (
        "Numbers are of images. Classes apart: the share of a hospital's images that would have to change class for it "
        "to have the mix of all together (total variation)."
    )
    small = [site["site"] for site in sites if 0 < site["test"] < FEW]
    few = f" Fewer than {FEW} test images at {series(small)}: figures there say little by themselves." if small else ""
    seeds = " First seed." if len(material.methods[0].runs) > 1 else ""
    drawn = stacked_bars("Classes at each hospital", dict(list(mixes.items())[:MOST_DRAWN]), classes) if total else ""
    body = join_cells(
        [table("Hospitals and their images", head, rows), paragraph(note, few, seeds, class_="note"), drawn]
    )
    asked: Asked = {"Clinician": "Whose images are these?", "Statistician": "How do the hospitals differ?"}
    return Section("hospitals", "The hospitals and how they differ", body, asked)


def _part(count: float, total: float) -> str:
    return f"{count:,.0f} ({share(count / total)})" if total else "–"


def total_variation(mix: Sequence[float], total: Sequence[float]) -> float:
    """Total variation distance between two mixes of classes."""
    here, all_ = sum(mix) or 1.0, sum(total) or 1.0
    return sum(abs(a / here - b / all_) for a, b in zip(mix, total, strict=True)) / 2


def by_site_section(material: ReportData) -> Section | None:
    """How every hospital is served; against training alone where that has been run."""
    if not any(headline_at_site(material.first.summary, site) for site in material.first.summary["sites"]):
        return None
    alone = material.alone
    gains = alone is not None and bool(material.together)
    parts = _gains(material, alone) if gains and alone is not None else []
    parts += _served(material.methods[0]) if material.single else [_accuracies(material)]
    title = "Who gains, who loses against training alone" if gains else "How each hospital is served"
    question = "Would my hospital do as well alone?" if gains else "How does it do at my hospital?"
    return Section(
        "by-hospital", title, join_cells(parts), {"Clinician": question, "Statistician": "Site by site, tested?"}
    )


def _served(method: Method) -> list[Cell]:
    run, seeds = method.first, " (first seed)" if len(method.runs) > 1 else ""
    rows, drawn = [], []
    for site in run.summary["sites"]:
        row = headline_at_site(run.summary, site)
        if row.get("accuracy") is None:
            continue
        figures = [figure_of(row, metric) for metric in ("accuracy", "auc")]
        rest = [fixed(row.get(metric)) for metric in ("recall", "specificity", "ece")]
        rows.append([site, f"{row['n']:,}", *figures, *rest])
        low, high = bounds(row, "accuracy")
        told = share(row["accuracy"]) + ("" if math.isnan(low) else f" ({share(low)} to {share(high)})")
        drawn.append(Dot(site, row["accuracy"], low, high, told))
    part = run.best["part"]
    head = ["hospital", f"{part} images", "accuracy (95 %)", "AUC (95 %)", "sensitivity", "specificity", "ECE"]
    title = f"Accuracy at each hospital{seeds}"
    words = "Bars: 95 % intervals over test patients (bootstrap)."
    return [
        table(f"Figures at each hospital{seeds}", head, rows),
        interval_chart(title, drawn[:MOST_DRAWN], "accuracy", words),
    ]


def _accuracies(material: ReportData) -> Markup:
    """Every method at every hospital, without a test."""
    from polyclinic.evaluation.claims import format_mean_and_std

    rows = [
        [method.name, *(format_mean_and_std(method.summaries, "accuracy", site) for site in material.sites)]
        for method in material.methods
    ]
    several = any(len(method.runs) > 1 for method in material.methods)
    spread = " (mean ± standard deviation over seeds)" if several else ""
    found = table(f"Accuracy at each hospital{spread}", ["method", *material.sites], rows)
    return found if material.alone is None else fold_details("Accuracy of every method at every hospital", found)


def _gains(material: ReportData, alone: Method) -> list[Cell]:
    tests = at_sites(material.together, alone, material.sites)
    head = ["hospital", alone.name, *(method.name for method in material.together)]
    from polyclinic.evaluation.claims import format_mean_and_std

    rows: list[list[Cell]] = []
    for site in material.sites:
        here = [one for one in tests if one.site == site]
        rows.append([site, format_mean_and_std(alone.summaries, "accuracy", site), *map(change, here)])
    over = sorted({one.over for one in tests if one.over}, key=len)
    tested = sum(not math.isnan(one.p) for one in tests)
    basis = "over seeds (paired t-test)" if any("seeds" in text for text in over) else "over test patients (sign flips)"
    told = f"▲ gains, ▼ loses beyond chance: p < 0.05 {basis}, corrected for {tested} tests (Holm)."
    if not tested:
        told = f"Not tested: {UNTESTED}, so no difference is called a gain."
    note = (
        f"Accuracy alone, and for each method the difference to it in percentage points. {told} No mark: not decided."
    )
    parts: list[Cell] = [table("Accuracy against training alone", head, rows), paragraph(note, class_="note")]
    parts.append(table("At how many hospitals", ["method", "gains", "loses", "not decided"], _tally(material, tests)))
    parts += _drawn(material.together[0], tests) if len(material.together) == 1 else []
    if tested:
        parts.append(fold_details("Every difference with its interval and test", _exact(tests)))
    return parts


def _tally(material: ReportData, tests: Sequence[Difference]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for method in material.together:
        here = [one for one in tests if one.a == method.name and not math.isnan(one.value)]
        signs = [sum(one.verdict == sign for one in here) for sign in (1, -1, 0)]
        rows.append([method.name, *map(str, signs)])
    return rows


def _drawn(method: Method, tests: Sequence[Difference]) -> list[Cell]:
    rows = [
        Dot(one.site or "", one.value, one.low, one.high, f"{points(one.value)} ({interval_of(one)})")
        for one in tests[:MOST_DRAWN]
        if not math.isnan(one.value)
    ]
    title = f"{method.name} minus training alone, by hospital"
    words = "Right of the line the federation is ahead; 95 % intervals, not corrected for their number."
    return [interval_chart(title, rows, "accuracy gained, percentage points", words, line=0.0)] if rows else []


def _exact(tests: Sequence[Difference]) -> Markup:
    rows = [
        [
            f"{one.a} at {one.site}",
            points(one.value),
            interval_of(one),
            format_p_value(one.p),
            format_p_value(one.corrected),
            one.over,
        ]
        for one in tests
    ]
    head = ["method and hospital", "difference", "95 % interval", "p", "p (Holm)", "over"]
    return table("Differences to training alone, percentage points", head, rows)
