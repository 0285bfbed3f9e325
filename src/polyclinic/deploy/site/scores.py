"""Scores the final models at a site, decides what of it leaves, and keeps the scores for the site's own people.

`participation.py` calls `answer_evaluation` after the last round; `polyclinic site scores` shows what is kept.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from polyclinic.config.recipe import Recipe
from polyclinic.core import Bundle, Refused, SiteId, StoreError, Stream, Tensors
from polyclinic.evaluation.assessment import assess_site, choose_model
from polyclinic.evaluation.metrics import finite_or_none
from polyclinic.evaluation.site_scores import FinalScores, build_final_scores
from polyclinic.evaluation.summary import MODEL_DESCRIPTIONS, Metric, ModelScores, PartScores
from polyclinic.evaluation.task import CLASSIFICATION
from polyclinic.privacy.plan import PrivacyConfig
from polyclinic.privacy.releases import release_metrics
from polyclinic.runs.final_evaluation import LONGEST_REASON, PREDICTIONS, SCORES, WITHHELD, round_predictions
from polyclinic.storage.files import make_folder, write_json

FOLDER = "scores"
MOST_KEPT = 1000
"""The most runs whose scores are kept, so that a server cannot fill the disk."""


class KeptScores(BaseModel):
    """The scores of one finished run, as a site keeps them: `scores/RUN-….json` in its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    run: str
    recipe: str
    algorithm: str
    rounds: int
    time: str
    headline: str | None
    """The model that the run is judged by; None: no test images."""
    scores: FinalScores
    withheld: str
    """Why the scores did not leave the site; "": they did."""
    predictions_sent: bool
    classes: tuple[str, ...] = ()
    """Of the run, in order: of two the second is the positive one."""

    @property
    def judged(self) -> PartScores | None:
        """The scores of the model that the run is judged by, on test images."""
        return self.scores.models[self.headline]["test"] if self.headline else None


@dataclass(frozen=True)
class HomeEvaluation:
    """The final models at this site: everything that is known here, and the answer to the server."""

    headline: str | None
    scores: FinalScores
    answer: dict[str, object]
    """Of the answer the fields `scores` or `withheld` …"""
    tensors: Bundle
    """… and rounded predictions, if they leave."""

    @property
    def withheld(self) -> str:
        return str(self.answer.get(WITHHELD, ""))


def score_at_home(recipe: Recipe, site: SiteId, groups: Bundle) -> tuple[FinalScores, str | None]:
    """Score predictions by `model|part` exactly as a simulation does; also return the model that the run is judged by,
    None without test images."""
    others = {key.partition("|")[0] for key in groups} - MODEL_DESCRIPTIONS.keys()
    stream = Stream(recipe.seed, ("bootstrap",))
    models = assess_site(CLASSIFICATION, groups, site, others, recipe.evaluate.bootstrap, stream)
    return build_final_scores(CLASSIFICATION, models), choose_model(models, "test", recipe.evaluate.headline)


def answer_evaluation(
    recipe: Recipe,
    site: SiteId,
    groups: Bundle,
    check_metrics: Callable[[], None],
    check_predictions: Callable[[], None],
    release_noised: Callable[[FinalScores], FinalScores],
) -> HomeEvaluation:
    """Score the final models' predictions by `model|part`, and decide what leaves.

    Args:
        recipe: The recipe of the run.
        site: This site.
        groups: Predictions by `model|part`.
        check_metrics: Raises `Refused` if metrics may not leave.
        check_predictions: Raises `Refused` if predictions may not leave.
        release_noised: Returns what leaves of the scores with `privacy.metrics: count`, after charging it; raises
            `Refused` where that cannot be paid.
    """
    scores, headline = score_at_home(recipe, site, groups)
    answer: dict[str, object]
    try:
        check_metrics()
        answer = {SCORES: _released(scores, recipe.privacy, site, release_noised).model_dump(mode="json")}
    except Refused as refusal:
        answer = {WITHHELD: str(refusal)[:LONGEST_REASON]}
    tensors: Bundle = {}
    judged = groups.get(f"{headline}|test")
    try:
        check_predictions()
        if judged is not None:
            tensors = {PREDICTIONS: {f"{headline}|test|{k}": t for k, t in round_predictions(judged).items()}}
    except Refused:
        pass  # the usual case: predictions stay here
    return HomeEvaluation(headline, scores, answer, tensors)


def _released(
    scores: FinalScores,
    privacy: PrivacyConfig | None,
    site: SiteId,
    release_noised: Callable[[FinalScores], FinalScores],
) -> FinalScores:
    """Return what may leave of the scores by the recipe's privacy plan; raises `Refused` if nothing may."""
    if privacy is None or privacy.metrics == "open":
        return scores
    if privacy.metrics == "suppress":
        raise Refused("privacy", f"the recipe's privacy plan keeps metrics at {site} (privacy.metrics: suppress)")
    return release_noised(scores)


def noised_scores(groups: Bundle, models: tuple[str, ...], noise: float, secret: Stream) -> FinalScores:
    """Return accuracy and loss of these models on test images from noised counts, one release for each model."""
    found: dict[str, ModelScores] = {}
    for model in models:
        tensors: Tensors = groups[f"{model}|test"]
        stream = secret.child("metrics", model, "test")
        values = finite_or_none(release_metrics(tensors["probabilities"], tensors["labels"], noise, stream))
        metrics = {name: Metric(value=value) for name, value in values.items()}
        found[model] = {"test": PartScores(n=len(tensors["labels"]), metrics=metrics)}
    return FinalScores(task=CLASSIFICATION.name, models=found)


def keep_scores(folder: Path, kept: KeptScores) -> Path:
    """Write a run's scores for the site's own people; the oldest make room. Return the file. A repeated evaluation with
    the same scores has one file; of a run that was repeated with other noise each has its own."""
    place = folder / FOLDER
    make_folder(place, 0o700)
    files = sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for oldest in files[: max(0, len(files) - MOST_KEPT + 1)]:
        oldest.unlink(missing_ok=True)
    digest = hashlib.sha256(kept.scores.model_dump_json().encode()).hexdigest()
    path = place / f"{kept.run}-{digest[:8]}.json"
    write_json(path, kept.model_dump(mode="json"))
    return path


def read_kept_scores(folder: Path) -> list[KeptScores]:
    """Return the scores of all finished runs that this site took part in, the oldest first."""
    found = [_read_kept(path) for path in (folder / FOLDER).glob("*.json")]
    return sorted(found, key=lambda kept: kept.time)


def _read_kept(path: Path) -> KeptScores:
    try:
        return KeptScores.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        raise StoreError(f"{path} cannot be read ({str(error).splitlines()[0]}); remove it, or restore it") from None


def describe_release(kept: KeptScores) -> str:
    """Return in words what of a run's scores left the site."""
    left = f"scores stay here: {kept.withheld}" if kept.withheld else "scores sent to the server"
    return left + (", with rounded predictions of the test images" if kept.predictions_sent else "")


def describe_scores(kept: KeptScores) -> str:
    """Return one line on a run's scores, for the terminal and the log."""
    if (scores := kept.judged) is None:
        return f"run {kept.run}: no test images here; {describe_release(kept)}"
    figures = ", ".join(
        f"{CLASSIFICATION.info(name).label} {_format_metric(scores[name])}" for name in CLASSIFICATION.shown_metrics
    )
    return f"run {kept.run} on {scores.n} test images here ({kept.headline}): {figures}; {describe_release(kept)}"


def _format_metric(metric: Metric) -> str:
    if metric.value is None:
        return "undefined"
    interval = "" if metric.low is None or metric.high is None else f" [{metric.low:.3f}, {metric.high:.3f}]"
    return f"{metric.value:.3f}{interval}"
