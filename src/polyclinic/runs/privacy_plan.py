"""The privacy plan of a run: from the recipe's privacy section, the sites and a dry run of the algorithm."""

import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.wrappers.ensemble import Ensemble
from polyclinic.config.identity import identity
from polyclinic.config.recipe import Recipe
from polyclinic.core import AUX_PREFIX, Federation, Private, RecipeError, SiteId, StoreError, Stream
from polyclinic.data.examples import Selection, SiteData
from polyclinic.data.patients import count_unnamed, max_images_per_patient
from polyclinic.evaluation.summary import PUBLIC_SEED
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rehearsal import rehearse_round
from polyclinic.federation.rounds import draw_cohort
from polyclinic.federation.site_limits import SitePrivacyLimits
from polyclinic.privacy.plan import (
    RELEASED,
    PrivacyConfig,
    PrivacyPlan,
    SiteSize,
    Steps,
    make_plan,
    private_options,
    steps_of,
)
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.transforms.clip import Clip
from polyclinic.privacy.transforms.noise import Noise
from polyclinic.privacy.worst_case import RunCost
from polyclinic.runs.networks import recipe_for_site
from polyclinic.storage.files import write_atomically, write_json
from polyclinic.storage.run_folder import RunFolder
from polyclinic.training.network import LiveNetwork


def bind_plan(
    config: PrivacyConfig,
    algorithm: Algorithm,
    federation: Federation,
    sites: Mapping[SiteId, SiteData],
    networks: Mapping[str, LiveNetwork],
    rules: RoundOptions,
    earlier: tuple[RunCost, ...] = (),
) -> PrivacyPlan:
    """Return the privacy plan of a run.

    `algorithm`: as it would train privately, with any noise; `sites`: those that train; `earlier`: what earlier runs on
    the same images have spent. Raises `RecipeError` where nothing can be guaranteed as the recipe asks.
    """
    for group, network in networks.items():
        check_no_shared_statistics(network, algorithm, f"clusters.{group}.model" if group else "model")
    if config.noise_at == "server" and len(networks) > 1:
        raise RecipeError(
            "privacy.noise_at: server adds noise to one mean, and every cluster has its own; set privacy.noise_at: site"
        )
    if config.noise_at == "server" and isinstance(algorithm, Ensemble):
        raise RecipeError(
            "privacy.noise_at: server shows the server every model without noise, and ensemble keeps them; drop one"
        )
    if config.noise_at == "server" and type(algorithm).aggregate is not FedAvg.aggregate:
        raise RecipeError(
            "privacy.noise_at: server needs an algorithm whose server takes a weighted mean, as fedavg and fedprox do; "
            "choose one of them, or privacy.noise_at: site"
        )
    sent = algorithm.exchanges()
    if config.unit == "site" and (any(e.kind not in (*RELEASED, "buffers") or e.optional for e in sent) or not sent):
        raise RecipeError(
            "privacy.unit: site clips and noises a site's whole update of the model, and this algorithm sends more, or "
            "at other times; choose fedavg, fedprox, fednova or fedcycle, or try privacy.unit: image"
        )
    sizes, first = {name: _site_size(site, config.group) for name, site in sites.items()}, next(iter(sites))
    jobs: dict[SiteId, tuple[Steps, ...]] = {}
    models = 1
    if config.unit != "site":
        shape = sites[first].train.batch(torch.zeros(1, dtype=torch.int64))[0].shape[1:]
        group = algorithm.cluster_of(algorithm.init(federation), first)
        asked, models = rehearse_round(algorithm, federation, first, networks[group], shape)
        jobs = {
            name: tuple(steps_of(job, h.examples, config, len(sizes)) for job in asked) for name, h in sizes.items()
        }
    return make_plan(
        PrivacyPlan(
            config,
            noise=1.0,
            rounds=tuple(tuple(draw_cohort(list(sites), rules, r)) for r in range(1, rules.rounds + 1)),
            site_sizes=sizes,
            jobs=jobs,
            other_releases=algorithm.privacy_releases() if config.unit != "site" else {},
            max_sites_per_record=max_sites_per_record(sites, config),
            models=models,
            no_guarantee_reason=algorithm.no_guarantee_reason() if config.unit != "site" else "",
            earlier=earlier,
        )
    )


def placeholder_private(config: PrivacyConfig) -> Private | None:
    """Return the DP-SGD options of a dry run, before the noise is known."""
    return None if config.unit == "site" else private_options(config, 1.0)


def plan_transforms(plan: PrivacyPlan) -> list[UpdateTransform]:
    """Return the transforms of a plan for unit site, which come before the recipe's own.

    Behind masks each site adds its share of the noise to the integers that are masked
    (`federation.secure_aggregation.assembly`).
    """
    config = plan.config
    if config.unit != "site":
        return []
    if plan.masked:
        return [Clip(config.clip_norm, RELEASED)]
    std = plan.noise * config.clip_norm if config.noise_at == "site" else 0.0
    return [Clip(config.clip_norm, RELEASED, std), *([Noise(std, RELEASED)] if config.noise_at == "site" else [])]


def privacy_limits(plan: PrivacyPlan, site: SiteId, secret: Stream) -> SitePrivacyLimits:
    return SitePrivacyLimits(
        secret,
        priced_jobs=tuple((step.rate, step.times) for step in plan.jobs.get(site, ())),
        min_noise=plan.noise_of(site),
        unit="patient" if plan.samples_patients(site) else "image",
        metrics_noise=plan.metrics_noise if plan.config.metrics == "count" else None,
        parts=() if plan.config.metrics == "suppress" else ("validation",),
        rounds=len(plan.rounds),
        allows_scores=bool(plan.other_releases) or plan.no_guarantee_reason not in ("", PUBLIC_SEED),
        seeded=plan.config.randomness == "seed",
    )


def write_noise(plan: PrivacyPlan, folder: Path) -> None:
    """Keep the noise of the plan for a resume, whatever other runs spend in the meantime."""
    kept = plan.as_json()
    write_json(folder / "plan.json", {name: kept[name] for name in ("noise", "site_noise", "metrics_noise")})


def restore_noise(plan: PrivacyPlan, folder: Path | None) -> PrivacyPlan:
    if folder is None or not (folder / "plan.json").exists():
        return plan
    try:
        found = json.loads((folder / "plan.json").read_text())
        quiet = math.inf if found["metrics_noise"] is None else float(found["metrics_noise"])
        site_noise = {str(site): float(noise) for site, noise in found["site_noise"].items()}
        return replace(plan, noise=float(found["noise"]), site_noise=site_noise, metrics_noise=quiet)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{folder / 'plan.json'} is damaged ({error}); restore it or start anew elsewhere") from None


def noise_secret(recipe: Recipe, folder: Path | None) -> Stream:
    """Return the source of noise: 256 random bits that are stored in the run's folder only.

    With `privacy.randomness: seed` it is the seed, named by all that decides the rounds at a site, so that
    recipes that differ share no noise. A site adds the fingerprint of its images (`RunSetup.make_runner`).
    """
    assert recipe.privacy is not None
    if recipe.privacy.randomness == "seed":
        terms = identity(recipe_for_site(recipe, "cpu"))
        return Stream(recipe.seed, ("secret", hashlib.sha256(terms.encode()).hexdigest()))
    if folder is None:
        return Stream(secrets.randbits(256), ("secret",))
    files = RunFolder(folder)
    path = files.secret
    if not path.exists():
        if files.ledger_file.exists() and files.ledger_file.stat().st_size:
            raise StoreError(
                f"{path}, whence noise comes, is gone, as it is when a run has ended; start anew in another folder, as "
                "a run of its own"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(32).encode(), mode=0o600)
    try:
        return Stream(int(path.read_text(), 16), ("secret",))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}, whence noise comes, cannot be read ({error}); start anew elsewhere") from None


def check_no_shared_statistics(network: LiveNetwork, algorithm: Algorithm, key: str = "model") -> None:
    """Refuse layers that mix the images of a batch, or whose statistics would leave without protection."""
    moving = network.trainable_names(algorithm.training.fine_tune, ())
    for name, layer in network.named_layers():
        tracks = getattr(layer, "track_running_stats", False)
        trained = any(f"{name}.{own}" in moving for own, _ in layer.named_parameters(recurse=False))
        if isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.InstanceNorm2d) and tracks and trained:
            if name.startswith(AUX_PREFIX):
                raise RecipeError(
                    f"{name}, of a network that this algorithm trains beside the model, is {type(layer).__name__}, "
                    "whose statistics no plan protects; leave privacy out, or choose another algorithm"
                )
            raise RecipeError(
                f"{name} is {type(layer).__name__}, which mixes the images of a batch and keeps their statistics, so "
                f"no image could be protected by itself; set {key}.norm: group (dp_safe puts GroupNorm in its place), "
                "or train only layers behind it with training.fine_tune"
            )


def _site_size(site: SiteData, group: int | None) -> SiteSize:
    """Count a site's images. `group`: the declared bound on the images of a patient who is not named."""
    parts = site.train, site.validation, site.test
    unnamed = [count_unnamed(part) for part in parts]
    largest = [max(max_images_per_patient(part), (group or 1) if unnamed[n] else 1) for n, part in enumerate(parts)]
    return SiteSize(
        len(site.train), largest[0], largest[1], unnamed[0], unnamed[1], site.left_out, largest[2], unnamed[2]
    )


def max_sites_per_record(sites: Mapping[SiteId, SiteData], config: PrivacyConfig) -> int:
    """Return the largest number of sites that hold the same unit; raises if the recipe declares fewer."""
    if config.unit == "site":
        return 1
    counts: Counter[object] = Counter()
    for site in sites.values():
        train = site.train
        if isinstance(train, Selection):
            counts.update(set(train.patients) if config.unit == "patient" and train.patients else train.rows.tolist())
    found = max(counts.values(), default=1)
    if config.max_sites_per_record is not None and config.max_sites_per_record < found:
        raise RecipeError(
            f"privacy.max_sites_per_record is {config.max_sites_per_record}, but one {config.unit} is at {found} sites "
            f"of this federation; set privacy.max_sites_per_record: {found} or leave it out"
        )
    return config.max_sites_per_record or found
