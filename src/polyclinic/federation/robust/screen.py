"""The screen between the accepted updates of a round and the algorithm that averages them.

It keeps a cohort's updates until all have arrived (`store`), compares them, and hands them on: as they are, scaled,
without those that are left out, or each replaced by the centre of all (`rules`). So no algorithm needs code of its own.
If nobody moved too far, the algorithm gets exactly what it would have got without the screen, in the same order.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

SCALED, LEFT_OUT, OUTVOTED = "scaled down", "left out", "outvoted"
"""What was done with an outlier's update; outvoted: the rule itself limits it."""
SAME_WAY = 0.1
"""An update that is too long is only scaled if its cosine with the others' direction is at least this."""
RUNNING = 3
"""Rounds running as an outlier after which a site is named prominently."""


@dataclass(frozen=True)
class Outlier:
    """A site whose update was far from the others', and what was done with it."""

    site: SiteId
    ratio: float
    """Its distance from what was sent, as a multiple of the cohort's median."""
    done: str
    running: int
    """The number of rounds running in which it was an outlier, this one included."""


@dataclass
class _Verdict:
    """How a site's update is handed on."""

    ratio: float = 1.0
    scales: dict[str, float] = field(default_factory=dict)
    """By kind: the factor of what is too long."""
    left_out: bool = False

    @property
    def is_outlier(self) -> bool:
        return self.left_out or bool(self.scales)


class UpdateScreen:
    """Bounds what one site can do to the mean of a cohort.

    Args:
        rule: The recipe's `aggregate`.
        algorithm: The algorithm that averages.
        memory: The bytes of updates kept in memory; further ones are kept on disk.
    """

    def __init__(
        self,
        rule: Aggregation,
        algorithm: Algorithm,
        memory: int = MEMORY,
    ) -> None:
        self.rule, self.algorithm, self.memory = rule, algorithm, memory
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
        verdicts = self._judge(store, origin, lengths)
        for outlier in self._count_outliers(store, verdicts):
            announce(outlier)
        if self.rule.name in CENTRES:
            yield from self._replace_by_centre(store)
        else:
            yield from self._hand_on(store, origin, verdicts)

    def _judge(self, store: UpdateStore, origin: Bundle, lengths: Mapping[str, Sequence[float]]) -> list[_Verdict]:
        """Return a verdict on each update, from its lengths by kind and, where they are large, its direction."""
        verdicts = [_Verdict() for _ in store.updates]
        allowances = step_allowances([self._local_steps(update) for update in store.updates])
        for kind, found in lengths.items():
            middle = median_length(found)
            far = [
                place for place, own in enumerate(found) if own > self.rule.bound * allowances[place] * middle
            ]
            for place in far:
                verdicts[place].scales[kind] = _rounded(allowances[place] * middle / found[place])
            if kind == "model":
                suspects = {place for place, own in enumerate(found) if own > self.rule.against * middle} | set(far)
                ratios = [own / middle if middle else math.inf if own else 1.0 for own in found]
                ways = self._directions(store, origin[kind], found, middle) if suspects else []
                for place in suspects:
                    verdicts[place].ratio, cosine = ratios[place], ways[place]
                    backwards = -cosine * ratios[place] > self.rule.against if middle else True
                    verdicts[place].left_out = backwards or (place in far and cosine < SAME_WAY)
            else:
                for place in far:
                    verdicts[place].ratio = max(verdicts[place].ratio, found[place] / middle if middle else math.inf)
        return verdicts

    def _local_steps(self, update: Update) -> float:
        """Return how many local steps the site's number of images implies."""
        training = self.algorithm.training
        if training.epochs is None:
            return 1.0
        return float(batches_per_epoch(update.examples, training.batch_size(update.examples)))

    def _directions(
        self, store: UpdateStore, origin: Tensors, lengths: Sequence[float], middle: float
    ) -> list[float]:
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

    def _count_outliers(self, store: UpdateStore, verdicts: Sequence[_Verdict]) -> Iterator[Outlier]:
        for update, verdict in zip(store.updates, verdicts, strict=True):
            if not verdict.is_outlier:
                self.streaks.pop(update.site, None)
                continue
            self.streaks[update.site] = running = self.streaks.get(update.site, 0) + 1
            done = OUTVOTED if self.rule.name in CENTRES else LEFT_OUT if verdict.left_out else SCALED
            yield Outlier(update.site, min(verdict.ratio, 1e9), done, running)

    def _hand_on(self, store: UpdateStore, origin: Bundle, verdicts: Sequence[_Verdict]) -> Iterator[Update]:
        kept = [not verdict.left_out for verdict in verdicts]
        weights = [self.algorithm.update_weight(replace(u, precision=1.0)) for u in store.updates]
        capped = iter(cap_weights([w for w, here in zip(weights, kept, strict=True) if here], self.rule.most_share))
        factors = [next(capped) / weight if here else 0.0 for weight, here in zip(weights, kept, strict=True)]
        for update, verdict, factor in zip(store.take_all(), verdicts, factors, strict=True):
            if verdict.left_out:
                continue
            tensors = update.tensors
            for kind, scale in verdict.scales.items():
                tensors = {**tensors, kind: _scaled(tensors[kind], origin[kind], scale)}
            precision = update.precision if factor == 1 else update.precision * factor
            yield replace(update, tensors=tensors, precision=precision)

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
    found = [
        trimmed_mean(rows, trim) if chosen is None else rows[list(chosen)].double().mean(dim=0) for rows in blocks
    ]
    whole = torch.cat(found) if found else torch.zeros(0)
    return (whole if like.is_floating_point() else whole.round()).to(like.dtype).reshape(like.shape)


def _scaled(tensors: Tensors, origin: Tensors, scale: float) -> Tensors:
    """Return the tensors, moved towards `origin` until their distance is `scale` times as long."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        start = origin[name] if name in origin else torch.zeros_like(tensor)
        if tensor.is_floating_point():
            found[name] = torch.lerp(start, tensor, scale)
        else:
            found[name] = start + ((tensor - start).double() * scale).round().to(tensor.dtype)
    return copy_tensors(found)


def _rounded(scale: float) -> float:
    """Return a factor without its last digits, which differ between engines that add in another order."""
    return float(f"{scale:.6g}")
