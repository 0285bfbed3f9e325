"""Decides what may leave a site: algorithms, recipes, kinds of data, privacy (`allow` and `budget` in site.yaml).

`message_handler.py` calls it before the images are read (`check_recipe`), and `participation.py` before a round, before
predictions, and on every reply (`check_sent_kinds`); `participation.py` also refuses predictions of training images and
counts the privacy budget. A server can ask for less than the policy allows, never for more. The few scalars of an
algorithm, such as its number of steps, leave unchecked.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from polyclinic.algorithms import ALGORITHMS
from polyclinic.config.identity import identity
from polyclinic.config.recipe import Recipe
from polyclinic.config.recipe_rules import format_suggestion
from polyclinic.core import Refused, SiteId
from polyclinic.privacy.plan import PrivacyConfig, Unit

CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
METRICS, PREDICTIONS = "metrics", "predictions"
"""Kinds that no algorithm declares: metrics on validation images in every round, and predictions at the end."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Allow(BaseModel):
    """`allow` in site.yaml. An algorithm or kind that it does not name is forbidden."""

    model_config = CLOSED
    algorithms: Literal["all"] | tuple[str, ...] = ()
    recipes: tuple[Sha256, ...] = ()
    """SHA-256 of the only recipes that may run (`recipe_digest`); (): every recipe with an allowed algorithm."""
    kinds: tuple[str, ...] = ()
    """Kinds of data that may leave: those that algorithms send (model, buffers, features …), metrics, predictions."""
    least_sites: int = Field(3, ge=1)
    """The fewest sites, this one among them, that must have signed the round before; 1: this site may be alone."""
    seeded_noise: bool = False
    """For rehearsals: noise may be drawn from the recipe's seed. Anyone who knows the seed can remove that noise."""

    @field_validator("algorithms")
    @classmethod
    def _check_value(cls, value: Literal["all"] | tuple[str, ...]) -> Literal["all"] | tuple[str, ...]:
        for name in () if value == "all" else value:
            if name not in ALGORITHMS:
                raise ValueError(f"there is no algorithm {name!r}{format_suggestion(name, list(ALGORITHMS))}")
        return value


class Budget(BaseModel):
    """`budget` in site.yaml: the largest ε that all runs together may spend on a record of this site."""

    model_config = CLOSED
    unit: Unit = "image"
    epsilon: float = Field(gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    predictions: bool = False
    """Whether predictions, which no plan protects, may leave all the same, if `allow.kinds` names them."""


def recipe_digest(recipe: Recipe) -> str:
    """The SHA-256 by which site.yaml allows a recipe: of every key that affects a round, except the ledger's path."""
    bare = recipe.model_copy(update={"privacy": recipe.privacy and replace(recipe.privacy, ledger=None)})
    return hashlib.sha256(identity(bare).encode()).hexdigest()


def image_report_kinds(recipe: Recipe) -> tuple[str, ...]:
    """The kinds that rounds report about images in addition to what the algorithm sends."""
    silent = recipe.privacy is not None and recipe.privacy.metrics == "suppress"
    return (METRICS,) if recipe.evaluate.forgetting or (recipe.evaluate.every and not silent) else ()


def check_recipe(recipe: Recipe, site: SiteId, allow: Allow, budget: Budget | None) -> None:
    """Raise `Refused` if the site does not allow this recipe. Its images are not read for that."""
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
    if allow.recipes and (digest := recipe_digest(recipe)) not in allow.recipes:
        raise Refused(
            "policy",
            f"{site} does not allow this recipe, whose digest is {digest}; add it to allow.recipes in the site's "
            "site.yaml",
        )
    patients = {"columns", "levels"} & recipe.data.options.keys() or (recipe.privacy and recipe.privacy.group)
    if budget is not None and budget.unit == "patient" and patients and recipe_digest(recipe) not in allow.recipes:
        raise Refused(
            "budget",
            f"{site} has a privacy budget by patient, and this recipe itself says who is a patient (data.columns, "
            f"data.levels or privacy.group); if that is right, add its digest {recipe_digest(recipe)} to "
            "allow.recipes in the site's site.yaml",
        )
    check_kinds((*(e.kind for e in algorithm.exchanges()), *image_report_kinds(recipe)), site, allow)
    _check_privacy(recipe.privacy, site, allow, budget)


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
            raise Refused(
                "policy", f"{size} bytes of {kind} would have left {site}, where {agreed.get(kind, 0)} were agreed"
            )
