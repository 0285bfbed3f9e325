"""The base class for options of datasets, partitions and splits: frozen, no unknown keys, errors in one sentence."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from polyclinic.core import RecipeError


class Options(BaseModel):
    """Base class of all options. The constructor and `model_validate` raise a `RecipeError` that names the option."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_recipe_error(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            raise RecipeError(_format_error(cls, error)) from None


def _format_error(options: type[BaseModel], error: ValidationError) -> str:
    first = error.errors()[0]
    option = ".".join(str(step) for step in first["loc"]) or "value"
    if first["type"] == "extra_forbidden":
        return f"{options.__name__} has no option '{option}'; it has: {', '.join(options.model_fields)}."
    if first["type"] == "missing":
        return f"{options.__name__} needs the option '{option}'; add it."
    return (
        f"The option '{option}' of {options.__name__} {first['msg'].removeprefix('Input ')}, but is {first['input']!r}."
    )
