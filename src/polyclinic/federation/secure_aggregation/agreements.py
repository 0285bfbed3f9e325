"""What a site has bound itself to, so that it never masks or unmasks for two lists of sites: in each round of a run,
and over runs, to one masked run a seed."""

import json
from pathlib import Path

from polyclinic.core import Refused, SiteId, StoreError
from polyclinic.storage.files import write_atomically, write_json

AGREEMENTS = "masks.json"
"""The file in the folder of a run at a real site."""
SEEDS = "masked-seeds.json"
"""The file in a site's own folder."""
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
        return self._held if self.path is None else _read_texts(self.path, "end the run, and begin it anew")

    def _write(self, made: dict[str, str]) -> None:
        if self.path is None:
            self._held = made
        else:
            write_atomically(self.path, json.dumps(made).encode(), mode=0o600)


class MaskedSeeds:
    """The seeds of the masked recipes that have begun to run at a site, each with the name of its run.

    What a site trains follows from the recipe's seed, not from the run. In two runs of one seed the same updates would
    be added up, and the difference of a sum with a site and of one without it would be that site's update.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / SEEDS

    def check_new(self, seed: int, site: SiteId) -> None:
        """Raise `Refused` if a masked run of this seed has begun here, whatever became of it."""
        if (run := self._read().get(str(seed))) is not None:
            raise Refused(
                "agreement",
                f"the masked run {run} with seed {seed} has begun at {site} before, and a second sum of the same "
                "updates could be compared with its own; give the recipe another seed, and have it approved anew",
            )

    def record(self, seed: int, run: str) -> None:
        """Enter the seed of a run that has begun."""
        known = self._read()
        if str(seed) not in known:
            write_json(self.path, {**known, str(seed): run})

    def _read(self) -> dict[str, str]:
        return _read_texts(self.path, "restore it from a backup")


def _read_texts(path: Path, remedy: str) -> dict[str, str]:
    """Return the texts of a file by name, none if it is not there; raises `StoreError` with the remedy if damaged."""
    if not path.exists():
        return {}
    try:
        return {str(k): str(v) for k, v in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is damaged ({error}); {remedy}") from None
