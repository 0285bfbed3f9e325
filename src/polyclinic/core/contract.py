"""The words of polyclinic: what crosses the wire, what an algorithm is, what a site is asked to do.

Nothing here knows where a site runs. An algorithm is a frozen set of options with pure functions;
`local` is a generator that yields jobs (`Fit`, `Score`) and receives their results from whatever engine drives it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

SiteId: TypeAlias = str
Tensors: TypeAlias = dict[str, Tensor]
"""Flat and named: the only thing that crosses the wire."""

Bundle: TypeAlias = dict[str, Tensors]
"""Tensors by kind. A kind ("model", "buffers", "control", "features") is what may be released, protected, counted.

Weights are a bundle of two kinds: "model" (parameters) and "buffers" (statistics such as BatchNorm's), kept apart
because only parameters have gradients, may be noised, or enter a control variate.
"""

AUX_PREFIX = "beside."
"""How the names of weights begin that belong to networks which train beside the classifier."""

Batch: TypeAlias = tuple[Tensor, Tensor]
Part: TypeAlias = Literal["train", "validation", "test"]
Precision: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Stream:
    """All randomness of a run: one seed and a path of names. Equal paths give equal numbers, everywhere."""

    seed: int
    path: tuple[str | int, ...] = ()

    def child(self, *names: str | int) -> Stream:
        return Stream(self.seed, self.path + names)

    def integer(self) -> int:
        digest = hashlib.sha256(json.dumps([self.seed, *self.path]).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.integer())


class Examples(Protocol):
    """Labelled images of one part of one site."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def patients(self) -> tuple[str, ...] | None: ...

    def __len__(self) -> int: ...

    def batch(self, index: Tensor) -> Batch:
        """Images (float, n × channels × height × width) and labels at `index`, on the examples' device."""
        ...


class Network(Protocol):
    """A network as a function of its weights. Engines may recognise weights that already live in the module."""

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        """Logits."""
        ...

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        """What the extractor hands to the head."""
        ...

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        """Logits of features: with `features`, one pass for a loss that needs both. eval_mode: as in evaluation,
        nothing dropped and no statistics moved, yet with gradients; for features of others."""
        ...

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        """The task's loss: cross-entropy of the logits."""
        ...

    def teacher_logits(self, weights: Bundle, images: Tensor, features: bool = False) -> Tensor:
        """A teacher's logits, or features: as in evaluation, nothing dropped, no statistics moved, and no gradient."""
        ...

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        """What a network of `Algorithm.beside` makes of `given`; eval_mode: as for `head`."""
        ...


Objective: TypeAlias = Callable[[Network, Bundle, Batch, Bundle], Tensor]
"""(network, weights, batch, reference) -> loss. A module-level pure function, so that jobs of many sites stack."""

Scorer: TypeAlias = Callable[[Network, Bundle, Batch, Bundle], Tensors]
"""(network, weights, batch, reference) -> one row per example (`cat`) or one mean per batch (`mean`)."""


@dataclass(frozen=True)
class Optimiser:
    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Augment:
    """Random changes to training images, drawn anew for every image at every step. Evaluation never sees them."""

    rotation: float = 0.0
    """Turned by up to so many degrees, either way."""
    flip: bool = False
    """Left and right change over, in half of the images."""
    brightness: float = 0.0
    """Up to so many standard deviations of the image itself are added or taken away."""
    contrast: float = 0.0
    """Departures from the image's mean grow or shrink by up to this share."""
    crop: float = 0.0
    """Up to this share of the sides is cut off, at a random place; what is left is enlarged."""
    blur: float = 0.0
    """A Gaussian blur of up to so many pixels (its σ)."""


@dataclass(frozen=True)
class Private:
    """DP-SGD (Abadi et al. 2016): every step takes the sum of its examples' gradients, each clipped, and noise."""

    clip: float
    """C: no example's gradient is longer; infinity clips nothing."""
    noise: float
    """σ: the standard deviation of the noise on the sum, in units of C."""
    sampling: Literal["poisson", "shuffle"] = "poisson"
    """poisson: every example joins a step by itself with probability batch / n, so that accountants may count on it."""
    views: int = 1
    """So many augmentations of an example, whose mean gradient is clipped."""


@dataclass(frozen=True)
class Training:
    """What every algorithm's local work shares."""

    optimiser: Optimiser = Optimiser()
    batch: int | None = 32
    batches: int | None = None
    """So many batches an epoch whatever a site's size, in the place of `batch` (which then is None): see `size`."""
    epochs: int | None = 1
    steps: int | None = None
    """Average every `epochs` epochs, or every `steps` steps, walking through the epochs (then `epochs` is None)."""
    first_epochs: int | None = None
    """Epochs of round 1, in which sites have not met yet: local pretraining. None: as in every round."""
    weights: Literal["examples", "uniform"] = "examples"
    fine_tune: float = 1.0
    """Share of leaf layers, nearest the output, that is trained; the rest is frozen, its BatchNorm in eval mode."""
    oversample: bool = False
    """Repeat minority-class examples of the training part until all classes are equally frequent."""
    augment: Augment | None = None
    """Change training images at random; None leaves them as they are."""
    order: Literal["random", "forgotten", "hard", "easy"] = "random"
    """Which examples tend to come early in an epoch (`polyclinic.algorithms.wrappers.curriculum`) …"""
    emphasis: float = 2.0
    order_after: int = 1
    """… how many times as likely they are to come next as the last, and after how many rounds in random order."""
    precision: Precision = "float32"
    """What the network computes in as it trains; weights, gradients, losses and evaluation are float32 in any case."""
    private: Private | None = None
    """Set by a recipe's `privacy`, never by hand: what it costs is priced there."""

    def batch_size(self, examples: int) -> int:
        """A site's batch: with `batches` ⌊n / Q⌋, 2 at least; what is left over, or oversampled, makes further ones."""
        return self.batch or max(2, examples // (self.batches or 1))


@dataclass(frozen=True)
class Step:
    """One optimiser step per batch: an objective and the parameters it may move (by name prefix; () = all)."""

    objective: Objective
    train: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fit:
    """A training job. Yielded by `Algorithm.local`; the engine answers with `Fitted`."""

    weights: Bundle
    steps: Objective | tuple[Step, ...]
    training: Training
    reference: Bundle = field(default_factory=dict)
    optimiser_state: Tensors | None = None
    """Continue with this state (from `Fitted.optimiser_state`) instead of a fresh optimiser."""
    full_batch: bool = False
    """One step per epoch on the gradient over ALL examples, accumulated in batches."""
    order: tuple[Tensor | None, Tensor | None] = (None, None)
    """The examples' weights as they are drawn into epochs that begin in this round, and into one begun in another."""

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
    """Private training: how often an example's gradient was not finite, and counted as zero."""


@dataclass(frozen=True)
class Score:
    """Compute a function of weights and data. The engine answers with `Tensors`."""

    weights: Bundle
    function: Scorer
    reference: Bundle = field(default_factory=dict)
    part: Part = "train"
    reduce: Literal["cat", "mean"] = "cat"
    batch: int | None = None
    """Examples at a time, where the function is not a mean over examples; None: as many as the device likes."""
    aside: bool = False
    """Not counted among a round's jobs: what these draw shall not depend on it."""


Job: TypeAlias = Fit | Score
Work: TypeAlias = Generator[Job, Any, tuple["Update", Bundle | None]]
ServerWork: TypeAlias = Generator[tuple[str, Job], Any, Bundle]
"""The server's own work on its public set: jobs, each with the group whose network it is for; returns the state."""


@dataclass(frozen=True)
class Update:
    """What a site hands in after local work: absolute values, by kind. Stages and the wire look at the difference from
    what the site received; the algorithm does not need to."""

    tensors: Bundle
    examples: int
    site: SiteId = ""
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a site has no reply."""

    kind: Literal["dead", "late", "refused", "error"]
    sentence: str


@dataclass(frozen=True)
class Unprotected:
    """A kind that leaves the site without a privacy stage, and why that is accepted. The report lists it."""

    why: str


@dataclass(frozen=True)
class Exchange:
    """One kind of thing that a site sends. It must have the names, shapes and dtypes of the state's entry `like`."""

    kind: str
    like: str
    protection: Unprotected = Unprotected("no privacy plan in this recipe")
    optional: bool = False


class Stage(Protocol):
    """A transformation on the way out of a site (clip, noise, quantise) and, reversed, on the way into the server."""

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        """At the site: what leaves instead of `tensors`. Names, shapes and dtypes may depend on nothing but theirs."""
        ...

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        """At the server, before values are checked: what the algorithm sees."""
        ...


@dataclass(frozen=True)
class Site:
    """What an algorithm may know of the site it works at, this round. Images are reached through jobs only."""

    name: SiteId
    examples: int
    round: int
    """1 is the first."""
    rounds: int
    lr: float
    secret: Stream | None = None
    """Where this round's noise comes from, under a privacy plan; the server never learns it."""


@dataclass(frozen=True)
class Federation:
    """What the server knows: the task, who takes part with how many training examples, where training starts."""

    classes: tuple[str, ...]
    sites: Mapping[SiteId, int]
    initial: Bundle
    norms: frozenset[str] = frozenset()
    """Names, in `initial`, of what belongs to normalisation layers: their parameters and their statistics."""
    features: tuple[int, ...] = ()
    """The shape of what the extractor makes of one image."""


class Algorithm(Protocol):
    """A learning method: one file, one paper. Options are fields; everything else is a pure function."""

    @property
    def training(self) -> Training: ...

    pooled: ClassVar[bool]
    """Trains on everybody's images in one place (a yardstick, never deployable)."""

    @property
    def exchanges(self) -> tuple[Exchange, ...]: ...

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        """Small networks that train beside the classifier (a generator, a discriminator), usually {}.

        Their weights are among the classifier's as `beside.NAME.…`: trained by a job's steps, sent and averaged unless
        `init` and `local` keep them apart. No model that predicts, or is saved at the end, has them.
        """
        ...

    def init(self, federation: Federation) -> Bundle:
        """The server's state before round 1."""
        ...

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        """What this site receives; may differ between sites."""
        ...

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        """One site's work in one round: yields jobs, returns its update and what it remembers."""
        ...

    def check_update(self, update: Update) -> None:
        """Refuse (`errors.Refused`) an update that only this algorithm can see is wrong."""
        ...

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        """The next state. `updates` arrive in site order, one at a time: do not keep them."""
        ...

    @property
    def trains_on_server(self) -> bool:
        """Whether the server works on a public set after every aggregation."""
        ...

    def server_step(self, state: Bundle, server: Site, rng: Stream) -> ServerWork:
        """That work."""
        ...

    def cluster_of(self, state: Bundle, site: SiteId) -> str:
        """Sites of one group have one network; their updates arrive together."""
        ...

    def cluster_state(self, state: Bundle, group: str) -> Bundle:
        """The part of the state that is a group's."""
        ...

    def cluster_from_broadcast(self, received: Bundle) -> str:
        """The group that a site finds itself in, by what it received."""
        ...

    def lr_scale(self, group: str) -> float:
        """What the learning rate is multiplied by in a group."""
        ...

    def finish(self, state: Bundle) -> Bundle:
        """After the last round (refinement, ensembles)."""
        ...

    def privacy_releases(self) -> Mapping[str, float]:
        """What a site releases in a round beside its trained weights, in words: noise multipliers, each charged."""
        ...

    def no_guarantee_reason(self) -> str:
        """Why no privacy plan can give a guarantee with this algorithm; "" if one can."""
        ...

    def warning(self) -> str:
        """What whoever runs it must know, as that a paper's text is followed where it does not work; usually ""."""
        ...

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        """The weights a site would predict with, by name: "global", "personal", another site's."""
        ...
