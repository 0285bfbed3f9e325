"""The privacy record of a run: what leaves the sites, what protects it, and what the run has cost."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean
from typing import Literal

from polyclinic.core import Exchange, RecipeError, SiteId
from polyclinic.evaluation.rows import MetricRow, TrainRow
from polyclinic.evaluation.summary import PrivacySpent, ReleasedKind
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.privacy.accounting import Accountant, Spend, epsilon
from polyclinic.privacy.plan import RELEASED, PrivacyPlan, describe_clip, describe_noise
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.runs.final_evaluation import SiteAnswer

ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "prv")
STATISTICS = ("prototypes", "counts", "features", "means")
"""Kinds that are not trained, but statistics of images."""


MASKED = "; masked: the server learns the sum over sites"
METRICS_WORDS = "every evaluated round, of the site's validation images; no plan"
NOT_MASKED = "; not masked: the server learns those of each site"
CARD = (
    "before the run: numbers of images of each part, in all, of the patient with most, without a patient's name and "
    "left out; the classes; the images' size and channels; the fewest sites; polyclinic's version; a keyed hash"
)
"""What a site tells of its images; nothing of it is noised."""


def list_releases(
    plan: PrivacyPlan | None, exchanges: Iterable[Exchange], transforms: Iterable[UpdateTransform] = ()
) -> list[ReleasedKind]:
    """Return each kind of data that leaves a site, with its protection; `transforms`: those of the run's updates."""
    sent, masked = (
        list(exchanges),
        MASKED if any(isinstance(stage, Mask) and stage.masks for stage in transforms) else "",
    )
    if plan is None:
        return [
            *(ReleasedKind(kind=e.kind, protection=f"{e.protection.why}{masked}") for e in sent),
            ReleasedKind(kind="metrics", protection=f"{METRICS_WORDS}{NOT_MASKED if masked else ''}"),
            ReleasedKind(
                kind="predictions", protection="after the last round, of every image, with its label; no plan"
            ),
        ]
    kinds = {exchange.kind: f"{_describe_protection(plan, exchange.kind)}{masked}" for exchange in sent}
    kinds |= {kind: _describe_charged(noise) for kind, noise in plan.other_releases.items() if kind not in kinds}
    kinds["metrics"] = _describe_metrics(plan)
    if masked and plan.config.metrics != "suppress":
        kinds["metrics"] += NOT_MASKED
    kinds["predictions"] = "read by the simulation itself after the last round; outside the claim"
    kinds["number of images"] = "public by assumption"
    return [ReleasedKind(kind=kind, protection=text) for kind, text in kinds.items()]


def list_site_releases(
    released: Collection[ReleasedKind],
    plan: PrivacyPlan | None,
    answers: Mapping[SiteId, SiteAnswer],
    withheld: Collection[SiteId],
) -> list[ReleasedKind]:
    """Return the same for real sites, which score the final models at home; `answers`: what they told, `withheld`: the
    sites that told no scores."""
    scored = [site for site, answer in answers.items() if answer.scores is not None]
    sent = [site for site, answer in answers.items() if answer.predictions]
    bare = NOT_MASKED if any(MASKED in row.protection for row in released) else ""
    scores = "computed at each site after the last round; they stayed there"
    if scored:
        scores = f"computed at each site after the last round, from {', '.join(scored)}; {_protect_scores(plan)}{bare}"
        scores += f"; none came from {', '.join(withheld)}" if withheld else ""
    predictions = "asked of no site, and none left a site"
    if sent:
        predictions = (
            f"of test images only, once, in thousandths, with each image's label, from {', '.join(sent)}; no plan "
            f"protects them{bare}"
        )
    kept = [row for row in released if row.kind not in ("predictions", "final scores")]
    rows = {"final scores": scores, "predictions": predictions, "card": CARD}
    return [*kept, *(ReleasedKind(kind=kind, protection=text) for kind, text in rows.items())]


def _protect_scores(plan: PrivacyPlan | None) -> str:
    if plan is None:
        return "no plan"
    if plan.config.metrics == "open":
        return "as they are: NOT protected"
    return f"accuracy and loss of test images from noised counts (noise {plan.metrics_noise:.4g}), charged to them"


def _describe_protection(plan: PrivacyPlan, kind: str) -> str:
    config = plan.config
    if kind == "buffers":
        return "nothing is trained in them: empty, or frozen as they were sent"
    if not plan.has_guarantee:
        return f"noised, but without a guarantee: {plan.no_guarantee_reason}"
    if kind in plan.other_releases:
        return _describe_charged(plan.other_releases[kind])
    if kind in STATISTICS:
        return "sent with the kind named before it, in one release"
    if config.unit != "site":
        return (
            f"trained by DP-SGD: gradients {describe_clip(config.clip)} each, noise "
            f"{describe_noise(plan.noise, plan.site_noise)} × that on their sum"
        )
    if kind not in RELEASED:
        return "none"
    where = "before it leaves the site" if config.noise_at == "site" else "by the server, to the mean"
    return f"{describe_clip(config.clip)} as a whole, noise {plan.noise:.4g} × that added {where}"


def _describe_charged(noise: float) -> str:
    return f"of every image no more than a fixed length counts (algorithm.clip), noise {noise:g} × that; charged"


def _describe_metrics(plan: PrivacyPlan) -> str:
    if plan.config.metrics == "suppress":
        return "kept at the sites"
    if plan.config.metrics == "open":
        return "reported as they are, every evaluated round: NOT protected"
    return f"noised counts (noise {plan.metrics_noise:.4g}), charged to the validation images"


def summarise_privacy(budget: PrivacyBudget, exhausted: bool, rows: Iterable[MetricRow]) -> PrivacySpent:
    """Return the cost of a run by its budget. `exhausted`: the run stopped since the next round cost too much."""
    plan, config, spent = budget.plan, budget.plan.config, budget.total_spends()
    by_site = {site: plan.epsilon_of(spends) for site, spends in spent.items()}
    return PrivacySpent(
        unit=config.unit,
        neighbours=config.neighbours,
        noise_at=config.noise_at,
        sampling=config.sampling,
        delta=config.delta,
        clip=config.clip,
        noise=plan.noise,
        site_noise=dict(plan.site_noise),
        accountant=config.accountant,
        max_epsilon=config.epsilon,
        max_sites_per_record=plan.max_sites_per_record,
        metrics=config.metrics,
        metrics_noise=_finite_or_none(plan.metrics_noise),
        randomness=config.randomness,
        no_guarantee_reason=plan.no_guarantee_reason,
        planned_epsilon=_finite_or_none(plan.epsilon),
        epsilon_by_accountant={name: _price_with(plan, spent, name) for name in ACCOUNTANTS},
        worst_site_epsilon=_finite_or_none(max(by_site.values(), default=0.0)),
        site_epsilon={site: _finite_or_none(value) for site, value in by_site.items()},
        stopped_by_budget=exhausted,
        earlier_epsilon=_finite_or_none(plan.worst_epsilon({})) if plan.earlier else 0.0,
        largest_group=max(sizes.largest for sizes in plan.site_sizes.values()),
        group=config.group,
        unnamed=sum(sizes.unnamed for sizes in plan.site_sizes.values()),
        left_out=sum(sizes.left_out for sizes in plan.site_sizes.values()),
        sampled=_sampled_unit(plan),
        paper_metric=_paper_metric(plan, rows),
    )


def _sampled_unit(plan: PrivacyPlan) -> Literal["image", "patient", "either"]:
    named = {not sizes.unnamed for sizes in plan.site_sizes.values()}
    if plan.config.unit != "patient" or plan.config.sampling != "poisson" or named == {False}:
        return "image"
    return "patient" if named == {True} else "either"


def _price_with(plan: PrivacyPlan, spent: Mapping[SiteId, Iterable[Spend]], accountant: Accountant) -> float | None:
    """None where that accountant cannot price such a run."""
    try:
        return _finite_or_none(plan.worst_epsilon(spent, accountant))
    except (RecipeError, ImportError):
        return None


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _paper_metric(plan: PrivacyPlan, rows: Iterable[MetricRow]) -> float | None:
    """Eq. 4 and 5 of the adaptive-noise paper: the mean over a round's sites of each one's ε, summed over rounds."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        noise = row.scalars.get("noise") if isinstance(row, TrainRow) else None
        if noise and row.site in plan.jobs:
            # Rounded down to two decimals: most sites then cost the same, none less than it should.
            spends = [Spend(math.floor(noise * 100) / 100, s.rate, s.times) for s in plan.jobs[row.site]]
            by_round[row.round].append(epsilon(spends, plan.config.delta, "prv"))
    return sum(map(fmean, by_round.values())) if by_round else None
