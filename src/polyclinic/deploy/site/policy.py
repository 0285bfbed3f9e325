"""What a hospital lets leave: which algorithms, recipes and kinds, at what privacy. A server can only ask for less."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from polyclinic.algorithms import ALGORITHMS
from polyclinic.config.recipe import Recipe
from polyclinic.config.rules import format_suggestion
from polyclinic.core.contract import SiteId
from polyclinic.core.errors import Refused
from polyclinic.privacy.plan import PrivacyConfig, Unit
from polyclinic.reporting.run_folder import identity

CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
METRICS, PREDICTIONS = "metrics", "predictions"
"""Kinds that no algorithm sends: what a site tells of its validation images every round, and of each image at last."""
Mark = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Allow(BaseModel):
    """`allow` in site.yaml. What is not named is not allowed."""

    model_config = CLOSED
    algorithms: Literal["all"] | tuple[str, ...] = ()
    recipes: tuple[Mark, ...] = ()
    """SHA-256 of the only recipes that may run (`recipe_mark`); (): any with an allowed algorithm."""
    kinds: tuple[str, ...] = ()
    """What may leave: kinds that algorithms send (model, buffers, features …), metrics, predictions."""
    seeded_noise: bool = False
    """For rehearsals: noise may be drawn from the recipe's seed, so that whoever knows the seed can remove it."""

    @field_validator("algorithms")
    @classmethod
    def _check_value(cls, value: Literal["all"] | tuple[str, ...]) -> Literal["all"] | tuple[str, ...]:
        for name in () if value == "all" else value:
            if name not in ALGORITHMS:
                raise ValueError(f"there is no algorithm {name!r}{format_suggestion(name, list(ALGORITHMS))}")
        return value


class Budget(BaseModel):
    """`budget` in site.yaml: the most that all runs together may cost a record of this site."""

    model_config = CLOSED
    unit: Unit = "image"
    epsilon: float = Field(gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)


def recipe_digest(recipe: Recipe) -> str:
    """What a site allows when it allows a recipe: all that decides the rounds; where the server keeps books is not."""
    wish = recipe.privacy and replace(recipe.privacy, ledger=None)
    return hashlib.sha256(identity(recipe.model_copy(update={"privacy": wish})).encode()).hexdigest()


def image_report_kinds(recipe: Recipe) -> tuple[str, ...]:
    """What rounds tell beside what the algorithm sends."""
    silent = recipe.privacy is not None and recipe.privacy.metrics == "suppress"
    return (METRICS,) if recipe.evaluate.forgetting or (recipe.evaluate.every and not silent) else ()


def check_recipe(recipe: Recipe, site: SiteId, allow: Allow, budget: Budget | None) -> None:
    """Refuse what this site does not take part in, before its images are looked at."""
    name = recipe.algorithm.name
    if recipe.methods:
        raise Refused("policy", "the recipe compares several methods; send that of one method")
    if recipe.build_algorithm().pooled:
        raise Refused("policy", f"{name} needs all sites' images in one place, and {site}'s stay where they are")
    if allow.algorithms != "all" and name not in allow.algorithms:
        raise Refused("policy", f"{site} does not allow the algorithm {name}; allow.algorithms in its site.yaml would")
    if allow.recipes and recipe_digest(recipe) not in allow.recipes:
        raise Refused(
            "policy",
            f"{site} does not allow this recipe, whose mark is {recipe_digest(recipe)}; see allow.recipes there",
        )
    kinds = [exchange.kind for exchange in recipe.build_algorithm().exchanges]
    check_kinds((*kinds, *image_report_kinds(recipe)), site, allow)
    _check_privacy(recipe.privacy, site, allow, budget)


def check_kinds(kinds: tuple[str, ...], site: SiteId, allow: Allow) -> None:
    for kind in kinds:
        if kind not in allow.kinds:
            remedy = "; set evaluate.every: 0 (and forgetting: false)" if kind == METRICS else ""
            raise Refused("policy", f"{site} does not let {kind} leave; allow.kinds in its site.yaml would{remedy}")


def _check_privacy(wish: PrivacyConfig | None, site: SiteId, allow: Allow, budget: Budget | None) -> None:
    if wish is not None and wish.randomness == "seed" and not allow.seeded_noise:
        raise Refused(
            "policy",
            f"the recipe draws its noise from a seed that the server knows, which {site} does not allow; set "
            "privacy.randomness: secret",
        )
    if budget is None:
        return
    if wish is None:
        raise Refused("budget", f"{site} has a privacy budget, and this recipe no privacy plan; add `privacy`")
    if wish.unit != budget.unit:
        raise Refused("budget", f"{site} counts privacy by {budget.unit}; set privacy.unit: {budget.unit}")
    if wish.unit == "site" and wish.at == "server":
        raise Refused("budget", f"{site} counts only on noise of its own; set privacy.at: site")
    if wish.metrics == "open":
        raise Refused("budget", f"metrics would leave {site} as they are; set privacy.metrics: suppress or count")


def check_sent_kinds(sent: Mapping[str, int], agreed: Mapping[str, int], site: SiteId, allow: Allow) -> None:
    """The last look at a reply: its kinds, and the bytes of each, are no others than were agreed."""
    check_kinds(tuple(kind for kind, size in sent.items() if size), site, allow)
    for kind, size in sent.items():
        if size > agreed.get(kind, 0):
            raise Refused(
                "policy", f"{size} bytes of {kind} would have left {site}, where {agreed.get(kind, 0)} were agreed"
            )
