"""Random augmentation of training images, all images of a batch at once.

Its parameters are drawn on the CPU, so a run sees the same images whatever its device.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core import Augment, Stream
from polyclinic.training.keyed_dropout import hash_uniform
from polyclinic.training.prefetch import to_device


@dataclass(frozen=True)
class AugmentParameters:
    """The augmentation of each image of a batch: one number per image, on the CPU."""

    rotation: Tensor
    """Degrees, counter-clockwise."""
    flip: Tensor
    """Whether left and right are exchanged."""
    crop_side: Tensor
    """The fraction of each side that the crop keeps."""
    shift_x: Tensor
    """How far the crop's centre lies to the right of the image's, in half sides: between ±(1 − crop_side)."""
    shift_y: Tensor
    """How far the crop's centre lies below the image's, likewise."""
    brightness: Tensor
    """The number of the image's own standard deviations that is added."""
    contrast: Tensor
    """The factor on each pixel's difference from the image's mean."""
    blur: Tensor
    """σ of a Gaussian, in pixels."""


def augment_images(images: Tensor, options: Augment, stream: Stream, keys: Tensor | None = None) -> Tensor:
    """Augment each image independently.

    Args:
        images: n × channels × height × width.
        options: Which changes to make, and how large they may be.
        stream: The stream of this batch; equal streams give equal changes.
        keys: A key for each image, on the CPU. Then an image's changes follow from its key alone: from nothing else in
            the batch, not even by rounding.
    """
    if keys is None:
        return apply_parameters(images, draw_parameters(options, len(images), stream))
    return apply_parameters(images, draw_parameters(options, len(images), stream, keys), options)


def draw_parameters(options: Augment, count: int, stream: Stream, keys: Tensor | None = None) -> AugmentParameters:
    """Draw the parameters of `count` images. Setting one option leaves the draws of the others as they were."""
    if keys is None:
        drawn = torch.rand(count, 8, dtype=torch.float64, generator=stream.generator())
    else:
        drawn = hash_uniform(keys, 8).double()
    coin, side, blur, *rest = drawn.unbind(1)
    turn, across, down, brightness, contrast = (2 * share - 1 for share in rest)
    kept = 1 - options.crop * side
    return AugmentParameters(
        rotation=options.rotation * turn,
        flip=(coin < 0.5) & options.flip,
        crop_side=kept,
        shift_x=(1 - kept) * across,
        shift_y=(1 - kept) * down,
        brightness=options.brightness * brightness,
        contrast=1 + options.contrast * contrast,
        blur=options.blur * blur,
    )


def apply_parameters(images: Tensor, changes: AugmentParameters, largest: Augment | None = None) -> Tensor:
    """Apply brightness and contrast, then rotation, crop and flip, then blur.

    Brightness and contrast come first, as they depend on the mean and deviation of the uncropped image. What would
    change no image of the batch is left out; with `largest`, what could not change any.
    """
    if largest is None:
        adjusts = bool(changes.brightness.any()) or not bool((changes.contrast == 1).all())
        warps = bool(changes.rotation.any()) or bool(changes.flip.any()) or not bool((changes.crop_side == 1).all())
        widest = float(changes.blur.max()) if len(changes.blur) else 0.0
    else:
        adjusts = bool(largest.brightness or largest.contrast)
        warps, widest = bool(largest.rotation or largest.flip or largest.crop), largest.blur
    images = adjust_intensity(images, changes) if adjusts else images
    images = warp_images(images, changes) if warps else images
    radius = int(4 * widest + 0.5)
    return blur_images(images, changes.blur, radius) if radius else images


def adjust_intensity(images: Tensor, changes: AugmentParameters) -> Tensor:
    """Return mean + contrast·(image − mean) + brightness·deviation, with mean and deviation over all of an image."""
    contrast, brightness = (_to_images(images, value).unsqueeze(1) for value in (changes.contrast, changes.brightness))
    pixels = images.flatten(1)
    mean = pixels.mean(1, keepdim=True)
    centred = pixels - mean
    # On one core torch.std takes ten times as long.
    deviation = torch.linalg.vector_norm(centred, dim=1, keepdim=True) / math.sqrt(pixels.shape[1])
    return centred.mul_(contrast).add_(mean + brightness * deviation).reshape(images.shape)


def warp_images(images: Tensor, changes: AugmentParameters) -> Tensor:
    """Rotate, crop and flip in one bilinear interpolation; beyond the image its edge is repeated."""
    height, width = images.shape[-2:]
    place = _to_images(images, affine_matrix(changes, height / width))
    across = place[..., 0, None] * _pixel_centres(width, images)
    down = place[..., 1, None] * _pixel_centres(height, images) + place[..., 2, None]
    # Not by affine_grid: it takes seven times as long, and rounds where matrix products may be rounded.
    grid = (down[..., :, None] + across[..., None, :]).movedim(1, -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def affine_matrix(changes: AugmentParameters, aspect: float) -> Tensor:
    """Return the maps from output to input coordinates, (x, y, 1) ↦ (x, y) in half sides from the centre: n × 2 × 3."""
    angle, side, nothing = torch.deg2rad(changes.rotation), changes.crop_side, torch.zeros_like(changes.crop_side)
    cos, sin = angle.cos(), angle.sin()
    window = _stack_rows([side.where(~changes.flip, -side), nothing, changes.shift_x], [nothing, side, changes.shift_y])
    return _stack_rows([cos, -sin * aspect], [sin / aspect, cos]) @ window


def blur_images(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Blur each image by a Gaussian of its own, down and then across; beyond the image its edge is repeated."""
    kernel = gaussian_kernels(sigma, radius)
    count, channels, height, width = images.shape
    padded = F.pad(images, (radius, radius, radius, radius), mode="replicate")
    # One image of n·channels channels, each with its own kernel: a grouped convolution takes them all at once.
    planes = padded.reshape(1, count * channels, height + 2 * radius, width + 2 * radius)
    weights = _to_images(images, kernel).repeat_interleave(channels, 0)[:, None, None, :]
    upright = F.conv2d(planes, weights.transpose(-1, -2), groups=count * channels)
    return F.conv2d(upright, weights, groups=count * channels).reshape(images.shape)


def gaussian_kernels(sigma: Tensor, radius: int) -> Tensor:
    """Return a kernel of sum 1 for each σ, cut off at 4σ (to the nearest pixel), all of length 2·radius + 1."""
    reach = (4 * sigma + 0.5).floor()
    distance = torch.arange(-radius, radius + 1, dtype=sigma.dtype).abs()
    # σ = 0 would be 0/0 at the middle; below 1/8 the kernel ends there anyway.
    bell = torch.exp(-((distance / sigma.clamp(min=0.1)[:, None]) ** 2) / 2) * (distance <= reach[:, None])
    return bell / bell.sum(1, keepdim=True)


def _pixel_centres(size: int, images: Tensor) -> Tensor:
    """Return the centres of a row's pixels, in half sides from the row's centre."""
    return (2 * torch.arange(size, dtype=images.dtype, device=images.device) + 1) / size - 1


def _stack_rows(*rows: list[Tensor]) -> Tensor:
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _to_images(images: Tensor, drawn: Tensor) -> Tensor:
    """Cast to the images' type, then move to their device: not every device has float64."""
    return to_device(drawn.to(images.dtype), images.device)
