"""Frontal chest X-rays from publications and the NIH: normal, pneumonia, covid, tuberculosis.

Frontal chest X-rays gathered from publications (Cohen et al., MELBA 1, 2020), with NIH images as further normals.
"""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    read_rows,
)

CLASSES = ("normal", "pneumonia", "covid", "tuberculosis")
FRONTAL = ("PA", "AP", "AP Supine", "AP Erect")
HANNOVER = "Hannover-ml-workgroup"
SITES = ("NIH-ChestXray8", "radiopaedia.org", "eurorad.org", HANNOVER)
"""The four large ones; a table that names none of them is another set's."""


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "covid-chestxray-dataset", "covid-chestxray-dataset-master")
    table = root / "metadata.csv"
    listed_rows = list(read_rows(table)) if table.is_file() else []
    if not all({"patientid", "finding", "view", "filename"} <= row.keys() for _, row in listed_rows):
        return None
    records = [
        Record(
            # whatever the table says, only files directly in these two folders are read
            root / ("volumes" if row.get("folder") == "volumes" else "images") / Path(row["filename"]).name,
            _map_label(row["finding"]),
            _site_name(row),
            row["patientid"],
            where=where,
            excluded=_exclusion_reason(row),
        )
        for where, row in listed_rows
    ]
    return Listing("covid_cxr", root, tuple(records), CLASSES, declared=True)


def _map_label(finding: str) -> str:
    """Findings are paths in a tree of diseases: "Pneumonia/Viral/COVID-19"."""
    steps = finding.lower().split("/")
    if "covid-19" in steps[-1]:
        return "covid"
    return {"no finding": "normal"}.get(steps[0], steps[0])


def _site_name(row: Mapping[str, str]) -> str:
    """Return where an image was published: the best approximation of a hospital in the table."""
    url = urlsplit(row.get("url", ""))
    return HANNOVER if "ml-workgroup" in url.path else (url.hostname or "").removeprefix("www.")


def _exclusion_reason(row: Mapping[str, str]) -> str:
    if row["view"] not in FRONTAL or row.get("modality", "X-ray") != "X-ray":
        return "not a frontal X-ray"
    if _map_label(row["finding"]) not in CLASSES:
        return "its finding is none of the classes"
    return "" if row.get("license") else "no licence is stated for it"


DATASET = define_public_dataset(
    name="covid_cxr",
    licence="per image, in the column `license` of its table",
    classes=CLASSES,
    sites=SITES,
    read_published=_read_published,
    obtain=(
        "clone https://github.com/ieee8023/covid-chestxray-dataset there, "
        "so that the folder holds metadata.csv and images/."
    ),
)
