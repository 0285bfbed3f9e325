"""Strict parsing of JSON from untrusted sources and of YAML files: recipes and the settings of sites and servers."""

import json
import math
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from polyclinic.core.errors import RecipeError, Refused

JsonObject: TypeAlias = dict[str, Any]
"""A JSON or YAML object, before its values are checked."""


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


_JSON = json.JSONDecoder(
    parse_constant=_reject_constant, parse_float=_parse_finite, object_pairs_hook=_reject_duplicates
)


def parse_json(text: bytes, kind: str) -> JsonObject:
    """Parse a JSON object in UTF-8 with unique keys, finite numbers and valid text, or raise `Refused` with `kind`."""
    try:
        found = _JSON.decode(str(text, "utf-8"))
        if b"\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise Refused(kind, f"this is not valid JSON ({str(error)[:60]})") from None
    if not isinstance(found, dict):
        raise Refused(kind, "this is not a JSON object")
    return found


class _Loader(yaml.SafeLoader):
    """A loader that refuses duplicate keys, where YAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, mark in [(str(key.value), key.start_mark) for key, _ in node.value]:
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {name!r} occurs twice", problem_mark=mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(
    path: Path,
    what: str = "recipe",
    remedy: str = "see `polyclinic list recipes`",
    keys: str = "data, model and algorithm",
) -> JsonObject:
    """Return the mapping that a YAML file holds.

    Args:
        path: The file.
        what: The kind of file, for messages.
        remedy: The way out that the message names if the file cannot be read.
        keys: Keys that such a file should hold, for messages.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise RecipeError(f"cannot read the {what} {path}: {error.strerror}; {remedy}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} cannot be read as YAML: {_describe_yaml_error(error)}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} is not a {what}: it should hold keys such as {keys}")
    return values


def _describe_yaml_error(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())[:160]
    return f"{getattr(error, 'problem', '')}, at line {mark.line + 1}, column {mark.column + 1}"
