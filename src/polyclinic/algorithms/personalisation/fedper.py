"""FedPer: a shared extractor, a head of one's own. Arivazhagan, Aggarwal, Singh, Choudhary: Federated learning with
personalization layers. arXiv:1912.00818, Algorithms 1 and 2.

    (1)  (W_L, W_C,k) ← E epochs of SGD at site k, from the extractor received and the head remembered
    (2)  W_L ← Σ_k (n_k / n) · W_L,k

The head never leaves the site. Departures: every site's head starts from the same first weights, not from its own draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polyclinic.algorithms.base import Averaging, RunningMean
from polyclinic.core.contract import Bundle, Federation, Fit, Site, Stream, Tensors, Update, Work
from polyclinic.training.losses import task_loss

HEAD = "head."


@dataclass(frozen=True)
class FedPer(Averaging):
    def init(self, federation: Federation) -> Bundle:
        model = federation.initial["model"]
        return {**federation.initial, "model": extractor_weights(model), "head": head_weights(model)}

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(self.start_weights(received, memory), task_loss, self.training)  # (1)
        return shared_update(fitted.weights, site), {"head": head_weights(fitted.weights["model"])}

    def start_weights(self, received: Bundle, memory: Bundle | None) -> Bundle:
        own = (memory or received).get("head", {})
        return {"model": {**received.get("model", {}), **own}, "buffers": received.get("buffers", {})}

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        means = {kind: RunningMean() for kind in ("model", "buffers")}
        for update in updates:
            for kind, mean in means.items():
                mean.add(update.tensors.get(kind, {}), self.update_weight(update))
        return {**state, **{kind: mean.value() for kind, mean in means.items()}}  # (2)

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"personal": self.start_weights(received, memory)}


def head_weights(model: Tensors) -> Tensors:
    return {name: tensor for name, tensor in model.items() if name.startswith(HEAD)}


def extractor_weights(model: Tensors) -> Tensors:
    return {name: tensor for name, tensor in model.items() if not name.startswith(HEAD)}


def shared_update(weights: Bundle, site: Site) -> Update:
    """What leaves a site: everything but its head."""
    return Update({**weights, "model": extractor_weights(weights["model"])}, site.examples)
