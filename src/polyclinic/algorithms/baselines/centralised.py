"""Centralised (Mix): one model trained on the images of all sites in one place. Privacy law forbids it; it is the
baseline for the cost of keeping sites apart.

    (1)  w ← w trained on the union of all training parts, with the optimiser's state kept between rounds

The engine offers one extra site, `pooled`, that holds the training and validation images of all sites; no other site
trains. The model is tested at every site. Departures: none, there is no paper.
"""

from dataclasses import dataclass
from typing import ClassVar

from polyclinic.algorithms.baselines.local import continue_fit, pack_memory
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Bundle, Site, Stream, Update, Work


@dataclass(frozen=True)
class Centralised(FedAvg):
    pooled: ClassVar[bool] = True

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield continue_fit(received, memory, self)  # (1)
        return Update(fitted.weights, site.examples), pack_memory(fitted)
