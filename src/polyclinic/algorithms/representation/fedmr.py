"""FedMR: manifold reshaping. Fan, Yao, Zhang, Lyu, Zhang, Wang: Federated learning under partially class-disjoint data
via manifold reshaping. TMLR 2023, arXiv:2405.18983; the authors' code: github.com/MediaBrain-SJTU/FedMR.
z: what the extractor makes of an image of class y; g_c: the prototype of class c; r: correlations within one class.

    (1)  ℓ_intra = mean over the batch's classes, and over pairs of features a ≠ b, of r_ab²
    (2)  ℓ_inter = mean over images, and over other classes c, of max(0, m·‖g_y − g_c‖ + ‖z − g_y‖ − ‖z − g_c‖)
    (3)  w_k ← w trained on site k for E epochs (or τ steps) by cross-entropy + μ₁·ℓ_intra + μ₂·ℓ_inter
    (4)  w ← Σ_k (n_k / n) · w_k
    (5)  g_c ← Σ_k n_kc · z̄_kc / Σ_k n_kc,   z̄_kc: the mean of site k's features of class c, by its trained w_k

(1) keeps the features of a class from collapsing onto a line, (2) keeps them out of the space of other classes, also of
those that a site has no image of. In round 1 there are no prototypes, and ℓ_inter is 0. A site without images of a
class says so (n_kc = 0) and does not count in (5); a class that nobody has in a round keeps its prototype. μ₁ = μ₂ = 0
is FedAvg, bit for bit; with μ₂ = 0 nothing but weights is sent, which is what the authors' code does.

Departures. (1) is that of the authors' code but for its scale: theirs is Σ_c mean((n_c − 1)²·r_ab²) / Σ_c n_c, which
grows with the batch (μ₁ is 10⁻⁵ to 10⁻² there); ours lies between 0 and 1 for any batch and width, and μ₁ = 0.1 is what
FedDecorr (Shi et al., ICLR 2023) gives the like quantity of all classes together. Classes with two images in a batch,
which always have r² = 1, are left out, and features that hardly vary count less (learning/objectives.py). (2) is not in
that code, and the paper's equation was not at hand: it is our reading of "a proper margin among categories", by global
prototypes. Margins are shares of the distances between the prototypes, so that nobody must know the scale of features:
m = 0 asks that the nearest prototype is that of an image's class, m = 1 is the most there can be. Tune μ₂.

Under a privacy plan a step takes images one by one, where (1) has nothing to correlate: it needs `intra: 0`. z̄ and n
are then of clipped features, noised and charged (privacy/kinds.py); a class of so few images that it may be noise alone
is withheld. It takes sites with thousands of images a class for the means to be worth something.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyclinic.algorithms.base import WEIGHT_KINDS, RunningMean, network_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.contract import (
    Batch,
    Bundle,
    Exchange,
    Federation,
    Fit,
    Network,
    Score,
    Site,
    Stream,
    Tensors,
    Update,
    Work,
)
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.privacy.releases import release_class_means
from polyclinic.training.losses import manifold_reshaping_loss, pairwise_distances, task_loss

SHARE, DEVIATIONS = 0.1, 3.0
"""Under a privacy plan: what counts take of the budget, and how far above their noise they must be to be believed."""


def class_sums(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Of every class: its features added up and its images counted, both per image of the batch."""
    images, labels = batch
    z = network.features(weights, images).flatten(1)
    classes = torch.arange(len(reference["prototypes"]["means"]), device=labels.device)
    member = (labels[:, None] == classes).to(z.dtype)
    return {"sums": member.T @ z / len(labels), "shares": member.mean(0)}


def labelled_features(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    del reference
    return {"features": network.features(weights, batch[0]), "labels": batch[1]}


@dataclass(frozen=True)
class FedMR(FedAvg):
    intra: float = 0.1
    """μ₁, the decorrelation's weight."""
    inter: float = 0.1
    """μ₂, the margin's weight; 0: no prototypes are made."""
    margin: float = 0.5
    """m: how much nearer its own class's prototype shall be to a feature than another, as a share of their distance."""
    clip: float = 10.0
    """Under a privacy plan: features are no longer than this in a class's mean."""
    noise: float = 20.0
    """Under a privacy plan: the noise of a round's means and counts, in units of what an image changes; charged."""

    def __post_init__(self) -> None:
        for name in ("intra", "inter"):
            if getattr(self, name) < 0:
                raise RecipeError(f"algorithm.{name} is {getattr(self, name)}; choose 0 or more")
        if not 0 <= self.margin <= 1:
            raise RecipeError(f"algorithm.margin is {self.margin}; choose a share from 0 to 1")
        for name in ("clip", "noise"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"algorithm.{name} is {getattr(self, name)}; choose more than 0")
        if self.training.private is not None and self.intra:
            raise RecipeError(
                "fedmr correlates the images of a batch, and private steps take them one by one; set algorithm.intra: 0"
            )

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        kinds = ("prototypes", "counts") if self.inter else ()
        return (*super().exchanges, *(Exchange(kind, like=kind) for kind in kinds))

    def privacy_releases(self) -> Mapping[str, float]:
        return {"prototypes": self.noise} if self.inter else {}

    def init(self, federation: Federation) -> Bundle:
        if not self.inter:
            return super().init(federation)
        first, classes = next(iter(federation.initial["model"].values())), len(federation.classes)
        none = {"means": first.new_zeros(classes, math.prod(federation.features))}
        return {**federation.initial, "prototypes": none, "counts": {"images": first.new_zeros(classes)}}

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        plain = not (self.intra or self.inter)
        reference = {} if plain else self._loss_reference(received)
        fitted = yield Fit(
            network_weights(received), task_loss if plain else manifold_reshaping_loss, self.training, reference
        )  # (3)
        told = (yield from self._class_prototypes(fitted.weights, received, site)) if self.inter else {}
        return Update({**fitted.weights, **told}, site.examples), None

    def _loss_reference(self, received: Bundle) -> Bundle:
        like = next(iter(received["model"].values()))
        scalars = {name: like.new_tensor(getattr(self, name)) for name in ("intra", "inter", "margin")}
        if not self.inter:
            return {"scalars": scalars}
        means, known = received["prototypes"]["means"], received["counts"]["images"] > 0
        others = known[:, None] & known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
        return {"scalars": scalars, "prototypes": {"means": means, "apart": pairwise_distances(means, means) * others}}

    def _class_prototypes(self, trained: Bundle, received: Bundle, site: Site) -> Generator[Score, Any, Bundle]:
        """z̄ and n of this site."""
        before, like = received["prototypes"], received["counts"]["images"]
        if self.training.private is None:
            found = yield Score(trained, class_sums, {"prototypes": before}, reduce="mean")
            count = (found["shares"] * site.examples).round()
            means = found["sums"] / torch.where(count > 0, found["shares"], 1.0)[:, None]
        else:
            found = yield Score(trained, labelled_features)
            assert site.secret is not None
            rows, drawn = (found["features"], found["labels"]), site.secret.child("prototypes")
            fewest = DEVIATIONS * self.noise / math.sqrt(SHARE)
            told = release_class_means(*rows, len(like), self.clip, self.noise, fewest, drawn, SHARE).tensors
            count = told["counts"] * told["known"]
            means, count = told["means"], count * (site.examples / count.sum().clamp(min=site.examples))
        return {"prototypes": {"means": means}, "counts": {"images": count.to(like.dtype)}}

    def check_update(self, update: Update) -> None:
        """A site weighs in (5) by what it says it has."""
        for counts in update.tensors.get("counts", {}).values():
            if bool((counts < 0).any()) or float(counts.sum()) > update.examples + 0.5:
                raise Refused("examples", f"counts of classes below 0, or of more than {update.examples} images")

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        if "prototypes" not in state:
            return super().aggregate(state, updates)
        averages, before = {kind: RunningMean() for kind in WEIGHT_KINDS}, state["prototypes"]["means"]
        means, seen = torch.zeros_like(before), torch.zeros_like(state["counts"]["images"])
        for update in updates:
            for kind, average in averages.items():
                average.add(update.tensors.get(kind, {}), self.update_weight(update))  # (4)
            count = update.tensors["counts"]["images"]
            seen = seen + count
            share = count / torch.where(seen > 0, seen, 1.0)
            means = torch.lerp(means, update.tensors["prototypes"]["means"], share[:, None])  # (5)
        return {
            **{kind: average.value() for kind, average in averages.items()},
            "prototypes": {"means": torch.where(seen[:, None] > 0, means, before)},
            "counts": {"images": torch.where(seen > 0, seen, state["counts"]["images"])},
        }
