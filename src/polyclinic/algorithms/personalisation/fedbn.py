"""FedBN: everything is averaged but normalisation layers. Li, Jiang, Zhang, Kamp, Dou: FedBN: federated learning on
non-IID features via local batch normalization. ICLR 2021, Algorithm 1; the authors' code: github.com/med-air/FedBN.

    (1)  (w_k, b_k) ← trained on site k for E epochs (or τ steps), from the received w and its own b_k
    (2)  w ← Σ_k (n_k / n) · w_k

b, all parameters and statistics of the normalisation layers, never leaves a site; the server sends its first values
once. A site predicts with the shared weights and its own b, so every test image in merged figures is judged by the
model of its own site, as in the paper. There is no global model: a public set or a set of no site cannot be judged, and
`finish` is refused. A site that has not trained yet has the first b.

Departures: normalisation layers are found by their type; the authors' code keeps parameters with "bn" in their name,
which would miss `downsample.1` of a ResNet. GroupNorm, LayerNorm, InstanceNorm and RMSNorm stay local like BatchNorm.
Sites are weighted by n_k / n; the authors weight them equally (`training.weights: uniform`). With a network without
normalisation layers this is FedAvg, bit for bit; it is allowed, since with clusters only some networks may have them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch

from polyclinic.algorithms.base import WEIGHT_KINDS, Algorithm, BundleMean, network_weights
from polyclinic.core import Bundle, Federation, Fit, Site, SiteId, Stream, Tensors, Update, Updates, Work
from polyclinic.training.losses import task_loss

LOCAL_KINDS = {"model": "norms", "buffers": "norm buffers"}
"""For parameters and for buffers: the kind that holds a site's own ones in the first broadcast and in its memory."""


@dataclass(frozen=True)
class FedBN(Algorithm):
    averages: ClassVar[bool] = True
    site_kinds: ClassVar[tuple[str, ...]] = tuple(LOCAL_KINDS.values())

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
        return {
            kind: {**received.get(kind, {}), **(memory or received).get(LOCAL_KINDS[kind], {})} for kind in WEIGHT_KINDS
        }

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        mean, started = BundleMean(), dict(state.get("started", {}))
        for update in updates:
            started |= {site: torch.ones(()) for site in update.sites}
            mean.add(update.tensors, self.update_weight(update))
        return {**state, **mean.value(), "started": started}  # (2)

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"personal": self.start_weights(received, memory)}


def _without_names(names: Collection[str], group: Tensors) -> Tensors:
    return {name: tensor for name, tensor in group.items() if name not in names}
