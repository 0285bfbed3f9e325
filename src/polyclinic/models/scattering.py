"""Fixed features for private learning: wavelet scattering, and small networks that train on top of it.

J. Bruna, S. Mallat: "Invariant Scattering Convolution Networks", IEEE TPAMI 35(8), 2013; filters and order of the
coefficients as in E. Oyallon, S. Mallat, CVPR 2015 (and the Kymatio library). F. Tramèr, D. Boneh: "Differentially
Private Learning Needs Better Features (or Much More Data)", ICLR 2021, found that under a small ε a linear layer on
these features is better than networks that must learn their features.

The features have no weights and each depends on one image only, so they cost no privacy and are never sent. Their mean
and main directions over many images are removed or shrunk: under a clipping norm, a common mean and a few directions of
large variance use up the signal of the others. Statistics of the sites' images would cost privacy; ours are those of
random pen strokes, drawn here.
"""

from collections import OrderedDict
from contextlib import nullcontext
from functools import cache
from math import pi, prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.core import Stream
from polyclinic.models.classifier import Classifier

SCALES, ANGLES = 2, 8
PATHS = 1 + SCALES * ANGLES + ANGLES**2
GROUPS = 27
HIDDEN = 32
FLOOR = 1e-3
"""Directions with less than this fraction of the variance are left as they are."""


class Scattering(nn.Module):
    """Averages x, |x ⋆ ψ| and ||x ⋆ ψ| ⋆ ψ'| over 2^scales pixels, where ψ' is the wider wavelet.

    n × channels × size × size → n × (channels · paths) × side × side, with side = ⌈size / 2^scales⌉. A channel's paths
    are order 0, order 1 by (scale, angle), and order 2 by (scale, wider scale, angle, other angle).
    """

    def __init__(self, channels: int, size: int, scales: int = SCALES, angles: int = ANGLES) -> None:
        super().__init__()
        step = 2**scales
        self.scales, self.size, self.side = scales, size, -(-size // step)
        self.paths = 1 + angles * scales + angles**2 * scales * (scales - 1) // 2
        self.shape = (channels * self.paths, self.side, self.side)
        self.margin = (step, step * (self.side + 1) - size)
        """Reflected pixels before and after the image, as a Fourier transform continues it periodically."""
        padded = step * (self.side + 2)
        for scale in range(scales):
            waves = torch.stack([_morlet_filter(padded, scale, angle, angles) for angle in range(angles)])
            self.register_buffer(f"waves{scale}", waves.float(), persistent=False)
            self.register_buffer(f"mean{scale}", _averaging_matrix(padded, scale, scales).float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = F.pad(images, (*self.margin, *self.margin), mode="reflect")
        spectrum = torch.fft.fft2(pixels)
        zeroth, first, second = [self._average_maps(pixels, 0)], [], []
        for scale in range(self.scales):
            moduli = self._wavelet_moduli(spectrum, 0, scale)
            first.append(self._average_maps(moduli, scale))
            again = torch.fft.fft2(moduli) if scale + 1 < self.scales else moduli
            for wider in range(scale + 1, self.scales):
                second.append(self._average_maps(self._wavelet_moduli(again, scale, wider), wider))
        paths = [path.reshape(*images.shape[:2], -1, self.side, self.side) for path in zeroth + first + second]
        return torch.cat(paths, 2).flatten(1, 2)

    def _wavelet_moduli(self, spectrum: Tensor, resolution: int, scale: int) -> Tensor:
        """Return |x ⋆ ψ| for all angles at every 2^scale-th pixel; x is sampled at every 2^resolution-th."""
        waves = _subsample_filters(self.get_buffer(f"waves{scale}").to(spectrum.real.dtype), resolution)
        product = spectrum.unsqueeze(-3) * waves
        for _ in range(resolution, scale):
            product = _subsample_spectrum(product)
        moduli: Tensor = torch.fft.ifft2(product).abs()
        return moduli

    def _average_maps(self, maps: Tensor, resolution: int) -> Tensor:
        mean = self.get_buffer(f"mean{resolution}").to(maps.dtype)
        return mean @ maps @ mean.mT


class FixedFeatures(nn.Module):
    """Scattering features, normalised image by image, with what random strokes have in common shrunk; mean square 1."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.scattering = Scattering(channels, size)
        self.shape = self.scattering.shape
        for name, tensor in zip(("mean", "directions", "kept"), self.compute_statistics(size), strict=True):
            self.register_buffer(name, tensor.clone(), persistent=False)

    def compute_statistics(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean of drawn images' features, directions to shrink, and the factor that is kept of each."""
        return _stroke_statistics(size)

    def prepare_images(self, images: Tensor) -> Tensor:
        """Return the images as scattering gets them."""
        return images

    def forward(self, images: Tensor) -> Tensor:
        """Return the features; inputs that are features already (computed once, before training) stay as they are."""
        if images.shape[1:] == self.shape:
            return images
        # Not in lower precision, as there are no weights that could learn to make up for it.
        with nullcontext() if images.is_meta else torch.autocast(images.device.type, enabled=False):
            return self.shrink_common_directions(
                self.scattering(self.prepare_images(images if images.dtype == torch.float64 else images.float()))
            )

    def shrink_common_directions(self, scattered: Tensor) -> Tensor:
        mean, directions, kept = (self.get_buffer(name).to(scattered.dtype) for name in ("mean", "directions", "kept"))
        centred = _normalise_paths(scattered) - mean
        shrunk = centred - (centred @ directions * (1 - kept)) @ directions.mT
        vectors = F.normalize(shrunk.reshape(-1, prod(self.shape)), dim=1) * prod(self.shape) ** 0.5
        return vectors.reshape(-1, *self.shape)


def find_fixed_features(module: nn.Module) -> FixedFeatures | None:
    """Return the part of a network that may be computed once for each image, before training; None if there is none.

    It has no weights, no randomness and no state, and the network accepts its features in the place of images. Do not
    compute it beforehand if images are augmented.
    """
    return next((part for part in module.modules() if isinstance(part, FixedFeatures)), None)


def scattering_linear(
    *, classes: int, channels: int, size: int, dropout: float, features: type[FixedFeatures] = FixedFeatures
) -> Classifier:
    fixed = features(channels, size)
    extractor = nn.Sequential(OrderedDict(fixed=fixed, flatten=nn.Flatten(), dropout=nn.Dropout(dropout)))
    width, side, _ = fixed.shape
    return Classifier(extractor, _shrink_first_weights(nn.Linear(width * side**2, classes)))


def scattering_cnn(*, classes: int, channels: int, size: int, dropout: float) -> Classifier:
    """Build one convolution on the features, with tanh: bounded activations keep gradients short (Papernot et al., AAAI
    2021)."""
    fixed = FixedFeatures(channels, size)
    width, side, _ = fixed.shape
    extractor = nn.Sequential(
        OrderedDict(
            fixed=fixed,
            conv=nn.Conv2d(width, HIDDEN, 3, padding=1),
            tanh=nn.Tanh(),
            pool=nn.AvgPool2d(2, ceil_mode=True),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(dropout),
        )
    )
    return Classifier(extractor, _shrink_first_weights(nn.Linear(HIDDEN * ((side + 1) // 2) ** 2, classes)))


def _shrink_first_weights(head: nn.Linear) -> nn.Linear:
    """Scale the random first weights down: a private run moves too little to overcome their noise."""
    with torch.no_grad():
        head.weight.mul_(0.01)
        head.bias.zero_()
    return head


def _normalise_paths(features: Tensor) -> Tensor:
    """Normalise each image and channel, in groups of paths, to length 1."""
    paths = features.reshape(-1, PATHS, *features.shape[-2:])
    return F.normalize(F.group_norm(paths, GROUPS, eps=1e-8).flatten(1), dim=1)


@cache
def _stroke_statistics(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of random strokes' features, their main directions, and the factor that is kept of each.

    The factor is √(floor / (variance + floor)). Fewer large images are drawn, so that this takes seconds at any size.
    """
    number = min(1000, max(128, round(1000 * (28 / size) ** 2)))
    features = scatter_blocks(_draw_strokes(number, size)).double()
    mean = features.mean(0)
    return mean.float(), *find_directions(features - mean, min(number // 8, features.shape[1] // 2), FLOOR)


def scatter_blocks(images: Tensor) -> Tensor:
    """Return the features of grey images before their statistics are applied, computed in blocks."""
    layer = Scattering(1, images.shape[-1])
    return torch.cat([_normalise_paths(layer(block)) for block in torch.split(images, 100)])


def find_directions(deviations: Tensor, count: int, floor: float) -> tuple[Tensor, Tensor]:
    """Return the `count` directions in which deviations (a row each) vary most, and the factor that is kept of each."""
    scaled = deviations / len(deviations) ** 0.5
    variances, mixtures = torch.linalg.eigh(scaled @ scaled.mT)
    directions = F.normalize(scaled.mT @ mixtures[:, -count:], dim=0)
    return directions.float(), (floor / (variances[-count:] + floor)).sqrt().float()


def _draw_strokes(number: int, size: int) -> Tensor:
    """Draw images of one to three joined strokes (cubic Bézier curves) around the centre."""
    generator = Stream(2013, ("strokes", size)).generator()
    corners = torch.rand(number, 3, 4, 2, generator=generator)
    corners[:, 1:, 0] = corners[:, :-1, 3]
    used = torch.arange(3) < torch.randint(1, 4, (number, 1), generator=generator)
    extent = (0.5 + 0.6 * torch.rand(number, 1, 1, 2, generator=generator)) * size
    width = (0.03 + 0.03 * torch.rand(number, 1, generator=generator)) * size
    time = torch.linspace(0, 1, 40)
    bernstein = torch.stack([(1 - time) ** 3, 3 * time * (1 - time) ** 2, 3 * time**2 * (1 - time), time**3])
    points = torch.einsum("kt,nskd->nstd", bernstein, corners) * extent
    middle = (points.mean(2) * used[..., None]).sum(1) / used.sum(1, keepdim=True)
    points = (points - middle[:, None, None] + (size - 1) / 2).where(used[..., None, None], 9.0 * size).flatten(1, 2)
    pixels = torch.cartesian_prod(torch.arange(float(size)), torch.arange(float(size)))
    nearest = torch.cat([torch.cdist(block, pixels).amin(1) for block in torch.split(points, 20)])
    return torch.sigmoid((width - nearest) * 84 / size).reshape(number, 1, size, size)


def _morlet_filter(side: int, scale: int, angle: int, angles: int) -> Tensor:
    """Return the Fourier transform (it is real) of g(u)·(exp(iξu) − β), where β makes the mean zero."""
    direction = (angles // 2 - 1 - angle) * pi / angles
    place = torch.arange(-2 * side, 3 * side, dtype=torch.float64)
    down, across = torch.meshgrid(place, place, indexing="ij")
    c, s = torch.cos(torch.tensor(direction)), torch.sin(torch.tensor(direction))
    along, orthogonal = c * down + s * across, c * across - s * down
    sigma, slant, frequency = 0.8 * 2**scale, 4 / angles, 0.75 * pi / 2**scale
    bell = torch.exp(-(along**2 + (slant * orthogonal) ** 2) / (2 * sigma**2)) * slant / (2 * pi * sigma**2)
    wave = bell * torch.exp(1j * frequency * along)
    wavelet = wave - bell * (wave.sum() / bell.sum())
    return torch.real(torch.fft.fft2(wavelet.reshape(5, side, 5, side).sum((0, 2))))


def _averaging_matrix(side: int, resolution: int, scales: int) -> Tensor:
    """Return the matrix that applies a low-pass filter, keeps every 2^scales-th pixel, and cuts the margins off."""
    sigma = 0.8 * 2 ** (scales - 1)
    place = torch.arange(-2 * side, 3 * side, dtype=torch.float64)
    bell = torch.exp(-(place**2) / (2 * sigma**2)) / (2 * pi * sigma**2) ** 0.5
    spectrum = torch.fft.fft(bell.reshape(5, side).sum(0)).real
    half = side >> (resolution + 1)
    spectrum = torch.cat([spectrum[:half], spectrum[-half:]])
    dots = torch.fft.fft(torch.eye(2 * half, dtype=torch.float64), dim=0)
    return torch.real(torch.fft.ifft(dots * spectrum[:, None], dim=0))[:: 2 ** (scales - resolution)][1:-1]


def _subsample_spectrum(spectrum: Tensor) -> Tensor:
    """Return the spectrum of every second pixel of every second row, by adding the frequencies that alias."""
    half = spectrum.shape[-1] // 2
    rows = spectrum[..., :half, :] + spectrum[..., half:, :]
    return (rows[..., :half] + rows[..., half:]) / 4


def _subsample_filters(waves: Tensor, resolution: int) -> Tensor:
    """Return the filters for an image of every 2^resolution-th pixel, by keeping its frequencies only."""
    if resolution == 0:
        return waves
    half = waves.shape[-1] >> (resolution + 1)
    rows = torch.cat([waves[..., :half, :], waves[..., -half:, :]], -2)
    return torch.cat([rows[..., :half], rows[..., -half:]], -1)
