"""The screen between the accepted updates of a round and the algorithm that averages them.

It keeps a cohort's updates until all have arrived (`store`), compares them, and hands them on: without the outliers, or
each replaced by the centre of all (`rules`). So no algorithm needs code of its own. If nobody is an outlier, the
algorithm gets exactly what it would have got without the screen, in the same order.

An outlier is left out and not shortened: a short piece of an update that points anywhere still points there in every
round. One that moved against the others' direction is left out at a smaller distance; and a site that was left out is
held to half the distances until a round in which it keeps them, so that it cannot slip in whenever the median is large.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from polyclinic.algorithms.base import WEIGHT_KINDS, Algorithm
from polyclinic.core import Bundle, SiteId, Tensors, Update, copy_tensors, l2_distance
from polyclinic.federation.robust.rules import (
    CENTRES,
    FEWEST,
    Aggregation,
    cap_weights,
    choose_by_krum,
    median_length,
    step_allowances,
    trim_count,
    trimmed_mean,
)
from polyclinic.federation.robust.store import MEMORY, UpdateStore
from polyclinic.training.data_order import batches_per_epoch

LEFT_OUT, OUTVOTED = "left out", "outvoted"
"""What was done with an outlier's update; outvoted: it counted, and the rule itself limits what one site can do."""
RUNNING = 3
"""Rounds running as an outlier after which a site is named prominently."""
LARGEST_RATIO = 1e9
"""Ratios are reported up to this: JSON knows no infinity."""


@dataclass(frozen=True)
class Outlier:
    """A site whose update was far from the others', and what was done with it."""

    site: SiteId
    ratio: float
    """Its distance from what was sent, as a multiple of the cohort's median."""
    done: str
    running: int
    """The number of rounds running in which it was an outlier, this one included."""
    opposed: bool = False
    """Whether it moved against the others' direction rather than too far."""

    @property
    def sentence(self) -> str:
        """What is shown to whoever runs the server."""
        way = " against the others' direction" if self.opposed else ""
        done = "its update counts no more than the rule allows" if self.done == OUTVOTED else "its update was left out"
        often = f"; AN OUTLIER FOR {self.running} ROUNDS RUNNING: ask its people why, and revoke its key if need be"
        often = often if self.running >= RUNNING else ""
        return f"{self.site} moved {self.ratio:,.3g} times as far as the median site{way}; {done}{often}"


class UpdateScreen:
    """Bounds what one site can do to the mean of a cohort.

    Args:
        rule: The recipe's `aggregate`.
        algorithm: The algorithm that averages.
        memory: The bytes of updates kept in memory; further ones are kept on disk.
        doubted: Sites that claim more images than anybody believes: they may move no farther than the others.
    """

    def __init__(
        self,
        rule: Aggregation,
        algorithm: Algorithm,
        memory: int = MEMORY,
        doubted: Collection[SiteId] = (),
    ) -> None:
        self.rule, self.algorithm, self.memory, self.doubted = rule, algorithm, memory, doubted
        self.kinds = () if algorithm.pooled else algorithm.averaged_kinds()
        self.streaks: dict[SiteId, int] = {}
        """By site: the rounds running, until now, in which it was an outlier."""

    @property
    def is_active(self) -> bool:
        """Whether updates are kept and compared at all."""
        return self.rule.name != "mean" and bool(self.kinds)

    def screen(
        self, updates: Iterator[Update], state: Bundle, announce: Callable[[Outlier], None] = lambda _: None
    ) -> Iterator[Update]:
        """Yield the updates that the algorithm is to average, by cluster.

        Args:
            updates: The accepted updates, by cluster.
            state: The server's state before the round, from which distances are measured.
            announce: Is called with every outlier once its cohort is complete.
        """
        if not self.is_active:
            yield from updates
            return
        for cluster, some in groupby(updates, lambda update: self.algorithm.cluster_of(state, update.site)):
            store = UpdateStore(self.memory)
            try:
                yield from self._screen_cohort(some, self.algorithm.cluster_state(state, cluster), store, announce)
            finally:
                store.close()

    def _screen_cohort(
        self, updates: Iterator[Update], state: Bundle, store: UpdateStore, announce: Callable[[Outlier], None]
    ) -> Iterator[Update]:
        origin: Bundle = {kind: state.get(kind, {}) if kind in WEIGHT_KINDS else {} for kind in self.kinds}
        lengths: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        for update in updates:
            for kind in self.kinds:
                lengths[kind].append(l2_distance(update.tensors.get(kind, {}), origin[kind]))
            store.add(update)
            del update
        if len(store) < FEWEST:
            yield from store.take_all()
            return
        outliers = self._find_outliers(store, origin, lengths)
        for found in outliers.values():
            announce(found)
        if self.rule.name in CENTRES:
            yield from self._replace_by_centre(store)
        else:
            yield from self._hand_on(store, outliers)

    def _find_outliers(
        self, store: UpdateStore, origin: Bundle, lengths: Mapping[str, Sequence[float]]
    ) -> dict[SiteId, Outlier]:
        """Return the outliers by site, from the lengths of all updates by kind and, where they are large, their
        directions."""
        sites = [update.site for update in store.updates]
        stretched = step_allowances([self._local_steps(update) for update in store.updates])
        allowances = [1.0 if s in self.doubted else most for s, most in zip(sites, stretched, strict=True)]
        strictness = [0.5 if self.streaks.get(site) else 1.0 for site in sites]
        opposed: set[int] = set()
        ratios: dict[int, float] = {}
        for kind, found in lengths.items():
            middle = median_length(found)
            here = [own / middle if middle else LARGEST_RATIO if own else 1.0 for own in found]
            far = {
                p for p, ratio in enumerate(here) if ratio > max(1.0, strictness[p] * self.rule.bound) * allowances[p]
            }
            if kind == "model":
                most = [max(1.0, part * self.rule.against) for part in strictness]
                near = {p for p, ratio in enumerate(here) if ratio > most[p]} - far
                ways = self._directions(store, origin[kind], found, middle) if near else []
                opposed = {p for p in near if -ways[p] * here[p] > most[p]}
            for place in far | (opposed if kind == "model" else set()):
                ratios[place] = min(LARGEST_RATIO, max(here[place], ratios.get(place, 0.0)))
        done = OUTVOTED if self.rule.name in CENTRES else LEFT_OUT
        before, self.streaks = self.streaks, {s: n for s, n in self.streaks.items() if s not in sites}
        self.streaks |= {sites[place]: before.get(sites[place], 0) + 1 for place in ratios}
        return {
            sites[place]: Outlier(sites[place], ratio, done, self.streaks[sites[place]], place in opposed)
            for place, ratio in sorted(ratios.items())
        }

    def _local_steps(self, update: Update) -> float:
        """Return how many local steps the site's number of images implies."""
        training = self.algorithm.training
        if training.epochs is None:
            return 1.0
        return float(batches_per_epoch(update.examples, training.batch_size(update.examples)))

    def _directions(self, store: UpdateStore, origin: Tensors, lengths: Sequence[float], middle: float) -> list[float]:
        """Return the cosine of each update with the sum of the others', none of which counts as longer than the
        median."""
        shares = [min(1.0, middle / own) if own > 0 else 0.0 for own in lengths]
        sent = store.tensors(0).get("model", {})
        products = torch.zeros(len(store), len(store), dtype=torch.float64)
        for name in (name for name, tensor in sent.items() if tensor.is_floating_point()):
            start = origin[name].reshape(-1) if name in origin else torch.zeros_like(sent[name]).reshape(-1)
            for block in store.blocks("model", name):
                moved = (block - start[: block.shape[1]]).double()
                start = start[block.shape[1] :]
                moved = moved * torch.tensor(shares, dtype=torch.float64, device=moved.device)[:, None]
                products += (moved @ moved.T).cpu()
        own = products.diagonal()
        across = products.sum(1) - own
        rest = products.sum() - 2 * products.sum(1) + own
        return [
            float(across[place] / norm) if (norm := math.sqrt(max(float(own[place] * rest[place]), 0.0))) > 0 else 0.0
            for place in range(len(store))
        ]

    def _hand_on(self, store: UpdateStore, outliers: Collection[SiteId]) -> Iterator[Update]:
        """Yield the updates of all but outliers, none with more than its share of the weight."""
        kept = [update for update in store.updates if update.site not in outliers]
        weights = [self.algorithm.update_weight(replace(update, precision=1.0)) for update in kept]
        capped = zip(weights, cap_weights(weights, self.rule.most_share), strict=True)
        for update in store.take_all():
            if update.site not in outliers:
                weight, most = next(capped)
                yield update if most == weight else replace(update, precision=update.precision * most / weight)

    def _replace_by_centre(self, store: UpdateStore) -> Iterator[Update]:
        """Yield the updates, all with the tensors that the rule makes of all: so their mean, however it is weighted, is
        those tensors."""
        chosen = self._choose(store) if self.rule.name == "krum" else None
        trim, first = trim_count(self.rule, len(store)), store.tensors(0)
        centre: Bundle = {}
        for kind in self.kinds:
            found = {
                name: _centre_of(store.blocks(kind, name), like, trim, chosen)
                for name, like in first.get(kind, {}).items()
            }
            centre[kind] = copy_tensors(found) if found else found
        for update in store.updates:
            yield replace(update, tensors=dict(centre))

    def _choose(self, store: UpdateStore) -> list[int]:
        """Return the places that Krum chooses, in the order of the sites' names."""
        order = sorted(range(len(store)), key=lambda place: store.updates[place].site)
        apart = torch.zeros(len(store), len(store), dtype=torch.float64)
        for name, tensor in store.tensors(0).get("model", {}).items():
            if tensor.is_floating_point():
                for block in store.blocks("model", name):
                    rows = block[order].double()
                    apart += torch.stack([(rows - row).square().sum(1) for row in rows]).cpu()
        return sorted(
            (order[place] for place in choose_by_krum(apart, self.rule)), key=lambda place: store.updates[place].site
        )


def _centre_of(blocks: Iterable[Tensor], like: Tensor, trim: int, chosen: Sequence[int] | None) -> Tensor:
    """Return the centre of all rows: the mean of those chosen, or the trimmed mean."""
    found = [trimmed_mean(rows, trim) if chosen is None else rows[list(chosen)].double().mean(dim=0) for rows in blocks]
    whole = torch.cat(found) if found else torch.zeros(0)
    return (whole if like.is_floating_point() else whole.round()).to(like.dtype).reshape(like.shape)
