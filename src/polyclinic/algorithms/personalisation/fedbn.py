"""FedBN: everything is averaged but normalisation layers. Li, Jiang, Zhang, Kamp, Dou: FedBN: federated learning on
non-IID features via local batch normalization. ICLR 2021, Algorithm 1; the authors' code: github.com/med-air/FedBN.

    (1)  (w_k, b_k) ← trained on site k for E epochs (or τ steps), from the weights received and its own normalisation
    (2)  w ← Σ_k (n_k / n) · w_k

b, every parameter and statistic of a normalisation layer, never leaves a site; its first values are given once.

Who predicts with what: a site with the shared weights and its own b, and merged figures put all sites' test images
together, each judged by its own site's model; the authors test so. There is no global model, so nothing can be said of
a test set of no site or a public set, and `finish` is refused. A site that has not trained yet has the first b.

Departures: layers are known by their type; the authors' code keeps what has "bn" in its name, which would miss
`downsample.1` of a ResNet. GroupNorm, LayerNorm, InstanceNorm and RMSNorm stay as BatchNorm does. n_k / n, where the
authors count sites alike (`training.weights: uniform`). Where a network normalises nothing, nothing stays: that is
FedAvg, bit for bit. It runs all the same, since of several clusters' networks only some may have such layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from polyclinic.algorithms.base import WEIGHT_KINDS, Averaging, RunningMean, network_weights
from polyclinic.core.contract import Bundle, Federation, Fit, Site, SiteId, Stream, Tensors, Update, Work
from polyclinic.training.losses import task_loss

LOCAL_KINDS = {"model": "norms", "buffers": "norm buffers"}
"""The kind under which a site is first given, and remembers, what is its own of the model and the buffers."""


@dataclass(frozen=True)
class FedBN(Averaging):
    def init(self, federation: Federation) -> Bundle:
        first, norms = network_weights(federation.initial), federation.norms
        shared = {kind: _without_names(norms, group) for kind, group in first.items()}
        return {**shared, **{LOCAL_KINDS[kind]: _without_names(shared[kind], group) for kind, group in first.items()}}

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        first = {} if site in state.get("started", {}) else {kind: state.get(kind, {}) for kind in LOCAL_KINDS.values()}
        return {**network_weights(state), **first}

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(self.start_weights(received, memory), task_loss, self.training)  # (1)
        own = {
            LOCAL_KINDS[kind]: _without_names(received.get(kind, {}), group) for kind, group in fitted.weights.items()
        }
        shared = {kind: _without_names(own[LOCAL_KINDS[kind]], group) for kind, group in fitted.weights.items()}
        return Update(shared, site.examples), own if any(own.values()) else None

    def start_weights(self, received: Bundle, memory: Bundle | None) -> Bundle:
        own = memory or received
        return {kind: {**received.get(kind, {}), **own.get(LOCAL_KINDS[kind], {})} for kind in WEIGHT_KINDS}

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        means, started = {kind: RunningMean() for kind in WEIGHT_KINDS}, dict(state.get("started", {}))
        for update in updates:
            started[update.site] = torch.ones(())
            for kind, mean in means.items():
                mean.add(update.tensors.get(kind, {}), self.update_weight(update))
        return {**state, **{kind: mean.value() for kind, mean in means.items()}, "started": started}  # (2)

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"personal": self.start_weights(received, memory)}


def _without_names(names: Collection[str], group: Tensors) -> Tensors:
    return {name: tensor for name, tensor in group.items() if name not in names}
