"""Recipes: one YAML file that names everything a run needs. Unknown keys and impossible combinations are errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from polyclinic.algorithms import ALGORITHMS, Averaging
from polyclinic.claims import Claim
from polyclinic.core import Augment, Optimiser, Private, Stage, Training
from polyclinic.data import DATASETS, PARTITIONS
from polyclinic.data.partition import Partition
from polyclinic.data.splits import Fractions
from polyclinic.errors import RecipeError
from polyclinic.metrics import METRICS
from polyclinic.models import MODELS
from polyclinic.pace import EarlyStop, Schedule
from polyclinic.privacy.plan import Wish, wish_problems
from polyclinic.stages import STAGES
from polyclinic.training_rules import training_problems
from polyclinic.yaml_files import read_yaml

CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
for _options in (Augment, Optimiser, Private, Training, Wish, Schedule, EarlyStop, Averaging, *STAGES.values()):
    setattr(_options, "__pydantic_config__", CLOSED)  # noqa: B010  plain dataclasses; algorithms inherit it

T = TypeVar("T")


class Open(BaseModel):
    """A section that names something and gives its options beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class AlgorithmSection(Open):
    name: str


class StageSection(Open):
    name: str


class PartitionSection(Open):
    by: str = "natural"


class DataSection(Open):
    name: str
    partition: PartitionSection = PartitionSection()
    split: Fractions = Fractions()
    allow_single_class: bool = False

    @field_validator("split", mode="wrap")
    @classmethod
    def _where(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        with _blaming("data.split"):
            return handler(value)


class ModelSection(BaseModel):
    model_config = CLOSED
    name: str
    dropout: float | None = Field(None, ge=0, lt=1)
    norm: Literal["own", "group"] = "own"
    """group: normalisation over the batch is replaced by GroupNorm, which no image shares with another."""
    weights: str | None = None
    """A safetensors file, or `torchvision` for torchvision's own download."""


class EvaluateSection(BaseModel):
    model_config = CLOSED
    every: int = Field(1, ge=0)
    bootstrap: int = Field(1000, ge=0)
    train: bool = True
    """Whether training images are predicted too after the last round, for the gap to validation images."""


class EngineSection(BaseModel):
    model_config = CLOSED
    name: Literal["local", "stacked", "auto"] = "local"
    workers: int = Field(0, ge=0, le=256)
    threads: int = Field(1, ge=1, le=256)
    device: str = "cpu"
    compile: Literal["auto", "always", "never"] = "auto"
    """Whether stacks are compiled: on a GPU, where what is left of the run would take minutes."""


class Recipe(BaseModel):
    model_config = CLOSED
    name: str = Field(min_length=1)
    about: str = ""
    seed: int = Field(0, ge=0, lt=2**53)
    rounds: int = Field(ge=1)
    data: DataSection
    model: ModelSection
    algorithm: AlgorithmSection
    training: Training = Training()
    schedule: Schedule = Schedule()
    early_stop: EarlyStop | None = None
    cohort: int | None = Field(None, ge=1)
    turns: Literal["random", "cyclic"] = "random"
    quorum: int = Field(1, ge=1)
    max_norm: float = Field(1e6, gt=0)
    evaluate: EvaluateSection = EvaluateSection()
    engine: EngineSection = EngineSection()
    stages: list[StageSection] = Field(default_factory=list)
    """What happens to an update on its way from a site to the server, in this order."""
    privacy: Wish | None = None
    """What the run may cost in privacy, and whose."""
    snapshot_every: int = Field(1, ge=1)
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """For comparisons: a name for each method and the keys it sets, dotted, on top of this recipe."""
    paper: dict[str, str] = Field(default_factory=dict)
    """What the paper reports for each method, shown beside what we measure."""
    claims: list[Claim] = Field(default_factory=list)
    """What the paper claims of these methods, tested when all have run."""

    @field_validator("algorithm", "data", "model", "schedule", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @staticmethod
    def load(path: Path | str, settings: Mapping[str, Any] | None = None) -> Recipe:
        """Read and validate a recipe file, `settings` (dotted keys) taking the place of what it says."""
        return Recipe.of(read_yaml(Path(path)), settings, str(path))

    @staticmethod
    def of(values: Mapping[str, Any], settings: Mapping[str, Any] | None = None, source: str = "recipe") -> Recipe:
        with _blaming(source):
            wanted = with_settings(values, settings or {})
            _refuse_unknown(wanted, _layout(wanted))
            recipe = _validate(Recipe, wanted)
            _check(recipe)
            return recipe

    def algorithm_of(self, private: Private | None = None) -> Averaging:
        """The algorithm with its options and this recipe's training, made private by a plan."""
        kind = _choose(ALGORITHMS, self.algorithm.name, "algorithm", "algorithm.name")
        training = replace(self.training, private=private)
        return _validate(kind, {**self.algorithm.options, "training": training}, "algorithm.")

    def stages_of(self) -> list[Stage]:
        names = [section.name for section in self.stages]
        for name in (name for name in names if names.count(name) > 1):
            raise RecipeError(f"stages: {name} is there twice; once is enough")
        return [
            _validate(_choose(STAGES, section.name, "stage", "stages.name"), section.options, "stages.")
            for section in self.stages
        ]

    def partition_of(self) -> Partition:
        kind = _choose(PARTITIONS, self.data.partition.by, "partition", "data.partition.by")
        with _blaming("data.partition"):
            return kind.model_validate(self.data.partition.options)

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        return text

    def method(self, name: str) -> Recipe:
        """The recipe of one of its `methods`."""
        settings = _choose(self.methods, name, "method", "methods")
        base = self.model_dump(mode="json") | {"methods": {}, "paper": {}, "claims": [], "name": name}
        with _blaming(f"method {name}"):
            if {"methods", "paper", "claims"} & {key.split(".")[0] for key in settings}:
                raise RecipeError("a method cannot have methods, a paper or claims of its own; set other keys")
        return Recipe.of(base, settings, f"method {name}")


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `values` with dotted keys set: a section before the keys in it, a name before its options.

    Naming another algorithm drops the options of the one before.
    """
    result: dict[str, Any] = _copy(dict(values))
    for key, value in sorted(settings.items(), key=lambda item: (item[0].count("."), not item[0].endswith(".name"))):
        *path, last = key.split(".")
        here = result
        for step in path:
            inner = here.get(step)
            inside = {"name": inner} if isinstance(inner, str) else inner if isinstance(inner, dict) else {}
            here[step] = here = inside
        if key == "algorithm.name" and here.get(last) != value:
            here.clear()
        here[last] = _copy(value)
    return result


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


@contextmanager
def _blaming(source: str) -> Iterator[None]:
    """Say where the mistake is."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _layout(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys a recipe may have and what lies below them, which depends on what it names."""
    layout, data = _keys(Recipe), values.get("data")
    algorithm, dataset = _named(values.get("algorithm")), _named(data)
    partition = _named(data.get("partition", {}), "by", "natural") if isinstance(data, dict) else None
    if algorithm is not None:
        options = _keys(_choose(ALGORITHMS, algorithm, "algorithm", "algorithm.name"))
        layout["algorithm"] = {"name": str} | {key: hint for key, hint in options.items() if key != "training"}
    layout["stages"] = {"name": str} | {key: hint for stage in STAGES.values() for key, hint in _keys(stage).items()}
    if dataset is not None:
        layout["data"] = _keys(DataSection) | _keys(_choose(DATASETS, dataset, "data set", "data.name").options)
    if dataset is not None and partition is not None:
        kind = _choose(PARTITIONS, partition, "partition", "data.partition.by")
        layout["data"]["partition"] = {"by": str} | _keys(kind)
    return layout


def _named(section: Any, key: str = "name", default: str | None = None) -> str | None:
    """What a section names, if it is written well enough to tell."""
    name = section.get(key, default) if isinstance(section, dict) else section
    return name if isinstance(name, str) else None


def _keys(section: Any) -> dict[str, Any]:
    """The keys of a section and the type of what lies below each."""
    if isinstance(section, dict):
        return section
    hints = get_type_hints(section)
    names = section.model_fields if issubclass(section, BaseModel) else [f.name for f in fields(section)]
    return {name: hints[name] for name in names}


def _refuse_unknown(values: Any, section: Any, place: str = "") -> None:
    """Checked before anything else: a mistyped key is usually also a missing one. And true is no number."""
    for item in values if isinstance(values, list) else ():
        _refuse_unknown(item, section, place)
    known, given = _keys(section), values if isinstance(values, dict) else {}
    unknown = [(_nearest(str(key), list(known)), str(key)) for key in given if key not in known]
    if unknown:
        near, key = max(unknown, key=lambda found: bool(found[0]))
        raise RecipeError(f"there is no key {place + key!r}{near}; known here: {', '.join(known)}")
    for key, value in given.items():
        kinds = (known[key], *get_args(known[key]))
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise RecipeError(f"{place}{key} is {str(value).lower()}, but should be a number")
        for inner in kinds:
            if isinstance(inner, dict) or is_dataclass(inner) or _is_closed(inner):
                _refuse_unknown(value, inner, f"{place}{key}.")


def _is_closed(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Open)


def _validate(kind: type[T], values: Any, place: str = "") -> T:
    try:
        found: T = TypeAdapter(kind).validate_python(values)
        return found
    except ValidationError as error:
        raise RecipeError(_sentence(error, place)) from None


def _sentence(error: ValidationError, place: str) -> str:
    first = error.errors()[0]
    key = place + ".".join(str(step) for step in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return f"the key {key!r} is missing; add it{more}"
    wish = re.sub("^(Input|String|Value error,) ", "", first["msg"])
    if first["type"] in ("model_type", "dataclass_type", "dict_type"):
        wish = "should hold keys of its own, written as {key: value} or indented below it"
    return f"{key} is {first['input']!r:.60}, but {wish}{more}"


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _choose(registry: Mapping[str, T], name: str, what: str, key: str) -> T:
    if name not in registry:
        near = _nearest(name, list(registry))
        raise RecipeError(f"{key}: there is no {what} {name!r}{near}; there are: {', '.join(registry) or 'none'}")
    return registry[name]


def _check(recipe: Recipe) -> None:
    """Everything that can be known to be wrong before anything runs."""
    _choose(MODELS, recipe.model.name, "model", "model.name")
    wished = _privacy_problems(recipe)
    for sentence in (*training_problems(recipe.training), *_pace_problems(recipe), *_problems(recipe), *wished):
        raise RecipeError(sentence)
    with _blaming("data"):
        DATASETS[recipe.data.name].options.model_validate(recipe.data.options)
    recipe.partition_of()
    recipe.stages_of()
    if not recipe.methods:
        recipe.algorithm_of()
    for name in recipe.methods:
        recipe.method(name)


def _pace_problems(recipe: Recipe) -> Iterator[str]:
    schedule, stop = recipe.schedule, recipe.early_stop
    watching = schedule.name == "plateau" or stop is not None
    if watching and recipe.evaluate.every != 1:
        yield "schedule plateau and early_stop watch the validation parts of every round; set evaluate.every: 1"
    if watching and recipe.cohort is not None:
        yield "schedule plateau and early_stop would compare different sites from round to round; set cohort: null"
    if schedule.name == "cosine" and schedule.minimum == 0 and (schedule.period or recipe.rounds) < recipe.rounds:
        yield "schedule cosine reaches a learning rate of exactly 0 within the run; give schedule.minimum a small share"
    if watching and recipe.data.split.validation == 0:
        yield "schedule plateau and early_stop watch the validation parts; give data.split.validation a share"
    if schedule.period is not None and schedule.period < 1:
        yield f"schedule.period is {schedule.period}; choose 1 round or more"
    if schedule.patience < 0:
        yield f"schedule.patience is {schedule.patience}; choose 0 rounds or more"
    if not 0 < schedule.factor < 1:
        yield f"schedule.factor is {schedule.factor}; choose a share between 0 and 1"
    if not 0 <= schedule.minimum <= 1:
        yield f"schedule.minimum is {schedule.minimum}; choose a share of the first learning rate in [0, 1]"
    if stop is not None and stop.patience < 1:
        yield f"early_stop.patience is {stop.patience}; choose 1 round or more"
    if stop is not None and stop.min_delta < 0:
        yield f"early_stop.min_delta is {stop.min_delta}; choose 0 or more"
    if stop is not None and stop.metric not in METRICS:
        near = _nearest(stop.metric, list(METRICS))
        yield f"early_stop.metric: there is no metric {stop.metric!r}{near}; there are: {', '.join(METRICS)}"


def _privacy_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.privacy is not None:
        watching = recipe.schedule.name == "plateau" or recipe.early_stop is not None
        yield from wish_problems(recipe.privacy, recipe.training, watching)
        if recipe.algorithm.name == "adaptive-noise" and recipe.privacy.unit == "site":
            yield "adaptive-noise scales the noise of training steps; set privacy.unit: image or patient"
    elif recipe.algorithm.name == "adaptive-noise":
        yield "adaptive-noise scales the noise of a privacy plan; add for example `privacy: {epsilon: 3}`"
    elif recipe.training.private is not None:
        yield "training.private follows from privacy; leave it out and write privacy instead"


def _problems(recipe: Recipe) -> Iterator[str]:
    name, engine = recipe.algorithm.name, recipe.engine
    at_the_end = name in ("single", "cross-site")
    if at_the_end and recipe.early_stop is not None:
        yield f"{name} hands its models in after the last round, which early_stop would skip; set early_stop: null"
    if at_the_end and recipe.cohort is not None:
        yield f"{name} needs every site in the last round; set cohort: null"
    if ALGORITHMS[name].pooled and recipe.quorum > 1:
        yield f"{name} trains in one place, so a quorum of {recipe.quorum} can never be met; set quorum: 1"
    if recipe.cohort is not None and recipe.quorum > recipe.cohort:
        yield f"a quorum of {recipe.quorum} can never be met by a cohort of {recipe.cohort}; lower quorum"
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", engine.device):
        yield f"engine.device is {engine.device!r}; choose cpu, cuda, cuda:1 and so on, mps or auto"
    if engine.workers > 0 and engine.device != "cpu":
        yield "worker processes share the CPU only; set engine.workers: 0 or engine.device: cpu"
    if engine.workers > 0 and engine.name != "local":
        yield f"engine.name {engine.name} works in one process; set engine.workers: 0, or engine.name: local"
    methods = recipe.methods or {recipe.name: {}}
    named = [("paper", name) for name in recipe.paper] + [("claims", n) for c in recipe.claims for n in c.methods]
    for place, unknown in (pair for pair in named if pair[1] not in methods):
        near = _nearest(unknown, list(methods))
        yield f"{place}: there is no method {unknown!r}{near}; there are: {', '.join(methods)}"


def recipes_folder() -> Path:
    """Where our recipes lie: inside the installed package, or beside the source in a checkout."""
    installed = Path(str(resources.files("polyclinic"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def our_recipes() -> dict[str, Path]:
    folder = recipes_folder()
    return {str(p.relative_to(folder).with_suffix("")): p for p in sorted(folder.rglob("*.yaml"))}
