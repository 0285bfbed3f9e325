"""Cross-site: train at one site, test at all. The baseline for how different the sites are.

    (1)  w_k ← w_k trained on site k in every round, with the optimiser's state kept between rounds
    (2)  after the last round every w_k is tested at every site

Each site sends its model once, at the end. In the results a model is named after its site. The diagonal of the table is
Local, the rest shows transfer. Departures: none, it is a baseline of Fed-Align-CL.
"""

from dataclasses import dataclass

from polyclinic.algorithms.base import WEIGHT_KINDS
from polyclinic.algorithms.baselines.local import Local
from polyclinic.algorithms.baselines.one_shot import OneShot
from polyclinic.core import Bundle, SiteId, Update, Updates


@dataclass(frozen=True)
class CrossSite(OneShot):
    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        return {kind: group for kind, group in state.items() if "@" in kind} or Local().broadcast(state, site)

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        trained: Bundle = {}
        started: list[Update] = []
        for update in updates:
            trained |= {
                f"{kind}@{update.site}": update.tensors[kind] for kind in WEIGHT_KINDS if kind in update.tensors
            }
            started.append(Update({}, update.examples, update.site))
        return {**Local().aggregate(state, started), **trained}

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        names = [kind.removeprefix("model@") for kind in received if kind.startswith("model@")]
        trained = {n: {kind: received.get(f"{kind}@{n}", {}) for kind in WEIGHT_KINDS} for n in names}
        return trained or Local().models(received, memory)  # (2)
