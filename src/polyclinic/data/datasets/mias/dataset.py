"""322 mammograms, left and right of 161 women, 1024 × 1024 pixels of 200 µm: normal, benign, malignant.

mini-MIAS: digitised film mammograms of the United Kingdom's screening programme (Suckling et al., 1994).
"""

import re
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    TABLE,
    Columns,
    Download,
    Listing,
    NamedDataset,
    Record,
    find_subfolder,
    pseudonymise,
    read_public_set,
    read_table,
)

CLASSES = ("normal", "benign", "malignant")
SITE = "MIAS-UK"
OBTAIN = (
    "download all-mias.tar.gz from http://peipa.essex.ac.uk/info/mias.html, agree to its licence "
    "and unpack it there, so that the folder holds all-mias/mdb001.pgm to mdb322.pgm and Info.txt."
)
FILM = re.compile(r"mdb(\d{3})\s+[FGD]\s+([A-Z]{4})\s*([BM]?)\b")
"""Reference, background tissue, class of abnormality, severity."""


def _read_plain_table(folder: Path) -> Listing:
    """A pair of films is one woman; the table may call her `patient_pair`."""
    table = folder / TABLE
    paired = "patient_pair" in table.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    columns = Columns(patient="patient_pair") if paired else Columns()
    return read_table(table, name="mias", classes=CLASSES, columns=columns)


def _read_published(folder: Path) -> Listing | None:
    images = find_subfolder(folder, "all-mias")
    info = next((place / "Info.txt" for place in (images, folder) if (place / "Info.txt").is_file()), None)
    if info is None or not any(images.glob("mdb*.pgm")):
        return None
    films = _read_films(info)
    women = pseudonymise([str((int(number) + 1) // 2) for number in films])
    records = tuple(
        Record(images / f"mdb{number}.pgm", label, SITE, woman, where=where)
        for (number, (label, where)), woman in zip(films.items(), women, strict=True)
    )
    unlisted = set(images.glob("*.pgm")) - {record.path for record in records}
    return Listing("mias", folder, records, CLASSES, declared=True, unlisted=tuple(sorted(unlisted)))


def _read_films(info: Path) -> dict[str, tuple[str, str]]:
    """Label and place of every film. A film with several lesions has several lines: the worst counts."""
    films: dict[str, tuple[str, str]] = {}
    for line, text in enumerate(info.read_text(encoding="latin-1").splitlines(), start=1):
        if film := FILM.match(text.strip()):
            number, abnormality, severity = film.groups()
            label = "normal" if abnormality == "NORM" else {"B": "benign", "M": "malignant"}.get(severity, "")
            if number not in films or label == "malignant":
                films[number] = (label, f"{info.name} line {line}")
    return films


DATASET = NamedDataset(
    name="mias",
    licence="research only, see its Licence.txt; cite Suckling et al. 1994",
    classes=CLASSES,
    read=lambda _, folder: read_public_set(
        "mias", folder, _read_published, OBTAIN, _read_plain_table, classes=CLASSES, sites=(SITE,)
    ),
    obtain=OBTAIN,
    downloads=(Download("http://peipa.essex.ac.uk/pix/mias/all-mias.tar.gz", "", "all-mias.tar.gz", unpack=True),),
)
