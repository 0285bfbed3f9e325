"""`polyclinic report`: a run or a comparison as one file for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polyclinic.cli.common import err, out, print_message
from polyclinic.core.errors import RecipeError
from polyclinic.reporting.html import page, read_report_data, write_pdf
from polyclinic.reporting.html.pdf import find_browser
from polyclinic.reporting.html.report_data import ReportData
from polyclinic.reporting.markdown.comparison import markdown
from polyclinic.storage.run_files import explain_os_errors, write_atomically

LARGE = 3_000_000


def write_report(folders: Sequence[Path], target: Path, with_images: bool = False) -> ReportData:
    """The page, and what it is made of."""
    material = read_report_data(folders, with_images)
    with explain_os_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page(material).encode())
    return material


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of finished runs, or a comparison's.")
    ],
    path: Annotated[Path | None, typer.Option("--out", help="The HTML file (default: report.html in DIR).")] = None,
    as_markdown: Annotated[bool, typer.Option("--md", help="Also as Markdown, beside it.")] = False,
    as_pdf: Annotated[bool, typer.Option("--pdf", help="Also as PDF, beside it (needs Chromium).")] = False,
    with_images: Annotated[
        bool, typer.Option("--with-images", help="Show patients: the Grad-CAM gallery of `explain`.")
    ] = False,
) -> None:
    """Write one HTML file that clinicians, statisticians, engineers and data-protection officers can read."""
    target = path or folders[0] / "report.html"
    if target.suffix not in (".html", ".htm"):
        raise RecipeError(f"--out is {str(target)!r:.100}; name an HTML file, and --md and --pdf lie beside it")
    if as_pdf:
        find_browser()  # before minutes of work: is there one?
    with err.status("report"):
        material = write_report(folders, target, with_images)
        written = [target]
        if as_markdown:
            written.append(target.with_suffix(".md"))
            write_atomically(written[-1], markdown(material.comparison).encode())
        if as_pdf:
            written.append(target.with_suffix(".pdf"))
            write_pdf(target, written[-1])
    if with_images:
        for each in written:
            each.chmod(0o600)
    if (size := target.stat().st_size) > LARGE:
        print_message(f"{target} has {size / 1e6:.1f} MB, much for a mail; give fewer folders for a smaller one")
    kept = " (it shows patients: keep it there)" if with_images else ""
    out.print(Text(f"written: {'  '.join(map(str, written))}{kept}"), soft_wrap=True)
