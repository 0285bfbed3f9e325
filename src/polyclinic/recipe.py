"""Recipes: one YAML file that names everything a run needs. Unknown keys and impossible combinations are errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from polyclinic.algorithms import ALGORITHMS, Averaging
from polyclinic.core import Optimiser, Training
from polyclinic.data import DATASETS, PARTITIONS
from polyclinic.data.partition import Partition
from polyclinic.data.splits import Fractions
from polyclinic.errors import RecipeError
from polyclinic.metrics import METRICS
from polyclinic.models import MODELS
from polyclinic.rounds import EarlyStop, Schedule

CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
for _options in (Optimiser, Training, Schedule, EarlyStop, *ALGORITHMS.values()):
    setattr(_options, "__pydantic_config__", CLOSED)  # noqa: B010  plain dataclasses, closed to unknown keys

T = TypeVar("T")


class Named(BaseModel):
    """A section that names something and gives its options beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class DataSection(Named):
    partition: dict[str, Any] = Field(default_factory=lambda: {"by": "natural"})
    split: Fractions = Fractions()
    allow_single_class: bool = False


class ModelSection(BaseModel):
    model_config = CLOSED
    name: str
    dropout: float | None = Field(None, ge=0, lt=1)
    weights: str | None = None
    """A safetensors file, or `torchvision` for torchvision's own download."""


class EvaluateSection(BaseModel):
    model_config = CLOSED
    every: int = Field(1, ge=0)
    bootstrap: int = Field(1000, ge=0)


class EngineSection(BaseModel):
    model_config = CLOSED
    name: Literal["local"] = "local"
    workers: int = Field(0, ge=0, le=256)
    threads: int = Field(1, ge=1, le=256)
    device: str = "cpu"


class Recipe(BaseModel):
    model_config = CLOSED
    name: str = Field(min_length=1)
    about: str = ""
    seed: int = Field(0, ge=0, lt=2**53)
    rounds: int = Field(ge=1)
    data: DataSection
    model: ModelSection
    algorithm: Named
    training: Training = Training()
    schedule: Schedule = Schedule()
    early_stop: EarlyStop | None = None
    cohort: int | None = Field(None, ge=1)
    quorum: int = Field(1, ge=1)
    max_norm: float = Field(1e6, gt=0)
    evaluate: EvaluateSection = EvaluateSection()
    engine: EngineSection = EngineSection()
    snapshot_every: int = Field(1, ge=1)
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """For comparisons: a name for each method and the keys it sets, dotted, on top of this recipe."""
    paper: dict[str, str] = Field(default_factory=dict)
    """What the paper reports for each method, shown beside what we measure."""

    @field_validator("algorithm", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @staticmethod
    def load(path: Path | str, settings: Mapping[str, Any] | None = None) -> Recipe:
        """Read and validate a recipe file, `settings` (dotted keys) taking the place of what it says."""
        return Recipe.of(read_yaml(Path(path)), settings, str(path))

    @staticmethod
    def of(values: Mapping[str, Any], settings: Mapping[str, Any] | None = None, source: str = "recipe") -> Recipe:
        recipe = _validate(Recipe, with_settings(values, settings or {}), source)
        _check(recipe, source)
        return recipe

    def algorithm_of(self) -> Averaging:
        """The algorithm with its options and this recipe's training."""
        kind = _choose(ALGORITHMS, self.algorithm.name, "algorithm", "algorithm.name")
        values = {**self.algorithm.options, "training": self.training}
        return _validate(kind, values, "algorithm")

    def partition_of(self) -> Partition:
        options = {key: value for key, value in self.data.partition.items() if key != "by"}
        by = str(self.data.partition.get("by", "natural"))
        return _choose(PARTITIONS, by, "partition", "data.partition.by").model_validate(options)

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(TypeAdapter(Recipe).dump_python(self, mode="json"), sort_keys=False)
        return text

    def method(self, name: str) -> Recipe:
        """The recipe of one of its `methods`."""
        base = TypeAdapter(Recipe).dump_python(self, mode="json") | {"methods": {}, "paper": {}, "name": name}
        return Recipe.of(base, self.methods[name], f"method {name}")


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}; see `polyclinic list recipes`") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())[:160]}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} is not a recipe: it should hold keys such as data, model and algorithm")
    return values


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `values` with dotted keys set; naming another algorithm drops the options of the one before."""
    result: dict[str, Any] = _copy(dict(values))
    for key, value in settings.items():
        *path, last = key.split(".")
        here = result
        for step in path:
            inner = here.get(step)
            here[step] = here = (
                {"name": inner} if isinstance(inner, str) else (inner if isinstance(inner, dict) else {})
            )
        if key == "algorithm.name" and here.get(last) != value:
            here.clear()
        here[last] = _copy(value)
    return result


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def _validate(kind: type[T], values: Any, source: str) -> T:
    try:
        found: T = TypeAdapter(kind).validate_python(values)
        return found
    except ValidationError as error:
        raise RecipeError(f"{source}: {_sentence(error, kind)}") from None


def _sentence(error: ValidationError, kind: Any) -> str:
    first = error.errors()[0]
    steps = [str(step) for step in first["loc"]]
    key = ".".join(steps)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _keys_at(kind, steps[:-1])
        return f"there is no key {key!r}{_nearest(steps[-1], known)}; known here: {', '.join(known)}{more}"
    if first["type"] == "missing":
        return f"the key {key!r} is missing; add it{more}"
    wish = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{key} is {first['input']!r:.60}, but {wish}{more}"


def _keys_at(kind: Any, steps: list[str]) -> list[str]:
    """The keys that exist at a place of the recipe."""
    for step in steps:
        hint = kind.model_fields[step].annotation if hasattr(kind, "model_fields") else _hint(kind, step)
        kind = next((a for a in getattr(hint, "__args__", ()) if a is not type(None)), hint)
    return list(kind.model_fields) if hasattr(kind, "model_fields") else [f.name for f in fields(kind)]


def _hint(kind: Any, step: str) -> Any:
    return {"optimiser": Optimiser, "training": Training}.get(step, kind)


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _choose(registry: Mapping[str, T], name: str, what: str, key: str) -> T:
    if name not in registry:
        near = _nearest(name, list(registry))
        raise RecipeError(f"{key}: there is no {what} {name!r}{near}; there are: {', '.join(registry)}")
    return registry[name]


def _check(recipe: Recipe, source: str) -> None:
    """Everything that can be known to be wrong before anything runs."""
    training, options = recipe.training, recipe.training.optimiser
    at_the_end = recipe.algorithm.name in ("single", "cross-site")
    problems = [
        (
            (training.epochs is None) == (training.steps is None),
            "training needs either epochs or steps: to average every τ steps write `epochs: null` and `steps: τ`",
        ),
        (
            (training.epochs or 1) < 1 or (training.steps or 1) < 1,
            "training.epochs and training.steps start at 1",
        ),
        (training.batch < 1, f"training.batch is {training.batch}; choose 1 or more"),
        (
            not 0 < training.fine_tune <= 1,
            f"training.fine_tune is {training.fine_tune}; choose a share in (0, 1]",
        ),
        (not options.lr > 0, f"training.optimiser.lr is {options.lr}; choose a positive learning rate"),
        (
            not 0 <= options.momentum < 1,
            f"training.optimiser.momentum is {options.momentum}; choose one in [0, 1)",
        ),
        (
            options.weight_decay < 0,
            f"training.optimiser.weight_decay is {options.weight_decay}; choose 0 or more",
        ),
        (
            options.name != "sgd" and options.momentum != 0,
            f"{options.name} has no momentum option; leave training.optimiser.momentum at 0",
        ),
        (
            recipe.evaluate.every != 1 and (recipe.schedule.name == "plateau" or recipe.early_stop is not None),
            "schedule plateau and early_stop watch the validation parts of every round; set evaluate.every: 1",
        ),
        (
            at_the_end and recipe.early_stop is not None,
            f"{recipe.algorithm.name} hands its models in after the last round, which early_stop would skip; set "
            "early_stop: null",
        ),
        (
            at_the_end and recipe.cohort is not None,
            f"{recipe.algorithm.name} needs every site in the last round; set cohort: null",
        ),
        (
            recipe.early_stop is not None and recipe.early_stop.metric not in METRICS,
            f"early_stop.metric is not one of {', '.join(METRICS)}",
        ),
        (
            recipe.cohort is not None and recipe.quorum > recipe.cohort,
            f"a quorum of {recipe.quorum} can never be met by a cohort of {recipe.cohort}; lower quorum",
        ),
        (
            recipe.engine.workers > 0 and recipe.engine.device != "cpu",
            "worker processes share the CPU only; set engine.workers: 0 or engine.device: cpu",
        ),
    ]
    for problem, sentence in problems:
        if problem:
            raise RecipeError(f"{source}: {sentence}")
    _choose(MODELS, recipe.model.name, "model", "model.name")
    _choose(DATASETS, recipe.data.name, "data set", "data.name").options.model_validate(recipe.data.options)
    recipe.partition_of()
    if not recipe.methods:
        recipe.algorithm_of()
    for name in recipe.methods:
        recipe.method(name)


def recipes_folder() -> Path:
    """Where our recipes lie: inside the installed package, or beside the source in a checkout."""
    installed = Path(str(resources.files("polyclinic"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def our_recipes() -> dict[str, Path]:
    folder = recipes_folder()
    return {str(p.relative_to(folder).with_suffix("")): p for p in sorted(folder.rglob("*.yaml"))}
