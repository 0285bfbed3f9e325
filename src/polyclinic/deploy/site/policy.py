"""Decides what may leave a site: recipes that its people approved, and `allow` and `budget` in site.yaml.

`message_handler.py` calls it before the images are read (`check_recipe`), and `participation.py` before a round, before
predictions, and on every reply (`check_sent_kinds`); `participation.py` also counts the privacy budget, and `orders.py`
holds a server to the recipe. A server can ask for less than the policy allows, never for more.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import WEIGHT_KINDS
from polyclinic.config.identity import identity
from polyclinic.config.recipe import Recipe
from polyclinic.config.recipe_rules import format_suggestion
from polyclinic.core import DataError, Part, Refused, SiteId, StoreError, Tensors, Training
from polyclinic.deploy.config import site_command
from polyclinic.models import MODELS
from polyclinic.privacy.plan import PrivacyConfig, Unit
from polyclinic.storage.files import make_folder, write_atomically

CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
METRICS, PREDICTIONS = "metrics", "predictions"
"""Kinds that no algorithm declares: metrics on validation images in every round, and predictions at the end."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


LEAST_IMAGES = 64
"""Behind an update of one image stands a picture of it. 64 are two of the default batches, and fewer than nearly every
hospital has; one with fewer decides by itself whether they are enough."""
APPROVED = "approved.yaml"
UNITS: tuple[Unit, ...] = get_args(Unit)
"""What a budget counts by, from the weakest to the strongest."""
RELEASED_PARTS: tuple[Part, ...] = ("test",)
"""The parts whose predictions may leave; those of training and validation images never do."""


class Allow(BaseModel):
    """`allow` in site.yaml. An algorithm or kind that it does not name is forbidden."""

    model_config = CLOSED
    algorithms: Literal["all"] | tuple[str, ...] = ()
    models: Literal["all"] | tuple[str, ...] = "all"
    """Networks that may be trained here."""
    kinds: tuple[str, ...] = ()
    """Kinds of data that may leave: those that algorithms send (model, buffers, features …), their numbers (steps …),
    metrics, predictions."""
    least_images: int = Field(LEAST_IMAGES, ge=1)
    """The fewest training images that every training job of a round uses."""
    least_sites: int = Field(3, ge=1)
    """The fewest sites, this one among them, that a run announces and that must have signed the round before; 1: this
    site may be alone."""
    rounds: int = Field(500, ge=1)
    """The most rounds that a recipe may have."""
    runs_per_day: int = Field(4, ge=1)
    """The most runs that a server may begin within 24 hours."""
    retries: int = Field(20, ge=0)
    """How many training orders of a run are answered beyond one for each round, for a server that is started again."""
    missed_rounds: int = Field(10, ge=0)
    """How many rounds of a run the server may leave out for this site because it was not connected."""
    seeded_noise: bool = False
    """For rehearsals: noise may be drawn from the recipe's seed. Anyone who knows the seed can remove that noise."""

    @field_validator("algorithms")
    @classmethod
    def _check_algorithms(cls, value: Literal["all"] | tuple[str, ...]) -> Literal["all"] | tuple[str, ...]:
        return _check_names(value, "algorithm", list(ALGORITHMS))

    @field_validator("kinds")
    @classmethod
    def _check_kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = {*WEIGHT_KINDS, METRICS, PREDICTIONS}
        if not known.issuperset(value):
            for algorithm in ALGORITHMS.values():
                known |= {*(exchange.kind for exchange in algorithm().exchanges()), *algorithm.scalars}
        for kind in value:
            if kind not in known:
                suggestion = format_suggestion(kind, sorted(known))
                raise ValueError(
                    f"no algorithm sends anything of kind {kind!r}{suggestion}; correct it, or leave it out"
                )
        return value

    @field_validator("models")
    @classmethod
    def _check_models(cls, value: Literal["all"] | tuple[str, ...]) -> Literal["all"] | tuple[str, ...]:
        return _check_names(value, "model", list(MODELS))


def _check_names(
    value: Literal["all"] | tuple[str, ...], what: str, known: list[str]
) -> Literal["all"] | tuple[str, ...]:
    for name in () if value == "all" else value:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}{format_suggestion(name, known)}")
    return value


class Budget(BaseModel):
    """`budget` in site.yaml: the largest ε that all runs together may spend on a record of this site."""

    model_config = CLOSED
    unit: Unit = "image"
    epsilon: float = Field(gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    predictions: bool = False
    """Whether predictions, which no plan protects, may leave all the same, if `allow.kinds` names them."""


def list_looser_keys(allow: Allow, budget: Budget | None, than: Allow, bound: Budget | None) -> tuple[str, ...]:
    """Name the keys of `allow` and `budget` that let more leave than those of another policy, `than` and `bound`."""
    found = [f"allow.{name}" for name, value in allow if _lets_more(name, value, getattr(than, name))]
    if bound is not None and budget is None:
        found.append("budget")
    elif bound is not None and budget is not None:
        found += [f"budget.{name}" for name, value in budget if _lets_more(name, value, getattr(bound, name))]
    return tuple(found)


def _lets_more(name: str, value: Any, other: Any) -> bool:
    if name == "unit":
        return UNITS.index(value) < UNITS.index(other)
    if isinstance(value, str | tuple):
        return other != "all" and (value == "all" or not {*value} <= {*other})
    return bool(value < other if name.startswith("least_") else value > other)


class Approval(BaseModel):
    """A recipe that the site's people have approved."""

    model_config = CLOSED
    digest: Sha256
    name: str
    date: str
    by: str
    run: str = ""
    """The run that began with it, and the only one that it is for; "": none has begun."""
    finished: str = ""
    """When that run was evaluated here, or ended; from then on another run needs another approval."""

    @property
    def is_unused(self) -> bool:
        return not self.run and not self.finished


def read_approvals(folder: Path) -> list[Approval]:
    """Return the recipes that the site's people have approved; `folder`: the site's own, `folder` in site.yaml."""
    path = folder / APPROVED
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else []
        return TypeAdapter(list[Approval]).validate_python(rows or [])
    except (OSError, ValueError, yaml.YAMLError, ValidationError):
        raise StoreError(f"{path} cannot be read; correct it, or remove it and approve the recipes again") from None


def write_approvals(folder: Path, approvals: list[Approval]) -> None:
    """Replace the list of approved recipes, which a site at work reads before it answers its next message."""
    rows: list[dict[str, Any]] = [approval.model_dump() for approval in approvals]
    text = "# Recipes approved by `polyclinic site approve`. A recipe whose row is removed is refused from then on.\n"
    make_folder(folder, 0o700)
    write_atomically(
        folder / APPROVED, (text + yaml.safe_dump(rows, sort_keys=False, allow_unicode=True)).encode(), mode=0o600
    )


def approve_recipe(folder: Path, recipe: Recipe, by: str, date: str) -> str:
    """Enter a recipe into the list of approved ones, for one run to its end, unless it has an approval that no run has
    used yet; return its digest."""
    digest, known = recipe_digest(recipe), read_approvals(folder)
    if not any(approval.digest == digest and approval.is_unused for approval in known):
        write_approvals(folder, [*known, Approval(digest=digest, name=recipe.name, date=date, by=by)])
    return digest


def find_approval(digest: str, run: str, has_begun: bool, site: SiteId, approvals: list[Approval]) -> Approval:
    """Return the approval with which a run may begin, or go on: its own, else one that no run has used.

    Args:
        digest: That of the run's recipe.
        run: The run.
        has_begun: Whether the site has the data of this run; if not, it is a new one, though its name may be known.
        site: The site.
        approvals: All of the site.

    Raises `Refused` if there is none.
    """
    of_recipe = [approval for approval in approvals if approval.digest == digest]
    own = [approval for approval in of_recipe if approval.run == run and (has_begun or not approval.finished)]
    found = next((approval for approval in (*own, *of_recipe) if approval in own or approval.is_unused), None)
    if found is not None:
        return found
    check_approved(digest, site, {approval.digest for approval in of_recipe})
    under_way = [approval.run for approval in of_recipe if not approval.finished]
    why = f"is in use by its run {under_way[-1]}" if under_way else f"ran to its end on {of_recipe[-1].finished}"
    raise Refused(
        "policy",
        f"this recipe was approved at {site} for one run, and {why}; if another shall run, approve it again: "
        f"{site_command('approve', 'RECIPE.yaml')}",
    )


def bind_approval(folder: Path, approval: Approval, run: str) -> None:
    """Enter that this run, and no other, has begun with an approval."""
    known = read_approvals(folder)
    if not approval.run:
        known[known.index(approval)] = approval.model_copy(update={"run": run})
        write_approvals(folder, known)


def finish_run(folder: Path, run: str, date: str) -> None:
    """Enter that a run was evaluated or has ended, which uses up its approval."""
    known = read_approvals(folder)
    ended = [a.model_copy(update={"finished": date}) if a.run == run and not a.finished else a for a in known]
    if ended != known:
        write_approvals(folder, ended)


def check_run_approved(digest: str, run: str, site: SiteId, approvals: list[Approval]) -> None:
    """Raise `Refused` unless the site's people have approved this recipe for this run."""
    check_approved(digest, site, {approval.digest for approval in approvals})
    if not any(approval.digest == digest and approval.run == run for approval in approvals):
        raise Refused(
            "policy",
            f"no approval at {site} is for the run {run}; if it shall go on, approve its recipe again there, and "
            "continue it with the same command at the server",
        )


def approval_remarks(recipe: Recipe, budget: Budget | None) -> list[str]:
    """Return what people should know before they approve a recipe, beside what it sends."""
    found = []
    patients = {"columns", "levels"} & recipe.data.options.keys() or (recipe.privacy and recipe.privacy.group)
    if budget is not None and budget.unit == "patient" and patients:
        found.append(
            "the budget is by patient, and this recipe itself says who is a patient (data.columns, data.levels or "
            "privacy.group); make sure that it is right"
        )
    if recipe.privacy is None:
        found.append("the recipe has no privacy plan, so nothing bounds what its updates tell about single images")
    return found


def recipe_digest(recipe: Recipe) -> str:
    """The SHA-256 by which a site approves a recipe: of every key that affects a round, except the ledger's path."""
    bare = recipe.model_copy(update={"privacy": recipe.privacy and replace(recipe.privacy, ledger=None)})
    return hashlib.sha256(identity(bare).encode()).hexdigest()


def check_approved(digest: str, site: SiteId, approved: Collection[str]) -> None:
    """Raise `Refused` unless the site's people have approved the recipe with this digest."""
    if digest not in approved:
        raise Refused(
            "policy",
            f"nobody at {site} has approved this recipe, whose digest is {digest}; if it is agreed, run at the site: "
            f"{site_command('approve', 'RECIPE.yaml')}",
        )


def image_report_kinds(recipe: Recipe) -> tuple[str, ...]:
    """The kinds that rounds report about images in addition to what the algorithm sends."""
    silent = recipe.privacy is not None and recipe.privacy.metrics == "suppress"
    return (METRICS,) if recipe.evaluate.forgetting or (recipe.evaluate.every and not silent) else ()


def check_recipe(
    recipe: Recipe, site: SiteId, allow: Allow, budget: Budget | None, approved: Collection[str] | None
) -> None:
    """Raise `Refused` if the site does not allow this recipe. Its images are not read for that.

    `approved`: digests of the recipes that the site's people have approved; None: not looked at, for a preview.
    """
    name = recipe.algorithm.name
    if recipe.methods:
        raise Refused("policy", "the recipe compares several methods; send that of one method")
    algorithm = recipe.build_algorithm()
    if algorithm.pooled:
        raise Refused("policy", f"{name} needs all sites' images in one place, and {site}'s stay where they are")
    if allow.algorithms != "all" and name not in allow.algorithms:
        raise Refused(
            "policy", f"{site} does not allow the algorithm {name}; add it to allow.algorithms in the site's site.yaml"
        )
    for model in recipe.trained_models.values():
        if allow.models != "all" and model.name not in allow.models:
            raise Refused(
                "policy",
                f"{site} does not allow the model {model.name}; add it to allow.models in the site's site.yaml",
            )
    _check_extent(recipe, site, allow)
    for cluster, section in recipe.trained_models.items():
        if section.starts_elsewhere and section.sha256 is None:
            raise Refused("weights", unnamed_weights(f"clusters.{cluster}.model" if cluster else "model"))
    if approved is not None:
        check_approved(recipe_digest(recipe), site, approved)
    sent = (*(e.kind for e in algorithm.exchanges()), *algorithm.scalars)
    check_kinds((*sent, *image_report_kinds(recipe)), site, allow)
    _check_privacy(recipe.privacy, site, allow, budget)


def _check_extent(recipe: Recipe, site: SiteId, allow: Allow) -> None:
    if recipe.rounds > allow.rounds:
        raise Refused(
            "policy",
            f"the recipe has {recipe.rounds} rounds, and {site} allows {allow.rounds}; ask for fewer, or raise "
            "allow.rounds in the site's site.yaml",
        )
    if recipe.cohort is not None and recipe.cohort < allow.least_sites:
        raise Refused("policy", _too_few_sites(f"a round of this recipe has {recipe.cohort}", site, allow))


def unnamed_weights(place: str) -> str:
    """The sentence about first weights that a site can neither make nor recognise; `place`: their section's key."""
    return (
        f"{place} starts from given weights (weights or pretrain), which sites cannot make themselves; add "
        f"{place}.sha256, which `polyclinic weights hash RECIPE` prints"
    )


def check_sites(sites: Collection[SiteId], site: SiteId, allow: Allow) -> None:
    """Raise `Refused` unless a run has enough sites, this one among them."""
    if site not in sites or len(set(sites)) < len(sites):
        raise Refused("policy", f"the run's list of sites lacks {site}, or names a site twice")
    if len(sites) < allow.least_sites:
        raise Refused("policy", _too_few_sites(f"this run has {len(sites)}", site, allow))


def _too_few_sites(found: str, site: SiteId, allow: Allow) -> str:
    return (
        f"{site} takes part with at least {allow.least_sites} sites, and {found}; find more, or lower "
        "allow.least_sites in the site's site.yaml"
    )


def images_of_job(training: Training, held: int, full_batch: bool = False) -> int:
    """Return how many different images a training job of a round uses at most, of `held` training images."""
    if training.epochs is not None or full_batch:
        return held
    return min(held, (training.steps or 1) * training.batch_size(held))


def check_images(images: int, site: SiteId, allow: Allow, held: int) -> None:
    """Raise `Refused` unless enough images stand behind an update; `held`: the site's number of training images."""
    if images < allow.least_images:
        raise Refused(
            "policy",
            f"at least {allow.least_images} training images shall stand behind an update of {site}, and of this recipe "
            "fewer would; raise training.steps or batch in the recipe, or lower allow.least_images in the site's "
            "site.yaml",
        ) from DataError(f"a round here uses {images} of the {held} training images")


def check_kinds(kinds: tuple[str, ...], site: SiteId, allow: Allow) -> None:
    """Raise `Refused` if one of these kinds may not leave the site."""
    for kind in kinds:
        if kind not in allow.kinds:
            remedy = "; set evaluate.every: 0 (and forgetting: false)" if kind == METRICS else ""
            raise Refused(
                "policy", f"{site} does not let {kind} leave; add it to allow.kinds in the site's site.yaml{remedy}"
            )


def check_predictions(site: SiteId, allow: Allow, budget: Budget | None) -> None:
    """Raise `Refused` unless predictions may leave: beside a budget, which does not count them, it must say so."""
    check_kinds((PREDICTIONS,), site, allow)
    if budget is not None and not budget.predictions:
        raise Refused(
            "budget",
            f"{site} has a privacy budget, which predictions would evade; set budget.predictions: true in the site's "
            "site.yaml if they may leave",
        )


def _check_privacy(privacy: PrivacyConfig | None, site: SiteId, allow: Allow, budget: Budget | None) -> None:
    if privacy is not None and privacy.randomness == "seed" and not allow.seeded_noise:
        raise Refused(
            "policy",
            f"the recipe draws its noise from a seed that the server knows, which {site} does not allow; set "
            "privacy.randomness: secret",
        )
    if budget is None:
        return
    if privacy is None:
        raise Refused("budget", f"{site} has a privacy budget, and this recipe no privacy plan; add `privacy`")
    if privacy.unit != budget.unit:
        raise Refused("budget", f"{site} counts privacy by {budget.unit}; set privacy.unit: {budget.unit}")
    if privacy.unit == "site" and privacy.noise_at == "server":
        raise Refused("budget", f"{site} trusts only noise that it adds itself; set privacy.noise_at: site")
    if privacy.metrics == "open":
        raise Refused("budget", f"metrics would leave {site} as they are; set privacy.metrics: suppress or count")


def check_sent_kinds(sent: Mapping[str, int], agreed: Mapping[str, int], site: SiteId, allow: Allow) -> None:
    """Raise `Refused` unless a reply holds allowed kinds only, each with no more bytes than agreed. The last check."""
    check_kinds(tuple(kind for kind, size in sent.items() if size), site, allow)
    for kind, size in sent.items():
        if size > agreed.get(kind, 0):
            raise Refused("policy", f"more bytes of {kind} would have left {site} than were agreed") from DataError(
                f"{size} bytes, where {agreed.get(kind, 0)} were agreed"
            )


def check_scalars(found: object, declared: Collection[str], site: SiteId) -> None:
    """Raise `Refused` unless a reply's numbers are those that the recipe's algorithm declares, each finite."""
    if not isinstance(found, Mapping):
        raise Refused("policy", f"the numbers that would have left {site} are no mapping")
    for name, value in found.items():
        if name not in declared or not isinstance(value, float | int) or not math.isfinite(value):
            raise Refused(
                "policy",
                f"a number {name[:40]!r} would have left {site}, which the recipe's algorithm does not declare",
            )


def check_predicted(found: Tensors, site: SiteId) -> None:
    """Raise `Refused` unless predictions are of test images only, and whole thousandths."""
    for name, rows in found.items():
        _, part, column = name.rsplit("|", 2)
        if part not in RELEASED_PARTS:
            raise Refused("policy", f"predictions of {part} images would have left {site}, which never leave it")
        whole = rows.dtype == (torch.int16 if column == "thousandths" else torch.int64)
        if column not in ("thousandths", "labels", "patients") or not whole:
            raise Refused("policy", f"predictions that are not whole thousandths would have left {site}")
