"""Losses: module-level pure functions (network, weights, batch, reference) -> scalar.

Being module-level functions, those of many sites compare equal, so that their jobs can be stacked. `weights` are the
weights that train, `reference` holds whatever else a loss needs (teachers, anchors, numbers as "scalars"). The task's
own loss, cross-entropy for classification, comes from `network.loss` and `network.output_loss`.
"""

import torch.nn.functional as F
from torch import Tensor

from polyclinic.core import Batch, Bundle, Network, Objective, Tensors

VARIANCE_FLOOR = 1e-2
"""A feature whose variance is this fraction of the mean variance counts half in correlations."""
SEPARABLE: set[Objective] = set()
"""Objectives that call `network.loss` once, with the weights they are given, and add terms that use no data."""


def separable(objective: Objective) -> Objective:
    """Mark an objective as a mean of per-example losses, so that DP-SGD may compute per-example gradients at once.

    Its data may enter only through one call of `network.loss(weights, batch)`, to which it adds other terms. Never mark
    a loss that mixes examples (contrasts, batch statistics), uses features, or calls the network with other weights.
    """
    SEPARABLE.add(objective)
    return objective


@separable
def task_loss(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensor:
    """Return the task's own loss on the batch, for classification the mean negative log-likelihood."""
    return network.loss(weights, batch)


@separable
def proximal_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return the task loss + (μ/2)·‖w − anchor‖² (FedProx)."""
    distance = sum((w - reference["anchor"][name]).pow(2).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + reference["scalars"]["mu"] / 2 * distance


@separable
def corrected_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return the task loss + ⟨correction, w⟩ (SCAFFOLD); the gradient of this term is the correction itself."""
    linear = sum((reference["correction"][name] * w).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + linear


def distillation_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return (1 − λ)·task loss + λ·T²·KL(teacher ‖ student), both softened by the temperature T."""
    share, temperature = reference["scalars"]["share"], reference["scalars"]["temperature"]
    images, labels = batch
    logits = network(weights, images)
    teacher = network.teacher_logits({"model": reference["teacher"], "buffers": reference["teacher buffers"]}, images)
    return (1 - share) * network.output_loss(logits, labels) + share * softened_kl(logits, teacher, temperature)


def softened_kl(student: Tensor, teacher: Tensor, temperature: Tensor | float) -> Tensor:
    """Return T²·KL(teacher ‖ student) of logits; T² keeps the gradient's size as T grows (Hinton et al. 2015)."""
    log_student, log_teacher = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return temperature**2 * (log_teacher.exp() * (log_teacher - log_student)).sum(-1).mean()  # F.kl_div does not stack


def contrastive_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return the task loss + μ·contrast (MOON): features are drawn to the global model's, away from the previous one's.

    The contrast is −log(e^(s_g/τ) / (e^(s_g/τ) + e^(s_p/τ))), with cosine similarities s_g to the global model's
    features and s_p to the previous local model's.
    """
    images, labels = batch
    features = network.features(weights, images)
    flat = features.flatten(1)
    teachers = ({kind: reference[f"{who} {kind}"] for kind in ("model", "buffers")} for who in ("global", "previous"))
    to_global, to_previous = (
        F.cosine_similarity(flat, network.teacher_features(teacher, images).flatten(1), dim=-1) for teacher in teachers
    )
    # −log(eᵃ / (eᵃ + eᵇ)) = −log σ(a − b)
    contrast = -F.logsigmoid((to_global - to_previous) / reference["scalars"]["tau"]).mean()
    return network.output_loss(network.head(weights, features), labels) + reference["scalars"]["mu"] * contrast


def manifold_reshaping_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return the task loss + μ₁·decorrelation + μ₂·margin (FedMR), the latter where there are prototypes."""
    images, labels = batch
    features, scalars = network.features(weights, images), reference["scalars"]
    z = features.flatten(1)
    task = network.output_loss(network.head(weights, features), labels)
    loss = task + scalars["intra"] * intra_class_correlation(z, labels)
    if "prototypes" not in reference:
        return loss
    means, distances = reference["prototypes"]["means"], reference["prototypes"]["apart"]
    return loss + scalars["inter"] * inter_class_margin(z, labels, means, distances, scalars["margin"])


def intra_class_correlation(z: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of r²·g·g' over pairs of features within a class, where r is their correlation.

    g = v/(v + v̄/100) weighs a feature by its variance v against the mean variance v̄: features that hardly vary would
    otherwise be correlated by rounding. Classes with fewer than three images in the batch are left out: of two images
    all features correlate by ±1, whatever they are.

    ‖XᵀX‖ = ‖XXᵀ‖ (Frobenius): correlations of d features are d × d numbers, but the sum of their squares needs n × n.
    """
    same = (labels[:, None] == labels[None, :]).to(z.dtype)
    count = same.sum(1)
    centred = z - same @ z / count[:, None]
    variance = same @ centred.square() / (count - 1).clamp(min=1)[:, None]
    x = centred / (variance + VARIANCE_FLOOR * variance.mean(1, keepdim=True) + 1e-12).sqrt()
    squares = (same * (x @ x.T).square()).sum(1) - (same @ x.square()).square().sum(1) / count  # without a = b
    pairs = (count - 1).clamp(min=1).square() * max(z.shape[1] * (z.shape[1] - 1), 1)
    enough = (count > 2).to(z.dtype)
    return (enough * squares / pairs).sum() / (enough / count).sum().clamp(min=1)


def inter_class_margin(
    z: Tensor, labels: Tensor, means: Tensor, class_distances: Tensor, margin: Tensor | float
) -> Tensor:
    """Return how far features fall short of being nearer to their own class's prototype than to another's.

    The required margin is `margin` × `class_distances`, the distances between the classes' prototypes `means`; pairs
    with distance 0 are not compared.
    """
    distances, required = pairwise_distances(z, means), class_distances[labels]
    own = distances.gather(1, labels[:, None])
    missing = (margin * required + own - distances).clamp(min=0) * (required > 0)
    return (missing.sum(1) / (required > 0).sum(1).clamp(min=1)).mean()


def pairwise_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return ‖row − other‖ of all pairs; never 0, where its gradient would not exist."""
    middle = others.mean(0)  # what all rows have in common would cost digits
    rows, others = rows - middle, others - middle
    squares = rows.square().sum(1)[:, None] + others.square().sum(1)[None, :] - 2 * rows @ others.T
    return squares.clamp(min=1e-12).sqrt()


def predict_probabilities(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return the task's predictions, one row for each example, with the labels."""
    images, labels = batch
    return {**network.predict(weights, images), "labels": labels}
