"""Snapshots of the server's state, each written atomically and covered by a checksum."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from polyclinic.core import Bundle, Refused, StoreError
from polyclinic.storage import messages
from polyclinic.storage.files import explain_os_errors, write_atomically


class SnapshotStore:
    """The server's state after a round. The newest two are kept; the newest whose checksum holds is loaded."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(self, round: int, state: Bundle, fields: Mapping[str, object]) -> None:
        path, data = self.folder / f"round-{round:06d}.pcl", messages.encode({**fields, "round": round}, state)
        write_atomically(path, data, "snapshot-half-written", "snapshot-unnamed")
        with explain_os_errors(self.folder):
            for old in self._paths()[: -self.keep]:
                old.unlink(missing_ok=True)

    def load(self) -> messages.Message | None:
        """Return the newest snapshot that passes its checksum; None when there is none at all."""
        paths = self._paths()
        for path in reversed(paths):
            with contextlib.suppress(Refused, OSError):
                return messages.decode(path.read_bytes())
        if paths:
            raise StoreError(
                f"every snapshot in {self.folder} is damaged (checksum); start the run anew in another folder"
            )
        return None

    def oldest_round(self) -> int:
        """Return the earliest round that a resume could go back to: sites keep their memories from there on."""
        paths = self._paths()
        return int(paths[0].stem.split("-")[1]) if paths else 0

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.pcl"))
