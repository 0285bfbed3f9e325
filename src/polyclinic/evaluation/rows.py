"""The rows that a run writes: metrics by round and site (metrics.jsonl) and the cost of every event (ledger.jsonl)."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from polyclinic.core import Part, SiteId

K = TypeVar("K")
V = TypeVar("V")


def group_pairs(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The second elements by the first, in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


class Row(BaseModel):
    """A row of JSON; keys that are not declared are left out."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    def to_json(self) -> dict[str, object]:
        """Only the fields that were set, so that a row holds nothing that was not measured."""
        found = self.model_dump(mode="json", exclude_unset=True)
        return {"event": event, **found} if (event := getattr(self, "event", None)) else found


class SiteOutcome(Row):
    """What one site sent in one round, and whether its update was accepted."""

    down: int = 0
    up: int = 0
    """Bytes to the site and from it."""
    seconds: float = 0.0
    outcome: str | None = None
    """"accepted", "refused" or the kind of failure; None where the site only predicted."""
    kind: str | None = None
    """Of a refused update: the check that failed."""
    why: str | None = None
    cluster: str = ""
    drift: float | None = None
    """‖w_k − w‖₂, the distance between the weights sent and the weights received."""
    outlier: str | None = None
    """What was done with an update that was far from the others': "scaled down", "left out" or "outvoted" …"""
    ratio: float | None = None
    """… and its distance from what was sent, as a multiple of the cohort's median."""
    outlier_rounds: int = 0
    """The rounds running in which the site was an outlier, this one included."""
    scalars: dict[str, float] = {}
    extra: list[str] = []
    """Kinds of further messages that were refused."""
    stack_size: int | None = None
    """Sites that were trained in one batched job; `unstacked_reason`: why this one was not."""
    unstacked_reason: str | None = None


class TrainRow(SiteOutcome):
    """How one site's training went in one round."""

    event: Literal["train"] = "train"
    round: int
    site: SiteId


class EvaluateRow(Row):
    """Metrics of the model after `round` on one part of one site's images; metrics are keys of the row itself."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None] = Field(init=False)

    event: Literal["evaluate"] = "evaluate"
    round: int
    site: SiteId
    model: str
    part: Part
    n: int

    @property
    def metrics(self) -> Mapping[str, float | None]:
        return self.__pydantic_extra__


class ChargeRow(Row):
    """Written before anything is sent in a round: the sites that take part, and what the round releases."""

    event: Literal["charge"] = "charge"
    round: int
    sites: list[SiteId]
    privacy: dict[str, Any] | None = None


class CostRow(Row):
    """What a round, a failed round, an interrupted round or the final evaluation cost."""

    event: Literal["round", "failed round", "interrupted round", "evaluation"]
    round: int
    seconds: float = 0.0
    sites: dict[SiteId, SiteOutcome] = {}


class ResumeRow(Row):
    """The run went on from the snapshot of `round`."""

    event: Literal["resumed"] = "resumed"
    round: int


class RollbackRow(Row):
    """The run went back to the snapshot of `round`; `undone`: the last round that is played again."""

    event: Literal["rolled back"] = "rolled back"
    round: int
    undone: int


MetricRow: TypeAlias = TrainRow | EvaluateRow
LedgerRow: TypeAlias = ChargeRow | CostRow | ResumeRow | RollbackRow
METRIC_ROW: TypeAdapter[MetricRow] = TypeAdapter(Annotated[MetricRow, Field(discriminator="event")])
LEDGER_ROW: TypeAdapter[LedgerRow] = TypeAdapter(Annotated[LedgerRow, Field(discriminator="event")])
