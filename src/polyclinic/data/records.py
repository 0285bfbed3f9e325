"""The listing of a dataset: one record per image, before any pixel is read.

A source (a folder, a table, an npz file, a public dataset) only lists images. `loading` decodes them, `check` looks for
faults, `heterogeneity` measures how sites differ. Names of patients and files never appear in output: patients are
pseudonyms from here on, and messages say `where` an image is listed instead of naming its file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One image: its file, label, site, patient and part, as the source writes them (stripped)."""

    path: Path = field(repr=False)
    label: str
    site: str = ""
    patient: str = ""
    """A pseudonym, never the source's own text ("": not named, so splits count the image as a patient of its own)."""
    split: str = ""
    """train, validation or test ("": not stated)."""
    where: str = ""
    """The image's place in the source, free of names, for messages: "labels.csv row 18", "benign, file 3"."""
    array: str = ""
    """The array inside an npz file that holds the image …"""
    row: int | None = None
    """… and its row there (or in an idx file); None if the file is a single image."""
    excluded: str = ""
    """Why the image is not used ("": it is used)."""


@dataclass(frozen=True)
class Listing:
    """All images of a source. No file has been opened yet: some may be missing or damaged."""

    name: str
    root: Path
    records: tuple[Record, ...]
    classes: tuple[str, ...]
    """The classes of the task; a class's position is its number."""
    official: bool = True
    """Whether the split in the records may be kept (False: it is known to be wrong)."""
    declared: bool = False
    """Whether `classes` were declared, not collected from the labels."""
    unlisted: tuple[Path, ...] = field(default=(), repr=False)
    """Image files that exist beside the listed ones but are not listed."""

    @property
    def used_records(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if not record.excluded)

    def exclude_records(self, reasons: Mapping[int, str]) -> "Listing":
        """Return the same listing with the records at these positions excluded, each for its reason."""
        return replace(
            self,
            records=tuple(
                replace(record, excluded=reasons.get(position, record.excluded))
                for position, record in enumerate(self.records)
            ),
        )


def pseudonymise(names: Sequence[str]) -> tuple[str, ...]:
    """Replace every name by a number, in the order of first appearance; "" stays ""."""
    numbers: dict[str, int] = {}
    return tuple(f"patient-{numbers.setdefault(name, len(numbers) + 1)}" if name else "" for name in names)


def find_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct labels, sorted as numbers if all are numbers, else alphabetically."""
    found = {label for label in labels if label}
    are_numbers = all(len(label) <= 18 and label.isascii() and label.isdigit() for label in found)
    return tuple(sorted(found, key=(lambda text: (int(text), text)) if are_numbers else None))


DISCLOSURE_MINIMUM = (10, 3)
"""A label or site with fewer images or fewer patients than this may be a patient's name in the wrong column, and is not
shown. Few patients have ten images."""


def is_disclosable(images: int, patients: int) -> bool:
    """Whether a label, site or folder name is shared by so many that it cannot be a patient's name."""
    return images >= DISCLOSURE_MINIMUM[0] and patients >= DISCLOSURE_MINIMUM[1]
