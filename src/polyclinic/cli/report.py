"""The commands `report` and `board`."""

import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import polyclinic
from polyclinic.cli.common import err, out, print_message
from polyclinic.core import RecipeError

LARGE = 3_000_000


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of finished runs, or the folder of a comparison.")
    ],
    path: Annotated[Path | None, typer.Option("--out", help="The HTML file (default: report.html in DIR).")] = None,
    as_markdown: Annotated[bool, typer.Option("--md", help="Also write Markdown.")] = False,
    as_pdf: Annotated[bool, typer.Option("--pdf", help="Also write a PDF (needs Chromium).")] = False,
    with_images: Annotated[
        bool,
        typer.Option("--with-images", help="Include the Grad-CAM gallery of `explain`, which shows patients' images."),
    ] = False,
) -> None:
    """Write a report in one HTML file, for clinicians, statisticians, engineers and data-protection officers."""
    from polyclinic.reporting.html.pdf import find_browser, write_pdf
    from polyclinic.reporting.render_markdown import write_markdown

    target = path or folders[0] / "report.html"
    if target.suffix not in (".html", ".htm"):
        raise RecipeError(f"--out is {str(target)!r:.100}; name an HTML file; --md and --pdf write beside it")
    if as_pdf:
        find_browser()  # fail before minutes of work
    with err.status("report"):
        content = polyclinic.report(folders, target, with_images)
        written = [target]
        if as_markdown:
            written.append(target.with_suffix(".md"))
            write_markdown(content, written[-1])
        if as_pdf:
            written.append(target.with_suffix(".pdf"))
            write_pdf(target, written[-1])
    if with_images:
        for each in written:
            each.chmod(0o600)
    if (size := target.stat().st_size) > LARGE:
        print_message(
            f"{target} has {size / 1e6:.1f} MB, which is large for an e-mail; give fewer folders for a smaller file"
        )
    kept = " (it shows patients' images; do not share it)" if with_images else ""
    out.print(Text(f"written: {'  '.join(map(str, written))}{kept}"), soft_wrap=True)


NEW, OPEN = "new", "none"


def board_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a run or a comparison, which may still be empty.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="The address to listen on; any but this machine's own needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar="POLYCLINIC_BOARD_TOKEN",
            help=f"The token that viewers need: `{NEW}` (the default here) draws one, `{OPEN}` admits every account of "
            "this machine.",
        ),
    ] = None,
) -> None:
    """Follow a run or a comparison in the browser: rounds, sites, curves, cost and failures."""
    from polyclinic.dashboard import open_board
    from polyclinic.deploy.config import is_loopback

    if token == NEW or (token is None and is_loopback(host)):
        token = secrets.token_urlsafe(24)
    with open_board(folder, host, port, None if token == OPEN else token) as server:
        out.print(Text(f"board: {server.board_url}"), soft_wrap=True)
        print_message("Ctrl-C stops the board, not the run")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
