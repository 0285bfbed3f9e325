"""What the server has heard in a masked round, so that a resumed run goes on with the same sites.

Only what every site may see is kept: signed keys, encrypted shares, signatures, revealed shares, which sites each
exchange ended with, and the sum of the masked updates, but no masked update by itself.
"""

import contextlib
import json
import shutil
from pathlib import Path

from polyclinic.core import Bundle, Refused, SiteId
from polyclinic.storage import messages
from polyclinic.storage.files import explain_os_errors, make_folder, write_atomically

DIGITS = 16


class Transcript:
    """The replies and lists of sites of the rounds of one run, in a folder, or in memory without one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._kept: dict[str, bytes] = {}

    def read_reply(self, place: str, site: SiteId) -> messages.Message | None:
        """Return a kept reply; `place`: the round and exchange that it belongs to."""
        data = self._read(place, f"{site.encode().hex()}.pcl")
        with contextlib.suppress(Refused):
            return None if data is None else messages.decode(data)
        return None

    def write_reply(self, place: str, site: SiteId, reply: messages.Message) -> None:
        self._write(place, f"{site.encode().hex()}.pcl", messages.encode(reply.fields, reply.tensors))

    def read_sites(self, place: str) -> list[SiteId] | None:
        """Return the sites with which an exchange ended; None if it has not."""
        data = self._read(place, "sites.json")
        return None if data is None else list(json.loads(data))

    def write_sites(self, place: str, sites: list[SiteId]) -> None:
        self._write(place, "sites.json", json.dumps(sites).encode())

    def read_total(self, place: str) -> Bundle | None:
        """Return the sum of the masked updates, if it was complete before a resume."""
        data = self._read(place, "total.pcl")
        with contextlib.suppress(Refused):
            return None if data is None else messages.decode(data).tensors
        return None

    def write_total(self, place: str, total: Bundle) -> None:
        """Keep the sum of the masked updates, where a resume is possible."""
        if self.folder is not None:
            self._write(place, "total.pcl", messages.encode({}, total))

    def find_attempt(self, round: int, weights: str) -> int:
        """Return the number of the first attempt at a round that was not given up."""
        attempt = 0
        while self.read_sites(place_of(round, weights, attempt, "given-up")) is not None:
            attempt += 1
        return attempt

    def drop_before(self, round: int) -> None:
        """Delete what belongs to rounds before this one, to which no resume goes back."""
        if self.folder is None or not self.folder.exists():
            return
        with explain_os_errors(self.folder):
            for old in self.folder.glob("*"):
                if int(old.name.partition("-")[0]) < round:
                    shutil.rmtree(old, ignore_errors=True)

    def _read(self, place: str, name: str) -> bytes | None:
        if self.folder is None:
            return self._kept.get(f"{place}/{name}")
        path = self.folder / place / name
        with explain_os_errors(path):
            return path.read_bytes() if path.exists() else None

    def _write(self, place: str, name: str, data: bytes) -> None:
        if self.folder is None:
            self._kept[f"{place}/{name}"] = data
            return
        make_folder(self.folder / place)
        write_atomically(self.folder / place / name, data)


def place_of(round: int, weights: str, attempt: int, phase: str) -> str:
    """Return the place of an exchange; `weights`: the hash of what the round began with."""
    return f"{round:06d}-{weights[:DIGITS]}/{attempt}-{phase}"
