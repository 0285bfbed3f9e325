"""The commands that look at runs: `report`, `board`, `explain` and `features`."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.table import Column, Table
from rich.text import Text

import polyclinic
from polyclinic.cli.common import (
    Data,
    Json,
    err,
    number_columns,
    open_runs,
    out,
    print_json,
    print_message,
    titled_table,
)
from polyclinic.cli.display import strip_zeros
from polyclinic.core import RecipeError
from polyclinic.storage.files import make_folder, write_json

if TYPE_CHECKING:
    from polyclinic.analysis.features import FeatureScore, RunFeatures
    from polyclinic.analysis.saliency import Case, Explanation, IntensityDistribution, Saliency, SaliencyOptions
    from polyclinic.core import SiteId
    from polyclinic.runs.finished_run import FinishedRun


LARGE = 3_000_000
NEW, OPEN = "new", "none"
GALLERY, HISTOGRAMS = "gallery.png", "histograms.png"
WIDTH, SITE = 80, 12
COARSE = 4
"""Maps with fewer positions along a side show little."""


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of finished runs, or the folder of a comparison.")
    ],
    path: Annotated[Path | None, typer.Option("--out", help="The HTML file (default: report.html in DIR).")] = None,
    as_markdown: Annotated[bool, typer.Option("--md", help="Also write Markdown.")] = False,
    as_pdf: Annotated[bool, typer.Option("--pdf", help="Also write a PDF (needs Chromium).")] = False,
    with_images: Annotated[
        bool,
        typer.Option("--with-images", help="Include the Grad-CAM gallery of `explain`, which shows patients' images."),
    ] = False,
) -> None:
    """Write a report in one HTML file, for clinicians, statisticians, engineers and data-protection officers."""
    from polyclinic.reporting.html.pdf import find_browser, write_pdf
    from polyclinic.reporting.render_markdown import write_markdown

    target = path or folders[0] / "report.html"
    if target.suffix not in (".html", ".htm"):
        raise RecipeError(f"--out is {str(target)!r:.100}; name an HTML file; --md and --pdf write beside it")
    if as_pdf:
        find_browser()  # fail before minutes of work
    with err.status("report"):
        content = polyclinic.report(folders, target, with_images)
        written = [target]
        if as_markdown:
            written.append(target.with_suffix(".md"))
            write_markdown(content, written[-1])
        if as_pdf:
            written.append(target.with_suffix(".pdf"))
            write_pdf(target, written[-1])
    if with_images:
        for each in written:
            each.chmod(0o600)
    if (size := target.stat().st_size) > LARGE:
        print_message(
            f"{target} has {size / 1e6:.1f} MB, which is large for an e-mail; give fewer folders for a smaller file"
        )
    kept = " (it shows patients' images; do not share it)" if with_images else ""
    out.print(Text(f"written: {'  '.join(map(str, written))}{kept}"), soft_wrap=True)


def board_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a run or a comparison, which may still be empty.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="The address to listen on; any but this machine's own needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar="POLYCLINIC_BOARD_TOKEN",
            help=f"The token that viewers need: `{NEW}` (the default here) draws one, `{OPEN}` admits every account of "
            "this machine.",
        ),
    ] = None,
) -> None:
    """Follow a run or a comparison in the browser: rounds, sites, curves, cost and failures."""
    from polyclinic.dashboard import open_board
    from polyclinic.deploy.config import is_loopback

    if token == NEW or (token is None and is_loopback(host)):
        token = secrets.token_urlsafe(24)
    with open_board(folder, host, port, None if token == OPEN else token) as server:
        out.print(Text(f"board: {server.board_url}"), soft_wrap=True)
        print_message("Ctrl-C stops the board, not the run")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


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

    runs, stream = open_runs(folders, data, device, seed, "explain")
    options, target = SaliencyOptions(of=of, cases=cases, stage=stage), folder or folders[0] / "explain"
    with err.status("Grad-CAM"):
        found = explain_runs(runs, options, stream.child("cases"))
        pixels = measure_intensities(runs[0].dataset, stream.child("pixels")) if histograms else None
        content = _write_figures(found, runs, options, pixels, target) | {"seed": stream.seed}
        write_json(target / "explain.json", content)
    if as_json:
        print_json(content)
        return
    for group in found.groups:
        out.print(_group_table(group.name, group.images, found))
    scores = (f"{name} {strip_zeros(f'{a:.3f}')}" for name, a in zip(found.names, found.accuracy, strict=True))
    for line in (f"accuracy on {found.images} test images: {', '.join(scores)}", *content["remarks"]):
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

    make_folder(folder, mode=0o700)  # it will show patients' images
    title = f"Where {'networks look' if len(runs) > 1 else 'the network looks'}: {len(found.cases)} test images"
    draw_saliency_gallery(found, title, folder / GALLERY)
    pictures = {GALLERY: {"title": title, "alternative": describe_gallery(found)}}
    if pixels is not None:
        title = f"Pixel values of {len(pixels)} sites' training images, black left out"
        draw_intensities(pixels, title, folder / HISTOGRAMS)
        curves = (f"{name} mean {p.mean:.3g}, sd {p.std:.3g}, black {p.black:.0%}" for name, p in pixels.items())
        alternative = f"A curve of pixel values for every site. {'; '.join(curves)}."
        pictures[HISTOGRAMS] = {"title": title, "alternative": alternative}
    return {
        **asdict(options),
        "classes": list(found.classes),
        "images": found.images,
        "runs": [
            {"name": name, "folder": str(run.folder), "accuracy": accuracy}
            for run, name, accuracy in zip(runs, found.names, found.accuracy, strict=True)
        ],
        "groups": [{"name": g.name, "images": g.images, "shown": len(g.shown)} for g in found.groups],
        "cases": [_case_json(case, number, found) for number, case in enumerate(found.cases, 1)],
        "intensities": pixels and {name: asdict(each) for name, each in pixels.items()},
        "pictures": pictures,
        "remarks": _gallery_notes(found, runs),
    }


def _case_json(case: Case, number: int, found: Explanation) -> dict[str, object]:
    from polyclinic.analysis.saliency import resize_map
    from polyclinic.analysis.saliency_figure import describe_case, locate_map

    return {
        "number": number,
        "group": case.group,
        "site": case.site,
        "index": case.row,
        "truth": found.classes[case.truth],
        "runs": [
            {
                "name": name,
                "prediction": found.classes[saliency.predicted],
                "probability": saliency.probability,
                "right": saliency.predicted == case.truth,
                "explained": found.classes[saliency.explained],
                "map": {"places": list(saliency.map.shape), "largest": float(saliency.map.max())},
                "looks": locate_map(resize_map(saliency.map, case.image)),
            }
            for name, saliency in zip(found.names, case.saliencies, strict=True)
        ],
        "alternative": describe_case(case, number, found),
    }


def _gallery_notes(found: Explanation, runs: Sequence[FinishedRun]) -> list[str]:
    """Return the limits of the gallery that its reader must know."""
    notes = []
    for number, (name, run) in enumerate(zip(found.names, runs, strict=True)):
        down, across = min((tuple(case.saliencies[number].map.shape) for case in found.cases), key=min)
        small = f"maps of {down} × {across} positions show little; choose an earlier stage with --stage N"
        limits = {
            small: min(down, across) < COARSE,
            "shows the global model, not the ensemble of the sites' models": run.recipe.ensemble,
            "shows the networks of the sites, not the student": run.recipe.finish,
        }
        notes += [f"{name}: {limit}" for limit, holds in limits.items() if holds]
    return notes


def _group_table(name: str, images: int, found: Explanation) -> Table:
    """Return a table of a group with a row for every case that is shown, 80 columns wide."""
    cases = [(number, case) for number, case in enumerate(found.cases, 1) if case.group == name]
    wide = max(8, (WIDTH - SITE - 8 - 2 * (3 + len(found.names))) // (len(found.names) + 1))
    widths = (("site", SITE), ("truth", wide), *((run, wide) for run in found.names))
    table = titled_table(
        (f"{name}: {len(cases)} of {images} images" if images else f"{name}: no image")[:79],
        Column("case", justify="right", width=4),
        *(Column(Text(head), width=width, no_wrap=True, overflow="ellipsis") for head, width in widths),
    )
    table.show_header = bool(cases)
    for number, case in cases:
        predictions = [_format_prediction(saliency, case, found) for saliency in case.saliencies]
        table.add_row(*map(Text, [str(number), case.site, found.classes[case.truth], *predictions]))
    return table


def _format_prediction(saliency: Saliency, case: Case, found: Explanation) -> str:
    mark = "✓" if saliency.predicted == case.truth else "✗"
    return f"{mark} {strip_zeros(f'{saliency.probability:.2f}')} {found.classes[saliency.predicted]}"


OWN = "each site has a feature extractor of its own, so sites may also lie apart because their extractors differ"
PROBE = "balanced accuracy of a site classifier on patients held out from its training"
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
    from polyclinic.core import Part

    if part not in get_args(Part):
        raise RecipeError(f"--part is {part!r:.60}; choose test, validation or train")
    options = FeatureOptions(part=cast(Part, part), label=label, most=most, stage=stage)
    runs, stream = open_runs(folders, data, device, seed, "features")
    sites, classes = tuple(runs[0].dataset.sites), runs[0].dataset.classes
    with err.status("features"):
        found = compare_features(runs, options, stream)
    target, of_class = path or folders[0] / "features.png", f" of {label}" if label else ""
    title = f"Features of {len(found[0].points.site)} {part} images{of_class}"
    with err.status("t-SNE"):
        from polyclinic.analysis.features_figure import draw_features  # matplotlib takes a second to load

        draw_features(found, sites, classes, title, target, stream)
    if as_json:
        rows = [_features_json(view, sites) for view in found]
        print_json({"picture": str(target), "seed": stream.seed, **asdict(options), "runs": rows})
        return
    out.print(_features_table(found, title))
    scores = [(view.name, view.scores and view.scores.site_classifier_accuracy) for view in found]
    content = ", ".join(f"{name} {'–' if score is None else f'{score:.2f}'}" for name, score in scores)
    out.print(Text(textwrap.fill(f"{PROBE}: {content}", 79)))
    for view in found:
        if not view.shared:
            out.print(Text(f"{view.name}: {OWN}"), soft_wrap=True)
    out.print(Text(f"written: {target}"), soft_wrap=True)


def _features_json(view: RunFeatures, sites: Sequence[str]) -> dict[str, object]:
    import numpy as np

    counts = np.bincount(view.points.site, minlength=len(sites)).tolist()
    return {
        "folder": str(view.folder),
        "name": view.name,
        "stage": view.stage,
        "stages": view.stages,
        "dimensions": view.dimensions,
        "one_extractor": view.shared,
        "images": dict(zip(sites, counts, strict=True)),
        "figures": None if view.scores is None else asdict(view.scores),
    }


def _features_table(found: Sequence[RunFeatures], title: str) -> Table:
    """Return a table with a row for every run, 80 columns wide."""
    figures = number_columns("stage", "recognised", "chance", "p", "Hausdorff", "chance", "p")
    table = titled_table(title[:79], Column("run", overflow="ellipsis", no_wrap=True, max_width=22), *figures)
    for view in found:
        pair = (view.scores.recognised, view.scores.apart) if view.scores else (None, None)
        cells = [cell for figure in pair for cell in _format_cells(figure)]
        table.add_row(*map(Text, [view.name, f"{view.stage}/{view.stages}", *cells]))
    table.caption = Text(CAPTION)
    return table


def _format_cells(figure: FeatureScore | None) -> list[str]:
    if figure is None:
        return ["–"] * 3
    return [strip_zeros(f"{figure.value:.2f}"), strip_zeros(f"{figure.chance:.2f}"), strip_zeros(f"{figure.p:.3f}")]
