"""The recipe: the keys of the YAML file that describes a run. Unknown keys and impossible combinations are errors."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.distillation.refine import FEDDF, RefinementOptions
from polyclinic.config.capability import Capability, ResourceShares, ResourceWeights
from polyclinic.config.recipe_rules import EngineName, check_algorithm, find_problems, format_suggestion, unused_options
from polyclinic.config.renamed_keys import find_renamed
from polyclinic.core import (
    Augment,
    CurriculumOptions,
    Optimiser,
    Private,
    RecipeError,
    Training,
    check_training,
    read_yaml,
    validate_as,
)
from polyclinic.data import DATASETS
from polyclinic.data.partitioning.partitions import PARTITIONS, Partition
from polyclinic.data.splits import Fractions
from polyclinic.evaluation.claims import Claim
from polyclinic.federation.robust.rules import Aggregation
from polyclinic.federation.schedules import EarlyStop, Schedule
from polyclinic.models import MODELS
from polyclinic.privacy.plan import PrivacyConfig
from polyclinic.privacy.transforms import STAGES
from polyclinic.privacy.transforms.base import UpdateTransform

FINISHES = {"refine": RefinementOptions(), "feddf": FEDDF}
RANK = {"name": 0, "variant": 1}
CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
NAME_ALONE = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
"""A name alone stands for a section of which only the name is given."""
Track = Annotated[
    tuple[Literal["tensorboard", "mlflow"], ...],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
"""`track` in a recipe: where a run is followed; it changes nothing in the run."""
T = TypeVar("T")


def _forbid_extra(kind: type[T]) -> type[T]:
    """Let pydantic refuse unknown keys and infinite numbers for a plain dataclass; subclasses inherit this."""
    setattr(kind, "__pydantic_config__", CLOSED)  # noqa: B010
    return kind


for _options in (
    Augment,
    CurriculumOptions,
    Optimiser,
    Private,
    Training,
    PrivacyConfig,
    Schedule,
    EarlyStop,
    Aggregation,
    Capability,
    ResourceShares,
    ResourceWeights,
    RefinementOptions,
    Algorithm,
):
    _forbid_extra(_options)


class ClosedSection(BaseModel):
    """A section with fixed keys."""

    model_config = CLOSED


class OptionsSection(BaseModel):
    """A section with a name and the options that belong to it."""

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


class ModelSection(ClosedSection):
    name: str
    dropout: float | None = Field(None, ge=0, lt=1)
    norm: Literal["default", "group"] = "default"
    """group: GroupNorm replaces BatchNorm, so that no image influences another."""
    weights: str | None = None
    """Initial weights: a safetensors file, or `torchvision` for the weights that torchvision downloads."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """The SHA-256 of first weights that come from `weights` or `pretrain`, by which real sites recognise them."""
    split_after: int | None = Field(None, ge=1)
    """The stage after which the extractor ends and the head begins; None: before the last layers."""
    pretrain: int | None = Field(None, ge=1)
    """Epochs of training on the public dataset, at the server, before round 1."""
    activation_checkpointing: bool = False
    """Recompute the activations of blocks in the backward pass instead of keeping them."""

    @property
    def starts_elsewhere(self) -> bool:
        """Whether its first weights are given, rather than made from the seed."""
        return self.weights is not None or self.pretrain is not None


class ClusterSection(ClosedSection):
    """A cluster of sites with similar machines, and the network that they share."""

    min_score: float = Field(ge=0, le=1)
    """The lowest capability score of its sites. A site joins the first cluster whose minimum it reaches."""
    model: Annotated[ModelSection, NAME_ALONE]
    lr_scale: float = Field(1.0, gt=0)
    """Factor of the learning rate in this cluster."""


class EvaluateSection(ClosedSection):
    every: int = Field(1, ge=0)
    bootstrap: int = Field(1000, ge=0, le=100_000)
    train: bool = True
    """Also predict the training images after the last round, which gives the generalisation gap."""
    forgetting: bool = False
    """Sites report which shares of their training images each deployed model forgot and learnt."""
    headline: Literal["personal", "global", "student", "ensemble", "public"] | None = None
    """The model that the headline figures are about; public: the server's model on public test images. None: the first
    that exists of personal, student, ensemble and global."""


class EngineSection(ClosedSection):
    name: EngineName = "local"
    workers: int = Field(0, ge=0, le=256)
    threads: int = Field(1, ge=1, le=256)
    device: str = "cpu"
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the stacked training step. auto: on a GPU, if the rest of the run would take minutes."""


class Recipe(ClosedSection):
    """A validated recipe (docs/recipes.md explains every key). Use `load` for a file and `from_values` for a dict."""

    name: str = Field(min_length=1)
    about: str = ""
    seed: int = Field(0, ge=0, lt=2**53)
    rounds: int = Field(ge=1)
    data: Annotated[DataSection, NAME_ALONE]
    model: Annotated[ModelSection, NAME_ALONE]
    algorithm: Annotated[NamedSection, NAME_ALONE]
    clusters: dict[str, ClusterSection] = Field(default_factory=dict)
    """Clusters of sites with similar machines, from most to least capable."""
    capability: Capability = Field(default_factory=Capability)
    public: Annotated[PublicSection | None, NAME_ALONE] = None
    """Labelled images at the server."""
    finish: RefinementOptions | None = None
    """After the last round, distil the server's models into a student on the public dataset."""
    ensemble: bool = False
    """After the last round, average the predictions of the sites' last models."""
    training: Training = Training()
    schedule: Annotated[Schedule, NAME_ALONE] = Schedule()
    early_stop: EarlyStop | None = None
    cohort: int | None = Field(None, ge=1)
    cohort_order: Literal["random", "cyclic"] = "random"
    quorum: int | None = Field(None, ge=1)
    max_norm: float = Field(1e6, gt=0)
    aggregate: Annotated[Aggregation, NAME_ALONE] = Aggregation()
    """How the updates of a round are combined, and what one site can do to the result."""
    evaluate: EvaluateSection = EvaluateSection()
    engine: EngineSection = EngineSection()
    stages: list[NamedSection] = Field(default_factory=list)
    """Transforms of an update on its way from a site to the server, in this order."""
    privacy: PrivacyConfig | None = None
    """The privacy budget, and whom it protects."""
    snapshot_every: int = Field(1, ge=1)
    keep_snapshots: int = Field(5, ge=2)
    """Snapshots to which `polyclinic rollback` can go back, while the disk has room."""
    track: Track = ()
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """For comparisons: the name of each method and the (dotted) keys that it sets on top of this recipe."""
    paper: dict[str, str] = Field(default_factory=dict)
    """The paper's result for each method, shown beside the measured one."""
    claims: list[Claim] = Field(default_factory=list)
    """The paper's claims about these methods, tested when all have run."""

    @field_validator("finish", mode="before")
    @classmethod
    def _named_finish(cls, value: Any) -> Any:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or "name" not in given:
            return value
        start = _check_choice(FINISHES, str(given["name"]), "way to finish", "finish.name")
        return vars(start) | {key: option for key, option in given.items() if key != "name"}

    @staticmethod
    def load(path: Path | str, settings: Mapping[str, Any] | None = None) -> "Recipe":
        """Read and validate a recipe file.

        Args:
            path: The YAML file.
            settings: Values by dotted key, such as `{"training.batch": 16}`, which replace those of the file.
        """
        return Recipe.from_values(read_yaml(Path(path)), settings, str(path))

    @staticmethod
    def from_values(
        values: Mapping[str, Any], settings: Mapping[str, Any] | None = None, source: str = "recipe"
    ) -> "Recipe":
        """Validate a recipe given as a mapping. Errors begin with `source`, the name of the file for instance."""
        with _naming_source(source):
            wanted = with_settings(values, settings or {})
            for sentence in find_renamed(wanted):
                raise RecipeError(sentence)
            _check_known_keys(wanted, _known_keys(wanted))
            recipe = validate_as(Recipe, wanted)
            _check_recipe(recipe)
            return recipe

    def build_algorithm(self, private: Private | None = None) -> Algorithm:
        """Build the algorithm with its options and the recipe's training options.

        Args:
            private: The DP-SGD options of a privacy plan; None trains without noise.
        """
        kind = _check_choice(ALGORITHMS, self.algorithm.name, "algorithm", "algorithm.name")
        options = {**self.algorithm.options, "training": replace(self.training, private=private)}
        return validate_as(kind, options, "algorithm.")

    @property
    def trained_models(self) -> dict[str, ModelSection]:
        """The model of each cluster; without clusters that of all sites, named ""."""
        return {name: section.model for name, section in self.clusters.items()} or {"": self.model}

    @property
    def thresholds(self) -> dict[str, float]:
        """The lowest score of each cluster, from most to least capable."""
        return {name: section.min_score for name, section in self.clusters.items()}

    def build_stages(self) -> list[UpdateTransform]:
        names = [section.name for section in self.stages]
        for name in (name for name in names if names.count(name) > 1):
            raise RecipeError(f"stages: {name} is listed twice; list it once")
        stages = [(_check_choice(STAGES, s.name, "stage", "stages.name"), s.options) for s in self.stages]
        return [validate_as(_forbid_extra(kind), options, "stages.") for kind, options in stages]

    def build_partition(self) -> Partition:
        kind = _check_choice(PARTITIONS, self.data.partition.by, "partition", "data.partition.by")
        with _naming_source("data.partition"):
            return kind.model_validate(self.data.partition.options)

    def to_values(self) -> dict[str, Any]:
        """Return what the YAML file of this recipe holds."""
        return self.model_dump(mode="json", exclude=None if self.track else {"track"})

    def to_yaml(self) -> str:
        return _write_yaml(json.dumps(self.to_values()))

    def method_recipe(self, name: str) -> "Recipe":
        """Return the recipe of one of `methods`."""
        settings = _check_choice(self.methods, name, "method", "methods")
        base = self.model_dump(mode="json") | {"methods": {}, "paper": {}, "claims": [], "name": name}
        if {"methods", "paper", "claims"} & {key.split(".")[0] for key in settings}:
            raise RecipeError(f"method {name}: a method cannot set methods, paper or claims; set other keys")
        return Recipe.from_values(base, settings, f"method {name}")


@lru_cache(maxsize=64)
def _write_yaml(document: str) -> str:
    """Write JSON as YAML. Sites and servers need the text of the same recipe again and again, and YAML is slow."""
    return str(yaml.safe_dump(json.loads(document), sort_keys=False, allow_unicode=True))


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of `values` with dotted keys set. The order of `settings` does not matter.

    Another algorithm's name drops the options of the previous one; another variant drops its unused options.
    """
    result = deepcopy(dict(values))
    for key, value in sorted(settings.items(), key=lambda s: (s[0].count("."), RANK.get(s[0].split(".")[-1], 2))):
        *path, last = key.split(".")
        here = result
        for step in path:
            inner = here.get(step)
            inner = {"name": inner} if isinstance(inner, str) else inner
            here[step] = here = inner if isinstance(inner, dict) else {}
        if key in ("algorithm.name", "finish.name") and here.get(last) != value:
            here.clear()
        if key in ("algorithm.variant", "finish.variant"):
            for option in unused_options(path[0], here.get("name"), value):
                here.pop(option, None)
        here[last] = deepcopy(value)
    return result


@contextmanager
def _naming_source(source: str) -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _known_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a recipe may have, each with its type. Those of a section depend on the name it gives."""
    keys, data = _typed_keys(Recipe), values.get("data")
    if algorithm := _find_named(values.get("algorithm"), ALGORITHMS, "algorithm", "algorithm.name"):
        options = _typed_keys(algorithm)
        keys["algorithm"] = {"name": str} | {key: options[key] for key in options if key != "training"}
    for name, section in (("data", DataSection), ("public", PublicSection)):
        if dataset := _find_named(values.get(name), DATASETS, "data set", f"{name}.name"):
            keys[name] = _typed_keys(section) | _typed_keys(dataset.options)
    if isinstance(data, dict) and isinstance(keys["data"], dict):
        given = data.get("partition", {})
        named = {"by": "natural"} | given if isinstance(given, dict) else given
        if partition := _find_named(named, PARTITIONS, "partition", "data.partition.by"):
            keys["data"]["partition"] = {"by": str} | _typed_keys(partition)
    stages = [_typed_keys(stage) for stage in STAGES.values()]
    keys["stages"] = {"name": str} | {key: kind for stage in stages for key, kind in stage.items()}
    keys["finish"] = {"name": str} | _typed_keys(RefinementOptions)
    return keys


def _find_named(section: Any, registry: Mapping[str, T], what: str, key: str) -> T | None:
    """Look up the entry that a section names; None if it names none, which is reported later."""
    name = section.get(key.rpartition(".")[2]) if isinstance(section, dict) else section
    return _check_choice(registry, name, what, key) if isinstance(name, str) else None


def _typed_keys(section: Any) -> dict[str, Any]:
    """Return the keys of a section and the type of each one's value."""
    if isinstance(section, dict):
        return section
    hints = get_type_hints(section)
    names = section.model_fields if issubclass(section, BaseModel) else [f.name for f in fields(section)]
    return {name: hints[name] for name in names}


def _check_known_keys(values: Any, section: Any, place: str = "") -> None:
    """Check keys before values, as a mistyped key often leaves another one missing. Also refuse booleans as numbers."""
    for item in values if isinstance(values, list) else ():
        _check_known_keys(item, section, place)
    known, given = _typed_keys(section), values if isinstance(values, dict) else {}
    unknown = [(format_suggestion(str(key), list(known)), str(key)) for key in given if key not in known]
    if unknown:
        near, key = max(unknown, key=lambda found: bool(found[0]))
        raise RecipeError(f"there is no key {place + key!r}{near}; known here: {', '.join(known)}")
    for key, value in given.items():
        kinds = (known[key], *get_args(known[key]))
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise RecipeError(f"{place}{key} is {str(value).lower()}, but should be a number")
        by_name = get_origin(known[key]) is dict and isinstance(value, dict)  # the user's names, each with a section
        inside = {f"{key}.{name}.": below for name, below in value.items()} if by_name else {f"{key}.": value}
        for kind in kinds:
            fixed = isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, OptionsSection)
            if isinstance(kind, dict) or is_dataclass(kind) or fixed:
                for where, below in inside.items():
                    _check_known_keys(below, kind, place + where)


def _check_choice(registry: Mapping[str, T], name: str, what: str, key: str) -> T:
    if name not in registry:
        near = format_suggestion(name, list(registry))
        raise RecipeError(f"{key}: there is no {what} {name!r}{near}; there are: {', '.join(registry) or 'none'}")
    return registry[name]


def _check_recipe(recipe: Recipe) -> None:
    """Raise the first problem that can be found before anything runs."""
    _check_choice(MODELS, recipe.model.name, "model", "model.name")
    check_training(recipe.training)
    for sentence in find_problems(recipe):
        raise RecipeError(sentence)
    for source, section in (("data", recipe.data), ("public", recipe.public)):
        if section is not None:
            with _naming_source(source):
                DATASETS[section.name].options.model_validate(section.options)
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
