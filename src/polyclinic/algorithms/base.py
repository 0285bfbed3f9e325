"""The base class of all algorithms, and the weighted mean that most of them compute.

To write an algorithm, read this file and `polyclinic.core.jobs`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from polyclinic.core import (
    AUX_PREFIX,
    Bundle,
    Exchange,
    Federation,
    FlatTensors,
    ServerWork,
    Site,
    SiteId,
    Stream,
    Tensors,
    Training,
    Update,
    Updates,
    Work,
    check_options,
    copy_tensors,
)

WEIGHT_KINDS = ("model", "buffers")
IDENTIFYING_KINDS = ("bank", "features", "means")
"""Kinds that hold features of single sites' images. A finished run keeps none of them."""


class RunningMean:
    """The weighted mean of tensors that arrive one at a time: m ← m + (w/Σw)·(t − m). It holds one copy.

    The mean of one summand equals it bit for bit, and so does that of equal summands but for the sign of a zero.
    Integers (BatchNorm's batch counters) are averaged and rounded. Tensors of a decoded message, which are contiguous,
    are averaged as one vector.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self._mean: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        """Add a summand. All must have the same names, shapes and dtypes."""
        self.total += weight
        self.count += 1
        if self.count == 1:
            self._dtypes = {name: t.dtype for name, t in tensors.items()}
            self._mean = copy_tensors({n: t if t.is_floating_point() else t.double() for n, t in tensors.items()})
        elif (
            isinstance(tensors, FlatTensors)
            and isinstance(self._mean, FlatTensors)
            and tensors.has_layout_of(self._mean)
        ):
            self._mean.vector.lerp_(tensors.vector, weight / self.total)
        elif tensors:
            new = [tensors[n] if tensors[n].is_floating_point() else tensors[n].double() for n in self._mean]
            torch._foreach_lerp_(list(self._mean.values()), new, weight / self.total)

    def value(self) -> Tensors:
        """Return the mean of all summands so far, in their dtypes."""
        if all(dtype.is_floating_point for dtype in self._dtypes.values()):
            return self._mean
        return {
            name: mean if self._dtypes[name].is_floating_point else mean.round().to(self._dtypes[name])
            for name, mean in self._mean.items()
        }


class BundleMean:
    """The weighted mean of bundles that arrive one at a time: a `RunningMean` for each of `kinds`."""

    def __init__(self, *kinds: str) -> None:
        self._means = {kind: RunningMean() for kind in kinds or WEIGHT_KINDS}

    def add(self, bundle: Bundle, weight: float = 1.0) -> None:
        """Add a summand. A kind that it lacks counts as empty."""
        for kind, mean in self._means.items():
            mean.add(bundle.get(kind, {}), weight)

    def value(self) -> Bundle:
        """Return the mean of all summands so far."""
        return {kind: mean.value() for kind, mean in self._means.items()}


@dataclass(frozen=True)
class Algorithm(ABC):
    """A federated learning method: a frozen dataclass whose fields are its options. All methods are pure functions.

    A subclass defines what a site does in a round (`local`) and how updates are combined (`aggregate`). By default the
    state is one set of weights, which every site receives and predicts with.

    Declare the range of an option in its type, for instance `mu: NonNegativeFloat = 0.01` (pydantic's types). Recipes
    and Python callers outside it are then refused. Check combinations of options in `__post_init__`, after calling
    `super().__post_init__()`.
    """

    training: Training = Training()
    pooled: ClassVar[bool] = False
    """Whether it trains on the images of all sites in one place: a baseline, which hospitals cannot run."""
    averages: ClassVar[bool] = False
    """Whether `aggregate` makes the same of one update, which is the weighted mean of several, as of these: only then
    can the updates be added up behind masks. Say so in the class that defines `aggregate`."""
    site_kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of a broadcast that differ between sites; all others are the same for all sites of a cluster."""
    unused_options: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Options without effect, by `variant`."""
    scalars: ClassVar[tuple[str, ...]] = ()
    """The names of all `Update.scalars`. A real site sends no other, and these only if its policy names them."""

    def __post_init__(self) -> None:
        check_options(self, "algorithm.")

    def exchanges(self) -> tuple[Exchange, ...]:
        """The kinds of tensors that a site sends. Anything else in an update is refused."""
        return tuple(Exchange(kind, like=kind) for kind in WEIGHT_KINDS)

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        """Return small networks that train beside the classifier, such as a generator or a discriminator, by name.

        Their weights are among the classifier's as `auxiliary.NAME.…`. The steps of a job train them. They are sent and
        averaged unless `init` and `local` keep them apart. Call them by `Network.auxiliary`. No model that predicts, or
        is saved at the end, has them.

        Args:
            features: The shape of the extractor's output for one image.
            classes: The number of classes.
        """
        return {}

    def init(self, federation: Federation) -> Bundle:
        """Return the server's state before round 1, made from `federation.initial`."""
        return dict(federation.initial)

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        """Return the part of the state that `site` receives."""
        return state

    @abstractmethod
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        """Do one site's work in one round, as a generator of jobs.

        `fitted = yield Fit(weights, objective, self.training)` trains and gives a `Fitted`;
        `found = yield Score(weights, function)` computes something of the site's images and gives `Tensors`.

        Args:
            received: What `broadcast` returned for this site. It must not be changed in place.
            memory: What `local` returned as memory when the site last took part; None the first time.
            site: The site's name, its number of training images, the round and its learning rate.
            rng: The site's random stream; use `rng.child(name, site.round)` for a draw.

        Returns:
            The update for the server, and the site's memory until its next round (None: no change).
        """

    @abstractmethod
    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        """Return the next state.

        Args:
            state: The state before the round. It must not be changed in place.
            updates: The accepted updates in site order, one at a time. Average them by `BundleMean`; keep none.
        """

    def averaged_kinds(self) -> tuple[str, ...]:
        """Return the kinds of an update that `aggregate` averages, so that one far value can be bounded; () if none.

        Parameters and buffers are measured from what the site received, other kinds from zero.
        """
        return WEIGHT_KINDS

    def needs_single_updates(self) -> str:
        """Return why `aggregate` needs the update of every site by itself, or "" if it uses their means alone."""
        return ""

    def check_update(self, update: Update) -> None:  # noqa: B027  by default there is nothing to check
        """Raise `errors.Refused` if the update has valid shapes and values but cannot be right for this algorithm."""

    def final_state(self, state: Bundle) -> Bundle:
        """Return the state after the last round, which is saved and from which the final models are made."""
        return {
            kind: without_prefix(AUX_PREFIX, group) for kind, group in state.items() if kind not in IDENTIFYING_KINDS
        }

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        """Return the weights that a site would predict with, by name: "global", "personal" or another site's name."""
        return {"global": classifier_weights(received)}

    def trains_on_server(self) -> bool:
        """Whether the server trains on a public set after every aggregation, by `server_step`."""
        return False

    def server_step(self, state: Bundle, server: Site, rng: Stream) -> ServerWork:
        """Do the server's training on its public set: yield `("", job)`, receive the result, return the next state."""
        yield from ()
        return state

    def privacy_releases(self) -> Mapping[str, float]:
        """Return the noise multiplier of each release that a site makes in a round besides its trained weights.

        A privacy plan charges for every entry.
        """
        return {}

    def no_guarantee_reason(self) -> str:
        """Return why no privacy plan can give a guarantee with this algorithm, or "" if one can."""
        return ""

    def warning(self) -> str:
        """Return what users must know before they trust a run of it, or ""."""
        return ""

    def cluster_of(self, state: Bundle, site: SiteId) -> str:
        """Return the cluster of a site, whose members share one network. Only `wrappers.clustered` overrides it."""
        return ""

    def cluster_state(self, state: Bundle, cluster: str) -> Bundle:
        """Return the part of the state that belongs to a cluster."""
        return state

    def cluster_from_broadcast(self, received: Bundle) -> str:
        """Return the cluster that a site belongs to, read from what it received."""
        return ""

    def lr_scale(self, cluster: str) -> float:
        """Return the factor on the learning rate in a cluster."""
        return 1.0

    def mean_update(self, updates: Updates, *kinds: str) -> Bundle:
        """Return Σ_k (n_k / n) · w_k over the updates: the mean of `kinds`, by default of parameters and buffers."""
        mean = BundleMean(*kinds)
        for update in updates:
            mean.add(update.tensors, self.update_weight(update))
        return mean.value()

    def update_weight(self, update: Update) -> float:
        """Return the weight of an update in a mean: n_k, or 1 with `training.weights: uniform`, times its precision."""
        return update.precision * (update.examples if self.training.weights == "examples" else 1.0)


def scalar_tensors(weights: Bundle, values: Mapping[str, float]) -> Tensors:
    """Return numbers as tensors of the weights' type, on their device: a loss receives them as "scalars"."""
    like = next(iter(weights["model"].values()))
    return {name: like.new_tensor(value) for name, value in values.items()}


def network_weights(bundle: Bundle) -> Bundle:
    """Return the parameters and buffers of a bundle, without other kinds."""
    return {kind: bundle.get(kind, {}) for kind in WEIGHT_KINDS}


def classifier_weights(bundle: Bundle) -> Bundle:
    """Return the weights that predict: parameters and buffers, without those of auxiliary networks."""
    return {kind: without_prefix(AUX_PREFIX, group) for kind, group in network_weights(bundle).items()}


def without_prefix(prefix: str | tuple[str, ...], group: Tensors) -> Tensors:
    """Return the tensors whose names do not begin with `prefix`; if none does, `group` itself, which may be flat."""
    if not any(name.startswith(prefix) for name in group):
        return group
    return {name: tensor for name, tensor in group.items() if not name.startswith(prefix)}


def with_prefix(prefix: str | tuple[str, ...], group: Tensors) -> Tensors:
    """Return the tensors whose names begin with `prefix`."""
    return {name: tensor for name, tensor in group.items() if name.startswith(prefix)}
