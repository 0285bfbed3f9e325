"""Values from recipes as what they should be, or one sentence that says why not."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from polyclinic.core.errors import RecipeError

T = TypeVar("T")


@cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)  # takes longer to make than to use


def validate_as(kind: type[T], values: Any, place: str = "") -> T:
    """`values` as a `kind`; what is wrong with them is one sentence about the key, below `place`."""
    try:
        found: T = _type_adapter(cast(Any, kind)).validate_python(values)
        return found
    except ValidationError as error:
        raise RecipeError(_format_error(error, place)) from None


def _format_error(error: ValidationError, place: str) -> str:
    first = error.errors()[0]
    key = place + ".".join(str(step) for step in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return f"the key {key!r} is missing; add it{more}"
    wish = re.sub("^(Input|String|Value error,) ", "", first["msg"])
    if first["type"] in ("model_type", "dataclass_type", "dict_type"):
        wish = "should hold keys of its own, written as {key: value} or indented below it"
    return f"{key} is {first['input']!r:.60}, but {wish}{more}"
