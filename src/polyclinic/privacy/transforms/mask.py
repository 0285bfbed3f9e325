"""Masked sums: the server learns the sum of the sites' updates and no single one. Bonawitz et al.: Practical secure
aggregation for privacy-preserving machine learning. CCS 2017. The protocol is in `federation.secure_aggregation`.

Each kind of tensors travels as one vector of integers (`privacy.masking.fixed_point`), to which masks are added. With
n sites of a round, `threshold` t and c `colluders`, who tell the server all they know:

    (1)  2t > n + c     no two lists of survivors can be agreed on in one round
    (2)  t ≥ c + 2      a sum holds the updates of two honest sites at least

n is the number of sites that the run has for a round, not of those that a server says have come: `for_run` fixes t.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from polyclinic.core import Bundle, RecipeError, Refused, Stream
from polyclinic.privacy.masking.fixed_point import empty_group

SUM = "..sum"
"""The name of the tensor that replaces those of a kind. No parameter has such a name: its module would have none."""


@dataclass(frozen=True)
class Mask:
    """Sends updates that the server can add up, but not read."""

    threshold: Annotated[int, Field(ge=2)] | None = None
    """Sites that must survive a round; None: two thirds of its sites, and one more."""
    colluders: Annotated[int, Field(ge=0)] = 1
    """Sites that may work together with the server."""
    neighbours: Annotated[int, Field(ge=2)] | None = None
    """Sites with which each shares its masks, for federations of many sites; None: all."""
    bound: Annotated[float, Field(gt=0)] | None = None
    """The largest distance that a site's parameters may move in a round: each honest site clips its update to it."""
    masks: bool = True
    """false: the same integers without masks, which protect nothing, for comparisons."""

    def __post_init__(self) -> None:
        if self.neighbours is not None and self.neighbours % 2:
            raise RecipeError(f"mask.neighbours is {self.neighbours}, but should be even: half of them on either side")

    @property
    def noise_summands(self) -> int:
        """The least number of honest sites in a sum, among which the noise of a plan for unit site is shared."""
        assert self.threshold is not None  # a recipe with such a plan and without a threshold is refused
        return self.threshold - self.colluders

    def threshold_of(self, sites: int) -> int:
        """Return how many of so many sites must survive a round."""
        return self.threshold or 2 * sites // 3 + 1

    def for_run(self, sites: int, cohort: int | None) -> "Mask":
        """Return these options with the threshold of a run of so many sites, of which a round has at most `cohort`."""
        return replace(self, threshold=self.threshold_of(min(sites, cohort or sites)))

    def problem_with(self, sites: int) -> str:
        """Return why masks cannot protect a round of so many sites; "" if they can."""
        t, c = self.threshold_of(sites), self.colluders
        if t > sites:
            return f"mask.threshold is {t}, but a round has {sites} sites; lower mask.threshold, or add sites"
        if t < c + 2:
            return (
                f"with {sites} sites, a threshold of {t} and {c} colluders a sum could be that of one honest site; "
                f"raise mask.threshold to {c + 2} or more, add sites, or lower mask.colluders"
            )
        if (shares := self.share_threshold(sites)) < c + 2:
            return (
                f"{shares} shares of a secret among {self.neighbours} neighbours are too few against {c} colluders; "
                "raise mask.neighbours, or lower mask.colluders"
            )
        if 2 * t <= sites + c:
            return (
                f"twice the threshold of {t} must be more than {sites} sites and {c} colluders together, or two sums "
                "of one round could be unmasked and compared; raise mask.threshold, or lower mask.colluders"
            )
        return ""

    def share_threshold(self, sites: int) -> int:
        """Return how many shares recover a secret in a round of so many sites."""
        if self.neighbours is None or self.neighbours >= sites - 1:
            return self.threshold_of(sites)
        return 2 * (self.neighbours + 1) // 3 + 1

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        """Return the layout in which these tensors travel; a site's integers are made by `secure_aggregation.site`."""
        return {kind: {SUM: empty_group(kind, group)} if group else {} for kind, group in tensors.items()}

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        """Raise `Refused`: a single update cannot be read."""
        raise Refused("masks", "an update is masked, and only the sum of a round can be read")
