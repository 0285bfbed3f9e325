"""The picture of a diagnosis: class shares, sizes, grey values, and distances between the sites' features."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from polyclinic.data.heterogeneity.advice import LEVEL, MMD, format_ratio
from polyclinic.data.heterogeneity.diagnosis import Diagnosis, SitePair, SiteStatistics
from polyclinic.evaluation.metrics import Floats
from polyclinic.evaluation.rows import group_pairs
from polyclinic.reporting.figures import COLOURS, DASHES, DPI, FAINT, INK, TEXT, draw_legend, save, style_axes

WIDTH, HEIGHT = 12.0, 9.0
SITES = 20
"""Sites that have a row of their own; of more, the largest have one and the rest share one."""
CLASSES = 8
"""The same limit for classes."""
CLASS_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's, ordered so that neighbours differ in lightness; as areas, yellow can be seen."""
ROOMY = 12
"""Sites up to which there is room for counts and large names."""
GREY = "grey: the same site, or no class in common"
FIGURES = 8
"""Sites up to which a cell of the map has room for its figure."""


@dataclass(frozen=True)
class _Row:
    """One site, or several that share a row."""

    name: str
    members: tuple[SiteStatistics, ...]

    @property
    def site(self) -> str:
        """The site's full name; "" for several sites."""
        return self.members[0].name if len(self.members) == 1 else ""

    @property
    def images(self) -> float:
        return sum(site.images for site in self.members) / len(self.members)

    @property
    def histogram(self) -> Floats:
        shares: Floats = np.average(
            [site.histogram for site in self.members], axis=0, weights=[site.images for site in self.members]
        )
        return shares

    def class_counts(self, classes: Sequence[str]) -> int:
        return sum(site.counts[name] for site in self.members for name in classes)


def draw_diagnosis(diagnosis: Diagnosis, path: Path, title: str = "How the sites differ") -> None:
    words = " ".join(f"{one.kind.capitalize()} ({one.strength}): {one.sentence}" for one in diagnosis.advice)
    save(build_figure(diagnosis, title), path, title, words)


def build_figure(diagnosis: Diagnosis, title: str) -> Figure:
    rows = _group_sites(diagnosis.sites)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout=layout, facecolor="white")
    figure.suptitle(_shorten(title, 90), x=0.01, ha="left", fontsize=TEXT + 3, color=INK).set_parse_math(False)
    panels = figure.subplots(2, 2)
    _draw_classes(panels[0, 0], diagnosis, rows)
    _draw_sizes(panels[0, 1], diagnosis, rows)
    _draw_greys(panels[1, 0], diagnosis, rows)
    _draw_map(panels[1, 1], diagnosis, rows)
    return figure


def _group_sites(sites: Sequence[SiteStatistics]) -> list[_Row]:
    largest = sorted(sites, key=lambda site: -site.images)[: SITES if len(sites) <= SITES else SITES - 1]
    single = [site for site in sites if site in largest]
    rows = [_Row(name, (site,)) for name, site in zip(_shorten_names(single), single, strict=True)]
    rest = tuple(site for site in sites if site not in largest)
    return [*rows, _Row(f"{len(rest)} others", rest)] if rest else rows


def _shorten_names(sites: Sequence[SiteStatistics]) -> list[str]:
    """Shorten the names, and number those that become equal."""
    short = [_shorten(site.name) for site in sites]
    if len(set(short)) == len(short):
        return short
    return [f"{number}. {_shorten(site.name, 14)}" for number, site in enumerate(sites, 1)]


def _group_classes(diagnosis: Diagnosis) -> dict[str, tuple[str, ...]]:
    """The columns, and the classes that each stands for."""
    names = diagnosis.classes
    if len(names) <= CLASSES:
        return {name: (name,) for name in names}
    frequent = sorted(names, key=lambda name: -sum(site.counts[name] for site in diagnosis.sites))[: CLASSES - 1]
    rest = tuple(name for name in names if name not in frequent)
    return {**{name: (name,) for name in names if name in frequent}, f"{len(rest)} others": rest}


def _draw_classes(axes: Axes, diagnosis: Diagnosis, rows: Sequence[_Row]) -> None:
    groups = _group_classes(diagnosis)
    totals = np.array([row.class_counts(diagnosis.classes) for row in rows])
    left = np.zeros(len(rows))
    for colour, names in zip(CLASS_COLOURS, groups.values(), strict=False):
        counts = np.array([row.class_counts(names) for row in rows])
        bars = axes.barh(range(len(rows)), counts / totals, left=left, color=colour, edgecolor="white", height=0.8)
        if len(rows) <= ROOMY:
            texts = [f"{count:,}" if share > 0.09 else "" for count, share in zip(counts, counts / totals, strict=True)]
            axes.bar_label(bars, texts, label_type="center", fontsize=TEXT - 2, color=_text_colour_on(colour))
        left += counts / totals
    _draw_legend(axes, [Patch(color=colour) for colour, _ in zip(CLASS_COLOURS, groups, strict=False)], list(groups))
    _name_sites(axes, rows)
    axes.set_xlim(0, 1)
    skew = diagnosis.labels
    _style_axes(
        axes,
        f"Labels: divergence {skew.observed:.3f} bits\n(by chance {skew.expected:.3f}, p = {skew.p:.2g})",
        "share of a site's images, with counts" if len(rows) <= ROOMY else "share of a site's images",
    )


def _draw_sizes(axes: Axes, diagnosis: Diagnosis, rows: Sequence[_Row]) -> None:
    sizes = [row.images for row in rows]
    bars = axes.barh(range(len(rows)), sizes, color=COLOURS[0], height=0.8)
    people = [sum(site.patients for site in row.members) / len(row.members) for row in rows]
    texts = [f"{size:,.0f} / {patients:,.0f}" for size, patients in zip(sizes, people, strict=True)]
    axes.bar_label(bars, texts, padding=3, fontsize=_font_size(rows), color=INK)
    axes.set_xlim(0, max(sizes) * 1.25)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    _name_sites(axes, rows)
    _style_axes(
        axes,
        f"Sizes: worth {diagnosis.effective_sites:.1f} of {len(diagnosis.sites)} equal sites\n"
        f"(largest : smallest = {format_ratio(diagnosis.size_ratio)})",
        "images (figures: images / patients" + ("; others: on average)" if len(diagnosis.sites) > SITES else ")"),
    )


def _draw_greys(axes: Axes, diagnosis: Diagnosis, rows: Sequence[_Row]) -> None:
    edges = np.linspace(*diagnosis.greys, len(diagnosis.sites[0].histogram) + 1)
    greys = (edges[:-1] + edges[1:]) / 2
    lines = [
        axes.plot(
            # Images of few grey levels leave most bins empty, and a line broken at each would not be seen.
            greys[row.histogram > 0],
            row.histogram[row.histogram > 0],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.8,
        )[0]
        for number, row in enumerate(rows)
    ]
    axes.set_yscale("log")
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_ylabel("share of pixels", fontsize=TEXT, color=INK)
    _draw_legend(axes, lines, [row.name for row in rows])
    shift = diagnosis.intensity
    _style_axes(
        axes,
        f"Grey values: farthest two sites {shift.observed:.2f} sd apart\n"
        f"(by chance {shift.expected:.2f}, p = {shift.p:.2g})",
        "grey value, as the network sees it",
    )


def _draw_map(axes: Axes, diagnosis: Diagnosis, rows: Sequence[_Row]) -> None:
    distances = _distance_matrix(diagnosis.pairs, rows)
    top = max(MMD[1], float(np.nan_to_num(distances).max()))
    axes.set_facecolor(FAINT)
    image = axes.imshow(np.ma.masked_invalid(distances), cmap="cividis", vmin=0, vmax=top, aspect="auto")
    _draw_cells(axes, distances, top, _significant_cells(diagnosis.pairs, rows))
    _name_sites(axes, rows)
    names = [row.name for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=90 if len(rows) * max(map(len, names)) > 45 else 0)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.ax.tick_params(labelsize=TEXT - 2, colors=INK)
    bar.outline.set_visible(False)
    _style_axes(
        axes, _describe_site_classifier(diagnosis), f"MMD² between sites, within classes (*: p ≤ {LEVEL})\n{GREY}"
    )


def _draw_cells(axes: Axes, distances: Floats, top: float, certain: Sequence[tuple[int, int]]) -> None:
    """Write a figure into every cell and a star where it is significant; only stars where there is no room."""
    if len(distances) > FIGURES:
        y, x = np.array(certain).reshape(-1, 2).T
        axes.scatter(x, y, marker="*", s=18, color="white", edgecolor=INK, linewidth=0.4)
        return
    for i, j in np.argwhere(np.isfinite(distances)).tolist():
        text = f"{distances[i, j]:.2f}" + ("*" if (i, j) in certain else "")
        colour = INK if distances[i, j] > top / 2 else "white"
        axes.text(j, i, text, ha="center", va="center", fontsize=TEXT - 2, color=colour)


def _significant_cells(pairs: Sequence[SitePair], rows: Sequence[_Row]) -> list[tuple[int, int]]:
    """The cells of two sites whose features differ significantly."""
    place = {row.site: number for number, row in enumerate(rows)}
    differing = [pair for pair in pairs if pair.holm is not None and pair.holm <= LEVEL]
    cells = [(place[pair.a], place[pair.b]) for pair in differing if pair.a in place and pair.b in place]
    return cells + [(j, i) for i, j in cells]


def _describe_site_classifier(diagnosis: Diagnosis) -> str:
    domain = diagnosis.domain
    if domain is None:
        return "Features: too few patients\nto see whether sites can be recognised"
    trust = "" if domain.is_trusted else ", too few patients"
    chance = f"(by chance {domain.chance:.0%}, p = {domain.p:.2g}{trust})"
    return f"Features: site recognised in {domain.accuracy:.0%}\n{chance}"


def _distance_matrix(pairs: Sequence[SitePair], rows: Sequence[_Row]) -> Floats:
    """The mean MMD² between the sites of two rows; NaN on the diagonal and where it is unknown."""
    place = {site.name: number for number, row in enumerate(rows) for site in row.members}
    known = [((place[pair.a], place[pair.b]), pair.mmd2) for pair in pairs if pair.mmd2 is not None]
    found = group_pairs((cell, value) for (i, j), value in known if i != j for cell in ((i, j), (j, i)))
    distances = np.full((len(rows), len(rows)), np.nan)
    for cell, values in found.items():
        distances[cell] = max(0.0, float(np.mean(values)))
    return distances


def _name_sites(axes: Axes, rows: Sequence[_Row]) -> None:
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", labelsize=_font_size(rows))
    for label in axes.get_yticklabels():
        label.set_parse_math(False)


def _font_size(rows: Sequence[object]) -> float:
    return TEXT - (2 if len(rows) <= ROOMY else 4)


def _draw_legend(axes: Axes, handles: Sequence[Artist], names: Sequence[str]) -> None:
    draw_legend(axes, handles, [_shorten(name) for name in names], _font_size(names), 2.6, 0.3)


def _style_axes(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, fontsize=TEXT, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=TEXT - 1, color=INK)
    style_axes(axes)
    axes.tick_params(axis="x", labelsize=TEXT - 2)


def _text_colour_on(colour: str) -> str:
    """Choose dark text for light colours and light text for dark ones."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _shorten(text: str, most: int = 18) -> str:
    """Cut the text in the middle, since names of sites often differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"
