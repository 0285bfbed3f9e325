"""The largest ε of any record, where it is not known which sites of a run hold it.

A record lies at up to `max_sites` sites of a run, and at others in another run. So every run offers candidates: what is
released by each possible set of sites. The price is that of the worst choice of one candidate from each run. The
candidate with the largest ε by itself need not be the worst when others are added, so all are kept, and all
combinations are priced. Where there are too many, the smaller of two upper bounds takes their place:

    (1)  δ(ε) = max_c δ_c(ε): a release whose privacy profile is the maximum of the candidates' dominates each of them,
         in any composition (Zhu, Dong, Wang: Optimal accounting of differential privacy via characteristic function.
         AISTATS 2022), at the j-th of the record's sites and in each run
    (2)  at each Rényi order the sum of the largest divergences
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import chain, combinations_with_replacement, product
from typing import Any, TypeAlias

import numpy as np

from polyclinic.core import RecipeError
from polyclinic.privacy.accounting import (
    TAIL,
    Accountant,
    Neighbours,
    Spend,
    bucket_width,
    compose_pld,
    epsilon,
    merge_spends,
    rdp_curve,
)

Composition: TypeAlias = tuple[Spend, ...]
"""All releases of one record."""
MOST_PRICED = 500
"""The most sets of sites of a run, and the most combinations over runs, that are priced one by one."""
COARSER = 8.0
"""Where there are several combinations, each is first priced in buckets that are wider by this factor."""


@dataclass(frozen=True)
class RunCost:
    """What one run releases of a record, site by site, and the most sites that may hold it."""

    sites: tuple[Composition, ...]
    max_sites: int = 1
    neighbours: Neighbours = "add or remove"

    def candidates(self) -> tuple[Composition, ...] | None:
        """Return the releases of each set of `max_sites` sites, without those that others cover; None: too many."""
        sites = Counter(self.sites)
        taken = min(self.max_sites, sites.total())
        kept = {
            one: min(count, taken)
            for one, count in sites.items()
            if sum(n for other, n in sites.items() if other != one and _covers(other, one)) < taken
        }
        if _count_choices(kept.values(), taken) > MOST_PRICED:
            return None
        return tuple({add_up(chain.from_iterable(chosen)) for chosen in _choose(list(kept.items()), taken)})


def run_cost(sites: Iterable[Iterable[Spend]], max_sites: int = 1, neighbours: Neighbours = "add or remove") -> RunCost:
    """Return the cost of a run in its one form, so that equal costs compare as equal."""
    return RunCost(tuple(sorted(filter(None, map(add_up, sites)))), max_sites, neighbours)


def add_up(spends: Iterable[Spend]) -> Composition:
    """Return the same releases in one order, equal ones as one."""
    times: Counter[Spend] = Counter()
    for spend in spends:
        if spend.times and spend.rate and spend.noise < math.inf:
            times[replace(spend, times=1)] += spend.times
    return tuple(sorted(one.repeated(n) for one, n in times.items()))


def worst_epsilon(runs: Iterable[RunCost], delta: float, accountant: Accountant = "pld") -> float:
    """Return ε of the record of which all `runs` together release most, or an upper bound where sets are too many.

    If the neighbours of any run are data sets in which a record is replaced, all runs are priced so, which costs more.
    """
    runs = tuple(runs)
    neighbours: Neighbours = "replace" if any(run.neighbours == "replace" for run in runs) else "add or remove"
    counts = Counter(replace(run, neighbours=neighbours) for run in runs if run.sites)
    if any(spend.noise == 0 for run in counts for one in run.sites for spend in one):
        return math.inf
    choices = {run: run.candidates() for run in counts}
    known = {run: found for run, found in choices.items() if found is not None}
    if len(known) == len(counts):
        if accountant == "pld" and counts.total() > 1 and _count_combinations(known, counts) > 1:
            known = {run: _drop_dominated(found, neighbours) for run, found in known.items()}
        if _count_combinations(known, counts) <= MOST_PRICED:
            return _max_epsilon(set(_combine(known, counts)), delta, accountant, neighbours)
    if accountant == "prv":
        raise RecipeError("the PRV accountant cannot price so many sets of sites: take accountant: pld")
    rows = [
        (found or run.sites, 1 if found else run.max_sites, counts[run]) for run, found in (choices | known).items()
    ]
    bounds = [_sum_rdp(rows, delta, neighbours)]
    if accountant == "pld":
        bounds.append(_dominate(rows, delta, neighbours))
    return min(bounds)


def _max_epsilon(compositions: set[Composition], delta: float, accountant: Accountant, neighbours: Neighbours) -> float:
    """Return the largest ε. Wide buckets give an upper bound sooner, which shows that most need not be computed."""
    if accountant != "pld" or len(compositions) < 3:
        return max((epsilon(one, delta, accountant, neighbours) for one in compositions), default=0.0)
    bounds = sorted(((_coarse_epsilon(one, delta, neighbours), one) for one in compositions), reverse=True)
    largest = 0.0
    for bound, one in bounds:
        if bound <= largest:
            break
        largest = max(largest, epsilon(one, delta, accountant, neighbours))
    return largest


def _coarse_epsilon(one: Composition, delta: float, neighbours: Neighbours) -> float:
    merged = merge_spends(one, neighbours)
    try:
        return float(compose_pld(merged, neighbours, COARSER * bucket_width(merged)).get_epsilon_for_delta(delta))
    except OverflowError:
        return math.inf


def _covers(more: Composition, less: Composition) -> bool:
    """Whether each release of `less` has one in `more` of no more noise, and no smaller rate, group and number."""
    return len(more) == len(less) and all(
        m.noise <= s.noise and m.rate >= s.rate and m.times >= s.times and m.group >= s.group
        for m, s in zip(more, less, strict=True)
    )


def _count_choices(capacities: Iterable[int], taken: int) -> int:
    """Return the number of ways to take `taken` things, if there are so many of each kind."""
    ways = [1] + [0] * taken
    for capacity in capacities:
        ways = [sum(ways[n - k] for k in range(min(capacity, n) + 1)) for n in range(taken + 1)]
    return ways[taken]


def _choose(kinds: Sequence[tuple[Composition, int]], taken: int) -> Iterator[tuple[Composition, ...]]:
    """Yield each way to take `taken` of the kinds, each with the number that there is."""
    if not kinds:
        if not taken:
            yield ()
        return
    (first, capacity), *rest = kinds
    fewest = max(0, taken - sum(n for _, n in rest))
    for count in range(fewest, min(capacity, taken) + 1):
        yield from ((first,) * count + more for more in _choose(rest, taken - count))


Candidates: TypeAlias = dict[RunCost, tuple[Composition, ...]]


def _count_combinations(choices: Candidates, counts: Counter[RunCost]) -> int:
    """Return the number of combinations of candidates; runs with equal candidates can be exchanged."""
    return math.prod(math.comb(len(found) + counts[run] - 1, counts[run]) for run, found in choices.items())


def _combine(choices: Candidates, counts: Counter[RunCost]) -> Iterator[Composition]:
    """Yield all releases of a record, for each choice of a candidate from each run."""
    parts = (combinations_with_replacement(found, counts[run]) for run, found in choices.items())
    for chosen in product(*parts):
        yield add_up(spend for part in chosen for one in part for spend in one)


@lru_cache(maxsize=256)
def _drop_dominated(candidates: tuple[Composition, ...], neighbours: Neighbours) -> tuple[Composition, ...]:
    """Leave out candidates whose privacy profile lies nowhere above another's: no composition makes them dearer."""
    if len(candidates) == 1:
        return candidates
    profiles = _profiles(candidates, _common_width(candidates, 1, neighbours), neighbours)[1]
    kept: list[int] = []
    for number in np.argsort(-profiles.sum((1, 2))):
        if not any((profiles[number] <= profiles[other]).all() for other in kept):
            kept.append(int(number))
    return tuple(candidates[number] for number in kept)


def _common_width(candidates: Iterable[Composition], times: int, neighbours: Neighbours) -> float:
    """Return the width of buckets that suits all candidates, each composed so many times."""
    merged = (merge_spends((s.repeated(times) for s in one), neighbours) for one in candidates)
    return COARSER / 2 * min(bucket_width(one) for one in merged)


def _profiles(candidates: Sequence[Composition], width: float, neighbours: Neighbours) -> tuple[Any, Any]:
    """Return numbers of buckets, and δ(ε) there of each candidate for a unit removed and for one added.

    Between buckets δ is linear in e^ε, so profiles that are compared at all buckets are compared everywhere.
    """
    found = [compose_pld(merge_spends(one, neighbours), neighbours, width) for one in candidates]
    pairs = [[pld._pmf_remove.to_dense_pmf(), pld._pmf_add.to_dense_pmf()] for pld in found]
    flat = list(chain.from_iterable(pairs))
    low, high = min(pmf._lower_loss for pmf in flat), max(pmf._lower_loss + pmf.size for pmf in flat)
    places = np.arange(low, high + 1)
    return places, np.array([[pmf.get_delta_for_epsilon(places * width) for pmf in pair] for pair in pairs])


def _dominate(rows: Sequence[tuple[Sequence[Composition], int, int]], delta: float, neighbours: Neighbours) -> float:
    """Return bound (1). `rows`: for each run its candidates, how many of them count together, and how often it was.

    Of candidates in any fixed order, the j-th of a chosen few stands at place j or later. So it is dominated by the
    maximum of all from place j on; in order of cost this is the j-th itself, if candidates can be compared.
    """
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots as connect_dots
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    total = sum(taken * times for _, taken, times in rows)
    width = min(_common_width(set(found), total, neighbours) for found, _, _ in rows)
    parts = []
    for found, taken, times in rows:
        kinds = Counter(found)
        places, profiles = _profiles(tuple(kinds), width, neighbours)
        order = sorted(kinds, key=lambda one: -profiles[tuple(kinds).index(one)].sum())
        left = taken
        for rank, one in enumerate(order):
            ahead = np.stack([profiles[tuple(kinds).index(other)] for other in order[rank:]]).max(0)
            remove, add = (connect_dots(width, places, highest.clip(0, 1)) for highest in ahead)
            count = min(left, kinds[one])
            parts.append(PrivacyLossDistribution(remove, add).self_compose(count * times))
            left -= count
            if not left:
                break
    composed = reduce(lambda whole, part: whole.compose(part, tail_mass_truncation=TAIL), parts)
    return float(composed.get_epsilon_for_delta(delta))


def _sum_rdp(rows: Sequence[tuple[Sequence[Composition], int, int]], delta: float, neighbours: Neighbours) -> float:
    """Return bound (2); infinity where no Rényi divergence is known."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    orders, total = [], 0.0
    for found, taken, times in rows:
        curves = [rdp_curve(merge_spends(one, neighbours), neighbours) for one in found]
        divergences = [curve[1] for curve in curves if curve is not None]
        if len(divergences) < len(curves):
            return math.inf
        orders = next(curve[0] for curve in curves if curve is not None)
        total = total + times * np.sort(np.stack(divergences), axis=0)[-taken:].sum(0)
    return float(compute_epsilon(orders, total, delta)[0])
