"""Reconstructs images from features: FedMP's attack (section 4.2.5), compared with guesses that need no features.

The attacker has the extractor, half of a site's images, and the features of the other half, trains a decoder on the
former and applies it to the latter. SSIM, distance and Fréchet distance mean something only in comparison with:

    mean        the mean of the attacker's images, the same guess for every image
    nearest     the attacker's image whose features are nearest to the intercepted ones
    untrained   the same decoder for the same network with random weights: the leak by its architecture alone

A leak: the decoder is nearer to the originals than both `mean` and `nearest`, or its guesses identify their originals
among all attacked images more often than chance, as a blurred guess that picks out the patient does. Whether it beats
`untrained` shows the effect of training on the leak, not whether there is one: early features of any network keep
images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import mean
from typing import TypeAlias

import torch
from torch import Tensor, nn

from polyclinic.analysis.attack.attacker_data import AttackSplit
from polyclinic.analysis.attack.decoder import DecoderTraining, Defence, decode_features, train_decoder
from polyclinic.analysis.attack.image_similarity import (
    THRESHOLD,
    frechet_distance,
    identification_rate,
    mean_ssim,
    rms_distance,
)
from polyclinic.core import Stream
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import cut_after
from polyclinic.privacy.releases import release_rows as released
from polyclinic.training.fit import evaluation_batch_size

CHANCE = 3.0
"""Standard errors by which a mean difference over images must exceed zero to count."""
GUESSES = {
    "decoder": "decoder",
    "protected": "decoder, clip + noise",
    "untrained": "decoder, untrained",
    "nearest": "nearest image",
    "mean": "mean image",
}
"""The kinds of guesses, and their names in tables and figures."""
UNREAD = ("nearest", "mean")
"""Guesses without a decoder."""

Similarity: TypeAlias = tuple[Tensor, Tensor]
"""SSIM and distance of every image."""
FeatureFunction: TypeAlias = Callable[[Tensor], Tensor]
"""Computes the features for the Fréchet distance from pixels."""


@dataclass(frozen=True)
class InversionScores:
    """How close guesses come to the attacked images."""

    ssim: float
    ssim_max: float
    l2: float
    l2_min: float
    below: float
    """The share of guesses with a distance below 0.1."""
    recognised: float
    """The share of guesses that are nearer to their own original than to any other."""
    frechet: float


@dataclass(frozen=True)
class InversionFindings:
    """The findings of an attack on one stage at one site."""

    features: tuple[int, ...]
    """The shape of one image's features."""
    length: float
    """The median norm of an image's features: a starting point for choosing a clip."""
    leaks: Mapping[str, bool]
    """For each kind of guess from features."""
    guesses: Mapping[str, InversionScores]


@dataclass(frozen=True, eq=False)
class FeatureAttack:
    """The findings, and the guesses themselves."""

    guesses: Mapping[str, Tensor]
    similarity: Mapping[str, Similarity]
    findings: InversionFindings


def invert_features(
    network: Classifier,
    untrained: Classifier,
    stage: int,
    split: AttackSplit,
    frechet_features: FeatureFunction,
    decoder_training: DecoderTraining,
    stream: Stream,
    defence: Defence | None = None,
) -> FeatureAttack:
    """Attack the features of one stage, and make all other guesses for comparison.

    Args:
        network: The site's network.
        untrained: The same network with random weights.
        stage: The stage whose features are intercepted.
        split: The attacker's images and the attacked images.
        frechet_features: Computes the features for the Fréchet distance.
        decoder_training: How the decoder is trained.
        stream: Seeds the decoder, its training and the defence.
        defence: Changes features before they leave the site; None: no attack on protected features.
    """
    (own, taken), (plain_own, plain_taken) = (
        [
            extract_features(cut_after(model, stage).extractor, split.normalise, pixels)
            for pixels in (split.attacker_images, split.target_images)
        ]
        for model in (network, untrained)
    )
    guesses = {
        "decoder": decode_features(
            train_decoder(own, split.attacker_images, decoder_training, stream.child("decoder")), taken
        )
    }
    if defence is not None:
        decoder = train_decoder(own, split.attacker_images, decoder_training, stream.child("protected"), defence)
        guesses["protected"] = decode_features(decoder, defence(taken, stream.child("released")))
    learnt = train_decoder(plain_own, split.attacker_images, decoder_training, stream.child("untrained"))
    guesses["untrained"] = decode_features(learnt, plain_taken)
    guesses["nearest"] = split.attacker_images[torch.cdist(taken.flatten(1), own.flatten(1)).argmin(1)]
    guesses["mean"] = split.attacker_images.mean(0).expand_as(split.target_images)
    likeness = {
        name: (mean_ssim(guess, split.target_images), rms_distance(guess, split.target_images))
        for name, guess in guesses.items()
    }
    true = frechet_features(split.target_images)
    figures = {
        name: _build_scores(
            likeness[name],
            identification_rate(guess, split.target_images),
            frechet_distance(frechet_features(guess), true),
        )
        for name, guess in guesses.items()
    }
    leaks = {name: does_leak(name, likeness, figures[name].recognised) for name in guesses if name not in UNREAD}
    length = float(taken.flatten(1).norm(dim=1).median())
    return FeatureAttack(guesses, likeness, InversionFindings(tuple(own.shape[1:]), length, leaks, figures))


def does_leak(guess: str, similarity: Mapping[str, Similarity], recognised: float) -> bool:
    """Return whether a guess beats both guesses that need no decoder, in SSIM or in distance, or identifies more
    originals than chance, which identifies about one."""
    (alike, far), others = similarity[guess], [similarity[name] for name in UNREAD]
    if recognised * len(alike) > 1 + CHANCE:
        return True
    return all(_is_significantly_positive(alike - other[0]) for other in others) or all(
        _is_significantly_positive(other[1] - far) for other in others
    )


def _is_significantly_positive(differences: Tensor) -> bool:
    return float(differences.mean()) > CHANCE * (float(differences.std()) / math.sqrt(len(differences)))


def _build_scores(similarity: Similarity, recognised: float, distance: float) -> InversionScores:
    alike, far = similarity
    return InversionScores(
        float(alike.mean()),
        float(alike.max()),
        float(far.mean()),
        float(far.min()),
        float((far < THRESHOLD).double().mean()),
        recognised,
        distance,
    )


@torch.no_grad()
def extract_features(extractor: nn.Module, seen: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """Return the extractor's features of images, in evaluation mode."""
    extractor.eval()
    parts = torch.split(pixels, evaluation_batch_size(pixels.device))
    return torch.cat([extractor(seen(part)).contiguous() for part in parts])


def clip_and_noise(clip: float, noise: float) -> Defence:
    """Return a defence that clips each image's features and adds noise in units of the clip (`privacy/releases.py`)."""

    def defend(features: Tensor, stream: Stream) -> Tensor:
        parts = enumerate(torch.split(features, evaluation_batch_size(features.device)))
        return torch.cat([released(part, clip, noise, stream.child(n)).tensors["rows"] for n, part in parts])

    return defend


def mean_scores(sites: Sequence[Mapping[str, InversionScores]]) -> dict[str, InversionScores]:
    """Return the mean scores over sites, as FedMP reports them."""
    names = [field.name for field in fields(InversionScores)]
    return {
        guess: InversionScores(*(mean(getattr(figures[guess], name) for figures in sites) for name in names))
        for guess in sites[0]
    }
