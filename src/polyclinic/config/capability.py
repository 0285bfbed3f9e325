"""What a site's machine can do, and the cluster that follows from it (PFedCDP, Section III-B, Eq. 1 and 2).

Four shares in [0, 1] of a site: processor, memory, battery, network. On a real site they are measured; in a simulation
the recipe gives them, or they are drawn from the seed. Measuring is in machine.py.

Departures: mains power counts as a full battery; a network slower than acceptable counts 0, not less; a processor that
tells no frequency counts the share of it that is idle; any number of clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType

import torch

from polyclinic.core.contract import SiteId, Stream
from polyclinic.core.errors import RecipeError

RESOURCES = ("cpu", "memory", "battery", "network")
THRESHOLDS: Mapping[str, float] = MappingProxyType({"high": 0.66, "medium": 0.33, "low": 0.0})
"""T_H and T_M are ours: the paper gives none."""
LATENCY = 200.0
"""Milliseconds."""
MOST_LATENCY = 60_000.0
COPIES = 4
"""Of every parameter while Adam trains: the weight, its gradient, two moments."""
FLOAT32 = 4
GIGABYTE = 10**9


@dataclass(frozen=True)
class MachineProfile:
    """What a site's machine can do: shares in [0, 1]."""

    cpu: float
    memory: float
    battery: float
    network: float
    total_memory: int | None = None
    """Bytes, where they are known."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """How each number came about, in the order of `RESOURCES`, where they were measured."""

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
    """What a recipe may say under `capability`."""

    weights: dict[str, float] = field(default_factory=equal_weights)
    """How much each resource counts; together 1."""
    cards: dict[SiteId, dict[str, float]] = field(default_factory=dict)
    """What sites' machines can do, with their memory in `gigabytes` if known; other sites' cards are drawn."""
    every: int | None = None
    """Sites are evaluated again every so many rounds; None: once."""
    latency: float = LATENCY
    """The most that is acceptable, in milliseconds."""

    def period_of_round(self, round: int) -> int:
        """Which evaluation holds in a round (1 is the first); they are counted from 0."""
        return 0 if self.every is None else (round - 1) // self.every


def capability_score(card: MachineProfile, weights: Mapping[str, float]) -> float:
    """How capable a site is: the weighted mean of the four shares (Eq. 1).

    Exact but for one rounding, so that a card that is 0.66 throughout reaches a threshold of 0.66 whatever the weights:
    0.3, 0.3, 0.1 and 0.3 in floating point do not quite add up to 1.
    """
    _raise_first(check_weights(weights))
    total = sum(Fraction(weights[name]) * Fraction(getattr(card, name)) for name in RESOURCES)
    return float(total / sum(Fraction(weights[name]) for name in RESOURCES))


def find_cluster(score: float, thresholds: Mapping[str, float]) -> str:
    """The first cluster whose least score is reached (Eq. 2); clusters are in order from most to least capable."""
    _raise_first(check_thresholds(thresholds))
    for name, least in thresholds.items():
        if score >= least:
            return name
    raise RecipeError(f"a score of {score} belongs to no cluster; give one from 0 to 1")


def site_profile(capability: Capability, site: SiteId, period: int, seed: Stream) -> MachineProfile:
    """A site's card in a simulation: the given one, the same in every period, or one drawn for each."""
    given = capability.cards.get(site)
    if given is None:
        generator = seed.child("capability", site, period).generator()
        return MachineProfile(*torch.rand(len(RESOURCES), generator=generator, dtype=torch.float64).tolist())
    _raise_first(f"capability.cards.{site}: {sentence}" for sentence in _check_profile(given))
    total = round(given["gigabytes"] * GIGABYTE) if "gigabytes" in given else None
    return MachineProfile(given["cpu"], given["memory"], given["battery"], given["network"], total)


def _raise_first(problems: Iterator[str]) -> None:
    for sentence in problems:
        raise RecipeError(sentence)


def check_capability(capability: Capability) -> Iterator[str]:
    """What is wrong with a recipe's `capability` whatever the data."""
    for sentence in check_weights(capability.weights):
        yield f"capability.weights: {sentence}"
    for site, given in capability.cards.items():
        for sentence in _check_profile(given):
            yield f"capability.cards.{site}: {sentence}"
    if capability.every is not None and capability.every < 1:
        yield f"capability.every is {capability.every}; choose 1 round or more, or null to evaluate sites once"
    for sentence in check_latency(capability.latency):
        yield f"capability.latency: {sentence}"


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
    """What is wrong with clusters, given from most to least capable with the least score of each."""
    clusters = list(thresholds.items())
    if not clusters:
        yield "there is no cluster; give at least one, with 0 as its least score"
        return
    for (upper, high), (lower, low) in pairwise(clusters):
        if not high > low:
            yield (
                f"cluster {upper} begins at a score of {high} and {lower}, which is less capable, at {low}; the least "
                "scores of clusters must fall"
            )
    (first, most), (last, least) = clusters[0], clusters[-1]
    if not most <= 1:
        yield f"cluster {first} begins at a score of {most}, which no site reaches; choose at most 1"
    if least != 0:
        yield f"cluster {last}, the last, begins at a score of {least}; set it to 0, so that no site is left out"


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
    """Bytes that training takes: float32 copies of the parameters, and what a batch's activations take, if known."""
    return COPIES * FLOAT32 * parameters + (activations or 0)


def available_memory(card: MachineProfile) -> float | None:
    """Bytes that a site's machine has for training; None where its memory is not known."""
    return None if card.total_memory is None else card.memory * card.total_memory
