"""The file of metrics by round and site."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic.core import StoreError
from polyclinic.storage.files import append_durably, explain_os_errors


class MetricsFile:
    """JSON rows, which a resumed run truncates to those that its snapshot covers."""

    def __init__(self, path: Path) -> None:
        self.path, self._sum = path, hashlib.sha256()

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        append_durably(self.path, data)
        self._sum.update(data)

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def checksum(self) -> str:
        """Of everything that was appended, or kept by `truncate`."""
        return self._sum.hexdigest()

    def truncate(self, size: int, checksum: str | None = None) -> None:
        """Drop the rows that are newer than the snapshot that is resumed from; those rounds run again."""
        with explain_os_errors(self.path, "read"):
            seen = self.path.read_bytes()[:size] if self.path.exists() else b""
        self._sum = hashlib.sha256(seen)
        if len(seen) < size:
            raise StoreError(
                f"{self.path} is shorter than its snapshot says; restore it or start anew in another folder"
            )
        if checksum not in (None, self.checksum()):
            raise StoreError(f"{self.path} is damaged (checksum); restore it or start anew in another folder")
        if self.path.exists():
            with explain_os_errors(self.path):
                os.truncate(self.path, size)
