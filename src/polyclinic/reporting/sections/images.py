"""Pictures that other commands have written into a run's folder: features by site and class, and saliency maps."""

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from polyclinic.core import StoreError
from polyclinic.reporting.blocks import Block, Paragraph, Photo, Section, Strong
from polyclinic.reporting.report_data import ReportData

WIDEST = 1500
TALLEST = 4000
MOST = 4
"""Pictures of a kind: the page is to stay small enough to send."""
MAX_BYTES = 420_000
"""Of one picture, as WebP."""


def features_section(data: ReportData) -> Section | None:
    """t-SNE by site and class, if `polyclinic features` was run."""
    found = list(_find_pictures(data, "features.png"))
    if not found:
        return None
    return Section(
        "features",
        "Features by site and class",
        [
            Paragraph(
                "Each dot is an image as the network sees it (t-SNE): images that look alike to it lie close. "
                "Distances between far groups mean nothing. If sites form islands, the network sees the site, not "
                "the disease."
            ),
            *(_read_photo(path, "Features by site and class") for path in found[:MOST]),
        ],
        {"Clinician": "Does it see the disease or the scanner?", "Engineer": "Are features mixed?"},
    )


def saliency_section(data: ReportData) -> Section | None:
    """Grad-CAM, if `polyclinic explain` was run and pictures of patients may be shown."""
    galleries = list(_find_pictures(data, "explain/gallery.png"))
    histograms = list(_find_pictures(data, "explain/histograms.png"))
    if not galleries and not histograms:
        return None
    blocks: list[Block] = []
    if data.with_images:
        words = "This part shows patients, because --with-images was given: keep the file where they may be seen."
        blocks.append(Paragraph(Strong(words)))
        blocks += [_read_photo(path, "Where the network looks (Grad-CAM)") for path in galleries[:MOST]]
    elif galleries:
        blocks.append(
            Paragraph("There is a Grad-CAM gallery. It shows patients, so it is left out: --with-images adds it.")
        )
    blocks += [_read_photo(path, "Pixel values of the sites' training images") for path in histograms[:MOST]]
    return Section("saliency", "Where the network looks", blocks, {"Clinician": "Where does it look?"})


def _find_pictures(data: ReportData, name: str) -> Iterator[Path]:
    """In the folders given, then in those of the runs."""
    runs = [run.files.path for method in data.methods for run in method.runs if run.files]
    for place in dict.fromkeys(path.resolve() for path in (*data.folders, *runs)):
        if (place / name).is_file():
            yield place / name


def _read_photo(path: Path, title: str) -> Photo:
    try:
        with Image.open(path) as image:
            info = {str(key): str(value) for key, value in image.info.items()}
            content, size = _shrink(image)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise StoreError(f"{path} cannot be read ({error}); make it anew, or remove it") from error
    own_title, alt = _describe_photo(path, info)
    return Photo(own_title or title, alt or title, path, content, size)


def _describe_photo(path: Path, info: dict[str, str]) -> tuple[str, str]:
    """Title and description, from explain.json or from the picture's own metadata."""
    described = path.parent / "explain.json"
    if described.is_file():
        try:
            found = json.loads(described.read_text(encoding="utf-8"))["pictures"][path.name]
            return str(found["title"]), str(found["alternative"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the picture's own metadata will do
    return info.get("Title", ""), info.get("Description", "")


def _shrink(image: Image.Image) -> tuple[bytes, tuple[int, int]]:
    """As WebP, on white, no larger than a page needs."""
    flat = Image.new("RGB", image.size, "white")
    rich = image.convert("RGBA")
    flat.paste(rich, mask=rich.getchannel("A"))
    flat.thumbnail((WIDEST, TALLEST))
    for quality in (85, 70, 55, 40):
        stored = BytesIO()
        flat.save(stored, "WEBP", quality=quality, method=4)
        if stored.tell() <= MAX_BYTES:
            break
    return stored.getvalue(), flat.size
