"""Who computes with what: one network for all sites, or one for every cluster of them; and the server's student."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from polyclinic.algorithms.base import Averaging
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.algorithms.wrappers.clustered import Clustered
from polyclinic.algorithms.wrappers.curriculum import ordered
from polyclinic.algorithms.wrappers.ensemble import Ensemble
from polyclinic.config.capability import card_of, cluster_of, needs_memory, room, score
from polyclinic.config.recipe import ModelSection, Recipe
from polyclinic.core.contract import Bundle, SiteId, Stream
from polyclinic.core.errors import DataError, EngineError, RecipeError, WeightsError
from polyclinic.data.data_dir import in_data_folder
from polyclinic.data.examples import Images, SiteData
from polyclinic.evaluation.flops import parameters, training_step_flops
from polyclinic.federation.site_runner import STUDENT
from polyclinic.models import adopt_weights, build, download_weights, load_weights
from polyclinic.models.activation_checkpointing import recompute
from polyclinic.models.classifier import Classifier
from polyclinic.models.group_norm import dp_safe
from polyclinic.models.scattering import fixed_part
from polyclinic.models.split_point import cut_after
from polyclinic.runs.sites import FederatedDataset
from polyclinic.training.auxiliary import with_auxiliary
from polyclinic.training.network import LiveNetwork, feature_shape, norm_names


def network_of(recipe: Recipe, consortium: FederatedDataset, data: Path | None = None) -> Classifier:
    """The recipe's network, its first weights from the seed or from a file (in the data folder, or here)."""
    return _built(recipe.model, consortium, Stream(recipe.seed, ("model",)), data)


def _built(
    model: ModelSection, consortium: FederatedDataset, seed: Stream, data: Path | None, cluster: str = ""
) -> Classifier:
    module = build(
        model.name,
        classes=len(consortium.classes),
        channels=consortium.channels,
        size=consortium.size,
        dropout=model.dropout,
        seed=seed,
    )
    if model.weights == "torchvision":
        adopt_weights(module, download_weights(model.name), "torchvision")
    elif model.weights is not None:
        _load(module, in_data_folder(Path(model.weights), data), cluster)
    safe = dp_safe(module) if model.norm == "group" else module
    if model.checkpoint:
        recompute(safe)
    return safe if model.cut is None else cut_after(safe, model.cut)


def _load(module: Classifier, path: Path, cluster: str) -> None:
    """From a run of clusters, whose file has each one's as `model@high/…`, a cluster takes the part under its name."""
    try:
        stored = load_file(path)
    except (SafetensorError, OSError):
        stored = {}  # what is wrong with the file is told as of any other
    held = list(dict.fromkeys(found[1] for name in stored if (found := re.match("model@([^/]+)/", name))))
    if not held or any(name.startswith("model/") for name in stored):
        load_weights(module, path)
    elif cluster in held:
        kinds = tuple(f"{kind}@{cluster}/" for kind in ("model", "head", "buffers"))  # head: the server's own
        part = {name.partition("/")[2]: tensor for name, tensor in stored.items() if name.startswith(kinds)}
        adopt_weights(module, part, f"cluster {cluster} of {path}")
    else:
        raise WeightsError(
            f"{path} holds a model for each of the clusters {', '.join(held)}; give it as clusters.NAME.model.weights "
            "to a cluster with one of these names."
        )


def weightless(recipe: Recipe) -> Recipe:
    """The recipe without where first weights come from, for those who are handed weights."""

    def bare(model: ModelSection) -> ModelSection:
        return model.model_copy(update={"weights": None, "pretrain": None})

    clusters = {n: c.model_copy(update={"model": bare(c.model)}) for n, c in recipe.clusters.items()}
    return recipe.model_copy(update={"model": bare(recipe.model), "clusters": clusters})


def at_site(recipe: Recipe, device: str) -> Recipe:
    """The recipe, to compute on `device`, without what is the server's alone: first weights, its images, its books."""
    wish = recipe.privacy and replace(recipe.privacy, ledger=None)
    engine = recipe.engine.model_copy(update={"device": device})
    return weightless(recipe).model_copy(update={"privacy": wish, "public": None, "engine": engine})


def device_of(recipe: Recipe) -> torch.device:
    wanted = recipe.engine.device
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise EngineError(f"the device {wanted!r} is not to be had here; use --device cpu or --device auto") from None
    return device


@dataclass(frozen=True)
class Networks:
    """The networks of a run. Without clusters there is one, called ""."""

    recipe: Recipe
    networks: Mapping[str, LiveNetwork]
    student: LiveNetwork | None
    shapes: Mapping[str, tuple[int, ...]]
    """Of what each network's extractor makes of an image."""

    def cluster_of(self, site: SiteId, round: int) -> str:
        """The cluster of a site in a round."""
        recipe = self.recipe
        period = recipe.capability.period(round)
        card = card_of(recipe.capability, site, period, Stream(recipe.seed))
        return cluster_of(score(card, recipe.capability.weights), recipe.thresholds)

    def wrap_algorithm(self, algorithm: Averaging) -> Averaging:
        """The algorithm itself, or one that plays it in every cluster, with its cases in the recipe's order."""
        algorithm = ordered(algorithm, self.recipe.evaluate.forgetting)
        if not self.recipe.clusters:
            return Ensemble(algorithm.training, inner=algorithm) if self.recipe.ensemble else algorithm
        initials: dict[str, Bundle] = {name: live.take() for name, live in self.networks.items()}
        return Clustered(
            algorithm.training,
            inner=algorithm,
            initials=initials,
            norms={name: norm_names(live.module) for name, live in self.networks.items()},
            shapes=self.shapes,
            seating=self.cluster_of,
            rates={name: section.lr for name, section in self.recipe.clusters.items()},
        )

    @property
    def all(self) -> dict[str, LiveNetwork]:
        return {**self.networks, **({STUDENT: self.student} if self.student else {})}

    def sizes(self, batch: Sequence[int]) -> dict[str, Any]:
        """What the networks weigh, and what a training step on a `batch` of this shape costs; by cluster too."""
        found: dict[str, dict[str, Any]] = {}
        for cluster, live in self.networks.items():
            live.require_gradients(live.trainable(self.recipe.training.fine_tune, ()))
            model = self.recipe.clusters[cluster].model if cluster else self.recipe.model
            cost = {"parameters": parameters(live.module), "flops_per_step": training_step_flops(live.module, batch)}
            found[cluster] = {"name": model.name, **cost}
        if not self.recipe.clusters:
            return found[""]
        sums = {key: sum(size[key] for size in found.values()) for key in ("parameters", "flops_per_step")}
        return {"name": " + ".join(dict.fromkeys(s["name"] for s in found.values())), **sums, "clusters": found}

    def members(self, sites: Mapping[SiteId, object]) -> dict[str, list[SiteId]]:
        """Who is in which cluster in round 1."""
        found: dict[str, list[SiteId]] = {name: [] for name in self.recipe.clusters}
        for site in sites:
            found[self.cluster_of(site, 1)].append(site)
        return found


def build_networks(
    recipe: Recipe, consortium: FederatedDataset, module: Classifier, device: torch.device, data: Path | None = None
) -> Networks:
    """`module`: the recipe's own network, which all sites have if there are no clusters."""
    student = LiveNetwork(copy.deepcopy(module), device) if recipe.finish else None
    modules = {
        name: _built(section.model, consortium, Stream(recipe.seed, ("model", name)), data, name)
        for name, section in recipe.clusters.items()
    }
    networks = {name: LiveNetwork(own, device) for name, own in (modules or {"": module}).items()}
    blank = torch.zeros(1, consortium.channels, consortium.size, consortium.size)
    shapes = {name: feature_shape(live, blank) for name, live in networks.items()}
    algorithm, classes = recipe.algorithm_of(), len(consortium.classes)
    for name, live in networks.items():
        networks[name] = with_auxiliary(live, algorithm, shapes[name], classes, Stream(recipe.seed, ("beside", name)))
    return Networks(recipe, networks, student, shapes)


def sites_on_device(
    recipe: Recipe, consortium: FederatedDataset, module: Classifier, device: torch.device
) -> tuple[dict[SiteId, SiteData], Images | None]:
    """Sites' and held-out images where they are computed with, or what a fixed part of the network makes of them."""
    part = fixed_part(module)
    if part is not None and recipe.training.augment is None and not recipe.clusters:  # so computed once
        return consortium.through(part, device)
    return consortium.on(device), consortium.held_out


def _refuse_misfits(lineup: Networks, consortium: FederatedDataset) -> None:
    recipe = lineup.recipe
    for site in recipe.capability.cards:
        if site not in consortium.sites:
            raise RecipeError(
                f"capability.cards has {site!r:.60}, which is no site of this federation; there are: "
                f"{', '.join(list(consortium.sites)[:8])}"
            )
    for cluster, members in lineup.members(consortium.sites).items():
        if not members:
            raise RecipeError(
                f"no site is in cluster {cluster!r}; lower its clusters.{cluster}.at_least, give sites other "
                "capability.cards, or drop the cluster"
            )
        needed = needs_memory(parameters(lineup.networks[cluster].module))
        for site in members:
            here = room(card_of(recipe.capability, site, 0, Stream(recipe.seed)))
            if here is not None and here < needed:
                raise RecipeError(
                    f"site {site} is in cluster {cluster!r}, whose {recipe.clusters[cluster].model.name} takes "
                    f"{needed / 1e9:.2g} GB to train, but has {here / 1e9:.2g} GB free; give the cluster a smaller "
                    "model, or raise its at_least"
                )


def refuse_unplayable(lineup: Networks, consortium: FederatedDataset) -> None:
    """What cannot be played or would tell nothing, before anything is trained."""
    recipe, sites = lineup.recipe, consortium.sites
    if recipe.clusters:
        _refuse_misfits(lineup, consortium)
    if recipe.cohort is not None and recipe.cohort > len(sites):
        raise RecipeError(f"a cohort of {recipe.cohort} is asked of {len(sites)} sites; lower or drop cohort")
    if (recipe.quorum or 1) > len(sites):
        raise RecipeError(f"a quorum of {recipe.quorum} is asked of {len(sites)} sites; lower quorum")
    if consortium.held_out is None and not any(len(site.validation) + len(site.test) for site in sites.values()):
        raise DataError("No site has a validation or test image, so nothing could be reported; mend data.split.")
    norms = nn.modules.batchnorm._BatchNorm
    for cluster, live in lineup.networks.items() if recipe.training.batch == 1 else ():
        if any(isinstance(module, norms) for module in live.module.modules()):
            model = recipe.clusters[cluster].model if cluster else recipe.model
            raise RecipeError(
                f"{model.name} normalises over the batch, which one image cannot be; raise training.batch"
            )


def server_models(algorithm: Averaging, state: Bundle, groups: Mapping[str, object]) -> dict[str, Bundle]:
    """The models that are the server's own, by cluster."""
    inner = algorithm.inner if isinstance(algorithm, Wrapper) else algorithm
    found = {group: inner.models(algorithm.cluster_state(state, group), None) for group in groups}
    return {group: models["global"] for group, models in found.items() if "global" in models}
