"""Scanners of different vendors, which turn the same tissue into different grey values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.data.builtin.phantom_anatomy import frequency_grid


@dataclass(frozen=True)
class Vendor:
    """The response of one scanner. Lengths are relative to the image's height."""

    gamma: float = 1.0
    slope: float = 0.0
    """Above 0 an S-shaped film curve, below 0 its inverse, which flattens the middle greys."""
    window: tuple[float, float] = (0.0, 1.0)
    """Grey values shown as black and as white."""
    blur: float = 0.0
    sharpen: float = 0.0
    """Strength of unsharp masking."""
    noise: float = 0.02
    grain: float = 0.0
    """Correlation length of the noise."""
    inverted: bool = False
    """Raw images ("for processing"), where dense tissue is dark."""


VendorName = Literal["selenium", "silicon", "photon-counting", "phosphor-plate", "film"]
VENDORS: Mapping[VendorName, Vendor] = {
    "selenium": Vendor(window=(0.0, 0.8), sharpen=0.5, noise=0.015),
    "silicon": Vendor(gamma=0.55, window=(0.0, 0.9), blur=0.006, noise=0.015, grain=0.008),
    "photon-counting": Vendor(inverted=True, gamma=1.6, window=(0.0, 0.8), sharpen=1.0, noise=0.02),
    "phosphor-plate": Vendor(slope=-4.0, window=(-0.2, 0.8), blur=0.010, noise=0.015, grain=0.012),
    "film": Vendor(slope=6.0, window=(0.0, 0.7), blur=0.008, noise=0.03, grain=0.02),
}


def acquire_images(tissue: Tensor, vendor: Vendor, generator: torch.Generator) -> Tensor:
    """Return the images that the scanner stores: uint8, n × 1 × height × width."""

    def optics(frequency: Tensor) -> Tensor:
        unsharp = 1 + vendor.sharpen * (1 - _gaussian_response(frequency, 0.03))
        return _gaussian_response(frequency, vendor.blur) * unsharp

    image = _apply_filter(tissue, optics) + vendor.noise * _draw_grain(tissue.shape, vendor.grain, generator)
    low, high = vendor.window
    shown = ((image - low) / (high - low)).clamp(0, 1)
    grey = _apply_curve(1 - shown if vendor.inverted else shown, vendor)
    return (255 * grey).round().to(torch.uint8)[:, None]


def _gaussian_response(frequency: Tensor, length: float) -> Tensor:
    return torch.exp(-2 * (math.pi * frequency * length) ** 2)


def _apply_filter(image: Tensor, response: Callable[[Tensor], Tensor]) -> Tensor:
    """Filtered in the frequency domain, mirrored at the borders so that they do not see the opposite side."""
    size = image.shape[-1]
    margin = size // 8
    padded = F.pad(image, (margin,) * 4, mode="reflect")
    whole = size + 2 * margin
    frequency = frequency_grid(whole) * (size / whole)
    filtered: Tensor = torch.fft.irfft2(torch.fft.rfft2(padded) * response(frequency), s=(whole, whole))
    return filtered[:, margin:-margin, margin:-margin]


def _draw_grain(shape: torch.Size, length: float, generator: torch.Generator) -> Tensor:
    """Noise of unit variance, whatever its correlation length."""
    noise = torch.randn(shape, generator=generator)
    if length:
        noise = _apply_filter(noise, lambda frequency: _gaussian_response(frequency, length))
    return noise / noise.std()


def _apply_curve(image: Tensor, vendor: Vendor) -> Tensor:
    image = image**vendor.gamma
    if vendor.slope == 0:
        return image
    steep = abs(vendor.slope)
    edge = 1 / (1 + math.exp(steep / 2))
    if vendor.slope > 0:
        return (torch.sigmoid(steep * (image - 0.5)) - edge) / (1 - 2 * edge)
    return torch.logit(edge + (1 - 2 * edge) * image) / steep + 0.5
