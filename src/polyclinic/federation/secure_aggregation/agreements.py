"""What a site has bound itself to in each round of a run, so that it never masks or unmasks for two lists of sites."""

import json
from pathlib import Path

from polyclinic.core import Refused, StoreError
from polyclinic.storage.files import write_atomically

AGREEMENTS = "masks.json"
"""The file in the folder of a run at a real site."""
ALLOWED = "0 allowed"
"""The entry that counts how often the site's people let rounds be played again. It belongs to no round, and stays."""


class Agreements:
    """By round and subject what a site has agreed to, in a file that is synced before the site answers,
    and read anew each time, since the site's people may let go of a round while it runs.

    Without a file (in a simulation) it is kept for as long as the process lives.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._held: dict[str, str] = {}

    def bind(self, round: int, subject: str, content: str) -> None:
        """Agree to `content`, or raise `Refused` if this site has agreed to something else in this round."""
        made = self._read()
        known = made.get(f"{round} {subject}")
        if known == content:
            return
        if known is not None:
            raise Refused(
                "agreement",
                f"this site has agreed to another list of sites in round {round}, and two sums of one round could be "
                "compared; resume the run with the sites it had, or start it anew",
            )
        self._write({**made, f"{round} {subject}": content})

    @property
    def times_allowed(self) -> int:
        """How often `forget_after` was called. The site's secrets depend on it: with those of before, two lists of
        sites could be unmasked in a round that is played again, and both secrets of one site be revealed."""
        return int(self._read().get(ALLOWED, "0"))

    def forget_after(self, round: int) -> None:
        """Drop what was agreed in later rounds: for a round that the site's people let the server ask for again. From
        then on the site has other secrets."""
        made = self._read()
        kept = {name: content for name, content in made.items() if int(name.split()[0]) <= round}
        self._write({**kept, ALLOWED: str(int(made.get(ALLOWED, "0")) + 1)})

    def _read(self) -> dict[str, str]:
        if self.path is None or not self.path.exists():
            return self._held
        try:
            return {str(k): str(v) for k, v in json.loads(self.path.read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise StoreError(f"{self.path} is damaged ({error}); end the run, and begin it anew") from None

    def _write(self, made: dict[str, str]) -> None:
        if self.path is None:
            self._held = made
        else:
            write_atomically(self.path, json.dumps(made).encode(), mode=0o600)
