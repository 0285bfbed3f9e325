"""FRAug: federated representation augmentation. Chen, Frikha, Krompass, Gu, Tresp: FRAug: Tackling federated learning
with non-IID features via representation augmentation. ICCV 2023, arXiv:2205.14900; implemented after the authors' code,
github.com/HaokunChen245/FRAug. v: the extractor's features of an image of class y, or the site's running mean of such
features; h: the head; G: a generator shared by all sites; R_k: site k's own transformation (RTNet); z: noise.

    (1)  ṽ = G(z, y)
    (2)  v̂ = v + ρ·R_k(ṽ, y),   ρ = e^{γ(t−T)} in round t of T
    (3)  ℓ   = (1 − λ)·CE(h(v), y) + λ·CE(h(v̂), y),   λ = min(½, ρ): trains the model; the second term only its head
    (4)  ℓ_G = CE(h(ṽ), y) − α·MMD²(ṽ, v): trains G to make features of every class, unlike those of the site
    (5)  ℓ_R = β·MMD²(v̂, v) − H(h(v̂)), with ρ = 1: trains R_k to make features like the site's, of uncertain class
    (6)  m_ky ← (1 − μ)·m_ky + μ·mean of the batch's v of class y
    (7)  w, G ← Σ_k (n_k / n) · (w_k, G_k)

Each batch takes one step on each of (3), (4) and (5). v̂ is made twice: around the batch's features, with their labels,
and around the means m_k, with labels of all classes alike (`use_homo_label_aug: 2` there); (4) has such labels too. R_k
and m_k never leave a site, which draws its own initial R_k; G does, and its bytes are counted. Both have two dense
layers with BatchNorm as there, z is uniform, and MMD² is the sum of five Gaussian kernels. With `most: 0` it is FedAvg,
bit for bit.

Departures. Only excerpts of the paper were available; where it differs from the code, this follows the code. BatchNorm
statistics of the model are averaged like parameters, so that there is one global model; the authors keep them at sites
and evaluate each site with its own (`no_bn_running_stats`). γ = ramp / T: their 0.01 over 300 rounds is a ramp of 3,
which a run of 20 rounds repeats; on digits it is 0.6, and they omit ρ in (2). t counts from 1, there from 0. One
optimiser and learning rate serve all three steps (theirs: 0.01 for the model, 0.025 to 0.05 for G and R). α and β are
of the size of theirs (0 to 10, by dataset) and need tuning. m starts at its first value, not at 0; labels are drawn
from the classes that a site has seen, since the others have no mean yet. ṽ and v̂ pass the head in evaluation mode; for
the authors' heads, one dense layer, that is the same. R takes both kinds of v̂ as one batch, and G at least two rows,
since BatchNorm needs two.

No privacy plan covers it: (4) and (5) compare the images of a batch, and G's statistics are sent without noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import nn

from polyclinic.algorithms.base import WEIGHT_KINDS, scalar_tensors, with_prefix, without_prefix
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
from polyclinic.core import (
    AUX_PREFIX,
    Bundle,
    Federation,
    Fit,
    PositiveShare,
    RecipeError,
    Share,
    Site,
    Step,
    Stream,
    Update,
    Work,
)
from polyclinic.training.keyed_dropout import first_key
from polyclinic.training.network import build_with_seed, copy_auxiliary_weights

STEPS = (
    Step(augmentation_loss, ("extractor.", "head.")),
    Step(generator_loss, (f"{AUX_PREFIX}{GENERATOR}.",)),
    Step(transform_loss, (f"{AUX_PREFIX}{TRANSFORM}.",)),
)
OWN = (f"{AUX_PREFIX}{TRANSFORM}.", f"{AUX_PREFIX}{MEANS}.")
"""The networks that stay at a site."""


@dataclass(frozen=True)
class FRAug(FedAvg):
    most: Share = 0.5
    """The bound of λ, the weight of synthetic features; 0: none are made."""
    ramp: NonNegativeFloat = 3.0
    """γ·T: λ and ρ rise to 1 in the last round, from nearly e^−ramp in the first."""
    away: NonNegativeFloat = 1.0
    """α, the weight of the distance between generated and own features in (4)."""
    near: NonNegativeFloat = 1.0
    """β, the weight of the distance between transformed and own features in (5)."""
    momentum: PositiveShare = 0.3
    """μ, the weight of the batch in the running means of (6)."""
    latent: PositiveInt | None = None
    """The length of z; None: half the number of features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.private is not None and self.most:
            raise RecipeError(
                "fraug compares the features of a batch with synthetic ones, and private steps take images one by one; "
                "leave privacy out, or choose another algorithm, for example moon"
            )

    def auxiliary(self, features: tuple[int, ...], classes: int) -> Mapping[str, nn.Module]:
        if not self.most:
            return {}
        if len(features) != 1:
            raise RecipeError(
                f"fraug generates flat features, and this network's are {' × '.join(map(str, features))}; leave out "
                "model.split_after, or split after the last stage"
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
        kept = {kind: with_prefix(OWN, group) for kind, group in fitted.weights.items()}
        return Update(_shared_weights(fitted.weights), site.examples), kept

    def _initial_site_weights(self, received: Bundle, rng: Stream) -> Bundle:
        """Return the initial R_k and m_k of a site."""
        enter = received["model"][f"{AUX_PREFIX}{GENERATOR}.enter.weight"]
        width = enter.shape[0]
        latent = self.latent or max(1, width // 2)
        networks = build_with_seed(
            lambda: self._site_networks(latent, enter.shape[1] - latent, width), rng.child("transform")
        )
        own = [copy_auxiliary_weights(name, network.to(enter)) for name, network in networks.items()]
        return {kind: {n: t for weights in own for n, t in weights[kind].items()} for kind in WEIGHT_KINDS}

    def _loss_reference(self, received: Bundle, site: Site, rng: Stream) -> Bundle:
        rho = math.exp(self.ramp * (site.round / site.rounds - 1))
        scalars = scalar_tensors(
            received, {"rho": rho, "lambda": min(self.most, rho), "away": self.away, "near": self.near}
        )
        key = torch.tensor(first_key(rng.child("made up", site.round)), device=scalars["rho"].device)
        return {"scalars": {**scalars, "key": key}}


def _shared_weights(weights: Bundle) -> Bundle:
    """Return the weights that a site sends and (7) averages."""
    return {kind: without_prefix(OWN, group) for kind, group in weights.items()}
