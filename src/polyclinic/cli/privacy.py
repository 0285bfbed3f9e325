"""The commands `plan`, `audit` and `attack`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Column, Table
from rich.text import Text

import polyclinic
from polyclinic.cli.common import (
    Data,
    Json,
    Seed,
    Settings,
    err,
    find_recipe,
    number_columns,
    open_runs,
    out,
    parse_settings,
    print_json,
    titled_table,
)
from polyclinic.cli.display import plan_line, strip_zeros
from polyclinic.core import RecipeError
from polyclinic.reporting.formatting import round_up

if TYPE_CHECKING:
    from polyclinic.privacy.plan import PrivacyPlan
    from polyclinic.runs.experiment import FederatedDataset


def plan_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a bundled recipe.")],
    settings: Settings = None,
    data: Data = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compute the privacy cost (ε) of a recipe for each site, before anything is trained."""
    from polyclinic.runs.experiment import Experiment, load_sites

    whole = polyclinic.Recipe.load(find_recipe(recipe), parse_settings(settings, seed=seed))
    methods = {name: whole.method_recipe(name) for name in whole.methods} or {whole.name: whole}
    gathered: dict[str, FederatedDataset] = {}
    plans = {}
    for name, one in methods.items():
        key = one.data.model_dump_json()
        gathered[key] = gathered.get(key) or load_sites(one, data)
        plans[name] = Experiment(one, None, data, dataset=gathered[key]).setup.plan
    known = {name: found for name, found in plans.items() if found is not None}
    if not known:
        raise RecipeError(f"{whole.name} has no privacy plan; add for example `privacy: {{epsilon: 3}}`")
    if as_json:
        print_json({name: plan_json(found) for name, found in known.items()})
        return
    for name, found in known.items():
        out.print(Text(f"{name}\n  {plan_line({'epsilon': found.epsilon, **found.as_json()})}"))
        out.print(_plan_table(found))


def plan_json(plan: PrivacyPlan) -> dict[str, object]:
    by_site = {site: plan.epsilon_of(spends) for site, spends in plan.run_spends().items()}
    sites = {site: value if math.isfinite(value) else None for site, value in by_site.items()}
    return {**plan.as_json(), "epsilon": plan.epsilon if math.isfinite(plan.epsilon) else None, "sites": sites}


def _plan_table(plan: PrivacyPlan) -> Table:
    """Return a table of the ten sites with the largest ε."""
    from polyclinic.reporting.privacy_statement import UNITS

    whole, price = plan.run_spends(), f"{'' if plan.has_guarantee else 'would-be '}ε of this site alone"
    cost = sorted((-plan.epsilon_of(spends), site) for site, spends in whole.items())
    figures = (Column(name, justify="right") for name in ("rounds", "images", "releases", "noise", price))
    table = Table("site", *figures, box=None, padding=(0, 1))
    for negative, site in cost[:10]:
        rounds, steps = sum(site in cohort for cohort in plan.rounds), sum(spend.times for spend in whole[site])
        cells = [site, str(rounds), f"{plan.site_sizes[site].examples:,}", f"{steps:,}", f"{plan.noise_of(site):.3g}"]
        table.add_row(*map(Text, [*cells, round_up(-negative, 4)]))
    more = f"; {len(cost) - 10} more sites have a smaller ε" if len(cost) > 10 else ""
    where = (
        ""
        if plan.config.unit == "site"
        else f"; it may be at {plan.max_sites_per_record} site{'s' * (plan.max_sites_per_record > 1)}"
    )
    sizes = plan.site_sizes.values()
    unnamed, left_out = sum(size.unnamed for size in sizes), sum(size.left_out for size in sizes)
    group = f"; {left_out:,} images beyond privacy.group are left out" if left_out else ""
    if plan.config.unit == "patient" and unnamed:
        group += f"; {unnamed:,} images name no patient: privacy.group: {plan.config.group} is declared, not checked"
    charges = "".join(f"; {kind} each round, noise {noise:g}" for kind, noise in plan.other_releases.items())
    counts = "" if math.isinf(plan.metrics_noise) else f"; validation counts, noise {plan.metrics_noise:.3g}"
    protects = "protects" if plan.has_guarantee else "would protect"
    table.caption = Text(f"{protects} {UNITS[plan.config.unit]}{where}{group}{charges}{counts}{more}")
    return table


def spent_command(
    where: Annotated[
        Path,
        typer.Argument(metavar="SITE.yaml|LEDGER", help="A site's configuration, or the ledger that runs share."),
    ],
    delta: Annotated[
        float | None, typer.Option(min=1e-300, max=0.5, help="δ (default: that of the site's budget, else 1e-5).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the ε that all runs so far have spent, for one image, one patient and the whole site.

    Of a site also the number of runs that left without a plan, which have no ε.
    """
    from polyclinic.deploy.site.config import SiteConfig
    from polyclinic.deploy.site.privacy_account import price_site_ledger
    from polyclinic.deploy.site.release_log import ReleaseLog
    from polyclinic.privacy.shared_ledger import price_ledger
    from polyclinic.reporting.privacy_statement import UNITS

    if not where.is_file():
        raise RecipeError(f"there is no file {where}; give a site.yaml, or the file that privacy.ledger names")
    budget = unbounded = None
    if where.suffix in (".yaml", ".yml"):
        config = SiteConfig.load(where)
        budget = config.budget
        delta = delta or (budget.delta if budget else 1e-5)
        found = price_site_ledger(config.folder, delta)
        unbounded = ReleaseLog(config.folder).count_unbounded()
    else:
        delta = delta or 1e-5
        found = price_ledger(where, delta)
    if as_json:
        priced = {unit: value for unit, value in found.items() if isinstance(value, float)}
        spent = {unit: "infinite" if priced.get(unit) == math.inf else priced.get(unit) for unit in found}
        free = {} if unbounded is None else {"without_plan": unbounded._asdict()}
        print_json({"delta": delta, "epsilon": spent, "budget": budget and budget.model_dump(), **free})
        return
    table = Table("protected", Column("ε spent", justify="right"), "budget", box=None, padding=(0, 1))
    notes = [unbounded.sentence] if unbounded is not None and unbounded.runs else []
    for unit, value in found.items():
        limit = f"of {budget.epsilon:g}" if budget is not None and budget.unit == unit else ""
        known = "unknown" if isinstance(value, str) else "infinite" if math.isinf(value) else round_up(value, 4)
        table.add_row(UNITS[unit], known, limit)
        notes += [] if isinstance(value, float) else [f"{UNITS[unit]}: {value}"]
    table.caption = Text(f"all runs with a plan together, at δ = {delta:.2g}")
    out.print(table)
    for note in notes:
        out.print(Text(note), soft_wrap=True)


def audit_command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|DIR", help="A recipe, or the folder of a finished run, whose privacy statement is updated."
        ),
    ],
    canaries: Annotated[
        int, typer.Option(help="The number of planted examples. More of them can refute a larger ε.")
    ] = 1000,
    confidence: Annotated[float, typer.Option(help="One minus the probability that an honest run is accused.")] = 0.95,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The number of rounds to attack (default: all planned rounds).")
    ] = None,
    shadows: Annotated[
        int,
        typer.Option(
            "--membership", min=0, help="Also run a membership attack (LiRA) with this number of shadow models."
        ),
    ] = 0,
    attack_seed: Annotated[
        int | None, typer.Option("--attack-seed", min=0, help="The seed of coins and noise (default: drawn anew).")
    ] = None,
    settings: Settings = None,
    data: Data = None,
    file: Annotated[Path | None, typer.Option("--out", help="Also write the result to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Audit the privacy claim of a recipe: play its rounds with planted canaries, and test what leaves the sites.

    Tested are the noise that is really added, how far one image (patient, site) moves what is released, and what
    guesses about canaries prove, on the engine of the run. Exit codes: 0, nothing contradicts the claim, and the audit
    would have found half the noise or twice the sensitivity; 1, the claim is refuted; 3, the audit could not have
    refuted it.
    """
    folder = Path(recipe) if (Path(recipe) / "recipe.yaml").is_file() else None
    if folder and settings:
        raise RecipeError("--set changes recipes, and this folder holds a finished run; leave out --set")
    path = folder / "recipe.yaml" if folder else find_recipe(recipe)
    loaded = polyclinic.Recipe.load(path, parse_settings(settings))
    from polyclinic.analysis.privacy_audit import attack_members, audit_recipe, engine_of_run, save_audit
    from polyclinic.storage.files import write_json

    engine = engine_of_run(folder) if folder else None
    found = audit_recipe(loaded, data, canaries, confidence, rounds, engine, attack_seed)
    result = {"recipe": loaded.name, **found.as_json()}
    if shadows:
        result["membership"] = attack_members(loaded, data, found.site, shadows).sentence
    if file is not None:
        write_json(file, result)
    if folder is not None:
        save_audit(folder, result)
    if as_json:
        print_json(result)
    else:
        out.print(Text(f"{loaded.name}: {result['verdict']}"), soft_wrap=True)
        if shadows:
            out.print(Text(str(result["membership"])), soft_wrap=True)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


COLUMNS = {"ssim": "SSIM", "ssim_max": "max", "l2": "L2", "l2_min": "min", "below": "<.1", "recognised": "own"}


def attack_command(
    where: Annotated[
        str,
        typer.Argument(metavar="DIR|RECIPE", help="The folder of a finished run; with --by crafted-weights a recipe."),
    ],
    by: Annotated[
        Literal["interception", "crafted-weights"],
        typer.Option(
            help="An attacker who reads a finished run's messages, or a server that sends weights of its own making "
            "from round 2 on."
        ),
    ] = "interception",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="With --by crafted-weights: how many crafted rounds (default: all).")
    ] = None,
    settings: Settings = None,
    site: Annotated[
        list[str] | None, typer.Option(help="A site to attack. May be repeated (default: the first three sites).")
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="The stages whose features are intercepted, such as 1,3 (default: all).")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Also attack protected features, clipped to this norm.")] = None,
    noise: Annotated[float, typer.Option(min=0, help="The noise on protected features, in units of the clip.")] = 0.0,
    inversion: Annotated[bool, typer.Option("--inversion", help="Also attack gradients.")] = False,
    batch: Annotated[int, typer.Option(min=1, max=8, help="The number of images behind each gradient.")] = 1,
    step_clip: Annotated[float, typer.Option(help="The clip of protected gradients (DP-SGD).")] = 1.0,
    step_noise: Annotated[
        float, typer.Option(min=0, help="The noise of protected gradients, in units of their clip.")
    ] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="The training steps of a decoder.")] = 300,
    iterations: Annotated[int, typer.Option(min=1, help="The iterations of gradient inversion.")] = 300,
    images: Annotated[int, typer.Option(min=16, help="The largest number of images of a site.")] = 1000,
    fid_weights: Annotated[
        Path | None, typer.Option(help="Weights of MobileNetV2 for the Fréchet distance (default: the run's network).")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of the attack (default: the run's).")] = None,
    data: Data = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto (default: as in the run).")] = None,
    as_json: Json = False,
) -> None:
    """Attack a finished run: reconstruct patients' images from features and, with --inversion, from gradients.

    With --by crafted-weights attack a recipe instead: play it as a hostile server, and count the training images that
    it recovers from honest updates and, as if they were masked, from their sum.
    """
    if by == "crafted-weights":
        _attack_as_server(where, rounds, settings, data, seed, as_json)
        return
    if rounds or settings:
        raise RecipeError("--rounds and --set are for recipes; also give --by crafted-weights")
    folder = Path(where)
    from polyclinic.analysis.attack.campaign import AttackOptions, attack_run
    from polyclinic.analysis.attack.decoder import DecoderTraining
    from polyclinic.analysis.attack.gradient_inversion import Search

    _check_clips(clip, noise, step_clip)
    options = AttackOptions(
        sites=tuple(site or ()),
        stages=_parse_stages(stages),
        decoder_training=DecoderTraining(steps),
        most=images,
        clip=clip,
        noise=noise,
        fid_weights=fid_weights,
        inversion=batch if inversion else 0,
        search=Search(iterations),
        step_clip=step_clip,
        step_noise=step_noise,
    )
    (run,), stream = open_runs([folder], data, device, seed, "attack")
    with err.status("attacking the run") as status:
        result = attack_run(run, options, stream, status.update)
    if as_json:
        print_json(result)
    else:
        _print_attack(result, folder, inversion)


def _print_attack(result: Mapping[str, Any], folder: Path, inversion: bool) -> None:
    out.print(feature_table(result))
    if inversion:
        out.print(gradient_table(result))
    out.print(Text(result["verdict"]), soft_wrap=True)
    out.print(
        Text(f"written: {folder / 'attack'} (the figures show patients' images; do not share them)"), soft_wrap=True
    )


def _attack_as_server(
    where: str, rounds: int | None, settings: list[str] | None, data: Path | None, seed: int | None, as_json: bool
) -> None:
    """Play a recipe as a hostile server, and print what it recovers from single updates and from their sum."""
    from polyclinic.analysis.attack.hostile_server import attack_recipe
    from polyclinic.analysis.attack.metrics_probe import attack_metrics

    recipe = polyclinic.Recipe.load(find_recipe(where), parse_settings(settings))
    with err.status("playing the recipe as a hostile server"):
        found = [attack_recipe(recipe, view, rounds, seed, data) for view in ("each", "sum")]
        probe = attack_metrics(recipe, seed, data)
    if as_json:
        views = {one.view: one.as_json() for one in found}
        print_json({"recipe": recipe.name, "by": "crafted-weights", **views, "metrics": probe and probe.as_json()})
        return
    for one in found:
        out.print(Text(f"{recipe.name}: {one.sentence}"), soft_wrap=True)
    if probe is not None:
        out.print(Text(f"{recipe.name}: {probe.sentence}."), soft_wrap=True)


def _check_clips(clip: float | None, noise: float, step_clip: float) -> None:
    if clip is None and noise:
        raise RecipeError("--noise is in units of the clip; also give --clip")
    for name, value in (("--clip", clip), ("--step-clip", step_clip)):
        if value is not None and not 0 < value < math.inf:
            raise RecipeError(f"{name} is {value}; choose a positive norm")


def _parse_stages(text: str | None) -> tuple[int, ...]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise RecipeError(f"--stages is {text!r}; write numbers separated by commas, such as 1,3")
    return tuple(sorted({int(part) for part in parts}))


def feature_table(result: Mapping[str, Any]) -> Table:
    """Return a table of the metrics of all stages, means over sites, 80 columns wide."""
    from polyclinic.analysis.attack.feature_inversion import GUESSES

    sites = result["sites"]
    table = _empty_table(
        f"{result['run']}: images from features, at {', '.join(sites)}"[:79], "stage", [*COLUMNS, "frechet"]
    )
    for stage, row in result["mean"].items():
        for number, (guess, figures) in enumerate(row.items()):
            cells = [stage if number == 0 else "", GUESSES[guess], *_format_cells(figures), f"{figures['frechet']:.3g}"]
            table.add_row(*map(Text, cells), style="bold" if guess == "decoder" else "")
    attacked = f"{sum(found['attacked_images'] for found in sites.values())} attacked images"
    means = f", means over {len(sites)} sites" if len(sites) > 1 else ""
    table.caption = Text(
        f"{attacked}{means}; SSIM: mean and largest (1: identical); L2 of pixels in [0, 1]: mean and smallest; "
        f"<.1: share with a smaller L2; own: share whose nearest original is the right one; Fréchet distance by "
        f"{result['frechet_network']}"
    )
    return table


def gradient_table(result: Mapping[str, Any]) -> Table:
    from polyclinic.analysis.attack.gradient_inversion import KINDS

    first = next(iter(result["sites"].values()))["gradients"]
    table = _empty_table("images from gradients", "site", list(next(iter(first["guesses"].values()))))
    for site, found in result["sites"].items():
        for number, (kind, figures) in enumerate(found["gradients"]["guesses"].items()):
            table.add_row(*map(Text, [site[:12] if number == 0 else "", KINDS[kind], *_format_cells(figures)]))
    table.caption = Text(f"{first['attacked']} images a site, {first['images']} behind each gradient")
    return table


def _empty_table(title: str, first: str, figures: Sequence[str]) -> Table:
    columns = number_columns(*(COLUMNS.get(name, "Fréchet") for name in figures))
    return titled_table(title, Column(first, no_wrap=True), Column("guess", no_wrap=True), *columns)


def _format_cells(figures: Mapping[str, float]) -> list[str]:
    return [strip_zeros(f"{figures[key]:.2f}") for key in COLUMNS if key in figures]
