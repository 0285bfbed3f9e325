"""A training job as an accountant counts it: how often images are looked at, and with which probability."""

from __future__ import annotations

from polyclinic.core.contract import Fit
from polyclinic.training.fit import batches_per_epoch


def rate_and_sums(job: Fit, examples: int) -> tuple[float, int]:
    """The probability with which an image joins a noised sum, and how many sums there are.

    A shuffled epoch shows every image once, so that it counts as one look at all; an epoch begun counts.
    """
    training = job.training
    per_epoch = 1 if job.full_batch else batches_per_epoch(examples, training.batch_size(examples))
    taken = (training.steps or 1) if training.epochs is None else training.epochs * per_epoch
    private = training.private
    if private is not None and private.sampling == "shuffle":
        begun = taken if job.full_batch else -(-taken // per_epoch) + (training.epochs is None)
        return 1.0, begun * len(job.sequence)
    return (1.0 if job.full_batch else min(1.0, training.batch_size(examples) / examples)), taken * len(job.sequence)
