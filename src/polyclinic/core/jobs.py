"""The interface between algorithms and engines: the site as an algorithm sees it, jobs, and a site's update.

Nothing here knows where a site runs: `Algorithm.local` is a generator that yields jobs (`Fit`, `Score`) and receives
their results from whatever engine drives it.
"""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from polyclinic.core.network import Objective, Scorer
from polyclinic.core.options import Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Part, SiteId, Tensors


@dataclass(frozen=True)
class Step:
    """One optimiser step per batch: an objective and the name prefixes of the parameters it trains (() = all)."""

    objective: Objective
    train: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fit:
    """A training job on a site's training images. The engine answers with a `Fitted`.

    Give the initial weights, the objective (or several `Step`s, taken one after the other on every batch) and the
    training options. `reference` holds all other inputs of the objective as tensors, so that jobs of several sites can
    be stacked.
    """

    weights: Bundle
    steps: Objective | tuple[Step, ...]
    training: Training
    reference: Bundle = field(default_factory=dict)
    optimiser_state: Tensors | None = None
    """The state of the optimiser to continue with (from `Fitted.optimiser_state`); None: a new optimiser
    whose state is not returned; {}: a new optimiser whose state is returned."""
    full_batch: bool = False
    """Whether to take one step per epoch on the gradient over all examples, accumulated in batches."""
    sampling_weights: tuple[Tensor | None, Tensor | None] = (None, None)
    """The examples' sampling weights for epochs that begin in this round, and for one that began earlier."""

    @property
    def sequence(self) -> tuple[Step, ...]:
        """The steps taken on every batch, one after the other."""
        return self.steps if isinstance(self.steps, tuple) else (Step(self.steps),)


@dataclass(frozen=True)
class Fitted:
    weights: Bundle
    steps: int
    loss: float
    optimiser_state: Tensors
    dropped: int = 0
    """Private training: the number of per-example gradients that were not finite and counted as zero."""


@dataclass(frozen=True)
class Score:
    """A job that computes a function of a site's images, in evaluation mode. The engine answers with `Tensors`.

    `function` gets the network, `weights`, a batch and `reference`. With `reduce: cat` its results are concatenated,
    with `mean` averaged over batches, weighted by their sizes.
    """

    weights: Bundle
    function: Scorer
    reference: Bundle = field(default_factory=dict)
    part: Part = "train"
    reduce: Literal["cat", "mean"] = "cat"
    batch: int | None = None
    """The batch size, if the function is not a mean over examples; None: a size that suits the device."""
    order: Tensor | None = None
    """The rows in the order in which batches take them; None: as they are stored, which may be by class."""
    counts: bool = True
    """If false, the job does not advance the job counter that seeds later jobs, so adding it leaves their random draws
    unchanged."""


Job: TypeAlias = Fit | Score

Work: TypeAlias = Generator[Job, Any, tuple["Update", Bundle | None]]

ServerWork: TypeAlias = Generator[tuple[str, Job], Any, Bundle]
"""The generator of `Algorithm.server_step`: yields (cluster, job) and returns the state."""


@dataclass(frozen=True)
class Update:
    """A site's result of its local work.

    `tensors` holds the new values by kind, not differences; transforms and checks compute their differences from the
    broadcast. `examples` is the site's number of training images, `scalars` any further numbers for the server. `site`
    is set when the update is checked, and `precision` where a privacy plan weighs sites by their noise.
    """

    tensors: Bundle
    examples: int
    site: SiteId = ""
    scalars: Mapping[str, float] = field(default_factory=dict)
    precision: float = 1.0
    """A factor on its weight in a mean: 1/σ², relative to the site with the least noise."""
    members: tuple[SiteId, ...] = ()
    """The sites whose mean this is, where they were added up behind masks; () stands for `site` alone."""

    @property
    def sites(self) -> tuple[SiteId, ...]:
        """The sites that this update comes from."""
        return self.members or (self.site,)


Updates: TypeAlias = Iterable[Update]
"""The accepted updates of a round, by cluster and site, one at a time. Keep none: each may be as large as the model."""


@dataclass(frozen=True)
class Failure:
    """The reason that a site's reply is missing."""

    kind: Literal["dead", "late", "refused", "error"]
    sentence: str


@dataclass(frozen=True)
class Unprotected:
    """A kind that leaves the site without a privacy transform, with the reason why. The report lists it."""

    why: str


@dataclass(frozen=True)
class Exchange:
    """A kind of tensors that sites send. An update's tensors must have the names, shapes and dtypes of `state[like]`.

    Put such an entry into the state in `init`, and return it from `aggregate` in every round: otherwise it is lost
    after round 1, and all later updates are refused. An `optional` kind may be missing in an update.
    """

    kind: str
    like: str
    protection: Unprotected = Unprotected("no privacy plan in this recipe")
    optional: bool = False
    weighted: bool = True
    """Whether sites count by their weight in the mean of this kind; false: all alike."""


@dataclass(frozen=True)
class Site:
    """An algorithm's knowledge of the site in a round. It reaches images through jobs only."""

    name: SiteId
    examples: int
    round: int
    """Counted from 1."""
    rounds: int
    lr: float
    secret: Stream | None = None
    """The source of this round's noise under a privacy plan, which the server does not know."""


@dataclass(frozen=True)
class Federation:
    """The server's knowledge before round 1: classes, the sites' numbers of training images, and initial weights."""

    classes: tuple[str, ...]
    sites: Mapping[SiteId, int]
    initial: Bundle
    norms: frozenset[str] = frozenset()
    """The names in `initial` of parameters and statistics of normalisation layers."""
    features: tuple[int, ...] = ()
    """The shape of the extractor's output for one image."""
    held: Mapping[SiteId, Mapping[Part, int]] = field(default_factory=dict)
    """The images of each part that the sites registered, where known."""
