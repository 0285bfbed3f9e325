"""FedMR: manifold reshaping. Fan, Yao, Zhang, Lyu, Zhang, Wang: Federated learning under partially class-disjoint data
via manifold reshaping. TMLR 2023, arXiv:2405.18983; the authors' code: github.com/MediaBrain-SJTU/FedMR.
z: the extractor's features of an image of class y; g_c: the prototype of class c; r: correlations within one class.

    (1)  ℓ_intra = mean over the batch's classes, and over pairs of features a ≠ b, of r_ab²
    (2)  ℓ_inter = mean over images, and over other classes c, of max(0, m·‖g_y − g_c‖ + ‖z − g_y‖ − ‖z − g_c‖)
    (3)  w_k ← w trained on site k for E epochs (or τ steps) by cross-entropy + μ₁·ℓ_intra + μ₂·ℓ_inter
    (4)  w ← Σ_k (n_k / n) · w_k
    (5)  g_c ← Σ_k n_kc · z̄_kc / Σ_k n_kc,   z̄_kc: the mean of site k's features of class c, by its trained w_k

(1) keeps the features of a class from collapsing onto a line; (2) keeps them away from other classes, including those
of which the site has no images. In round 1 there are no prototypes and ℓ_inter is 0. A site without images of a class
sends n_kc = 0 and has no part in (5); a class that no site has in a round keeps its prototype. μ₁ = μ₂ = 0 is FedAvg,
bit for bit; with μ₂ = 0 only weights are sent, as in the authors' code.

Departures. (1) is that of the authors' code except for its scale: theirs is Σ_c mean((n_c − 1)²·r_ab²) / Σ_c n_c, which
grows with the batch (μ₁ is 10⁻⁵ to 10⁻² there); ours lies between 0 and 1 for any batch and width, and μ₁ = 0.1 is the
weight of the similar term over all classes in FedDecorr (Shi et al., ICLR 2023). Classes with two images in a batch,
which always have r² = 1, are left out, and features that hardly vary count less (training/losses.py). (2) is not in
that code, and the paper's equation was not available: it is our reading of "a proper margin among categories", with
global prototypes. Margins are shares of the distances between prototypes, so that the scale of features need not be
known: with m = 0 the nearest prototype must be that of the image's class, and m = 1 is the largest possible margin.
Tune μ₂.

A private step takes images one by one, where (1) has nothing to correlate: a privacy plan needs `intra: 0`. z̄ and n are
then of clipped features, noised and charged (privacy/releases.py); a class with so few images that its count may be
noise is withheld. The means are useful only if sites have thousands of images of a class.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat

from polyclinic.algorithms.base import BundleMean, network_weights, scalar_tensors
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.feature_bank import (
    DEVIATIONS,
    SHARE,
    check_class_counts,
    labelled_features,
)
from polyclinic.core import (
    Batch,
    Bundle,
    Exchange,
    Federation,
    Fit,
    Network,
    RecipeError,
    Score,
    Share,
    Site,
    Stream,
    Tensors,
    Update,
    Updates,
    Work,
)
from polyclinic.privacy.releases import release_class_means
from polyclinic.training.losses import manifold_reshaping_loss, pairwise_distances, task_loss


def class_sums(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Return for every class the sum of its features and the number of its images, both divided by the batch size."""
    images, labels = batch
    z = network.features(weights, images).flatten(1)
    classes = torch.arange(len(reference["prototypes"]["means"]), device=labels.device)
    member = (labels[:, None] == classes).to(z.dtype)
    return {"sums": member.T @ z / len(labels), "shares": member.mean(0)}


@dataclass(frozen=True)
class FedMR(FedAvg):
    intra: NonNegativeFloat = 0.1
    """μ₁, the weight of the decorrelation."""
    inter: NonNegativeFloat = 0.1
    """μ₂, the weight of the margin; 0: no prototypes are computed."""
    margin: Share = 0.5
    """m, the margin in (2), as a share of the distance between two prototypes."""
    clip: PositiveFloat = 10.0
    """Under a privacy plan: the norm to which features are clipped."""
    noise: PositiveFloat = 20.0
    """Under a privacy plan: the noise multiplier of a round's means and counts, which is charged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.private is not None and self.intra:
            raise RecipeError(
                "fedmr correlates the images of a batch, and private steps take them one by one; set algorithm.intra: 0"
            )

    def exchanges(self) -> tuple[Exchange, ...]:
        kinds = ("prototypes", "counts") if self.inter else ()
        return (*super().exchanges(), *(Exchange(kind, like=kind) for kind in kinds))

    def privacy_releases(self) -> Mapping[str, float]:
        return {"prototypes": self.noise} if self.inter else {}

    def init(self, federation: Federation) -> Bundle:
        if not self.inter:
            return super().init(federation)
        first, classes = next(iter(federation.initial["model"].values())), len(federation.classes)
        return {
            **federation.initial,
            "prototypes": {"means": first.new_zeros(classes, math.prod(federation.features))},
            "counts": {"images": first.new_zeros(classes)},
        }

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        reference = self._loss_reference(received) if self.intra or self.inter else {}
        objective = manifold_reshaping_loss if reference else task_loss
        fitted = yield Fit(network_weights(received), objective, self.training, reference)  # (3)
        prototypes = (yield from self._class_prototypes(fitted.weights, received, site)) if self.inter else {}
        return Update({**fitted.weights, **prototypes}, site.examples), None

    def _loss_reference(self, received: Bundle) -> Bundle:
        scalars = scalar_tensors(received, {"intra": self.intra, "inter": self.inter, "margin": self.margin})
        if not self.inter:
            return {"scalars": scalars}
        means, known = received["prototypes"]["means"], received["counts"]["images"] > 0
        others = known[:, None] & known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
        return {"scalars": scalars, "prototypes": {"means": means, "apart": pairwise_distances(means, means) * others}}

    def _class_prototypes(self, trained: Bundle, received: Bundle, site: Site) -> Generator[Score, Any, Bundle]:
        """Compute z̄ and n of this site."""
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
            released = release_class_means(*rows, len(like), self.clip, self.noise, fewest, drawn, SHARE).tensors
            count = released["counts"] * released["known"]
            means, count = released["means"], count * (site.examples / count.sum().clamp(min=site.examples))
        return {"prototypes": {"means": means}, "counts": {"images": count.to(like.dtype)}}

    def needs_single_updates(self) -> str:
        return "fedmr weights every site's class means by its own counts"

    def check_update(self, update: Update) -> None:
        """Refuse counts that the number of examples rules out: they are weights in (5)."""
        check_class_counts(update.tensors.get("counts", {}), update.examples)

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        if "prototypes" not in state:
            return super().aggregate(state, updates)
        mean, before = BundleMean(), state["prototypes"]["means"]
        means, seen = torch.zeros_like(before), torch.zeros_like(state["counts"]["images"])
        for update in updates:
            mean.add(update.tensors, self.update_weight(update))  # (4)
            count = update.tensors["counts"]["images"]
            seen = seen + count
            share = count / torch.where(seen > 0, seen, 1.0)
            means = torch.lerp(means, update.tensors["prototypes"]["means"], share[:, None])  # (5)
        return {
            **mean.value(),
            "prototypes": {"means": torch.where(seen[:, None] > 0, means, before)},
            "counts": {"images": torch.where(seen > 0, seen, state["counts"]["images"])},
        }
