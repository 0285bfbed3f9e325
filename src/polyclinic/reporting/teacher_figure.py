"""The picture of teachers' patch attributions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from polyclinic.reporting.figures import INK, TEXT, save


def draw_teacher_maps(
    maps: Mapping[str, Tensor], images: Tensor, path: Path, names: Sequence[str] | None = None
) -> None:
    """Draw a row for every image: the image and each teacher's map, all in the same colours."""
    from matplotlib.figure import Figure  # takes a second to load

    largest = max(1e-12, *(float(each.abs().max()) for each in maps.values()))
    figure = Figure(figsize=(1.3 * (len(maps) + 1) + 1.2, 1.3 * len(images) + 1.2), layout="constrained")
    panels = figure.subplots(len(images), len(maps) + 1, squeeze=False)
    for row, image in enumerate(images.detach().cpu()):
        panels[row, 0].imshow(image.mean(0).numpy(), cmap="gray")
        for axes, each in zip(panels[row, 1:], maps.values(), strict=True):
            shown = axes.imshow(each[row].numpy(), cmap="PuOr_r", vmin=-largest, vmax=largest)
        if names is not None:
            panels[row, 0].set_ylabel(names[row], fontsize=TEXT - 2, color=INK, parse_math=False)
    for axes in panels.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    for axes, name in zip(panels[0], ("image", *maps), strict=True):
        axes.set_title(name, fontsize=TEXT - 2, color=INK, parse_math=False)
    bar = figure.colorbar(shown, ax=panels, location="bottom", aspect=40)
    bar.set_label("ψ: orange speaks for the image's class,\nviolet against it", fontsize=TEXT - 3, color=INK)
    bar.ax.tick_params(labelsize=TEXT - 4)
    save(figure, path, "Where teachers look", f"Shapley values of patches for {', '.join(maps)}.")
