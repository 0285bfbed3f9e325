"""A site's keys, in its folder: one for the noise of each run, erased when the run ends, and the chain they come from.

    (1)  run key = HKDF(chain key, "run", the run's terms)      chain key ← HKDF(chain key, "next")

HKDF (RFC 5869) cannot be reversed. So once a run has ended, nothing in the folder tells its noise: its key is gone, and
the chain has moved on. A kill between two steps of `begin_run` loses nothing, since no noise is drawn before all are
taken: the run is then begun again, with a key of its own.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyclinic.core import StoreError, failpoint
from polyclinic.storage.files import erase_file, make_folder, write_atomically

CHAIN, IMAGES, RUN = "secret", "images.key", "key"
BYTES = 32


class SiteKeys:
    """The keys in a site's `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mark_images(self, fingerprint: str) -> str:
        """Return a keyed hash that shows the server when the images change, and reveals nothing else."""
        return hmac.new(self._read_or_draw(IMAGES), fingerprint.encode(), hashlib.sha256).hexdigest()

    def begin_run(self, run: Path, terms: str) -> None:
        """Write the key of a run into its folder and move the chain on, by (1); `terms`: a hash of the run's terms."""
        for unfinished in (*self.folder.glob(f".{CHAIN}.*.tmp"), *run.glob(f".{RUN}.*.tmp")):
            erase_file(unfinished)
        chain = self._read_or_draw(CHAIN)
        make_folder(run, 0o700)
        _write_key(run / RUN, _derive_key(chain, f"run {terms}"))
        failpoint("run-key-written")
        with open(self.folder / CHAIN, "r+b") as former:
            _write_key(self.folder / CHAIN, _derive_key(chain, "next"))
            former.write(bytes(2 * BYTES))  # the blocks of the file that has just been replaced
            os.fsync(former.fileno())
        failpoint("chain-key-moved")

    def read_run_key(self, run: Path) -> int:
        """Return the key of a run that has begun, for its noise."""
        return int.from_bytes(_read_key(run / RUN, "end the run, and begin it anew"))

    def _read_or_draw(self, name: str) -> bytes:
        path = self.folder / name
        make_folder(self.folder, 0o700)
        if not path.exists():
            _write_key(path, secrets.token_bytes(BYTES))
        return _read_key(path, "remove it, and start runs anew")


def erase_run_key(run: Path) -> None:
    """Erase the key of a run that has ended."""
    erase_file(run / RUN)


def _derive_key(chain: bytes, purpose: str) -> bytes:
    return HKDF(SHA256(), BYTES, None, purpose.encode()).derive(chain)


def _read_key(path: Path, remedy: str) -> bytes:
    try:
        key = bytes.fromhex(path.read_text())
        if len(key) != BYTES:
            raise ValueError(f"it has {len(key)} bytes, not {BYTES}")
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}, a key of this site, cannot be read ({error}); {remedy}") from None
    return key


def _write_key(path: Path, key: bytes) -> None:
    write_atomically(path, key.hex().encode(), mode=0o600)
