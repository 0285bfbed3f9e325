"""Parts that the figures of this package share: a titled sheet, an image, a heat map over it, shortened names."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import LayoutEngine
from torch import Tensor

from polyclinic.evaluation.metrics import Floats
from polyclinic.reporting.figures import DPI, INK, TEXT

COLOUR_MAP = "inferno"
HALF = 0.5
"""Of a map's largest value: the level of the contour, above which a pixel counts as looked at."""


def new_sheet(
    title: str, size: tuple[float, float], layout: LayoutEngine | str, title_size: float = TEXT + 3
) -> Figure:
    """Return an empty figure with a title in its upper left corner; `size` in inches."""
    sheet = Figure(figsize=size, dpi=DPI, layout=layout, facecolor="white")  # type: ignore[arg-type]
    sheet.suptitle(title, x=0.01, ha="left", fontsize=title_size, color=INK).set_parse_math(False)
    return sheet


def draw_image(axes: Axes, image: Tensor, colour: bool = True) -> None:
    """Draw channels × height × width in [0, 1]: three channels in colour (or not), others as their mean in grey."""
    if colour and len(image) == 3:
        axes.imshow(image.permute(1, 2, 0).numpy())
    else:
        axes.imshow(image.mean(0).numpy(), cmap="gray", vmin=0, vmax=1)


def draw_heat_map(axes: Axes, image: Tensor, heat: Floats) -> AxesImage:
    """Draw a map over the image in grey; where the map is zero, the image alone is visible."""
    draw_image(axes, image, colour=False)
    shown = axes.imshow(heat, cmap=COLOUR_MAP, vmin=0, vmax=1, alpha=0.65 * np.sqrt(heat))
    if heat.min() < HALF < heat.max():
        axes.contour(heat, levels=[HALF], colors="white", linewidths=1.2)
    return shown


def shorten_text(text: str, most: int) -> str:
    """Cut in the middle: names often differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"
