"""Synthetic features: the networks and objectives of FRAug (its equations are in fraug.py).

All randomness is hashed from a key: the round's key and the number of classes seen so far, which changes with every
batch. So a site generates the same features alone and in a stack.
"""

from typing import cast

import torch
from torch import Tensor, nn

from polyclinic.core import AUX_PREFIX, Batch, Bundle, Network
from polyclinic.training.keyed_dropout import hash_uniform

GENERATOR, TRANSFORM, MEANS = "generator", "transform", "means"
BANDS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Bandwidths of the kernels, in units of the mean squared distance."""


class FeatureGenerator(nn.Module):
    """G of (1): features from noise and a class."""

    def __init__(self, latent: int, classes: int, width: int) -> None:
        super().__init__()
        self.enter, self.enter_norm = nn.Linear(latent + classes, width), nn.BatchNorm1d(width)
        self.leave, self.leave_norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, noise: Tensor, classes: Tensor) -> Tensor:
        inner = self.enter_norm(self.enter(torch.cat([noise, classes], 1))).relu()
        return cast(Tensor, self.leave_norm(self.leave(inner)).relu())


class FeatureTransform(nn.Module):
    """R_k of (2), RTNet: an addition to a site's features, from generated features and their class."""

    def __init__(self, latent: int, classes: int, width: int) -> None:
        super().__init__()
        self.enter, self.enter_norm = nn.Linear(width + classes, latent), nn.BatchNorm1d(latent)
        self.leave, self.leave_norm = nn.Linear(latent, width), nn.BatchNorm1d(width)

    def forward(self, made: Tensor, classes: Tensor) -> Tensor:
        inner = self.enter_norm(self.enter(torch.cat([made, classes], 1))).relu()
        return cast(Tensor, self.leave_norm(self.leave(inner)))


class ClassMeans(nn.Module):
    """m_k of (6): running means of a site's features by class, updated in training only, like BatchNorm's."""

    value: Tensor
    times: Tensor

    def __init__(self, classes: int, width: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(classes, width))
        self.register_buffer("times", torch.zeros(classes, dtype=torch.int64))

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        count = classes.sum(0)
        fresh = (classes.T @ features / count.clamp(min=1)[:, None]).to(self.value.dtype)
        # The first value starts a mean.
        share = (1 - (1 - self.momentum) * (self.times > 0).to(fresh.dtype)) * (count > 0)
        after = torch.lerp(self.value, fresh, share[:, None])  # (6)
        if self.training:
            self.value.copy_(after)
            self.times.add_((count > 0).to(self.times.dtype))
        return after


def augmentation_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return (3): the task loss, and the cross-entropy of synthetic features, which trains the head only."""
    images, labels = batch
    v, scalars = network.features(weights, images), reference["scalars"]
    task = network.output_loss(network.head(weights, v), labels)
    network.auxiliary(weights, MEANS, v.detach(), one_hot(labels, weights, v))  # (6)
    around, y = _site_features(weights, v.detach(), labels, _dropout_key(weights, reference, 0))
    made = _generate_features(network, weights, y, around, _dropout_key(weights, reference, 1), eval_mode=True)  # (1)
    residual = network.auxiliary(weights, TRANSFORM, made, one_hot(y, weights, v), eval_mode=True)
    around = around + scalars["rho"] * residual  # (2)
    synthetic = network.output_loss(network.head(weights, around, eval_mode=True), y)
    return (1 - scalars["lambda"]) * task + scalars["lambda"] * synthetic  # (3)


def generator_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return (4): generated features whose class the head recognises, far from the site's own."""
    images, labels = batch
    v = network.teacher_features(weights, images)
    y = sample_seen_labels(weights, max(2, len(labels)), _dropout_key(weights, reference, 2))
    made = _generate_features(network, weights, y, v, _dropout_key(weights, reference, 3))  # (1)
    recognised = network.output_loss(network.head(weights, made, eval_mode=True), y)
    return recognised - reference["scalars"]["away"] * squared_mmd(made, v)  # (4)


def transform_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return (5): features distributed like the site's own, of whose class the head is uncertain."""
    images, labels = batch
    v = network.teacher_features(weights, images)
    own, y = _site_features(weights, v, labels, _dropout_key(weights, reference, 4))
    made = _generate_features(network, weights, y, v, _dropout_key(weights, reference, 5), eval_mode=True)  # (1)
    around = own + network.auxiliary(weights, TRANSFORM, made, one_hot(y, weights, v))  # (2) with ρ = 1
    unsure = mean_entropy(network.head(weights, around, eval_mode=True))
    n = len(labels)
    far = (squared_mmd(around[:n], own[:n]) + squared_mmd(around[n:], own[n:])) / 2
    return reference["scalars"]["near"] * far - unsure  # (5)


def mean_entropy(logits: Tensor) -> Tensor:
    """Return the mean entropy of the predictions, in nats."""
    log = torch.log_softmax(logits, -1)
    return -(log.exp() * log).sum(-1).mean()


def squared_mmd(one: Tensor, other: Tensor) -> Tensor:
    """Return MMD² of two samples, summed over five Gaussian kernels whose bandwidths follow from the mean squared
    distance of all pairs (Gretton et al. 2012; Long et al. 2015). It is 0 for equal samples, at most 2 per kernel."""
    rows = torch.cat([one, other])
    rows = rows - rows.detach().mean(0)  # a common offset would cost digits
    squares = rows.square().sum(1)
    apart = (squares[:, None] + squares[None, :] - 2 * rows @ rows.T).clamp(min=0)
    apart = apart * (1 - torch.eye(len(rows), dtype=rows.dtype, device=rows.device))
    width = (apart.detach().sum() / (len(rows) * (len(rows) - 1))).clamp(min=1e-12)
    kernel = torch.stack([torch.exp(-apart / (band * width)) for band in BANDS]).sum(0)
    n = len(one)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


def sample_seen_labels(weights: Bundle, count: int, key: Tensor) -> Tensor:
    """Return `count` labels that take the classes the site has seen in turn, from a random one on."""
    times = weights["buffers"][f"{AUX_PREFIX}{MEANS}.times"]
    order = torch.argsort((times == 0).to(torch.int64), stable=True)
    many = (times > 0).sum().clamp(min=1)
    begin = (hash_uniform(key, 1) * many).to(torch.int64)
    return order[(begin + torch.arange(count, device=times.device)) % many]


def one_hot(labels: Tensor, weights: Bundle, like: Tensor) -> Tensor:
    classes = torch.arange(len(weights["buffers"][f"{AUX_PREFIX}{MEANS}.times"]), device=labels.device)
    return (labels[:, None] == classes).to(like.dtype)


def _site_features(weights: Bundle, v: Tensor, labels: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the site's features with their labels, and the running means for labels of all classes alike."""
    y = sample_seen_labels(weights, max(2, len(labels)), key)
    return torch.cat([v, weights["buffers"][f"{AUX_PREFIX}{MEANS}.value"][y]]), torch.cat([labels, y])


def _generate_features(
    network: Network, weights: Bundle, y: Tensor, like: Tensor, key: Tensor, eval_mode: bool = False
) -> Tensor:
    classes = one_hot(y, weights, like)
    latent = weights["model"][f"{AUX_PREFIX}{GENERATOR}.enter.weight"].shape[-1] - classes.shape[1]
    noise = hash_uniform(key, len(y) * latent).reshape(len(y), latent).to(like.dtype)
    return network.auxiliary(weights, GENERATOR, noise, classes, eval_mode=eval_mode)


def _dropout_key(weights: Bundle, reference: Bundle, which: int) -> Tensor:
    return reference["scalars"]["key"] + (weights["buffers"][f"{AUX_PREFIX}{MEANS}.times"].sum() << 8) + which
