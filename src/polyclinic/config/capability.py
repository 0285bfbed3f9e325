"""The capability of a site's machine, and the cluster that follows from it (PFedCDP, Section III-B, Eq. 1 and 2).

A profile has four shares in [0, 1]: processor, memory, battery and network. At a real site they are measured
(`deploy/machine.py`); in a simulation the recipe gives them, or they are drawn from the seed.

Departures: mains power counts as a full battery; a network slower than acceptable counts as 0, not as less; a processor
that reports no frequency counts by its idle share; there may be any number of clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType

import torch

from polyclinic.core import RecipeError, SiteId, Stream

RESOURCES = ("cpu", "memory", "battery", "network")
THRESHOLDS: Mapping[str, float] = MappingProxyType({"high": 0.66, "medium": 0.33, "low": 0.0})
"""T_H and T_M are ours: the paper gives none."""
LATENCY = 200.0
"""Milliseconds."""
MOST_LATENCY = 60_000.0
COPIES = 4
"""Copies of each parameter while Adam trains: the weight, its gradient and two moments."""
FLOAT32 = 4
GIGABYTE = 10**9


@dataclass(frozen=True)
class MachineProfile:
    """The profile of a site's machine: shares in [0, 1]."""

    cpu: float
    memory: float
    battery: float
    network: float
    total_memory: int | None = None
    """In bytes; None if unknown."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """How each share was measured, in the order of `RESOURCES`."""

    def __post_init__(self) -> None:
        for name in RESOURCES:
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"a site's {name} is {getattr(self, name)}; give a share from 0 to 1")
        if self.total_memory is not None and not self.total_memory > 0:
            raise RecipeError(f"a site's total memory is {self.total_memory}; give a positive number of bytes, or none")


def equal_weights() -> dict[str, float]:
    return dict.fromkeys(RESOURCES, 1 / len(RESOURCES))


@dataclass(frozen=True)
class Capability:
    """The section `capability` of a recipe."""

    weights: dict[str, float] = field(default_factory=equal_weights)
    """The weight of each resource; they sum to 1."""
    profiles: dict[SiteId, dict[str, float]] = field(default_factory=dict)
    """Profiles of sites, with their memory in `gigabytes` if known. Profiles of other sites are random."""
    reassess_every: int | None = None
    """Sites are assessed again after this number of rounds; None: once."""
    max_latency_ms: float = LATENCY
    """The largest acceptable latency in milliseconds."""

    def period_of_round(self, round: int) -> int:
        """Return the number, from 0, of the assessment that holds in a round (counted from 1)."""
        return 0 if self.reassess_every is None else (round - 1) // self.reassess_every


def capability_score(card: MachineProfile, weights: Mapping[str, float]) -> float:
    """Return the weighted mean of the four shares (Eq. 1).

    It is exact but for one rounding, so that a profile of 0.66 throughout reaches a threshold of 0.66 with any weights:
    in floating point 0.3, 0.3, 0.1 and 0.3 do not sum exactly to 1.
    """
    _raise_first(check_weights(weights))
    total = sum(Fraction(weights[name]) * Fraction(getattr(card, name)) for name in RESOURCES)
    return float(total / sum(Fraction(weights[name]) for name in RESOURCES))


def find_cluster(score: float, thresholds: Mapping[str, float]) -> str:
    """Return the first cluster whose lowest score is reached (Eq. 2).

    Args:
        score: A capability score.
        thresholds: The lowest score of each cluster, from the most to the least capable.
    """
    _raise_first(check_thresholds(thresholds))
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
    _raise_first(f"capability.profiles.{site}: {sentence}" for sentence in _check_profile(given))
    total = round(given["gigabytes"] * GIGABYTE) if "gigabytes" in given else None
    return MachineProfile(given["cpu"], given["memory"], given["battery"], given["network"], total)


def _raise_first(problems: Iterator[str]) -> None:
    for sentence in problems:
        raise RecipeError(sentence)


def check_capability(capability: Capability) -> Iterator[str]:
    """Yield the problems of a recipe's `capability` that do not depend on the data."""
    for sentence in check_weights(capability.weights):
        yield f"capability.weights: {sentence}"
    for site, given in capability.profiles.items():
        for sentence in _check_profile(given):
            yield f"capability.profiles.{site}: {sentence}"
    if capability.reassess_every is not None and capability.reassess_every < 1:
        rounds = capability.reassess_every
        yield f"capability.reassess_every is {rounds}; choose 1 round or more, or null to assess sites once"
    for sentence in check_latency(capability.max_latency_ms):
        yield f"capability.max_latency_ms: {sentence}"


def check_weights(weights: Mapping[str, float]) -> Iterator[str]:
    yield from _check_keys(weights, RESOURCES)
    for name, weight in weights.items():
        if not weight >= 0:
            yield f"the weight of {name} is {weight}; choose 0 or more"
    total = sum(weights.values())
    if not abs(total - 1) <= 1e-6:
        yield f"the weights add up to {total:.7g}; change them so that they add up to 1"


def check_latency(latency: float) -> Iterator[str]:
    if not 0 < latency <= MOST_LATENCY:
        yield f"the most latency that is acceptable is {latency} ms; choose more than 0, at most {MOST_LATENCY:,.0f}"


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


def _check_profile(given: Mapping[str, float]) -> Iterator[str]:
    yield from _check_keys(given, RESOURCES, ("gigabytes",))
    for name in RESOURCES:
        if name in given and not 0 <= given[name] <= 1:
            yield f"{name} is {given[name]}; give a share from 0 to 1"
    if not 1e-3 <= given.get("gigabytes", 1) <= 1e6:
        yield f"gigabytes is {given['gigabytes']}; give the machine's memory, from 0.001 to a million, or leave it out"


def _check_keys(given: Mapping[str, float], needed: tuple[str, ...], extra: tuple[str, ...] = ()) -> Iterator[str]:
    known = ", ".join(needed + extra)
    for name in given:
        if name not in needed + extra:
            yield f"there is no key {name!r}; known here: {known}"
    for name in needed:
        if name not in given:
            yield f"{name} is missing; give a number to each of {', '.join(needed)}"


def training_memory(parameters: int, activations: int | None = None) -> int:
    """Return the bytes that training needs: float32 copies of the parameters and, if known, a batch's activations."""
    return COPIES * FLOAT32 * parameters + (activations or 0)


def available_memory(card: MachineProfile) -> float | None:
    """Return the bytes that a machine has for training; None if its memory is unknown."""
    return None if card.total_memory is None else card.memory * card.total_memory
