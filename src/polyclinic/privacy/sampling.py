"""Training jobs as an accountant counts them: how many noised sums, and each image's probability of being in one."""

from polyclinic.core import Fit
from polyclinic.training.data_order import batches_per_epoch


def rate_and_sums(job: Fit, examples: int) -> tuple[float, int]:
    """Return the probability that an image is in a noised sum of the job, and the number of sums.

    A shuffled epoch uses every image once, so it counts as one sum over all; an epoch that is begun counts.
    """
    training = job.training
    per_epoch = 1 if job.full_batch else batches_per_epoch(examples, training.batch_size(examples))
    taken = (training.steps or 1) if training.epochs is None else training.epochs * per_epoch
    private = training.private
    if private is not None and private.sampling == "shuffle":
        begun = taken if job.full_batch else -(-taken // per_epoch) + (training.epochs is None)
        return 1.0, begun * len(job.sequence)
    return (1.0 if job.full_batch else min(1.0, training.batch_size(examples) / examples)), taken * len(job.sequence)
