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
from polyclinic.federation.rehearsal import rehearse_round
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.audit import AuditResult, run_audit
from polyclinic.privacy.membership import MembershipResult, attack_membership
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.reporting.privacy_statement import write_privacy_page
from polyclinic.runs.experiment import Experiment, read_result
from polyclinic.storage.run_files import write_atomically, write_json
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights


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
        save_audit(folder, told)
    if as_json:
        print_json(told)
    else:
        for sentence in audit_sentences(told):
            out.print(Text(sentence), soft_wrap=True)
    if found.is_refuted:
        raise typer.Exit(1)


def audit_recipe(
    recipe: Recipe, data: Path | None = None, canaries: int = 1000, confidence: float = 0.95, rounds: int | None = None
) -> tuple[SiteId, AuditResult]:
    """The site of a recipe that pays most, and what an attack on its training came to.

    An algorithm's first training job of a round is attacked, with the task's own loss, and held against the price of
    those steps alone, for one image.
    """
    experiment = Experiment(recipe, None, data)
    plan = experiment.plan
    if plan is None or plan.config.unit == "site":
        raise RecipeError(
            f"{recipe.name} makes no claim that canaries among the images could refute; give it privacy with unit "
            "image or patient"
        )
    site = max(plan.jobs, key=lambda name: _claimed_epsilon(plan, name, _count_rounds(plan, name)))
    examples, network = experiment.sites[site].train, network_of_site(experiment, site)
    shape = examples.batch(examples.labels.new_zeros(1))[0].shape[1:]
    job = _private_job(rehearse_round(experiment.algorithm, experiment.federation, site, network, shape)[0], plan)
    played = min(rounds or _count_rounds(plan, site), _count_rounds(plan, site))
    return site, run_audit(
        network.module,
        examples,
        job.training,
        rounds=played,
        delta=plan.config.delta,
        claimed=_claimed_epsilon(plan, site, played),
        stream=Stream(recipe.seed, ("audit",)),
        canaries=canaries,
        confidence=confidence,
        whole=job.full_batch,
        device=network.device,
    )


def network_of_site(experiment: Experiment, site: SiteId) -> LiveNetwork:
    """What a site trains: its cluster's network, where there are clusters."""
    algorithm = experiment.algorithm
    return experiment.networks.by_cluster[algorithm.cluster_of(algorithm.init(experiment.federation), site)]


def attack_members(recipe: Recipe, data: Path | None, site: SiteId, shadows: int) -> MembershipResult:
    """LiRA on one site: models trained on random halves of its images as it would train in all its rounds."""
    experiment = Experiment(recipe, None, data)
    plan, examples = experiment.plan, experiment.sites[site].train
    assert plan is not None
    network, training = network_of_site(experiment, site), experiment.algorithm.training
    start = copy_module_weights(network.module)
    assert isinstance(examples, Selection)

    def train(members: NDArray[np.intp], stream: Stream) -> Floats:
        part, weights = examples.subset(torch.from_numpy(members)), start
        for number in range(1, _count_rounds(plan, site) + 1):
            here = Site(site, len(part), number, recipe.rounds, training.optimiser.lr)
            job = Fit(weights, task_loss, training)
            weights = fit(job, network, part, here, stream, stream.child("secret", number)).weights
        found = score(Score(weights, predict_probabilities), network, examples)
        sure: Floats = found["probabilities"].gather(1, found["labels"][:, None]).squeeze(1).double().cpu().numpy()
        return sure.clip(0.0, 1.0)

    return attack_membership(train, len(examples), Stream(recipe.seed, ("membership",)), shadows)


def audit_sentences(told: Mapping[str, Any]) -> list[str]:
    return [f"{told['site']}: {told['verdict']}", *([told["membership"]] if "membership" in told else [])]


def save_audit(folder: Path, told: Mapping[str, Any]) -> None:
    """Enter an audit into a finished run's result and privacy page."""
    summary = read_result(folder).summary
    summary["privacy"]["audit"] = dict(told)
    write_atomically(folder / "privacy.md", write_privacy_page(summary).encode())
    write_json(folder / "result.json", summary)


def _private_job(jobs: tuple[Fit, ...], plan: PrivacyPlan) -> Fit:
    first = jobs[0]
    return replace(first, training=replace(first.training, private=plan.private_options()))


def _count_rounds(plan: PrivacyPlan, site: SiteId) -> int:
    return sum(site in cohort for cohort in plan.rounds)


def _claimed_epsilon(plan: PrivacyPlan, site: SiteId, rounds: int) -> float:
    """ε of the first training job of so many rounds, for one image."""
    job = plan.jobs[site][0]
    return plan.epsilon_of([Spend(plan.noise, job.rate, job.times * rounds)])
