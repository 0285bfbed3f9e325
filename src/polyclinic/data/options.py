"""The base class for options of datasets, partitions and splits: frozen, no unknown keys, errors in one sentence."""

from __future__ import annotations

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
            raise RecipeError(cls._format_error(error)) from None

    @classmethod
    def _format_error(cls, error: ValidationError) -> str:
        first = error.errors()[0]
        option = ".".join(str(step) for step in first["loc"]) or "value"
        if first["type"] == "extra_forbidden":
            return f"{cls.__name__} has no option '{option}'; it has: {', '.join(cls.model_fields)}."
        if first["type"] == "missing":
            return f"{cls.__name__} needs the option '{option}'; add it."
        requirement = first["msg"].removeprefix("Input ")
        return f"The option '{option}' of {cls.__name__} {requirement}, but is {first['input']!r}."
