"""322 mammograms, left and right of 161 women, 1024 × 1024 pixels of 200 µm: normal, benign, malignant.

mini-MIAS: digitised film mammograms of the United Kingdom's screening programme (Suckling et al., 1994).
"""

import re
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    Columns,
    Download,
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    read_table,
)

CLASSES = ("normal", "benign", "malignant")
SITE = "MIAS-UK"
FILM = re.compile(r"mdb(\d{3})\s+[FGD]\s+([A-Z]{4})\s*([BM]?)\b")
"""Reference, background tissue, class of abnormality, severity."""


def _read_plain(table: Path, *, name: str, classes: tuple[str, ...]) -> Listing:
    """Read the table. A pair of films is one woman, whose column may be `patient_pair`."""
    paired = "patient_pair" in table.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    columns = Columns(patient="patient_pair") if paired else Columns()
    return read_table(table, name=name, classes=classes, columns=columns)


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    images = find_subfolder(folder, "all-mias")
    info = next((place / "Info.txt" for place in (images, folder) if (place / "Info.txt").is_file()), None)
    if info is None or not any(images.glob("mdb*.pgm")):
        return None
    records = tuple(
        Record(images / f"mdb{number}.pgm", label, SITE, f"woman {(int(number) + 1) // 2}", where=where)
        for number, (label, where) in _read_films(info).items()
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


DATASET = define_public_dataset(
    name="mias",
    licence="research only, see its Licence.txt; cite Suckling et al. 1994",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download all-mias.tar.gz from http://peipa.essex.ac.uk/info/mias.html, agree to its licence "
        "and unpack it there, so that the folder holds all-mias/mdb001.pgm to mdb322.pgm and Info.txt."
    ),
    downloads=(Download("http://peipa.essex.ac.uk/pix/mias/all-mias.tar.gz", "", "all-mias.tar.gz", unpack=True),),
    read_plain=_read_plain,
)
