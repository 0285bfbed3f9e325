"""The commands `explain` and `features`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.cli.common import Data, Json, err, out, print_json
from polyclinic.cli.display import strip_zeros
from polyclinic.core import RecipeError

if TYPE_CHECKING:
    from polyclinic.analysis.features import FeatureOptions, FeatureScore, RunFeatures
    from polyclinic.analysis.saliency import Case, Explanation, IntensityDistribution, Saliency, SaliencyOptions
    from polyclinic.core.types import Part, SiteId
    from polyclinic.runs.finished_run import FinishedRun


GALLERY, HISTOGRAMS = "gallery.png", "histograms.png"
WIDTH, SITE = 80, 12
COARSE = 4
"""Maps with fewer positions along a side show little."""


def explain_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of finished runs on the same data; the new method last."),
    ],
    of: Annotated[
        str, typer.Option(help="The class to explain: truth, prediction, or the name of a class.")
    ] = "prediction",
    cases: Annotated[
        int, typer.Option(min=1, max=10, help="The number of cases in each group, evenly over sites.")
    ] = 3,
    stage: Annotated[
        int | None, typer.Option(help="The stage of the network whose maps are shown (default: the last one).")
    ] = None,
    histograms: Annotated[
        bool, typer.Option("--histograms", help="Also draw histograms of the sites' pixel values.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="The output folder (default: DIR/explain).")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The seed of the choice of cases (default: the first run's).")
    ] = None,
    data: Data = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto (default: as in the run).")] = None,
    as_json: Json = False,
) -> None:
    """Show where networks look (Grad-CAM), in cases that all runs or only the last run classify right or wrong."""
    from polyclinic.analysis.saliency import SaliencyOptions, explain_runs, measure_intensities
    from polyclinic.core.rng import Stream
    from polyclinic.runs.finished_run import open_run
    from polyclinic.storage.files import write_json

    runs = [open_run(each, data, device) for each in folders]
    stream = Stream(runs[0].recipe.seed if seed is None else seed, ("explain",))
    options, target = SaliencyOptions(of=of, cases=cases, stage=stage), folder or folders[0] / "explain"
    with err.status("Grad-CAM"):
        found = explain_runs(runs, options, stream.child("cases"))
        pixels = measure_intensities(runs[0].dataset, stream.child("pixels")) if histograms else None
        content = _write_figures(found, runs, options, pixels, target) | {"seed": stream.seed}
        write_json(target / "explain.json", content)
    if as_json:
        print_json(content)
        return
    for table in saliency_tables(found):
        out.print(table)
    for line in [*_agreement_notes(found), *content["remarks"]]:
        out.print(Text(line), soft_wrap=True)
    out.print(Text(f"written: {target} (the figures show patients' images; do not share them)"), soft_wrap=True)


def _write_figures(
    found: Explanation,
    runs: Sequence[FinishedRun],
    options: SaliencyOptions,
    pixels: Mapping[SiteId, IntensityDistribution] | None,
    folder: Path,
) -> dict[str, Any]:
    """Draw the figures and return the content of explain.json."""
    from polyclinic.analysis.saliency_figure import (  # matplotlib takes a second
        describe_gallery,
        draw_intensities,
        draw_saliency_gallery,
    )
    from polyclinic.storage.files import explain_os_errors

    with explain_os_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it will show patients' images
    title = f"Where {'networks look' if len(runs) > 1 else 'the network looks'}: {len(found.cases)} test images"
    draw_saliency_gallery(found, title, folder / GALLERY)
    pictures = {GALLERY: {"title": title, "alternative": describe_gallery(found)}}
    if pixels is not None:
        bright = f"Pixel values of {len(pixels)} sites' training images, black left out"
        draw_intensities(pixels, bright, folder / HISTOGRAMS)
        pictures[HISTOGRAMS] = {"title": bright, "alternative": _bright_share(pixels)}
    return {
        **asdict(options),
        "classes": list(found.classes),
        "images": found.images,
        "runs": [
            {"name": name, "folder": str(past.folder), "accuracy": accuracy}
            for past, name, accuracy in zip(runs, found.names, found.accuracy, strict=True)
        ],
        "groups": [{"name": g.name, "images": g.images, "shown": len(g.shown)} for g in found.groups],
        "cases": [_case_json(case, number, found) for number, case in enumerate(found.cases, 1)],
        "intensities": pixels and {name: asdict(each) for name, each in pixels.items()},
        "pictures": pictures,
        "remarks": _gallery_notes(found, runs),
    }


def _case_json(case: Case, number: int, found: Explanation) -> dict[str, Any]:
    from polyclinic.analysis.saliency import resize_map
    from polyclinic.analysis.saliency_figure import describe_case, locate_map

    looks = [
        {
            "name": name,
            "prediction": found.classes[look.predicted],
            "probability": look.probability,
            "right": look.predicted == case.truth,
            "explained": found.classes[look.explained],
            "map": {"places": list(look.map.shape), "largest": float(look.map.max())},
            "looks": locate_map(resize_map(look, case.image)),
        }
        for name, look in zip(found.names, case.saliencies, strict=True)
    ]
    place = {"number": number, "group": case.group, "site": case.site, "index": case.row}
    return {
        **place,
        "truth": found.classes[case.truth],
        "runs": looks,
        "alternative": describe_case(case, number, found),
    }


def _bright_share(pixels: Mapping[SiteId, IntensityDistribution]) -> str:
    content = [
        f"{name} mean {each.mean:.3g}, sd {each.std:.3g}, black {each.black:.0%}" for name, each in pixels.items()
    ]
    return f"A curve of pixel values for every site. {'; '.join(content)}."


def _gallery_notes(found: Explanation, runs: Sequence[FinishedRun]) -> list[str]:
    """Return what a reader of the gallery must know."""
    content = []
    for number, (name, past) in enumerate(zip(found.names, runs, strict=True)):
        down, across = min((tuple(case.saliencies[number].map.shape) for case in found.cases), key=min)
        if min(down, across) < COARSE:
            content.append(
                f"{name}: maps of {down} × {across} positions show little; choose an earlier stage with --stage N"
            )
        if past.recipe.ensemble:
            content.append(f"{name}: shows the global model, not the ensemble of the sites' models")
        if past.recipe.finish:
            content.append(f"{name}: shows the networks of the sites, not the student")
    return content


def _agreement_notes(found: Explanation) -> list[str]:
    runs = zip(found.names, found.accuracy, strict=True)
    return [
        f"accuracy on {found.images} test images: " + ", ".join(f"{name} {strip_zeros(f'{a:.3f}')}" for name, a in runs)
    ]


def saliency_tables(found: Explanation) -> list[Table]:
    """Return a table for each group, with a row for every case, 80 columns wide."""
    cases = enumerate(found.cases, 1)
    return [_group_table(group.name, group.images, [next(cases) for _ in group.shown], found) for group in found.groups]


def _group_table(name: str, images: int, cases: Sequence[tuple[int, Case]], found: Explanation) -> Table:
    title = f"{name}: {len(cases)} of {images} images" if images else f"{name}: no image"
    table = Table(title=Text(title[:79]), title_justify="left", box=None, padding=(0, 1), show_header=bool(cases))
    wide = max(8, (WIDTH - SITE - 8 - 2 * (3 + len(found.names))) // (len(found.names) + 1))
    table.add_column("case", justify="right", width=4)
    for heading, width in (("site", SITE), ("truth", wide), *((run, wide) for run in found.names)):
        table.add_column(Text(heading), width=width, no_wrap=True, overflow="ellipsis")
    for number, case in cases:
        said = [_format_prediction(look, case, found) for look in case.saliencies]
        table.add_row(*map(Text, [str(number), case.site, found.classes[case.truth], *said]))
    return table


def _format_prediction(look: Saliency, case: Case, found: Explanation) -> str:
    mark = "✓" if look.predicted == case.truth else "✗"
    return f"{mark} {strip_zeros(f'{look.probability:.2f}')} {found.classes[look.predicted]}"


PARTS: tuple[Part, ...] = ("train", "validation", "test")
CAPTION = (
    "recognised: images whose nearest one, of the same class and another patient, is of their own site, mean over "
    "sites. Hausdorff: between two sites' features of a class, mean over classes and pairs, in units of the distance "
    "between classes. chance: after random reassignment of patients to sites within their class"
)


def features_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of finished runs on the same data.")],
    stage: Annotated[
        int | None, typer.Option(help="The stage whose features are shown (default: the input of the head).")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Show only this class.")] = None,
    part: Annotated[str, typer.Option(help="The images: test, validation or train.")] = "test",
    most: Annotated[int, typer.Option(min=8, help="The largest number of images, evenly over sites.")] = 1000,
    path: Annotated[Path | None, typer.Option("--out", help="The figure (default: features.png in DIR).")] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="The seed of the choice of images and of t-SNE (default: the first run's)."),
    ] = None,
    data: Data = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto (default: as in the run).")] = None,
    as_json: Json = False,
) -> None:
    """Show the features of the sites' images by t-SNE, and measure how far sites lie apart in feature space."""
    from polyclinic.analysis.features import FeatureOptions, compare_features
    from polyclinic.core.rng import Stream
    from polyclinic.runs.finished_run import open_run

    options = FeatureOptions(part=_part_label(part), label=label, most=most, stage=stage)
    runs = [open_run(folder, data, device) for folder in folders]
    stream = Stream(runs[0].recipe.seed if seed is None else seed, ("features",))
    sites, classes = tuple(runs[0].dataset.sites), runs[0].dataset.classes
    with err.status("features"):
        found = compare_features(runs, options, stream)
    target, title = path or folders[0] / "features.png", _figure_title(found, options)
    with err.status("t-SNE"):
        from polyclinic.analysis.features_figure import (
            draw_features,  # matplotlib takes a second to load
        )

        draw_features(found, sites, classes, title, target, stream)
    if as_json:
        print_json(
            {"picture": str(target), "seed": stream.seed, **asdict(options), "runs": _features_json(found, sites)}
        )
        return
    out.print(features_table(found, title))
    out.print(Text(_probe_notes(found)))
    for view in found:
        if not view.shared:
            out.print(Text(f"{view.name}: {OWN}"), soft_wrap=True)
    out.print(Text(f"written: {target}"), soft_wrap=True)


OWN = "each site has a feature extractor of its own, so sites may also lie apart because their extractors differ"


def _part_label(name: str) -> Part:
    for part in PARTS:
        if part == name:
            return part
    raise RecipeError(f"--part is {name!r:.60}; choose test, validation or train")


def _figure_title(found: Sequence[RunFeatures], options: FeatureOptions) -> str:
    images = f"{len(found[0].points.site)} {options.part} images"
    return f"Features of {images}" + (f" of {options.label}" if options.label else "")


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
    """Return how well a classifier tells the sites apart by each run's features."""
    scores = [(view.name, view.scores and view.scores.site_classifier_accuracy) for view in found]
    content = ", ".join(f"{name} {'–' if score is None else f'{score:.2f}'}" for name, score in scores)
    return textwrap.fill(
        f"balanced accuracy of a site classifier on patients held out from its training: {content}", 79
    )


def _count_images(view: RunFeatures, sites: Sequence[str]) -> Mapping[str, int]:
    import numpy as np

    counts = np.bincount(view.points.site, minlength=len(sites)).tolist()
    return dict(zip(sites, counts, strict=True))


def features_table(found: Sequence[RunFeatures], title: str) -> Table:
    """Return a table with a row for every run, 80 columns wide."""
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
