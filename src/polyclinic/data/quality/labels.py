"""Faults of labels: empty, misspelt, outside the task, too few of a kind."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import SequenceMatcher
from functools import lru_cache

from polyclinic.data.findings import SHOWN, Finding, Level
from polyclinic.data.quality.finding_text import (
    Group,
    Kind,
    about_set,
    by,
    findings,
    many,
    patients,
    sayable,
    singly,
    used_positions,
    where,
)
from polyclinic.data.records import Listing

RESEMBLANCE = 0.8
RARER = 5
"""A misspelling is at least so many times rarer than the class it resembles."""
MANY = 1000
FEW_PATIENTS = 3
FEW_IMAGES = 100
IMBALANCE = 5
UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ø": "oe", "å": "aa"})

EMPTY = Kind("empty label", "stop", "write the labels, or leave these images out")
TYPO = Kind("misspelt label", "stop", "correct them, or declare the classes if this is one of its own")
OUTSIDE = Kind("label outside the task", "stop", "correct them, leave these images out, or add the class to the task")
ONE_IMAGE = Kind("class with one image", "stop", "leave the class out, join it with another, or get more images")
FEW = Kind("class with few patients", "warn", "no split by patient has it in all three parts: join it or get more")
NONE = Kind("class without images", "warn", "leave the class out of the task, or look whether its label is spelt alike")
SMALL = Kind("too few images", "warn", "use it to try things out; believe no figure measured on it")
IMBALANCED = Kind("class imbalance", "note", "read balanced accuracy and per-class figures; oversample if need be")


def label_findings(listing: Listing) -> Iterator[Finding]:
    everything = by(listing, range(len(listing.records)), lambda record: record.label)
    empty = [position for position, record in enumerate(listing.records) if not record.label]
    yield from findings(listing, EMPTY, singly(empty), lambda f: many(len(f), "image has", "images have") + " no label")
    misspelt = misspellings(listing, everything)
    yield from misspelt_findings(
        listing, TYPO, everything, misspelt, said_labels(listing, everything), ("label looks", "labels look")
    )
    known = {*listing.classes, *misspelt}
    outside = [position for label, group in everything.items() if label not in known for position in group]
    yield from findings(
        listing,
        OUTSIDE,
        singly(sorted(outside)),
        lambda f: many(len(f), "image has", "images have") + " a label that is none of the task's classes",
    )
    classes = by(listing, used_positions(listing), lambda record: record.label)
    yield from _counts(listing, {c: classes.get(c, []) for c in listing.classes if c not in misspelt})


def real_classes(listing: Listing) -> set[str]:
    """The classes that sites and parts can be expected to have: no misspellings, nothing that is there only once."""
    labels = by(listing, used_positions(listing), lambda record: record.label)
    misspelt = misspellings(listing, labels)
    several = {label for label, group in labels.items() if len(group) > 1}
    return several.intersection(listing.classes) - misspelt.keys()


def said_labels(listing: Listing, labels: Mapping[str, list[int]]) -> set[str]:
    """Those that may be said aloud."""
    return set(listing.classes if listing.declared else sayable(listing, labels))


def misspellings(listing: Listing, labels: Mapping[str, list[int]]) -> dict[str, str]:
    """Labels that are most likely another one misspelt, and which. Thousands are no classes that could be."""
    suspects = labels.keys() - set(listing.classes if listing.declared else ())
    return _meant(labels, suspects, labels.keys() & set(listing.classes), _misspells)


def other_spellings(names: Mapping[str, list[int]]) -> dict[str, str]:
    """Names that differ from a commoner one in case, accents and spaces only, and from which."""
    return _meant(names, names, names, _respells)


def _meant(
    names: Mapping[str, list[int]],
    suspects: Collection[str],
    known: Collection[str],
    mistakes: Callable[[str, str, Mapping[str, list[int]]], bool],
) -> dict[str, str]:
    found: dict[str, str] = {}
    for suspect in sorted(suspects) if len(names) <= MANY else ():
        meant = [name for name in sorted(known) if name != suspect and mistakes(suspect, name, names)]
        if meant:
            found[suspect] = max(meant, key=lambda name: (_resemblance(suspect, name), len(names[name])))
    return found


def _misspells(suspect: str, label: str, labels: Mapping[str, list[int]]) -> bool:
    if _plain(suspect) == _plain(label):
        return _respells(suspect, label, labels)
    rare, common = len(labels[suspect]), len(labels[label])
    return rare * RARER <= common and not _codes(suspect, label) and _resemblance(suspect, label) > RESEMBLANCE


def _respells(suspect: str, name: str, names: Mapping[str, list[int]]) -> bool:
    return _plain(suspect) == _plain(name) and (len(names[suspect]), suspect) < (len(names[name]), name)


@lru_cache(4 * MANY)
def _plain(label: str) -> str:
    """Without case, accents, spaces and what stands for a space; the last sign of "HER2-" is none."""
    letters = unicodedata.normalize("NFD", unicodedata.normalize("NFC", label.casefold()).translate(UMLAUTS))
    bare = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return re.sub(r"[\s_]+|(?<=\w)-(?=\w)", "", bare)


def _resemblance(one: str, other: str) -> float:
    return SequenceMatcher(None, _plain(one), _plain(other), autojunk=False).ratio()


def _codes(one: str, other: str) -> bool:
    """Whether they differ as codes do ("grade 1" and "grade 2", "MLO_L" and "MLO_R") or by a prefix ("abnormal")."""
    first, second = re.split(r"[\W_]+", one.casefold()), re.split(r"[\W_]+", other.casefold())
    differing = [pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]]
    short = len(first) == len(second) and all(max(map(len, pair)) <= 2 for pair in differing)
    digits = re.sub(r"\d", "", _plain(one)) == re.sub(r"\d", "", _plain(other))
    lengthened = abs(len(_plain(one)) - len(_plain(other))) > 1
    return short or digits or lengthened


def misspelt_findings(
    listing: Listing,
    kind: Kind,
    names: Mapping[str, list[int]],
    meant: Mapping[str, str],
    said: Collection[str],
    nouns: tuple[str, str],
) -> Iterator[Finding]:
    """Of `names` those that are most likely another one (`meant`), quoted only where that one may be `said`."""
    misspelt = {position: name for name in meant for position in names[name]}

    def sentence(some: list[Group]) -> str:
        found = dict.fromkeys(misspelt[position] for fault in some for position in fault)
        told = [f"'{name}' (did you mean '{meant[name]}'?)" for name in found if meant[name] in said]
        quoted = ": " + ", ".join(told[:SHOWN]) if told else ""
        return f"{many(len(some), *nouns)} misspelt{quoted}"

    yield from findings(listing, kind, singly(sorted(misspelt)), sentence)


def _counts(listing: Listing, classes: Mapping[str, list[int]]) -> Iterator[Finding]:
    said = said_labels(listing, classes)

    def place(fault: Group) -> str:
        label = listing.records[fault[0]].label
        return f"'{label}'" if label in said else f"the class of {where(listing, fault[0])}"

    one = [group for group in classes.values() if len(group) == 1]
    few = [group for group in classes.values() if len(group) > 1 and patients(listing, group) < FEW_PATIENTS]
    yield from findings(
        listing, ONE_IMAGE, one, lambda f: many(len(f), "class has", "classes have") + " a single image", place=place
    )
    yield from findings(
        listing,
        FEW,
        few,
        lambda f: many(len(f), "class has", "classes have") + f" fewer than {FEW_PATIENTS} patients",
        place=place,
    )
    none = [label for label, group in classes.items() if not group]
    if none:
        told = many(len(none), "class of the task has", "classes of the task have") + " no image"
        shown = tuple(f"'{label}'" for label in none[:SHOWN]) if listing.declared else ()
        yield Finding(NONE.name, NONE.level, len(none), told, NONE.remedy, shown)
    yield from _proportions(listing, classes)


def _proportions(listing: Listing, classes: Mapping[str, list[int]]) -> Iterator[Finding]:
    counts = sorted(len(group) for group in classes.values() if group)
    total = sum(counts)
    if total < FEW_IMAGES:
        level: Level = "warn" if total else "stop"
        told = f"the set has {many(total, 'image')} to use; a tenth of them says nothing about a method"
        yield Finding(SMALL.name, level, total, told, SMALL.remedy)
    if len(counts) > 1 and counts[-1] >= IMBALANCE * counts[0]:
        rarest = min((group for group in classes.values() if group), key=len)
        told = f"the commonest class has {counts[-1]:,} images, the rarest {counts[0]:,}"
        yield about_set(listing, IMBALANCED, rarest, told)
