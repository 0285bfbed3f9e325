"""The blocks that reports, pages of results and the board consist of, independent of how they are rendered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from polyclinic.reporting.html.svg import Plot

Reader = Literal["Clinician", "Statistician", "Engineer", "Data-protection officer"]
Questions: TypeAlias = Mapping[Reader, str]
"""The question that a section answers, by who asks it."""
READERS: tuple[Reader, ...] = get_args(Reader)


@dataclass(frozen=True)
class Strong:
    """Words in bold."""

    text: str


@dataclass(frozen=True)
class Code:
    """A command or a key."""

    text: str


Inline: TypeAlias = str | Strong | Code


@dataclass(frozen=True)
class Cell:
    """A cell of a table that shows more than its text."""

    text: str
    interval: tuple[float, float] = (math.nan, math.nan)
    """The bounds of a 95 % interval; NaN where there is none."""
    share: float | None = None
    """The share of the row's total, which also shades the cell."""
    mark: Literal["", "better", "worse"] = ""
    """Set where a test found a difference."""
    strong: bool = False


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Words, in one or several pieces. `note`: less prominent. `lead`: more prominent."""

    text: Inline | tuple[Inline, ...]
    style: Literal["", "note", "lead"] = ""


@dataclass(frozen=True)
class Bullets:
    items: tuple[Inline | tuple[Inline, ...], ...]


@dataclass(frozen=True)
class Preformatted:
    """Commands or a file, as they are."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows. `matrix`: a confusion matrix."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    matrix: bool = False


@dataclass(frozen=True)
class Panel:
    """One of several small pictures that a figure is divided into."""

    name: str
    plot: Plot
    alt: str


@dataclass(frozen=True)
class Figure:
    """A chart. HTML shows the panels, if there are any, else the plot; Markdown refers to the plot as an SVG file."""

    name: str
    """Names the SVG file."""
    title: str
    plot: Plot
    alt: str
    """What the chart shows, for readers who do not see it."""
    words: str = ""
    legend: Sequence[str] = ()
    areas: bool = False
    """Whether the legend is of areas; else of lines and markers."""
    panels: Sequence[Panel] = ()
    values: Table | None = None
    """The charted figures."""


@dataclass(frozen=True)
class Photo:
    """A picture that another command has written. `data` is WebP."""

    title: str
    alt: str
    path: Path
    data: bytes
    size: tuple[int, int]


@dataclass(frozen=True)
class Folded:
    """Details that most readers skip."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Grid:
    """Blocks side by side where there is room."""

    blocks: Sequence[Block]
    small: bool = False


@dataclass(frozen=True)
class Callout:
    """Blocks that a reader must not miss."""

    blocks: Sequence[Block]


Block: TypeAlias = Heading | Paragraph | Bullets | Preformatted | Table | Figure | Photo | Folded | Grid | Callout


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    id: str
    title: str
    blocks: Sequence[Block]
    questions: Questions = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    title: str
    kind: str
    about: str
    sections: Sequence[Section]
    footer: str = ""
