"""The division among sites that a run would make, tried in advance: labels, sites and patients suffice to refuse it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from polyclinic.core import DataError, Stream
from polyclinic.data.findings import (
    Finding,
    Level,
    disclosable_groups,
    group_positions,
    place_of,
    raise_findings,
    used_positions,
)
from polyclinic.data.loading.loader import build_collection, draw_records
from polyclinic.data.partitioning.partitions import Iid, Natural, Partition
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.quality.cohort import NO_PART, NO_SITE, missing_field_findings
from polyclinic.data.quality.labels import disclosable_labels
from polyclinic.data.records import Listing
from polyclinic.data.splits import Fractions

UNDIVIDED = "cannot be divided as it is"
Refusal: TypeAlias = Callable[[Listing], str]
"""Returns why a division of a listing would be refused, in one sentence, or ""."""


@dataclass(frozen=True)
class Division:
    """A division as a recipe describes it, with the recipe's defaults."""

    partition: Partition
    fractions: Fractions = field(default_factory=Fractions)
    allow_single_class: bool = False
    limit: int | None = None
    seed: int = 0

    def find_refusal(self, listing: Listing) -> str:
        """Return why a run would refuse this division, or "". The random streams are those of a run."""
        stream = Stream(self.seed)
        used = replace(listing, records=draw_records(listing.used_records, self.limit, stream.child("data", "limit")))
        try:
            check_missing_fields(used, self.partition, self.fractions)
            collection = build_collection(used, torch.zeros(len(used.records), 1, 1, 1, dtype=torch.uint8))
            build_site_data(collection, self.partition, self.fractions, stream.child("sites"), self.allow_single_class)
        except DataError as error:
            return str(error)
        return ""


def check_missing_fields(listing: Listing, partition: Partition, fractions: Fractions) -> None:
    """Refuse a listing where some images lack a site or a part that the division needs and other images have."""
    asked = {NO_SITE.name: isinstance(partition, Natural), NO_PART.name: fractions.official}
    silent = missing_field_findings(listing, used_positions(listing))
    raise_findings(replace(finding, level="stop") for finding in silent if asked.get(finding.kind))


def division_findings(listing: Listing, divisions: Sequence[Refusal] = ()) -> Iterator[Finding]:
    """Find the divisions that a run would refuse; without divisions, try the listing's own sites and parts."""
    if not divisions:
        yield from _try_natural_division(listing)
    for sentence in filter(None, dict.fromkeys(refusal(listing) for refusal in divisions)):
        yield _division_finding(listing, "stop", sentence)


def _try_natural_division(listing: Listing) -> Iterator[Finding]:
    natural = Division(Natural() if any(record.site for record in listing.used_records) else Iid(sites=1))
    refusal = natural.find_refusal(listing)
    if refusal and len({record.label for record in listing.used_records}) == 1:
        yield Finding(
            kind=UNDIVIDED,
            level="stop",
            count=1,
            sentence="all images are of one class, so there is nothing to learn",
            remedy="add images of another class",
        )
    elif refusal:
        alternatives = {
            "another data.partition (such as iid)": replace(natural, partition=Iid(sites=1)),
            "data.allow_single_class: true": replace(natural, allow_single_class=True),
            "data.split: {official: false}": replace(natural, fractions=Fractions(official=False)),
        }
        helpful = [setting for setting, other in alternatives.items() if not other.find_refusal(listing)]
        yield _division_finding(listing, "warn" if helpful else "stop", refusal, " or ".join(helpful))


def _division_finding(listing: Listing, level: Level, refusal: str, helpful: str = "") -> Finding:
    sentence, _, remedy = _mask_names(listing, refusal).removesuffix(".").rpartition("; ")
    more = f"; in a recipe, {helpful} lets training start" if helpful else ""
    return Finding(UNDIVIDED, level, 1, sentence or remedy, remedy + more)


def _mask_names(listing: Listing, refusal: str) -> str:
    """Replace rare sites and labels, which may be a patient's name in the wrong column, by their place."""
    used = used_positions(listing)
    sites, labels = (
        group_positions(listing, used, lambda record: record.site),
        group_positions(listing, used, lambda record: record.label),
    )
    for groups, said in (
        (sites, set(disclosable_groups(listing, sites))),
        (labels, disclosable_labels(listing, labels)),
    ):
        for name in groups.keys() - said:
            refusal = refusal.replace(f"'{name}'", f"(that of {place_of(listing, groups[name][0])})")
    return refusal
