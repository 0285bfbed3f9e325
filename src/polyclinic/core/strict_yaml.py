"""Recipes, and the settings of sites and servers, are YAML files, read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from polyclinic.core.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """YAML lets a later key silently replace an equal one before it; here that is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for name, mark in [(str(key.value), key.start_mark) for key, _ in node.value]:
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {name!r} is there twice", problem_mark=mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(
    path: Path,
    what: str = "recipe",
    remedy: str = "see `polyclinic list recipes`",
    keys: str = "data, model and algorithm",
) -> dict[str, Any]:
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
