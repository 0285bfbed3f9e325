"""The server's own training on its public set: before round 1, after every aggregation, and after the last round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.distillation.losses import Teacher
from polyclinic.algorithms.distillation.patch_attribution import attribute_patches
from polyclinic.algorithms.distillation.refine import RefinementResult, refine_student
from polyclinic.core import STUDENT, Bundle, CurriculumOptions, Fit, RecipeError, Score, Site, Stream
from polyclinic.data.examples import SiteData
from polyclinic.evaluation.assessment import score_predictions
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.summary import PartScores
from polyclinic.evaluation.task import CLASSIFICATION
from polyclinic.federation.job_loop import JobLoop
from polyclinic.models.scattering import find_fixed_features
from polyclinic.reporting.teacher_figure import draw_teacher_maps
from polyclinic.runs.networks import Networks, server_models
from polyclinic.runs.sites import compute_features, map_part, site_on_device
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities, task_loss


@dataclass(frozen=True)
class ServerTrainer:
    """Trains and evaluates at the server, on its public set."""

    algorithm: Algorithm
    networks: Networks
    public: SiteData
    seed: int
    start: Bundle
    """The first weights of a student: those of the recipe's own model."""

    def __call__(self, state: Bundle, site: Site) -> Bundle:
        """Return the state after the algorithm's `server_step`, which follows an aggregation."""
        site, rng = replace(site, examples=len(self.public.train)), Stream(self.seed, ("server", site.round))
        jobs = JobLoop(self.algorithm.server_step(state, site, rng))
        for group, job in jobs:
            network = self.networks.by_cluster[group]
            if isinstance(job, Fit):
                here = replace(site, lr=site.lr * self.algorithm.lr_scale(group))
                jobs.result = fit(job, network, self.public.train, here, rng.child(group))
            else:
                jobs.result = score(job, network, getattr(self.public, job.part))
        return jobs.returned

    def check_usable(self, start: Bundle) -> None:
        """Raise, before training, if the server has no model or images to use; `start`: the state before round 1."""
        recipe = self.networks.recipe
        if recipe.evaluate.headline == "public" and not len(self.public.test):
            raise RecipeError(
                "evaluate.headline is public, but the public set has no test part; raise public.split.test"
            )
        if self._server_models(start):
            return
        instead = "choose an algorithm that leaves it one, as fedavg and pfedcdp do"
        if recipe.finish is not None:
            raise RecipeError(
                f"{recipe.algorithm.name} leaves the server no model for a student to learn from; set finish: null, "
                f"or {instead}"
            )
        if recipe.evaluate.headline == "public":
            raise RecipeError(
                f"evaluate.headline is public, but {recipe.algorithm.name} leaves the server no model to try on public "
                f"images; set evaluate.headline: null, or {instead}"
            )

    def train_student(self, state: Bundle) -> RefinementResult:
        """Train one student on the server's final models."""
        options, student = self.networks.recipe.finish, self.networks.student
        assert options is not None
        assert student is not None
        return refine_student(
            self._make_teachers(state), student, self.start, self.public, options, Stream(self.seed, ("finish",))
        )

    def draw_teachers(self, state: Bundle, classes: Sequence[str], path: Path) -> None:
        """Draw each teacher's patch attributions on some public training images."""
        maps = attribute_patches(self._make_teachers(state), self.public.train, Stream(self.seed, ("maps",)))
        draw_teacher_maps(maps.psi, maps.images, path, [classes[label] for label in maps.labels])

    def _make_teachers(self, state: Bundle) -> list[Teacher]:
        return [
            Teacher(group or "global", self.networks.by_cluster[group], weights)
            for group, weights in self._server_models(state).items()
        ]

    def evaluate_models(self, state: Bundle, student: Bundle | None) -> dict[str, PartScores]:
        """Return the scores of all models of the server on the public test images."""
        if not len(self.public.test):
            return {}
        models = {g: (self.networks.by_cluster[g], w) for g, w in self._server_models(state).items()}
        if student is not None and self.networks.student is not None:
            models[STUDENT] = self.networks.student, student
        found = {}
        for name, (network, weights) in models.items():
            rows = score(Score(weights, predict_probabilities), network, self.public.test)
            seen = Predictions(rows["probabilities"].double().cpu().numpy(), rows["labels"].cpu().numpy())
            found[name or "global"] = score_predictions(CLASSIFICATION, seen)
        return found

    def _server_models(self, state: Bundle) -> Mapping[str, Bundle]:
        return server_models(self.algorithm, state, self.networks.by_cluster)


def pretrain_networks(networks: Networks, public: SiteData | None, device: torch.device) -> None:
    """Train every network that asks for it (`model.pretrain` epochs) on public images, as the recipe trains."""
    recipe = networks.recipe
    sections = {name: cluster.model for name, cluster in recipe.clusters.items()} or {"": recipe.model}
    if public is None or not any(section.pretrain for section in sections.values()):
        return
    images = site_on_device(public, device, {}).train
    server = Site("server", len(images), 1, 1, recipe.training.optimiser.lr)
    training = replace(recipe.training, steps=None, first_epochs=None, curriculum=CurriculumOptions(), private=None)
    for name, network in networks.by_cluster.items():
        if sections[name].pretrain is not None:
            fixed = find_fixed_features(network.module) if training.augment is None else None
            seen = images if fixed is None else map_part(images, partial(compute_features, part=fixed))
            job = Fit(network.copy_weights(), task_loss, replace(training, epochs=sections[name].pretrain))
            network.load_weights(fit(job, network, seen, server, Stream(recipe.seed, ("pretrain", name))).weights)
