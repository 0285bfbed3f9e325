"""Drawing breasts with lesions, many at once, and the scanners of different vendors, which give them other grey values.

Lengths are relative to the image's height; grey values are about 0 to 1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SPICULES = 12
CALCIFICATIONS = 8


@dataclass(frozen=True)
class Cases:
    """The content of each image: one entry per image in every field."""

    lesion: Tensor
    """1 where there is a lesion, else 0."""
    malignancy: Tensor
    """From 0 (round, smooth, sharp) to 1 (irregular, spiculated, blurred); the classes overlap a little."""
    density: Tensor
    """Share of fibroglandular tissue."""
    depth: Tensor
    """Chest wall to nipple."""
    height: Tensor
    """Half the length along the chest wall."""
    radius: Tensor
    place: Tensor
    """How far from the chest wall the lesion lies, as a share of the depth."""
    oblique: Tensor
    """True: MLO-like, with the pectoral muscle in the upper corner. False: CC-like."""
    right: Tensor
    """True: chest wall on the right of the image."""

    def __len__(self) -> int:
        return len(self.lesion)

    def select_rows(self, index: Tensor | slice) -> "Cases":
        return Cases(*(getattr(self, field.name)[index] for field in fields(self)))


def draw_anatomy(cases: Cases, size: int, generator: torch.Generator) -> Tensor:
    """Draw images (n × size × size) before the scanner's response curve, blur and noise."""
    c = Cases(*(getattr(cases, field.name).reshape(-1, 1, 1) for field in fields(cases)))
    x = ((torch.arange(size) + 0.5) / size).reshape(1, 1, -1)
    y = ((torch.arange(size) + 0.5) / size - 0.5).reshape(1, -1, 1)
    sag = torch.where(c.oblique, 0.22, 0.0) * x
    radial = ((x / c.depth) ** 2 + ((y - sag) / c.height) ** 2).sqrt()
    inside = torch.sigmoid((1 - radial) * c.depth * 80)
    thickness = (1 - radial.clamp(max=1) ** 4).sqrt()
    image = inside * (0.12 + thickness * _draw_tissue(c, radial, size, generator))
    image = image + torch.where(c.oblique, 0.32, 0.0) * _draw_muscle(x, y, len(cases), generator)
    image = image + c.lesion * inside * _draw_lesion(c, x, y, generator)
    return torch.where(c.right, image.flip(-1), image)


def spectral_noise(count: int, size: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Unit-variance noise whose power falls as 1 / frequency^exponent; about 3 is measured in mammograms."""
    white = torch.randn(count, size, size, generator=generator)
    response = frequency_grid(size).clamp(min=1.0) ** (-exponent / 2)
    response[0, 0] = 0
    noise = torch.fft.irfft2(torch.fft.rfft2(white) * response, s=(size, size))
    return torch.div(noise, noise.std(dim=(1, 2), keepdim=True))


def frequency_grid(size: int) -> Tensor:
    """Cycles per image height, on the grid of `rfft2`."""
    return torch.hypot(torch.fft.fftfreq(size, 1 / size).reshape(-1, 1), torch.fft.rfftfreq(size, 1 / size))


def _draw_uniform(count: int, columns: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, columns, 1, 1, generator=generator)


def _draw_tissue(c: Cases, radial: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Fat, with glandular clouds behind the nipple and fine strands everywhere."""
    clouds = spectral_noise(len(c), size, 3.0, generator)
    strands = spectral_noise(len(c), size, 1.8, generator)
    gland = torch.sigmoid(2.5 * (clouds + 3 * (c.density - 0.5))) * torch.exp(-((radial / 0.75) ** 4))
    return 0.16 + 0.24 * gland + 0.02 * strands


def _draw_muscle(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    width, length = _draw_uniform(count, 2, 0.25, 0.4, generator).unbind(1)
    return torch.sigmoid(60 * (width * (1 - (y + 0.5) / (1.6 * length)) - x))


def _draw_lesion(c: Cases, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    count = len(c)
    offset, aspect = _draw_uniform(count, 2, 0.0, 1.0, generator).unbind(1)
    centre_x = c.place * c.depth
    reach = c.height * (1 - c.place**2).sqrt() - c.radius
    centre_y = (2 * offset - 1) * 0.35 * reach + torch.where(c.oblique, 0.22, 0.0) * centre_x
    dx, dy = x - centre_x, (y - centre_y) * (1 + 0.3 * aspect)
    distance = torch.hypot(dx, dy)
    mass = _draw_mass(c, distance, torch.atan2(dy, dx), generator)
    spicules = _draw_spicules(c, distance, dx, dy, generator)
    contrast = 0.12 + 0.04 * torch.rand(count, 1, 1, generator=generator) + 0.18 * c.malignancy
    return contrast * torch.maximum(mass, spicules) + _draw_calcifications(c, dx, dy, generator)


def _draw_mass(c: Cases, distance: Tensor, angle: Tensor, generator: torch.Generator) -> Tensor:
    edge = torch.ones_like(angle)
    for order in range(2, 7):
        weight, phase = _draw_uniform(len(c), 2, 0.0, 1.0, generator).unbind(1)
        edge += 0.28 * c.malignancy * weight * torch.cos(order * angle + 2 * math.pi * phase)
    return torch.sigmoid((c.radius * edge - distance) / (0.006 + 0.02 * c.malignancy))


def _draw_spicules(c: Cases, distance: Tensor, dx: Tensor, dy: Tensor, generator: torch.Generator) -> Tensor:
    """Thin rays from the centre; how many of them show grows with malignancy."""
    rays = torch.zeros_like(distance)
    start, length, shown = _draw_uniform(len(c), 3 * SPICULES, 0.0, 1.0, generator).chunk(3, dim=1)
    turn = 2 * math.pi * torch.rand(len(c), 1, 1, generator=generator)
    width = 0.008 + 0.1 * distance.clamp(max=0.05)
    for ray in range(SPICULES):
        angle = turn + 2 * math.pi * (ray + 0.7 * start[:, ray]) / SPICULES
        cos, sin = angle.cos(), angle.sin()
        # In place, because at this size fresh memory costs more than the arithmetic.
        profile = (dy * cos - dx * sin).div_(width).square_().clamp_(max=20).neg_().exp_()
        reach = (c.radius * (1.3 + 1.2 * length[:, ray]) - distance).div_(0.02).sigmoid_()
        visible = shown[:, ray] < 1.4 * c.malignancy - 0.4
        torch.maximum(rays, profile.mul_(reach).mul_(dx * cos + dy * sin > 0).mul_(visible), out=rays)
    return 0.8 * rays


def _draw_calcifications(c: Cases, dx: Tensor, dy: Tensor, generator: torch.Generator) -> Tensor:
    """A cluster of bright specks in some lesions, more often in malignant ones."""
    clustered = _draw_uniform(len(c), 1, 0.0, 1.0, generator)[:, 0] < 0.1 + 0.4 * c.malignancy
    across, down = _draw_uniform(len(c), 2 * CALCIFICATIONS, -1.0, 1.0, generator).chunk(2, dim=1)
    size = max(0.006, 0.6 / dx.shape[-1])
    columns = torch.exp(-((dx[:, None] - c.radius[:, None] * across) ** 2) / (2 * size**2))
    rows = torch.exp(-((dy[:, None] - c.radius[:, None] * down) ** 2) / (2 * size**2))
    return 0.3 * clustered * torch.einsum("nsyi,nsix->nyx", rows, columns)


class Vendor(NamedTuple):
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
