"""Banks of labelled features: a site releases features of its own images in `slots` per class and receives others'.

Under a privacy plan every class has all its slots, filled or not. The images in them are drawn from the site's secret:
if an image is taken out, another one or none takes its slot and no other slot changes. So the released slots change by
at most 2·clip. If the draw depended on a known seed, all later images would move up by one slot.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyclinic.core import Batch, Bundle, Network, Refused, SiteId, Stream, Tensors
from polyclinic.privacy.releases import release_class_means, release_rows
from polyclinic.training.dp.secure_random import draw_permutation, draw_words

SHARE, DEVIATIONS = 0.1, 3.0
"""Under a privacy plan: the counts' share of the means' budget, and the least count in standard deviations of noise."""


def labelled_features(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return the extractor's features and the labels of a batch."""
    return {"features": network.features(weights, batch[0]), "labels": batch[1]}


class FeatureRelease(NamedTuple):
    """What a site releases, by class; everything is 0 for a class that is withheld."""

    values: Tensor
    """Classes × slots × the shape of a feature."""
    held: Tensor
    """The number of slots in use, counted from the first."""
    means: Tensor
    images: Tensor
    """The number of images; it is not an integer if noised."""


def release_features(
    features: Tensor, labels: Tensor, classes: int, slots: int, fewest: int, stream: Stream
) -> FeatureRelease:
    """Return the features of up to `slots` random images of each class that has at least `fewest` images."""
    picked = assign_slots(labels, classes, slots, torch.randperm(len(labels), generator=stream.generator()))
    count = torch.bincount(labels, minlength=classes)
    count = torch.where(count >= fewest, count, 0)
    picked = torch.where(count[:, None] > 0, picked, -1)
    member = nn.functional.one_hot(labels, classes).to(features.dtype) * (count > 0)
    means = member.T @ features.flatten(1) / count.clamp(min=1)[:, None]
    held, images = (picked >= 0).sum(1).to(features.dtype), count.to(features.dtype)
    return FeatureRelease(_fill_slots(features, picked), held, means, images)


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
    """Return clipped and noised features, means and counts, without classes whose count may be noise alone.

    `noise` holds the noise multipliers of the features and of the means with counts; both are charged.
    """
    picked = assign_slots(labels, classes, slots, draw_permutation(secret.child("slots"), len(labels)))
    places = draw_words(secret.child("places"), classes * slots).view(classes, slots).argsort(1)
    values = _fill_slots(features, picked.gather(1, places.to(picked.device)))
    of_slots, of_means = noise
    least = max(fewest, DEVIATIONS * of_means / math.sqrt(SHARE))
    means = release_class_means(
        features.flatten(1), labels, classes, clip, of_means, least, secret.child("means"), SHARE
    )
    known, count = means.tensors["known"], means.tensors["counts"] * means.tensors["known"]
    # `rows` assumes that an image leaves zeros. Here another image may take its slot: twice the noise.
    noised = (
        release_rows(values.flatten(0, 1), clip, 2 * of_slots, secret.child("features"))
        .tensors["rows"]
        .view(values.shape)
    )
    count = count * (len(labels) / count.sum().clamp(min=len(labels)))
    held, known = slots * known.to(features.dtype), _expand_like(known, noised)
    return FeatureRelease(noised * known, held, means.tensors["means"], count.to(features.dtype))


def assign_slots(labels: Tensor, classes: int, slots: int, order: Tensor) -> Tensor:
    """Return the image in each slot of each class: the first ones in `order`, or −1 for an empty slot."""
    order = order.to(labels.device)
    found = torch.full((classes, slots), -1, device=labels.device)
    for label in range(classes):
        some = order[labels[order] == label][:slots]
        found[label, : len(some)] = some
    return found


def features_of_others(bank: Tensors, site: SiteId, most: int) -> Tensors:
    """Return up to `most` features of each class, in turn from all other sites, beginning with the next one.

    `bank` holds `SITE/values` and `SITE/held` for every site.
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


def check_class_counts(counts: Tensors, examples: int) -> None:
    """Refuse numbers of images by class (`images`, if given) that a site with so many examples cannot have."""
    images = counts.get("images")
    if images is not None and (bool((images < 0).any()) or float(images.sum()) > examples + 0.5):
        raise Refused("examples", f"counts of classes below 0, or of more than {examples} images")


def check_slot_counts(features: Tensors, slots: int) -> None:
    """Refuse numbers of features that are not integers from 0 to `slots`."""
    held = features.get("held")
    if held is not None and bool(((held < 0) | (held > slots) | (held != held.round())).any()):
        raise Refused("features", f"numbers of features that are not whole and from 0 to {slots}")


def _fill_slots(features: Tensor, picked: Tensor) -> Tensor:
    """Return the features in their slots, with zeros in empty ones."""
    values = features[picked.clamp(min=0)]
    return torch.where(_expand_like(picked >= 0, values), values, 0.0)


def _expand_like(chosen: Tensor, values: Tensor) -> Tensor:
    """Return `chosen` with as many axes as `values`."""
    return chosen.view(*chosen.shape, *[1] * (values.ndim - chosen.ndim))
