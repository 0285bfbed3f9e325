"""Drawing breasts with lesions, many at once. Lengths are shares of the image's height; grey values are about 0..1."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
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

    def select_rows(self, index: Tensor | slice) -> Cases:
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
    vertical = torch.fft.fftfreq(size, 1 / size).reshape(-1, 1)
    return torch.hypot(vertical, torch.fft.rfftfreq(size, 1 / size))


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
    softness = 0.006 + 0.02 * c.malignancy
    return torch.sigmoid((c.radius * edge - distance) / softness)


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
        ahead = dx * cos + dy * sin > 0
        torch.maximum(rays, profile.mul_(reach).mul_(ahead).mul_(visible), out=rays)
    return 0.8 * rays


def _draw_calcifications(c: Cases, dx: Tensor, dy: Tensor, generator: torch.Generator) -> Tensor:
    """A cluster of bright specks in some lesions, more often in malignant ones."""
    clustered = _draw_uniform(len(c), 1, 0.0, 1.0, generator)[:, 0] < 0.1 + 0.4 * c.malignancy
    across, down = _draw_uniform(len(c), 2 * CALCIFICATIONS, -1.0, 1.0, generator).chunk(2, dim=1)
    size = max(0.006, 0.6 / dx.shape[-1])
    columns = torch.exp(-((dx[:, None] - c.radius[:, None] * across) ** 2) / (2 * size**2))
    rows = torch.exp(-((dy[:, None] - c.radius[:, None] * down) ** 2) / (2 * size**2))
    specks = torch.einsum("nsyi,nsix->nyx", rows, columns)
    return 0.3 * clustered * specks
