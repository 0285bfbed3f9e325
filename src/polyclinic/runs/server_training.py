"""The server's own work on its public set: in every round, and when all rounds are over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyclinic.algorithms.base import Averaging
from polyclinic.algorithms.distillation.losses import Teacher
from polyclinic.algorithms.distillation.patch_attribution import attribute_patches
from polyclinic.algorithms.distillation.refine import RefinementResult, refine_student
from polyclinic.core.contract import Bundle, Fit, Fitted, Job, Score, Site, Stream, Tensors
from polyclinic.core.errors import RecipeError
from polyclinic.data.examples import SiteData
from polyclinic.evaluation.metrics import Predictions, finite_or_none, measure
from polyclinic.federation.site_runner import STUDENT
from polyclinic.reporting.teacher_figure import draw_teacher_maps
from polyclinic.runs.networks import Networks, server_models
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities


@dataclass(frozen=True)
class ServerTrainer:
    """A server with a public set, which it may look at as it likes."""

    algorithm: Averaging
    networks: Networks
    public: SiteData
    seed: int
    start: Bundle
    """Where a student begins: the recipe's own model as it was drawn."""

    def __call__(self, state: Bundle, site: Site) -> Bundle:
        """What the algorithm has it do after an aggregation."""
        site, rng = replace(site, examples=len(self.public.train)), Stream(self.seed, ("server", site.round))
        work = self.algorithm.server_step(state, site, rng)
        answer: Any = None
        while True:
            try:
                group, job = work.send(answer)
            except StopIteration as end:
                after: Bundle = end.value
                return after
            answer = self._run_job(group, job, site, rng.child(group))

    def _run_job(self, group: str, job: Job, site: Site, rng: Stream) -> Fitted | Tensors:
        network = self.networks.by_cluster[group]
        if isinstance(job, Fit):
            here = replace(site, lr=site.lr * self.algorithm.lr_scale(group))
            return fit(job, network, self.public.train, here, rng)
        return score(job, network, getattr(self.public, job.part))

    def check_usable(self, start: Bundle) -> None:
        """Refuse, before anything is trained, what would be in vain; `start`: the state before round 1."""
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
        """One student of all that the server has at the end."""
        options, student = self.networks.recipe.finish, self.networks.student
        assert options is not None
        assert student is not None
        rng = Stream(self.seed, ("finish",))
        return refine_student(self._make_teachers(state), student, self.start, self.public, options, rng)

    def draw_teachers(self, state: Bundle, classes: Sequence[str], path: Path) -> None:
        """Where each teacher looks, on some public training images."""
        maps = attribute_patches(self._make_teachers(state), self.public.train, Stream(self.seed, ("maps",)))
        draw_teacher_maps(maps.psi, maps.images, path, [classes[label] for label in maps.labels])

    def _make_teachers(self, state: Bundle) -> list[Teacher]:
        models = self._server_models(state).items()
        return [Teacher(group or "global", self.networks.by_cluster[group], weights) for group, weights in models]

    def evaluate_models(self, state: Bundle, student: Bundle | None) -> dict[str, Any]:
        """Every model of the server's on the public test images."""
        if not len(self.public.test):
            return {}
        models = {g: (self.networks.by_cluster[g], w) for g, w in self._server_models(state).items()}
        if student is not None and self.networks.student is not None:
            models[STUDENT] = self.networks.student, student
        found = {}
        for name, (network, weights) in models.items():
            rows = score(Score(weights, predict_probabilities), network, self.public.test)
            seen = Predictions(rows["probabilities"].double().cpu().numpy(), rows["labels"].cpu().numpy())
            found[name or "global"] = {"n": len(seen), **finite_or_none(measure(seen.probabilities, seen.labels))}
        return found

    def _server_models(self, state: Bundle) -> Mapping[str, Bundle]:
        return server_models(self.algorithm, state, self.networks.by_cluster)


def student_fields(refined: RefinementResult) -> dict[str, Any]:
    """What a result says of how the student came about."""
    return {
        "shapley": refined.shapley,
        "teacher_weights": refined.teacher_weights,
        "epochs": refined.epochs,
        "best": refined.best,
        "factor": refined.factor,
        "history": refined.history,
    }
