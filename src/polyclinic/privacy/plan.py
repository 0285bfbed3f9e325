"""The privacy plan: one frozen object with everything that a privacy claim rests on, priced before round 1.

    unit        what the claim protects: an image, a patient with all images at a site, or a whole site
    neighbours  which two data sets must be hard to tell apart
    noise_at    where noise is added: at the site, or at the server, which then must be trusted
    sampling    how batches are drawn; only Poisson sampling costs less ε than a step on all images
    clip, noise how far one unit can move what is released, and the noise in units of that
    rounds      the sites of each round: cohorts are drawn in public, so a site is charged for its own rounds only

From these `privacy.accounting` computes ε of each site and of the record that is charged most.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Literal

from pydantic import Field

from polyclinic.core import Fit, Private, RecipeError, SiteId, Training
from polyclinic.privacy.accounting import Accountant, Neighbours, Spend, epsilon, noise_for
from polyclinic.privacy.sampling import rate_and_sums

Unit = Literal["image", "patient", "site"]
DIGITS = 3
"""Digits to which sampling rates are rounded up: it costs next to nothing and makes most sites' steps equal."""

RELEASED = ("model",)
"""Kinds of an update that a site-level plan clips and noises, together as one vector."""
MAX_SPENT_SHARE = 0.98
"""The share of ε; where earlier runs have spent more, the rest would allow nothing but noise."""
NOISE_PLACEHOLDER = 1.0 + 2.0**-40
"""Stands for the noise to be solved for; no recipe has this number."""


@dataclass(frozen=True)
class PrivacyConfig:
    """The section `privacy` of a recipe."""

    unit: Unit = "image"
    epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """The ε of the whole run; with `noise` as well, the run stops before it exceeds it."""
    noise: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """σ, the noise in units of the clip; left out, it is solved for `epsilon`."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Annotated[float, Field(ge=1e-9, le=1e9)] = 1.0
    accountant: Accountant = "pld"
    neighbours: Neighbours = "add or remove"
    sampling: Literal["poisson", "shuffle"] = "poisson"
    amplification: bool | None = None
    """Whether the accountant counts on sampling; left out: with Poisson sampling only."""
    augmentation_multiplicity: Annotated[int, Field(ge=1)] = 1
    """Augmented copies of an image whose mean gradient is clipped."""
    noise_at: Literal["site", "server"] = "site"
    """For unit site: where noise is added, by each site or by a trusted server."""
    max_sites_per_record: Annotated[int, Field(ge=1)] | None = None
    """The most sites at which one image (or patient) may be; left out: counted in the data."""
    metrics: Literal["suppress", "count", "open"] = "suppress"
    """Metrics on validation images that sites report each round: none; from noised counts, charged; or unprotected."""
    ledger: str | None = None
    """A file in which all runs on the same images record what they spend, so that it adds up."""
    randomness: Literal["seed", "secret"] = "secret"
    """The source of noise; with `seed` a run can be repeated, but anybody who knows the seed can remove the noise."""


def config_problems(config: PrivacyConfig, training: Training, watching: bool) -> Iterator[str]:
    """Yield a sentence for each mistake that needs no data to find; `watching`: a schedule uses validation metrics."""
    if config.epsilon is None and config.noise is None:
        yield "privacy needs epsilon (then the noise is solved for) or noise (then epsilon is computed); give one"
    if config.augmentation_multiplicity > 1 and training.augment is None:
        yield (
            "privacy.augmentation_multiplicity would be copies of one image; give training.augment, or set "
            "privacy.augmentation_multiplicity: 1"
        )
    if config.noise_at == "server" and config.unit != "site":
        yield (
            f"privacy.noise_at: server is for unit site; with unit {config.unit} noise is added in every step, at the "
            "site"
        )
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
    if training.curriculum.by != "random":
        yield (
            f"training.curriculum.by: {training.curriculum.by} looks at images beside the steps that a privacy plan "
            "prices, and sampling has no order; set training.curriculum.by: random, or leave privacy out"
        )
    if training.private is not None:
        yield "training.private follows from privacy; leave it out"
    if watching and config.metrics == "suppress":
        yield "schedule plateau and early_stop watch metrics that this plan suppresses; set privacy.metrics: count"


@dataclass(frozen=True)
class Steps:
    """A training job of a round: `times` noised sums, each over images that are sampled with probability `rate`."""

    rate: float
    times: int


@dataclass(frozen=True)
class SiteSize:
    """The numbers of images that the plan needs of a site."""

    examples: int
    largest: int = 1
    """Training images of the patient who has most, at this site."""
    largest_validation: int = 1
    """The same of validation images."""


@dataclass(frozen=True)
class PrivacyPlan:
    """The privacy section of a recipe applied to a federation, an algorithm and the rounds, with its ε."""

    config: PrivacyConfig
    noise: float
    rounds: tuple[tuple[SiteId, ...], ...]
    """The sites of each round."""
    site_sizes: Mapping[SiteId, SiteSize]
    jobs: Mapping[SiteId, tuple[Steps, ...]]
    """The training jobs of a round, by site."""
    other_releases: Mapping[str, float] = field(default_factory=dict)
    """Noise multipliers of what a round releases besides trained weights."""
    max_sites_per_record: int = 1
    no_guarantee_reason: str = ""
    """Why ε is no guarantee; "" if it is one."""
    models: int = 1
    """The number of models that a site reports metrics of."""
    metrics_noise: float = math.inf
    earlier: tuple[Spend, ...] = ()
    """The spends of earlier runs on the same images, of a shared ledger."""

    @property
    def has_guarantee(self) -> bool:
        return not self.no_guarantee_reason

    def round_spends(self, site: SiteId, noise: float | None = None) -> tuple[Spend, ...]:
        """Return what one round at a site releases of one unit."""
        sigma = self.noise if noise is None else noise
        if self.config.unit == "site":
            return (Spend(sigma),)
        group = self.site_sizes[site].largest if self.config.unit == "patient" else 1
        steps = (Spend(sigma, job.rate, job.times, group) for job in self.jobs[site])
        return (*steps, *(Spend(charge, group=group) for charge in self.other_releases.values()))

    def run_spends(self, noise: float | None = None) -> dict[SiteId, tuple[Spend, ...]]:
        """Return what all rounds at each site release of one unit."""
        taken = {site: sum(site in cohort for cohort in self.rounds) for site in self.site_sizes}
        return {
            site: tuple(replace(s, times=s.times * rounds) for s in self.round_spends(site, noise) if rounds)
            for site, rounds in taken.items()
        }

    def worst_epsilon(self, spent: Mapping[SiteId, Iterable[Spend]], accountant: Accountant | None = None) -> float:
        """Return ε of the unit that is charged most: it is at the `max_sites_per_record` sites that released most."""
        return max(
            self.epsilon_of(one, accountant) for one in worst_candidates(spent, self.max_sites_per_record) or [()]
        )

    @cached_property
    def epsilon(self) -> float:
        """ε of the whole run as planned."""
        return self.worst_epsilon(self.run_spends())

    def epsilon_of(self, spent: Iterable[Spend], accountant: Accountant | None = None) -> float:
        """Return ε of all these releases and the earlier ones together."""
        config = self.config
        return epsilon((*spent, *self.earlier), config.delta, accountant or config.accountant, config.neighbours)

    def private_options(self) -> Private | None:
        """Return the DP-SGD options of training jobs; None if noise is added to updates instead."""
        if self.config.unit == "site":
            return None
        return Private(self.config.clip, self.noise, self.config.sampling, self.config.augmentation_multiplicity)

    def as_json(self) -> dict[str, object]:
        config = self.config
        return {
            "unit": config.unit,
            "neighbours": config.neighbours,
            "noise_at": config.noise_at,
            "sampling": config.sampling,
            "delta": config.delta,
            "clip": config.clip,
            "noise": self.noise,
            "accountant": config.accountant,
            "max_epsilon": config.epsilon,
            "max_sites_per_record": self.max_sites_per_record,
            "metrics": config.metrics,
            "metrics_noise": None if math.isinf(self.metrics_noise) else self.metrics_noise,
            "randomness": config.randomness,
            "no_guarantee_reason": self.no_guarantee_reason,
        }


def worst_candidates(spent: Mapping[SiteId, Iterable[Spend]], max_sites: int) -> list[tuple[Spend, ...]]:
    """Return compositions of which the one with the largest ε is an upper bound for any unit at `max_sites` sites.

    A unit at one site is charged for that site, so each site is a candidate except those that release less than another
    in every respect. A unit at m sites composes m times; sites' releases have no order in general, so for each noise
    the m largest numbers of releases are added, all at the largest rate.
    """
    lists = {tuple(spends) for spends in spent.values()} - {()}
    if max_sites == 1:
        return [one for one in lists if not any(other != one and _dominates(other, one) for other in lists)]
    kinds: dict[float, list[Spend]] = defaultdict(list)
    for spends in (tuple(found) for found in spent.values()):
        for noise in {s.noise for s in spends}:
            mine = [s for s in spends if s.noise == noise]
            rate, group = max(s.rate for s in mine), max(s.group for s in mine)
            kinds[noise].append(Spend(noise, rate, sum(s.times for s in mine), group))
    return [tuple(_largest_spend(rows, max_sites) for rows in kinds.values())] if kinds else []


def _largest_spend(rows: Sequence[Spend], max_sites: int) -> Spend:
    times = sorted((s.times for s in rows), reverse=True)[:max_sites]
    return Spend(rows[0].noise, max(s.rate for s in rows), sum(times), max(s.group for s in rows))


def _dominates(more: tuple[Spend, ...], less: tuple[Spend, ...]) -> bool:
    return len(more) == len(less) and all(
        m.noise == s.noise and m.rate >= s.rate and m.times >= s.times and m.group >= s.group
        for m, s in zip(more, less, strict=True)
    )


def steps_of(job: Fit, examples: int, config: PrivacyConfig) -> Steps:
    """Return a training job as the accountant counts it."""
    rate, times = rate_and_sums(job, examples)
    return Steps(1.0 if config.amplification is False else round_up(rate), times)


def round_up(rate: float) -> float:
    if rate >= 1:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - DIGITS + 1)
    return min(1.0, math.ceil(rate / unit - 1e-9) * unit)


def make_plan(draft: PrivacyPlan) -> PrivacyPlan:
    """Return the plan with its noise solved for; raises `RecipeError` if ε was asked for and cannot be guaranteed."""
    config = draft.config
    units = len(draft.site_sizes) if config.unit == "site" else max(h.examples for h in draft.site_sizes.values())
    if config.delta * units >= 1:
        what = "sites" if config.unit == "site" else "training images at the largest site"
        raise RecipeError(
            f"privacy.delta is {config.delta:g}, but there are {units} {what}: a mechanism that publishes one of them "
            f"outright would pass; choose a delta well below {1 / units:.1e}"
        )
    if config.ledger is not None and draft.no_guarantee_reason:
        raise RecipeError(
            f"privacy.ledger is for runs with a guarantee, but {draft.no_guarantee_reason}; leave privacy.ledger out"
        )
    if (
        config.epsilon is not None
        and draft.earlier
        and (spent := draft.worst_epsilon({})) >= MAX_SPENT_SHARE * config.epsilon
    ):
        raise RecipeError(
            f"earlier runs on these images have spent ε = {spent:.3g} (see {config.ledger}), and privacy.epsilon is "
            f"{config.epsilon:g}; raise privacy.epsilon, or stop using these images"
        )
    if config.epsilon is not None and draft.no_guarantee_reason:
        raise RecipeError(
            f"privacy.epsilon cannot be promised: {draft.no_guarantee_reason}; set algorithm.variant: corrected, or "
            "give privacy.noise alone to run without a guarantee"
        )
    noise = config.noise
    if noise is None:
        assert config.epsilon is not None
        noise = _solve_noise(draft, config.epsilon)
    plan = replace(draft, noise=noise)
    return replace(plan, metrics_noise=_metrics_noise(plan)) if config.metrics == "count" else plan


def _solve_noise(draft: PrivacyPlan, target: float) -> float:
    """Return the least noise that keeps every candidate within the target."""
    config = draft.config

    def scaled(one: tuple[Spend, ...], sigma: float) -> tuple[Spend, ...]:
        """Set the noise of training; that of other releases is given."""
        return (*(replace(s, noise=sigma) if s.noise == NOISE_PLACEHOLDER else s for s in one), *draft.earlier)

    return max(
        noise_for(partial(scaled, one), target, config.delta, config.accountant, config.neighbours)
        for one in worst_candidates(draft.run_spends(NOISE_PLACEHOLDER), draft.max_sites_per_record)
    )


def _metrics_noise(plan: PrivacyPlan) -> float:
    """Return the noise on metrics. Validation images are not training images, so they have the same ε of their own."""
    target = plan.config.epsilon if plan.config.epsilon is not None else plan.epsilon
    taken = (
        max(sum(site in cohort for cohort in plan.rounds) for site in plan.site_sizes)
        * plan.max_sites_per_record
        * plan.models
    )
    group = max(h.largest_validation for h in plan.site_sizes.values()) if plan.config.unit == "patient" else 1
    return noise_for(
        lambda noise: (Spend(noise, times=taken, group=group),),
        target,
        plan.config.delta,
        plan.config.accountant,
        plan.config.neighbours,
    )


def max_images_per_patient(patients: Sequence[str] | None) -> int:
    """Return the number of images of the patient who has most."""
    if not patients:
        return 1
    return max(Counter(patients).values())
