"""Labelled features of images: what a site tells of its own, in `slots` for every class, and hears of others'.

Under a privacy plan every class has all its slots, filled or not. Which images fill which is drawn from the site's
secret: an image that is taken out then leaves its slot to another, or empty, and moves nobody else. So the slots change
by 2·clip at most. Drawn from a seed that others know, all that follow would move up by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core.contract import SiteId, Stream, Tensors
from polyclinic.core.errors import Refused
from polyclinic.privacy.releases import release_class_means, release_rows
from polyclinic.training.dp.dp_sgd import secret_generator

SHARE, DEVIATIONS = 0.1, 3.0
"""Under a privacy plan: what counts take of the means' budget, and how far above their noise they must be."""


class FeatureRelease(NamedTuple):
    """By class; of a class that is not told of all are 0."""

    values: Tensor
    """Classes × slots × a feature."""
    held: Tensor
    """Slots that count, from the first."""
    means: Tensor
    images: Tensor
    """Their number; noised, it is not whole."""


def release_features(
    features: Tensor, labels: Tensor, classes: int, slots: int, fewest: int, stream: Stream
) -> FeatureRelease:
    """Features as they are; of a class of fewer than `fewest` images nothing."""
    order = torch.randperm(len(labels), generator=stream.generator())
    picked = assign_slots(labels, classes, slots, order)
    count = torch.bincount(labels, minlength=classes)
    count = torch.where(count >= fewest, count, 0)
    picked = torch.where(count[:, None] > 0, picked, -1)
    member = F.one_hot(labels, classes).to(features.dtype) * (count > 0)
    means = member.T @ features.flatten(1) / count.clamp(min=1)[:, None]
    held = (picked >= 0).sum(1)
    return FeatureRelease(_fill_slots(features, picked), held.to(features.dtype), means, count.to(features.dtype))


def release_features_privately(
    features: Tensor,
    labels: Tensor,
    classes: int,
    slots: int,
    fewest: int,
    clip: float,
    noise: tuple[float, float],
    secret: Stream,
) -> FeatureRelease:
    """Slots, and means with counts, clipped and noised, each at a charge: `noise` is of the one and of the other.

    Of a class whose count may be noise: nothing.
    """
    draws = secret_generator(secret.child("slots"))
    picked = assign_slots(labels, classes, slots, torch.from_numpy(draws.permutation(len(labels))))
    places = draws.permuted(np.tile(np.arange(slots), (classes, 1)), axis=1)
    values = _fill_slots(features, picked.gather(1, torch.from_numpy(places).to(picked.device)))
    of_slots, of_means = noise
    least = max(fewest, DEVIATIONS * of_means / math.sqrt(SHARE))
    means = release_class_means(
        features.flatten(1), labels, classes, clip, of_means, least, secret.child("means"), SHARE
    )
    known, count = means.tensors["known"], means.tensors["counts"] * means.tensors["known"]
    # `rows` counts on an image that leaves zeros, not another image: twice its noise.
    noised = (
        release_rows(values.flatten(0, 1), clip, 2 * of_slots, secret.child("features"))
        .tensors["rows"]
        .view(values.shape)
    )
    count = count * (len(labels) / count.sum().clamp(min=len(labels)))
    held, known = slots * known.to(features.dtype), _expand_like(known, noised)
    return FeatureRelease(noised * known, held, means.tensors["means"], count.to(features.dtype))


def assign_slots(labels: Tensor, classes: int, slots: int, order: Tensor) -> Tensor:
    """Which images fill the slots of each class, the first in `order`; −1: a slot that stays empty."""
    order = order.to(labels.device)
    found = torch.full((classes, slots), -1, device=labels.device)
    for label in range(classes):
        some = order[labels[order] == label][:slots]
        found[label, : len(some)] = some
    return found


def features_of_others(bank: Tensors, site: SiteId, most: int) -> Tensors:
    """Of each class up to `most` features, in turn from all other sites, beginning with the next one.

    bank: `site/values` and `site/held` of every site.
    """
    sites = sorted({name.rsplit("/", 1)[0] for name in bank})
    after = [other for other in sites if other > site] + [other for other in sites if other < site]
    held = {other: [int(number) for number in bank[f"{other}/held"].tolist()] for other in after}
    like = next(tensor for name, tensor in bank.items() if name.endswith("/values"))
    classes, slots, *shape = like.shape
    room = min(most, slots * len(after)) if any(any(numbers) for numbers in held.values()) else 0
    found = {"values": like.new_zeros(classes, room, *shape), "held": like.new_zeros(classes)}
    copies: dict[SiteId, list[tuple[int, int, int]]] = {other: [] for other in after}
    for label in range(classes):
        turns = [(other, i) for i in range(slots) for other in after if i < held[other][label]][:most]
        for place, (other, i) in enumerate(turns):
            copies[other].append((label, place, i))
        found["held"][label] = len(turns)
    for other, moves in copies.items():
        if moves:
            labels, places, slot = torch.tensor(moves, device=like.device).unbind(1)
            found["values"][labels, places] = bank[f"{other}/values"][labels, slot]
    return found


def check_slot_counts(features: Tensors, slots: int) -> None:
    """Refuse numbers of features that cannot be."""
    held = features.get("held")
    if held is not None and bool(((held < 0) | (held > slots) | (held != held.round())).any()):
        raise Refused("features", f"numbers of features that are not whole and from 0 to {slots}")


def _fill_slots(features: Tensor, picked: Tensor) -> Tensor:
    """The features in their slots; zeros in empty ones."""
    values = features[picked.clamp(min=0)]
    return torch.where(_expand_like(picked >= 0, values), values, 0.0)


def _expand_like(chosen: Tensor, values: Tensor) -> Tensor:
    """With as many axes as `values`."""
    return chosen.view(*chosen.shape, *[1] * (values.ndim - chosen.ndim))
