"""`polyclinic features`: what runs' networks make of the hospitals' images, in a picture and in figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from polyclinic.analysis.features import IMAGES, FeatureOptions, FeatureScore, RunFeatures, compare_features
from polyclinic.cli.common import Data, Json, err, out, print_json
from polyclinic.cli.display import strip_zeros
from polyclinic.core.contract import Part, Stream
from polyclinic.core.errors import RecipeError
from polyclinic.runs.finished_run import open_run

PARTS: tuple[Part, ...] = get_args(Part)
CAPTION = (
    "recognised: images whose nearest one, of the same class and another patient, is of their own site, mean over "
    "sites. Hausdorff: between two sites' features of a class, mean over classes and pairs, in units of the distance "
    "between classes. chance: patients dealt anew to sites within their class"
)


def features_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of finished runs on the same data.")],
    stage: Annotated[int | None, typer.Option(help="Whose features (default: those that the head is given).")] = None,
    label: Annotated[str | None, typer.Option(help="Show this class alone.")] = None,
    part: Annotated[str, typer.Option(help="Which images: test, validation or train.")] = FeatureOptions.part,
    most: Annotated[int, typer.Option(min=IMAGES, help="Images, evenly over sites.")] = FeatureOptions.most,
    path: Annotated[Path | None, typer.Option("--out", help="The picture (default: features.png in DIR).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of choice and picture (default: the first run's).")] = None,
    data: Data = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto (default: as the run).")] = None,
    as_json: Json = False,
) -> None:
    """Show the features that runs' networks make of the sites' images, and how far sites lie apart in them."""
    wishes = FeatureOptions(part=_part_label(part), label=label, most=most, stage=stage)
    past_runs = [open_run(folder, data, device) for folder in folders]
    stream = Stream(past_runs[0].recipe.seed if seed is None else seed, ("features",))
    sites, classes = tuple(past_runs[0].dataset.sites), past_runs[0].dataset.classes
    with err.status("features"):
        found = compare_features(past_runs, wishes, stream)
    target, title = path or folders[0] / "features.png", _figure_title(found, wishes)
    with err.status("t-SNE"):
        from polyclinic.analysis.features_figure import draw_features  # matplotlib takes a second to load

        draw_features(found, sites, classes, title, target, stream)
    if as_json:
        print_json(
            {"picture": str(target), "seed": stream.seed, **asdict(wishes), "runs": _features_json(found, sites)}
        )
        return
    out.print(features_table(found, title))
    out.print(Text(_probe_notes(found)))
    for view in found:
        if not view.shared:
            out.print(Text(f"{view.name}: {OWN}"), soft_wrap=True)
    out.print(Text(f"written: {target}"), soft_wrap=True)


OWN = (
    "there is no one extractor; every site's images are seen by its own network, and sites may lie apart because "
    "networks do"
)


def _part_label(name: str) -> Part:
    for part in PARTS:
        if part == name:
            return part
    raise RecipeError(f"--part is {name!r:.60}; choose test, validation or train")


def _figure_title(found: Sequence[RunFeatures], wishes: FeatureOptions) -> str:
    images = f"{len(found[0].points.site)} {wishes.part} images"
    return f"Features of {images}" + (f" of {wishes.label}" if wishes.label else "")


def _features_json(found: Sequence[RunFeatures], sites: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "folder": str(view.folder),
            "name": view.name,
            "stage": view.stage,
            "stages": view.stages,
            "dimensions": view.dimensions,
            "one_extractor": view.shared,
            "images": _count_images(view, sites),
            "figures": None if view.scores is None else asdict(view.scores),
        }
        for view in found
    ]


def _probe_notes(found: Sequence[RunFeatures]) -> str:
    """What a fresh classifier makes of each run's features."""
    scores = [(view.name, view.scores and view.scores.told_apart) for view in found]
    told = ", ".join(f"{name} {'–' if score is None else f'{score:.2f}'}" for name, score in scores)
    return textwrap.fill(f"a fresh classifier of sites, balanced accuracy at patients it did not see: {told}", 79)


def _count_images(view: RunFeatures, sites: Sequence[str]) -> Mapping[str, int]:
    counts = np.bincount(view.points.site, minlength=len(sites)).tolist()
    return dict(zip(sites, counts, strict=True))


def features_table(found: Sequence[RunFeatures], title: str) -> Table:
    """A line for every run, for 80 columns."""
    table = Table(title=Text(title[:79]), title_justify="left", caption_justify="left", box=None, padding=(0, 1))
    table.add_column("run", overflow="ellipsis", no_wrap=True, max_width=22)
    for name in ("stage", "recognised", "chance", "p", "Hausdorff", "chance", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for view in found:
        figures = view.scores
        pair = (None, None) if figures is None else (figures.recognised, figures.apart)
        cells = [view.name, f"{view.stage}/{view.stages}", *(cell for figure in pair for cell in _format_cells(figure))]
        table.add_row(*map(Text, cells))
    table.caption = Text(CAPTION)
    return table


def _format_cells(figure: FeatureScore | None) -> list[str]:
    if figure is None:
        return ["–"] * 3
    return [strip_zeros(f"{figure.value:.2f}"), strip_zeros(f"{figure.chance:.2f}"), strip_zeros(f"{figure.p:.3f}")]
