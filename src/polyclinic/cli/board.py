"""`polyclinic board`: a page that follows a run or a comparison while it goes on."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polyclinic.cli.common import out, print_message
from polyclinic.dashboard import open_board

NEW = "new"


def board_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run or a comparison, going on or ended; or still empty.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: wherever is free.")] = 8765,
    host: Annotated[
        str, typer.Option(help="On which address; any but this machine's own needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(envvar="POLYCLINIC_BOARD_TOKEN", help=f"What everyone who looks must have; {NEW}: draw one."),
    ] = None,
) -> None:
    """Show a run or a comparison in the browser while it goes on: rounds, sites, curves, cost, failures."""
    with open_board(folder, host, port, secrets.token_urlsafe(24) if token == NEW else token) as server:
        out.print(Text(f"board: {server.board_url}"), soft_wrap=True)
        print_message("Ctrl-C ends the board, not the run")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
