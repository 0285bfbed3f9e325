"""Measures the similarity of images with pixels in [0, 1]: tensors of n × channels × height × width.

SSIM: Z. Wang, A. C. Bovik, H. R. Sheikh, E. P. Simoncelli: "Image quality assessment: from error visibility to
structural similarity", IEEE TIP 13(4), 2004: a Gaussian window of 11 × 11 with σ = 1.5, K₁ = 0.01, K₂ = 0.03, where the
window lies wholly within the image; the mean over channels. Smaller images get the largest odd window that fits.

L2: √(Σ(a − b)² / number of values), in [0, 1]. So N. Carlini et al., "Extracting training data from diffusion models"
(USENIX Security 2023), normalise it, whose threshold FedMP takes as 0.1; FedMP does not say how it normalises.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03
THRESHOLD = 0.1
"""The L2 distance below which a reconstruction counts as the image itself."""


def mean_ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the SSIM of each pair: 1 for equal images."""
    a, b = first.double(), second.double()
    weights = gaussian_window(min(a.shape[-2:]), a.device)
    mean_a, mean_b, aa, bb, ab = (_window_average(t, weights) for t in (a, b, a * a, b * b, a * b))
    variances = (aa - mean_a.square()) + (bb - mean_b.square())
    similarity = (2 * mean_a * mean_b + K1**2) * (2 * (ab - mean_a * mean_b) + K2**2)
    return (similarity / ((mean_a.square() + mean_b.square() + K1**2) * (variances + K2**2))).mean((1, 2, 3))


def gaussian_window(side: int, device: torch.device | None = None) -> Tensor:
    """Return the Gaussian window along one side; it is the same along the other."""
    width = min(WINDOW, side if side % 2 else side - 1)
    at = torch.arange(width, device=device, dtype=torch.float64) - width // 2
    weights = (-at.square() / (2 * SIGMA**2)).exp()
    return weights / weights.sum()


def _window_average(images: Tensor, weights: Tensor) -> Tensor:
    down = F.conv2d(images.flatten(0, 1).unsqueeze(1), weights[None, None, :, None])
    found = F.conv2d(down, weights[None, None, None, :])
    return found.reshape(*images.shape[:2], *found.shape[-2:])


def rms_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the root mean square difference of each pair."""
    return (first - second).double().square().flatten(1).mean(1).sqrt()


def identification_rate(guesses: Tensor, originals: Tensor) -> float:
    """Return the share of guesses that are nearer to their own original than to any other."""
    nearest = torch.cdist(guesses.flatten(1), originals.flatten(1)).argmin(1)
    return float((nearest == torch.arange(len(guesses), device=guesses.device)).double().mean())


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2·(Σ₁Σ₂)^½) of two sets of feature vectors, as in FID.

    With Σ = AᵀA, tr (Σ₁Σ₂)^½ is the sum of singular values of A₁A₂ᵀ: exact, also where there are fewer vectors than
    features, and no root of a matrix is needed.
    """
    a, b = (_centre_rows(rows) for rows in (first, second))
    gap = (first.double().mean(0) - second.double().mean(0)).square().sum()
    spread = a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(a @ b.T).sum()
    return max(0.0, float(gap + spread))


def _centre_rows(rows: Tensor) -> Tensor:
    flat = rows.double().flatten(1)
    return (flat - flat.mean(0)) / math.sqrt(max(len(flat) - 1, 1))
