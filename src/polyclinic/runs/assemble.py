"""From a recipe and its images to everything that a run needs.

Used by `Experiment` for all sites at once, and by a real site (`deploy.site.participation`) for itself. All random
streams have the same names in both, so the bits are the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.distillation.refine import check_public
from polyclinic.algorithms.wrappers.clustered import Clustered
from polyclinic.config.recipe import Recipe
from polyclinic.core import POOLED, Bundle, Federation, Part, RecipeError, SiteId, Stream
from polyclinic.data.examples import Images, SiteData
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.robust.rules import check_site_count
from polyclinic.federation.secure_aggregation.assembly import (
    SiteIdentity,
    build_masking,
    check_sites,
    fix_threshold,
    mask_of,
    simulate_identities,
)
from polyclinic.federation.secure_aggregation.site import MaskingSite
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models.classifier import Classifier
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.worst_case import RunCost
from polyclinic.runs.networks import (
    Networks,
    build_network,
    build_networks,
    check_recipe_fits_sites,
    device_of,
    recipe_for_site,
    sites_on_device,
)
from polyclinic.runs.privacy_plan import bind_plan, placeholder_private, plan_transforms, privacy_limits, restore_noise
from polyclinic.runs.public_data import load_public
from polyclinic.runs.server_training import pretrain_networks
from polyclinic.runs.sites import FederatedDataset, pool_sites
from polyclinic.storage.messages import hash_tensors
from polyclinic.storage.site_memory import SiteMemory
from polyclinic.training.network import copy_module_weights, normalisation_names


@dataclass(frozen=True)
class RunSetup:
    """A run before its first round."""

    recipe: Recipe
    dataset: FederatedDataset
    module: Classifier
    """The recipe's own network, which all sites share unless there are clusters."""
    networks: Networks
    sites: dict[SiteId, SiteData]
    """With their images on the device; `pooled` is all of them in one place, for algorithms that need it."""
    held_out: Images | None
    """Test images that belong to no site, on the device."""
    public: SiteData | None
    """Images that the server may look at."""
    federation: Federation
    algorithm: Algorithm
    plan: PrivacyPlan | None = None
    transforms: tuple[UpdateTransform, ...] = ()
    """Applied to an update on its way out: first those of the privacy plan, then those of the recipe."""

    def make_runner(
        self, site: SiteId, memory: SiteMemory, secret: Stream | None, identity: SiteIdentity | None = None
    ) -> SiteRunner:
        """Return the runner of one site.

        `secret`: the source of its noise, under a privacy plan; `identity`: its keys, if the recipe masks updates.
        """
        mask = mask_of(self.transforms)
        masking: MaskingSite | None = None
        if mask is not None and identity is not None:
            parameters = sum(t.numel() for t in self.federation.initial["model"].values())
            examples = self.federation.sites[site]
            masking = build_masking(mask, identity, self.algorithm, examples, self.plan, parameters)
        if self.plan is not None and self.plan.config.randomness == "seed" and secret is not None:
            secret = secret.child(self.dataset.fingerprint_of(site))  # runs on other images must not share noise
        limits = privacy_limits(self.plan, site, secret) if self.plan is not None and secret is not None else None
        algorithm = self.algorithm
        if self.plan is not None and self.plan.private_options(site) != self.plan.private_options():
            algorithm = self.networks.wrap_algorithm(self.recipe.build_algorithm(self.plan.private_options(site)))
        transforms = [stage for stage in self.transforms if stage is not mask]
        networks = self.networks.with_student
        return SiteRunner(site, self.sites[site], algorithm, networks, memory, transforms, limits, masking)

    def make_runners(self, memory: SiteMemory, secret: Stream | None) -> dict[SiteId, SiteRunner]:
        """Return the runners of all sites, to run in this process; `secret`: the source of all their noise."""
        known = simulate_identities(self.recipe.seed, list(self.sites))
        return {
            site: self.make_runner(site, memory, secret and secret.child("site", site), known[site])
            for site in self.sites
        }


def assemble(
    recipe: Recipe,
    dataset: FederatedDataset,
    make_plan: Callable[[RunSetup], PrivacyPlan],
    data: Path | None = None,
    site: SiteId | None = None,
    run_sites: int | None = None,
) -> RunSetup:
    """Build networks, algorithm, privacy plan and transforms of a run; load the public set and pretrain on it if asked.

    `make_plan` prices the run, before its noise is known; it is called if the recipe has a `privacy` section. `data`:
    the data folder, for first weights and the public set. `site`: assemble the run for this site alone, which sees no
    other; `run_sites`: the number of the run's sites then.
    """
    device = device_of(recipe)
    dataset = dataset.limit_group(recipe.privacy.group if recipe.privacy is not None else None)
    private = placeholder_private(recipe.privacy) if recipe.privacy is not None else None
    module, algorithm = build_network(recipe, dataset, data), recipe.build_algorithm(private)
    networks = build_networks(recipe, dataset, module, algorithm, device, data)
    if site is None:
        check_recipe_fits_sites(networks, dataset)
    public = _load_public(recipe, dataset, data)
    pretrain_networks(networks, public, device)
    algorithm = networks.wrap_algorithm(algorithm)
    sites, held_out = sites_on_device(recipe, dataset, module, device)
    stages = fix_threshold(recipe.build_stages(), run_sites if site else len(sites), recipe.cohort)
    if site is None:
        check_sites(mask_of(stages), len(sites), recipe.cohort)
    if site is not None:
        sites = {site: sites[site]}
    elif algorithm.pooled:
        sites[POOLED] = pool_sites(sites)
    registered = {name: len(one.train) for name, one in sites.items()}
    held: dict[SiteId, dict[Part, int]] = {
        name: {"train": len(one.train), "validation": len(one.validation), "test": len(one.test)}
        for name, one in sites.items()
    }
    start = copy_module_weights(module) if recipe.clusters else networks.first.copy_weights()
    federation = Federation(
        dataset.classes, registered, start, normalisation_names(module), networks.shapes.get("", ()), held
    )
    setup = RunSetup(recipe, dataset, module, networks, sites, held_out, public, federation, algorithm)
    if recipe.privacy is None:
        return replace(setup, transforms=tuple(stages))
    plan = replace(make_plan(setup), masked=mask_of(stages) is not None)
    algorithm = networks.wrap_algorithm(recipe.build_algorithm(plan.private_options()))
    return replace(setup, plan=plan, algorithm=algorithm, transforms=(*plan_transforms(plan), *stages))


def price_plan(draft: RunSetup, folder: Path | None, earlier: tuple[RunCost, ...] = ()) -> PrivacyPlan:
    """Return the privacy plan of all sites; a run that resumes in `folder` keeps its noise."""
    assert draft.recipe.privacy is not None
    sites = {POOLED: draft.sites[POOLED]} if draft.algorithm.pooled else draft.sites
    rules, networks = round_options(draft.recipe, ""), draft.networks.by_cluster
    plan = bind_plan(draft.recipe.privacy, draft.algorithm, draft.federation, sites, networks, rules, earlier)
    return restore_noise(plan, folder)


def _load_public(recipe: Recipe, dataset: FederatedDataset, data: Path | None) -> SiteData | None:
    if recipe.public is None:
        return None
    shape = dataset.classes, dataset.channels, dataset.size
    sites = dataset.sites if recipe.privacy is None else None
    public = load_public(recipe.public, data, *shape, Stream(recipe.seed, ("public",)), sites, dataset.held_out)
    if recipe.finish is not None:
        check_public(public)
    return public


def initial_states(setup: RunSetup, sites: Mapping[SiteId, int]) -> dict[str, Bundle]:
    """Return the server's state before round 1 by cluster; `sites`: the run's sites and their training images.

    It depends on all sites' names, and on none's images.
    """
    networks, states = setup.networks, {}
    for cluster, live in networks.by_cluster.items():
        members = {site: n for site, n in sites.items() if not cluster or networks.cluster_of(site, 1) == cluster}
        federation = replace(
            setup.federation,
            sites=members or dict(sites),
            initial=live.copy_weights(),
            norms=normalisation_names(live.module),
            features=networks.shapes[cluster],
        )
        states[cluster] = inner_algorithm(setup.algorithm).init(federation)
    return states


def inner_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm that runs in each cluster."""
    return algorithm.inner if isinstance(algorithm, Clustered) else algorithm


def first_weights_digests(setup: RunSetup) -> dict[str, str]:
    """Return the SHA-256 of given first weights (`model.sha256` in a recipe), by cluster that has any.

    It is that of the kinds of tensors which round 1 brings to a site, and which the recipe's seed alone does not make.
    """
    models = setup.recipe.trained_models
    if not any(model.starts_elsewhere for model in models.values()):
        return {}
    bare = recipe_for_site(setup.recipe, setup.recipe.engine.device).model_copy(update={"privacy": None})
    sites = {site: len(one.train) for site, one in setup.dataset.sites.items()}
    seeded = assemble(bare, setup.dataset, make_no_plan, site=next(iter(sites)))
    given, own = (
        {
            cluster: inner_algorithm(made.algorithm).broadcast(state, next(iter(sites)))
            for cluster, state in initial_states(made, sites).items()
        }
        for made in (setup, seeded)
    )
    return {name: given_digest(given[name], own[name]) for name, model in models.items() if model.starts_elsewhere}


def make_no_plan(_: RunSetup) -> PrivacyPlan:
    raise AssertionError("a recipe without a privacy section has no plan")


def given_digest(given: Bundle, own: Bundle) -> str:
    """Return the SHA-256 of the kinds in `given` that differ from `own`, what the recipe's seed makes."""
    kinds = (kind for kind in given if hash_tensors({kind: given[kind]}) != hash_tensors({kind: own.get(kind, {})}))
    return hash_tensors({kind: given[kind] for kind in kinds})


def check_given_weights(recipe: Recipe, found: Mapping[str, str]) -> None:
    """Raise `RecipeError` if given first weights are not those that the recipe names.

    `found`: what `first_weights_digests` returned.
    """
    for cluster, digest in found.items():
        place, named = f"clusters.{cluster}.model" if cluster else "model", recipe.trained_models[cluster].sha256
        if named is not None and named != digest:
            raise RecipeError(
                f"{place}.sha256 is {named[:12]}…, but the first weights have {digest}; correct the file or the recipe"
            )


def check_round_size(recipe: Recipe, sites: int) -> None:
    """Raise `RecipeError` if a round of the recipe, played between so many sites, may be too small for `aggregate`."""
    check_site_count(recipe.aggregate, min(sites, recipe.quorum or sites, recipe.cohort or sites))


def round_options(recipe: Recipe, run_id: str) -> RoundOptions:
    """Return the rules of the round loop that the recipe gives; `run_id` is in every message of the run."""
    return RoundOptions(
        rounds=recipe.rounds,
        run=run_id,
        seed=recipe.seed,
        cohort=recipe.cohort,
        cohort_order=recipe.cohort_order,
        quorum=recipe.quorum or 1,
        schedule=recipe.schedule,
        early_stop=recipe.early_stop,
        evaluate_every=recipe.evaluate.every,
        snapshot_every=recipe.snapshot_every,
        max_norm=recipe.max_norm,
        aggregate=recipe.aggregate,
    )
