"""Snapshots of the server's state, each written atomically and covered by a checksum."""

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from polyclinic.core import Bundle, Refused, StoreError
from polyclinic.storage import messages
from polyclinic.storage.files import explain_os_errors, write_atomically

LEAST_KEPT = 2
"""Snapshots that are always kept: should the newest be damaged, the one before it serves."""
ROOM = 10
"""Older snapshots are kept only while the disk has room for so many more."""


class SnapshotStore:
    """The server's state after a round. The newest whose checksum holds is loaded.

    Args:
        folder: Where the snapshots are.
        keep: The number of snapshots that are kept, if the disk has room.
    """

    def __init__(self, folder: Path, keep: int = LEAST_KEPT) -> None:
        self.folder, self.keep = folder, keep

    def save(self, round: int, state: Bundle, fields: Mapping[str, object]) -> None:
        path, data = self.path_of(round), messages.encode({**fields, "round": round}, state)
        write_atomically(path, data, "snapshot-half-written", "snapshot-unnamed")
        with explain_os_errors(self.folder):
            has_room = shutil.disk_usage(self.folder).free > ROOM * len(data)
            for old in self._paths()[: -(self.keep if has_room else LEAST_KEPT)]:
                old.unlink(missing_ok=True)

    def path_of(self, round: int) -> Path:
        """Return the file of the snapshot after a round."""
        return self.folder / f"round-{round:06d}.pcl"

    def rounds(self) -> list[int]:
        """Return the rounds of which there are snapshots, in order."""
        return [int(path.stem.split("-")[1]) for path in self._paths()]

    def read(self, round: int) -> messages.Message:
        """Return the snapshot after a round; raises `StoreError` if it is damaged."""
        path = self.path_of(round)
        try:
            return messages.decode(path.read_bytes())
        except (Refused, OSError) as error:
            raise StoreError(f"{path} is damaged ({error}); choose an earlier round") from error

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
        return next(iter(self.rounds()), 0)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.pcl"))
