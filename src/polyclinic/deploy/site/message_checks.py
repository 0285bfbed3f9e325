"""What a server writes to a site, read with distrust: each message is what it should be, or `Refused`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from polyclinic import __version__
from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import SiteId
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.data.splits import PARTS
from polyclinic.deploy.site.participation import Terms
from polyclinic.federation.site_runner import ORDER
from polyclinic.storage import messages

MOST_RECIPE, DEEPEST = 1 << 16, 24
"""Characters of a recipe, and how deep its keys may lie."""
RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""Names of runs become names of folders."""


def addressed(fields: Mapping[str, Any], site: SiteId) -> str:
    """The purpose of a message that is for this site."""
    if fields.get("site") != site:
        raise Refused("site", f"a message for {messages.shown(fields.get('site'))} reached {site}")
    return _text(fields, "purpose", 20)


def run_of(fields: Mapping[str, Any]) -> str:
    run = _text(fields, "run", 64)
    if not RUN.fullmatch(run):
        raise Refused("run", "a run is named by letters, digits, '-' and '_'")
    return run


def recipe_of(fields: Mapping[str, Any], site: SiteId) -> Recipe:
    """The recipe that a message brings, from a server that runs what this site runs."""
    if (theirs := _text(fields, "version", 40)) != __version__:
        raise Refused(
            "version", f"the server runs polyclinic {theirs!r}, {site} {__version__!r}; install the same on both"
        )
    recipe = _parsed(_text(fields, "recipe", MOST_RECIPE))
    if fields.get("seed") != recipe.seed:
        raise Refused("seed", f"the message has seed {messages.shown(fields.get('seed'))}, its recipe {recipe.seed}")
    return recipe


@lru_cache(maxsize=4)
def _parsed(text: str) -> Recipe:
    try:
        _refuse_bomb(text)
        values = yaml.safe_load(text)
        if not isinstance(values, dict):
            raise Refused("recipe", "the recipe holds no keys")
        return Recipe.of(values)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise Refused("recipe", "the recipe cannot be read as YAML") from None
    except RecipeError as error:  # all it can quote is what the server wrote
        raise Refused("recipe", str(error)) from None


def _refuse_bomb(text: str) -> None:
    """YAML of a few lines that would become billions, or that nests without end."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
            raise Refused("recipe", f"the recipe has YAML aliases, or keys more than {DEEPEST} deep; write it out")


def terms_of(fields: Mapping[str, Any], site: SiteId) -> Terms:
    """What a `begin` message says."""
    recipe, classes = recipe_of(fields, site), fields.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) and len(name) <= 200 for name in classes):
        raise Refused("json", "classes are not a list of names")
    channels, size = (_whole(fields, name, 1, 1 << 16) for name in ("channels", "size"))
    plan = fields.get("plan")
    if (plan is None) != (recipe.privacy is None):
        raise Refused("privacy", "a privacy plan and a recipe with `privacy` come together, or neither does")
    shape = tuple(classes), channels, size
    if plan is None:
        return Terms(run_of(fields), recipe, *shape)
    if not isinstance(plan, dict):
        raise Refused("json", "the plan is not an object")
    quiet = plan.get("metrics_noise")
    _whole(plan, "holders", 1, 1 << 31)
    told = math.inf if quiet is None else _number(plan, "metrics_noise")
    return Terms(run_of(fields), recipe, *shape, _number(plan, "noise"), told)


def check_order(fields: Mapping[str, Any], recipe: Recipe, site: SiteId) -> None:
    """An order of a round holds what the recipe says, and values that can be reckoned with."""
    if missing := ORDER - fields.keys():
        raise Refused("json", f"the order to {site} lacks {', '.join(sorted(missing))}")
    rounds = _whole(fields, "rounds", recipe.rounds, recipe.rounds)
    _whole(fields, "round", 1, rounds + (fields["purpose"] == "evaluate"))
    _whole(fields, "seed", recipe.seed, recipe.seed)
    _whole(fields, "durable", 0, 1 << 53)
    _number(fields, "lr")
    parts = fields["parts"]
    if not isinstance(parts, list) or not all(part in PARTS for part in parts) or len(set(parts)) < len(parts):
        raise Refused("json", "parts are not among train, validation and test, each once")
    if fields["purpose"] == "train" and not set(parts) <= {"validation"}:
        raise Refused("json", "rounds tell of validation images only")


def _text(fields: Mapping[str, Any], name: str, most: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise Refused("json", f"{name} is {messages.shown(value)}, but should be a text of at most {most} characters")
    return value


def _whole(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        wanted = f"{least}" if least == most else f"a whole number from {least} to {most}"
        raise Refused(name, f"{name} is {messages.shown(value)}, but should be {wanted}")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if not messages.is_number(value) or value < 0:
        raise Refused(name, f"{name} is {messages.shown(value)}, but should be a number, 0 or more")
    return float(value)
