"""Digits drawn from strokes, as many as wanted: a public set that holds nobody's handwriting.

Each class has a few ways in which people write it (`SKELETONS`), as curves through given points. Every image moves the
points at random, slants, turns and bends the curve, and draws it with a pen of random width. Images are prepared as
MNIST's are (LeCun et al., Proc. IEEE 86(11), 1998): the ink fits a square of 20 of 28 pixels, and its centre of mass is
the image's centre.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from polyclinic.core import Stream
from polyclinic.data.datasets.base import Dataset
from polyclinic.data.examples import Collection
from polyclinic.data.options import Options

CLASSES = tuple("0123456789")
SKELETONS = (
    ("50 21 14 17 39 69 87 84 71 40", "71 40 12 16 39 69 86 82 60 31", "40 22 15 28 59 77 74 61 30"),
    ("50 59", "50 54 59", "50 59", "50 59", "33 50 50 59", "42 50 50 59 / 29 79"),
    (
        "12 20 50 82 73 46 19 19 89",
        "12 30 70 83 64 37 18 17 36 58 79 97",
        "11 40 81 84 37 09 09 59 99",
        "13 21 61 73 56 28 07 26 58 98",
        "21 60 82 64 28 19 08 27 48 79 88",
    ),
    (
        "11 40 80 82 54 34 34 54 86 88 59 08",
        "10 80 80 44 44 86 78 39 08",
        "11 50 82 64 45 35 45 75 88 59 08",
        "21 50 71 63 44 44 65 77 69 39 18",
    ),
    (
        "20 15 15 95 / 82 69",
        "60 06 06 96 / 60 69",
        "10 13 26 55 84 / 80 74 69",
        "20 14 25 75 80 80 79",
        "21 14 16 46 95 / 71 74 59",
        "60 33 06 06 56 96 / 72 69",
    ),
    (
        "80 20 20 14 14 54 86 78 49 08",
        "20 14 14 53 86 78 39 08 / 20 90",
        "81 31 24 54 76 68 39 08",
        "20 14 14 53 75 77 59 18 / 21 81",
        "90 40 40 34 64 76 68 39 09",
    ),
    (
        "70 32 15 17 49 78 76 54 26 17",
        "60 24 17 39 69 87 65 35 17",
        "50 23 16 38 59 78 76 55 27 18",
        "80 41 14 07 29 69 88 76 45 17",
    ),
    (
        "10 80 80 49",
        "11 20 80 80 54 49",
        "10 80 80 49 / 24 74",
        "12 10 80 80 39",
        "02 20 50 80 80 53 49",
        "11 41 81 81 65 59",
    ),
    (
        "70 30 12 34 66 88 59 29 17 26 64 82 70",
        "50 21 23 54 73 81 50 / 54 27 28 59 88 77 54",
        "81 40 12 34 66 78 49 18 36 64 92",
        "80 50 22 34 65 77 69 39 27 36 63 81 70",
    ),
    (
        "81 40 12 24 54 82 81 81 79",
        "80 40 12 24 55 83 81 84 77 59 29",
        "70 30 11 13 34 64 81 80 87 59",
        "72 51 22 13 34 63 72 70 66 59",
        "60 21 12 24 54 71 60 71 75 69",
    ),
)
"""The ways to write each digit, one or several times as often as others: curves through points "xy" (y downwards, from
0 to 9) in a pen's order, with / where the pen is lifted. A point that is given twice is a corner."""
DENSITY = 30
"""Points along a curve of the length of a skeleton's side."""
INK = 0.75
"""How far a point's ink spreads; this and the next one in pixels of 28."""
INK_WIDTH = 1.15
"""Half the width of an average pen."""


class DrawnDigitsOptions(Options):
    number: int = Field(20_000, ge=100, le=1_000_000)
    """Images in all, as many of each class."""
    size: int = Field(28, ge=14, le=256)
    """Height and width."""


def draw_digits(options: DrawnDigitsOptions, stream: Stream, folder: Path | None = None) -> Collection:  # noqa: ARG001
    """Draw equally many images of each class, in random order."""
    order = torch.randperm(options.number, generator=stream.child("order").generator())
    labels = torch.arange(options.number) % len(CLASSES)
    images = torch.empty(options.number, 1, options.size, options.size, dtype=torch.uint8)
    for label, skeletons in enumerate(SKELETONS):
        rows = (labels == label).nonzero().squeeze(1)
        for way, skeleton in enumerate(skeletons):
            generator = stream.child("digit", label, way).generator()
            for chunk in torch.split(rows[way :: len(skeletons)], 500):
                images[chunk, 0] = _draw_images(skeleton, len(chunk), options.size, generator)
    return Collection(
        images=images[order],
        labels=labels[order],
        classes=CLASSES,
        patients=tuple(f"drawing-{row}" for row in range(options.number)),
    )


def _draw_images(skeleton: str, number: int, size: int, generator: torch.Generator) -> Tensor:
    curves = [_draw_curve(stroke.split(), number, generator) for stroke in skeleton.split("/")]
    points = _bend_curves(torch.cat(curves, 1), generator)
    lengths = torch.cat([_point_lengths(part) for part in torch.split(points, [c.shape[1] for c in curves], 1)], 1)
    width = (INK_WIDTH * torch.exp(0.3 * torch.randn(number, 1, 1, generator=generator))).clamp(0.55, 2.6)
    return _draw_ink(*_fit_points(points, lengths, width), width, size, generator)


def _draw_curve(stroke: list[str], number: int, generator: torch.Generator) -> Tensor:
    """Return points along `number` variations of a stroke: a Catmull-Rom spline through moved knots."""
    knots = torch.tensor([[float(digit) for digit in knot] for knot in stroke]) / 9
    care = torch.exp(0.4 * torch.randn(number, 1, 1, generator=generator))
    move = 0.045 * care * torch.randn(number, *knots.shape, generator=generator)
    for row in range(1, len(stroke)):
        if stroke[row] == stroke[row - 1]:  # a corner
            move[:, row] = move[:, row - 1]
    return _spline_matrix(knots) @ (knots + move)


def _spline_matrix(knots: Tensor) -> Tensor:
    """Return the weights of the knots (points × knots) in points about 1/`DENSITY` apart."""
    padded = torch.cat([torch.eye(len(knots))[:1], torch.eye(len(knots)), torch.eye(len(knots))[-1:]])
    rows = []
    for before in range(len(knots) - 1):
        count = math.ceil(DENSITY * float(torch.dist(knots[before], knots[before + 1])))
        t = (torch.arange(count) / max(count, 1))[:, None]
        a, b, c, d = padded[before : before + 4]
        rows.append(b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a))))
    return torch.cat([*rows, torch.eye(len(knots))[-1:]])


def _bend_curves(points: Tensor, generator: torch.Generator) -> Tensor:
    """Slant, turn, stretch and bend each image's curves."""
    number = len(points)
    slant, turn, stretch = torch.randn(3, number, generator=generator)
    x, y = (points - 0.5).unbind(-1)
    for _ in range(2):  # smooth waves
        wave = 0.03 * torch.randn(2, number, 1, generator=generator)
        down, across, phase = (4 * torch.randn(3, number, 1, generator=generator)).unbind()
        ripple = torch.sin(down * y + across * x + phase)
        x, y = x + wave[0] * ripple, y + wave[1] * ripple
    x = x * 0.72 * torch.exp(0.18 * stretch)[:, None] - (0.16 + 0.2 * slant)[:, None] * y
    cos, sin = (0.1 * turn).cos()[:, None], (0.1 * turn).sin()[:, None]
    return torch.stack([cos * x - sin * y, sin * x + cos * y], -1)


def _point_lengths(points: Tensor) -> Tensor:
    """Return the length of curve that each point stands for."""
    steps = (points[:, 1:] - points[:, :-1]).norm(dim=-1)
    return (F.pad(steps, (1, 0)) + F.pad(steps, (0, 1))) / 2


def _fit_points(points: Tensor, lengths: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the ink (in pixels of 28) to a square of 20, and put its centre of mass into the middle."""
    low, high = points.amin(1, keepdim=True), points.amax(1, keepdim=True)
    scale = (20 - 2 * width) / (high - low).amax(2, keepdim=True)
    centre = (points * lengths[..., None]).sum(1, keepdim=True) / lengths[..., None].sum(1, keepdim=True)
    return scale * (points - centre), scale[..., 0] * lengths


def _draw_ink(points: Tensor, lengths: Tensor, width: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return grey values (n × size × size): white where the curve is nearer than half the pen's width.

    Each point of the curve spreads a Gaussian of ink; along a line their sum is exp(−d² / 2·INK²), with the distance d
    from it, which the logarithm gives back.
    """
    place = (torch.arange(size) + 0.5) * (28 / size) - 14
    x, y = (torch.exp(-((points[..., axis, None] - place) ** 2) / (2 * INK**2)) for axis in (0, 1))
    ink = (y * (lengths / (INK * math.sqrt(2 * math.pi)))[..., None]).mT @ x
    distance = INK * (-2 * ink.clamp(1e-30, 1).log()).sqrt()
    edge = 0.15 + 0.2 * torch.rand(len(points), 1, 1, generator=generator)
    grey = torch.sigmoid((width - distance) / edge)
    return (255 * grey).round().to(torch.uint8)


DATASET = Dataset(
    options=DrawnDigitsOptions, licence="Apache-2.0 (part of polyclinic)", classes=CLASSES, load=draw_digits
)
