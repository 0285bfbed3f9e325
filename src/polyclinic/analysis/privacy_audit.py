"""The audit of a recipe: attacks on its own privacy claim and on the membership of its images."""

import math
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.analysis.audit.listening import Recorder
from polyclinic.analysis.audit.play import CanaryRun, add_canaries
from polyclinic.analysis.audit.releases import check_metrics, check_releases, check_server_noise, check_update_clip
from polyclinic.analysis.audit.result import CANARY_SHARE, AuditResult, charged_kinds, epsilon_as_measured
from polyclinic.analysis.audit.weights import check_updates, check_weights, guess_members
from polyclinic.config.recipe import Recipe
from polyclinic.core import Fit, RecipeError, Score, Site, SiteId, Stream
from polyclinic.data.examples import Selection
from polyclinic.evaluation.metrics import Floats
from polyclinic.evaluation.summary import Audit
from polyclinic.privacy.gaussian_tests import GaussianTest
from polyclinic.privacy.membership import MembershipResult, attack_membership
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.reporting.privacy_statement import write_privacy_page
from polyclinic.runs.assemble import RunSetup
from polyclinic.runs.engines.choice import choose_engine
from polyclinic.runs.experiment import Experiment
from polyclinic.storage.files import write_atomically
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights


def audit_recipe(
    recipe: Recipe,
    data: Path | None = None,
    canaries: int = 1000,
    confidence: float = 0.95,
    rounds: int | None = None,
    engine: str | None = None,
    seed: int | None = None,
) -> AuditResult:
    """Attack the privacy claim of a recipe on the code that runs it.

    The first rounds are played with canaries at every site (unit site: with the images as they are), and everything
    that leaves a site is compared with what the plan charges: the noise that is really added, how far one member moves
    what is released, and what guesses about canaries prove.

    Args:
        recipe: A recipe with a privacy plan.
        data: The data folder (None: the one that POLYCLINIC_DATA names).
        canaries: The least number of planted examples.
        confidence: One minus the probability that an honest run is accused.
        rounds: The number of rounds to play (None: all that are planned).
        engine: The engine of a finished run (None: as the recipe says). Workers, Ray and Flower run the same code at a
            site as the engine `local`, which is attacked in their place.
        seed: The seed of coins and noise (None: 256 random bits).

    Returns:
        What was attacked, and what was found.
    """
    if not 0.5 <= confidence < 1:
        raise RecipeError(f"a confidence of {confidence} says nothing; choose 0.95, or another from 0.5 to below 1")
    if canaries < 100:
        raise RecipeError(f"{canaries} canaries can show next to nothing; take 1000 or more")
    setup = Experiment(recipe, None, data).setup
    chance = Stream(secrets.randbits(256) if seed is None else seed, ("audit",))
    return attack_claim(setup, chance, canaries, confidence, rounds, engine)


def attack_claim(
    setup: RunSetup,
    chance: Stream,
    canaries: int = 1000,
    confidence: float = 0.95,
    rounds: int | None = None,
    engine: str | None = None,
) -> AuditResult:
    """Attack the claim of a run that has been set up; `chance`: the source of coins and noise. See `audit_recipe`."""
    if setup.plan is None or not math.isfinite(setup.plan.epsilon):
        raise RecipeError(
            f"{setup.recipe.name} makes no claim to audit: without noise and a clip nothing is private; give "
            "privacy.epsilon"
        )
    run = add_canaries(setup, canaries, chance)
    plan, name = run.plan, attacked_engine(engine or setup.recipe.engine.name, run, chance)
    played = min(rounds or len(plan.rounds), len(plan.rounds))
    heard = run.play(name, chance.child("secret"), played)
    tests = _test_releases(run, heard, chance)
    site = max(heard.runners, key=lambda site: epsilon_as_measured(plan, site, played))
    return AuditResult(
        engine=name,
        stacked=heard.stacked,
        unit=plan.config.unit,
        sites=tuple(heard.runners),
        site=site,
        rounds=played,
        planned_rounds=len(plan.rounds),
        canaries=sum(map(len, run.members.values())),
        kinds=charged_kinds(plan),
        claimed=epsilon_as_measured(plan, site, played),
        measured=epsilon_as_measured(plan, site, played, tests),
        delta=plan.config.delta,
        confidence=confidence,
        tests=tuple(tests),
        canary_bound=guess_members(run, heard, played, 1 - CANARY_SHARE * (1 - confidence)) if run.members else None,
        no_guarantee_reason=plan.no_guarantee_reason,
    )


def attacked_engine(name: str, run: CanaryRun, chance: Stream) -> str:
    """Return the engine to attack for a run on engine `name`: `local` or `stacked`."""
    if name != "auto":
        return name if name == "stacked" else "local"
    setup = run.setup
    runners = setup.make_runners(RamMemory(), chance.child("choice"))
    state, options = setup.algorithm.init(setup.federation), setup.recipe.engine
    return choose_engine(runners, setup.algorithm, state, options.threads, setup.recipe.cohort).name


def _test_releases(run: CanaryRun, heard: Recorder, chance: Stream) -> list[GaussianTest]:
    """Test every kind of release that the plan charges, as far as there is an attack on it."""
    plan = run.plan
    runners = [runner for runner in heard.runners.values() if runner.was_visited]
    visited = max(runners, key=lambda runner: runner.masking.weight if runner.masking else 0.0)
    if plan.config.unit != "site":
        return [*check_weights(run, heard), *check_releases(visited, plan), *check_metrics(visited, plan)]
    clipped = check_update_clip(visited, plan)
    if plan.config.noise_at == "server":
        start = run.setup.algorithm.init(run.setup.federation)
        return [clipped, check_server_noise(plan, start, chance.child("server"))]
    return [clipped, *check_updates(plan, heard.updates, run.summands)]


def network_of_site(experiment: Experiment, site: SiteId) -> LiveNetwork:
    """Return the network that a site trains: that of its cluster, if there are clusters."""
    algorithm = experiment.setup.algorithm
    return experiment.setup.networks.by_cluster[algorithm.cluster_of(algorithm.init(experiment.setup.federation), site)]


def attack_members(recipe: Recipe, data: Path | None, site: SiteId, shadows: int) -> MembershipResult:
    """Run LiRA (Carlini et al. 2022) on one site.

    Each of `shadows` models is trained on a random half of the site's images, as the site trains in all its rounds.
    """
    experiment = Experiment(recipe, None, data)
    plan, examples = experiment.setup.plan, experiment.setup.sites[site].train
    assert plan is not None
    network, training = network_of_site(experiment, site), experiment.setup.algorithm.training
    start = copy_module_weights(network.module)
    assert isinstance(examples, Selection)

    def train(members: NDArray[np.intp], stream: Stream) -> Floats:
        part, weights = examples.subset(torch.from_numpy(members)), start
        for number in range(1, _count_rounds(plan, site) + 1):
            here = Site(site, len(part), number, recipe.rounds, training.optimiser.lr)
            secret = stream.child("secret", number)
            weights = fit(Fit(weights, task_loss, training), network, part, here, stream, secret).weights
        found = score(Score(weights, predict_probabilities), network, examples)
        sure: Floats = found["probabilities"].gather(1, found["labels"][:, None]).squeeze(1).double().cpu().numpy()
        return sure.clip(0.0, 1.0)

    return attack_membership(train, len(examples), Stream(recipe.seed, ("membership",)), shadows)


def engine_of_run(folder: Path) -> str:
    """Return the engine that a finished run had."""
    used = RunFolder(folder).read_summary().engine
    return used.name if used is not None else "local"


def save_audit(folder: Path, findings: Mapping[str, object]) -> None:
    """Add an audit's findings to the result and the privacy statement of a finished run."""
    files = RunFolder(folder)
    summary = files.read_summary()
    assert summary.privacy is not None
    privacy = summary.privacy.model_copy(update={"audit": Audit.model_validate(findings)})
    summary = summary.model_copy(update={"privacy": privacy})
    write_atomically(files.privacy_page, write_privacy_page(summary).encode())
    files.write_summary(summary)


def _count_rounds(plan: PrivacyPlan, site: SiteId) -> int:
    return sum(site in cohort for cohort in plan.rounds)
