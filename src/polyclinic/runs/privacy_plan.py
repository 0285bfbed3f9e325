"""From a recipe's wish and a federation to a plan: what is there to protect, who takes part, what will be asked."""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from polyclinic.algorithms.base import Averaging
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.wrappers.ensemble import Ensemble
from polyclinic.core.contract import AUX_PREFIX, Examples, Federation, Private, SiteId, Stage, Stream
from polyclinic.core.errors import RecipeError, StoreError
from polyclinic.data.examples import Selection, SiteData
from polyclinic.federation.rehearsal import rehearse_round
from polyclinic.federation.rounds import Rules, draw_cohort
from polyclinic.federation.site_runner import SitePrivacyLimits
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.plan import (
    RELEASED,
    PrivacyConfig,
    PrivacyPlan,
    SiteSize,
    Steps,
    largest_groups,
    make_plan,
    steps_of,
)
from polyclinic.privacy.transforms.clip import Clip
from polyclinic.privacy.transforms.noise import Noise
from polyclinic.storage.run_files import write_atomically, write_json
from polyclinic.training.network import LiveNetwork


def bind_plan(
    config: PrivacyConfig,
    algorithm: Averaging,
    federation: Federation,
    sites: Mapping[SiteId, SiteData],
    trainers: Sequence[SiteId],
    networks: Mapping[str, LiveNetwork],
    rules: Rules,
    earlier: tuple[Spend, ...] = (),
) -> PrivacyPlan:
    """The plan of a run; `algorithm` as it would train privately, whatever the noise."""
    for group, network in networks.items():
        check_no_shared_statistics(network, algorithm, f"clusters.{group}.model" if group else "model")
    if config.at == "server" and len(networks) > 1:
        raise RecipeError("privacy.at: server noises one mean, and every cluster has its own; set privacy.at: site")
    if config.at == "server" and isinstance(algorithm, Ensemble):
        raise RecipeError("privacy.at: server shows the server every model as it is, and ensemble keeps them; drop one")
    if config.at == "server" and type(algorithm).aggregate is not FedAvg.aggregate:
        raise RecipeError(
            "privacy.at: server needs an algorithm whose server takes a weighted mean, as fedavg and fedprox do; "
            "choose one of them, or privacy.at: site"
        )
    sent = algorithm.exchanges
    if config.unit == "site" and (any(e.kind not in (*RELEASED, "buffers") or e.optional for e in sent) or not sent):
        raise RecipeError(
            "privacy.unit: site clips and noises a site's whole update of the model, and this algorithm sends more, or "
            "at other times; choose fedavg, fedprox, fednova or fedcycle, or try privacy.unit: image"
        )
    holdings = {name: _site_profile(sites[name]) for name in trainers}
    jobs: dict[SiteId, tuple[Steps, ...]] = {}
    models = 1
    if config.unit != "site":
        shape = _image_shape(sites[trainers[0]].train)
        group = algorithm.cluster_of(algorithm.init(federation), trainers[0])
        asked, models = rehearse_round(algorithm, federation, trainers[0], networks[group], shape)
        jobs = {name: tuple(steps_of(job, h.examples, config) for job in asked) for name, h in holdings.items()}
    held = max_sites_per_record({name: sites[name] for name in trainers}, config)
    return make_plan(
        PrivacyPlan(
            config,
            noise=1.0,
            rounds=tuple(tuple(draw_cohort(trainers, rules, r)) for r in range(1, rules.rounds + 1)),
            site_sizes=holdings,
            jobs=jobs,
            other_releases=algorithm.privacy_releases() if config.unit != "site" else {},
            max_sites_per_record=held,
            models=models,
            no_guarantee_reason=algorithm.no_guarantee_reason() if config.unit != "site" else "",
            earlier=earlier,
        )
    )


def placeholder_private(config: PrivacyConfig) -> Private | None:
    """What training is told before the noise is known."""
    return None if config.unit == "site" else Private(config.clip, 1.0, config.sampling, config.views)


def plan_transforms(plan: PrivacyPlan) -> list[Stage]:
    """What a site-level plan puts before a recipe's own stages."""
    wish = plan.config
    if wish.unit != "site":
        return []
    std = plan.noise * wish.clip if wish.at == "site" else 0.0
    return [Clip(wish.clip, RELEASED, std), *([Noise(std, RELEASED)] if wish.at == "site" else [])]


def privacy_limits(plan: PrivacyPlan, site: SiteId, secret: Stream) -> SitePrivacyLimits:
    return SitePrivacyLimits(
        secret,
        priced_jobs=tuple((step.rate, step.times) for step in plan.jobs.get(site, ())),
        min_noise=plan.noise,
        metrics_noise=plan.metrics_noise if plan.config.metrics == "count" else None,
        parts=() if plan.config.metrics == "suppress" else ("validation",),
        rounds=len(plan.rounds),
        allows_scores=bool(plan.other_releases or plan.no_guarantee_reason),
        seeded=plan.config.randomness == "seed",
    )


def write_noise(plan: PrivacyPlan, folder: Path) -> None:
    """A run that goes on keeps the noise it began with, whatever other runs have spent meanwhile."""
    write_json(folder / "plan.json", {"noise": plan.noise, "metrics_noise": plan.as_json()["metrics_noise"]})


def restore_noise(plan: PrivacyPlan, folder: Path | None) -> PrivacyPlan:
    if folder is None or not (folder / "plan.json").exists():
        return plan
    try:
        found = json.loads((folder / "plan.json").read_text())
        quiet = math.inf if found["metrics_noise"] is None else float(found["metrics_noise"])
        return replace(plan, noise=float(found["noise"]), metrics_noise=quiet)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{folder / 'plan.json'} is damaged ({error}); restore it or start anew elsewhere") from None


def noise_secret(config: PrivacyConfig, seed: int, folder: Path | None) -> Stream:
    """Where noise comes from: the seed, or 256 random bits that are kept in the run's folder and nowhere else."""
    if config.randomness == "seed":
        return Stream(seed, ("secret",))
    if folder is None:
        return Stream(secrets.randbits(256), ("secret",))
    path = folder / "secret"
    if not path.exists():
        if (folder / "ledger.jsonl").exists() and (folder / "ledger.jsonl").stat().st_size:
            raise StoreError(f"{path}, whence noise comes, is gone; restore it, or start anew in another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, secrets.token_hex(32).encode())
        path.chmod(0o600)
    try:
        return Stream(int(path.read_text(), 16), ("secret",))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}, whence noise comes, cannot be read ({error}); start anew elsewhere") from None


def check_no_shared_statistics(network: LiveNetwork, algorithm: Averaging, key: str = "model") -> None:
    """Layers through which one image touches what another becomes, or whose statistics would leave unprotected."""
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


def _image_shape(examples: Examples) -> Sequence[int]:
    """Of one image."""
    return examples.batch(torch.zeros(1, dtype=torch.int64))[0].shape[1:]


def _site_profile(site: SiteData) -> SiteSize:
    return SiteSize(len(site.train), largest_groups(site.train.patients), largest_groups(site.validation.patients))


def max_sites_per_record(sites: Mapping[SiteId, SiteData], config: PrivacyConfig) -> int:
    """On how many sites one unit is at most."""
    if config.unit == "site":
        return 1
    counts: Counter[object] = Counter()
    for site in sites.values():
        train = site.train
        if isinstance(train, Selection):
            counts.update(set(train.patients) if config.unit == "patient" and train.patients else train.rows.tolist())
    found = max(counts.values(), default=1)
    if config.holders is not None and config.holders < found:
        raise RecipeError(
            f"privacy.holders is {config.holders}, but one {config.unit} is at {found} sites of this federation; set "
            f"privacy.holders: {found} or leave it out"
        )
    return config.holders or found
