"""Privacy: the claims with their units, and everything that left the sites with its protection."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from polyclinic.evaluation.comparison import mean_of_known
from polyclinic.evaluation.rows import group_pairs
from polyclinic.evaluation.summary import PartScores, PrivacySpent, RunSummary
from polyclinic.evaluation.task import confusion_of
from polyclinic.privacy.plan import describe_noise
from polyclinic.reporting.blocks import Block, Bullets, Folded, Heading, Paragraph, Section, Table
from polyclinic.reporting.formatting import MISSING, format_megabytes, format_names, round_up
from polyclinic.reporting.privacy_statement import PAPER_METRIC, UNITS, privacy_sections
from polyclinic.reporting.report_data import Method, ReportData


def privacy_section(data: ReportData) -> Section:
    blocks: list[Block] = [Heading("What was claimed"), *claim_blocks(data)]
    if not data.has_privacy:
        where = " All images were pooled in one place." if data.is_single and data.first.summary.pooled else ""
        blocks.append(
            Paragraph(
                "Nothing. No recipe here has a privacy plan, so what was released may reveal single images, and no "
                f"figure bounds how much.{where}"
            )
        )
    blocks += [
        Folded(f"The whole privacy statement of {method.name}", _statement(method))
        for method in data.methods
        if method.first.summary.privacy
    ]
    blocks += [Heading("What left the sites"), _release_table(data.methods), *_traffic(data)]
    blocks += [Heading("What this report itself reveals"), Bullets(tuple(_own_disclosures(data)))]
    return Section(
        "privacy",
        "Privacy",
        blocks,
        {
            "Data-protection officer": "What was claimed, and what left the sites?",
            "Clinician": "And privacy?",
        },
    )


def privacy_cost_section(data: ReportData) -> Section | None:
    """The claims alone, for pages of results."""
    return Section("privacy", "Cost of privacy", claim_blocks(data)) if data.has_privacy else None


def claim_blocks(data: ReportData) -> list[Block]:
    """A table of what each method claims; [] where no method has a plan."""
    if not data.has_privacy:
        return []
    rows = [[method.name, *_claim_cells(method)] for method in data.methods]
    plans = [run.privacy for method in data.methods for run in method.summaries if run.privacy]
    note = (
        "ε by privacy loss distributions unless the recipe says otherwise, the mean over seeds (which draw other "
        "cohorts); runs add up for an observer of several. Every run has a page of its own, privacy.md."
    )
    for reason in sorted({plan.no_guarantee_reason for plan in plans if plan.no_guarantee_reason}):
        note += f" In brackets, without a guarantee ({reason}): what ε would be."
    return [
        Table(
            "Privacy claimed by each method",
            [
                "method",
                "protects",
                "noise",
                "ε, worst-placed unit",
                "ε, if at one site only",
                "δ",
                "allowed ε",
                PAPER_METRIC,
            ],
            rows,
        ),
        Paragraph(note, "note"),
    ]


def _claim_cells(method: Method) -> list[str]:
    plans = [run.privacy for run in method.summaries if run.privacy]
    if not plans:
        return ["nothing is claimed", "0", "∞", "∞", MISSING, MISSING, MISSING]
    first = plans[0]
    unsure = "({})" if first.no_guarantee_reason else "{}"
    worst = unsure.format(_largest_epsilon([plan.epsilon for plan in plans]))
    alone = unsure.format(_largest_epsilon([plan.worst_site_epsilon for plan in plans]))
    protects = "no guarantee" if first.no_guarantee_reason else UNITS[first.unit]
    allowed = "not limited" if first.max_epsilon is None else f"{first.max_epsilon:g}"
    return [
        protects,
        describe_noise(first.noise, first.site_noise),
        worst,
        alone,
        f"{first.delta:.2g}",
        allowed,
        _paper_metric(plans),
    ]


def _largest_epsilon(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return round_up(max(known)) if known and len(known) == len(values) else "∞"


def _mean_epsilon(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f}" if known and len(known) == len(values) else "∞"


def _paper_metric(plans: Sequence[PrivacySpent]) -> str:
    return MISSING if plans[0].paper_metric is None else _mean_epsilon([plan.paper_metric for plan in plans])


def _statement(method: Method) -> list[Block]:
    """The privacy statement of the first seed, but for the table of what was released."""
    sections = privacy_sections(method.first.summary)
    return [block for one in sections for block in (*([Heading(one.title)] if one.title else []), *one.blocks)]


def _release_table(methods: Sequence[Method]) -> Table:
    """By kind and protection, with the methods that release it so."""
    pooled = [(("images", "none: pooled in one place"), one.name) for one in methods if one.first.summary.pooled]
    kinds = (((row.kind, row.protection), one.name) for one in methods for row in one.first.summary.released)
    names = group_pairs([*pooled, *kinds])
    several = len(methods) > 1
    rows = [
        [*pair, *([format_names(found) if len(found) < len(methods) else "all methods"] if several else [])]
        for pair, found in sorted(names.items())
    ]
    return Table("What leaves a site", ["what leaves", "what protects it", *(["with"] if several else [])], rows)


def _traffic(data: ReportData) -> list[Block]:
    sent = [
        f"{method.name} {format_megabytes(mean_of_known([float(run.cost.bytes_up) for run in method.summaries]))} MB"
        for method in data.methods
        if not method.first.summary.pooled
    ]
    return [Paragraph(f"Sent by all sites together, over a whole run: {', '.join(sent)}.", "note")] if sent else []


def _list_scores(run: RunSummary) -> list[PartScores]:
    """Return all scores of a run that a report may show."""
    models = [*run.merged.values(), *(scores for site in run.sites.values() for scores in site.values())]
    return [run.headline.scores, *(scores for parts in models for scores in parts.values())] if models else []


def _is_bare(run: RunSummary) -> bool:
    """Whether figures of the final models came without noise: those of a simulation always do."""
    return not run.has_remote_sites or run.privacy is None or run.privacy.metrics == "open"


def _own_disclosures(data: ReportData) -> Iterator[str]:
    runs = [run for method in data.methods for run in method.summaries]
    by_class = " and class" if any(site.classes for run in runs for site in run.site_sizes) else ""
    shown = [scores for run in runs for scores in _list_scores(run)]
    matrices = any(confusion_of(scores) for scores in shown)
    counted = ", and in confusion matrices down to single images" if matrices else ""
    bare = "figures of test images without noise" if any(map(_is_bare, runs)) else "no figure of test images but noised"
    figures = f"; {bare}" if shown else "; no figure of test images"
    yield f"Numbers of images by site{by_class}{counted}{figures}. No patient's name or number."
    yield (
        "Pictures of patients, because --with-images was given: keep this file where the images may be seen."
        if data.with_images
        else "No picture of a patient."
    )
