"""The loss of FedMP: equations 1, 5 and 8 of fedmp.py."""

import torch
from torch import Tensor

from polyclinic.core import Batch, Bundle, Network, Tensors
from polyclinic.training.keyed_dropout import MASK_32, hash_uniform

LEAST, MOST = 0.1, 10.0
"""The bounds of r in (1)."""


def completion_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return (1) with (5) and (8), variant corrected."""
    return _combined_loss(network, weights, batch, reference, paper=False)


def completion_loss_paper(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return (1) with (5) and (8) as printed, divided by |r|."""
    return _combined_loss(network, weights, batch, reference, paper=True)


def _combined_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle, paper: bool) -> Tensor:
    images, labels = batch
    handed = network.features(weights, images)
    loss = total = network.output_loss(network.head(weights, handed), labels)
    if "bank" in reference:
        values, owners, there = sample_bank(reference["bank"], labels, reference["scalars"]["sample"])
        each = network.output_loss(network.head(weights, values, eval_mode=True), owners, "none")
        total = total + rescale_term((each * there).sum() / there.sum().clamp(min=1), loss, paper)  # (5)
    if "prototypes" in reference:
        total = total + rescale_term(
            prototype_alignment(handed.flatten(1), labels, **reference["prototypes"], paper=paper), loss, paper
        )
    return total  # (1)


def rescale_term(term: Tensor, loss: Tensor, paper: bool) -> Tensor:
    """Return a term of (1), divided by r; 0 if the term is 0."""
    ratio = (term / loss.clamp(min=1e-8)).detach()
    ratio = ratio.abs() if paper else ratio.clamp(LEAST, MOST)
    return torch.where(term == 0, 0.0, term / torch.where(ratio > 0, ratio, 1.0))


def prototype_alignment(z: Tensor, labels: Tensor, means: Tensor, known: Tensor, paper: bool) -> Tensor:
    """Return (8) over the batch's classes that have a prototype."""
    cosine = torch.cosine_similarity(z, means[labels], dim=-1)
    same = (labels[:, None] == labels[None, :]).to(z.dtype)
    each = known[labels].to(z.dtype) / same.sum(1)  # the images of a class add up to 1
    return -(each * cosine).sum() if paper else (each * (1 - cosine)).sum() / each.sum().clamp(min=1)


def sample_bank(bank: Tensors, labels: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's sample of foreign features: values, labels, and which are present (a class may have none).

    The draw depends only on the round's key and the labels of the batch in their order, which are the same on every
    engine. `slots` is 0, 1, 2, … to take the classes in turn, or negative to draw them as often as received.
    """
    values, held, key = bank["values"], bank["held"], bank["key"]
    place = torch.arange(len(labels), device=labels.device)
    own = ((labels + 1) * ((place * 0x9E3779B1 + 1) & MASK_32)).sum()
    size, classes = len(slots), len(held)
    # Below 1, to which single precision rounds up.
    first, second = hash_uniform(key + own, 2 * size).to(held.dtype).clamp(max=1 - 2**-24).chunk(2)
    total = held.cumsum(0)
    by_share = (first[:, None] * total[-1] >= total[None, :]).sum(1).clamp(max=classes - 1)
    owners = torch.where(slots >= 0, slots % classes, by_share)
    return values[owners, (second * held[owners]).long()], owners, (held[owners] > 0).to(values.dtype)
