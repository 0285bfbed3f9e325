"""How a server or a site calls for people: a command of the operator's own, and log lines as JSON for collectors."""

import contextlib
import json
import logging
import subprocess
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

ATTENTION, FAILED, FINISHED = "attention", "failed", "finished"
"""What a command is called with: somebody has to mend something; a run has stopped with an error; a run has ended."""
PATIENCE = 60.0
"""Seconds after which a command that has not ended is killed."""
LONGEST = 500
log = logging.getLogger("polyclinic.deploy.notices")


class Notifier:
    """Runs a command of the operator's whenever people are needed, with the event and a sentence as its last words.

    `command`: the program and its first words, as in `notify` of server.yaml or site.yaml; empty: nothing is run. No
    shell sees the words. A command that fails or hangs is reported in the log and disturbs nothing else.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    def send(self, event: str, sentence: str) -> None:
        """Call the command, without waiting for it."""
        if self.command:
            threading.Thread(target=self._run_command, args=(event, sentence), daemon=True).start()

    def send_and_wait(self, event: str, sentence: str) -> None:
        """Call the command and wait for its end: for the last notice before a process ends."""
        if self.command:
            self._run_command(event, sentence)

    def _run_command(self, event: str, sentence: str) -> None:
        words = "".join(letter if letter.isprintable() else " " for letter in sentence)[:LONGEST]
        try:
            ended = subprocess.run(
                [*self.command, event, words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PATIENCE,
                check=False,
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            log.warning("the command in `notify` could not be run: %s", error)
            return
        if ended.returncode:
            log.warning("the command in `notify` ended with exit code %d", ended.returncode)


class JsonLines(logging.Formatter):
    """Formats every log record as one line of JSON: time, level, source, message, and the fields of an event."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "source": record.name,
            "message": record.getMessage(),
        }
        with contextlib.suppress(AttributeError):
            line |= record.fields  # type: ignore[attr-defined]
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
