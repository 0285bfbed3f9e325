"""The networks of a run: one for all sites or one for each cluster, and the server's student."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.algorithms.wrappers.clustered import Clustered
from polyclinic.algorithms.wrappers.curriculum import wrap_with_curriculum
from polyclinic.algorithms.wrappers.ensemble import Ensemble
from polyclinic.config.capability import available_memory, capability_score, find_cluster, site_profile, training_memory
from polyclinic.config.recipe import ModelSection, Recipe
from polyclinic.core import STUDENT, Bundle, DataError, EngineError, RecipeError, SiteId, Stream, WeightsError
from polyclinic.data.data_dir import in_data_folder
from polyclinic.data.examples import Images, SiteData
from polyclinic.evaluation.flops import count_parameters, training_step_flops
from polyclinic.evaluation.summary import ModelSize
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import cut_after, enable_checkpointing, replace_batch_norm
from polyclinic.models.scattering import find_fixed_features
from polyclinic.models.weights.load import adopt_weights, download_weights, load_weights
from polyclinic.runs.sites import FederatedDataset
from polyclinic.training.network import LiveNetwork, feature_shape, normalisation_names, with_auxiliary


def build_network(recipe: Recipe, dataset: FederatedDataset, data: Path | None = None) -> Classifier:
    """Return the recipe's network; its first weights come from the seed or a file (`data`: the data folder)."""
    return _build_model(recipe.model, dataset, Stream(recipe.seed, ("model",)), data)


def _build_model(
    model: ModelSection, dataset: FederatedDataset, seed: Stream, data: Path | None, cluster: str = ""
) -> Classifier:
    module = build_model(
        model.name,
        classes=len(dataset.classes),
        channels=dataset.channels,
        size=dataset.size,
        dropout=model.dropout,
        seed=seed,
    )
    if model.weights == "torchvision":
        adopt_weights(module, download_weights(model.name), "torchvision")
    elif model.weights is not None:
        _load_cluster_weights(module, in_data_folder(Path(model.weights), data), cluster)
    safe = replace_batch_norm(module) if model.norm == "group" else module
    if model.activation_checkpointing:
        enable_checkpointing(safe)
    return safe if model.split_after is None else cut_after(safe, model.split_after)


def _load_cluster_weights(module: Classifier, path: Path, cluster: str) -> None:
    """Load first weights; of a file of a run with clusters (`model@high/…`), the part under this cluster's name."""
    try:
        stored = load_file(path)
    except (SafetensorError, OSError):
        stored = {}  # `load_weights` reports any mistake in the file
    held = list(dict.fromkeys(found[1] for name in stored if (found := re.match("model@([^/]+)/", name))))
    if not held or any(name.startswith("model/") for name in stored):
        load_weights(module, path)
    elif cluster in held:
        kinds = (f"model@{cluster}/", f"head@{cluster}/", f"buffers@{cluster}/")  # head: the server's own
        part = {name.partition("/")[2]: tensor for name, tensor in stored.items() if name.startswith(kinds)}
        adopt_weights(module, part, f"cluster {cluster} of {path}")
    else:
        raise WeightsError(
            f"{path} holds a model for each of the clusters {', '.join(held)}; give it as clusters.NAME.model.weights "
            "to a cluster with one of these names."
        )


def without_weights(recipe: Recipe) -> Recipe:
    """Return the recipe without first weights and pretraining, for a process that receives weights."""

    def bare(model: ModelSection) -> ModelSection:
        return model.model_copy(update={"weights": None, "pretrain": None})

    clusters = {n: c.model_copy(update={"model": bare(c.model)}) for n, c in recipe.clusters.items()}
    return recipe.model_copy(update={"model": bare(recipe.model), "clusters": clusters})


def recipe_for_site(recipe: Recipe, device: str) -> Recipe:
    """Return the recipe for a site: computed on `device`, without first weights, public set and privacy ledger."""
    privacy = recipe.privacy and replace(recipe.privacy, ledger=None)
    engine = recipe.engine.model_copy(update={"device": device})
    return without_weights(recipe).model_copy(update={"privacy": privacy, "public": None, "engine": engine})


def device_of(recipe: Recipe) -> torch.device:
    wanted = recipe.engine.device
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise EngineError(f"the device {wanted!r} is not available; use --device cpu or --device auto") from None
    return device


@dataclass(frozen=True)
class Networks:
    """The networks of a run by cluster. Without clusters there is one, named ""."""

    recipe: Recipe
    by_cluster: Mapping[str, LiveNetwork]
    student: LiveNetwork | None
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each network's features of one image."""

    def cluster_of(self, site: SiteId, round: int) -> str:
        """Return the cluster of a site in a round."""
        capability, period = self.recipe.capability, self.recipe.capability.period_of_round(round)
        profile = site_profile(capability, site, period, Stream(self.recipe.seed))
        return find_cluster(capability_score(profile, capability.weights), self.recipe.thresholds)

    def wrap_algorithm(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with the recipe's curriculum, clusters or ensemble around it."""
        algorithm = wrap_with_curriculum(algorithm, self.recipe.evaluate.forgetting)
        if not self.recipe.clusters:
            return Ensemble(algorithm.training, inner=algorithm) if self.recipe.ensemble else algorithm
        return Clustered(
            algorithm.training,
            inner=algorithm,
            initials={name: live.copy_weights() for name, live in self.by_cluster.items()},
            norms={name: normalisation_names(live.module) for name, live in self.by_cluster.items()},
            shapes=self.shapes,
            cluster_schedule=self.cluster_of,
            rates={name: section.lr_scale for name, section in self.recipe.clusters.items()},
        )

    @property
    def have_buffers(self) -> bool:
        """Whether a site's network has tensors that are not trained, such as running means."""
        return any(live.copy_weights()["buffers"] for live in self.by_cluster.values())

    @property
    def first(self) -> LiveNetwork:
        return next(iter(self.by_cluster.values()))

    @property
    def with_student(self) -> dict[str, LiveNetwork]:
        return {**self.by_cluster, **({STUDENT: self.student} if self.student else {})}

    def model_sizes(self, batch: Sequence[int]) -> ModelSize:
        """Parameters and cost of a training step on a `batch` of this shape, in all and by cluster."""
        found: dict[str, ModelSize] = {}
        for cluster, live in self.by_cluster.items():
            live.require_gradients(live.trainable_names(self.recipe.training.fine_tune, ()))
            found[cluster] = ModelSize(
                name=_model_section(self.recipe, cluster).name,
                parameters=count_parameters(live.module),
                flops_per_step=training_step_flops(live.module, batch),
            )
        if not self.recipe.clusters:
            return found[""]
        return ModelSize(
            name=" + ".join(dict.fromkeys(size.name for size in found.values())),
            parameters=sum(size.parameters for size in found.values()),
            flops_per_step=sum(size.flops_per_step for size in found.values()),
            clusters=found,
        )

    def cluster_members(self, sites: Mapping[SiteId, object]) -> dict[str, list[SiteId]]:
        """Return the sites of each cluster in round 1."""
        clusters = {site: self.cluster_of(site, 1) for site in sites}
        return {name: [site for site in sites if clusters[site] == name] for name in self.recipe.clusters}


def build_networks(
    recipe: Recipe,
    dataset: FederatedDataset,
    module: Classifier,
    algorithm: Algorithm,
    device: torch.device,
    data: Path | None = None,
) -> Networks:
    """Build the networks of all clusters, with the auxiliary networks of `algorithm`.

    `module`: the recipe's own network, which all sites share if there are no clusters.
    """
    student = LiveNetwork(copy.deepcopy(module), device) if recipe.finish else None
    modules = {
        name: _build_model(section.model, dataset, Stream(recipe.seed, ("model", name)), data, name)
        for name, section in recipe.clusters.items()
    }
    networks = {name: LiveNetwork(own, device) for name, own in (modules or {"": module}).items()}
    blank = torch.zeros(1, dataset.channels, dataset.size, dataset.size)
    shapes = {name: feature_shape(live, blank) for name, live in networks.items()}
    for name, live in networks.items():
        networks[name] = with_auxiliary(
            live, algorithm.auxiliary, shapes[name], len(dataset.classes), Stream(recipe.seed, ("beside", name))
        )
    return Networks(recipe, networks, student, shapes)


def sites_on_device(
    recipe: Recipe, dataset: FederatedDataset, module: Classifier, device: torch.device
) -> tuple[dict[SiteId, SiteData], Images | None]:
    """Return the images of the sites and the held-out ones on `device`, or their features if these never change."""
    part = find_fixed_features(module)
    if part is not None and recipe.training.augment is None and not recipe.clusters:  # so computed once
        return dataset.with_features(part, device)
    return dataset.on_device(device), dataset.held_out


def _check_clusters(networks: Networks, dataset: FederatedDataset) -> None:
    recipe = networks.recipe
    for site in recipe.capability.profiles:
        if site not in dataset.sites:
            raise RecipeError(
                f"capability.profiles has {site!r:.60}, which is no site of this federation; there are: "
                f"{', '.join(list(dataset.sites)[:8])}"
            )
    for cluster, members in networks.cluster_members(dataset.sites).items():
        if not members:
            raise RecipeError(
                f"no site is in cluster {cluster!r}; lower its clusters.{cluster}.min_score, give sites other "
                "capability.profiles, or drop the cluster"
            )
        needed = training_memory(count_parameters(networks.by_cluster[cluster].module))
        for site in members:
            here = available_memory(site_profile(recipe.capability, site, 0, Stream(recipe.seed)))
            if here is not None and here < needed:
                raise RecipeError(
                    f"site {site} is in cluster {cluster!r}, whose {recipe.clusters[cluster].model.name} takes "
                    f"{needed / 1e9:.2g} GB to train, but has {here / 1e9:.2g} GB free; give the cluster a smaller "
                    "model, or raise its min_score"
                )


def check_recipe_fits_sites(networks: Networks, dataset: FederatedDataset) -> None:
    """Raise, before anything is trained, if the recipe does not fit the sites or nothing could be reported."""
    recipe, sites = networks.recipe, dataset.sites
    if recipe.clusters:
        _check_clusters(networks, dataset)
    if recipe.cohort is not None and recipe.cohort > len(sites):
        raise RecipeError(f"a cohort of {recipe.cohort} is asked of {len(sites)} sites; lower or drop cohort")
    if (recipe.quorum or 1) > len(sites):
        raise RecipeError(f"a quorum of {recipe.quorum} is asked of {len(sites)} sites; lower quorum")
    if dataset.held_out is None and not any(len(site.validation) + len(site.test) for site in sites.values()):
        raise DataError("No site has a validation or test image, so nothing could be reported; mend data.split.")
    for cluster, live in networks.by_cluster.items() if recipe.training.batch == 1 else ():
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in live.module.modules()):
            raise RecipeError(
                f"{_model_section(recipe, cluster).name} normalises over the batch, which one image cannot be; raise "
                "training.batch"
            )


def _model_section(recipe: Recipe, cluster: str) -> ModelSection:
    return recipe.clusters[cluster].model if cluster else recipe.model


def server_models(algorithm: Algorithm, state: Bundle, groups: Mapping[str, object]) -> dict[str, Bundle]:
    """Return the global models in the server's state, by cluster."""
    inner = algorithm.inner if isinstance(algorithm, Wrapper) else algorithm
    found = ((group, inner.models(algorithm.cluster_state(state, group), None)) for group in groups)
    return {group: models["global"] for group, models in found if "global" in models}
