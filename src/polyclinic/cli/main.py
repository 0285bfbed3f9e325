"""The command line: its commands, and one sentence with a non-zero exit code for every expected mistake.

To add a command, write a function in the module of its kind and name it in `COMMANDS`. A command imports heavy
modules when it is called, so that `polyclinic --help` answers at once.
"""

import errno
import io
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from polyclinic.cli import (
    data,
    inspect,
    predict,
    privacy,
    provision,
    run,
    server,
    site,
)
from polyclinic.cli.common import print_message
from polyclinic.core import PolyclinicError, __version__

COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Run": {
        "demo": run.demo_command,
        "run": run.run_command,
        "resume": run.resume_command,
        "rollback": run.rollback_command,
        "compare": run.compare_command,
        "reproduce": run.reproduce_command,
        "list": run.list_command,
    },
    "Data": {"data": data.app, "weights": data.weights_app},
    "Results": {
        "report": inspect.report_command,
        "board": inspect.board_command,
        "explain": inspect.explain_command,
        "features": inspect.features_command,
        "predict": predict.predict_command,
        "export": predict.export_command,
    },
    "Privacy": {
        "plan": privacy.plan_command,
        "spent": privacy.spent_command,
        "audit": privacy.audit_command,
        "attack": privacy.attack_command,
    },
    "Real sites": {
        "provision": provision.provision_app,
        "serve": server.serve,
        "join": site.join,
        "status": server.status,
        "site": site.site_app,
    },
}


class ErrorReportingGroup(TyperGroup):
    """Print expected errors and errors of the operating system as one sentence, and exit with code 1."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _restore_argument_help(self.commands.values())

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolyclinicError as error:
            print_message(f"error: {error}")
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            print_message(f"error: {error.filename or 'the system'}: {error.strerror or error}; fix that and try again")
        raise typer.Exit(1)


def _restore_argument_help(commands: Iterable[Any]) -> None:
    """Set the help of arguments again, which click 8.5 overwrites."""
    for command in commands:
        _restore_argument_help(getattr(command, "commands", {}).values())
        hints = get_type_hints(command.callback, include_extras=True) if command.callback else {}
        for param in (param for param in command.params if param.help is None and param.name in hints):
            param.help = next((info.help for info in getattr(hints[param.name], "__metadata__", ())), None)


app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Federated learning on medical images, for hospitals that differ.",
)
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main_callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning on medical images, for hospitals that differ."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters still gets its table
    app(prog_name="polyclinic")
