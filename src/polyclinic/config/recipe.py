"""Recipes: one YAML file that names everything a run needs. Unknown keys and impossible combinations are errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from polyclinic.algorithms import ALGORITHMS, Averaging
from polyclinic.algorithms.distillation.refine import FEDDF, RefinementOptions
from polyclinic.config.capability import Capability
from polyclinic.config.rules import EngineName, check_algorithm, find_problems, format_suggestion, unused_options
from polyclinic.config.track import Track
from polyclinic.core.contract import Augment, Optimiser, Private, Stage, Training
from polyclinic.core.errors import RecipeError
from polyclinic.core.strict_yaml import read_yaml
from polyclinic.core.validation import validate_as
from polyclinic.data import DATASETS, PARTITIONS
from polyclinic.data.partitioning.partition import Partition
from polyclinic.data.splits import Fractions
from polyclinic.evaluation.claims import Claim
from polyclinic.federation.schedules import EarlyStop, Schedule
from polyclinic.models import MODELS
from polyclinic.privacy.plan import PrivacyConfig
from polyclinic.privacy.transforms import STAGES
from polyclinic.training.rules import find_training_problems

FINISHES = {"refine": RefinementOptions(), "feddf": FEDDF}
OWN = (Capability, RefinementOptions)
RANK = {"name": 0, "variant": 1}
CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
for _options in (
    Augment,
    Optimiser,
    Private,
    Training,
    PrivacyConfig,
    Schedule,
    EarlyStop,
    Averaging,
    *STAGES.values(),
    *OWN,
):
    setattr(_options, "__pydantic_config__", CLOSED)  # noqa: B010  plain dataclasses; algorithms inherit it

T = TypeVar("T")


class OptionsSection(BaseModel):
    """A section that names something and gives its options beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class NamedSection(OptionsSection):
    name: str


class PartitionSection(OptionsSection):
    by: str = "natural"


class PublicSection(OptionsSection):
    name: str
    split: Fractions = Fractions()

    @field_validator("split", mode="wrap")
    @classmethod
    def _where(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        with _naming_source("data.split" if cls is DataSection else "public.split"):
            return handler(value)


class DataSection(PublicSection):
    partition: PartitionSection = PartitionSection()
    allow_single_class: bool = False


class ModelSection(BaseModel):
    model_config = CLOSED
    name: str
    dropout: float | None = Field(None, ge=0, lt=1)
    norm: Literal["own", "group"] = "own"
    """group: normalisation over the batch is replaced by GroupNorm, which no image shares with another."""
    weights: str | None = None
    """A safetensors file, or `torchvision` for torchvision's own download."""
    cut: int | None = Field(None, ge=1)
    """The stage after which the extractor ends and the head begins; None: before the last layers."""
    pretrain: int | None = Field(None, ge=1)
    """Epochs on the public set, at the server, before round 1."""
    checkpoint: bool = False
    """Whether blocks compute their activations again for the gradient, instead of keeping them."""


class ClusterSection(BaseModel):
    """Sites of like machines, and the network that they share."""

    model_config = CLOSED
    at_least: float = Field(ge=0, le=1)
    """The score from which on a site belongs here, if no cluster named before takes it."""
    model: ModelSection
    lr: float = Field(1.0, gt=0)
    """What the learning rate is multiplied by here."""

    @field_validator("model", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class EvaluateSection(BaseModel):
    model_config = CLOSED
    every: int = Field(1, ge=0)
    bootstrap: int = Field(1000, ge=0)
    train: bool = True
    """Whether training images are predicted too after the last round, for the gap to validation images."""
    forgetting: bool = False
    """Whether sites tell what shares of their training images each deployment of the model has lost and gained."""
    headline: Literal["personal", "global", "student", "ensemble", "public"] | None = None
    """The model that a run is judged by; public: the server's own, on public test images. None: the first there is."""


class EngineSection(BaseModel):
    model_config = CLOSED
    name: EngineName = "local"
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
    algorithm: NamedSection
    clusters: dict[str, ClusterSection] = Field(default_factory=dict)
    """From most to least capable: sites whose machines are alike, with a network that these can run."""
    capability: Capability = Field(default_factory=Capability)
    public: PublicSection | None = None
    """Labelled images that the server may look at."""
    finish: RefinementOptions | None = None
    """When all rounds are over, a student learns from the server's models on the public set."""
    ensemble: bool = False
    """When all rounds are over, the sites' own models of the last one predict together."""
    training: Training = Training()
    schedule: Schedule = Schedule()
    early_stop: EarlyStop | None = None
    cohort: int | None = Field(None, ge=1)
    turns: Literal["random", "cyclic"] = "random"
    quorum: int | None = Field(None, ge=1)
    max_norm: float = Field(1e6, gt=0)
    evaluate: EvaluateSection = EvaluateSection()
    engine: EngineSection = EngineSection()
    stages: list[NamedSection] = Field(default_factory=list)
    """What happens to an update on its way from a site to the server, in this order."""
    privacy: PrivacyConfig | None = None
    """What the run may cost in privacy, and whose."""
    snapshot_every: int = Field(1, ge=1)
    track: Track = ()
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """For comparisons: a name for each method and the keys it sets, dotted, on top of this recipe."""
    paper: dict[str, str] = Field(default_factory=dict)
    """What the paper reports for each method, shown beside what we measure."""
    claims: list[Claim] = Field(default_factory=list)
    """What the paper claims of these methods, tested when all have run."""

    @field_validator("algorithm", "data", "model", "public", "schedule", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("finish", mode="before")
    @classmethod
    def _named_finish(cls, value: Any) -> Any:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or "name" not in given:
            return value
        start = _check_choice(FINISHES, str(given["name"]), "way to finish", "finish.name")
        preset = {field.name: getattr(start, field.name) for field in fields(start)}
        return preset | {key: option for key, option in given.items() if key != "name"}

    @staticmethod
    def load(path: Path | str, settings: Mapping[str, Any] | None = None) -> Recipe:
        """Read and validate a recipe file, `settings` (dotted keys) taking the place of what it says."""
        return Recipe.from_values(read_yaml(Path(path)), settings, str(path))

    @staticmethod
    def from_values(
        values: Mapping[str, Any], settings: Mapping[str, Any] | None = None, source: str = "recipe"
    ) -> Recipe:
        with _naming_source(source):
            wanted = with_settings(values, settings or {})
            _check_known_keys(wanted, _section_keys(wanted))
            recipe = validate_as(Recipe, wanted)
            _check_recipe(recipe)
            return recipe

    def build_algorithm(self, private: Private | None = None) -> Averaging:
        """The algorithm with its options and this recipe's training, made private by a plan."""
        kind = _check_choice(ALGORITHMS, self.algorithm.name, "algorithm", "algorithm.name")
        training = replace(self.training, private=private)
        return validate_as(kind, {**self.algorithm.options, "training": training}, "algorithm.")

    @property
    def thresholds(self) -> dict[str, float]:
        """The least score of each cluster, from most to least capable."""
        return {name: section.at_least for name, section in self.clusters.items()}

    def build_stages(self) -> list[Stage]:
        names = [section.name for section in self.stages]
        for name in (name for name in names if names.count(name) > 1):
            raise RecipeError(f"stages: {name} is there twice; once is enough")
        return [
            validate_as(_check_choice(STAGES, section.name, "stage", "stages.name"), section.options, "stages.")
            for section in self.stages
        ]

    def build_partition(self) -> Partition:
        kind = _check_choice(PARTITIONS, self.data.partition.by, "partition", "data.partition.by")
        with _naming_source("data.partition"):
            return kind.model_validate(self.data.partition.options)

    def to_yaml(self) -> str:
        values = self.model_dump(mode="json", exclude=None if self.track else {"track"})
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def method_recipe(self, name: str) -> Recipe:
        """The recipe of one of its `methods`."""
        settings = _check_choice(self.methods, name, "method", "methods")
        base = self.model_dump(mode="json") | {"methods": {}, "paper": {}, "claims": [], "name": name}
        with _naming_source(f"method {name}"):
            if {"methods", "paper", "claims"} & {key.split(".")[0] for key in settings}:
                raise RecipeError("a method cannot have methods, a paper or claims of its own; set other keys")
        return Recipe.from_values(base, settings, f"method {name}")


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `values` with dotted keys set: a section before the keys in it, a name before its options.

    Naming another algorithm drops the options of the one before; another variant, those that it does not have.
    """
    result: dict[str, Any] = _deep_copy(dict(values))
    for key, value in sorted(settings.items(), key=lambda s: (s[0].count("."), RANK.get(s[0].split(".")[-1], 2))):
        *path, last = key.split(".")
        here = result
        for step in path:
            inner = here.get(step)
            inside = {"name": inner} if isinstance(inner, str) else inner if isinstance(inner, dict) else {}
            here[step] = here = inside
        if key in ("algorithm.name", "finish.name") and here.get(last) != value:
            here.clear()
        if key in ("algorithm.variant", "finish.variant"):
            for option in unused_options(path[0], here.get("name"), value):
                here.pop(option, None)
        here[last] = _deep_copy(value)
    return result


def _deep_copy(value: Any) -> Any:
    return {k: _deep_copy(v) for k, v in value.items()} if isinstance(value, dict) else value


@contextmanager
def _naming_source(source: str) -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _section_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys a recipe may have and what lies below them, which depends on what it names."""
    layout, data = _model_keys(Recipe), values.get("data")
    algorithm, dataset = _registered_kind(values.get("algorithm")), _registered_kind(data)
    partition = _registered_kind(data.get("partition", {}), "by", "natural") if isinstance(data, dict) else None
    if algorithm is not None:
        options = _model_keys(_check_choice(ALGORITHMS, algorithm, "algorithm", "algorithm.name"))
        layout["algorithm"] = {"name": str} | {key: hint for key, hint in options.items() if key != "training"}
    layout["stages"] = {"name": str} | {
        key: hint for stage in STAGES.values() for key, hint in _model_keys(stage).items()
    }
    layout["finish"] = {"name": str} | _model_keys(RefinementOptions)
    public = _registered_kind(values.get("public"))
    if public is not None:
        layout["public"] = _model_keys(PublicSection) | _model_keys(
            _check_choice(DATASETS, public, "data set", "public.name").options
        )
    if dataset is not None:
        layout["data"] = _model_keys(DataSection) | _model_keys(
            _check_choice(DATASETS, dataset, "data set", "data.name").options
        )
    if dataset is not None and partition is not None:
        kind = _check_choice(PARTITIONS, partition, "partition", "data.partition.by")
        layout["data"]["partition"] = {"by": str} | _model_keys(kind)
    return layout


def _registered_kind(section: Any, key: str = "name", default: str | None = None) -> str | None:
    """What a section names, if it is written well enough to tell."""
    name = section.get(key, default) if isinstance(section, dict) else section
    return name if isinstance(name, str) else None


def _model_keys(section: Any) -> dict[str, Any]:
    """The keys of a section and the type of what lies below each."""
    if isinstance(section, dict):
        return section
    hints = get_type_hints(section)
    names = section.model_fields if issubclass(section, BaseModel) else [f.name for f in fields(section)]
    return {name: hints[name] for name in names}


def _check_known_keys(values: Any, section: Any, place: str = "") -> None:
    """Checked before anything else: a mistyped key is usually also a missing one. And true is no number."""
    for item in values if isinstance(values, list) else ():
        _check_known_keys(item, section, place)
    known, given = _model_keys(section), values if isinstance(values, dict) else {}
    unknown = [(format_suggestion(str(key), list(known)), str(key)) for key in given if key not in known]
    if unknown:
        near, key = max(unknown, key=lambda found: bool(found[0]))
        raise RecipeError(f"there is no key {place + key!r}{near}; known here: {', '.join(known)}")
    for key, value in given.items():
        kinds = (known[key], *get_args(known[key]))
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise RecipeError(f"{place}{key} is {str(value).lower()}, but should be a number")
        named = get_origin(known[key]) is dict and isinstance(value, dict)  # names of one's own, a section below each
        inside = (
            {f"{place}{key}.{name}.": below for name, below in value.items()} if named else {f"{place}{key}.": value}
        )
        for inner in kinds:
            if isinstance(inner, dict) or is_dataclass(inner) or _is_closed(inner):
                for where, section in inside.items():
                    _check_known_keys(section, inner, where)


def _is_closed(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, OptionsSection)


def _check_choice(registry: Mapping[str, T], name: str, what: str, key: str) -> T:
    if name not in registry:
        near = format_suggestion(name, list(registry))
        raise RecipeError(f"{key}: there is no {what} {name!r}{near}; there are: {', '.join(registry) or 'none'}")
    return registry[name]


def _check_recipe(recipe: Recipe) -> None:
    """Everything that can be known to be wrong before anything runs."""
    _check_choice(MODELS, recipe.model.name, "model", "model.name")
    for sentence in (*find_training_problems(recipe.training), *find_problems(recipe)):
        raise RecipeError(sentence)
    with _naming_source("data"):
        DATASETS[recipe.data.name].options.model_validate(recipe.data.options)
    if recipe.public is not None:
        with _naming_source("public"):
            DATASETS[recipe.public.name].options.model_validate(recipe.public.options)
    for name, cluster in recipe.clusters.items():
        _check_choice(MODELS, cluster.model.name, "model", f"clusters.{name}.model.name")
    recipe.build_partition()
    recipe.build_stages()
    if not recipe.methods:
        for sentence in check_algorithm(recipe, recipe.build_algorithm()):
            raise RecipeError(sentence)
    methods = {name: recipe.method_recipe(name) for name in recipe.methods}
    for name in {name for claim in recipe.claims if claim.metric == "forgotten" for name in claim.methods}:
        if name in methods and not methods[name].evaluate.forgetting:
            raise RecipeError(f"a claim is about what {name} forgot; set evaluate.forgetting: true for it")


def recipes_folder() -> Path:
    """Where our recipes lie: inside the installed package, or beside the source in a checkout."""
    installed = Path(str(resources.files("polyclinic"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "recipes"


def bundled_recipes() -> dict[str, Path]:
    folder = recipes_folder()
    return {str(p.relative_to(folder).with_suffix("")): p for p in sorted(folder.rglob("*.yaml"))}
