"""Trains a decoder that maps an extractor's features back to images, on the attacker's own images."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.core import Stream
from polyclinic.core.rng import seed_generators
from polyclinic.training.fit import evaluation_batch_size

NARROW, WIDE = 16, 128
SMALLEST_SIDE = 8
"""Flat features are first turned into a map of at most this side length."""
MAX_WEIGHTS = 2**24
"""Of the layer that makes this map."""
HELD_BACK = 5
"""Every fifth of the attacker's images is held out to choose the best epoch."""

Defence = Callable[[Tensor, Stream], Tensor]
"""Changes features before they leave a site."""


@dataclass(frozen=True)
class DecoderTraining:
    """How long and how fast the decoder is trained."""

    steps: int = 300
    batch: int = 32
    lr: float = 2e-3


class Decoder(nn.Module):
    """Normalised features pass through one transposed convolution for every halving of the image; a sigmoid gives
    pixels in [0, 1]. Flat features that are as many as the pixels are treated as an image."""

    def __init__(self, features: Sequence[int], image: Sequence[int]) -> None:
        super().__init__()
        channels, self.side = image[0], image[-1]
        self.reshaped = tuple(image) if tuple(features) == (channels * self.side**2,) else tuple(features)
        flat = len(self.reshaped) == 1
        doublings = (
            max(1, count_halvings(self.side, SMALLEST_SIDE)) if flat else count_halvings(self.side, self.reshaped[-1])
        )
        widths = [min(WIDE, NARROW * 2**step) for step in range(doublings, -1, -1)]
        small = -(-self.side // 2**doublings)
        layers = [
            *(_row_to_map(self.reshaped[0], widths[0], small) if flat else []),
            nn.Conv2d(widths[0] if flat else self.reshaped[0], widths[0], 3, padding=1),
            *_refinement_block(widths[0]),
        ]
        for wide, narrow in pairwise(widths):
            layers += [nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1), *_refinement_block(narrow)]
        self.body = nn.Sequential(*layers)
        self.last = nn.Conv2d(widths[-1], channels, 3, padding=1)
        per_channel = (self.reshaped[0],) if flat else (self.reshaped[0], 1, 1)
        self.mean = nn.Buffer(torch.zeros(per_channel))
        self.deviation = nn.Buffer(torch.ones(per_channel))

    def forward(self, features: Tensor) -> Tensor:
        maps = self.body((features.reshape(-1, *self.reshaped) - self.mean) / self.deviation)
        if maps.shape[-1] != self.side:
            maps = F.interpolate(maps, size=(self.side, self.side), mode="bilinear", align_corners=False)
        return torch.sigmoid(self.last(maps))

    def fit_normalisation(self, features: Tensor) -> None:
        """Set mean and deviation to those of features that the attacker has."""
        maps = features.reshape(-1, *self.reshaped)
        over = [0] if maps.ndim == 2 else [0, 2, 3]
        self.mean.copy_(maps.mean(over).view_as(self.mean))
        deviation = maps.std(over, correction=0).view_as(self.deviation)
        self.deviation.copy_(torch.where(deviation > 0, deviation, 1.0))


def count_halvings(side: int, small: int) -> int:
    """Return how often a side must be halved, rounding up, until it is no longer than `small`."""
    return next(times for times in count() if -(-side // 2**times) <= small)


def _row_to_map(features: int, width: int, side: int) -> list[nn.Module]:
    """Return layers from a flat row to a map, in two steps where one would have too many weights."""
    values = width * side**2
    if features * values <= MAX_WEIGHTS:
        return [nn.Linear(features, values), nn.Unflatten(1, (width, side, side))]
    between = max(NARROW, MAX_WEIGHTS // (features + values))
    return [nn.Linear(features, between), nn.Linear(between, values), nn.Unflatten(1, (width, side, side))]


def _refinement_block(width: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(width), nn.ReLU()]


def train_decoder(
    features: Tensor, pixels: Tensor, training: DecoderTraining, stream: Stream, defence: Defence | None = None
) -> Decoder:
    """Train a decoder on the attacker's own pairs by mean squared error; return that of the epoch with the least error
    on held-out pairs. A defence is applied anew at every step: the attacker knows how it works."""
    device, hide = features.device, defence or (lambda values, _: values)
    held = torch.arange(len(features), device=device) % HELD_BACK == 0
    seen, held_out = (~held).nonzero().squeeze(1), held.nonzero().squeeze(1)
    with seed_generators(stream.child("first weights"), torch.device("cpu")):
        decoder = Decoder(features.shape[1:], pixels.shape[1:])
    decoder.to(device).to(memory_format=torch.channels_last)
    decoder.fit_normalisation(hide(features[seen], stream.child("look")))
    optimiser = torch.optim.Adam(decoder.parameters(), training.lr)
    epochs = -(-training.steps * training.batch // len(seen))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    trial = hide(features[held_out], stream.child("judged"))
    best, kept = float("inf"), copy.deepcopy(decoder.state_dict())
    for epoch in range(epochs):
        _train_epoch(decoder.train(), features, pixels, seen, training, optimiser, stream.child("epoch", epoch), hide)
        schedule.step()
        loss = float(F.mse_loss(decode_features(decoder, trial), pixels[held_out]))
        if loss < best:
            best, kept = loss, copy.deepcopy(decoder.state_dict())
    decoder.load_state_dict(kept)
    return decoder.eval()


def _train_epoch(
    decoder: Decoder,
    features: Tensor,
    pixels: Tensor,
    seen: Tensor,
    training: DecoderTraining,
    optimiser: torch.optim.Optimizer,
    stream: Stream,
    hide: Defence,
) -> None:
    order = seen[torch.randperm(len(seen), generator=stream.generator()).to(seen.device)]
    for number, rows in enumerate(torch.split(order, training.batch)):
        if len(rows) == 1:  # BatchNorm needs two
            continue
        optimiser.zero_grad(set_to_none=True)
        F.mse_loss(decoder(hide(features[rows], stream.child(number))), pixels[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


@torch.no_grad()
def decode_features(decoder: Decoder, features: Tensor) -> Tensor:
    """Decode features to images."""
    decoder.eval()
    return torch.cat([decoder(rows) for rows in torch.split(features, evaluation_batch_size(features.device))])
