"""Faults of labels: empty, misspelt, outside the task, too few per class."""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import SequenceMatcher
from functools import lru_cache

from polyclinic.data.findings import (
    SHOWN,
    Finding,
    FindingKind,
    Group,
    as_groups,
    build_findings,
    build_set_finding,
    count_patients,
    disclosable_groups,
    format_count,
    group_positions,
    place_of,
    used_positions,
)
from polyclinic.data.records import Listing

RESEMBLANCE = 0.8
RARER = 5
"""A misspelling is at least this many times rarer than the class it resembles."""
MANY = 1000
FEW_PATIENTS = 3
FEW_IMAGES = 100
IMBALANCE = 5
UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ø": "oe", "å": "aa"})

TYPO = FindingKind("misspelt label", "stop", "correct them, or declare the classes if this is a class of its own")
FEW = FindingKind(
    "class with few patients", "warn", "no split by patient has it in all three parts: join it or get more"
)


def label_findings(listing: Listing) -> Iterator[Finding]:
    everything = group_positions(listing, range(len(listing.records)), lambda record: record.label)
    yield from build_findings(
        listing,
        FindingKind("empty label", "stop", "write the labels, or leave these images out"),
        as_groups(position for position, record in enumerate(listing.records) if not record.label),
        lambda f: format_count(len(f), "image has", "images have") + " no label",
    )
    misspelt = find_misspellings(listing, everything)
    yield from misspelt_findings(
        listing, TYPO, everything, misspelt, disclosable_labels(listing, everything), ("label looks", "labels look")
    )
    known = {*listing.classes, *misspelt}
    yield from build_findings(
        listing,
        FindingKind(
            "label outside the task", "stop", "correct them, leave these images out, or add the class to the task"
        ),
        as_groups(sorted(position for label, group in everything.items() if label not in known for position in group)),
        lambda f: format_count(len(f), "image has", "images have") + " a label that is none of the task's classes",
    )
    classes = group_positions(listing, used_positions(listing), lambda record: record.label)
    yield from _count_findings(listing, {c: classes.get(c, []) for c in listing.classes if c not in misspelt})


def real_classes(listing: Listing) -> set[str]:
    """Return the classes expected at every site and in every part: no misspellings, no classes with one image."""
    labels = group_positions(listing, used_positions(listing), lambda record: record.label)
    misspelt = find_misspellings(listing, labels)
    return {c for c in listing.classes if len(labels.get(c, ())) > 1 and c not in misspelt}


def disclosable_labels(listing: Listing, labels: Mapping[str, list[int]]) -> set[str]:
    """Return the labels that may be shown: declared classes, or labels that are frequent enough."""
    return set(listing.classes if listing.declared else disclosable_groups(listing, labels))


def find_misspellings(listing: Listing, labels: Mapping[str, list[int]]) -> dict[str, str]:
    """Map labels that are most likely misspelt to the intended one. Thousands of labels are not compared."""
    suspects = labels.keys() - set(listing.classes if listing.declared else ())
    return _find_intended(labels, suspects, labels.keys() & set(listing.classes), _is_misspelling)


def find_other_spellings(names: Mapping[str, list[int]]) -> dict[str, str]:
    """Map names that differ only in case, accents and spaces from a more frequent one to that one."""
    return _find_intended(names, names, names, _is_respelling)


def _find_intended(
    names: Mapping[str, list[int]],
    suspects: Collection[str],
    known: Collection[str],
    mistakes: Callable[[str, str, Mapping[str, list[int]]], bool],
) -> dict[str, str]:
    found: dict[str, str] = {}
    for suspect in sorted(suspects) if len(names) <= MANY else ():
        if meant := [name for name in sorted(known) if name != suspect and mistakes(suspect, name, names)]:
            found[suspect] = max(meant, key=lambda name: (_label_similarity(suspect, name), len(names[name])))
    return found


def _is_misspelling(suspect: str, label: str, labels: Mapping[str, list[int]]) -> bool:
    if _normalise_label(suspect) == _normalise_label(label):
        return _is_respelling(suspect, label, labels)
    return (
        len(labels[suspect]) * RARER <= len(labels[label])
        and not _differ_as_codes(suspect, label)
        and _label_similarity(suspect, label) > RESEMBLANCE
    )


def _is_respelling(suspect: str, name: str, names: Mapping[str, list[int]]) -> bool:
    return _normalise_label(suspect) == _normalise_label(name) and (len(names[suspect]), suspect) < (
        len(names[name]),
        name,
    )


@lru_cache(4 * MANY)
def _normalise_label(label: str) -> str:
    """Remove case, accents, spaces, underscores and hyphens between letters (but not the last sign of "HER2-")."""
    letters = unicodedata.normalize("NFD", unicodedata.normalize("NFC", label.casefold()).translate(UMLAUTS))
    bare = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return re.sub(r"[\s_]+|(?<=\w)-(?=\w)", "", bare)


def _label_similarity(one: str, other: str) -> float:
    return SequenceMatcher(None, _normalise_label(one), _normalise_label(other), autojunk=False).ratio()


def _differ_as_codes(one: str, other: str) -> bool:
    """Whether two labels differ as codes do ("grade 1", "grade 2"; "MLO_L", "MLO_R") or by a prefix ("abnormal")."""
    first, second = re.split(r"[\W_]+", one.casefold()), re.split(r"[\W_]+", other.casefold())
    differing = [pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]]
    short = len(first) == len(second) and all(max(map(len, pair)) <= 2 for pair in differing)
    digits = re.sub(r"\d", "", _normalise_label(one)) == re.sub(r"\d", "", _normalise_label(other))
    lengthened = abs(len(_normalise_label(one)) - len(_normalise_label(other))) > 1
    return short or digits or lengthened


def misspelt_findings(
    listing: Listing,
    kind: FindingKind,
    names: Mapping[str, list[int]],
    intended: Mapping[str, str],
    disclosable: Collection[str],
    nouns: tuple[str, str],
) -> Iterator[Finding]:
    """Report names that are most likely misspelt, quoted only if the intended name is disclosable."""
    misspelt = {position: name for name in intended for position in names[name]}

    def sentence(some: list[Group]) -> str:
        found = dict.fromkeys(misspelt[position] for fault in some for position in fault)
        hints = [f"'{name}' (did you mean '{intended[name]}'?)" for name in found if intended[name] in disclosable]
        quoted = ": " + ", ".join(hints[:SHOWN]) if hints else ""
        return f"{format_count(len(some), *nouns)} misspelt{quoted}"

    yield from build_findings(listing, kind, as_groups(sorted(misspelt)), sentence)


def _count_findings(listing: Listing, classes: Mapping[str, list[int]]) -> Iterator[Finding]:
    disclosable = disclosable_labels(listing, classes)

    def place(fault: Group) -> str:
        label = listing.records[fault[0]].label
        return f"'{label}'" if label in disclosable else f"the class of {place_of(listing, fault[0])}"

    yield from build_findings(
        listing,
        FindingKind("class with one image", "stop", "leave the class out, join it with another, or get more images"),
        [group for group in classes.values() if len(group) == 1],
        lambda f: format_count(len(f), "class has", "classes have") + " a single image",
        place=place,
    )
    yield from build_findings(
        listing,
        FEW,
        [group for group in classes.values() if len(group) > 1 and count_patients(listing, group) < FEW_PATIENTS],
        lambda f: format_count(len(f), "class has", "classes have") + f" fewer than {FEW_PATIENTS} patients",
        place=place,
    )
    if none := [label for label, group in classes.items() if not group]:
        yield Finding(
            "class without images",
            "warn",
            len(none),
            sentence=format_count(len(none), "class of the task has", "classes of the task have") + " no image",
            remedy="leave the class out of the task, or look whether its label is spelt alike",
            where=tuple(f"'{label}'" for label in none[:SHOWN]) if listing.declared else (),
        )
    yield from _proportion_findings(listing, classes)


def _proportion_findings(listing: Listing, classes: Mapping[str, list[int]]) -> Iterator[Finding]:
    counts = sorted(len(group) for group in classes.values() if group)
    total = sum(counts)
    if total < FEW_IMAGES:
        yield Finding(
            "too few images",
            "warn" if total else "stop",
            total,
            sentence=f"the set has {format_count(total, 'image')} to use; a tenth of them says nothing about a method",
            remedy="use it for trials only; no figure measured on it is reliable",
        )
    if len(counts) > 1 and counts[-1] >= IMBALANCE * counts[0]:
        rarest = min((group for group in classes.values() if group), key=len)
        yield build_set_finding(
            listing,
            FindingKind(
                "class imbalance", "note", "read balanced accuracy and per-class figures; oversample if need be"
            ),
            rarest,
            f"the commonest class has {counts[-1]:,} images, the rarest {counts[0]:,}",
        )
