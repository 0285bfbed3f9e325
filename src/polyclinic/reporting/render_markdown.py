"""Blocks as Markdown, and a report as a Markdown file with its charts as SVG files beside it."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyclinic.reporting.blocks import (
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
    Strong,
    Table,
)
from polyclinic.reporting.formatting import format_number, format_percent
from polyclinic.reporting.html.svg import to_svg_file
from polyclinic.storage.files import explain_os_errors, write_atomically

MARKS = {"": "", "better": " ▲", "worse": " ▼"}


def to_markdown(report: Report, figures: str | None = None, folder: Path = Path()) -> str:
    """Render a report as Markdown.

    Args:
        report: what to render.
        figures: what precedes a chart's name in its link, as `report-figures/`; None leaves charts out.
        folder: where the Markdown will lie, which links to pictures start from.
    """
    renderer = _Renderer(figures, folder)
    parts = [f"# {report.title}", report.about]
    for section in report.sections:
        renderer.heading = section.title
        parts += [f"## {section.title}" if section.title else "", *renderer.render(section.blocks)]
    return "\n\n".join(part for part in [*parts, report.footer] if part) + "\n"


def write_markdown(report: Report, path: Path) -> None:
    """Write a report's Markdown to `path`, and its charts into a folder beside it."""
    prefix = f"{path.stem}-figures/"
    write_figures(report, path.parent, prefix)
    write_atomically(path, to_markdown(report, prefix, path.parent).encode())


def write_figures(report: Report, folder: Path, prefix: str) -> None:
    """Write every chart of a report as `PREFIX` + name + `.svg`."""
    for figure in (block for section in report.sections for block in _find_figures(section.blocks)):
        write_figure(figure, folder / f"{prefix}{figure.name}.svg")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a chart as an SVG file."""
    with explain_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_svg_file(figure.plot, figure.title, figure.alt, figure.legend, figure.areas).encode())


def _find_figures(blocks: Sequence[Block]) -> Iterator[Figure]:
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Folded | Grid | Callout):
            yield from _find_figures(block.blocks)


class _Renderer:
    def __init__(self, figures: str | None, folder: Path) -> None:
        self.figures, self.folder = figures, folder
        self.heading = ""
        """The last one, which a table's caption need not repeat."""

    def render(self, blocks: Sequence[Block]) -> list[str]:
        return [text for block in blocks for text in self.render_block(block) if text]

    def render_block(self, block: Block) -> list[str]:
        match block:
            case Heading(text):
                self.heading = text
                return [f"### {text}"]
            case Paragraph(text):
                return [render_inline(text).strip()]
            case Bullets(items):
                return ["\n".join(f"- {render_inline(item)}" for item in items)]
            case Preformatted(text):
                return [f"```\n{text.rstrip()}\n```"]
            case Table():
                caption = "" if block.caption in ("", self.heading) else f"**{_escape(block.caption)}**"
                return [caption, render_table(block)]
            case Figure():
                alt = f"{block.title}. {block.alt}".replace("[", "(").replace("]", ")")
                link = f"![{' '.join(alt.split())}]({self.figures}{block.name}.svg)"
                return [] if self.figures is None else [link, block.words]
            case Photo():
                place = os.path.relpath(block.path, self.folder)
                return [f"**{block.title}**", f"![{' '.join(block.alt.split())}]({place})"]
            case Folded(summary, inner):
                return [f"### {summary}", *self.render(inner)]
            case Grid(inner) | Callout(inner):
                return self.render(inner)


def render_inline(text: Inline | tuple[Inline, ...]) -> str:
    if isinstance(text, tuple):
        return "".join(map(render_inline, text))
    if isinstance(text, Strong):
        return f"**{text.text}**"
    return f"`{text.text}`" if isinstance(text, Code) else text


def render_table(table: Table) -> str:
    head = [_row(table.head), "|" + "---|" * len(table.head)]
    return "\n".join([*head, *(_row([_render_cell(cell) for cell in row]) for row in table.rows)])


def _render_cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return cell
    text = f"**{cell.text}**" if cell.strong else cell.text
    low, high = map(format_number, cell.interval)
    interval = "" if math.isnan(cell.interval[0]) else f" [{low}, {high}]"
    share = f" ({format_percent(cell.share)})" if cell.share is not None else ""
    return text + MARKS[cell.mark] + interval + share


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escape, cells))} |"


def _escape(text: str) -> str:
    """Without line breaks, and with bars that end no cell."""
    return " ".join(text.split()).replace("|", "\\|")
