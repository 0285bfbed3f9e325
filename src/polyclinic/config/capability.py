"""The capability of a site's machine, and the cluster that follows from it (PFedCDP, Section III-B, Eq. 1 and 2).

A profile has four shares in [0, 1]: processor, memory, battery and network. At a real site they are measured
(`deploy/machine.py`); in a simulation the recipe gives them, or they are drawn from the seed.

Departures: mains power counts as a full battery; a network slower than acceptable counts as 0, not as less; a processor
that reports no frequency counts by its idle share; there may be any number of clusters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated

import torch
from pydantic import Field

from polyclinic.core import RecipeError, Share, SiteId, Stream, check_options

RESOURCES = ("cpu", "memory", "battery", "network")
THRESHOLDS: Mapping[str, float] = MappingProxyType({"high": 0.66, "medium": 0.33, "low": 0.0})
"""T_H and T_M are ours: the paper gives none."""
LATENCY = 200.0
"""Milliseconds."""
Weight = Annotated[float, Field(ge=0)]
COPIES = 4
"""Copies of each parameter while Adam trains: the weight, its gradient and two moments."""
FLOAT32 = 4
GIGABYTE = 10**9


@dataclass(frozen=True)
class ResourceWeights:
    """The weight of each resource in a capability score; they sum to 1."""

    cpu: Weight
    memory: Weight
    battery: Weight
    network: Weight

    def __post_init__(self) -> None:
        check_options(self, "the weight of ")
        total = self.cpu + self.memory + self.battery + self.network
        if not abs(total - 1) <= 1e-6:
            raise ValueError(f"the weights add up to {total:.7g}; change them so that they add up to 1")


@dataclass(frozen=True)
class ResourceShares:
    """The shares of a site's machine that are available, in [0, 1]."""

    cpu: Share
    memory: Share
    battery: Share
    network: Share

    def __post_init__(self) -> None:
        check_options(self, "a site's ")


@dataclass(frozen=True)
class GivenProfile(ResourceShares):
    """A site's profile as a recipe gives it."""

    gigabytes: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """The machine's memory, if known."""


@dataclass(frozen=True)
class MachineProfile(ResourceShares):
    """The profile of a site's machine, measured, given or random."""

    total_memory: Annotated[int, Field(gt=0)] | None = None
    """In bytes; None if unknown."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """How each share was measured, in the order of `RESOURCES`."""


@dataclass(frozen=True)
class Capability:
    """The section `capability` of a recipe."""

    weights: ResourceWeights = ResourceWeights(0.25, 0.25, 0.25, 0.25)
    profiles: dict[SiteId, GivenProfile] = field(default_factory=dict)
    """Profiles of sites. Those of other sites are random."""
    reassess_every: Annotated[int, Field(ge=1)] | None = None
    """Sites are assessed again after this number of rounds; None: once."""
    max_latency_ms: Annotated[float, Field(gt=0, le=60_000)] = LATENCY
    """The largest acceptable latency in milliseconds."""

    def period_of_round(self, round: int) -> int:
        """Return the number, from 0, of the assessment that holds in a round (counted from 1)."""
        return 0 if self.reassess_every is None else (round - 1) // self.reassess_every


def capability_score(profile: ResourceShares, weights: ResourceWeights) -> float:
    """Return the weighted mean of the four shares (Eq. 1).

    It is exact but for one rounding, so that a profile of 0.66 throughout reaches a threshold of 0.66 with any weights:
    in floating point 0.3, 0.3, 0.1 and 0.3 do not sum exactly to 1.
    """
    exact = {name: Fraction(getattr(weights, name)) for name in RESOURCES}
    total = sum(weight * Fraction(getattr(profile, name)) for name, weight in exact.items())
    return float(total / sum(exact.values()))


def find_cluster(score: float, thresholds: Mapping[str, float]) -> str:
    """Return the first cluster whose lowest score is reached (Eq. 2).

    Args:
        score: A capability score.
        thresholds: The lowest score of each cluster, from the most to the least capable.
    """
    for sentence in check_thresholds(thresholds):
        raise RecipeError(sentence)
    for name, least in thresholds.items():
        if score >= least:
            return name
    raise RecipeError(f"a score of {score} belongs to no cluster; give one from 0 to 1")


def site_profile(capability: Capability, site: SiteId, period: int, seed: Stream) -> MachineProfile:
    """Return a site's profile in a simulation: the one that the recipe gives, or a random one for each period."""
    given = capability.profiles.get(site)
    if given is None:
        generator = seed.child("capability", site, period).generator()
        return MachineProfile(*torch.rand(len(RESOURCES), generator=generator, dtype=torch.float64).tolist())
    total = None if given.gigabytes is None else round(given.gigabytes * GIGABYTE)
    return MachineProfile(given.cpu, given.memory, given.battery, given.network, total)


def check_thresholds(thresholds: Mapping[str, float]) -> Iterator[str]:
    """Yield the problems of clusters, given by their lowest scores from the most to the least capable."""
    clusters = list(thresholds.items())
    if not clusters:
        yield "there is no cluster; give at least one, with 0 as its lowest score"
        return
    for (upper, high), (lower, low) in pairwise(clusters):
        if not high > low:
            yield (
                f"cluster {upper} begins at a score of {high} and {lower}, which is less capable, at {low}; give "
                "clusters in falling order of their lowest scores"
            )
    (first, most), (last, least) = clusters[0], clusters[-1]
    if not most <= 1:
        yield f"cluster {first} begins at a score of {most}, which no site reaches; choose at most 1"
    if least != 0:
        yield f"cluster {last}, the last, begins at a score of {least}; set it to 0, so that every site has a cluster"


def training_memory(parameters: int, activations: int | None = None) -> int:
    """Return the bytes that training needs: float32 copies of the parameters and, if known, a batch's activations."""
    return COPIES * FLOAT32 * parameters + (activations or 0)


def available_memory(profile: MachineProfile) -> float | None:
    """Return the bytes that a machine has for training; None if its memory is unknown."""
    return None if profile.total_memory is None else profile.memory * profile.total_memory
