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
from polyclinic.deploy.site.participation import RunTerms
from polyclinic.federation.site_runner import ORDER
from polyclinic.storage import messages

MOST_RECIPE, DEEPEST = 1 << 16, 24
"""Characters of a recipe, and how deep its keys may lie."""
RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""Names of runs become names of folders."""


def check_addressee(fields: Mapping[str, Any], site: SiteId) -> str:
    """The purpose of a message that is for this site."""
    if fields.get("site") != site:
        raise Refused("site", f"a message for {messages.format_untrusted(fields.get('site'))} reached {site}")
    return _read_text(fields, "purpose", 20)


def read_run_id(fields: Mapping[str, Any]) -> str:
    run = _read_text(fields, "run", 64)
    if not RUN.fullmatch(run):
        raise Refused("run", "a run is named by letters, digits, '-' and '_'")
    return run


def read_recipe(fields: Mapping[str, Any], site: SiteId) -> Recipe:
    """The recipe that a message brings, from a server that runs what this site runs."""
    if (theirs := _read_text(fields, "version", 40)) != __version__:
        raise Refused(
            "version", f"the server runs polyclinic {theirs!r}, {site} {__version__!r}; install the same on both"
        )
    recipe = _parse_recipe(_read_text(fields, "recipe", MOST_RECIPE))
    if fields.get("seed") != recipe.seed:
        raise Refused(
            "seed", f"the message has seed {messages.format_untrusted(fields.get('seed'))}, its recipe {recipe.seed}"
        )
    return recipe


@lru_cache(maxsize=4)
def _parse_recipe(text: str) -> Recipe:
    try:
        _check_yaml_size(text)
        values = yaml.safe_load(text)
        if not isinstance(values, dict):
            raise Refused("recipe", "the recipe holds no keys")
        return Recipe.from_values(values)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise Refused("recipe", "the recipe cannot be read as YAML") from None
    except RecipeError as error:  # all it can quote is what the server wrote
        raise Refused("recipe", str(error)) from None


def _check_yaml_size(text: str) -> None:
    """YAML of a few lines that would become billions, or that nests without end."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
            raise Refused("recipe", f"the recipe has YAML aliases, or keys more than {DEEPEST} deep; write it out")


def read_terms(fields: Mapping[str, Any], site: SiteId) -> RunTerms:
    """What a `begin` message says."""
    recipe, classes = read_recipe(fields, site), fields.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) and len(name) <= 200 for name in classes):
        raise Refused("json", "classes are not a list of names")
    channels, size = (_read_int(fields, name, 1, 1 << 16) for name in ("channels", "size"))
    plan = fields.get("plan")
    if (plan is None) != (recipe.privacy is None):
        raise Refused("privacy", "a privacy plan and a recipe with `privacy` come together, or neither does")
    shape = tuple(classes), channels, size
    if plan is None:
        return RunTerms(read_run_id(fields), recipe, *shape)
    if not isinstance(plan, dict):
        raise Refused("json", "the plan is not an object")
    quiet = plan.get("metrics_noise")
    _read_int(plan, "holders", 1, 1 << 31)
    told = math.inf if quiet is None else _read_number(plan, "metrics_noise")
    return RunTerms(read_run_id(fields), recipe, *shape, _read_number(plan, "noise"), told)


def check_order(fields: Mapping[str, Any], recipe: Recipe, site: SiteId) -> None:
    """An order of a round holds what the recipe says, and values that can be reckoned with."""
    if missing := ORDER - fields.keys():
        raise Refused("json", f"the order to {site} lacks {', '.join(sorted(missing))}")
    rounds = _read_int(fields, "rounds", recipe.rounds, recipe.rounds)
    _read_int(fields, "round", 1, rounds + (fields["purpose"] == "evaluate"))
    _read_int(fields, "seed", recipe.seed, recipe.seed)
    _read_int(fields, "durable", 0, 1 << 53)
    _read_number(fields, "lr")
    parts = fields["parts"]
    if not isinstance(parts, list) or not all(part in PARTS for part in parts) or len(set(parts)) < len(parts):
        raise Refused("json", "parts are not among train, validation and test, each once")
    if fields["purpose"] == "train" and not set(parts) <= {"validation"}:
        raise Refused("json", "rounds tell of validation images only")


def _read_text(fields: Mapping[str, Any], name: str, most: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise Refused(
            "json", f"{name} is {messages.format_untrusted(value)}, but should be a text of at most {most} characters"
        )
    return value


def _read_int(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        wanted = f"{least}" if least == most else f"a whole number from {least} to {most}"
        raise Refused(name, f"{name} is {messages.format_untrusted(value)}, but should be {wanted}")
    return value


def _read_number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if not messages.is_number(value) or value < 0:
        raise Refused(name, f"{name} is {messages.format_untrusted(value)}, but should be a number, 0 or more")
    return float(value)
