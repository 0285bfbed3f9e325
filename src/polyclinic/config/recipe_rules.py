"""Rules between the keys of a recipe. Each broken rule is one sentence that names the key and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.distillation.refine import RefinementOptions
from polyclinic.algorithms.distillation.shapley import MOST_PLAYERS
from polyclinic.config.capability import check_thresholds
from polyclinic.evaluation.metrics import METRICS
from polyclinic.federation.robust.rules import CENTRES, USED_OPTIONS, Aggregation
from polyclinic.privacy.plan import config_problems
from polyclinic.privacy.transforms.mask import Mask

TAKEN = ("global", "personal", "student", "ensemble", "public", "transfer", "clock")
if TYPE_CHECKING:
    from polyclinic.config.recipe import Recipe


def find_problems(recipe: Recipe) -> Iterator[str]:
    """Yield the problems that can be seen in the recipe alone."""
    for check in (_check_schedule, _check_engine, _check_privacy, _check_clusters, _check_masks, _unused_options):
        yield from check(recipe)


def _select_broken(*rules: tuple[object, str]) -> Iterator[str]:
    """Yield the sentence of each rule that is broken. A rule: whether it is broken, and its sentence."""
    return (sentence for broken, sentence in rules if broken)


def unused_options(section: str, name: Any, variant: Any) -> tuple[str, ...]:
    """Return the options of `algorithm` or `finish` that have no effect in a variant."""
    kind = RefinementOptions if section == "finish" else ALGORITHMS.get(str(name))
    return kind.unused_options.get(str(variant), ()) if kind else ()


def _unused_options(recipe: Recipe) -> Iterator[str]:
    """Yield options given without effect. A preset fills every key of `finish`, so only changed ones count."""
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
    name, curriculum = recipe.algorithm.name, recipe.training.curriculum.by != "random"
    one_place = f"{name} trains in one place, so"
    if algorithm.pooled:
        yield from _select_broken(
            ((recipe.quorum or 1) > 1, f"{one_place} a quorum of {recipe.quorum} can never be met; set quorum: 1"),
            (curriculum, f"{one_place} no deployed model forgets; set training.curriculum.by: random"),
            (recipe.evaluate.forgetting, f"{one_place} no deployed model forgets; set evaluate.forgetting: false"),
            (recipe.clusters, f"{name} has one network for all sites; set clusters: {{}}"),
        )
    if algorithm.pooled and not type(algorithm).pooled:
        own_way = f"{name} in this variant trains all sites itself, in one place and in random order of cases; set"
        yield from _select_broken(
            (recipe.cohort is not None, f"{own_way} cohort: null, or algorithm.variant: corrected"),
            (curriculum, f"{own_way} training.curriculum.by: random, or algorithm.variant: corrected"),
            (recipe.evaluate.forgetting, f"{own_way} evaluate.forgetting: false, or algorithm.variant: corrected"),
            (recipe.ensemble, f"{own_way} ensemble: false, or algorithm.variant: corrected"),
        )
    if any(stage.name == "mask" for stage in recipe.stages) and not averages(type(algorithm)):
        known = ", ".join(sorted(n for n, kind in ALGORITHMS.items() if averages(kind) and not kind.pooled))
        yield (
            f"{name} needs every site's update by itself, and behind masks the server sees only their weighted mean; "
            f"choose one of {known}, or leave the stage mask out"
        )
    yield from _check_aggregate(recipe, algorithm)
    # A stage may name only kinds of tensors that sites send. Where they send nothing, stages have no effect.
    sent = [exchange.kind for exchange in algorithm.exchanges()]
    for stage in recipe.stages if sent else ():
        for kind in stage.options.get("kinds", ()):
            if kind not in sent:
                yield (
                    f"stages: {stage.name}.kinds has {kind!r:.40}, which sites of {recipe.algorithm.name} do not send"
                    f"{format_suggestion(kind, sent)}; they send: {', '.join(sent)}"
                )


def _check_aggregate(recipe: Recipe, algorithm: Algorithm) -> Iterator[str]:
    """Yield the problems of the rule by which updates are combined."""
    rule = recipe.aggregate
    for option in (f.name for f in fields(rule) if f.name not in ("name", *USED_OPTIONS[rule.name])):
        if getattr(rule, option) != getattr(Aggregation, option):
            yield f"aggregate.{option} has no effect with {rule.name}; leave it out, or change aggregate.name"
    if rule.name in CENTRES:
        why = "an ensemble keeps the model of every site" if recipe.ensemble else algorithm.needs_single_updates()
        server_noise = (
            recipe.privacy is not None and recipe.privacy.unit == "site" and recipe.privacy.noise_at == "server"
        )
        yield from _select_broken(
            (
                why,
                f"aggregate: {rule.name} replaces all updates of a cohort by one, but {why}; set aggregate: norm_bound",
            ),
            (
                any(stage.name == "mask" for stage in recipe.stages),
                f"aggregate: {rule.name} compares single updates, which the server does not see behind masks; set "
                "aggregate: norm_bound or mean, or leave the stage mask out",
            ),
            (
                server_noise,
                f"the noise of privacy.noise_at: server is priced for a mean, not for {rule.name}; set "
                "aggregate: mean, or privacy.noise_at: site",
            ),
        )


def averages(algorithm: type[Algorithm]) -> bool:
    """Whether the class that defines `aggregate` says that it takes the weighted mean for several updates."""
    for kind in algorithm.__mro__:
        if "averages" in vars(kind):
            return algorithm.averages
        if "aggregate" in vars(kind):
            return False
    return False


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
    reaches_zero = schedule.minimum == 0 and (schedule.period or recipe.rounds) < recipe.rounds
    yield from _select_broken(
        (
            watching and recipe.evaluate.every != 1,
            "schedule plateau and early_stop use the validation metrics of every round; set evaluate.every: 1",
        ),
        (
            watching and recipe.cohort is not None,
            "schedule plateau and early_stop would compare different sites from round to round; set cohort: null",
        ),
        (
            schedule.name == "cosine" and reaches_zero,
            "schedule cosine reaches a learning rate of exactly 0 within the run; give schedule.minimum a small share",
        ),
        (
            watching and recipe.data.split.validation == 0,
            "schedule plateau and early_stop use validation metrics; give data.split.validation a share",
        ),
    )
    if stop is not None and stop.metric not in METRICS:
        near = format_suggestion(stop.metric, list(METRICS))
        yield f"early_stop.metric: there is no metric {stop.metric!r}{near}; there are: {', '.join(METRICS)}"


def _check_privacy(recipe: Recipe) -> Iterator[str]:
    adaptive = recipe.algorithm.name == "adaptive-noise"
    if recipe.privacy is not None:
        watching = recipe.schedule.name == "plateau" or recipe.early_stop is not None
        yield from config_problems(recipe.privacy, recipe.training, watching)
        yield from _select_broken(
            (
                recipe.evaluate.forgetting,
                "evaluate.forgetting reports on training images, which no privacy plan covers; set it to false",
            ),
            (
                adaptive and recipe.privacy.unit == "site",
                "adaptive-noise scales the noise of training steps; set privacy.unit: image or patient",
            ),
        )
    elif adaptive:
        yield "adaptive-noise scales the noise of a privacy plan; add for example `privacy: {epsilon: 3}`"
    elif recipe.training.private is not None:
        yield "training.private follows from privacy; leave it out and write privacy instead"


def _check_clusters(recipe: Recipe) -> Iterator[str]:
    if recipe.clusters:
        yield from (f"clusters: {sentence}" for sentence in check_thresholds(recipe.thresholds))
    for name in (n for n in recipe.clusters if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,30}", n) or n in TAKEN):
        yield f"a cluster cannot be called {name!r:.40}; use letters and digits, and none of {', '.join(TAKEN)}"
    name, headline, finish = recipe.algorithm.name, recipe.evaluate.headline, recipe.finish
    models = (recipe.model, *(cluster.model for cluster in recipe.clusters.values()))
    options = recipe.algorithm.options
    corrected = options.get("variant", "corrected") == "corrected"
    fitted_head = corrected and options.get("head_epochs", 1) and options.get("distil", 1)
    yield from _select_broken(
        (
            recipe.clusters and name in ("single", "cross-site") and not recipe.methods,
            f"{name} has one network for all sites; set clusters: {{}}",
        ),
        (
            recipe.clusters and recipe.capability.reassess_every is not None and name == "scaffold",
            "scaffold counts the sites of a cluster once, so they must not move; set capability.reassess_every: null",
        ),
        (
            headline == "public" and recipe.public is None,
            "evaluate.headline is public, but there is no public set; add `public`, or set evaluate.headline: null",
        ),
        (
            any(model.sha256 and not model.starts_elsewhere for model in models),
            "model.sha256 is of weights that are given, and none are; leave it out, or set model.weights or pretrain",
        ),
        (
            any(model.pretrain for model in models) and recipe.public is None,
            "model.pretrain trains on images at the server; add for example `public: {name: mias}`",
        ),
        (
            recipe.ensemble and recipe.clusters,
            "ensemble has one network for all sites' models; set clusters: {}, or ensemble: false",
        ),
        (
            headline == "ensemble" and not recipe.ensemble,
            "evaluate.headline is ensemble, but the run has no ensemble; add `ensemble: true`",
        ),
        (
            headline == "student" and finish is None,
            "evaluate.headline is student, but the run trains no student; add `finish: refine`",
        ),
        (
            finish and finish.shapley and len(recipe.clusters) > MOST_PLAYERS,
            f"finish.shapley tries every coalition of at most {MOST_PLAYERS} clusters; set finish.shapley: false",
        ),
        (
            finish and recipe.public is None,
            "finish needs labelled images at the server; add for example `public: {name: mias}`",
        ),
        (
            name == "pfedcdp" and fitted_head and recipe.public is None and not recipe.methods,
            "pfedcdp's sites learn from a head that the server fits on labelled images of its own; add for example "
            "`public: {name: mias}`, or set algorithm.head_epochs: 0 to do without",
        ),
    )


def _check_masks(recipe: Recipe) -> Iterator[str]:
    """Yield what cannot go with masks, behind which the server sees sums only."""
    names = [stage.name for stage in recipe.stages]
    if "mask" not in names:
        return
    options, privacy, cohort = recipe.stages[names.index("mask")].options, recipe.privacy, recipe.cohort
    by_site = privacy is not None and privacy.unit == "site"
    yield from _select_broken(
        (len(names) > 1, "mask makes integers of updates by itself; leave the other stages out"),
        (recipe.clusters, "masks hide updates in the sum of all sites, and a cluster may be small; set clusters: {}"),
        (recipe.ensemble, "ensemble keeps every site's model, which masks hide from the server; set ensemble: false"),
        (
            recipe.evaluate.forgetting,
            "evaluate.forgetting has sites send numbers beside their updates; set it to false, or leave mask out",
        ),
        (
            privacy is not None and privacy.weigh_by_noise,
            "privacy.weigh_by_noise needs the server to weigh single updates, which masks hide; set it to false",
        ),
        (
            by_site and privacy is not None and privacy.noise_at == "server",
            "masks are for a server that is not trusted, and privacy.noise_at: server trusts it; set noise_at: site",
        ),
        (
            by_site and options.get("threshold") is None,
            "the noise of a plan for unit site is split among the sites that survive a round; give mask.threshold",
        ),
        (
            by_site and options.get("masks") is False,
            "noise that is split among sites protects a sum only, and masks: false shows single updates; leave it out",
        ),
    )
    if cohort is not None and (problem := Mask(**options).problem_with(cohort)):
        yield f"cohort: {problem}"


def _check_engine(recipe: Recipe) -> Iterator[str]:
    name, engine, cohort = recipe.algorithm.name, recipe.engine, recipe.cohort
    at_the_end = name in ("single", "cross-site")
    yield from _select_broken(
        (
            at_the_end and recipe.early_stop is not None,
            f"{name} sends its models after the last round, which early_stop would skip; set early_stop: null",
        ),
        (at_the_end and cohort is not None, f"{name} needs every site in the last round; set cohort: null"),
        (
            name == "fedsgd" and recipe.training.curriculum.by != "random" and not recipe.methods,
            "fedsgd takes every step on all images, so a curriculum has no effect; set training.curriculum.by: random",
        ),
        (
            cohort is not None and (recipe.quorum or 1) > cohort,
            f"a quorum of {recipe.quorum} can never be met by a cohort of {cohort}; lower quorum",
        ),
        (
            not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", engine.device),
            f"engine.device is {engine.device!r}; choose cpu, cuda, cuda:1 and so on, mps or auto",
        ),
        (
            engine.name == "ray" and engine.device not in ("auto", "cpu", "cuda"),
            f"engine.device is {engine.device!r}, but ray assigns GPUs itself; choose cpu, cuda or auto",
        ),
        (
            engine.workers > 0 and engine.device != "cpu" and engine.name != "ray",
            "worker processes use only the CPU; set engine.workers: 0 or engine.device: cpu",
        ),
        (
            engine.workers > 0 and engine.name not in ("local", "ray"),
            f"engine.name {engine.name} works in one process; set engine.workers: 0, or engine.name: local",
        ),
    )
    methods = recipe.methods or {recipe.name: {}}
    named = [("paper", name) for name in recipe.paper] + [("claims", n) for c in recipe.claims for n in c.methods]
    for place, unknown in (pair for pair in named if pair[1] not in methods):
        near = format_suggestion(unknown, list(methods))
        yield f"{place}: there is no method {unknown!r}{near}; there are: {', '.join(methods)}"
