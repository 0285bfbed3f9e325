"""The summary of a finished run, as result.json holds it: scores with intervals, cost, privacy.

Metrics are found by name, and whatever belongs to one kind of task (a confusion matrix, the names of classes) lies in
`details`, which `task.py` reads. So a new task needs no change here.
"""

from __future__ import annotations

import math
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, Self, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

from polyclinic.core import HELD_OUT, PUBLIC, Part, SiteId

SCHEMA_VERSION = 2
MODEL_DESCRIPTIONS = {
    "personal": "each site's own model",
    "student": "the server's student",
    "ensemble": "all sites' models together",
    "global": "the global model",
    "transfer": "each site's model at all others",
    HELD_OUT: "the global model",
}


class SummaryPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Metric(SummaryPart):
    """A metric, with its 95 % interval where there is one; None where it is undefined."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class PartScores(SummaryPart):
    """The scores of one model on `n` images of one part."""

    n: int
    metrics: dict[str, Metric]
    details: dict[str, JsonValue] = {}
    """What the task adds, such as a confusion matrix (`task.py`)."""

    def __getitem__(self, name: str) -> Metric:
        """The metric of this name; without a value where it was not measured."""
        return self.metrics.get(name, Metric())

    def value(self, name: str) -> float:
        """The metric's value; NaN where it is unknown."""
        return nan_if_none(self[name].value)

    def interval(self, name: str) -> tuple[float, float]:
        """The metric's interval; NaN where there is none."""
        return nan_if_none(self[name].low), nan_if_none(self[name].high)

    @property
    def values(self) -> dict[str, float | None]:
        """All metrics by name, without their intervals."""
        return {name: metric.value for name, metric in self.metrics.items()}


ModelScores: TypeAlias = dict[Part, PartScores]
SiteScores: TypeAlias = dict[str, ModelScores]
"""By the model's name: "global", "personal", "ensemble", a cluster's name …"""


def generalisation_gap(scores: ModelScores, metric: str) -> float:
    """A metric on training images minus the same on validation images; NaN where one of them is unknown."""
    train, validation = scores.get("train"), scores.get("validation")
    return train.value(metric) - validation.value(metric) if train and validation else math.nan


PooledFrom: TypeAlias = Literal["predictions", "rounded predictions", "scores", "reports", "nothing"]
"""Whence the figures of all sites together come: predictions of all images (in a simulation), predictions that sites
rounded, the sites' own scores, their last reports on validation images, or nothing, as all figures stayed at home."""


class Headline(SummaryPart):
    """The model that a run is judged by, and its scores on the images of all sites together."""

    model: str
    part: Part
    of: str | None = None
    """The model that was tested, where `model` names the test images: "held-out" or "public"."""
    whose: str | None = None
    """The sites whose images these are, in words; None: all sites."""
    scores: PartScores

    def __getitem__(self, name: str) -> Metric:
        return self.scores[name]

    @property
    def images(self) -> str:
        """A description of the images that it was measured on."""
        return (
            f"{self.model} test images"
            if self.model in (HELD_OUT, PUBLIC)
            else f"{self.part} images of {self.whose or 'all sites'}"
        )

    @property
    def model_description(self) -> str:
        model = self.of or self.model
        return MODEL_DESCRIPTIONS.get(model, f"cluster {model}'s model")


class Cost(SummaryPart):
    """Bytes and seconds over everything in the ledger, repeated rounds included."""

    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    site_seconds: float = 0.0
    refused: int = 0
    failed: int = 0
    withheld: int = 0
    """Sites that told no scores after the last round."""
    run_seconds: float | None = None
    """From the start of the command to the result."""

    @property
    def megabytes(self) -> float:
        return float(self.bytes_up + self.bytes_down) / 1e6

    @property
    def lost(self) -> int:
        """Updates that were refused or never arrived."""
        return self.refused + self.failed


class SiteSizes(SummaryPart):
    """How many images a site has in each part, and of each class over all parts."""

    site: SiteId
    train: int
    validation: int
    test: int
    classes: dict[str, int] = {}


class ModelSize(SummaryPart):
    """Parameters of the network, and the FLOPs of one training step; of several clusters, their sums."""

    name: str
    parameters: int
    flops_per_step: int
    clusters: dict[str, ModelSize] = {}


class EngineUsed(SummaryPart):
    name: str
    reason: str


class ReleasedKind(SummaryPart):
    """A kind of tensor or number that left the sites, and what protected it."""

    kind: str
    protection: str


class StudentTraining(SummaryPart):
    """How the server's student was distilled after the last round."""

    epochs: int
    best: int
    """The epoch whose weights were kept."""
    factor: float
    shapley: dict[str, float] = {}
    teacher_weights: dict[str, float] = {}
    history: list[dict[str, float]] = []


class Audit(BaseModel):
    """What `polyclinic audit` found about the privacy claim; further figures of the audit are kept as they are."""

    model_config = ConfigDict(frozen=True, extra="allow")

    site: SiteId
    verdict: str
    refuted: bool = False
    membership: str | None = None


PUBLIC_SEED = "the noise comes from a public seed"
"""Why ε is no guarantee with `privacy.randomness: seed`."""


class PrivacySpent(SummaryPart):
    """What the run has cost in privacy, and under which assumptions."""

    unit: Literal["image", "patient", "site"]
    neighbours: str
    noise_at: str
    sampling: str
    delta: float
    clip: float | Literal["auto"]
    noise: float
    site_noise: dict[SiteId, float] = {}
    """The noise of each site, where it is not the same at all."""
    accountant: str
    max_epsilon: float | None = None
    """privacy.epsilon of the recipe."""
    max_sites_per_record: int
    metrics: str
    metrics_noise: float | None = None
    randomness: str
    no_guarantee_reason: str
    """Empty where ε is a guarantee."""
    planned_epsilon: float | None = None
    epsilon_by_accountant: dict[str, float | None]
    worst_site_epsilon: float | None = None
    site_epsilon: dict[SiteId, float | None]
    stopped_by_budget: bool
    earlier_epsilon: float | None = None
    """Of the runs before it on a shared ledger."""
    largest_group: int = 1
    """Training images of one patient at one site, at most."""
    group: int | None = None
    """privacy.group of the recipe."""
    unnamed: int = 0
    """Training images whose patient is not named."""
    left_out: int = 0
    """Training images beyond privacy.group, which were not used."""
    sampled: Literal["image", "patient", "either"] = "image"
    """What joined a step by itself; either: patients where they are named, images elsewhere."""
    paper_metric: float | None = None
    audit: Audit | None = None

    @model_validator(mode="after")
    def _withdraw_seeded_guarantee(self) -> Self:
        """Runs of earlier versions called the ε of seeded noise a guarantee."""
        if self.randomness == "seed" and not self.no_guarantee_reason:
            object.__setattr__(self, "no_guarantee_reason", PUBLIC_SEED)
        return self

    @property
    def epsilon(self) -> float | None:
        """By the plan's accountant; None: infinite. It is what ε would be where `no_guarantee_reason` is given."""
        return self.epsilon_by_accountant.get(self.accountant)

    @property
    def has_guarantee(self) -> bool:
        return not self.no_guarantee_reason and self.epsilon is not None


class RunSummary(SummaryPart):
    """What result.json holds."""

    schema_version: Literal[2] = 2
    name: str
    algorithm: str
    task: str = "classification"
    data: str
    seed: int
    rounds: int
    stopped_early: bool = False
    pooled: bool = False
    """All images lay in one place."""
    details: dict[str, JsonValue] = {}
    """What the task adds, such as the names of the classes (`task.py`)."""
    site_sizes: list[SiteSizes]
    model: ModelSize
    clusters: dict[str, list[SiteId]] = {}
    """The sites of each cluster in round 1."""
    headline: Headline
    sites: dict[SiteId, SiteScores]
    merged: SiteScores
    """On the images of all sites together."""
    public: dict[str, PartScores] = {}
    """The server's models on its public test images."""
    progress: dict[str, list[tuple[int, float]]] = {}
    """The task's main metric on validation images by cluster ("" without clusters): round, value."""
    forgetting: dict[str, list[tuple[int, float]]] = {}
    """Shares of training images that a deployment lost ("forgotten") and gained: round, share."""
    drift: dict[SiteId, float]
    """Mean distance that a site's weights moved in a round."""
    cost: Cost
    engine: EngineUsed | None = None
    finish: StudentTraining | None = None
    privacy: PrivacySpent | None = None
    released: list[ReleasedKind] = []
    absent: dict[SiteId, str] = {}
    """Sites that took no part, and why."""
    doubted: dict[SiteId, str] = {}
    """Sites that count as fewer images than they claim, and why."""
    pooled_from: PooledFrom = "predictions"
    """Whence the figures of all sites together come."""
    withheld: dict[SiteId, str] = {}
    """Sites that told no scores after the last round, and why."""
    warnings: list[str] = []
    site_classifier_accuracy: float | None = None
    """Measured where a claim asks for it."""
    sha256: str
    """Of the server's last state."""
    versions: dict[str, str]

    @property
    def has_remote_sites(self) -> bool:
        """Whether the sites were elsewhere, as in a run of `polyclinic serve`, and kept their predictions."""
        return self.pooled_from != "predictions"

    @property
    def epsilon(self) -> float | None:
        """The privacy cost by the plan's accountant; None without a plan, or where it is infinite."""
        return self.privacy.epsilon if self.privacy else None

    def headline_at(self, site: SiteId) -> PartScores | None:
        """The headline's model at one site; None where it has no such images."""
        return self.sites.get(site, {}).get(self.headline.model, {}).get(self.headline.part)

    def to_json(self) -> JsonValue:
        """For result.json; a key that is left out is null."""
        return self.model_dump(mode="json", exclude_none=True)


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("polyclinic", "torchvision", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def nan_if_none(value: float | None) -> float:
    return math.nan if value is None else float(value)
