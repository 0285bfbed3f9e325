"""Validation of options against their declared types; an error is one sentence that names the key."""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from polyclinic.core.errors import RecipeError

T = TypeVar("T")
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


_type_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""An adapter takes longer to make than to use."""


def validate_as(kind: type[T], values: Any, place: str = "") -> T:
    """Convert `values` to the type `kind`; raise a RecipeError about the first wrong key, which begins with `place`."""
    return cast(T, _validate(_type_adapter(cast(Any, kind)), values, place))


def check_options(options: Any, place: str) -> None:
    """Raise a RecipeError if a field of the dataclass `options` is outside the range that its type declares."""
    owner: Any = type(options)
    for name, adapter in _declared_ranges(owner).items():
        _validate(adapter, getattr(options, name), f"{place}{name}")


@cache
def _declared_ranges(kind: type) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: TypeAdapter(hints[field.name], config=ConfigDict(allow_inf_nan=False))
        for field in fields(kind)
        if _declares_range(hints[field.name])
    }


def _declares_range(hint: Any) -> bool:
    return get_origin(hint) in (Annotated, Literal) or any(map(_declares_range, get_args(hint)))


def _validate(adapter: TypeAdapter[Any], values: Any, place: str) -> Any:
    try:
        return adapter.validate_python(values)
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
