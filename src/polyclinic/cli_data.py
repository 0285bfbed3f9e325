"""`polyclinic data …`: what there is, what is wrong with it, how sites differ, how to get it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from polyclinic.core import Stream
from polyclinic.data import DATASETS, Natural, data_folder, federate
from polyclinic.data.cache import cache_folder
from polyclinic.data.check import Checked, check
from polyclinic.data.diagnose import Diagnosis, diagnose, lines
from polyclinic.data.fetch import fetch
from polyclinic.data.findings import Finding, told
from polyclinic.data.load import load
from polyclinic.data.preparation import ImageOptions
from polyclinic.data.records import Listing
from polyclinic.data.sets import SETS
from polyclinic.data.sources.open import open_source
from polyclinic.data.splits import Fractions
from polyclinic.errors import DataError
from polyclinic.experiment import gather
from polyclinic.recipe import Recipe
from polyclinic.store import write_json
from polyclinic.terminal import Data, Json, err, out, print_json, tell

app = typer.Typer(no_args_is_help=True, help="Check, compare and get images before anything trains on them.")

What = Annotated[str, typer.Argument(metavar="NAME|PATH", help="A named set, a folder, a CSV file or an npz file.")]
COLOURS = {"stop": "bold red", "warn": "yellow", "note": "dim"}


@app.command("list")
def list_sets(data: Data = None, as_json: Json = False) -> None:
    """The named public sets, their terms, and whether they are at hand."""
    rows = [
        {
            "name": name,
            "here": _is_here(name, data),
            "fetch": bool(named.downloads),
            "licence": named.licence,
            "about": named.about,
        }
        for name, named in SETS.items()
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("name", "here", "licence", "about", box=None, padding=(0, 1), pad_edge=False)
    for row in rows:
        here = "yes" if row["here"] else "fetch" if row["fetch"] else "no"
        table.add_row(*map(Text, (str(row["name"]), here, str(row["licence"]), str(row["about"]))))
    out.print(table)
    tell("here: yes; fetch = `polyclinic data fetch NAME` gets it; no = `polyclinic data fetch NAME` says how to")


def _is_here(name: str, data: Path | None) -> bool:
    try:
        spec = DATASETS[name]
        assert spec.read is not None
        return bool(spec.read(spec.options(), data).records)
    except DataError:
        return False


def listed(what: str, data: Path | None) -> Listing:
    """What a name or a path stands for."""
    spec = DATASETS.get(what)
    if spec is not None and spec.read is not None and what in SETS:
        return spec.read(spec.options(), data)
    if spec is not None and not Path(what).exists():
        raise DataError(f"The set '{what}' has no files to look at; give a named set of `data list`, or a path.")
    if not Path(what).exists():
        raise DataError(f"There is no named set and no path '{what}'; see `polyclinic data list`, or give a path.")
    return open_source(Path(what))


@app.command("check")
def check_command(
    what: What,
    data: Data = None,
    show_names: Annotated[
        bool, typer.Option("--show-names", help="Also print file names, which may name patients. For your eyes only.")
    ] = False,
    file: Annotated[Path | None, typer.Option("--out", help="Also write the findings to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Look for what is wrong with a set. The exit code is 1 if training may not start."""
    listing = listed(what, data)
    with _bar("looking at images") as report:
        checked = check(listing, report=report)
    if file is not None:
        write_json(file, checked.as_json())
    if as_json:
        print_json(checked.as_json())
    else:
        show_checked(checked)
    if show_names:
        _show_names(listing, checked.findings)
    if not checked.may_train:
        raise typer.Exit(1)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    with Progress(console=err, transient=True) as progress:
        task: TaskID = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def show_checked(checked: Checked) -> None:
    counts = ", ".join(f"{name} {count:,}" for name, count in checked.classes.items())
    sites = f" at {len(checked.sites)} sites" if len(checked.sites) > 1 else ""
    out.print(Text(f"{checked.name}: {checked.images:,} images{sites} ({counts})"), soft_wrap=True)
    table = Table("", "finding", "n", "what, where, what to do", box=None, padding=(0, 1), pad_edge=False)
    for finding in checked.findings:
        table.add_row(*_cells(finding))
    if checked.findings:
        out.print(table)
    stops = sum(finding.stops for finding in checked.findings)
    warns = sum(finding.level == "warn" and not finding.handled for finding in checked.findings)
    verdict = "training may start" if checked.may_train else "training may NOT start"
    out.print(Text(f"{verdict}: {stops} to mend first, {warns} to know of"), style="bold")


def _cells(finding: Finding) -> tuple[Text, Text, Text, Text]:
    level = "done" if finding.handled else finding.level
    where = f" ({told(finding.where, finding.count)})" if finding.where else ""
    rest = f". The loader: {finding.handled}." if finding.handled else f"; {finding.remedy}."
    what = Text(f"{finding.sentence}{where}{rest}")
    return Text(level, COLOURS.get(level, "green")), Text(finding.kind), Text(f"{finding.count:,}"), what


def _show_names(listing: Listing, findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        for position in finding.positions:
            out.print(Text(f"{finding.kind}: {listing.records[position].path}"), soft_wrap=True)
    for path in listing.unlisted:
        out.print(Text(f"unlisted image: {path}"), soft_wrap=True)


@app.command("diagnose")
def diagnose_command(
    what: Annotated[str, typer.Argument(metavar="RECIPE|NAME|PATH", help="A recipe, a named set, or your images.")],
    data: Data = None,
    size: Annotated[int, typer.Option(min=8, max=512, help="Pixels of a side (not for recipes).")] = 64,
    channels: Annotated[int, typer.Option(min=1, max=3, help="1 or 3 (not for recipes).")] = 3,
    seed: Annotated[int, typer.Option(help="The seed of what is drawn.")] = 0,
    folder: Annotated[Path, typer.Option("--out", help="Where the picture and the JSON go.")] = Path("diagnosis"),
    as_json: Json = False,
) -> None:
    """How the sites differ, and which method addresses that: numbers, a picture, plain sentences."""
    title, found = _diagnosis(what, data, size, 3 if channels == 3 else 1, Stream(seed))
    from polyclinic.data.diagnose_picture import draw_diagnosis  # matplotlib takes a second to load

    folder.mkdir(parents=True, exist_ok=True)
    draw_diagnosis(found, folder / "diagnosis.png", title)
    write_json(folder / "diagnosis.json", found.as_json())
    if as_json:
        print_json(found.as_json())
        return
    for line in lines(found):
        out.print(Text(line))
    out.print(Text(f"written: {folder / 'diagnosis.png'}  {folder / 'diagnosis.json'}"), soft_wrap=True)


def _diagnosis(
    what: str, data: Path | None, size: int, channels: Literal[1, 3], stream: Stream
) -> tuple[str, Diagnosis]:
    if what.endswith((".yaml", ".yml")):
        recipe = Recipe.load(what)
        consortium = gather(recipe, data)
        everything = {name: site.train for name, site in consortium.sites.items()}
        return f"{recipe.name}: how the sites' training images differ", diagnose(everything, consortium.classes, stream)
    listing = listed(what, data)
    options = ImageOptions(size=size, channels=channels)
    collection = load(listing, options, stream.child("data"))
    if collection.sites is None or len(set(collection.sites)) < 2:
        raise DataError(
            f"{listing.name} names fewer than two sites, so there is nothing to compare; "
            "give a recipe, which divides images among sites."
        )
    whole = Fractions(train=1, validation=0, test=0, official=False)
    sites = federate(collection, Natural(), whole, stream.child("sites"), allow_single_class=True)
    found = diagnose({name: site.train for name, site in sites.items()}, collection.classes, stream)
    return f"{listing.name}: how the sites differ", found


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A named set: see `polyclinic data list`.")],
    data: Data = None,
) -> None:
    """Download a set where its terms allow that; else say how to get it. Goes on where it was interrupted."""
    if name not in SETS:
        raise DataError(f"There is no named set '{name}'; there are: {', '.join(SETS)}.")
    folder = data_folder(data)
    with Progress(console=err, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=total)
            progress.update(tasks[file], completed=done, total=total)

        written = fetch(SETS[name], folder, report)
    for path in written:
        out.print(Text(f"here: {path}"), soft_wrap=True)


@app.command("cache")
def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all prepared images.")] = False,
    as_json: Json = False,
) -> None:
    """Where prepared images are kept, and how much there is. They are patients' images: clear them when done."""
    home = cache_folder()
    rows = [_cached(path) for path in sorted(home.glob("*/pixels"))]
    if clear:
        shutil.rmtree(home, ignore_errors=True)
    if as_json:
        print_json({"folder": str(home), "cleared": clear, "sets": rows})
        return
    size = sum(row["bytes"] for row in rows)
    out.print(Text(f"{home}: {len(rows)} prepared sets, {size / 2**20:,.1f} MiB{'; cleared' if clear else ''}"))


def _cached(pixels: Path) -> dict[str, Any]:
    state = pixels.stat()
    return {"set": pixels.parent.name, "bytes": state.st_size, "made": time.strftime("%F", time.gmtime(state.st_mtime))}
