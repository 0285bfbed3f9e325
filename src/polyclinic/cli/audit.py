"""`polyclinic audit`: attack a recipe's own privacy claim, on its own images, before anybody relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.text import Text

from polyclinic.cli.common import Data, Json, Settings, find_recipe, out, parse_settings, print_json
from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import Fit, Score, Site, SiteId, Stream
from polyclinic.core.errors import RecipeError
from polyclinic.data.examples import Selection
from polyclinic.evaluation.metrics import Floats
from polyclinic.federation.rehearsal import rehearse
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.audit import Audit, audit
from polyclinic.privacy.membership import Membership, membership
from polyclinic.privacy.plan import Plan
from polyclinic.reporting.privacy_statement import page
from polyclinic.runs.experiment import Experiment, finished
from polyclinic.storage.run_files import write_atomically, write_json
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import probabilities, task_loss
from polyclinic.training.network import LiveNetwork, weights_of


def audit_command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|DIR", help="A recipe, or the folder of a finished run, whose page is told.")
    ],
    canaries: Annotated[int, typer.Option(help="Planted examples; the more, the larger an ε can be refuted.")] = 1000,
    confidence: Annotated[float, typer.Option(help="How sure the lower bound shall be.")] = 0.95,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to attack (default: all that are planned).")] = None,
    shadows: Annotated[
        int, typer.Option("--membership", min=0, help="Also a membership attack (LiRA), with so many shadow models.")
    ] = 0,
    settings: Settings = None,
    data: Data = None,
    file: Annotated[Path | None, typer.Option("--out", help="Write the result there, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Attack a recipe's privacy claim: plant canaries at a site, train as planned, guess who took part."""
    folder = Path(recipe) if (Path(recipe) / "recipe.yaml").is_file() else None
    if folder and settings:
        raise RecipeError("--set changes recipes, and this folder holds a run that has ended; leave --set out")
    loaded = Recipe.load(folder / "recipe.yaml" if folder else find_recipe(recipe), parse_settings(settings))
    site, found = audit_recipe(loaded, data, canaries, confidence, rounds)
    told = {"recipe": loaded.name, "site": site, **found.as_json()}
    if shadows:
        told["membership"] = attack_members(loaded, data, site, shadows).sentence
    if file is not None:
        write_json(file, told)
    if folder is not None:
        note(folder, told)
    if as_json:
        print_json(told)
    else:
        for sentence in sentences(told):
            out.print(Text(sentence), soft_wrap=True)
    if found.refuted:
        raise typer.Exit(1)


def audit_recipe(
    recipe: Recipe, data: Path | None = None, canaries: int = 1000, confidence: float = 0.95, rounds: int | None = None
) -> tuple[SiteId, Audit]:
    """The site of a recipe that pays most, and what an attack on its training came to.

    An algorithm's first training job of a round is attacked, with the task's own loss, and held against the price of
    those steps alone, for one image.
    """
    experiment = Experiment(recipe, None, data)
    plan = experiment.plan
    if plan is None or plan.wish.unit == "site":
        raise RecipeError(
            f"{recipe.name} makes no claim that canaries among the images could refute; give it privacy with unit "
            "image or patient"
        )
    site = max(plan.jobs, key=lambda name: _price(plan, name, _taken(plan, name)))
    examples, network = experiment.sites[site].train, network_at(experiment, site)
    shape = examples.batch(examples.labels.new_zeros(1))[0].shape[1:]
    job = _private(rehearse(experiment.algorithm, experiment.federation, site, network, shape)[0], plan)
    played = min(rounds or _taken(plan, site), _taken(plan, site))
    return site, audit(
        network.module,
        examples,
        job.training,
        rounds=played,
        delta=plan.wish.delta,
        claimed=_price(plan, site, played),
        stream=Stream(recipe.seed, ("audit",)),
        canaries=canaries,
        confidence=confidence,
        whole=job.whole,
        device=network.device,
    )


def network_at(experiment: Experiment, site: SiteId) -> LiveNetwork:
    """What a site trains: its cluster's network, where there are clusters."""
    algorithm = experiment.algorithm
    return experiment.lineup.networks[algorithm.cluster_of(algorithm.init(experiment.federation), site)]


def attack_members(recipe: Recipe, data: Path | None, site: SiteId, shadows: int) -> Membership:
    """LiRA on one site: models trained on random halves of its images as it would train in all its rounds."""
    experiment = Experiment(recipe, None, data)
    plan, examples = experiment.plan, experiment.sites[site].train
    assert plan is not None
    network, training = network_at(experiment, site), experiment.algorithm.training
    start = weights_of(network.module)
    assert isinstance(examples, Selection)

    def train(members: NDArray[np.intp], stream: Stream) -> Floats:
        part, weights = examples.subset(torch.from_numpy(members)), start
        for number in range(1, _taken(plan, site) + 1):
            here = Site(site, len(part), number, recipe.rounds, training.optimiser.lr)
            job = Fit(weights, task_loss, training)
            weights = fit(job, network, part, here, stream, stream.child("secret", number)).weights
        found = score(Score(weights, probabilities), network, examples)
        sure: Floats = found["probabilities"].gather(1, found["labels"][:, None]).squeeze(1).double().cpu().numpy()
        return sure.clip(0.0, 1.0)

    return membership(train, len(examples), Stream(recipe.seed, ("membership",)), shadows)


def sentences(told: Mapping[str, Any]) -> list[str]:
    return [f"{told['site']}: {told['verdict']}", *([told["membership"]] if "membership" in told else [])]


def note(folder: Path, told: Mapping[str, Any]) -> None:
    """Enter an audit into a finished run's result and privacy page."""
    summary = finished(folder).summary
    summary["privacy"]["audit"] = dict(told)
    write_atomically(folder / "privacy.md", page(summary).encode())
    write_json(folder / "result.json", summary)


def _private(jobs: tuple[Fit, ...], plan: Plan) -> Fit:
    first = jobs[0]
    return replace(first, training=replace(first.training, private=plan.private()))


def _taken(plan: Plan, site: SiteId) -> int:
    return sum(site in cohort for cohort in plan.rounds)


def _price(plan: Plan, site: SiteId, rounds: int) -> float:
    """ε of the first training job of so many rounds, for one image."""
    job = plan.jobs[site][0]
    return plan.of_one([Spend(plan.noise, job.rate, job.times * rounds)])
