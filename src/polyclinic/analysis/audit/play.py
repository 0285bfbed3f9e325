"""A run with canaries among its images: the same sites, engine, jobs, sampling rates and steps."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyclinic.algorithms.base import Algorithm
from polyclinic.analysis.audit.canaries import CanaryExamples, add_seats
from polyclinic.analysis.audit.listening import ListeningRunner, Recorder, TwinEngine
from polyclinic.core import POOLED, SiteId, Stream
from polyclinic.data.examples import SiteData
from polyclinic.federation.progress import Progress, RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.secure_aggregation.assembly import mask_of
from polyclinic.federation.server_state import canonical_layout
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.runs.assemble import RunSetup, price_plan, round_options
from polyclinic.runs.engines.choice import make_engine
from polyclinic.runs.networks import Networks
from polyclinic.runs.privacy_plan import placeholder_private, plan_transforms
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.network import LiveNetwork, copy_module_weights, normalisation_names

TWICE = 2
"""The first rounds, which are played with and without images."""
TINY = 1e-12
"""A δ for plans that are not asked for ε, far below one over any number of images."""


@dataclass(frozen=True)
class CanaryRun:
    """A run with canaries at every site that trains."""

    setup: RunSetup
    members: Mapping[SiteId, Tensor]
    """Which canaries take part, by the toss of a coin."""

    @property
    def plan(self) -> PrivacyPlan:
        assert self.setup.plan is not None
        return self.setup.plan

    @property
    def mask(self) -> Mask | None:
        """The stage by which sites share the noise of unit site. The integers are the same without masks, which would
        hide them from the attacker; None where sites do not share their noise.
        """
        found = mask_of(self.setup.transforms) if self.plan.releases_sums else None
        return found and replace(found, masks=False)

    @property
    def summands(self) -> int:
        """How many sites' updates must have the noise of the plan together."""
        return 1 if self.mask is None else self.mask.noise_summands

    def play(self, engine: str, secret: Stream, rounds: int) -> Recorder:
        """Play the first rounds on this engine, and return what was overheard. `secret`: the source of all noise."""
        setup, options = self.setup, self.setup.recipe.engine
        own = setup.make_runners(RamMemory(), secret)
        runners = {site: self._listening_runner(own[site]) for site in trainers(setup)}
        recorder = Recorder(runners)
        for site, runner in runners.items():
            runner.attach(recorder, blank_site(setup.sites[site]))
        inner = make_engine(engine, runners, 0, options.threads, options.compile)
        loop = Rounds(
            setup.federation,
            setup.algorithm,
            TwinEngine(inner, runners.values(), TWICE if self.members else 0),
            self._rules(),
            RamJournal(),
            transforms=[*plan_transforms(self.plan), *([self.mask] if self.mask else [])],
            peers=next((runner.masking.peers for runner in runners.values() if runner.masking), None),
        )
        state, progress = setup.algorithm.init(setup.federation), Progress()
        state = canonical_layout(state, state)
        with recorder.listen():
            for _ in range(rounds):
                state, progress = loop.play_round(state, progress)
        return recorder

    def _listening_runner(self, own: SiteRunner) -> ListeningRunner:
        """Return the same runner, overheard. What the recipe does to an update after the plan is left out, but for the
        sum among whose sites the noise of unit site is shared.
        """
        stages, masking = plan_transforms(self.plan), None
        if self.mask is not None and own.masking is not None:
            masking = replace(own.masking, options=self.mask)
        images, networks = own.images, own.networks
        return ListeningRunner(own.name, images, own.algorithm, networks, own.memory, stages, own.limits, masking)

    def _rules(self) -> RoundOptions:
        """Return the rules of the run, without evaluations; a site that fails ends the audit."""
        rules = round_options(self.setup.recipe, "audit")
        return replace(rules, evaluate_every=0, early_stop=None, quorum=rules.cohort or len(trainers(self.setup)))


def trainers(setup: RunSetup) -> list[SiteId]:
    return [POOLED] if setup.algorithm.pooled else [site for site in setup.sites if site != POOLED]


def blank_site(site: SiteData) -> SiteData:
    """Return a site with the same rows and not one image."""
    train = site.train
    return replace(site, train=replace(train, blank=True)) if isinstance(train, CanaryExamples) else site


def add_canaries(setup: RunSetup, canaries: int, coins: Stream) -> CanaryRun:
    """Return the run with at least so many canaries in all, shared out among the sites that train.

    Where images are many, canaries take the place of some. Otherwise every site grows by the same whole factor, and its
    batches with it: so the sampling rate and the number of steps remain (but for sites with one image more than full
    batches, which take one step more), and sites still stack.
    """
    plan = setup.plan
    assert plan is not None
    if plan.config.unit == "site":
        return CanaryRun(setup, {})
    sizes = {site: plan.site_sizes[site] for site in trainers(setup)}
    total = sum(size.examples for size in sizes.values())
    rows = {
        site: max(1, math.ceil(canaries * size.examples / total)) * _group(plan, site) for site, size in sizes.items()
    }
    factor = max(
        1 if 2 * rows[site] <= size.examples else 1 + math.ceil(rows[site] / size.examples)
        for site, size in sizes.items()
    )
    sites, members = dict(setup.sites), dict[SiteId, Tensor]()
    for site, size in sizes.items():
        group = _group(plan, site)
        count = -(-(rows[site] if factor == 1 else (factor - 1) * size.examples) // group)
        members[site] = torch.rand(count, generator=coins.child("coins", site).generator()) < 0.5
        own = factor * size.examples - count * group
        sites[site] = replace(
            setup.sites[site], train=CanaryExamples(setup.sites[site].train, members[site], own, group)
        )
    return CanaryRun(_rebuild(setup, sites, factor, max(map(len, members.values()))), members)


def _group(plan: PrivacyPlan, site: SiteId) -> int:
    """Return how many images a canary has: as many as the unit that the plan protects."""
    return plan.site_sizes[site].largest if plan.config.unit == "patient" else 1


def _rebuild(setup: RunSetup, sites: dict[SiteId, SiteData], factor: int, seats: int) -> RunSetup:
    """Return the set-up with other sites, seats in its networks, larger batches, and a plan of the same noise."""
    plan, recipe = setup.plan, setup.recipe
    assert plan is not None
    training = recipe.training
    if training.batch is not None:
        training = replace(training, batch=training.batch * factor)
    recipe = recipe.model_copy(update={"training": training})
    by_cluster = {
        name: _add_seats(live, seats, plan.config.clip_norm) for name, live in setup.networks.by_cluster.items()
    }
    networks = Networks(recipe, by_cluster, None, setup.networks.shapes)
    module = networks.first.module
    federation = replace(
        setup.federation,
        sites={site: len(one.train) for site, one in sites.items()},
        initial=copy_module_weights(module) if recipe.clusters else networks.first.copy_weights(),
        norms=normalisation_names(module),
    )
    draft = replace(setup, recipe=recipe, networks=networks, module=module, sites=sites, federation=federation)
    draft = replace(draft, algorithm=_build_algorithm(draft, None), plan=None)
    rebuilt = _reprice(draft, plan)
    return replace(draft, plan=rebuilt, algorithm=_build_algorithm(draft, rebuilt))


def _add_seats(live: LiveNetwork, seats: int, clip: float) -> LiveNetwork:
    auxiliary = copy.deepcopy(live.auxiliary_modules)
    return LiveNetwork(add_seats(live.module, seats, clip), live.device, dict(auxiliary.items()), live.task)


def _build_algorithm(setup: RunSetup, plan: PrivacyPlan | None) -> Algorithm:
    """Return the algorithm as `plan` has it train, or as it is priced."""
    assert setup.recipe.privacy is not None
    private = placeholder_private(setup.recipe.privacy) if plan is None else plan.private_options()
    return setup.networks.wrap_algorithm(setup.recipe.build_algorithm(private))


def _reprice(draft: RunSetup, plan: PrivacyPlan) -> PrivacyPlan:
    """Return the plan of the run with canaries: what is released of one unit, at the noise of the original plan."""
    given = replace(
        plan.config, noise=1.0, epsilon=None, noise_per_site=None, delta=TINY, ledger=None, metrics="suppress"
    )
    priced = price_plan(replace(draft, recipe=draft.recipe.model_copy(update={"privacy": given})), None)
    return replace(
        priced,
        config=plan.config,
        noise=plan.noise,
        site_noise=plan.site_noise,
        metrics_noise=plan.metrics_noise,
        max_sites_per_record=plan.max_sites_per_record,
    )
