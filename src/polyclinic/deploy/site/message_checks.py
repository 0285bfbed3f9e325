"""Reads a server's messages without trusting them: every field is what it should be, or `Refused` is raised.

`message_handler.py` calls these functions before anything else happens with a message.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import yaml

from polyclinic.config.recipe import Recipe
from polyclinic.core import PROTOCOL, RecipeError, Refused, SiteId, __version__
from polyclinic.data.splits import PARTS
from polyclinic.deploy.site.participation import RunTerms
from polyclinic.federation.site_runner import ORDER
from polyclinic.federation.update_check import is_number
from polyclinic.storage import messages

MAX_RECIPE_LENGTH, MAX_DEPTH = 1 << 16, 24
"""The most characters of a recipe, and how deep its keys may be nested."""
MOST_SITES, MOST_NOISE = 10_000, 1e6
"""The most sites of a run, and the most noise that a recipe can ask for (`privacy.plan.PrivacyConfig`)."""
RUN = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""A run's identifier becomes the name of a folder."""


def check_addressee(fields: Mapping[str, object], site: SiteId) -> str:
    """The purpose of a message; raises `Refused` if it is for another site."""
    if fields.get("site") != site:
        raise Refused("site", f"a message for {messages.format_untrusted(fields.get('site'))} reached {site}")
    return _read_text(fields, "purpose", 20)


def read_run_id(fields: Mapping[str, object]) -> str:
    run = _read_text(fields, "run", 64)
    if not RUN.fullmatch(run):
        raise Refused("run", "a run is named by letters, digits, '-' and '_'")
    return run


def read_recipe(fields: Mapping[str, object], site: SiteId) -> Recipe:
    """The recipe in a message; raises `Refused` unless the server speaks this site's protocol.

    A server of another version may write a recipe, if it means the same here.
    """
    version = _read_text(fields, "version", 40)
    if (theirs := fields.get("protocol")) != PROTOCOL:
        raise Refused(
            "version",
            f"the server speaks protocol {messages.format_untrusted(theirs)} (polyclinic {version!r}), {site} "
            f"{PROTOCOL} (polyclinic {__version__!r}); install the same on both",
        )
    recipe = _parse_recipe(_read_text(fields, "recipe", MAX_RECIPE_LENGTH))
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
        recipe = Recipe.from_values(values)
        if not _is_within(values, recipe.to_values()):
            raise Refused("recipe", "the recipe is read otherwise here than written; install the server's version")
        return recipe
    except (yaml.YAMLError, ValueError, RecursionError):
        raise Refused("recipe", "the recipe cannot be read as YAML") from None
    except RecipeError as error:  # all it can quote is what the server wrote
        raise Refused("recipe", str(error)) from None


def _is_within(written: object, read: object) -> bool:
    """Whether everything that the server wrote was read as written; what it did not know of has its default here."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(key in read and _is_within(value, read[key]) for key, value in written.items())
    return written == read


def _check_yaml_size(text: str) -> None:
    """Raise `Refused` for YAML that expands without limit: with aliases, or nested too deeply."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
            raise Refused("recipe", f"the recipe has YAML aliases, or keys more than {MAX_DEPTH} deep; write it out")


def read_terms(fields: Mapping[str, object], site: SiteId) -> RunTerms:
    """The terms of a run, from its `begin` message."""
    recipe, classes = read_recipe(fields, site), fields.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) and len(name) <= 200 for name in classes):
        raise Refused("json", "classes are not a list of names")
    channels, size = (_read_int(fields, name, 1, 1 << 16) for name in ("channels", "size"))
    plan = fields.get("plan")
    if (plan is None) != (recipe.privacy is None):
        raise Refused("privacy", "a privacy plan and a recipe with `privacy` come together, or neither does")
    sites = fields.get("sites")
    if not isinstance(sites, list) or not all(isinstance(name, str) and 0 < len(name) <= 200 for name in sites):
        raise Refused("json", "sites are not a list of names")
    if not 1 <= len(sites) <= MOST_SITES:
        raise Refused("json", f"{len(sites)} sites are named, where 1 to {MOST_SITES} may be")
    terms = RunTerms(read_run_id(fields), recipe, tuple(classes), channels, size, tuple(sites))
    if plan is None:
        return terms
    if not isinstance(plan, dict):
        raise Refused("json", "the plan is not an object")
    _read_int(plan, "holders", 1, 1 << 31)
    metrics_noise = math.inf if plan.get("metrics_noise") is None else _read_number(plan, "metrics_noise", MOST_NOISE)
    return replace(terms, noise=_read_noise(plan, site), metrics_noise=metrics_noise)


def _read_noise(plan: Mapping[str, object], site: SiteId) -> float:
    """The noise of this site: its own where the plan solved one for each site, else that of all."""
    by_site = plan.get("site_noise", {})
    if not isinstance(by_site, dict):
        raise Refused("json", "site_noise is not an object")
    return _read_number(by_site, site, MOST_NOISE) if site in by_site else _read_number(plan, "noise", MOST_NOISE)


def check_round_fields(fields: Mapping[str, object], recipe: Recipe, site: SiteId) -> None:
    """Raise `Refused` unless a round's message agrees with the recipe and all its numbers are in range."""
    if missing := ORDER - fields.keys():
        raise Refused("json", f"the message to {site} lacks {', '.join(sorted(missing))}")
    _read_int(fields, "rounds", recipe.rounds, recipe.rounds)
    round = _read_int(fields, "round", 1, recipe.rounds + (fields["purpose"] == "evaluate"))
    _read_int(fields, "seed", recipe.seed, recipe.seed)
    _read_int(fields, "oldest_snapshot", 0, 1 << 53)
    _read_number(fields, "lr")
    _read_int(fields, "memory_round", 0, recipe.rounds)
    parts = fields["parts"]
    if not isinstance(parts, list) or not all(part in PARTS for part in parts) or len(set(parts)) < len(parts):
        raise Refused("json", "parts are not among train, validation and test, each once")
    if fields["purpose"] == "train" and not set(parts) <= {"validation"}:
        raise Refused("json", "rounds report on validation images only")
    every = recipe.evaluate.every
    if fields["purpose"] == "train" and parts and (not every or (round - 1) % every):
        raise Refused("json", f"the recipe has no metrics in round {round} (evaluate.every: {every})")


def _read_text(fields: Mapping[str, object], name: str, most: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise Refused(
            "json", f"{name} is {messages.format_untrusted(value)}, but should be a text of at most {most} characters"
        )
    return value


def _read_int(fields: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        wanted = f"{least}" if least == most else f"a whole number from {least} to {most}"
        raise Refused(name, f"{name} is {messages.format_untrusted(value)}, but should be {wanted}")
    return value


def _read_number(fields: Mapping[str, object], name: str, most: float = math.inf) -> float:
    value = fields.get(name)
    if not is_number(value) or not 0 <= value <= most:
        wanted = "a number, 0 or more" if math.isinf(most) else f"a number from 0 to {most:g}"
        raise Refused(name, f"{name} is {messages.format_untrusted(value)}, but should be {wanted}")
    return float(value)
