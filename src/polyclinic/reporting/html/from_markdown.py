"""The little Markdown that our own pages are written in, as HTML: headings, tables, lists, bold, code."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

from polyclinic.reporting.html.tags import bullet_list, join_cells, paragraph, table, tag

BOLD, CODE = re.compile(r"\*\*(.+?)\*\*"), re.compile(r"`([^`]+)`")
CELLS = re.compile(r"(?<!\\)\|")


def inline(text: str) -> Markup:
    """Escaped first: what is in a name stays a name."""
    safe = BOLD.sub(r"<strong>\1</strong>", str(escape(text)))
    return Markup(CODE.sub(r"<code>\1</code>", safe))


def from_markdown(text: str, caption: str) -> Markup:
    """Without its title; headings become those of a part of a section."""
    return join_cells(_blocks(text, caption))


def _blocks(text: str, caption: str) -> Iterable[Markup]:
    under = caption
    for block in re.split(r"\n{2,}", text.strip()):
        lines = block.splitlines()
        if block.startswith("## "):
            under = f"{caption}: {lines[0][3:]}"
            yield tag("h4", lines[0][3:])
        elif block.startswith("|"):
            yield _table(lines, under)
        elif block.startswith("- "):
            yield bullet_list(inline(line[2:]) for line in lines)
        elif not block.startswith("# "):
            yield paragraph(inline(" ".join(lines)))


def _table(lines: list[str], caption: str) -> Markup:
    head, _, *body = [[inline(c.strip().replace("\\|", "|")) for c in CELLS.split(line)[1:-1]] for line in lines]
    named = [cell or Markup(word) for cell, word in zip(head, ("what", "figure"), strict=False)]
    return table(caption, [*named, *head[2:]], body)
