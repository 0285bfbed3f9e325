"""Draws originals and, below them, an attacker's guesses. The figure shows patients and stays in the run's folder."""

from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from polyclinic.analysis.figures import draw_image
from polyclinic.reporting.figures import INK, TEXT, save

COLUMNS = 6
SIDE, GAP, BESIDE, MARGIN = 1.25, 0.25, 0.08, 1.5
"""Inches: an image's side, the gaps between rows and between columns, the width of the rows' names."""


def select_spread(similarity: Tensor, columns: int = COLUMNS) -> Tensor:
    """Return the rows of some images, evenly spaced from the most similar guess to the least similar."""
    order = similarity.argsort(descending=True).cpu()
    return order[torch.linspace(0, len(order) - 1, min(columns, len(order))).round().long()]


def draw_gallery(
    originals: Tensor, guesses: Mapping[str, Tensor], similarity: Mapping[str, Tensor], title: str, path: Path
) -> None:
    """Draw a row of the originals and a row for each kind of guess, with the SSIM above every guess."""
    columns, rows = len(originals), len(guesses) + 1
    # Room for the title, which is as long with one picture in a row.
    spare = max(0, 4 - columns) * SIDE
    wide, high = MARGIN + columns * (SIDE + BESIDE) + spare, GAP * 1.5 + rows * (SIDE + GAP)
    figure = Figure(figsize=(wide, high))
    panels = figure.subplots(rows, columns, squeeze=False)
    # All sizes are known: a layout that is worked out takes a second.
    right, top = 1 - (spare + BESIDE) / wide, 1 - 1.5 * GAP / high
    figure.subplots_adjust(MARGIN / wide, 0.5 * GAP / high, right, top, wspace=BESIDE / SIDE, hspace=GAP / SIDE)
    for row, (name, pictures) in enumerate({"original": originals, **guesses}.items()):
        for column, picture in enumerate(pictures.detach().cpu().clamp(0, 1)):
            axes = panels[row, column]
            draw_image(axes, picture)
            axes.set(xticks=[], yticks=[])
            if name in guesses:
                axes.set_title(f"{float(similarity[name][column]):.2f}", fontsize=TEXT - 4, color=INK, pad=2)
        panels[row, 0].set_ylabel(name.replace(", ", ",\n"), fontsize=TEXT - 3, color=INK, rotation=0).set(
            horizontalalignment="right", verticalalignment="center", parse_math=False
        )
    figure.suptitle(title, fontsize=TEXT - 2, color=INK, x=0.01, y=1 - 0.2 * GAP / high, ha="left").set_parse_math(
        False
    )
    words = "; ".join(f"{name} {float(found.mean()):.2f}" for name, found in similarity.items())
    save(figure, path, title, f"Originals and guesses. Mean SSIM of those shown: {words}.")
