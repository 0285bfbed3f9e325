"""The plan: one frozen object that binds all a privacy claim rests on, priced before round 1.

    unit        whom the claim protects: an image, a patient with all images at a site, or a whole site
    neighbours  which two data sets must be hard to tell apart
    trust       who sees something before noise is added: nobody outside the site, or the server
    sampling    how images come into a step; only Poisson sampling makes a step cheaper than a look at everything
    clip, noise how far one unit can move what is released, and how much noise covers that
    rounds      who takes part when: cohorts are drawn from a public stream, so a site pays for its own rounds only

Of these follow, by a library's accountant, what each site and the worst-placed record pay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from polyclinic.core.contract import Fit, Private, SiteId, Training
from polyclinic.core.errors import RecipeError
from polyclinic.privacy.accounting import Accountant, Neighbours, Spend, epsilon, noise_for
from polyclinic.privacy.sampling import rate_and_sums

Unit = Literal["image", "patient", "site"]
DIGITS = 3
"""Sampling rates are rounded up to so many digits, which costs next to nothing and makes most sites' steps alike."""

RELEASED = ("model",)
"""Kinds of an update that a site-level plan clips and noises, together as one vector."""
LEFT = 0.98
"""Of ε; where earlier runs have spent more, what is left would only buy noise."""
SOUGHT = 1.0 + 2.0**-40
"""Stands for the noise that is sought; nobody writes this number."""


@dataclass(frozen=True)
class PrivacyConfig:
    """What a recipe may say under `privacy`."""

    unit: Unit = "image"
    epsilon: float | None = None
    """What the whole run may cost; with `noise` as well, the run stops before it costs more."""
    noise: float | None = None
    """σ, the noise in units of the clip; left out, it is solved for `epsilon`."""
    delta: float = 1e-5
    clip: float = 1.0
    accountant: Accountant = "pld"
    neighbours: Neighbours = "add or remove"
    sampling: Literal["poisson", "shuffle"] = "poisson"
    amplification: bool | None = None
    """Whether sampling makes steps cheaper; left out: where it is Poisson sampling."""
    views: int = 1
    """Augmented copies of an image whose mean gradient is clipped."""
    at: Literal["site", "server"] = "site"
    """For unit site: where noise is added, so whom one need not trust."""
    holders: int | None = None
    """The most sites at which one image (or patient) may be; left out: counted in the data."""
    metrics: Literal["suppress", "count", "open"] = "suppress"
    """What sites tell of their validation images each round: nothing; noised counts, charged; or all, unprotected."""
    ledger: str | None = None
    """A file in which all runs on the same images enter what they cost, so that they add up."""
    randomness: Literal["seed", "secret"] = "secret"
    """Noise from a secret, or from the seed: then a run can be repeated, and the noise removed by whoever knows it."""


def config_problems(config: PrivacyConfig, training: Training, watching: bool) -> Iterator[str]:
    """What is wrong with a recipe's `privacy` whatever the data; `watching`: a schedule looks at validation metrics."""
    if config.epsilon is None and config.noise is None:
        yield "privacy needs epsilon (then the noise is solved for it) or noise (then epsilon is told); give one"
    if config.epsilon is not None and not 0 < config.epsilon <= 1000:
        yield f"privacy.epsilon is {config.epsilon}; choose a positive number, usually 1 to 10"
    if config.noise is not None and not 0 <= config.noise <= 1e6:
        yield f"privacy.noise is {config.noise}; choose a multiple of the clip, usually 0.5 to 10"
    if not 0 < config.delta < 1:
        yield f"privacy.delta is {config.delta}; choose a small probability, far below 1 / the number of images"
    if not 1e-9 <= config.clip <= 1e9:
        yield f"privacy.clip is {config.clip}; choose a positive length, usually 0.1 to 10"
    if config.views < 1:
        yield f"privacy.views is {config.views}; choose 1 or more"
    if config.views > 1 and training.augment is None:
        yield "privacy.views would be copies of one image; give training.augment, or set privacy.views: 1"
    if config.holders is not None and config.holders < 1:
        yield f"privacy.holders is {config.holders}; an image is at 1 site or more"
    if config.at == "server" and config.unit != "site":
        yield f"privacy.at: server is for unit site; with unit {config.unit} noise is added in every step, at the site"
    if config.metrics == "count" and config.unit == "site":
        yield "privacy.metrics: count protects single images, not a whole site; set it to suppress"
    if config.amplification and config.unit == "site":
        yield "cohorts are drawn in public, which makes no round cheaper; leave privacy.amplification out"
    if config.amplification and config.sampling == "shuffle":
        yield (
            "a shuffled loader is not Poisson sampling, so no step is cheaper for it; set privacy.sampling: poisson, "
            "or privacy.amplification: false"
        )
    if training.first_epochs is not None:
        yield "a privacy plan prices all rounds alike; leave out training.first_epochs, or privacy"
    if training.oversample and config.unit != "site":
        yield (
            "training.oversample draws some images more often than the accountant counts; set training.oversample: "
            "false"
        )
    if training.order != "random":
        yield (
            f"training.order: {training.order} looks at images beside the steps that a privacy plan prices, and "
            "sampling has no order; set training.order: random, or leave privacy out"
        )
    if training.private is not None:
        yield "training.private follows from privacy; leave it out"
    if watching and config.metrics == "suppress":
        yield "schedule plateau and early_stop watch metrics that this plan suppresses; set privacy.metrics: count"


@dataclass(frozen=True)
class Steps:
    """A training job of a round: so many noised sums, each over images that come in with this probability."""

    rate: float
    times: int


@dataclass(frozen=True)
class SiteSize:
    """What the plan must know of a site."""

    examples: int
    largest: int = 1
    """Training images of the patient with the most, at this site."""
    largest_validation: int = 1
    """The same of validation images."""


@dataclass(frozen=True)
class PrivacyPlan:
    """A wish bound to a federation, an algorithm and the rounds: what it costs."""

    config: PrivacyConfig
    noise: float
    rounds: tuple[tuple[SiteId, ...], ...]
    """Who takes part in each round."""
    site_sizes: Mapping[SiteId, SiteSize]
    jobs: Mapping[SiteId, tuple[Steps, ...]]
    """The training of a round, by site."""
    other_releases: Mapping[str, float] = field(default_factory=dict)
    """Noise multipliers of what a round releases beside training."""
    max_sites_per_record: int = 1
    no_guarantee_reason: str = ""
    """Why the figures are no guarantee; "" where they are."""
    models: int = 1
    """How many models a site tells metrics of."""
    metrics_noise: float = math.inf
    earlier: tuple[Spend, ...] = ()
    """What earlier runs on the same images have cost a record, where they share a ledger."""

    @property
    def has_guarantee(self) -> bool:
        return not self.no_guarantee_reason

    def round_spends(self, site: SiteId, noise: float | None = None) -> tuple[Spend, ...]:
        """What one round at a site releases of one unit."""
        sigma = self.noise if noise is None else noise
        if self.config.unit == "site":
            return (Spend(sigma),)
        group = self.site_sizes[site].largest if self.config.unit == "patient" else 1
        steps = (Spend(sigma, job.rate, job.times, group) for job in self.jobs[site])
        return (*steps, *(Spend(charge, group=group) for charge in self.other_releases.values()))

    def run_spends(self, noise: float | None = None) -> dict[SiteId, tuple[Spend, ...]]:
        """What all rounds at each site release of one unit."""
        taken = {site: sum(site in cohort for cohort in self.rounds) for site in self.site_sizes}
        return {
            site: tuple(replace(s, times=s.times * taken[site]) for s in self.round_spends(site, noise) if taken[site])
            for site in self.site_sizes
        }

    def worst_epsilon(self, spent: Mapping[SiteId, Iterable[Spend]], accountant: Accountant | None = None) -> float:
        """ε of the worst-placed unit: one that is at the `holders` sites that released most, and was before."""
        return max(
            self.epsilon_of(one, accountant) for one in worst_candidates(spent, self.max_sites_per_record) or [()]
        )

    @cached_property
    def epsilon(self) -> float:
        """Of the whole run as planned."""
        return self.worst_epsilon(self.run_spends())

    def epsilon_of(self, spent: Iterable[Spend], accountant: Accountant | None = None) -> float:
        """ε of all these releases together: a unit that is at one site pays for that site's."""
        wish = self.config
        return epsilon((*spent, *self.earlier), wish.delta, accountant or wish.accountant, wish.neighbours)

    def private_options(self) -> Private | None:
        """What training jobs are told."""
        if self.config.unit == "site":
            return None
        return Private(self.config.clip, self.noise, self.config.sampling, self.config.views)

    def as_json(self) -> dict[str, Any]:
        wish = self.config
        return {
            "unit": wish.unit,
            "neighbours": wish.neighbours,
            "at": wish.at,
            "sampling": wish.sampling,
            "delta": wish.delta,
            "clip": wish.clip,
            "noise": self.noise,
            "accountant": wish.accountant,
            "wanted": wish.epsilon,
            "holders": self.max_sites_per_record,
            "metrics": wish.metrics,
            "metrics_noise": None if math.isinf(self.metrics_noise) else self.metrics_noise,
            "randomness": wish.randomness,
            "caveat": self.no_guarantee_reason,
        }


def worst_candidates(spent: Mapping[SiteId, Iterable[Spend]], holders: int) -> list[tuple[Spend, ...]]:
    """Compositions of which the dearest is no cheaper than what any unit at `holders` sites pays.

    A unit at one site pays for that site, so each site is a candidate but those that release less than another in every
    respect. A unit at m sites composes m times; what sites release has no order in general, so of each noise the m
    largest numbers of releases are added, all at the largest rate.
    """
    lists = {tuple(spends) for spends in spent.values()} - {()}
    if holders == 1:
        return [one for one in lists if not any(other != one and _dominates(other, one) for other in lists)]
    kinds: dict[float, list[Spend]] = {}
    for spends in (tuple(found) for found in spent.values()):
        for noise in {s.noise for s in spends}:
            mine = [s for s in spends if s.noise == noise]
            rate, group = max(s.rate for s in mine), max(s.group for s in mine)
            kinds.setdefault(noise, []).append(Spend(noise, rate, sum(s.times for s in mine), group))
    return [tuple(_largest_spend(rows, holders) for rows in kinds.values())] if kinds else []


def _largest_spend(rows: Sequence[Spend], holders: int) -> Spend:
    times = sorted((s.times for s in rows), reverse=True)[:holders]
    return Spend(rows[0].noise, max(s.rate for s in rows), sum(times), max(s.group for s in rows))


def _dominates(more: tuple[Spend, ...], less: tuple[Spend, ...]) -> bool:
    pairs = list(zip(more, less, strict=False))
    return len(more) == len(less) and all(
        m.noise == s.noise and m.rate >= s.rate and m.times >= s.times and m.group >= s.group for m, s in pairs
    )


def steps_of(job: Fit, examples: int, config: PrivacyConfig) -> Steps:
    """A training job as the accountant counts it."""
    rate, times = rate_and_sums(job, examples)
    return Steps(1.0 if config.amplification is False else round_up(rate), times)


def round_up(rate: float) -> float:
    if rate >= 1:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - DIGITS + 1)
    return min(1.0, math.ceil(rate / unit - 1e-9) * unit)


def make_plan(draft: PrivacyPlan) -> PrivacyPlan:
    """Solve what the wish leaves open; refuse what cannot be claimed."""
    wish = draft.config
    units = len(draft.site_sizes) if wish.unit == "site" else max(h.examples for h in draft.site_sizes.values())
    if wish.delta * units >= 1:
        what = "sites" if wish.unit == "site" else "training images at the largest site"
        raise RecipeError(
            f"privacy.delta is {wish.delta:g}, but there are {units} {what}: a mechanism that publishes one of them "
            f"outright would pass; choose a delta well below {1 / units:.1e}"
        )
    if wish.ledger is not None and draft.no_guarantee_reason:
        raise RecipeError(
            f"privacy.ledger keeps what is guaranteed, but {draft.no_guarantee_reason}; leave privacy.ledger out"
        )
    if wish.epsilon is not None and draft.earlier and (spent := draft.worst_epsilon({})) >= LEFT * wish.epsilon:
        raise RecipeError(
            f"earlier runs have spent ε = {spent:.3g} of these images by {wish.ledger}, and privacy.epsilon is "
            f"{wish.epsilon:g}; raise it, or leave it at that"
        )
    if wish.epsilon is not None and draft.no_guarantee_reason:
        raise RecipeError(
            f"privacy.epsilon cannot be promised: {draft.no_guarantee_reason}; set algorithm.variant: sound, or give privacy.noise "
            "alone to run without a guarantee"
        )
    if wish.noise is not None:
        plan = replace(draft, noise=wish.noise)
    else:
        assert wish.epsilon is not None
        sigma = _solve_noise(draft, wish.epsilon)
        plan = replace(draft, noise=sigma)
    return replace(plan, metrics_noise=_metrics_noise(plan)) if wish.metrics == "count" else plan


def _solve_noise(draft: PrivacyPlan, target: float) -> float:
    """The least noise that keeps every candidate within the target."""
    wish, tried = draft.config, worst_candidates(draft.run_spends(SOUGHT), draft.max_sites_per_record)

    def scaled(one: tuple[Spend, ...], sigma: float) -> tuple[Spend, ...]:
        """The noise of training is sought, that of other charges is given."""
        return (*(replace(s, noise=sigma) if s.noise == SOUGHT else s for s in one), *draft.earlier)

    def solved(one: tuple[Spend, ...]) -> float:
        return noise_for(lambda sigma: scaled(one, sigma), target, wish.delta, wish.accountant, wish.neighbours)

    return max(map(solved, tried))


def _metrics_noise(plan: PrivacyPlan) -> float:
    """Validation images are other images than training ones: they may cost as much, no more."""
    target = plan.config.epsilon if plan.config.epsilon is not None else plan.epsilon
    taken = (
        max(sum(site in cohort for cohort in plan.rounds) for site in plan.site_sizes)
        * plan.max_sites_per_record
        * plan.models
    )
    group = max(h.largest_validation for h in plan.site_sizes.values()) if plan.config.unit == "patient" else 1
    wish, told = plan.config, Spend(1.0, times=taken, group=group)
    return noise_for(lambda noise: (replace(told, noise=noise),), target, wish.delta, wish.accountant, wish.neighbours)


def largest_groups(patients: Sequence[str] | None) -> int:
    """Images of the patient with the most."""
    if not patients:
        return 1
    counts: dict[str, int] = {}
    for name in patients:
        counts[name] = counts.get(name, 0) + 1
    return max(counts.values())
