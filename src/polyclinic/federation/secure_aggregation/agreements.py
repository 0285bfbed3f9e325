"""What a site has bound itself to in each round of a run, so that it never masks or unmasks for two lists of sites."""

import json
from pathlib import Path

from polyclinic.core import Refused, StoreError
from polyclinic.storage.files import write_atomically


class Agreements:
    """By round and subject what a site has agreed to, in a file that is synced before the site answers.

    Without a file (in a simulation) it is kept for as long as the process lives.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._made: dict[str, str] = {}
        if path is not None and path.exists():
            try:
                self._made = {str(k): str(v) for k, v in json.loads(path.read_text()).items()}
            except (OSError, ValueError, AttributeError) as error:
                raise StoreError(f"{path} is damaged ({error}); end the run, and begin it anew") from None

    def bind(self, round: int, subject: str, content: str) -> None:
        """Agree to `content`, or raise `Refused` if this site has agreed to something else in this round."""
        known = self._made.get(f"{round} {subject}")
        if known == content:
            return
        if known is not None:
            raise Refused(
                "agreement",
                f"this site has agreed to another list of sites in round {round}, and two sums of one round could be "
                "compared; resume the run with the sites it had, or start it anew",
            )
        made = {**self._made, f"{round} {subject}": content}
        if self.path is not None:
            write_atomically(self.path, json.dumps(made).encode(), mode=0o600)
        self._made = made

    def forget_after(self, round: int) -> None:
        """Drop what was agreed in later rounds: for a rollback that the site's people have allowed."""
        self._made = {name: content for name, content in self._made.items() if int(name.split()[0]) <= round}
        if self.path is not None:
            write_atomically(self.path, json.dumps(self._made).encode(), mode=0o600)
