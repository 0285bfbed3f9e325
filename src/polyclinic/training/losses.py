"""Losses: module-level pure functions (network, weights, batch, reference) -> scalar, so that sites stack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core.contract import Batch, Bundle, Network, Objective, Tensors

VARIANCE_FLOOR = 1e-2
"""A feature whose variance is this share of the mean one counts half in correlations."""
SEPARABLE: set[Objective] = set()
"""Objectives that are `network.loss` of the weights, called once, plus terms that look at no data."""


def separable(objective: Objective) -> Objective:
    """Mark an objective as the mean of its examples' own losses, so that private training may take them apart.

    Its data may enter through one call of `network.loss(weights, batch)` only, which adds to the rest. Never mark one
    that mixes examples (contrasts, batch statistics), looks at features, or calls the network with other weights.
    """
    SEPARABLE.add(objective)
    return objective


@separable
def task_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """The task's own loss on the batch: for classification, the mean negative log-likelihood."""
    del reference
    return network.loss(weights, batch)


@separable
def proximal_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + (μ/2)·‖w − anchor‖²."""
    anchor = reference["anchor"]
    distance = sum((w - anchor[name]).pow(2).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + reference["scalars"]["mu"] / 2 * distance


@separable
def corrected_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + ⟨correction, w⟩: a linear term, whose gradient is the correction itself."""
    correction = reference["correction"]
    linear = sum((correction[name] * w).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + linear


def distillation_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """(1 − λ)·task loss + λ·T²·KL(teacher ‖ student), both softened by the temperature T."""
    share, temperature = reference["scalars"]["share"], reference["scalars"]["temperature"]
    images, labels = batch
    logits = network(weights, images)
    teacher = network.teacher_logits({"model": reference["teacher"], "buffers": reference["teacher buffers"]}, images)
    return (1 - share) * F.cross_entropy(logits, labels) + share * softened_kl(logits, teacher, temperature)


def softened_kl(student: Tensor, teacher: Tensor, temperature: Tensor | float) -> Tensor:
    """T²·KL(teacher ‖ student) of logits, so that its gradient keeps its size as T grows (Hinton et al. 2015)."""
    mine, wanted = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return temperature**2 * (wanted.exp() * (wanted - mine)).sum(-1).mean()  # F.kl_div does not stack


def contrastive_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + μ·contrast: features shall be like the global model's, more than like the previous model's."""
    images, labels = batch
    mine = network.features(weights, images)
    flat = mine.flatten(1)
    like_global, like_previous = (
        F.cosine_similarity(
            flat, network.teacher_logits(_teacher_weights(reference, who), images, features=True).flatten(1), dim=-1
        )
        for who in ("global", "previous")
    )
    apart = (like_global - like_previous) / reference["scalars"]["tau"]
    contrast = -F.logsigmoid(apart).mean()  # −log(eᵃ / (eᵃ + eᵇ)) = −log σ(a − b)
    return F.cross_entropy(network.head(weights, mine), labels) + reference["scalars"]["mu"] * contrast


def _teacher_weights(reference: Bundle, who: str) -> Bundle:
    return {kind: reference[f"{who} {kind}"] for kind in ("model", "buffers")}


def manifold_reshaping_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + μ₁·decorrelation + μ₂·margin, the latter where there are prototypes."""
    images, labels = batch
    handed, scalars = network.features(weights, images), reference["scalars"]
    z = handed.flatten(1)
    loss = F.cross_entropy(network.head(weights, handed), labels) + scalars["intra"] * intra_class_correlation(
        z, labels
    )
    if "prototypes" not in reference:
        return loss
    return loss + scalars["inter"] * inter_class_margin(z, labels, **reference["prototypes"], margin=scalars["margin"])


def intra_class_correlation(z: Tensor, labels: Tensor) -> Tensor:
    """The mean of r²·g·g' of two features within a class, r being their correlation and g = v/(v + v̄/100) a feature's
    variance against the mean one: those that hardly vary would else be correlated by rounding. Over classes with three
    images or more in the batch: of two images all features correlate by ±1, whatever they are.

    ‖XᵀX‖ = ‖XXᵀ‖ (Frobenius): correlations of d features are d × d numbers, but the sum of their squares needs n × n.
    """
    same = (labels[:, None] == labels[None, :]).to(z.dtype)
    count = same.sum(1)
    apart = z - same @ z / count[:, None]
    spread = same @ apart.square() / (count - 1).clamp(min=1)[:, None]
    least = VARIANCE_FLOOR * spread.mean(1, keepdim=True)
    x = apart / (spread + least + 1e-12).sqrt()
    every = (same * (x @ x.T).square()).sum(1) - (same @ x.square()).square().sum(1) / count  # without a = b
    pairs = (count - 1).clamp(min=1).square() * max(z.shape[1] * (z.shape[1] - 1), 1)
    several = (count > 2).to(z.dtype)
    return (several * every / pairs).sum() / (several / count).sum().clamp(min=1)


def inter_class_margin(
    z: Tensor, labels: Tensor, means: Tensor, class_distances: Tensor, margin: Tensor | float
) -> Tensor:
    """By how much features lie less than `margin` × `apart` nearer to their own class's prototype than to another's.

    `apart`: distances between classes' prototypes; 0 for pairs that are not to be compared.
    """
    far, wanted = pairwise_distances(z, means), class_distances[labels]
    own = far.gather(1, labels[:, None])
    lacking = (margin * wanted + own - far).clamp(min=0) * (wanted > 0)
    return (lacking.sum(1) / (wanted > 0).sum(1).clamp(min=1)).mean()


def pairwise_distances(rows: Tensor, others: Tensor) -> Tensor:
    """‖row − other‖ of all pairs. Nowhere 0, where it would have no slope."""
    middle = others.mean(0)  # what all have in common would cost digits
    rows, others = rows - middle, others - middle
    squares = rows.square().sum(1)[:, None] + others.square().sum(1)[None, :] - 2 * rows @ others.T
    return squares.clamp(min=1e-12).sqrt()


def predict_probabilities(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Softmax of the logits, a row per example, with the labels."""
    del reference
    images, labels = batch
    return {"probabilities": torch.softmax(network(weights, images), -1), "labels": labels}
