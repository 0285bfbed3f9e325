"""Centralised (Mix): all images in one place, which the law forbids; the yardstick for what separation costs.

    (1)  w ← w trained on the union of all training parts, the optimiser going on where it stopped

The engine offers one extra site, `pooled`, that holds everybody's training and validation images; nobody else trains.
The resulting model is tested at every hospital. Departures: none, there is no paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyclinic.algorithms.baselines.local import continue_fit, pack_memory
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.contract import Bundle, Site, Stream, Update, Work


@dataclass(frozen=True)
class Centralised(FedAvg):
    pooled: ClassVar[bool] = True

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield continue_fit(received, memory, self)  # (1)
        return Update(fitted.weights, site.examples), pack_memory(fitted)
