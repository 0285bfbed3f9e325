"""The commands of `data` and `weights`."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import textwrap
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Column
from rich.text import Text

import polyclinic
from polyclinic.cli.common import Data, Json, err, find_recipe, out, plain_table, print_json, print_message
from polyclinic.config.bundled import bundled_recipes
from polyclinic.core import DataError
from polyclinic.data import DATASETS, NAMED_DATASETS, describe_datasets
from polyclinic.storage.files import write_json

if TYPE_CHECKING:
    from polyclinic.core.rng import Stream
    from polyclinic.data.check import CheckResult
    from polyclinic.data.datasets.base import NamedDataset
    from polyclinic.data.findings import Finding
    from polyclinic.data.heterogeneity.diagnosis import Diagnosis
    from polyclinic.data.loading.image_options import ImageOptions
    from polyclinic.data.options import Options
    from polyclinic.data.partitioning.dry_run import Refusal
    from polyclinic.data.records import Listing

    Work: TypeAlias = Sequence[tuple[Listing, Sequence[Refusal]]]
    """Listings to check, each with the partitions to try; without any, its own sites."""


app = typer.Typer(no_args_is_help=True, help="List, check, compare and download images before training.")

What = Annotated[
    str, typer.Argument(metavar="RECIPE|NAME|PATH", help="A recipe, the name of a public dataset, or a path to images.")
]
COLOURS = {"stop": "bold red", "warn": "yellow", "note": "dim"}
MOST = 20
"""The largest number of classes or sites that are listed."""
OURS = re.compile(r"([0-9a-f]{32})(\.draft|\.lock)?")
"""Names in the cache of a prepared dataset, of one that is being prepared, and of its lock."""
OUR_FILES = re.compile(r"pixels|index\.json|\.index\.json\.\d+\.tmp")


@app.command("list")
def list_datasets(data: Data = None, as_json: Json = False) -> None:
    """List the public datasets, their terms, and whether they are in the data folder."""
    folder, described = _named_data_dir(data), describe_datasets()
    rows = [
        {
            "name": name,
            "here": folder is not None and _is_downloaded(named, folder),
            "fetch": bool(named.downloads),
            "licence": named.licence,
            "about": described[name],
        }
        for name, named in NAMED_DATASETS.items()
    ]
    if as_json:
        print_json(rows)
        return
    table = plain_table(Column("name", no_wrap=True), Column("here", no_wrap=True), "what it is, and its terms")
    for row in rows:
        here = "yes" if row["here"] else "fetch" if row["fetch"] else "no"
        table.add_row(str(row["name"]), here, Text(f"{row['about']}\n").append(f"terms: {row['licence']}", "dim"))
    out.print(table)
    print_message("fetch: `polyclinic data fetch NAME` downloads it; no: the same command says how to get it")


def _named_data_dir(data: Path | None) -> Path | None:
    """Return the data folder, or None if none is given."""
    from polyclinic.data.data_dir import VARIABLE, data_folder

    return data_folder(data) if data or os.environ.get(VARIABLE) else None


def _is_downloaded(named: NamedDataset, folder: Path) -> bool:
    try:
        return bool(named.read(named.options(), folder / (named.folder or named.name)).records)
    except DataError:
        return False


@app.command("check")
def check_command(
    what: What,
    data: Data = None,
    columns: Annotated[
        str, typer.Option(metavar="path=…,label=…", help="The columns of a table; also site, patient, split.")
    ] = "",
    show_names: Annotated[
        bool, typer.Option("--show-names", help="Also print file names, which may contain patients' names.")
    ] = False,
    file: Annotated[Path | None, typer.Option("--out", help="Also write the findings to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Check a dataset, or the data of a recipe, for faults. The exit code is 1 if training must not start."""
    from polyclinic.data.check import check_listing
    from polyclinic.data.listings import open_listing

    recipe = _load_recipe(what)
    if recipe is not None and columns:
        raise DataError("A recipe names the columns of its table; leave out --columns.")
    work: Work = [(open_listing(what, data, columns), ())] if recipe is None else _dry_runs(recipe, data)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("checking images", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        found = [check_listing(listing, progress=report, divisions=divisions) for listing, divisions in work]
    document = found[0].as_json() if len(found) == 1 else [checked.as_json() for checked in found]
    if file is not None:
        write_json(file, document)
    if as_json:
        print_json(document)
    elif not work:
        _print_wrapped(f"{what}: its images are not in files, so there is nothing to check")
    for (listing, _), checked in zip(work, found, strict=True):
        if not as_json:
            print_check(checked)
        if show_names:
            _print_names(listing, checked.findings, err if as_json else out)
    if not all(checked.may_train for checked in found):
        raise typer.Exit(1)


def _load_recipe(what: str) -> polyclinic.Recipe | None:
    """Load a recipe by its file or, unless a path of that name exists, by the name of a bundled recipe."""
    ours = {} if Path(what).exists() else bundled_recipes()
    return polyclinic.Recipe.load(ours.get(what, what)) if what in ours or what.endswith((".yaml", ".yml")) else None


def _dry_runs(recipe: polyclinic.Recipe, data: Path | None) -> Work:
    """Return the listings that a recipe's methods use, each once, with the partitions that they make of it."""
    from polyclinic.data.loading.loader import apply_task

    listings: dict[str, Listing] = {}
    divisions: defaultdict[str, dict[str, Refusal]] = defaultdict(dict)
    for method in [recipe.method_recipe(name) for name in recipe.methods] or [recipe]:
        section, spec = method.data, DATASETS[method.data.name]
        if spec.read is None:
            continue
        options = spec.options.model_validate(section.options)
        key = f"{section.name} {section.split.official} {options.model_dump_json()}"
        if key not in listings:
            listing = apply_task(spec.read(options, data), getattr(options, "task", None))
            official = listing.official and section.split.official
            listings[key] = replace(listing, name=f"{listing.name}, as in {method.name}", official=official)
        divisions[key].setdefault(section.model_dump_json(), _dry_run(method, options, data))
    return [(listing, tuple(divisions[key].values())) for key, listing in listings.items()]


def _dry_run(recipe: polyclinic.Recipe, options: Options, data: Path | None) -> Refusal:
    from polyclinic.data.loading.image_options import ImageOptions
    from polyclinic.data.partitioning.dry_run import Division
    from polyclinic.runs.experiment import load_sites

    split, alone = recipe.data.split, recipe.data.allow_single_class
    if isinstance(options, ImageOptions) and not options.merge_near_duplicates:
        return Division(recipe.build_partition(), split, alone, options.limit, recipe.seed).find_refusal

    def gathered(_: Listing) -> str:
        """Partition as a run does, if that depends on pixels."""
        try:
            load_sites(recipe, data)
        except DataError as error:
            return str(error)
        return ""

    return gathered


def print_check(checked: CheckResult) -> None:
    from polyclinic.data.findings import format_places

    _print_wrapped(f"{checked.name}: {checked.images:,} images")
    _print_wrapped(f"classes: {_format_counts(checked.classes)}", 6)
    if len(checked.sites) > 1:
        _print_wrapped(f"sites: {_format_counts(checked.sites)}", 6)
    for finding in checked.findings:
        out.print(_severity_style(finding).append(f"  {finding.kind}: {finding.count:,}", "bold"))
        _print_wrapped(f"{finding.sentence}.", 6)
        if finding.where:
            _print_wrapped(f"where: {format_places(list(map(_shorten_place, finding.where)), finding.count)}", 6)
        _print_wrapped(f"the loader: {finding.handled}" if finding.handled else f"to do: {finding.remedy}", 6)
    if checked.findings:
        table = plain_table("", "finding", Column("n", justify="right"))
        for finding in checked.findings:
            table.add_row(_severity_style(finding), Text(finding.kind), f"{finding.count:,}")
        out.print(table)
    stops = sum(finding.stops for finding in checked.findings)
    warns = sum(finding.level == "warn" and not finding.handled for finding in checked.findings)
    verdict = "training may start" if checked.may_train else "training must NOT start"
    if checked.may_train and not checked.can_be_divided:
        verdict += ", but not with its own sites and parts"
    out.print(Text(f"{verdict}: {stops} to fix first, {warns} to note"), style="bold")


def _severity_style(finding: Finding) -> Text:
    return Text("done", "green") if finding.handled else Text(finding.level, COLOURS[finding.level])


def _print_wrapped(text: str, indent: int = 0) -> None:
    """Print text wrapped between words; a path that is longer than a line is not broken."""
    space = " " * indent
    wrap = textwrap.TextWrapper(out.width, space, space, break_long_words=False, break_on_hyphens=False)
    out.print(Text(wrap.fill(text)), soft_wrap=True)


def _format_counts(groups: Mapping[str, int]) -> str:
    shown = [f"{name} {count:,}" for name, count in groups.items()][:MOST]
    return ", ".join(shown) + (f" and {len(groups) - MOST} more" if len(groups) > MOST else "")


def _shorten_place(place: str) -> str:
    """Shorten "labels.csv row 2 = labels.csv row 7" to "labels.csv row 2 = 7"."""
    first, *others = place.split(" = ")
    return " = ".join([first, *(other.removeprefix(first[: first.rfind(" ") + 1]) for other in others)])


def _print_names(listing: Listing, findings: tuple[Finding, ...], console: Console) -> None:
    for finding in findings:
        for position in finding.positions:
            console.print(Text(f"{finding.kind}: {listing.records[position].path}"), soft_wrap=True)
    for path in listing.unlisted:
        console.print(Text(f"unlisted image: {path}"), soft_wrap=True)


@app.command("diagnose")
def diagnose_command(
    what: What,
    data: Data = None,
    size: Annotated[int, typer.Option(min=8, max=512, help="The side of an image in pixels (not for recipes).")] = 64,
    channels: Annotated[int, typer.Option(min=1, max=3, help="The channels, 1 or 3 (not for recipes).")] = 3,
    seed: Annotated[int, typer.Option(help="The seed of random choices.")] = 0,
    folder: Annotated[Path, typer.Option("--out", help="The output folder.")] = Path("diagnosis"),
    as_json: Json = False,
) -> None:
    """Measure how the sites' images differ, and say which methods address that."""
    from polyclinic.core.rng import Stream
    from polyclinic.data.heterogeneity.diagnosis import format_diagnosis
    from polyclinic.data.loading.image_options import ImageOptions

    options = ImageOptions.model_validate({"size": size, "channels": channels})
    title, found = _measure_heterogeneity(what, data, options, Stream(seed))
    from polyclinic.reporting.heterogeneity_figure import draw_diagnosis  # matplotlib takes a second to load

    folder.mkdir(parents=True, exist_ok=True)
    draw_diagnosis(found, folder / "diagnosis.png", title)
    write_json(folder / "diagnosis.json", found.as_json())
    if as_json:
        print_json(found.as_json())
        return
    for line in format_diagnosis(found):
        _print_wrapped(line)
        out.print()
    out.print(Text(f"written: {folder / 'diagnosis.png'}  {folder / 'diagnosis.json'}"), soft_wrap=True)


def _measure_heterogeneity(
    what: str, data: Path | None, options: ImageOptions, stream: Stream
) -> tuple[str, Diagnosis]:
    from polyclinic.data.heterogeneity.diagnosis import diagnose_sites
    from polyclinic.data.listings import open_listing
    from polyclinic.data.loading.loader import load_collection
    from polyclinic.data.partitioning.partitions import Natural
    from polyclinic.data.partitioning.site_data import build_site_data
    from polyclinic.data.splits import Fractions
    from polyclinic.runs.experiment import load_sites

    recipe = _load_recipe(what)
    if recipe is not None:
        dataset = load_sites(recipe, data)
        found = diagnose_sites({name: site.train for name, site in dataset.sites.items()}, dataset.classes, stream)
        return f"{recipe.name}: how the sites' training images differ", found
    listing = open_listing(what, data)
    if len({record.site for record in listing.used_records} - {""}) < 2:
        raise DataError(
            f"{listing.name} names fewer than two sites, so there is nothing to compare; "
            "give a recipe, which partitions images among sites."
        )
    collection = load_collection(listing, options, stream.child("data"))
    whole = Fractions(train=1, validation=0, test=0, official=False)
    sites = build_site_data(collection, Natural(), whole, stream.child("sites"), allow_single_class=True)
    training = {name: site.train for name, site in sites.items()}
    return f"{listing.name}: how the sites differ", diagnose_sites(training, collection.classes, stream)


@app.command("fetch")
def fetch_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of a public dataset: see `polyclinic data list`.")
    ],
    data: Data = None,
) -> None:
    """Download a public dataset if its terms allow that, or say how to get it. Resumes interrupted downloads."""
    from polyclinic.data.data_dir import data_folder
    from polyclinic.data.download import fetch_dataset

    if name not in NAMED_DATASETS:
        raise DataError(f"There is no dataset '{name}'; there are: {', '.join(NAMED_DATASETS)}.")
    named = NAMED_DATASETS[name]
    folder = data_folder(data) if named.downloads else _named_data_dir(data) or Path("your data folder")
    files = {download.name for download in named.downloads}
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
                if what not in files:  # a remark, such as a sum to compare by hand: bars vanish, this stays
                    print_message(what)
            progress.update(tasks[what], completed=done, total=total)

        written = fetch_dataset(named, folder, report)
    for path in written:
        out.print(Text(f"here: {path}"), soft_wrap=True)


@app.command("cache")
def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all prepared images.")] = False,
    as_json: Json = False,
) -> None:
    """Show where prepared images are cached, and their size. They are patients' images: clear them when done."""
    from polyclinic.data.loading.cache import cache_folder

    home = cache_folder()
    ours = sorted(path for path in home.glob("*") if _is_cache_entry(path))
    states = {path.name: (path / "pixels").stat() for path in ours if (path / "pixels").is_file()}
    kept = _clear_cache(ours) if clear else []
    if as_json:
        rows = [
            {"set": name, "bytes": state.st_size, "made": time.strftime("%F", time.gmtime(state.st_mtime))}
            for name, state in states.items()
        ]
        print_json({"folder": str(home), "cleared": clear, "in_use": kept, "sets": rows})
        return
    size = sum(state.st_size for state in states.values())
    note = f"; cleared{f', except {len(kept)} that are being prepared' if kept else ''}" if clear else ""
    out.print(Text(f"{home}: {len(states)} prepared sets, {size / 2**20:,.1f} MiB{note}"), soft_wrap=True)


def _is_cache_entry(path: Path) -> bool:
    """Return whether a path was made by the cache; its folder may hold other files, which are never deleted."""
    if not OURS.fullmatch(path.name) or path.is_symlink():
        return False
    if path.is_dir():
        return path.suffix != ".lock" and all(OUR_FILES.fullmatch(file.name) for file in path.iterdir())
    return path.suffix == ".lock" and path.stat().st_size == 0


def _clear_cache(ours: list[Path]) -> list[str]:
    """Delete the cache but for the datasets that another process is preparing; return their names."""
    kept = sorted({path.name[:32] for path in ours if path.suffix == ".lock" and _is_locked(path)})
    for path in ours:
        if path.name[:32] not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return kept


def _is_locked(lock: Path) -> bool:
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


weights_app = typer.Typer(no_args_is_help=True, help="Convert published weights, or hash first weights.")


@weights_app.callback()
def weights() -> None:
    """Convert published weights, or hash first weights."""


@weights_app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A torch checkpoint (.pt, .pth, .p).")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    key: Annotated[
        str | None, typer.Option("--key", help="The key of the weights in the checkpoint, such as model.")
    ] = None,
    prefix: Annotated[
        str,
        typer.Option("--prefix", help="Take only names with this prefix, and remove it, such as four_view_resnet.cc."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Convert a torch checkpoint to a safetensors file for `model.weights`, without running any code in it."""
    from polyclinic.models.weights.convert import convert_checkpoint

    found = convert_checkpoint(source, target, key, prefix)
    if as_json:
        print_json({"file": str(target), **asdict(found)})
        return
    out.print(Text(f"written: {target} ({found.tensors} tensors, {found.values:,} values)"), soft_wrap=True)


@weights_app.command("hash")
def hash_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe with model.weights or model.pretrain.")],
    classes: Annotated[
        str | None, typer.Option(metavar="A,B", help="The sites' classes, if the recipe does not name them.")
    ] = None,
    channels: Annotated[int, typer.Option(min=1, help="The channels of the sites' images.")] = 1,
    data: Data = None,
) -> None:
    """Print the SHA-256 of a recipe's given first weights, for `model.sha256`: real sites accept no others."""
    from polyclinic.core import RecipeError
    from polyclinic.deploy.serve import hash_first_weights

    found = polyclinic.Recipe.load(find_recipe(recipe))
    options = found.data.options
    named = classes.split(",") if classes else list(options.get("classes") or options.get("task") or ())
    if len(named) < 2:
        raise RecipeError(f"{recipe} does not name its classes; add for example --classes benign,malignant")
    digests = hash_first_weights(found, tuple(named), int(options.get("channels") or channels), data)
    if not digests:
        raise RecipeError(f"{recipe} makes its first weights from its seed, so sites need no hash; leave it out")
    for cluster, digest in digests.items():
        place = f"clusters.{cluster}.model.sha256" if cluster else "model.sha256"
        out.print(Text(f"{place}: {digest}"), soft_wrap=True)
