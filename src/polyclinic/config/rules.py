"""Rules between the keys of a recipe. Each broken rule is one sentence that names the key and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.distillation.refine import RefinementOptions
from polyclinic.algorithms.distillation.shapley import MOST_PLAYERS
from polyclinic.config.capability import check_capability, check_thresholds
from polyclinic.evaluation.metrics import METRICS
from polyclinic.privacy.plan import config_problems

TAKEN = ("global", "personal", "student", "ensemble", "public", "transfer", "clock")
if TYPE_CHECKING:
    from polyclinic.config.recipe import Recipe


def find_problems(recipe: Recipe) -> Iterator[str]:
    yield from _check_schedule(recipe)
    yield from _check_engine(recipe)
    yield from _check_privacy(recipe)
    yield from _check_clusters(recipe)
    yield from _unused_options(recipe)


def unused_options(section: str, name: Any, variant: Any) -> tuple[str, ...]:
    """Return the options of `algorithm` or `finish` that have no effect in a variant."""
    kind = RefinementOptions if section == "finish" else ALGORITHMS.get(str(name))
    return kind.unused_options.get(str(variant), ()) if kind else ()


def _unused_options(recipe: Recipe) -> Iterator[str]:
    """Options that are given without effect. A preset fills every key of `finish`, so only changed ones count."""
    algorithm, finish = recipe.algorithm, recipe.finish
    variant = algorithm.options.get("variant", "corrected")
    given = [("algorithm", variant, key) for key in unused_options("algorithm", algorithm.name, variant)]
    found = [one for one in given if one[2] in algorithm.options] if not recipe.methods else []
    if finish is not None:
        without = unused_options("finish", None, finish.variant)
        found += [("finish", finish.variant, k) for k in without if getattr(finish, k) != getattr(RefinementOptions, k)]
    for section, variant, key in found:
        yield f"{section}.{key} has no effect in variant {variant}; leave it out, or change {section}.variant"


def check_algorithm(recipe: Recipe, algorithm: Algorithm) -> Iterator[str]:
    """Yield the problems of a recipe with the algorithm that its options make."""
    name = recipe.algorithm.name
    if algorithm.pooled and (recipe.quorum or 1) > 1:
        yield f"{name} trains in one place, so a quorum of {recipe.quorum} can never be met; set quorum: 1"
    if algorithm.pooled and recipe.training.curriculum.by != "random":
        yield f"{name} trains in one place, so no deployed model forgets; set training.curriculum.by: random"
    if algorithm.pooled and recipe.evaluate.forgetting:
        yield f"{name} trains in one place, so no deployed model forgets; set evaluate.forgetting: false"
    if algorithm.pooled and recipe.clusters:
        yield f"{name} has one network for all sites; set clusters: {{}}"
    if algorithm.pooled and not type(algorithm).pooled:
        yield from _check_pooled(recipe)
    yield from _check_stages(recipe, algorithm)


def _check_pooled(recipe: Recipe) -> Iterator[str]:
    """Problems of an algorithm that trains all sites itself, in one process."""
    rules = {
        "cohort: null": recipe.cohort is None,
        "training.curriculum.by: random": recipe.training.curriculum.by == "random",
        "evaluate.forgetting: false": not recipe.evaluate.forgetting,
        "ensemble: false": not recipe.ensemble,
    }
    for key in (key for key, kept in rules.items() if not kept):
        yield (
            f"{recipe.algorithm.name} in this variant trains all sites itself, in one place and in random order "
            f"of cases; set {key}, or algorithm.variant: corrected"
        )


def _check_stages(recipe: Recipe, algorithm: Algorithm) -> Iterator[str]:
    """Stages for kinds of tensors that sites do not send. Where they send nothing, stages have no effect."""
    sent = [exchange.kind for exchange in algorithm.exchanges]
    for stage in recipe.stages if sent else ():
        for kind in stage.options.get("kinds", ()):
            if kind not in sent:
                yield (
                    f"stages: {stage.name}.kinds has {kind!r:.40}, which sites of {recipe.algorithm.name} do not send"
                    f"{format_suggestion(kind, sent)}; they send: {', '.join(sent)}"
                )


def _refuse_flower(engine: Any) -> Any:
    """Refuse `flower`: real sites are not an engine that a recipe can name."""
    if engine == "flower":
        raise ValueError(
            "real sites run a recipe by `polyclinic serve` and `polyclinic join` (docs/deploy.md); to simulate "
            "sites, it should be local, stacked, auto or ray"
        )
    return engine


EngineName: TypeAlias = Annotated[Literal["local", "stacked", "auto", "ray"], BeforeValidator(_refuse_flower)]


def format_suggestion(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_schedule(recipe: Recipe) -> Iterator[str]:
    schedule, stop = recipe.schedule, recipe.early_stop
    watching = schedule.name == "plateau" or stop is not None
    if watching and recipe.evaluate.every != 1:
        yield "schedule plateau and early_stop use the validation metrics of every round; set evaluate.every: 1"
    if watching and recipe.cohort is not None:
        yield "schedule plateau and early_stop would compare different sites from round to round; set cohort: null"
    if schedule.name == "cosine" and schedule.minimum == 0 and (schedule.period or recipe.rounds) < recipe.rounds:
        yield "schedule cosine reaches a learning rate of exactly 0 within the run; give schedule.minimum a small share"
    if watching and recipe.data.split.validation == 0:
        yield "schedule plateau and early_stop use validation metrics; give data.split.validation a share"
    if stop is not None and stop.metric not in METRICS:
        near = format_suggestion(stop.metric, list(METRICS))
        yield f"early_stop.metric: there is no metric {stop.metric!r}{near}; there are: {', '.join(METRICS)}"


def _check_privacy(recipe: Recipe) -> Iterator[str]:
    if recipe.privacy is not None:
        watching = recipe.schedule.name == "plateau" or recipe.early_stop is not None
        yield from config_problems(recipe.privacy, recipe.training, watching)
        if recipe.evaluate.forgetting:
            yield "evaluate.forgetting reports on training images, which no privacy plan covers; set it to false"
        if recipe.algorithm.name == "adaptive-noise" and recipe.privacy.unit == "site":
            yield "adaptive-noise scales the noise of training steps; set privacy.unit: image or patient"
    elif recipe.algorithm.name == "adaptive-noise":
        yield "adaptive-noise scales the noise of a privacy plan; add for example `privacy: {epsilon: 3}`"
    elif recipe.training.private is not None:
        yield "training.private follows from privacy; leave it out and write privacy instead"


def _check_clusters(recipe: Recipe) -> Iterator[str]:
    yield from check_capability(recipe.capability)
    if recipe.clusters:
        yield from (f"clusters: {sentence}" for sentence in check_thresholds(recipe.thresholds))
    for name in (n for n in recipe.clusters if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,30}", n) or n in TAKEN):
        yield f"a cluster cannot be called {name!r:.40}; use letters and digits, and none of {', '.join(TAKEN)}"
    name = recipe.algorithm.name
    if recipe.clusters and name in ("single", "cross-site") and not recipe.methods:
        yield f"{name} has one network for all sites; set clusters: {{}}"
    if recipe.clusters and recipe.capability.reassess_every is not None and name == "scaffold":
        yield "scaffold counts the sites of a cluster once, so they must not move; set capability.reassess_every: null"
    wanted = recipe.evaluate.headline
    if wanted == "public" and recipe.public is None:
        yield "evaluate.headline is public, but there is no public set; add `public`, or set evaluate.headline: null"
    if any(m.pretrain for m in (recipe.model, *(c.model for c in recipe.clusters.values()))) and recipe.public is None:
        yield "model.pretrain trains on images at the server; add for example `public: {name: mias}`"
    if recipe.ensemble and recipe.clusters:
        yield "ensemble has one network for all sites' models; set clusters: {}, or ensemble: false"
    if wanted == "ensemble" and not recipe.ensemble:
        yield "evaluate.headline is ensemble, but the run has no ensemble; add `ensemble: true`"
    if wanted == "student" and recipe.finish is None:
        yield "evaluate.headline is student, but the run trains no student; add `finish: refine`"
    if recipe.finish is not None:
        if recipe.finish.shapley and len(recipe.clusters) > MOST_PLAYERS:
            yield f"finish.shapley tries every coalition of at most {MOST_PLAYERS} clusters; set finish.shapley: false"
        if recipe.public is None:
            yield "finish needs labelled images at the server; add for example `public: {name: mias}`"
    options = recipe.algorithm.options
    corrected = options.get("variant", "corrected") == "corrected"
    taught = corrected and options.get("head_epochs", 1) and options.get("distil", 1)
    if name == "pfedcdp" and taught and recipe.public is None and not recipe.methods:
        yield (
            "pfedcdp's sites learn from a head that the server fits on labelled images of its own; add for example "
            "`public: {name: mias}`, or set algorithm.head_epochs: 0 to do without"
        )


def _check_engine(recipe: Recipe) -> Iterator[str]:
    name, engine = recipe.algorithm.name, recipe.engine
    at_the_end = name in ("single", "cross-site")
    if at_the_end and recipe.early_stop is not None:
        yield f"{name} sends its models after the last round, which early_stop would skip; set early_stop: null"
    if at_the_end and recipe.cohort is not None:
        yield f"{name} needs every site in the last round; set cohort: null"
    if name == "fedsgd" and recipe.training.curriculum.by != "random" and not recipe.methods:
        yield "fedsgd takes every step on all images, so a curriculum has no effect; set training.curriculum.by: random"
    if recipe.cohort is not None and (recipe.quorum or 1) > recipe.cohort:
        yield f"a quorum of {recipe.quorum} can never be met by a cohort of {recipe.cohort}; lower quorum"
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", engine.device):
        yield f"engine.device is {engine.device!r}; choose cpu, cuda, cuda:1 and so on, mps or auto"
    if engine.name == "ray" and engine.device not in ("auto", "cpu", "cuda"):
        yield f"engine.device is {engine.device!r}, but ray assigns GPUs itself; choose cpu, cuda or auto"
    if engine.workers > 0 and engine.device != "cpu" and engine.name != "ray":
        yield "worker processes use only the CPU; set engine.workers: 0 or engine.device: cpu"
    if engine.workers > 0 and engine.name not in ("local", "ray"):
        yield f"engine.name {engine.name} works in one process; set engine.workers: 0, or engine.name: local"
    methods = recipe.methods or {recipe.name: {}}
    named = [("paper", name) for name in recipe.paper] + [("claims", n) for c in recipe.claims for n in c.methods]
    for place, unknown in (pair for pair in named if pair[1] not in methods):
        near = format_suggestion(unknown, list(methods))
        yield f"{place}: there is no method {unknown!r}{near}; there are: {', '.join(methods)}"
