"""The server's own work on its public set: in every round, and when all rounds are over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyclinic.algorithms.base import Averaging
from polyclinic.algorithms.distillation.losses import Teacher
from polyclinic.algorithms.distillation.patch_attribution import look
from polyclinic.algorithms.distillation.refine import Refined, refine
from polyclinic.core.contract import Bundle, Fit, Fitted, Job, Score, Site, Stream, Tensors
from polyclinic.core.errors import RecipeError
from polyclinic.data.examples import SiteData
from polyclinic.evaluation.metrics import Predictions, finite, measure
from polyclinic.federation.site_runner import STUDENT
from polyclinic.reporting.teacher_figure import draw
from polyclinic.runs.networks import Networks, server_models
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import probabilities


@dataclass(frozen=True)
class ServerTrainer:
    """A server with a public set, which it may look at as it likes."""

    algorithm: Averaging
    lineup: Networks
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
            answer = self._run(group, job, site, rng.child(group))

    def _run(self, group: str, job: Job, site: Site, rng: Stream) -> Fitted | Tensors:
        network = self.lineup.networks[group]
        if isinstance(job, Fit):
            here = replace(site, lr=site.lr * self.algorithm.lr_scale(group))
            return fit(job, network, self.public.train, here, rng)
        return score(job, network, getattr(self.public, job.part))

    def check(self, start: Bundle) -> None:
        """Refuse, before anything is trained, what would be in vain; `start`: the state before round 1."""
        recipe = self.lineup.recipe
        if recipe.evaluate.headline == "public" and not len(self.public.test):
            raise RecipeError(
                "evaluate.headline is public, but the public set has no test part; raise public.split.test"
            )
        if self._models(start):
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

    def refined(self, state: Bundle) -> Refined:
        """One student of all that the server has at the end."""
        options, student = self.lineup.recipe.finish, self.lineup.student
        assert options is not None
        assert student is not None
        rng = Stream(self.seed, ("finish",))
        return refine(self._teachers(state), student, self.start, self.public, options, rng)

    def picture(self, state: Bundle, classes: Sequence[str], path: Path) -> None:
        """Where each teacher looks, on some public training images."""
        maps = look(self._teachers(state), self.public.train, Stream(self.seed, ("maps",)))
        draw(maps.psi, maps.images, path, [classes[label] for label in maps.labels])

    def _teachers(self, state: Bundle) -> list[Teacher]:
        models = self._models(state).items()
        return [Teacher(group or "global", self.lineup.networks[group], weights) for group, weights in models]

    def judged(self, state: Bundle, student: Bundle | None) -> dict[str, Any]:
        """Every model of the server's on the public test images."""
        if not len(self.public.test):
            return {}
        models = {g: (self.lineup.networks[g], w) for g, w in self._models(state).items()}
        if student is not None and self.lineup.student is not None:
            models[STUDENT] = self.lineup.student, student
        found = {}
        for name, (network, weights) in models.items():
            rows = score(Score(weights, probabilities), network, self.public.test)
            seen = Predictions(rows["probabilities"].double().cpu().numpy(), rows["labels"].cpu().numpy())
            found[name or "global"] = {"n": len(seen), **finite(measure(seen.probabilities, seen.labels))}
        return found

    def _models(self, state: Bundle) -> Mapping[str, Bundle]:
        return server_models(self.algorithm, state, self.lineup.networks)


def told(refined: Refined) -> dict[str, Any]:
    """What a result says of how the student came about."""
    return {
        "shapley": refined.shapley,
        "teacher_weights": refined.teacher_weights,
        "epochs": refined.epochs,
        "best": refined.best,
        "factor": refined.factor,
        "history": refined.history,
    }
