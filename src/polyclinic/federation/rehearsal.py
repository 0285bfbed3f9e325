"""A dry run of a round without training, which shows how an algorithm will use a site's images."""

from collections.abc import Sequence

import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.core import Bundle, Federation, Fit, Fitted, Job, RecipeError, Site, SiteId, Stream, Tensors
from polyclinic.federation.site_runner import drive_jobs
from polyclinic.training.network import LiveNetwork

BLANK = 2
"""The number of blank images that `Score` jobs run on."""


def rehearse_round(
    algorithm: Algorithm, federation: Federation, site: SiteId, network: LiveNetwork, shape: Sequence[int]
) -> tuple[tuple[Fit, ...], int]:
    """Return the training jobs of a site's first or second round, whichever has more, and its number of models then.

    Each job returns the weights that it starts from. Raises `RecipeError` for a job that computes something else from
    images, unless the algorithm declares it in `privacy_releases`.
    """
    memory: Bundle | None = None
    rounds: list[list[Fit]] = []
    for number in (1, 2):
        found: list[Fit] = []
        received = algorithm.broadcast(algorithm.init(federation), site)
        here = Site(site, federation.sites[site], number, 2, algorithm.training.optimiser.lr, Stream(0))
        work = algorithm.local(received, memory, here, Stream(0))
        _, memory = drive_jobs(work, lambda job, _: _blank_result(job, found, algorithm, network, shape))  # noqa: B023
        rounds.append(found)
    models = algorithm.models(algorithm.broadcast(algorithm.init(federation), site), memory)
    first, second = rounds
    return tuple(first if len(first) > len(second) else second), max(1, len(models))


def _blank_result(
    job: Job, found: list[Fit], algorithm: Algorithm, network: LiveNetwork, shape: Sequence[int]
) -> Fitted | Tensors:
    if isinstance(job, Fit):
        found.append(job)
        return Fitted(job.weights, 1, 0.0, {})
    if not algorithm.privacy_releases() and not algorithm.no_guarantee_reason():
        raise RecipeError(
            f"the algorithm uses the {job.part} images of a site other than for training, which the privacy plan does "
            "not pay for; choose another algorithm (pfedcdp with variant: corrected and keep: 0 needs no other use), "
            "privacy.unit: site, or leave privacy out"
        )
    weights: Bundle = network.load_weights(job.weights, classifier_only=True)
    network.set_eval_mode()
    blank = torch.zeros(BLANK, *shape, device=network.device)
    batch = blank, torch.zeros(BLANK, dtype=torch.int64, device=network.device)
    reference = {k: {n: t.to(network.device) for n, t in g.items()} for k, g in job.reference.items()}
    with torch.no_grad():
        return job.function(network, weights, batch, reference)
