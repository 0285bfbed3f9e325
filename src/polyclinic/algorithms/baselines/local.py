"""Local: every site trains alone. The baseline for the gain of taking part.

    (1)  w_k ← w_k trained on site k, with the optimiser's state kept between rounds

No site sends anything; the server hands out the common start once. Departures: none, there is no paper.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from polyclinic.algorithms.base import WEIGHT_KINDS, Algorithm, network_weights
from polyclinic.core import Bundle, Exchange, Fit, Fitted, Site, SiteId, StoreError, Stream, Update, Updates, Work
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class Local(Algorithm):
    site_kinds: ClassVar[tuple[str, ...]] = WEIGHT_KINDS

    def exchanges(self) -> tuple[Exchange, ...]:
        return ()

    def averaged_kinds(self) -> tuple[str, ...]:
        return ()

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        return {} if site in state.get("started", {}) else network_weights(state)

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield continue_fit(received, memory, self)  # (1)
        return Update({}, site.examples), pack_memory(fitted)

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        return {**state, "started": state.get("started", {}) | {update.site: torch.ones(()) for update in updates}}

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"personal": network_weights(memory or received)}


def continue_fit(received: Bundle, memory: Bundle | None, algorithm: Algorithm) -> Fit:
    """Return a job that continues from the weights and optimiser state in memory, or starts from `received`."""
    if not memory and "model" not in received:
        raise StoreError(
            "this site has lost its memory, and with it its model; restore its folder or start the run anew"
        )
    weights, state = network_weights(memory or received), (memory or {}).get("optimiser", {})
    return Fit(weights, task_loss, algorithm.training, optimiser_state=state)


def pack_memory(fitted: Fitted) -> Bundle:
    return {**fitted.weights, "optimiser": fitted.optimiser_state}
