"""FedPer: a shared extractor and a personal head. Arivazhagan, Aggarwal, Singh, Choudhary: Federated learning with
personalization layers. arXiv:1912.00818, Algorithms 1 and 2.

    (1)  (W_L, W_C,k) ← E epochs of SGD at site k, from the received extractor and the head in its memory
    (2)  W_L ← Σ_k (n_k / n) · W_L,k

The head never leaves the site. Departures: the heads of all sites start from the same weights.
"""

from dataclasses import dataclass
from typing import ClassVar

from polyclinic.algorithms.base import Algorithm, with_prefix, without_prefix
from polyclinic.core import Bundle, Federation, Fit, Site, Stream, Update, Updates, Work
from polyclinic.training.losses import task_loss

HEAD = "head."


@dataclass(frozen=True)
class FedPer(Algorithm):
    averages: ClassVar[bool] = True

    def init(self, federation: Federation) -> Bundle:
        model = federation.initial["model"]
        return {**federation.initial, "model": without_prefix(HEAD, model), "head": with_prefix(HEAD, model)}

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(self.start_weights(received, memory), task_loss, self.training)  # (1)
        return shared_update(fitted.weights, site), {"head": with_prefix(HEAD, fitted.weights["model"])}

    def start_weights(self, received: Bundle, memory: Bundle | None) -> Bundle:
        own = (memory or received).get("head", {})
        return {"model": {**received.get("model", {}), **own}, "buffers": received.get("buffers", {})}

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        return {**state, **self.mean_update(updates)}  # (2)

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"personal": self.start_weights(received, memory)}


def shared_update(weights: Bundle, site: Site) -> Update:
    """Return the update of a site, which is everything but its head."""
    return Update({**weights, "model": without_prefix(HEAD, weights["model"])}, site.examples)
