"""HTML in pieces. Whatever is not `Markup` is escaped: names of sites and classes come from files of strangers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from markupsafe import Markup, escape

Cell: TypeAlias = str | Markup
FIGURE = re.compile(r"^(?:[<≤>≥]? ?[-+−±]?[\d.,]+.*|[–∞✓]|)$")
"""What makes most of a column be set flush right: numbers, with whatever follows them."""
VOID = ("img", "meta", "br")


def tag(name: str, /, *inside: Cell, **attributes: str | int | None) -> Markup:
    """An element. `class_` stands for class, `aria_label` for aria-label; what is None is left out."""
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    start = Markup("<{}{}>").format(name, join_cells(Markup(' {}="{}"').format(key, value) for key, value in given))
    return start if name in VOID else start + join_cells(inside) + Markup("</{}>").format(name)


def join_cells(parts: Iterable[Cell], between: str = "") -> Markup:
    return Markup(escape(between)).join(parts)


def paragraph(*inside: Cell, class_: str | None = None) -> Markup:
    return tag("p", *inside, class_=class_)


def bullet_list(items: Iterable[Cell], kind: str = "ul", class_: str | None = None) -> Markup:
    return tag(kind, *(tag("li", item) for item in items), class_=class_)


def screen_reader_text(text: str) -> Markup:
    """For those who listen."""
    return tag("span", text, class_="unseen")


def fold_details(summary: Cell, *inside: Cell) -> Markup:
    """What most readers can do without."""
    return tag("details", tag("summary", summary), *inside)


def table(caption: str, head: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> Markup:
    """A table whose first column names its rows. Wider than the page, it scrolls by itself, by keyboard too."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
    right = [sum(bool(FIGURE.match(Markup(c).striptags())) for c in cells) * 2 > len(cells) for cells in columns]
    sides = ["n" if number and at else None for at, number in enumerate(right)]
    top = tag("tr", *(tag("th", cell, scope="col", class_=side) for cell, side in zip(head, sides, strict=True)))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", c, class_=s) for c, s in zip(row[1:], sides[1:], strict=True)),
        )
        for row in rows
    ]
    whole = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", *body))
    return tag("div", whole, class_="scroll", role="group", tabindex=0, aria_label=f"Table: {caption}")


def figure(picture: Cell, title: str, *words: Cell, values: Markup | None = None, class_: str | None = None) -> Markup:
    """A picture under a title that says what it shows; `values` are its figures, as a table, folded."""
    caption = tag("figcaption", tag("strong", title), *(part for word in words for part in (" ", word)))
    shown = fold_details("The figures of this picture", values) if values else ""
    return tag("figure", caption, picture, shown, class_=class_)
