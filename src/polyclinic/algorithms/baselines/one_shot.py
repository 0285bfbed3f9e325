"""Single (one-shot averaging): every site trains alone, and the models are averaged once, at the end.

    (1)  w_k ← w_k trained on site k in every round, with the optimiser's state kept between rounds
    (2)  after the last round  w ← Σ_k (n_k / n) · w_k

There is one download and one upload per site in the whole run. Departures: none, it is a baseline of FedMP and
Fed-Align-CL.
"""

from dataclasses import dataclass
from typing import ClassVar

from polyclinic.algorithms.base import WEIGHT_KINDS, BundleMean
from polyclinic.algorithms.baselines.local import Local, continue_fit, pack_memory
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Bundle, Exchange, Site, SiteId, Stream, Update, Updates, Work


@dataclass(frozen=True)
class OneShot(FedAvg):
    site_kinds: ClassVar[tuple[str, ...]] = WEIGHT_KINDS

    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(Exchange(kind, like=kind, optional=True) for kind in WEIGHT_KINDS)

    def averaged_kinds(self) -> tuple[str, ...]:
        return ()  # models that were trained apart for the whole run have no common start to measure from

    def needs_single_updates(self) -> str:
        return "its sites send models that were trained apart for the whole run"

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        return Local().broadcast(state, site)

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield continue_fit(received, memory, self)  # (1)
        return Update(fitted.weights if site.round == site.rounds else {}, site.examples), pack_memory(fitted)

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        mean, started = BundleMean(), list[Update]()
        for update in updates:
            started.append(Update({}, update.examples, update.site))
            if update.tensors:
                mean.add(update.tensors, self.update_weight(update))
        averaged = mean.value()  # (2)
        return averaged if any(averaged.values()) else Local().aggregate(state, started)

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"global": received} if "model" in received else Local().models(received, memory)
