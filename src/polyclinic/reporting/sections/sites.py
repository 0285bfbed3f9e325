"""The sites: their images, their results, and their gains and losses against training alone."""

import math
from collections.abc import Sequence
from statistics import median

from polyclinic.core import SiteId
from polyclinic.evaluation.comparison import UNTESTED, PairwiseTest, metric_value
from polyclinic.evaluation.statistics import LEVEL
from polyclinic.evaluation.task import class_names
from polyclinic.reporting.blocks import Block, Cell, Folded, Paragraph, Section, Table
from polyclinic.reporting.charts import Estimate, interval_chart, stacked_bars
from polyclinic.reporting.formatting import MISSING, format_names, format_number, format_percent
from polyclinic.reporting.report_data import Method, ReportData, format_sample
from polyclinic.reporting.sections.tasks import task_report
from polyclinic.reporting.sections.tests import difference_cell, difference_cells

MOST_DRAWN = 20
MOST_SITES = 10
"""Metrics beside accuracy are shown site by site for at most so many sites."""
FEW = 30
"""Below so many test images an interval is wide, whatever the method."""
PARTS = ("train", "validation", "test")
SHIFT_NOTE = (
    "Class shift: the share of a site's images that would have to change class for it to have the mix of all together "
    "(total variation distance)."
)
UNKNOWN_NOTE = "How many images of each class a site has is not known: real sites do not tell it."


def sites_section(data: ReportData) -> Section | None:
    """Numbers of images and the mix of classes at each site, where the classes of images are known."""
    if not (sites := data.first.summary.site_sizes):
        return None
    counted = dict.fromkeys(name for site in sites for name in site.classes)
    classes = (class_names(data.first.summary) or tuple(counted)) if counted else ()
    mixes = {site.site: [float(site.classes.get(name, 0)) for name in classes] for site in sites}
    total = [sum(counts) for counts in zip(*mixes.values(), strict=True)]
    sizes = {site.site: [getattr(site, part) for part in PARTS] for site in sites}
    rows = [
        [
            name,
            *(f"{size:,}" for size in sizes[name]),
            *(_class_cell(count, sum(mix)) for count in mix),
            *([_shift_cell(mix, total)] if counted else []),
        ]
        for name, mix in mixes.items()
    ]
    every = [f"{sum(size):,}" for size in zip(*sizes.values(), strict=True)]
    rows.append(["all", *every, *(_class_cell(count, sum(total)) for count in total), *([MISSING] if counted else [])])
    note = f"Numbers are of images. {SHIFT_NOTE if counted else UNKNOWN_NOTE}"
    if small := [site.site for site in sites if 0 < site.test < FEW]:
        note += f" Fewer than {FEW} test images at {format_names(small)}: figures there say little by themselves."
    if data.has_several_seeds:
        note += " First seed."
    blocks: list[Block] = [
        Table("Sites and their images", ["site", *PARTS, *classes, *(["class shift"] if counted else [])], rows),
        Paragraph(note, "note"),
    ]
    drawn = [(site, mix) for site, mix in mixes.items() if sum(mix)]
    if drawn and data.is_from_folders:
        blocks.append(stacked_bars("classes", "Classes at each site", dict(drawn[:MOST_DRAWN]), classes))
    return Section(
        "sites",
        "The sites and how they differ",
        blocks,
        {"Clinician": "Whose images are these?", "Statistician": "How do the sites differ?"},
    )


def _class_cell(count: float, total: float) -> str:
    return f"{count:,.0f} ({format_percent(count / total)})" if total else "–"


def _shift_cell(mix: Sequence[float], total: Sequence[float]) -> str:
    return format_percent(total_variation(mix, total)) if sum(mix) else MISSING


def total_variation(mix: Sequence[float], total: Sequence[float]) -> float:
    """Total variation distance between two mixes of classes, given as counts."""
    here, all_ = sum(mix) or 1.0, sum(total) or 1.0
    return sum(abs(a / here - b / all_) for a, b in zip(mix, total, strict=True)) / 2


def by_site_section(data: ReportData) -> Section | None:
    """Results at every site; against training alone where that has been run."""
    if not data.first.site_scores:
        return None
    local = data.local if data.federated else None
    blocks: list[Block] = [] if local is None else _gain_blocks(data, local)
    if data.is_single:
        blocks += _site_figures(data, data.methods[0])
    else:
        table = _metric_table(data, data.main_metric, data.sites)
        blocks.append(table if local is None else Folded("Accuracy of every method at every site", [table]))
    if not data.is_single and len(data.sites) <= MOST_SITES:
        blocks += _claimed_metrics(data, data.sites)
    title = "Results at each site" if local is None else "Gains and losses against training alone"
    question = "How does it do at my site?" if local is None else "Would my site do as well alone?"
    return Section("by-site", title, blocks, {"Clinician": question, "Statistician": "Site by site, tested?"})


def site_metrics_section(data: ReportData) -> Section | None:
    """The main metric at each site, where they are few, and the metrics that claims are about."""
    sites = tuple(data.first.summary.sites)
    if not 2 <= len(sites) <= MOST_SITES:
        return None
    tables = [_metric_table(data, data.main_metric, sites), *_claimed_metrics(data, sites)]
    return Section("by-site", "Site by site", tables)


def _claimed_metrics(data: ReportData, sites: Sequence[SiteId]) -> list[Table]:
    names = dict.fromkeys(claim.metric for claim in data.claims if claim.metric in data.task.metric_names)
    return [_metric_table(data, name, sites) for name in names if name != data.main_metric]


def _site_figures(data: ReportData, method: Method) -> list[Block]:
    """A single run's figures at each site, with their intervals."""
    run, metric = method.first, data.main_metric
    more = task_report(run.summary).site_metrics
    known = {site: scores for site, scores in run.site_scores.items() if not math.isnan(scores.value(metric))}
    rows: list[list[str | Cell]] = [
        [
            site,
            f"{scores.n:,}",
            *(Cell(format_number(scores.value(name)), scores.interval(name)) for name in (*data.columns, *more)),
        ]
        for site, scores in known.items()
    ]
    charted = [
        Estimate(site, scores.value(metric), *scores.interval(metric))
        for site, scores in list(known.items())[:MOST_DRAWN]
    ]
    seeds = " (first seed)" if len(method.runs) > 1 else ""
    labels = [f"{label} [95 %]" for label in data.columns.values()]
    table = Table(
        f"Figures at each site{seeds}", ["site", f"{run.summary.headline.part} images", *labels, *more.values()], rows
    )
    return [
        table,
        interval_chart(
            "sites",
            f"{data.label(metric)} at each site{seeds}",
            charted,
            data.columns[metric],
            "Bars: 95 % intervals over test patients (bootstrap).",
        ),
    ]


def _metric_table(data: ReportData, metric: str, sites: Sequence[SiteId]) -> Table:
    """A metric of every method at every site, without a test."""
    rows = [[method.name, *(_spread_at_site(method, metric, site) for site in sites)] for method in data.methods]
    spread = " (mean ± standard deviation over seeds; median)" if data.has_several_seeds else ""
    return Table(f"{data.label(metric)} at each site{spread}", ["method", *sites], rows)


def _spread_at_site(method: Method, metric: str, site: str) -> str:
    values = [metric_value(run, metric, site) for run in method.summaries]
    has_median = len(values) > 1 and not any(map(math.isnan, values))
    return format_sample(values) + (f"; {median(values):.3f}" if has_median else "")


def _gain_blocks(data: ReportData, local: Method) -> list[Block]:
    """Every method against training alone, at every site."""
    tests = data.site_tests
    head = ["site", local.name, *(method.name for method in data.federated)]
    rows: list[list[str | Cell]] = []
    for site in data.sites:
        here = [difference_cell(test) for test in tests if test.site == site]
        rows.append([site, local.format_spread(data.main_metric, site), *here])
    tested = sum(not math.isnan(test.p) for test in tests)
    over_seeds = any("seeds" in test.over for test in tests)
    basis = "over seeds (paired t-test)" if over_seeds else "over test patients (sign flips)"
    meaning = f"▲ gains, ▼ loses beyond chance: p < {LEVEL:g} {basis}, corrected for {tested} tests (Holm)."
    if not tested:
        meaning = f"Not tested: {UNTESTED}, so no difference is called a gain."
    blocks: list[Block] = [
        Table("Accuracy against training alone", head, rows),
        Paragraph(
            f"Accuracy alone, and for each method its difference in percentage points. {meaning} No mark: not decided.",
            "note",
        ),
        Table(
            "At how many sites",
            ["method", "gains", "loses", "not decided"],
            [_count_verdicts(m, tests) for m in data.federated],
        ),
    ]
    charted = [
        Estimate(test.site or "", test.difference, test.low, test.high)
        for test in tests[:MOST_DRAWN]
        if not math.isnan(test.difference)
    ]
    if len(data.federated) == 1 and charted:
        blocks.append(
            interval_chart(
                "gains",
                f"{data.federated[0].name} minus training alone, by site",
                charted,
                "accuracy gained, percentage points",
                "Right of the line the federation is ahead; 95 % intervals, not corrected for their number.",
                line=0.0,
            )
        )
    if tested:
        exact = [[f"{test.a} at {test.site}", *difference_cells(test), test.over] for test in tests]
        head = ["method and site", "difference", "95 % interval", "p", "p (Holm)", "over"]
        blocks.append(
            Folded(
                "Every difference with its interval and test",
                [Table("Differences to training alone, percentage points", head, exact)],
            )
        )
    return blocks


def _count_verdicts(method: Method, tests: Sequence[PairwiseTest]) -> list[str]:
    here = [test for test in tests if test.a == method.name and not math.isnan(test.difference)]
    return [method.name, *(str(sum(test.verdict == sign for test in here)) for sign in (1, -1, 0))]
