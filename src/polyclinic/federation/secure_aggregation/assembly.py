"""The masks of a run: who signs, what each site weighs, and its share of the noise of a privacy plan.

Noise that is split among sites (Kairouz, Liu, Steinke: The distributed discrete Gaussian mechanism for federated
learning with secure aggregation. ICML 2021; here with rounded Gaussians): with the threshold t and c colluders

    (1)  σ_k = σ·(C + step·√d / 2) / √(t − c)        at each site, after its update was clipped to C and rounded

At least t − c honest sites are in every sum, so the server and any c sites together see a sum with the noise of the
plan. t − c is K − d − c for K sites of a round of which d = K − t may be lost.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.core import RecipeError, SiteId, Stream, Update
from polyclinic.federation.secure_aggregation.agreements import Agreements
from polyclinic.federation.secure_aggregation.site import FINEST, MaskingSite, log
from polyclinic.privacy.masking.fixed_point import PARAMETERS
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.storage.signatures import PeerKeys, SiteSigner, make_signers


@dataclass(frozen=True)
class SiteIdentity:
    """What a site needs of its own, and knows of the others, to mask its updates."""

    signer: SiteSigner
    peers: PeerKeys
    read_key: Callable[[], bytes]
    """Returns the site's key of the run, 32 bytes."""
    agreements: Agreements
    least_sites: int = 2
    tell: Callable[[str], None] = log.warning
    """Called with what the site's own people should know, and nobody else."""


def mask_of(stages: Iterable[UpdateTransform]) -> Mask | None:
    """Return the stage `mask`, if it is among these."""
    return next((stage for stage in stages if isinstance(stage, Mask)), None)


def fix_threshold(stages: Iterable[UpdateTransform], sites: int | None, cohort: int | None) -> list[UpdateTransform]:
    """Return the stages, of which `mask` has the threshold of a run of so many sites; None: they are not known yet."""
    return [one.for_run(sites, cohort) if isinstance(one, Mask) and sites else one for one in stages]


def check_sites(mask: Mask | None, sites: int, cohort: int | None) -> None:
    """Raise `RecipeError` if masks cannot protect rounds of so many sites."""
    if mask is not None and (problem := mask.problem_with(min(sites, cohort or sites))):
        raise RecipeError(problem)


def simulate_identities(seed: int, sites: Sequence[SiteId]) -> dict[SiteId, SiteIdentity]:
    """Return the identities of the sites of a simulation, which follow from the seed and protect nothing."""
    stream = Stream(seed, ("identities",))
    signers, peers = make_signers(list(sites), stream.child("signature"))
    return {site: SiteIdentity(signers[site], peers, stream.child("run key", site).key, Agreements()) for site in sites}


def build_masking(
    mask: Mask,
    identity: SiteIdentity,
    algorithm: Algorithm,
    examples: int,
    plan: PrivacyPlan | None,
    parameters: int = 0,
) -> MaskingSite:
    """Return what masks the updates of one site.

    Args:
        mask: The stage of the recipe.
        identity: The site's keys and what it knows of the others.
        algorithm: The algorithm of the run.
        examples: The number of the site's training images.
        plan: The privacy plan, if there is one.
        parameters: The number of values that the site's noise is added to.
    """
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.inner
    return MaskingSite(
        identity.signer,
        identity.peers,
        identity.read_key,
        mask,
        algorithm.update_weight(Update({}, examples)),
        frozenset(exchange.kind for exchange in algorithm.exchanges() if not exchange.weighted),
        identity.agreements,
        identity.least_sites,
        noise_share(mask, plan, parameters),
        identity.tell,
    )


def noise_share(mask: Mask, plan: PrivacyPlan | None, parameters: int) -> float:
    """Return the standard deviation of the noise that each site adds to its update, by (1); 0 without such a plan."""
    if plan is None or plan.config.unit != "site":
        return 0.0
    reach = plan.config.clip_norm + PARAMETERS.step * math.sqrt(parameters) / 2
    share = plan.noise * reach / math.sqrt(mask.noise_summands)
    if share < FINEST * PARAMETERS.step:
        raise RecipeError(
            f"the noise of a site, {share:.2g}, is too small for the integers that are masked; raise privacy.clip"
        )
    return share
