"""Single: every hospital trains alone, and the models are averaged once, at the end (one-shot averaging).

    (1)  w_k ← w_k trained on site k in every round, the optimiser going on where it stopped
    (2)  after the last round  w ← Σ_k (n_k / n) · w_k

One download and one upload per site in the whole run. Departures: none, it is a yardstick of FedMP and Fed-Align-CL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polyclinic.algorithms.base import WEIGHT_KINDS, RunningMean
from polyclinic.algorithms.baselines.local import Local, continue_fit, pack_memory
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.contract import Bundle, Exchange, Site, SiteId, Stream, Update, Work


@dataclass(frozen=True)
class OneShot(FedAvg):
    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(Exchange(kind, like=kind, optional=True) for kind in WEIGHT_KINDS)

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        return Local().broadcast(state, site)

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield continue_fit(received, memory, self)  # (1)
        sent = fitted.weights if site.round == site.rounds else {}
        return Update(sent, site.examples), pack_memory(fitted)

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        means = {kind: RunningMean() for kind in WEIGHT_KINDS}
        started = []
        for update in updates:
            started.append(Update({}, update.examples, update.site))
            for kind in WEIGHT_KINDS if update.tensors else ():
                means[kind].add(update.tensors.get(kind, {}), self.update_weight(update))
        if means["model"].count:
            return {kind: mean.value() for kind, mean in means.items()}  # (2)
        return Local().aggregate(state, started)

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"global": received} if "model" in received else Local().models(received, memory)
