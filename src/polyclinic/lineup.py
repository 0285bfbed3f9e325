"""Who computes with what: one network for all sites, or one for every cluster of them; and the server's student."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from polyclinic.algorithms.averaging import Averaging
from polyclinic.capability import card_of, cluster_of, needs_memory, room, score
from polyclinic.clustered import Clustered
from polyclinic.consortium import Consortium
from polyclinic.core import Bundle, SiteId, Stream
from polyclinic.data.folder import in_data_folder
from polyclinic.errors import DataError, EngineError, RecipeError
from polyclinic.flops import parameters
from polyclinic.learning.network import LiveNetwork, norm_names, weights_of
from polyclinic.models import adopt_weights, build, download_weights, load_weights
from polyclinic.models.classifier import Classifier
from polyclinic.models.dp_safe import dp_safe
from polyclinic.recipe import ModelSection, Recipe
from polyclinic.runner import STUDENT


def network_of(recipe: Recipe, consortium: Consortium, data: Path | None = None) -> Classifier:
    """The recipe's network, its first weights from the seed or from a file (in the data folder, or here)."""
    return _built(recipe.model, consortium, Stream(recipe.seed, ("model",)), data)


def _built(model: ModelSection, consortium: Consortium, seed: Stream, data: Path | None) -> Classifier:
    module = build(
        model.name,
        classes=len(consortium.classes),
        channels=consortium.channels,
        size=consortium.size,
        dropout=model.dropout,
        seed=seed,
    )
    if model.norm == "group" and model.weights is None:
        return dp_safe(module)
    if model.weights == "torchvision":
        adopt_weights(module, download_weights(model.name), "torchvision")
    elif model.weights is not None:
        load_weights(module, in_data_folder(Path(model.weights), data))
    return dp_safe(module) if model.norm == "group" else module


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
class Lineup:
    """The networks of a run. Without clusters there is one, called ""."""

    recipe: Recipe
    networks: Mapping[str, LiveNetwork]
    student: LiveNetwork | None

    def seating(self, site: SiteId, round: int) -> str:
        """The cluster of a site in a round."""
        recipe = self.recipe
        period = recipe.capability.period(round)
        card = card_of(recipe.capability, site, period, Stream(recipe.seed))
        return cluster_of(score(card, recipe.capability.weights), recipe.thresholds)

    def around(self, algorithm: Averaging) -> Averaging:
        """The algorithm itself, or one that plays it in every cluster."""
        if not self.recipe.clusters:
            return algorithm
        initials: dict[str, Bundle] = {name: weights_of(live.module) for name, live in self.networks.items()}
        return Clustered(
            algorithm.training,
            inner=algorithm,
            initials=initials,
            norms={name: norm_names(live.module) for name, live in self.networks.items()},
            seating=self.seating,
            rates={name: section.lr for name, section in self.recipe.clusters.items()},
        )

    @property
    def all(self) -> dict[str, LiveNetwork]:
        return {**self.networks, **({STUDENT: self.student} if self.student else {})}

    def members(self, sites: Mapping[SiteId, object]) -> dict[str, list[SiteId]]:
        """Who is in which cluster in round 1."""
        found: dict[str, list[SiteId]] = {name: [] for name in self.recipe.clusters}
        for site in sites:
            found[self.seating(site, 1)].append(site)
        return found


def line_up(
    recipe: Recipe, consortium: Consortium, module: Classifier, device: torch.device, data: Path | None = None
) -> Lineup:
    """`module`: the recipe's own network, which all sites have if there are no clusters."""
    student = LiveNetwork(copy.deepcopy(module), device) if recipe.finish else None
    if not recipe.clusters:
        return Lineup(recipe, {"": LiveNetwork(module, device)}, student)
    networks = {
        name: LiveNetwork(_built(section.model, consortium, Stream(recipe.seed, ("model", name)), data), device)
        for name, section in recipe.clusters.items()
    }
    found = Lineup(recipe, networks, student)
    _refuse_misfits(found, consortium)
    return found


def _refuse_misfits(lineup: Lineup, consortium: Consortium) -> None:
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


def refuse_unplayable(lineup: Lineup, consortium: Consortium) -> None:
    """What cannot be played or would tell nothing, before anything is trained."""
    recipe, sites = lineup.recipe, consortium.sites
    if recipe.cohort is not None and recipe.cohort > len(sites):
        raise RecipeError(f"a cohort of {recipe.cohort} is asked of {len(sites)} sites; lower or drop cohort")
    if recipe.quorum > len(sites):
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
    inner = algorithm.inner if isinstance(algorithm, Clustered) else algorithm
    found = {group: inner.models(algorithm.share(state, group), None) for group in groups}
    return {group: models["global"] for group, models in found.items() if "global" in models}
