"""Append-only ledgers: JSON rows in a chain of hashes, so that a changed or missing row is noticed.

The hash has no key: it finds damage, not a forger who rewrites the whole file. Rows cut from the end are noticed by the
snapshot, which names the row that it includes.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeAlias

from polyclinic.core import StoreError
from polyclinic.storage.files import append_durably, explain_os_errors

LedgerRow: TypeAlias = dict[str, Any]
"""A row of a ledger, as it was written."""

CHAIN_KEY = b'"chain": "'
HASH = 32
"""Hexadecimal digits of a row's hash."""


class Ledger:
    """An append-only file of JSON rows, each synced before it counts and hashed together with the row before."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.chain = path, 0, ""
        if path.exists():
            self._verify()
        else:
            with explain_os_errors(path):
                path.touch()

    def append(self, **row: Any) -> None:
        text = json.dumps(row, allow_nan=False)
        chain = _hash_row(self.chain, text)
        line = f'{text[:-1]}{", " if row else ""}{CHAIN_KEY.decode()}{chain}"}}\n'.encode()
        append_durably(self.path, line, "ledger-half-written")
        self.chain, self.rows = chain, self.rows + 1

    def read(self) -> list[LedgerRow]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def includes(self, rows: int, chain: str) -> bool:
        """Whether the first `rows` rows end in `chain`, so that none of them was lost or changed."""
        lines = self.path.read_text().splitlines()
        return rows <= len(lines) and (rows == 0 or json.loads(lines[rows - 1])["chain"] == chain)

    def _verify(self) -> None:
        """Check the chain. A half-written last line, which a crash leaves, is cut off; anything else is damage."""
        with explain_os_errors(self.path, "read"):
            *lines, tail = self.path.read_bytes().split(b"\n")
        for line in lines:
            self.chain, self.rows = self._next_link(line), self.rows + 1
        if tail:
            whole = tail[: tail.find(CHAIN_KEY) + len(CHAIN_KEY) + HASH + 2]
            if whole != tail and _valid_link(self.chain, whole):
                self._next_link(tail)  # damage, since a half-written row does not go on after its end
            with explain_os_errors(self.path):
                os.truncate(self.path, self.path.stat().st_size - len(tail))

    def _next_link(self, line: bytes) -> str:
        chain = _valid_link(self.chain, line)
        if chain is None:
            raise StoreError(
                f"{self.path} is damaged at row {self.rows + 1} (checksum), so the run's cost is not known in full and "
                "it cannot be resumed; restore the file or start anew in another folder"
            )
        return chain


def read_chain(path: Path) -> tuple[int, str]:
    """Return the number of complete rows of a ledger and the hash of the last; raises `StoreError` for a wrong row.

    Writes nothing, so that another process may go on with the ledger.
    """
    chain = ""
    with explain_os_errors(path, "read"):
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        link = _valid_link(chain, line)
        if link is None:
            raise StoreError(f"{path} was changed or damaged at row {number}; find out how, and keep it")
        chain = link
    return len(lines), chain


def _hash_row(chain: str, row: str) -> str:
    return hashlib.sha256(f"{chain}|{row}".encode()).hexdigest()[:HASH]


def _valid_link(chain: str, line: bytes) -> str | None:
    """Return the hash that a row carries if it follows from the row before, otherwise None."""
    row, _, carried = line.decode(errors="replace").rpartition(CHAIN_KEY.decode())
    link = _hash_row(chain, row.removesuffix(", ") + "}")
    return link if carried == f'{link}"}}' else None
