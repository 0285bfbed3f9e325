"""Pictures that other commands left in a run's folder: features by site and class, and where networks look."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from polyclinic.core.errors import StoreError
from polyclinic.reporting.html.report_data import ReportData
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.tags import figure, join_cells, paragraph, tag

WIDEST = 1500
TALLEST = 4000
MOST = 4
"""Pictures of a kind: the page is to stay small enough to send."""
BYTES = 420_000
"""Of one picture, as WebP."""


def features_section(material: ReportData) -> Section | None:
    """t-SNE by site and class, if `polyclinic features` was run."""
    found = list(_left(material, "features.png"))
    if not found:
        return None
    note = (
        "Each dot is an image as the network sees it (t-SNE): images that it takes for alike lie close. Distances "
        "between far groups mean nothing. If hospitals form islands, the network sees the hospital, not the disease."
    )
    parts = [paragraph(note), *(_shown(path, "Features by hospital and class") for path in found[:MOST])]
    asked: Asked = {"Clinician": "Does it see the disease or the scanner?", "Engineer": "Are features mixed?"}
    return Section("features", "What the network makes of the images", join_cells(parts), asked)


def saliency_section(material: ReportData) -> Section | None:
    """Grad-CAM, if `polyclinic explain` was run and pictures of patients may be shown."""
    galleries = list(_left(material, "explain/gallery.png"))
    histograms = list(_left(material, "explain/histograms.png"))
    if not galleries and not histograms:
        return None
    parts: list[Markup] = []
    if material.pictures:
        words = "This part shows patients, because --with-images was asked for: keep the file where they may be seen."
        parts.append(paragraph(tag("strong", words)))
        parts += [_shown(path, "Where the network looks (Grad-CAM)") for path in galleries[:MOST]]
    elif galleries:
        parts.append(
            paragraph("There is a Grad-CAM gallery. It shows patients, so it is left out: --with-images adds it.")
        )
    parts += [_shown(path, "Pixel values of the hospitals' training images") for path in histograms[:MOST]]
    return Section("looks", "Where the network looks", join_cells(parts), {"Clinician": "Where does it look?"})


def _left(material: ReportData, name: str) -> Iterator[Path]:
    """In the folders given, then in those of the runs."""
    places = [*material.folders, *(run.folder for method in material.methods for run in method.runs)]
    for place in dict.fromkeys(path.resolve() for path in places):
        if (place / name).is_file():
            yield place / name


def _shown(path: Path, title: str) -> Markup:
    try:
        with Image.open(path) as image:
            told = {str(key): str(value) for key, value in image.info.items()}
            data, size = _small(image)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise StoreError(f"{path} cannot be read ({error}); make it anew, or remove it") from error
    named, words = _told(path, told)
    source = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
    picture = tag("img", src=source, alt=words or title, width=size[0], height=size[1])
    return figure(picture, named or title, class_="wide")


def _told(path: Path, info: dict[str, str]) -> tuple[str, str]:
    """Title and description: from explain.json, or as the picture itself carries them."""
    beside = path.parent / "explain.json"
    if beside.is_file():
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))["pictures"][path.name]
            return str(found["title"]), str(found["alternative"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the picture's own words do
    return info.get("Title", ""), info.get("Description", "")


def _small(image: Image.Image) -> tuple[bytes, tuple[int, int]]:
    """As WebP, on white, no larger than a page needs."""
    flat = Image.new("RGB", image.size, "white")
    rich = image.convert("RGBA")
    flat.paste(rich, mask=rich.getchannel("A"))
    flat.thumbnail((WIDEST, TALLEST))
    for quality in (85, 70, 55, 40):
        stored = BytesIO()
        flat.save(stored, "WEBP", quality=quality, method=4)
        if stored.tell() <= BYTES:
            break
    return stored.getvalue(), flat.size
