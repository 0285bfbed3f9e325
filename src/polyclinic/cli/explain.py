"""`polyclinic explain`: where runs' networks look, for cases they agree and differ about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.analysis.saliency import (
    MOST,
    Case,
    Explanation,
    IntensityDistribution,
    Saliency,
    SaliencyOptions,
    explain_runs,
    measure_intensities,
    resize_map,
)
from polyclinic.cli.common import Data, Json, err, out, print_json
from polyclinic.cli.display import strip_zeros
from polyclinic.core.contract import SiteId, Stream
from polyclinic.runs.finished_run import FinishedRun, open_run
from polyclinic.storage.run_files import explain_os_errors, write_json

GALLERY, HISTOGRAMS = "gallery.png", "histograms.png"
WIDTH, SITE = 80, 12
COARSE = 4
"""Maps of fewer places along a side show little."""


def explain_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Finished runs on the same data; ours last.")],
    of: Annotated[
        str, typer.Option(help="Explain the class: truth, prediction, or a class by its name.")
    ] = SaliencyOptions.of,
    cases: Annotated[
        int, typer.Option(min=1, max=MOST, help="Cases of every group, evenly over sites.")
    ] = SaliencyOptions.cases,
    stage: Annotated[int | None, typer.Option(help="Whose maps (default: the last ones).")] = None,
    histograms: Annotated[bool, typer.Option("--histograms", help="Also draw the sites' pixel values.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write (default: DIR/explain).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the choice of cases (default: the first run's).")] = None,
    data: Data = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto (default: as the run).")] = None,
    as_json: Json = False,
) -> None:
    """Show where runs' networks look (Grad-CAM), in cases right or wrong by all, and by the last run alone."""
    past_runs = [open_run(each, data, device) for each in folders]
    stream = Stream(past_runs[0].recipe.seed if seed is None else seed, ("explain",))
    wishes, target = SaliencyOptions(of=of, cases=cases, stage=stage), folder or folders[0] / "explain"
    with err.status("Grad-CAM"):
        found = explain_runs(past_runs, wishes, stream.child("cases"))
        pixels = measure_intensities(past_runs[0].dataset, stream.child("pixels")) if histograms else None
        told = _write_figures(found, past_runs, wishes, pixels, target) | {"seed": stream.seed}
        write_json(target / "explain.json", told)
    if as_json:
        print_json(told)
        return
    for table in saliency_tables(found):
        out.print(table)
    for line in [*_agreement_notes(found), *told["remarks"]]:
        out.print(Text(line), soft_wrap=True)
    out.print(Text(f"written: {target} (its pictures show patients: keep them there)"), soft_wrap=True)


def _write_figures(
    found: Explanation,
    past_runs: Sequence[FinishedRun],
    wishes: SaliencyOptions,
    pixels: Mapping[SiteId, IntensityDistribution] | None,
    folder: Path,
) -> dict[str, Any]:
    """Draw the pictures; what explain.json says."""
    from polyclinic.analysis.saliency_figure import (  # matplotlib takes a second
        describe_gallery,
        draw_intensities,
        draw_saliency_gallery,
    )

    with explain_os_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its pictures show patients
    title = f"Where {'networks look' if len(past_runs) > 1 else 'the network looks'}: {len(found.cases)} test images"
    draw_saliency_gallery(found, title, folder / GALLERY)
    pictures = {GALLERY: {"title": title, "alternative": describe_gallery(found)}}
    if pixels is not None:
        bright = f"Pixel values of {len(pixels)} sites' training images, black left out"
        draw_intensities(pixels, bright, folder / HISTOGRAMS)
        pictures[HISTOGRAMS] = {"title": bright, "alternative": _bright_share(pixels)}
    return {
        **asdict(wishes),
        "classes": list(found.classes),
        "images": found.images,
        "runs": [
            {"name": name, "folder": str(past.folder), "accuracy": accuracy}
            for past, name, accuracy in zip(past_runs, found.names, found.accuracy, strict=True)
        ],
        "groups": [{"name": g.name, "images": g.images, "shown": len(g.shown)} for g in found.groups],
        "cases": [_case_json(case, number, found) for number, case in enumerate(found.cases, 1)],
        "intensities": pixels and {name: asdict(each) for name, each in pixels.items()},
        "pictures": pictures,
        "remarks": _gallery_notes(found, past_runs),
    }


def _case_json(case: Case, number: int, found: Explanation) -> dict[str, Any]:
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
    told = [f"{name} mean {each.mean:.3g}, sd {each.std:.3g}, black {each.black:.0%}" for name, each in pixels.items()]
    return f"A curve of pixel values for every site. {'; '.join(told)}."


def _gallery_notes(found: Explanation, past_runs: Sequence[FinishedRun]) -> list[str]:
    """What a reader of the gallery must know."""
    told = []
    for number, (name, past) in enumerate(zip(found.names, past_runs, strict=True)):
        down, across = min((tuple(case.saliencies[number].map.shape) for case in found.cases), key=min)
        if min(down, across) < COARSE:
            told.append(f"{name}: maps of {down} × {across} places show little; --stage N takes an earlier stage's")
        if past.recipe.ensemble:
            told.append(f"{name}: shown is the one model that sites were sent, not the ensemble of theirs")
        if past.recipe.finish:
            told.append(f"{name}: shown are the networks of the sites, not the student")
    return told


def _agreement_notes(found: Explanation) -> list[str]:
    runs = zip(found.names, found.accuracy, strict=True)
    return [
        f"accuracy on {found.images} test images: " + ", ".join(f"{name} {strip_zeros(f'{a:.3f}')}" for name, a in runs)
    ]


def saliency_tables(found: Explanation) -> list[Table]:
    """One for each group, a line for every case, for 80 columns."""
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
