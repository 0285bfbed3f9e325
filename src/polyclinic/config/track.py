"""Where a run can be followed."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

Track = Annotated[
    tuple[Literal["tensorboard", "mlflow"], ...],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
"""`track` in a recipe: where a run is followed; it changes nothing in the run."""
