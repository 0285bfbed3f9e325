"""`polyclinic attack`: what somebody who intercepts a hospital's features, or gradients, can make of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.analysis.attack.attacker_data import LEAST
from polyclinic.analysis.attack.campaign import AttackOptions, attack_run
from polyclinic.analysis.attack.decoder import DecoderTraining
from polyclinic.analysis.attack.feature_inversion import GUESSES
from polyclinic.analysis.attack.gradient_inversion import KINDS, Search
from polyclinic.cli.common import Data, Json, out, print_json
from polyclinic.cli.display import strip_zeros
from polyclinic.core.contract import Stream
from polyclinic.core.errors import RecipeError
from polyclinic.runs.finished_run import open_run

COLUMNS = {"ssim": "SSIM", "ssim_max": "max", "l2": "L2", "l2_min": "min", "below": "<.1", "recognised": "own"}


def attack_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")],
    site: Annotated[list[str] | None, typer.Option(help="A site to attack (default: the first three).")] = None,
    stages: Annotated[str | None, typer.Option(help="Whose features are intercepted: 1,3 (default: all).")] = None,
    clip: Annotated[
        float | None, typer.Option(help="Also attack protected features, each image's cut to this.")
    ] = None,
    noise: Annotated[float, typer.Option(min=0, help="Noise on these, in units of the clip.")] = 0.0,
    inversion: Annotated[bool, typer.Option("--inversion", help="Also attack gradients.")] = False,
    batch: Annotated[int, typer.Option(min=1, max=LEAST // 2, help="Images behind each of these.")] = 1,
    step_clip: Annotated[float, typer.Option(help="DP-SGD's clip, for protected gradients.")] = 1.0,
    step_noise: Annotated[float, typer.Option(min=0, help="DP-SGD's noise, in units of its clip.")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps that a decoder is trained for.")] = DecoderTraining.steps,
    iterations: Annotated[int, typer.Option(min=1, help="Of the search behind a gradient.")] = Search.iterations,
    images: Annotated[
        int, typer.Option(min=LEAST, help="Images of a site that are used, at most.")
    ] = AttackOptions.most,
    fid_weights: Annotated[
        Path | None, typer.Option(help="MobileNetV2's weights for the Fréchet distance (default: the run's network).")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the attack (default: the run's).")] = None,
    data: Data = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto (default: as the run).")] = None,
    as_json: Json = False,
) -> None:
    """Attack a finished run: rebuild patients' images from features and, with --inversion, from gradients."""
    check_options(clip, noise, step_clip)
    wishes = AttackOptions(
        sites=tuple(site or ()),
        stages=parse_stages(stages),
        effort=DecoderTraining(steps),
        most=images,
        clip=clip,
        noise=noise,
        fid_weights=fid_weights,
        inversion=batch if inversion else 0,
        search=Search(iterations),
        step_clip=step_clip,
        step_noise=step_noise,
    )
    past = open_run(folder, data, device)
    told = attack_run(past, wishes, Stream(past.recipe.seed if seed is None else seed, ("attack",)))
    if as_json:
        print_json(told)
        return
    out.print(feature_table(told))
    if inversion:
        out.print(gradient_table(told))
    out.print(Text(told["verdict"]), soft_wrap=True)
    out.print(Text(f"written: {folder / 'attack'} (its pictures show patients: keep them there)"), soft_wrap=True)


def check_options(clip: float | None, noise: float, step_clip: float) -> None:
    if clip is None and noise:
        raise RecipeError("--noise is in units of the clip; give --clip, too")
    for name, value in (("--clip", clip), ("--step-clip", step_clip)):
        if value is not None and not 0 < value < math.inf:
            raise RecipeError(f"{name} is {value}; choose a positive length")


def parse_stages(text: str | None) -> tuple[int, ...]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise RecipeError(f"--stages is {text!r}; write numbers with commas between them, as 1,3")
    return tuple(sorted({int(part) for part in parts}))


def feature_table(told: Mapping[str, Any]) -> Table:
    """The figures of all stages, means over sites, for 80 columns."""
    sites = told["sites"]
    table = _empty_table(
        f"{told['run']}: images from features, at {', '.join(sites)}"[:79], "stage", [*COLUMNS, "frechet"]
    )
    for stage, row in told["mean"].items():
        for number, (guess, figures) in enumerate(row.items()):
            cells = [stage if number == 0 else "", GUESSES[guess], *_format_cells(figures), f"{figures['frechet']:.3g}"]
            table.add_row(*map(Text, cells), style="bold" if guess == "decoder" else "")
    table.caption = Text(
        f"{_describe_count(sites)}; SSIM and its largest (1: the same); L2 of pixels in [0, 1] and its smallest; <.1: share "
        f"nearer than that; own: share nearest to its own original; Fréchet by {told['frechet_network']}"
    )
    return table


def gradient_table(told: Mapping[str, Any]) -> Table:
    told_of = next(iter(told["sites"].values()))["gradients"]
    table = _empty_table("images from gradients", "site", list(next(iter(told_of["guesses"].values()))))
    for site, found in told["sites"].items():
        for number, (kind, figures) in enumerate(found["gradients"]["guesses"].items()):
            table.add_row(*map(Text, [site[:12] if number == 0 else "", KINDS[kind], *_format_cells(figures)]))
    table.caption = Text(f"{told_of['attacked']} images a site, {told_of['images']} behind each gradient")
    return table


def _empty_table(title: str, first: str, figures: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", caption_justify="left", box=None, padding=(0, 1))
    for name in (first, "guess"):
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(COLUMNS.get(name, "Fréchet"), justify="right", no_wrap=True)
    return table


def _format_cells(figures: Mapping[str, float]) -> list[str]:
    return [strip_zeros(f"{figures[key]:.2f}") for key in COLUMNS if key in figures]


def _describe_count(sites: Mapping[str, Any]) -> str:
    attacked = sum(found["attacked_images"] for found in sites.values())
    return f"{attacked} attacked images" + (f", means over {len(sites)} sites" if len(sites) > 1 else "")
