"""`polyclinic predict` and `polyclinic export`: a finished run's models, on new images and in other programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.analysis.export import export, refuse_overwriting
from polyclinic.analysis.predict import (
    Failed,
    Model,
    ModelCatalogue,
    Prediction,
    calibration_of,
    image_files,
    predict,
    shelf,
)
from polyclinic.cli.common import Data, Json, err, out, print_json, tell
from polyclinic.cli.display import compact
from polyclinic.core.errors import RecipeError
from polyclinic.evaluation.calibration import Calibration, Uncalibrated
from polyclinic.reporting.run_folder import finished

WIDTH, FILE, CLASS, NUMBER = 80, 25, 16, 6

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")]
Wanted = Annotated[
    str | None,
    typer.Option("--model", help="global, personal, student, ensemble or a cluster (default: the run's headline)."),
]
Whose = Annotated[str | None, typer.Option("--site", help="The site whose personal model it is.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, or auto (default: as the run).")]


def predict_command(
    folder: Folder,
    given: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="PNG, JPEG, DICOM, …; folders are walked.")],
    wanted: Wanted = None,
    site: Whose = None,
    grad_cam: Annotated[
        Path | None, typer.Option("--grad-cam", metavar="DIR", help="Write where the network looks: heat maps.")
    ] = None,
    data: Data = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What a run's model says of images: probabilities, calibrated where the run's validation images are known."""
    run = shelf(folder, device)
    model = run.model(wanted, site)
    files, failed = image_files(given)
    if grad_cam is not None:
        from polyclinic.analysis.predict_figure import HeatMaps  # captum and matplotlib take a second

        maps = HeatMaps(model, run.preprocessing, run.classes, grad_cam)
    with err.status("predicting"):
        calibration = calibration_of(run, model, data)
        temperature = calibration.temperature if isinstance(calibration, Calibration) else None
        rows = []
        for found in predict(model, run.preprocessing, files, temperature):
            if isinstance(found, Failed):
                failed.append(found)
                continue
            drawn = maps.draw(found) if grad_cam is not None else None
            rows.append(_row(found, run.classes, drawn))
    if as_json:
        print_json(_told(run, model, calibration, rows, failed))
    elif rows:
        _show(run, model, calibration, rows)
        if grad_cam is not None:
            out.print(Text(f"written: {grad_cam} (its pictures show patients: keep them there)"), soft_wrap=True)
    _tell_failures(failed)


def _row(found: Prediction, classes: Sequence[str], drawn: Path | None) -> dict[str, Any]:
    named = dict(zip(classes, found.probabilities.tolist(), strict=True))
    sure = None if found.calibrated is None else dict(zip(classes, found.calibrated.tolist(), strict=True))
    told: dict[str, Any] = {"file": str(found.file), "class": classes[found.predicted], "probabilities": named}
    return {**told, "calibrated": sure, **({} if drawn is None else {"grad_cam": str(drawn)})}


def _told(
    run: ModelCatalogue,
    model: Model,
    calibration: Calibration | Uncalibrated,
    rows: Sequence[dict[str, Any]],
    failed: Iterable[Failed],
) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        **_whose(model),
        "classes": list(run.classes),
        "calibration": asdict(calibration),
        "predictions": list(rows),
        "failures": [{"file": str(each.file), "error": each.why} for each in failed],
    }


def _whose(model: Model) -> dict[str, Any]:
    return {"model": model.name, "site": model.site}


def _show(
    run: ModelCatalogue, model: Model, calibration: Calibration | Uncalibrated, rows: Sequence[dict[str, Any]]
) -> None:
    """A line for each file, for 80 columns; the other classes as far as there is room."""
    fitted = isinstance(calibration, Calibration)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    rest = WIDTH - FILE - CLASS - 2 * NUMBER - 8
    for heading, width, justify in (
        ("file", FILE, "left"),
        ("class", CLASS, "left"),
        ("prob.", NUMBER, "right"),
        ("calib.", NUMBER, "right"),
        ("others", rest, "left"),
    ):
        table.add_column(heading, width=width, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for line in rows:
        sure = line["calibrated"] or line["probabilities"]
        others = sorted((name for name in sure if name != line["class"]), key=lambda name: -sure[name])
        cells = [_short(line["file"]), line["class"], _number(line["probabilities"][line["class"]])]
        cells += [_number(sure[line["class"]]) if fitted else "–"]
        table.add_row(*map(Text, [*cells, " ".join(f"{_number(sure[name])} {name}" for name in others)]))
    out.print(table)
    out.print(Text(f"{model.told} of {run.folder}; {_said(calibration)}"), soft_wrap=True)
    out.print(Text("For research; not a medical device, and no diagnosis."), soft_wrap=True)


def _number(probability: float) -> str:
    return compact(f"{probability:.3f}")


def _short(file: str) -> str:
    """Its end: files of one folder begin alike."""
    return file if len(file) <= FILE else f"…{file[1 - FILE :]}"


def _said(found: Calibration | Uncalibrated) -> str:
    if isinstance(found, Uncalibrated):
        return f"uncalibrated: {found.why}"
    return (
        f"calibrated by a temperature of {found.temperature:.3g}, fitted on {found.images} validation images (their "
        f"calibration error: {found.ece[0]:.3f} before, {found.ece[1]:.3f} after)"
    )


def _tell_failures(failed: Sequence[Failed]) -> None:
    """What could be predicted was shown; a file that could not is a failure all the same."""
    for each in failed:
        tell(f"error: {each.file}: {each.why}")
    if failed:
        raise typer.Exit(1)


def export_command(
    folder: Folder,
    target: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to write.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write model.onnx (pip install polyclinic\\[export]).")
    ] = False,
    wanted: Wanted = None,
    site: Whose = None,
    alone: Annotated[
        Path | None,
        typer.Option("--alone", metavar="DIR", help="A finished run of `local` on the same data: who is worse off?"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files of an earlier export.")] = False,
    data: Data = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a run's model for other programs: weights, how to prepare images, ONNX, and a model card."""
    refuse_overwriting(target, force)
    run = shelf(folder, device)
    model = run.model(wanted, site)
    with err.status("exporting"):
        calibration = calibration_of(run, model, data)
        files = export(run, model, calibration, target, onnx, force, _alone(run, alone) if alone else None)
    if as_json:
        print_json({**_whose(model), "calibration": asdict(calibration), "files": [str(file) for file in files]})
        return
    out.print(Text(f"{model.told} of {run.folder}; {_said(calibration)}"), soft_wrap=True)
    out.print(Text("written: " + "  ".join(map(str, files))), soft_wrap=True)


def _alone(run: ModelCatalogue, folder: Path) -> dict[str, Any]:
    """What a run says in which the same sites trained by themselves on the same images."""
    summary = finished(folder).summary
    if summary["algorithm"] != "local":
        raise RecipeError(f"--alone is {folder}, a run of {summary['algorithm']}; give one of `local`")
    if any(summary.get(key) != run.summary.get(key) for key in ("hospitals", "classes", "seed")):
        raise RecipeError(f"--alone is {folder}, a run on other images; give one with the same data and the same seed")
    return summary
