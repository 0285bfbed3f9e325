"""Blocks as HTML, and a report as one HTML file that needs no other."""

import base64
import math
import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from polyclinic.reporting.blocks import (
    READERS,
    Block,
    Bullets,
    Callout,
    Cell,
    Code,
    Figure,
    Folded,
    Grid,
    Heading,
    Inline,
    Paragraph,
    Photo,
    Preformatted,
    Report,
    Section,
    Strong,
    Table,
)
from polyclinic.reporting.formatting import format_interval, format_percent
from polyclinic.reporting.html.style import CSS
from polyclinic.reporting.html.svg import legend_swatch
from polyclinic.reporting.html.tags import join_markup, tag

NUMERIC = re.compile(r"^(?:[<≤>≥]? ?[-+−±]?[\d.,]+.*|[–∞✓]|)$")
"""A cell that is a number, with whatever follows it. A column in which they prevail is set flush right."""
MARKS = {"better": ("up", "▲", " better, beyond chance"), "worse": ("down", "▼", " worse, beyond chance")}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The browser runs no script and fetches nothing, whatever a name in the report may contain."""


def to_html(report: Report) -> str:
    """Render a report as one HTML file."""
    first, *rest = report.sections
    head = page_head(f"{report.title} · polyclinic report", CSS, POLICY)
    about = tag("p", report.about) if report.about else ""
    body = [
        tag("a", "Skip to the findings", href="#main", class_="skip"),
        tag("header", tag("p", report.kind, class_="kind"), tag("h1", report.title), about),
        tag(
            "main",
            render_section(first),
            _render_contents(report.sections),
            *map(render_section, rest),
            id="main",
            tabindex="-1",
        ),
        tag("footer", tag("p", report.footer)),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def page_head(title: str, style: str, policy: str | None = None) -> list[Markup]:
    """The elements that every page has in its head."""
    return [
        tag("meta", charset="utf-8"),
        *([tag("meta", http_equiv="Content-Security-Policy", content=policy)] if policy else []),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    ]


def _render_contents(sections: Sequence[Section]) -> Markup:
    """The questions by reader, then all sections."""
    asked = {reader: [one for one in sections[1:] if reader in one.questions] for reader in READERS}
    cards = [
        tag("h3", reader) + bullet_list(tag("a", one.questions[reader], href=f"#{one.id}") for one in found)
        for reader, found in asked.items()
    ]
    every = bullet_list((tag("a", one.title, href=f"#{one.id}") for one in sections), "ol")
    contents = tag("details", tag("summary", "All sections"), every, class_="contents-all")
    return tag(
        "nav",
        tag("h2", "Where to find your answer", id="contents-title"),
        bullet_list(cards, class_="who"),
        contents,
        id="contents",
        aria_labelledby="contents-title",
    )


def render_section(section: Section) -> Markup:
    return tag(
        "section",
        tag("h2", section.title, id=f"{section.id}-title"),
        render_blocks(section.blocks),
        id=section.id,
        aria_labelledby=f"{section.id}-title",
    )


def render_blocks(blocks: Iterable[Block]) -> Markup:
    return join_markup(map(render_block, blocks))


def render_block(block: Block) -> Markup:
    match block:
        case Heading(text):
            return tag("h3", text)
        case Paragraph(text, style):
            return tag("p", render_inline(text), class_=style or None)
        case Bullets(items):
            return bullet_list(map(render_inline, items))
        case Preformatted(text):
            return tag("pre", tag("code", text), tabindex=0)
        case Table():
            return _render_table(block)
        case Figure():
            return _render_figure(block)
        case Photo():
            image = tag(
                "img",
                src=f"data:image/webp;base64,{base64.b64encode(block.data).decode()}",
                alt=block.alt,
                width=block.size[0],
                height=block.size[1],
            )
            return tag("figure", tag("figcaption", tag("strong", block.title)), image, class_="wide")
        case Folded(summary, inner):
            return tag("details", tag("summary", summary), render_blocks(inner))
        case Grid(inner, small):
            return tag("div", render_blocks(inner), class_="figures small" if small else "figures")
        case Callout(inner):
            return tag("div", render_blocks(inner), class_="verdict")


def render_inline(text: Inline | tuple[Inline, ...]) -> Markup:
    if isinstance(text, tuple):
        return join_markup(map(render_inline, text))
    if isinstance(text, Strong):
        return tag("strong", text.text)
    return tag("code", text.text) if isinstance(text, Code) else Markup.escape(text)


def bullet_list(items: Iterable[str | Markup], kind: str = "ul", class_: str | None = None) -> Markup:
    return tag(kind, *(tag("li", item) for item in items), class_=class_)


def _render_table(table: Table) -> Markup:
    """A table that scrolls by itself, by keyboard too, where it is wider than the page."""
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.head)
    texts = [[cell.text if isinstance(cell, Cell) else cell for cell in cells] for cells in columns]
    numeric = [sum(map(bool, map(NUMERIC.match, cells))) * 2 > len(cells) for cells in texts]
    sides = ["n" if number and at and not table.matrix else None for at, number in enumerate(numeric)]
    corner, *titles = zip(table.head, sides, strict=True)
    first = tag("th", corner[0], scope="col") if corner[0] else tag("td", "")
    top = tag("tr", first, *(tag("th", text, scope="col", class_=side) for text, side in titles))
    body = [
        tag("tr", tag("th", _render_cell(row[0]), scope="row"), *map(_render_data, row[1:], sides[1:]))
        for row in table.rows
    ]
    inside = [tag("caption", table.caption), tag("thead", top), tag("tbody", *body)]
    whole = tag("table", *inside, class_="cells" if table.matrix else None)
    return tag("div", whole, class_="scroll", role="group", tabindex=0, aria_label=f"Table: {table.caption}")


def _render_data(cell: str | Cell, side: str | None) -> Markup:
    share = cell.share if isinstance(cell, Cell) else None
    # letters on the darkest shade keep a contrast of 4.5 to 1
    style = None if share is None else f"background:rgba(var(--shade),{0.45 * share:.2f})"
    return tag("td", _render_cell(cell), class_=side, style=style)


def _render_cell(cell: str | Cell) -> Markup:
    if not isinstance(cell, Cell):
        return Markup.escape(cell)
    text = tag("strong", cell.text) if cell.strong else Markup.escape(cell.text)
    if cell.mark:
        class_, sign, spoken = MARKS[cell.mark]
        text = tag("span", f"{cell.text} {sign}", class_=class_) + tag("span", spoken, class_="unseen")
    if not math.isnan(cell.interval[0]):
        text += tag("small", format_interval(*cell.interval))
    return text if cell.share is None else text + tag("small", format_percent(cell.share))


def _render_figure(figure: Figure) -> Markup:
    if figure.panels:
        panels = [
            tag(
                "figure",
                tag("figcaption", tag("strong", one.name)),
                one.plot.to_svg(f"{figure.title}: {one.name}", one.alt),
            )
            for one in figure.panels
        ]
        picture = tag("div", *panels, class_="figures small")
    else:
        entries = (legend_swatch(number, figure.areas) + name for number, name in enumerate(figure.legend))
        legend = bullet_list(entries, class_="legend") if figure.legend else ""
        picture = join_markup([figure.plot.to_svg(figure.title, figure.alt), legend])
    caption = tag("figcaption", tag("strong", figure.title), f" {figure.words}" if figure.words else "")
    values = [tag("summary", "The figures of this picture"), _render_table(figure.values)] if figure.values else []
    details = tag("details", *values) if values else ""
    return tag("figure", caption, picture, details, class_="wide" if figure.panels else None)
