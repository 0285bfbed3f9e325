"""The page as a whole: one file that needs no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from polyclinic.reporting.html.formatting import count
from polyclinic.reporting.html.report_data import ReportData
from polyclinic.reporting.html.section import READERS, Section
from polyclinic.reporting.html.sections.costs import costs_section, failures_section
from polyclinic.reporting.html.sections.errors import calibration_section, confusion_section, curves_section
from polyclinic.reporting.html.sections.images import features_section, saliency_section
from polyclinic.reporting.html.sections.methods import methods_section, pareto_section, server_section, tests_section
from polyclinic.reporting.html.sections.privacy import privacy_section
from polyclinic.reporting.html.sections.provenance import provenance_section, reproduce_section
from polyclinic.reporting.html.sections.sites import by_site_section, sites_section
from polyclinic.reporting.html.sections.summary import summary_section
from polyclinic.reporting.html.sections.training import drift_section, forgetting_section, gap_section, learning_section
from polyclinic.reporting.html.style import CSS
from polyclinic.reporting.html.tags import bullet_list, join_cells, paragraph, tag

SECTIONS: tuple[Callable[[ReportData], Section | None], ...] = (
    summary_section,
    by_site_section,
    methods_section,
    tests_section,
    pareto_section,
    sites_section,
    learning_section,
    curves_section,
    confusion_section,
    calibration_section,
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
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Whatever a name may smuggle in, a browser neither runs nor fetches it."""


def page(material: ReportData) -> str:
    """A report as one HTML file."""
    sections = [found for make in SECTIONS if (found := make(material)) is not None]
    first, *rest = sections
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{material.title} · polyclinic report"),
        tag("style", Markup(CSS)),
    ]
    body = [
        tag("a", "Skip to the findings", href="#main", class_="skip"),
        _header(material),
        tag("main", first.html(), _contents(sections), *(one.html() for one in rest), id="main", tabindex="-1"),
        _footer(material),
    ]
    document = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return f"<!doctype html>\n{document}\n"


def _header(material: ReportData) -> Markup:
    runs = sum(len(method.runs) for method in material.methods)
    methods = count(len(material.methods), "method")
    kind = (
        "Report of a run" if runs == 1 else f"Report of {runs} runs" if material.single else f"Comparison of {methods}"
    )
    about = paragraph(material.about) if material.about else ""
    return tag("header", paragraph(kind, class_="kind"), tag("h1", material.title), about)


def _contents(sections: Sequence[Section]) -> Markup:
    """Who asks what, then everything."""
    cards = []
    for reader in READERS:
        asked = [tag("a", one.asked[reader], href=f"#{one.id}") for one in sections[1:] if reader in one.asked]
        cards.append(join_cells([tag("h3", reader), bullet_list(asked)]))
    every = bullet_list((tag("a", one.title, href=f"#{one.id}") for one in sections), "ol")
    contents = tag("details", tag("summary", "All sections"), every, class_="contents-all")
    heading = tag("h2", "Where to find your answer", id="contents-title")
    return tag(
        "nav", heading, bullet_list(cards, class_="who"), contents, id="contents", aria_labelledby="contents-title"
    )


def _footer(material: ReportData) -> Markup:
    version = material.first.summary.get("versions", {}).get("polyclinic", "")
    number = f" {version}" if version[:1].isdigit() else ""
    made = f"Made by polyclinic{number} from the folders of finished runs. "
    words = "Research software, no medical device: nothing here may decide about a patient."
    return tag("footer", paragraph(made, words))
