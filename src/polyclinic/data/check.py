"""The check of a dataset before training: every file is opened once, and faults are reported by kind.

Findings contain no names of patients or files; they say where an image is listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from polyclinic.data.findings import Finding, disclosable_groups, group_positions, used_positions
from polyclinic.data.loading.loader import find_label_faults
from polyclinic.data.partitioning.dry_run import UNDIVIDED, Refusal, division_findings
from polyclinic.data.quality.cohort import cohort_findings
from polyclinic.data.quality.duplicates import duplicate_findings
from polyclinic.data.quality.files import file_findings
from polyclinic.data.quality.image_stats import Progress, measure_images
from polyclinic.data.quality.labels import disclosable_labels
from polyclinic.data.records import Listing

LEVELS = ("stop", "warn", "note")
RARE = "(rare ones)"
"""Stands for labels or sites so rare that they might be a patient's name in the wrong column."""


@dataclass(frozen=True)
class CheckResult:
    name: str
    images: int
    """The number of listed images; `classes` and `sites` count only those in use."""
    classes: Mapping[str, int]
    sites: Mapping[str, int]
    findings: tuple[Finding, ...]
    """Findings that stop training come first, those that the loader handles last."""

    @property
    def may_train(self) -> bool:
        return not any(finding.stops for finding in self.findings)

    @property
    def can_be_divided(self) -> bool:
        """Whether training may start on the dataset's own sites and parts, with a recipe's default settings."""
        return all(finding.kind != UNDIVIDED for finding in self.findings)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "images": self.images,
            "classes": dict(self.classes),
            "sites": dict(self.sites),
            "may_train": self.may_train,
            "findings": [
                asdict(finding) | {"where": list(finding.where), "positions": list(finding.positions)}
                for finding in self.findings
            ],
        }


def check_listing(
    listing: Listing, workers: int = 0, progress: Progress | None = None, divisions: Sequence[Refusal] = ()
) -> CheckResult:
    """Check every image and every record of a listing.

    `workers` threads decode images (0: one per core); `progress` is called with the number of images done and in all.
    If nothing stops training, the `divisions` (without any: the listing's own sites and parts) are tried on the labels.
    """
    stats = measure_images(listing, workers, progress)
    found = [
        *file_findings(listing, stats),
        *duplicate_findings(listing, stats),
        *find_label_faults(listing),
        *cohort_findings(listing),
    ]
    if not any(finding.stops for finding in found):
        found += division_findings(listing, divisions)
    used = used_positions(listing)
    labels = group_positions(listing, used, lambda record: record.label)
    sites = group_positions(listing, used, lambda record: record.site)
    return CheckResult(
        name=listing.name,
        images=len(listing.records),
        classes=_count_groups(labels, disclosable_labels(listing, labels)),
        sites=_count_groups(sites, set(disclosable_groups(listing, sites))),
        findings=tuple(sorted(found, key=lambda finding: (bool(finding.handled), LEVELS.index(finding.level)))),
    )


def _count_groups(groups: Mapping[str, list[int]], disclosable: set[str]) -> dict[str, int]:
    counts = {name: len(groups[name]) for name in sorted(disclosable & groups.keys())}
    rare = sum(map(len, groups.values())) - sum(counts.values())
    return counts | ({RARE: rare} if rare else {})
