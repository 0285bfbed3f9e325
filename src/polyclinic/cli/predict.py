"""The commands `predict` and `export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.table import Column
from rich.text import Text

from polyclinic.cli.common import Data, Json, err, out, plain_table, print_json, print_message
from polyclinic.cli.display import strip_zeros
from polyclinic.core import RecipeError

if TYPE_CHECKING:
    from polyclinic.analysis.predict import ModelCatalogue, Prediction, RunModel
    from polyclinic.evaluation.calibration import Calibration, Uncalibrated
    from polyclinic.evaluation.summary import RunSummary

    Row: TypeAlias = Mapping[str, Any]
    """A prediction as JSON."""


WIDTH, FILE, CLASS, NUMBER = 80, 25, 16, 6

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")]
Wanted = Annotated[
    str | None,
    typer.Option("--model", help="global, personal, student, ensemble or a cluster (default: the run's headline)."),
]
Whose = Annotated[str | None, typer.Option("--site", help="The site whose personal model is used.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or auto (default: as in the run).")]


def predict_command(
    folder: Folder,
    given: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGE...", help="Image files (PNG, JPEG, DICOM and others) or folders of them."),
    ],
    wanted: Wanted = None,
    site: Whose = None,
    grad_cam: Annotated[
        Path | None, typer.Option("--grad-cam", metavar="DIR", help="Also write Grad-CAM heat maps into this folder.")
    ] = None,
    data: Data = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Predict images with a run's model. Probabilities are calibrated if its validation predictions are known."""
    from polyclinic.analysis.predict import (
        UnreadableFile,
        find_image_files,
        fit_calibration,
        open_catalogue,
        predict_files,
    )
    from polyclinic.evaluation.calibration import Calibration

    run = open_catalogue(folder, device)
    model = run.load_model(wanted, site)
    files, failed = find_image_files(given)
    if grad_cam is not None:
        from polyclinic.analysis.saliency_figure import HeatMapWriter  # captum and matplotlib take a second

        maps = HeatMapWriter(model, run.preprocessing, run.classes, grad_cam)
    with err.status("predicting"):
        calibration = fit_calibration(run, model, data)
        temperature = calibration.temperature if isinstance(calibration, Calibration) else None
        rows = []
        for found in predict_files(model, run.preprocessing, files, temperature):
            if isinstance(found, UnreadableFile):
                failed.append(found)
                continue
            drawn = maps.draw_prediction(found) if grad_cam is not None else None
            rows.append(_prediction_row(found, run.classes, drawn))
    if as_json:
        document = {
            "run": str(run.folder),
            "model": model.name,
            "site": model.site,
            "classes": list(run.classes),
            "calibration": asdict(calibration),
            "predictions": rows,
            "failures": [{"file": str(each.file), "error": each.why} for each in failed],
        }
        print_json(document)
    elif rows:
        _print_predictions(run, model, calibration, rows)
        if grad_cam is not None:
            out.print(
                Text(f"written: {grad_cam} (the figures show patients' images; do not share them)"), soft_wrap=True
            )
    for each in failed:
        print_message(f"error: {each.file}: {each.why}")
    if failed:
        raise typer.Exit(1)


def _prediction_row(found: Prediction, classes: Sequence[str], drawn: Path | None) -> Row:
    raw, calibrated = found.probabilities, found.calibrated
    return {
        "file": str(found.file),
        "class": classes[found.predicted_class],
        "probabilities": dict(zip(classes, raw.tolist(), strict=True)),
        "calibrated": None if calibrated is None else dict(zip(classes, calibrated.tolist(), strict=True)),
        **({} if drawn is None else {"grad_cam": str(drawn)}),
    }


def _print_predictions(
    run: ModelCatalogue, model: RunModel, calibration: Calibration | Uncalibrated, rows: Sequence[Row]
) -> None:
    """Print a row for each file, 80 columns wide, with as many of the other classes as fit."""
    rest = WIDTH - FILE - CLASS - 2 * NUMBER - 8
    widths = {"file": FILE, "class": CLASS, "prob.": NUMBER, "calib.": NUMBER, "others": rest}
    table = plain_table(*(Column(n, width=w, no_wrap=True, overflow="ellipsis") for n, w in widths.items()))
    for column in table.columns[2:4]:
        column.justify = "right"
    for line in rows:
        sure = line["calibrated"] or line["probabilities"]
        others = sorted((name for name in sure if name != line["class"]), key=lambda name: -sure[name])
        file = line["file"] if len(line["file"]) <= FILE else f"…{line['file'][1 - FILE :]}"  # paths begin alike
        calibrated = _format_probability(sure[line["class"]]) if line["calibrated"] else "–"
        cells = [file, line["class"], _format_probability(line["probabilities"][line["class"]]), calibrated]
        table.add_row(*map(Text, [*cells, " ".join(f"{_format_probability(sure[name])} {name}" for name in others)]))
    out.print(table)
    _print_model(run, model, calibration)
    out.print(Text("For research; not a medical device, and no diagnosis."), soft_wrap=True)


def _format_probability(probability: float) -> str:
    return strip_zeros(f"{probability:.3f}")


def _print_model(run: ModelCatalogue, model: RunModel, calibration: Calibration | Uncalibrated) -> None:
    from polyclinic.evaluation.calibration import Uncalibrated

    if isinstance(calibration, Uncalibrated):
        description = f"uncalibrated: {calibration.reason}"
    else:
        before, after = calibration.ece
        description = (
            f"calibrated by a temperature of {calibration.temperature:.3g}, fitted on {calibration.images} validation "
            f"images (their calibration error: {before:.3f} before, {after:.3f} after)"
        )
    out.print(Text(f"{model.description} of {run.folder}; {description}"), soft_wrap=True)


def export_command(
    folder: Folder,
    target: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The output folder.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write model.onnx (pip install polyclinic\\[export]).")
    ] = False,
    wanted: Wanted = None,
    site: Whose = None,
    alone: Annotated[
        Path | None,
        typer.Option(
            "--alone",
            metavar="DIR",
            help="A finished run of `local` on the same data, to report which sites are worse off.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files of an earlier export.")] = False,
    data: Data = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Export a run's model for other programs: weights, preprocessing, ONNX, and a model card."""
    from polyclinic.analysis.export import check_overwriting, export_model
    from polyclinic.analysis.predict import fit_calibration, open_catalogue

    check_overwriting(target, force)
    run = open_catalogue(folder, device)
    model = run.load_model(wanted, site)
    with err.status("exporting"):
        calibration = fit_calibration(run, model, data)
        files = export_model(
            run, model, calibration, target, onnx, force, _local_baseline(run, alone) if alone else None
        )
    if as_json:
        print_json(
            {
                "model": model.name,
                "site": model.site,
                "calibration": asdict(calibration),
                "files": list(map(str, files)),
            }
        )
        return
    _print_model(run, model, calibration)
    out.print(Text("written: " + "  ".join(map(str, files))), soft_wrap=True)


def _local_baseline(run: ModelCatalogue, folder: Path) -> RunSummary:
    """Return the summary of a run in which the same sites trained alone on the same images."""
    from polyclinic.storage.run_folder import RunFolder

    summary = RunFolder(folder).read_summary()
    if summary.algorithm != "local":
        raise RecipeError(f"--alone is {folder}, a run of {summary.algorithm}; give one of `local`")
    if any(getattr(summary, key) != getattr(run.summary, key) for key in ("site_sizes", "details", "seed")):
        raise RecipeError(f"--alone is {folder}, a run on other images; give one with the same data and the same seed")
    return summary
