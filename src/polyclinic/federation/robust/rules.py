"""The rules by which updates of a cohort are combined (recipe key `aggregate`), as functions of vectors and weights.

    mean          the algorithm's own mean; nothing is bounded, and updates are not kept until all have arrived
    norm_bound    the mean without updates that moved much farther than the cohort's median, or far against the others'
                  direction (after Sun, Kairouz, Suresh, McMahan: Can you really backdoor federated learning?
                  arXiv:1911.07963, with a bound that is relative to the cohort, and leaving out rather than scaling)
    trimmed_mean  coordinate by coordinate, without the smallest and the largest values
    median        coordinate by coordinate (both: Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed
                  learning, ICML 2018)
    krum          the update that is nearest to its neighbours (Blanchard, El Mhamdi, Guerraoui, Stainer: Machine
                  learning with adversaries: Byzantine tolerant gradient descent, NeurIPS 2017)

The last three ignore how many images a site has: a count that nobody can verify would bring back the influence that
they take away.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from polyclinic.core import PositiveShare, RecipeError, SiteId

CENTRES = ("trimmed_mean", "median", "krum")
"""Rules that replace every update of a cohort by one."""
USED_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "mean": (),
    "norm_bound": ("bound", "against", "most_share"),
    "trimmed_mean": ("trim",),
    "median": (),
    "krum": ("hostile", "choose"),
}
"""The options that have an effect, by rule."""
FEWEST = 3
"""Sites of a cohort without which nobody can say who is the outlier: then the rule is `mean`."""
MOST_BELIEVED = 3
"""A number of images that nobody has registered is believed up to so many times the median of the other sites'."""
MOST_ALLOWANCE = 2.5
"""A site with more local steps than the median site may move as many times as far, up to this."""


@dataclass(frozen=True)
class Aggregation:
    """How the updates of a round are combined."""

    name: Literal["mean", "norm_bound", "trimmed_mean", "median", "krum"] = "norm_bound"
    bound: Annotated[float, Field(gt=1)] = 4.0
    """norm_bound: how many times as far as the cohort's median a site may move."""
    against: Annotated[float, Field(gt=1)] = 2.0
    """norm_bound: how far, in the same unit, a site may move against the others' direction before it is left out."""
    trim: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    """trimmed_mean: the share of sites whose values are left out at each end."""
    hostile: PositiveInt = 1
    """krum: the number of hostile sites that it is to withstand."""
    choose: PositiveInt = 1
    """krum: the number of updates whose mean is taken."""
    most_share: PositiveShare = 0.5
    """norm_bound: the largest weight of one site of three or more, as a share of all."""


PLAIN_MEAN = Aggregation("mean")


def cap_weights(weights: Sequence[float], most_share: float) -> list[float]:
    """Return the weights, the largest of them lowered so that none is more than `most_share` of the new sum."""
    total, capped = math.fsum(weights), 0
    if not weights or max(weights) <= most_share * total:
        return list(weights)
    ordered = sorted(weights, reverse=True)
    while capped < len(ordered):
        capped += 1
        rest, room = math.fsum(ordered[capped:]), 1 - capped * most_share
        if room <= 0:
            break
        most = most_share * rest / room
        if capped == len(ordered) or ordered[capped] <= most:
            return [min(weight, most) for weight in weights]
    return [min(weights)] * len(weights)


def median_length(lengths: Sequence[float]) -> float:
    """Return the median distance of a cohort, of which a minority may be made up."""
    return statistics.median(lengths)


def believe_counts(told: Mapping[SiteId, int], registered: Collection[SiteId] = ()) -> dict[SiteId, int]:
    """Return as how many images each site counts that only its own word stands for.

    Args:
        told: By site: the training images that it claims.
        registered: The sites whose number of images is known otherwise; they are not in the result.

    Returns:
        Its claim up to `MOST_BELIEVED` times the median of the other sites'; for a higher claim half of that median.
        Of two sites nobody can say whose claim is wrong.
    """
    found: dict[SiteId, int] = {}
    for site in told.keys() - registered:
        others = [count for other, count in told.items() if other != site]
        usual = statistics.median(others) if len(told) >= FEWEST else told[site]
        found[site] = told[site] if told[site] <= MOST_BELIEVED * usual else math.ceil(usual / 2)
    return found


def step_allowances(steps: Sequence[float]) -> list[float]:
    """Return by how much farther than the median each site may move because it takes more local steps."""
    middle = statistics.median(steps)
    return [min(MOST_ALLOWANCE, max(1.0, own / middle)) if middle > 0 else 1.0 for own in steps]


def check_site_count(rule: Aggregation, sites: int) -> None:
    """Raise `RecipeError` if rounds are too small for what a rule promises.

    Krum withstands f hostile sites among 2f + 3 or more; of fewer than three sites nobody can say who is the outlier.

    Args:
        rule: The recipe's rule; the mean promises nothing, and `norm_bound` is the default even where it cannot help.
        sites: The fewest sites that a round of this recipe may have.
    """
    fewest = 2 * rule.hostile + 3 if rule.name == "krum" else FEWEST
    if rule.name in CENTRES and sites < fewest:
        against = f" against {rule.hostile} hostile" if rule.name == "krum" else ""
        raise RecipeError(
            f"aggregate: {rule.name} needs {fewest} sites or more in every round{against}, and a round of this recipe "
            f"may have {sites}; have more sites (or a larger quorum or cohort), or set aggregate: norm_bound"
        )


def trim_count(rule: Aggregation, sites: int) -> int:
    """Return how many values are left out at each end of every coordinate."""
    most = (sites - 1) // 2
    return most if rule.name == "median" else min(most, math.ceil(rule.trim * sites - 1e-9))


def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """Return the mean of each column without its `trim` smallest and largest values, whatever the order of the rows.

    Args:
        rows: A row of values for each site.
        trim: The number of values left out at each end.
    """
    kept = rows.double().sort(dim=0).values[trim : len(rows) - trim]
    return kept.mean(dim=0)


def choose_by_krum(squared_distances: Tensor, rule: Aggregation) -> list[int]:
    """Return the positions of the updates that Krum chooses, best first.

    Args:
        squared_distances: The squared distance of every pair of updates, in an order of sites that does not depend on
            arrival: of equal scores the first is chosen.
        rule: The number of hostile sites and of updates to choose.
    """
    sites = len(squared_distances)
    nearest = max(1, sites - rule.hostile - 2)
    others = squared_distances + torch.diag(torch.full((sites,), torch.inf, dtype=squared_distances.dtype))
    scores = others.sort(dim=1).values[:, :nearest].sum(dim=1)
    order = sorted(range(sites), key=lambda place: (float(scores[place]), place))
    return order[: min(rule.choose, sites)]
