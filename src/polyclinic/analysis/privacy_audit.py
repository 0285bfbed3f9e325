"""The audit of a recipe: attacks on its own privacy claim and on the membership of its images."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.config.recipe import Recipe
from polyclinic.core import Fit, RecipeError, Score, Site, SiteId, Stream
from polyclinic.data.examples import Selection
from polyclinic.evaluation.metrics import Floats
from polyclinic.evaluation.summary import Audit
from polyclinic.federation.rehearsal import rehearse_round
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.audit import AuditResult, run_audit
from polyclinic.privacy.membership import MembershipResult, attack_membership
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.reporting.privacy_statement import write_privacy_page
from polyclinic.runs.experiment import Experiment
from polyclinic.storage.files import write_atomically
from polyclinic.storage.run_folder import RunFolder
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights


def audit_recipe(
    recipe: Recipe, data: Path | None = None, canaries: int = 1000, confidence: float = 0.95, rounds: int | None = None
) -> tuple[SiteId, AuditResult]:
    """Attack the training of the site with the largest ε by canaries (Steinke, Nasr, Jagielski 2023).

    The attack is on the first training job of each round, with the task's loss. Its lower bound is compared with the ε
    of those steps alone, for one image.

    Args:
        recipe: A recipe with a privacy plan that protects images or patients.
        data: The data folder (None: the one that POLYCLINIC_DATA names).
        canaries: The number of planted examples. With more, a larger ε can be refuted.
        confidence: The confidence of the lower bound.
        rounds: The number of rounds to play (None: all that the plan gives the site).

    Returns:
        The site, and the result of the attack.
    """
    experiment = Experiment(recipe, None, data)
    plan = experiment.setup.plan
    if plan is None or plan.config.unit == "site":
        raise RecipeError(
            f"{recipe.name} makes no claim that canaries among the images could refute; give it privacy with unit "
            "image or patient"
        )
    site = max(plan.jobs, key=lambda name: _claimed_epsilon(plan, name, _count_rounds(plan, name)))
    examples, network = experiment.setup.sites[site].train, network_of_site(experiment, site)
    shape = examples.batch(examples.labels.new_zeros(1))[0].shape[1:]
    job = rehearse_round(experiment.setup.algorithm, experiment.setup.federation, site, network, shape)[0][0]
    played = min(rounds or _count_rounds(plan, site), _count_rounds(plan, site))
    return site, run_audit(
        network.module,
        examples,
        replace(job.training, private=plan.private_options()),
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


def _claimed_epsilon(plan: PrivacyPlan, site: SiteId, rounds: int) -> float:
    """Return ε of the first training job of each of `rounds` rounds, for one image."""
    job = plan.jobs[site][0]
    return plan.epsilon_of([Spend(plan.noise, job.rate, job.times * rounds)])
