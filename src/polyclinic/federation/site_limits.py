"""What a privacy plan lets a site release, enforced at the site: the orders that it follows, the jobs that it
runs, and the secret that its noise is drawn from.

A real site also has a policy of its own (`deploy.site.policy`) about what may leave at all.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from polyclinic.core import Bundle, EngineError, Fit, Fitted, Part, Refused, Site, SiteId, Stream, Work
from polyclinic.federation.job_loop import JobLoop
from polyclinic.privacy.sampling import rate_and_sums
from polyclinic.storage import messages


def read_no_permission(_: int) -> str:
    """Return that nobody has let a round be played again, as in every simulation."""
    return ""


@dataclass(frozen=True)
class SitePrivacyLimits:
    """The limits that a privacy plan sets at one site."""

    secret: Stream
    """The source of the site's noise."""
    priced_jobs: tuple[tuple[float, int], ...]
    """Sampling rate and steps of each training job of a round that was priced …"""
    min_noise: float
    """… with no less noise than this."""
    metrics_noise: float | None = None
    """Noise on the counts that it reports of its validation images; None: metrics are reported without noise."""
    parts: tuple[Part, ...] = ("validation",)
    """The parts whose metrics may be reported in a round."""
    rounds: int = sys.maxsize
    unit: Literal["image", "patient"] = "image"
    """What joins a step of the priced jobs, and is clipped as one."""
    allows_scores: bool = True
    """Whether `Score` jobs are paid for by the plan."""
    seeded: bool = False
    """The secret is drawn from the recipe's seed: then equal recipes and images give equal noise, whatever the run."""
    read_permission: Callable[[int], str] = read_no_permission
    """Returns the mark of the permission by which people let a round be played again; "" if it is played at first."""

    def noise_stream(self, order: messages.Message, memory: Bundle | None = None, device: str = "cpu") -> Stream:
        """Return the noise stream of what this order releases.

        It is seeded by everything that the release depends on (purpose, weights, memory, learning rate, noise, device):
        repeating the order exactly repeats its noise and costs nothing; repeating it with any change, or after people
        have allowed the round again, draws fresh noise.
        """
        fields = order.fields
        hashes = messages.hash_tensors(order.tensors), messages.hash_tensors(memory) if memory else ""
        terms = f"{self.min_noise!r}|{fields.get('lr')!r}|{device}"
        run = () if self.seeded else (fields["run"],)
        purpose = () if fields["purpose"] == "train" else (fields["purpose"],)  # seeded training keeps its numbers
        permission = tuple(filter(None, [self.read_permission(int(fields["round"]))]))
        return self.secret.child(*run, fields["site"], int(fields["round"]), *hashes, terms, *purpose, *permission)

    def check_order(self, order: messages.Message, name: SiteId) -> None:
        """Refuse an order for metrics or rounds that the plan does not include."""
        fields = order.fields
        if fields["purpose"] == "train" and not set(fields["parts"]) <= set(self.parts):
            raise Refused("privacy", f"{name} was asked for metrics that its privacy plan keeps back")
        if int(fields["round"]) > self.rounds + (fields["purpose"] != "train"):
            raise Refused(
                "privacy", f"{name} was asked for round {fields['round']}, its privacy plan has {self.rounds}"
            )

    def _check_job(self, job: Fit, site: Site, number: int) -> None:
        assert job.training.private is not None
        rate, steps = rate_and_sums(job, site.examples)
        allowed = self.priced_jobs[number] if number < len(self.priced_jobs) else (0.0, 0)
        private = job.training.private
        if rate > allowed[0] or steps > allowed[1] or private.noise < self.min_noise or private.unit != self.unit:
            raise EngineError(
                f"site {site.name} was asked to train {steps} steps as its job {number + 1} of round {site.round}, "
                "which the privacy plan has not priced; an algorithm's jobs must not depend on a site's images"
            )


def limit_to_plan(work: Work, limits: SitePrivacyLimits, site: Site) -> Work:
    """Return the same work, which ends in an error before it runs a job that the privacy plan has not priced."""
    jobs, trained = JobLoop(work), 0
    for job in jobs:
        if limits.priced_jobs and (job.training.private is None if isinstance(job, Fit) else not limits.allows_scores):
            raise EngineError(
                f"site {site.name} was asked to use its images in a way that the privacy plan has not priced"
            )
        if isinstance(job, Fit) and job.training.private is not None:
            limits._check_job(job, site, trained)
            trained += 1
        jobs.result = yield job
        if isinstance(jobs.result, Fitted) and jobs.result.dropped:
            # Logged at the site only: the number is as private as the images themselves.
            logging.getLogger(__name__).warning(
                "%s: %d gradients of single images were not finite in round %d and counted as zero; check the images",
                site.name,
                jobs.result.dropped,
                site.round,
            )
    return jobs.returned
