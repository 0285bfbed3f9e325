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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from polyclinic.core import Fit, Private, RecipeError, SiteId, Training
from polyclinic.evaluation.summary import PUBLIC_SEED
from polyclinic.privacy.accounting import SMALLEST_NOISE, Accountant, Neighbours, Spend, noise_for
from polyclinic.privacy.sampling import rate_and_sums
from polyclinic.privacy.worst_case import Composition, RunCost, add_up, run_cost, worst_epsilon

Unit = Literal["image", "patient", "site"]
FEW_SITES = 16
"""Up to so many sites, sampling rates are rounded up to five digits; beyond, to three, so that most sites' costs are
equal and need to be computed once."""

RELEASED = ("model",)
"""Kinds of an update that a site-level plan clips and noises, together as one vector."""
MAX_SPENT_SHARE = 0.98
"""The share of ε; where earlier runs have spent more, the rest would allow nothing but noise."""


@dataclass(frozen=True)
class PrivacyConfig:
    """The section `privacy` of a recipe."""

    unit: Unit = "image"
    epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """The ε of the whole run; with `noise` as well, the run stops before it exceeds it."""
    noise: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """σ, the noise in units of the clip, at every site; left out, it is solved for `epsilon`."""
    noise_per_site: bool | None = None
    """Whether each site's noise is solved by itself, so that all pay the same ε. Left out: yes, for units image and
    patient. Otherwise all sites have the noise of the site that needs most."""
    weigh_by_noise: bool = False
    """Whether an update's weight in a mean is divided by σ² of its site."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Annotated[float, Field(ge=1e-9, le=1e9)] | Literal["auto"] = 1.0
    """C, the largest norm of what one unit adds to a sum; `auto`: every image's gradient is scaled to the length 1."""
    accountant: Accountant = "pld"
    neighbours: Neighbours = "add or remove"
    sampling: Literal["poisson", "shuffle"] = "poisson"
    amplification: bool | None = None
    """Whether the accountant counts on sampling; left out: with Poisson sampling only."""
    group: Annotated[int, Field(ge=1)] | None = None
    """For unit patient: the most training images of one patient at a site. Of a patient who is named, those beyond it
    are left out; where patients are not named, it is declared and not checked."""
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
    """The source of noise. With `seed` a run can be repeated, and ε is no guarantee, since whoever has the recipe can
    remove the noise."""

    @property
    def no_guarantee_reason(self) -> str:
        """Why no run of this section gives a guarantee; "" if one can."""
        return PUBLIC_SEED if self.randomness == "seed" else ""

    @property
    def clip_norm(self) -> float:
        """C, which is 1 with automatic clipping."""
        return 1.0 if self.clip == "auto" else self.clip


def config_problems(config: PrivacyConfig, training: Training, watching: bool) -> Iterator[str]:
    """Yield a sentence for each mistake that needs no data to find; `watching`: a schedule uses validation metrics."""
    if config.epsilon is None and config.noise is None:
        yield "privacy needs epsilon (then the noise is solved for) or noise (then epsilon is computed); give one"
    if config.augmentation_multiplicity > 1 and training.augment is None:
        yield (
            "privacy.augmentation_multiplicity would be copies of one image; give training.augment, or set "
            "privacy.augmentation_multiplicity: 1"
        )
    if config.noise_per_site and (config.noise is not None or config.unit == "site"):
        reason = "privacy.noise is given" if config.noise is not None else "unit site needs the same noise everywhere"
        yield f"privacy.noise_per_site solves the noise of each site, and {reason}; leave privacy.noise_per_site out"
    if config.clip == "auto" and config.unit == "site":
        yield "privacy.clip: auto scales the gradients of single images, and unit site clips updates; give a number"
    if config.noise_at == "server" and config.unit != "site":
        yield (
            f"privacy.noise_at: server is for unit site; with unit {config.unit} noise is added in every step, at the "
            "site"
        )
    if config.group is not None and config.unit != "patient":
        yield f"privacy.group bounds the images of a patient, and the unit is {config.unit}; set privacy.unit: patient"
    if config.metrics == "count" and config.unit == "site":
        yield "privacy.metrics: count protects single images, not a whole site; set it to suppress"
    if config.amplification and config.unit == "site":
        yield "cohorts are drawn in public, which makes no round cheaper; leave privacy.amplification out"
    if config.amplification and config.sampling == "shuffle":
        yield (
            "a shuffled loader is not Poisson sampling, so no step is cheaper for it; set privacy.sampling: poisson, "
            "or privacy.amplification: false"
        )
    if config.ledger is not None and config.no_guarantee_reason:
        yield (
            "privacy.ledger adds up what runs spend, and no ε bounds what noise from a public seed spends; set "
            "privacy.randomness: secret, or leave privacy.ledger out"
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
    """Training images of the patient who has most, at this site; at least privacy.group if some are not named."""
    largest_validation: int = 1
    """The same of validation images."""
    unnamed: int = 0
    """Training images whose patient is not named."""
    unnamed_validation: int = 0
    """The same of validation images."""
    left_out: int = 0
    """Training images beyond privacy.group, which are not used."""
    largest_test: int = 1
    """As `largest`, of test images, of which a real site may release scores."""
    unnamed_test: int = 0

    def with_tests(self) -> "SiteSize":
        """Return the same numbers where a patient's test images are released as well."""
        return replace(self, largest=max(self.largest, self.largest_test), unnamed=self.unnamed + self.unnamed_test)


@dataclass(frozen=True)
class PrivacyPlan:
    """The privacy section of a recipe applied to a federation, an algorithm and the rounds, with its ε."""

    config: PrivacyConfig
    noise: float
    """σ, the least of all sites."""
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
    earlier: tuple[RunCost, ...] = ()
    """The costs of earlier runs on the same images, of a shared ledger."""
    site_noise: Mapping[SiteId, float] = field(default_factory=dict)
    """The noise of each site, where it is not the same at all."""
    masked: bool = False
    """Whether sites' updates are read as a sum only (`privacy.transforms.mask`)."""

    @property
    def has_guarantee(self) -> bool:
        return not self.no_guarantee_reason

    @property
    def releases_sums(self) -> bool:
        """Whether a round of unit site releases one sum over its sites with one noise: at the server, or behind masks.

        Behind masks this noise is what sites add of whom as few are left as may be, without those that collude.
        """
        return self.config.unit == "site" and (self.masked or self.config.noise_at == "server")

    @property
    def images_per_patient(self) -> int | None:
        """The most images of one patient at a site, in the training or the validation part; None: nobody knows."""
        sizes = self.site_sizes.values()
        if self.config.group is None and any(size.unnamed or size.unnamed_validation for size in sizes):
            return None
        return max(max(size.largest, size.largest_validation) for size in sizes)

    def samples_patients(self, site: SiteId) -> bool:
        """Whether patients, not images, join a site's steps; then one with several images costs as much as an image."""
        config, size = self.config, self.site_sizes.get(site, SiteSize(0))
        return config.unit == "patient" and config.sampling == "poisson" and not size.unnamed and size.largest > 1

    def noise_of(self, site: SiteId) -> float:
        return self.site_noise.get(site, self.noise)

    def precision_of(self, site: SiteId) -> float:
        """Return 1/σ² of a site's noise, relative to the site with the least, if updates are weighed by it; else 1."""
        noisy = self.config.weigh_by_noise and self.site_noise
        return (self.noise / self.noise_of(site)) ** 2 if noisy else 1.0

    def round_spends(self, site: SiteId) -> Composition:
        """Return what one round at a site releases of one unit."""
        sigma = self.noise_of(site)
        if self.config.unit == "site":
            return (Spend(sigma),)
        group = self.site_sizes[site].largest if self.config.unit == "patient" else 1
        in_step = 1 if self.samples_patients(site) else group
        steps = (Spend(sigma, job.rate, job.times, in_step) for job in self.jobs[site])
        return (*steps, *(Spend(charge, group=group) for charge in self.other_releases.values()))

    def run_spends(self) -> dict[SiteId, Composition]:
        """Return what all rounds at each site release of one unit."""
        return {
            site: tuple(spend.repeated(rounds) for spend in self.round_spends(site) if rounds)
            for site, rounds in self.rounds_by_site.items()
        }

    def validation_spends(self, rounds: int) -> Composition:
        """Return what a site's metrics release of one validation image (or patient) in so many rounds."""
        if math.isinf(self.metrics_noise):
            return ()
        group = max(h.largest_validation for h in self.site_sizes.values()) if self.config.unit == "patient" else 1
        return (Spend(self.metrics_noise, times=rounds * self.models, group=group),)

    @cached_property
    def rounds_by_site(self) -> dict[SiteId, int]:
        """The number of rounds in which each site takes part."""
        return {site: sum(site in cohort for cohort in self.rounds) for site in self.site_sizes}

    def worst_epsilon(self, spent: Mapping[SiteId, Iterable[Spend]], accountant: Accountant | None = None) -> float:
        """Return ε of the unit that is charged most: it is at the `max_sites_per_record` sites that released most.

        Validation images count where they may have been training images: in `earlier` runs, or at another site.
        """
        most = self.max_sites_per_record
        may_train = self.earlier or most > 1
        validation = [self.validation_spends(max(self.rounds_by_site.values()))] * most if may_train else []
        return self._price([*spent.values(), *validation], most, accountant)

    @cached_property
    def epsilon(self) -> float:
        """ε of the whole run as planned."""
        return self.worst_epsilon(self.run_spends())

    def epsilon_of(self, spent: Iterable[Spend], accountant: Accountant | None = None) -> float:
        """Return ε of all these releases and the earlier ones together."""
        return self._price([spent], 1, accountant)

    def _price(self, sites: Iterable[Iterable[Spend]], max_sites: int, accountant: Accountant | None) -> float:
        own = run_cost(sites, max_sites, self.config.neighbours)
        return worst_epsilon((own, *self.earlier), self.config.delta, accountant or self.config.accountant)

    def private_options(self, site: SiteId | None = None) -> Private | None:
        """Return the DP-SGD options of training jobs at a site; None if noise is added to updates instead."""
        if self.config.unit == "site":
            return None
        noise = self.noise if site is None else self.noise_of(site)
        unit: Literal["image", "patient"] = "patient" if site is not None and self.samples_patients(site) else "image"
        return replace(private_options(self.config, noise), unit=unit)

    def as_json(self) -> dict[str, object]:
        config = self.config
        return {
            "unit": config.unit,
            "group": config.group,
            "neighbours": config.neighbours,
            "noise_at": config.noise_at,
            "sampling": config.sampling,
            "delta": config.delta,
            "clip": config.clip,
            "noise": self.noise,
            "site_noise": dict(self.site_noise),
            "accountant": config.accountant,
            "max_epsilon": config.epsilon,
            "max_sites_per_record": self.max_sites_per_record,
            "metrics": config.metrics,
            "metrics_noise": None if math.isinf(self.metrics_noise) else self.metrics_noise,
            "randomness": config.randomness,
            "no_guarantee_reason": self.no_guarantee_reason,
        }


def describe_clip(clip: float | Literal["auto"]) -> str:
    return "scaled to length 1" if clip == "auto" else f"clipped to {clip:g}"


def describe_noise(noise: float, site_noise: Mapping[SiteId, float]) -> str:
    """Return σ, or its range where each site has its own."""
    if not site_noise:
        return f"{noise:.4g}"
    return f"{min(site_noise.values()):.4g} to {max(site_noise.values()):.4g}, by site"


def private_options(config: PrivacyConfig, noise: float) -> Private:
    """Return the DP-SGD options of training jobs at this noise."""
    views = config.augmentation_multiplicity
    return Private(config.clip_norm, noise, config.sampling, views, normalise=config.clip == "auto")


def steps_of(job: Fit, examples: int, config: PrivacyConfig, sites: int = 1) -> Steps:
    """Return a training job as the accountant counts it; `sites`: how many sites are priced."""
    rate, times = rate_and_sums(job, examples)
    if rate < 1 and len(job.sequence) > 1 and config.amplification is not False:
        raise RecipeError(
            "this algorithm takes several steps on one random batch, which are not sampled independently; set "
            "privacy.amplification: false, or privacy.sampling: shuffle"
        )
    return Steps(1.0 if config.amplification is False else round_up(rate, 5 if sites <= FEW_SITES else 3), times)


def round_up(rate: float, digits: int) -> float:
    if rate >= 1:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(rate)) - digits + 1)
    return min(1.0, math.ceil(rate / unit - 1e-9) * unit)


def make_plan(draft: PrivacyPlan) -> PrivacyPlan:
    """Return the plan with its noise solved for; raises `RecipeError` if ε was asked for and cannot be guaranteed."""
    config = draft.config
    _check_patients_named(draft)
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
    plan = replace(draft, noise=config.noise) if config.noise is not None else _solve_noise(draft)
    plan = replace(plan, no_guarantee_reason=plan.no_guarantee_reason or config.no_guarantee_reason)
    return replace(plan, metrics_noise=_metrics_noise(plan)) if config.metrics == "count" else plan


def _check_patients_named(draft: PrivacyPlan) -> None:
    """Raise a `RecipeError` for a claim about patients whom the data do not name and the recipe does not bound."""
    config = draft.config
    if config.unit != "patient" or config.group is not None:
        return
    sizes = draft.site_sizes.values()
    training, validation = (sum(of) for of in zip(*((s.unnamed, s.unnamed_validation) for s in sizes), strict=True))
    if training or (validation and config.metrics == "count"):
        images = f"{training} training images" if training else f"{validation} validation images"
        raise RecipeError(
            f"privacy.unit: patient protects patients, but {images} name no patient, so nobody knows how many images "
            "one has; name the patient of every image in the data, declare the most images of a patient at a site "
            "with privacy.group, or set privacy.unit: image"
        )


def _solve_noise(draft: PrivacyPlan) -> PrivacyPlan:
    """Return the plan with the least noise that keeps every record within privacy.epsilon."""
    target = draft.config.epsilon
    assert target is not None
    if draft.config.unit == "site" or draft.config.noise_per_site is False:

        def spent(noise: float) -> float:
            plan = replace(draft, noise=noise)
            return plan.worst_epsilon(plan.run_spends())

        return replace(draft, noise=noise_for(spent, target))
    if draft.max_sites_per_record == 1:
        return _equalise_epsilon(draft, target)
    return _share_epsilon(draft, target)


def _equalise_epsilon(draft: PrivacyPlan, target: float) -> PrivacyPlan:
    """Return the plan in which a record at one site pays exactly the target, whatever the site."""
    found: dict[Composition, float] = {}
    noise: dict[SiteId, float] = {}
    for site, rounds in draft.rounds_by_site.items():

        def spends(sigma: float, site: SiteId = site, rounds: int = rounds) -> Composition:
            plan = replace(draft, noise=sigma)
            return add_up(spend.repeated(rounds) for spend in plan.round_spends(site))

        if rounds:
            kind = spends(1.0 + 2.0**-40)  # a noise that no other release has
            found[kind] = found.get(kind) or noise_for(lambda sigma: draft.epsilon_of(spends(sigma)), target)
            noise[site] = found[kind]
    return replace(draft, noise=min(noise.values()), site_noise=noise if len(set(noise.values())) > 1 else {})


def _share_epsilon(draft: PrivacyPlan, target: float) -> PrivacyPlan:
    """Return the plan of a record at several sites: it pays the target there together, and the same at each."""
    plans: dict[float, PrivacyPlan] = {}

    def spent(scale: float) -> float:
        plans[scale] = _equalise_epsilon(draft, target / scale)
        return plans[scale].epsilon

    return plans[noise_for(spent, target)]


def _metrics_noise(plan: PrivacyPlan) -> float:
    """Return the noise on metrics. Validation images are not training images, so they have the same ε of their own."""
    least, target = SMALLEST_NOISE, plan.config.epsilon or plan.epsilon
    if plan.config.epsilon is None:
        least = least_metrics_noise(plan, len(plan.site_sizes))
        if replace(plan, metrics_noise=least).epsilon <= target:
            return least

    def spent(noise: float) -> float:
        noised = replace(plan, metrics_noise=noise)
        alone = noised.epsilon_of(noised.validation_spends(max(plan.rounds_by_site.values())))
        return max(alone, noised.worst_epsilon(plan.run_spends()))

    return max(least, noise_for(spent, max(target, plan.epsilon)))


def least_metrics_noise(plan: PrivacyPlan, sites: int) -> float:
    """Return the noise on metrics with which no site's validation images pay more than its training images, if it took
    part in every round. So every site can compute what it needs itself, where the recipe names no ε.

    `plan`: of some of the sites, or of one alone; `sites`: how many all are, which decides how rates are rounded.
    """
    digits, rounds = 5 if sites <= FEW_SITES else 3, len(plan.rounds)
    alone = replace(plan, earlier=())
    training = {
        tuple(replace(spend, rate=round_up(spend.rate, digits)).repeated(rounds) for spend in alone.round_spends(site))
        for site in plan.site_sizes
    }
    target = min(alone.epsilon_of(spends) for spends in training)
    return noise_for(
        lambda noise: alone.epsilon_of(replace(alone, metrics_noise=noise).validation_spends(rounds)), target
    )
