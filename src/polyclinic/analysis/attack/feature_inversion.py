"""Pictures from features: FedMP's reconstruction attack (section 4.2.5), beside guesses that need no features at all.

The attacker has the extractor, half of a site's images, and the features of the other half. He trains a decoder on his
half and applies it to the intercepted features. Figures of SSIM, distance and Fréchet mean something only beside:

    mean        the mean of the attacker's images, the same guess for everybody
    nearest     the attacker's image whose features are nearest to the intercepted ones
    untrained   the same decoder on the same network with random weights: what its shape alone lets through

A leak: the decoder is nearer to the originals than both `mean` and `nearest`, or its guesses are recognised among all
attacked images, by more than chance: a blurred guess that picks out the patient is one. Whether it beats
`untrained` says what training did to the leak, not whether there is one: early features of any network keep pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import mean
from typing import TypeAlias

import torch
from torch import Tensor, nn

from polyclinic.analysis.attack.attacker_data import AttackSplit
from polyclinic.analysis.attack.decoder import DecoderTraining, Disguise, decode_features, train_decoder
from polyclinic.analysis.attack.image_similarity import (
    THRESHOLD,
    frechet_distance,
    identification_rate,
    mean_ssim,
    rms_distance,
)
from polyclinic.core.contract import Stream
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import cut_after
from polyclinic.privacy.releases import release_rows as released
from polyclinic.training.fit import evaluation_batch_size

CHANCE = 3.0
"""Standard errors of a difference, over images, that chance is given."""
GUESSES = {
    "decoder": "decoder",
    "protected": "decoder, clip + noise",
    "untrained": "decoder, untrained",
    "nearest": "nearest image",
    "mean": "mean image",
}
"""What is guessed, as tables and pictures call it."""
UNREAD = ("nearest", "mean")
"""Guesses without a decoder."""

Likeness: TypeAlias = tuple[Tensor, Tensor]
"""SSIM and distance of every image."""
Judge: TypeAlias = Callable[[Tensor], Tensor]
"""Features of pixels, for the Fréchet distance."""


@dataclass(frozen=True)
class InversionScores:
    """How near guesses come to the attacked images."""

    ssim: float
    ssim_max: float
    l2: float
    l2_min: float
    below: float
    """The share of images nearer than 0.1."""
    recognised: float
    """The share of guesses that are nearest to their own original, of all attacked ones."""
    frechet: float


@dataclass(frozen=True)
class InversionFindings:
    """What an attack on one stage at one site came to."""

    features: tuple[int, ...]
    """The shape of what is intercepted of an image."""
    length: float
    """Its median length: where to begin when a clip is chosen."""
    leaks: Mapping[str, bool]
    """Of those guesses that read features."""
    guesses: Mapping[str, InversionScores]


@dataclass(frozen=True, eq=False)
class FeatureAttack:
    """The same with the pictures."""

    guesses: Mapping[str, Tensor]
    similarity: Mapping[str, Likeness]
    findings: InversionFindings


def invert_features(
    network: Classifier,
    untrained: Classifier,
    stage: int,
    halves: AttackSplit,
    judge: Judge,
    effort: DecoderTraining,
    stream: Stream,
    defence: Disguise | None = None,
) -> FeatureAttack:
    """Attack the features of one stage, and guess in all other ways."""
    extractor = cut_after(network, stage).extractor
    own, taken = (
        extract_features(extractor, halves.normalise, pixels)
        for pixels in (halves.attacker_images, halves.target_images)
    )
    plain = cut_after(untrained, stage).extractor
    guesses = {
        "decoder": decode_features(train_decoder(own, halves.attacker_images, effort, stream.child("decoder")), taken)
    }
    if defence is not None:
        decoder = train_decoder(own, halves.attacker_images, effort, stream.child("protected"), defence)
        guesses["protected"] = decode_features(decoder, defence(taken, stream.child("released")))
    learnt = train_decoder(
        extract_features(plain, halves.normalise, halves.attacker_images),
        halves.attacker_images,
        effort,
        stream.child("untrained"),
    )
    guesses["untrained"] = decode_features(learnt, extract_features(plain, halves.normalise, halves.target_images))
    guesses["nearest"] = halves.attacker_images[torch.cdist(taken.flatten(1), own.flatten(1)).argmin(1)]
    guesses["mean"] = halves.attacker_images.mean(0).expand_as(halves.target_images)
    likeness = {
        name: (mean_ssim(guess, halves.target_images), rms_distance(guess, halves.target_images))
        for name, guess in guesses.items()
    }
    true = judge(halves.target_images)
    figures = {
        name: _build_scores(
            likeness[name], identification_rate(guess, halves.target_images), frechet_distance(judge(guess), true)
        )
        for name, guess in guesses.items()
    }
    readers = [name for name in guesses if name not in UNREAD]
    length = float(taken.flatten(1).norm(dim=1).median())
    found = InversionFindings(
        tuple(own.shape[1:]),
        length,
        {name: does_leak(name, likeness, figures[name].recognised) for name in readers},
        figures,
    )
    return FeatureAttack(guesses, likeness, found)


def does_leak(guess: str, similarity: Mapping[str, Likeness], known: float) -> bool:
    """Whether it beats both guesses that need no decoder, in SSIM or in distance; or the share of originals that are
    recognised by it is beyond chance, which recognises one, give or take one."""
    (alike, far), others = similarity[guess], [similarity[name] for name in UNREAD]
    if known * len(alike) > 1 + CHANCE:
        return True
    return all(_is_significantly_positive(alike - other[0]) for other in others) or all(
        _is_significantly_positive(other[1] - far) for other in others
    )


def _is_significantly_positive(differences: Tensor) -> bool:
    error = float(differences.std()) / math.sqrt(len(differences))
    return float(differences.mean()) > CHANCE * error


def _build_scores(similarity: Likeness, known: float, distance: float) -> InversionScores:
    alike, far = similarity
    return InversionScores(
        float(alike.mean()),
        float(alike.max()),
        float(far.mean()),
        float(far.min()),
        float((far < THRESHOLD).double().mean()),
        known,
        distance,
    )


@torch.no_grad()
def extract_features(extractor: nn.Module, seen: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """What an extractor makes of images, as in evaluation."""
    extractor.eval()
    parts = torch.split(pixels, evaluation_batch_size(pixels.device))
    return torch.cat([extractor(seen(part)).contiguous() for part in parts])


def clip_and_noise(clip: float, noise: float) -> Disguise:
    """Features as `privacy.kinds` releases them: each image's cut to a length, with noise in units of it."""

    def disguise(features: Tensor, stream: Stream) -> Tensor:
        parts = enumerate(torch.split(features, evaluation_batch_size(features.device)))
        return torch.cat([released(part, clip, noise, stream.child(n)).tensors["rows"] for n, part in parts])

    return disguise


def mean_scores(sites: Sequence[Mapping[str, InversionScores]]) -> dict[str, InversionScores]:
    """Over sites, as FedMP reports them."""
    names = [field.name for field in fields(InversionScores)]
    return {
        guess: InversionScores(*(mean(getattr(figures[guess], name) for figures in sites) for name in names))
        for guess in sites[0]
    }
