"""What a source lists before any pixel is read: one record per image.

A source (a folder, a table, an npz file, a named set) only lists. `load` decodes what is listed, `check` looks for what
is wrong with it, `diagnose` tells how its sites differ. Names of patients and of files stay out of everything that is
written or said: a patient is a pseudonym from here on, and people are told `where` an image is listed, not its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One image, where it is and what is said of it. Texts are as the source writes them, stripped."""

    path: Path = field(repr=False)
    label: str
    site: str = ""
    patient: str = ""
    """A pseudonym, never what the source says ("" where nothing is said: then the image is its own patient)."""
    split: str = ""
    """train, validation or test ("" where nothing is said)."""
    where: str = ""
    """How to tell people which image is meant, free of names: "labels.csv row 18", "benign, file 3"."""
    array: str = ""
    """The array of images inside an npz file …"""
    row: int | None = None
    """… and its row there (or in an idx file); None where the file is one image."""
    excluded: str = ""
    """Why it is known but not used ("" = it is used)."""


@dataclass(frozen=True)
class Listing:
    """All images of a source. Nothing has been opened yet: files may be missing or broken."""

    name: str
    root: Path
    records: tuple[Record, ...]
    classes: tuple[str, ...]
    """The classes of the task, in the order of their numbers."""
    official: bool = True
    """Whether what the records say of their split may be kept (False: it is known to be wrong)."""
    declared: bool = False
    """Whether `classes` were declared, rather than collected from the labels themselves."""
    unlisted: tuple[Path, ...] = field(default=(), repr=False)
    """Images that lie there but that the source does not mention."""

    @property
    def used_records(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if not record.excluded)

    def exclude_records(self, reasons: Mapping[int, str]) -> Listing:
        """The same listing with the records at these positions left out of use."""
        records = [
            replace(record, excluded=reasons.get(position, record.excluded))
            for position, record in enumerate(self.records)
        ]
        return replace(self, records=tuple(records))


def pseudonymise(names: Sequence[str]) -> tuple[str, ...]:
    """A number for every different name, in the order they first come; "" stays ""."""
    numbers: dict[str, int] = {}
    return tuple(f"patient-{numbers.setdefault(name, len(numbers) + 1)}" if name else "" for name in names)


def find_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """The classes that labels name, in the order of numbers where all are numbers, else of the alphabet."""
    found = {label for label in labels if label}
    return tuple(sorted(found, key=(lambda text: (int(text), text)) if all(map(_is_number, found)) else None))


def _is_number(text: str) -> bool:
    return len(text) <= 18 and text.isascii() and text.isdigit()


DISCLOSURE_MINIMUM = (10, 3)
"""Images, patients: what fewer than these share may be a name in the wrong column. Few patients have ten images."""


def is_disclosable(images: int, patients: int) -> bool:
    """Whether so many share a label, a site or a folder that its name cannot be a patient's."""
    return images >= DISCLOSURE_MINIMUM[0] and patients >= DISCLOSURE_MINIMUM[1]
