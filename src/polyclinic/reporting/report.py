"""The report: its sections in order, of a run or of a comparison."""

from collections.abc import Callable, Sequence
from pathlib import Path

from polyclinic.evaluation.comparison import Comparison
from polyclinic.evaluation.summary import RunSummary
from polyclinic.reporting.blocks import Report, Section
from polyclinic.reporting.formatting import format_count
from polyclinic.reporting.render_markdown import write_figure
from polyclinic.reporting.report_data import Method, ReportData, Run, gather_report_data
from polyclinic.reporting.sections.costs import costs_section, failures_section
from polyclinic.reporting.sections.images import features_section, saliency_section
from polyclinic.reporting.sections.methods import methods_section, prices_section, trade_section
from polyclinic.reporting.sections.privacy import privacy_cost_section, privacy_section
from polyclinic.reporting.sections.provenance import provenance_section, reproduce_section
from polyclinic.reporting.sections.server import server_section
from polyclinic.reporting.sections.sites import by_site_section, site_metrics_section, sites_section
from polyclinic.reporting.sections.summary import summary_section
from polyclinic.reporting.sections.tasks import task_report
from polyclinic.reporting.sections.tests import against_first_section, claims_section, tests_section
from polyclinic.reporting.sections.training import (
    drift_section,
    forgetting_chart,
    forgetting_section,
    gap_section,
    learning_section,
)

SectionBuilder = Callable[[ReportData], Section | None]
"""Builds a section, or None where there is nothing to show."""


def build_report(data: ReportData) -> Report:
    """The whole report of a run or a comparison."""
    builders: Sequence[SectionBuilder] = (
        summary_section,
        by_site_section,
        methods_section,
        tests_section,
        against_first_section,
        claims_section,
        trade_section,
        sites_section,
        learning_section,
        *task_report(data.first.summary).sections,
        server_section,
        drift_section,
        forgetting_section,
        gap_section,
        features_section,
        saliency_section,
        costs_section,
        privacy_section,
        failures_section,
        provenance_section,
        reproduce_section,
    )
    runs = sum(len(method.runs) for method in data.methods)
    kind = f"Comparison of {format_count(len(data.methods), 'method')}"
    if data.is_single:
        kind = "Report of a run" if runs == 1 else f"Report of {runs} runs"
    return Report(data.title, kind, data.about, _build_sections(data, builders), _footer(data))


def build_results_page(comparison: Comparison) -> Report:
    """The report of kept figures, of which only the summaries are known."""
    data = gather_report_data(comparison, {})
    builders: Sequence[SectionBuilder] = (
        methods_section,
        against_first_section,
        server_section,
        privacy_cost_section,
        *task_report(data.first.summary).results_sections,
        claims_section,
        site_metrics_section,
        gap_section,
        prices_section,
        learning_section,
        forgetting_section,
        sites_section,
    )
    return Report(data.title, "", data.about, _build_sections(data, builders), data.versions)


def write_forgetting_chart(summary: RunSummary, path: Path) -> None:
    """Write the chart of what each deployment of a run lost and gained, over all sites."""
    data = ReportData(summary.name, "", (Method(summary.name, (Run(summary),)),))
    if (chart := forgetting_chart(data)) is not None:
        write_figure(chart, path)


def _build_sections(data: ReportData, builders: Sequence[SectionBuilder]) -> list[Section]:
    return [section for build in builders if (section := build(data)) is not None]


def _footer(data: ReportData) -> str:
    version = data.first.summary.versions.get("polyclinic", "")
    number = f" {version}" if version[:1].isdigit() else ""
    return (
        f"Made by polyclinic{number} from the folders of finished runs. Research software, no medical device: nothing "
        "here may decide about a patient."
    )
