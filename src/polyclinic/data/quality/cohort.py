"""Faults of the cohort: patients in several parts or at several sites, missing classes, labels that follow sites."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyclinic.data.findings import (
    SHOWN,
    Finding,
    FindingKind,
    Group,
    as_groups,
    build_findings,
    build_set_finding,
    disclosable_groups,
    format_count,
    group_positions,
    place_of,
    used_positions,
)
from polyclinic.data.quality.labels import find_other_spellings, misspelt_findings, real_classes
from polyclinic.data.records import Listing, Record
from polyclinic.data.splits import PARTS

FEW_AT_SITE = 20
"""A tenth of fewer images (the test part) is one image or none."""
CONFOUNDED = 0.25
"""Cramér's V: between what differing case mixes give (0 to 0.12 in four public sets) and 0.48, where site gives away
the label; a site with 80 % of a class where the other has 50 % has 0.3."""
SURE = 0.001
LARGEST_TABLE = 10**7
"""Sites × classes. With more, the texts are neither sites nor classes, which other findings report."""

UNNAMED = FindingKind("image without a patient", "warn", "write who it is: now each counts as a patient of its own")
NO_SITE = FindingKind("image without a site", "warn", "write the site of these images, or leave them out")
NO_PART = FindingKind("image without a part", "warn", "write train, validation or test for all images, or for none")


def cohort_findings(listing: Listing) -> Iterator[Finding]:
    used = used_positions(listing)
    yield from _patient_findings(listing, used)
    classes = real_classes(listing)
    yield from _part_findings(listing, used, classes)
    yield from _site_findings(listing, used, classes)
    yield from missing_field_findings(listing, used)


def _patient_findings(listing: Listing, used: list[int]) -> Iterator[Finding]:
    patients = group_positions(listing, used, lambda record: record.patient)
    several = [group for group in patients.values() if len(group) > 1]
    if used and not patients:
        yield Finding(
            "no patients",
            "note",
            len(used),
            sentence="no patient is named, so each image counts as one",
            remedy="name a patient column if there is one; else images are split one by one",
        )
    if several:
        yield Finding(
            "patients with several images",
            "note",
            len(several),
            sentence=f"of {len(patients):,} patients {format_count(len(several), 'has', 'have')} several images, "
            f"{max(map(len, several)):,} at most",
            remedy="nothing: splits are made by patient",
        )
    yield from build_findings(
        listing,
        FindingKind("patient in two parts", "stop", "split by patient: with official: false that is done here"),
        _first_of_each_value(listing, several, lambda record: record.split if record.split in PARTS else ""),
        lambda f: f"{format_count(len(f), 'patient has', 'patients have')} images in more than one part",
        handled="" if listing.official else "the loader does not keep this split and makes its own, by patient",
    )
    yield from build_findings(
        listing,
        FindingKind(
            "patient at two sites", "warn", "if it is the same person, sites are not independent; else number anew"
        ),
        _first_of_each_value(listing, several, lambda record: record.site),
        lambda f: f"{format_count(len(f), 'patient has', 'patients have')} images at more than one site",
    )


def _first_of_each_value(listing: Listing, patients: list[list[int]], value: Callable[[Record], str]) -> list[Group]:
    """Return, for each patient with several values, the first image of each value."""
    spread = (group_positions(listing, group, value) for group in patients)
    return [tuple(group[0] for group in values.values()) for values in spread if len(values) > 1]


def _part_findings(listing: Listing, used: list[int], classes: set[str]) -> Iterator[Finding]:
    yield from build_findings(
        listing,
        FindingKind("unknown part", "stop", "write train, validation or test, or leave the cells empty"),
        as_groups([p for p in used if listing.records[p].split not in ("", *PARTS)]),
        lambda f: format_count(len(f), "image is", "images are") + " said to be in a part that is none of the three",
        handled="" if listing.official else "the loader does not keep this split",
    )
    parts = group_positions(listing, used, lambda record: record.split if record.split in PARTS else "")
    if listing.official and len(parts) > 1:
        lacking = {part: len(classes - _labels_of(listing, group)) for part, group in parts.items()}
        yield from _missing_class_findings(
            FindingKind("class missing in a part", "warn", "split anew with official: false, by patient and class"),
            lacking,
            "part lacks",
            "parts lack",
            set(PARTS),
        )


def _labels_of(listing: Listing, positions: list[int]) -> set[str]:
    return {listing.records[position].label for position in positions}


def _missing_class_findings(
    kind: FindingKind, lacking: Mapping[str, int], one: str, several: str, disclosable: set[str]
) -> Iterator[Finding]:
    if short := {name: missing for name, missing in lacking.items() if missing}:
        shown = sorted(disclosable & short.keys())[:SHOWN]
        yield Finding(
            kind.name,
            kind.level,
            len(short),
            f"{format_count(len(short), one, several)} classes that others have, {max(short.values()):,} at most",
            kind.remedy,
            where=tuple(f"{name} ({format_count(short[name], 'class', 'classes')})" for name in shown),
        )


def _site_findings(listing: Listing, used: list[int], classes: set[str]) -> Iterator[Finding]:
    sites = group_positions(listing, used, lambda record: record.site)
    if len(sites) < 2:
        return
    disclosable = disclosable_groups(listing, sites)
    yield from misspelt_findings(
        listing,
        FindingKind("misspelt site", "warn", "write each site in one way: now they count as different sites"),
        sites,
        find_other_spellings(sites),
        disclosable,
        nouns=("image has a site that looks", "images have a site that looks"),
    )

    def place(fault: Group) -> str:
        site = listing.records[fault[0]].site
        name = site if site in disclosable else f"the site of {place_of(listing, fault[0])}"
        return f"{name} ({len(fault):,})"

    yield from build_findings(
        listing,
        FindingKind(
            "few images at a site", "warn", "join the site with another, or leave it out; its own figures say nothing"
        ),
        [group for group in sites.values() if len(group) < FEW_AT_SITE],
        lambda f: f"{format_count(len(f), 'site has', 'sites have')} fewer than {FEW_AT_SITE} images",
        place=place,
    )
    if len(classes) > 1:
        held = {site: classes & _labels_of(listing, group) for site, group in sites.items()}
        yield from build_findings(
            listing,
            FindingKind(
                "site with a single class",
                "warn",
                "join it with another: there a model can learn the site for the label",
            ),
            [group for site, group in sites.items() if len(held[site]) == 1],
            lambda f: f"{format_count(len(f), 'site has', 'sites have')} images of one class only",
            place=place,
        )
        lacking = {site: len(classes) - len(there) for site, there in held.items() if len(there) > 1}
        yield from _missing_class_findings(
            FindingKind(
                "class missing at a site",
                "warn",
                "read the figures of these sites by class; a personal model forgets it",
            ),
            lacking,
            "site lacks",
            "sites lack",
            set(disclosable),
        )
    yield from _confounding_findings(listing, used, classes)


def missing_field_findings(listing: Listing, used: list[int]) -> Iterator[Finding]:
    """Report fields that some records have and others lack."""
    for kind, field in ((UNNAMED, "patient"), (NO_SITE, "site"), (NO_PART, "split")):
        silent = [position for position in used if not getattr(listing.records[position], field)]
        if 0 < len(silent) < len(used) and (field != "split" or listing.official):
            count = format_count(len(silent), "image has", "images have")
            yield build_set_finding(listing, kind, silent, f"{count} no {field}, while others have one")


class Association(NamedTuple):
    """The association between labels and sites."""

    v: float
    """Cramér's V with Bergsma's correction for bias (J. Korean Stat. Soc. 42, 2013): 0 if independent, 1 if one gives
    the other."""
    p: float
    """The p-value of the χ² test of independence."""
    guessed: float
    """The proportion of labels guessed correctly from the most frequent class at each site …"""
    commonest: float
    """… and from the most frequent class of all."""


def measure_association(table: NDArray[np.int64]) -> Association:
    """Measure the association in a table of counts (sites × classes, at least two each, no empty row or column)."""
    from scipy.stats import chi2_contingency  # takes a second to load, and most runs do without

    total = int(table.sum())
    chi2, p, freedom, _ = chi2_contingency(table, correction=False)
    sides = [side - (side - 1) ** 2 / (total - 1) for side in table.shape]
    excess = max(0.0, float(chi2) / total - int(freedom) / (total - 1))
    v = math.sqrt(excess / (min(sides) - 1)) if min(sides) > 1 else 0.0
    return Association(
        min(1.0, v), float(p), float(table.max(axis=1).sum() / total), float(table.sum(axis=0).max() / total)
    )


def _confounding_findings(listing: Listing, used: list[int], real: set[str]) -> Iterator[Finding]:
    known = [listing.records[p] for p in used if listing.records[p].site and listing.records[p].label in real]
    sites, row = np.unique([record.site for record in known], return_inverse=True)
    classes, column = np.unique([record.label for record in known], return_inverse=True)
    if min(len(sites), len(classes)) < 2 or len(sites) * len(classes) > LARGEST_TABLE:
        return
    table = np.zeros((len(sites), len(classes)), dtype=np.int64)
    np.add.at(table, (row, column), 1)
    found = measure_association(table)
    if found.v >= CONFOUNDED and found.p < SURE:
        p = f"= {found.p:.0e}" if found.p > 1e-99 else "< 1e-99"
        yield Finding(
            "label follows site",
            "warn",
            len(sites),
            sentence=f"labels follow sites (Cramér's V {found.v:.2f}, p {p}): knowing only the site, "
            f"{found.guessed:.0%} of labels are guessed correctly, against {found.commonest:.0%} without it",
            remedy="test on sites that were not trained on; never trust the pooled figure",
        )
