"""FRAug: federated representation augmentation. Chen, Frikha, Krompass, Gu, Tresp: FRAug: Tackling federated learning
with non-IID features via representation augmentation. ICCV 2023, arXiv:2205.14900; what is here follows the authors'
code, github.com/HaokunChen245/FRAug. v: what the extractor makes of an image of class y, or the site's running mean of
such features; h: the head; G: a generator that all sites share; R_k: site k's own transformation (RTNet); z: noise.

    (1)  ṽ = G(z, y)
    (2)  v̂ = v + ρ·R_k(ṽ, y),   ρ = e^{γ(t−T)} in round t of T
    (3)  ℓ   = (1 − λ)·CE(h(v), y) + λ·CE(h(v̂), y),   λ = min(½, ρ): moves the model; of v̂ only the head learns
    (4)  ℓ_G = CE(h(ṽ), y) − α·MMD²(ṽ, v): moves G, which is to know every class, and no site's features
    (5)  ℓ_R = β·MMD²(v̂, v) − H(h(v̂)), with ρ = 1: moves R_k, to where features are a site's own and hard to tell
    (6)  m_ky ← (1 − μ)·m_ky + μ·mean of the batch's v of class y
    (7)  w, G ← Σ_k (n_k / n) · (w_k, G_k)

On every batch a step each on (3), (4) and (5). v̂ is made twice: around the batch's features, with their labels, and
around the means m_k, with labels of all classes alike (`use_homo_label_aug: 2` there); (4) has such labels too. R_k and
m_k never leave a site, which draws its own first R_k; G does, and is counted. Both have two dense layers with BatchNorm
as there, z is uniform, and MMD² is the sum of five Gaussian kernels. With `most: 0` it is FedAvg, bit for bit.

Departures. Of the paper only excerpts were at hand: where it differs from the code, this is the code. BatchNorm
statistics of the model are averaged like parameters, so that there is one global model; the authors keep them at sites
and judge each site by its own (`no_bn_running_stats`). γ = ramp / T: their 0.01 over 300 rounds is a ramp of 3, and a
run of 20 rounds rises as theirs does; on digits it is 0.6, and they leave ρ out of (2). t counts from 1, there from 0.
One optimiser and rate for all three steps (theirs: 0.01 for the model, 0.025 to 0.05 for G and R). α and β are of the
size of theirs (0 to 10, by dataset), and to be tuned. m starts at its first value, not at 0; labels are drawn of the
classes that a site has met: around a mean of nothing there is nothing to make up. ṽ and v̂ pass the head as in
evaluation; for the authors' heads, one dense layer, that is the same. R sees both kinds of v̂ as one batch, and G two
rows at least, since BatchNorm needs two.

No privacy plan protects it: (4) and (5) compare the images of a batch, and G's statistics leave as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from polyclinic.algorithms.base import WEIGHT_KINDS, without_prefix
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.fraug_losses import (
    GENERATOR,
    MEANS,
    TRANSFORM,
    ClassMeans,
    FeatureGenerator,
    FeatureTransform,
    augmentation_loss,
    generator_loss,
    transform_loss,
)
from polyclinic.core.contract import AUX_PREFIX, Bundle, Federation, Fit, Site, Step, Stream, Update, Work
from polyclinic.core.errors import RecipeError
from polyclinic.training.auxiliary import build_with_seed, copy_auxiliary_weights
from polyclinic.training.keyed_dropout import first_key

STEPS = (
    Step(augmentation_loss, ("extractor.", "head.")),
    Step(generator_loss, (f"{AUX_PREFIX}{GENERATOR}.",)),
    Step(transform_loss, (f"{AUX_PREFIX}{TRANSFORM}.",)),
)
OWN = (f"{AUX_PREFIX}{TRANSFORM}.", f"{AUX_PREFIX}{MEANS}.")
"""What is a site's own."""


@dataclass(frozen=True)
class FRAug(FedAvg):
    most: float = 0.5
    """The bound of λ, the weight of made-up features; 0: nothing is made up."""
    ramp: float = 3.0
    """γ·T: λ and ρ rise to 1 in the last round, from nearly e^−ramp in the first."""
    away: float = 1.0
    """α: how far the generator's features shall be from a site's own."""
    near: float = 1.0
    """β: how near a site's transformed features shall be to its own."""
    momentum: float = 0.3
    """μ: how quickly the means of a site's features follow."""
    latent: int | None = None
    """Numbers of noise that the generator is given; None: half as many as there are features."""

    def __post_init__(self) -> None:
        for name in ("ramp", "away", "near"):
            if getattr(self, name) < 0:
                raise RecipeError(f"algorithm.{name} is {getattr(self, name)}; choose 0 or more")
        if not 0 <= self.most <= 1:
            raise RecipeError(f"algorithm.most is {self.most}; choose a share from 0 to 1, usually 0.5")
        if not 0 < self.momentum <= 1:
            raise RecipeError(f"algorithm.momentum is {self.momentum}; choose a share above 0, at most 1")
        if self.latent is not None and self.latent < 1:
            raise RecipeError(f"algorithm.latent is {self.latent}; choose 1 or more, or leave it out")
        if self.training.private is not None and self.most:
            raise RecipeError(
                "fraug compares the images of a batch with made-up ones, and private steps take them one by one; leave "
                "privacy out, or choose another algorithm, as moon"
            )

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        if not self.most:
            return {}
        if len(features) != 1:
            raise RecipeError(
                f"fraug makes up flat features, and this network's are {' × '.join(map(str, features))}; leave out "
                "model.cut, or cut after the last stage"
            )
        shape = self.latent or max(1, features[0] // 2), classes, features[0]
        return {GENERATOR: FeatureGenerator(*shape), **self._site_networks(*shape)}

    def _site_networks(self, latent: int, classes: int, width: int) -> dict[str, nn.Module]:
        return {TRANSFORM: FeatureTransform(latent, classes, width), MEANS: ClassMeans(classes, width, self.momentum)}

    def init(self, federation: Federation) -> Bundle:
        return _shared_weights(federation.initial)

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        if not self.most:
            return (yield from super().local(received, memory, site, rng))
        own = memory or self._initial_site_weights(received, rng)
        start = {kind: {**received.get(kind, {}), **own[kind]} for kind in WEIGHT_KINDS}
        fitted = yield Fit(start, STEPS, self.training, self._loss_reference(received, site, rng))  # (3), (4), (5)
        kept = {kind: {n: t for n, t in group.items() if n.startswith(OWN)} for kind, group in fitted.weights.items()}
        return Update(_shared_weights(fitted.weights), site.examples), kept

    def _initial_site_weights(self, received: Bundle, rng: Stream) -> Bundle:
        """A site's own R_k and m_k before it has trained."""
        enter = received["model"][f"{AUX_PREFIX}{GENERATOR}.enter.weight"]
        width = enter.shape[0]
        latent = self.latent or max(1, width // 2)
        networks = build_with_seed(
            lambda: self._site_networks(latent, enter.shape[1] - latent, width), rng.child("transform")
        )
        own = [copy_auxiliary_weights(name, network.to(enter)) for name, network in networks.items()]
        return {kind: {n: t for weights in own for n, t in weights[kind].items()} for kind in WEIGHT_KINDS}

    def _loss_reference(self, received: Bundle, site: Site, rng: Stream) -> Bundle:
        like = next(iter(received["model"].values()))
        rho = math.exp(self.ramp * (site.round / site.rounds - 1))
        numbers = {"rho": rho, "lambda": min(self.most, rho), "away": self.away, "near": self.near}
        key = torch.tensor(first_key(rng.child("made up", site.round)), device=like.device)
        return {"scalars": {**{name: like.new_tensor(number) for name, number in numbers.items()}, "key": key}}


def _shared_weights(weights: Bundle) -> Bundle:
    """What a site hands in, and (7) averages."""
    for prefix in OWN:
        weights = {kind: without_prefix(prefix, group) for kind, group in weights.items()}
    return weights
