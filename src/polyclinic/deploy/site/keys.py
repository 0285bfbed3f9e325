"""The keys of a site, and what it knows of the keys of others.

In its folder are keys for noise: one for the noise of each run, erased when the run ends, and the chain they come from.

    (1)  run key = HKDF(chain key, "run", the run's terms)      chain key ← HKDF(chain key, "next")

HKDF (RFC 5869) cannot be reversed. So once a run has ended, nothing in the folder tells its noise: its key is gone, and
the chain has moved on. A kill between two steps of `begin_run` loses nothing, since no noise is drawn before all are
taken: the run is then begun again, with a key of its own.

Of other sites it knows the public keys, from a list that the federation's authority has signed. A list is in the kit
(`peers.json` beside `ca.crt`) and comes with the server's messages. The newest is kept in the site's folder; an older
one is never taken again. Whoever has the authority's key can add sites to the list. A site that trusts fewer writes the
fingerprints that its people have compared into `peers` of its site.yaml: others then count for nothing.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyclinic.core import EngineError, RecipeError, Refused, StoreError, failpoint
from polyclinic.deploy.provisioning.certificates import (
    Certificate,
    encode_public_openssh,
    key_fingerprint,
    read_certificate,
    read_private_key,
)
from polyclinic.deploy.provisioning.manifest import DELIVERED, MANIFEST, check_kit
from polyclinic.deploy.provisioning.peer_list import PEERS, PeerList, verify_peers
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.policy import list_looser_keys
from polyclinic.storage.files import erase_file, make_folder, write_atomically, write_json
from polyclinic.storage.signatures import PeerKeys, SiteSigner

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


class SitePeers:
    """The other sites' public keys, and this site's own private key to sign with."""

    def __init__(self, config: SiteConfig, report: Callable[[str], None] = lambda _: None) -> None:
        """`report` is called with a sentence when the list of sites changes."""
        assert config.ca is not None
        assert config.key is not None
        self.config, self.report = config, report
        self._authority = read_certificate(config.ca)
        self._signer = SiteSigner(config.site, read_private_key(config.key))
        self._list = PeerList(config.federation, 0, {})
        if (kit := config.ca.with_name(PEERS)).exists():
            self._list = self._newer(_read_list(kit))
        with suppress(Refused):  # of an authority that was replaced since
            self._list = self._newer(_read_list(config.folder / PEERS))

    @property
    def signer(self) -> SiteSigner:
        """What signs with this site's private key, which may have been replaced since the site started."""
        with suppress(EngineError):  # the files may just be being replaced
            assert self.config.key is not None
            self._signer = SiteSigner(self.config.site, read_private_key(self.config.key))
        return self._signer

    @property
    def authority(self) -> Certificate:
        """The certificate of the federation's authority, which may have been replaced, too."""
        with suppress(EngineError):
            assert self.config.ca is not None
            self._authority = read_certificate(self.config.ca)
        return self._authority

    @property
    def keys(self) -> PeerKeys:
        """The public keys of the sites of the federation, only those in `peers` of site.yaml if it names any."""
        known, pins = self._list.public_keys(), {*self.config.peers, _fingerprint(self.signer)}
        if not self.config.peers:
            return PeerKeys(known)
        return PeerKeys({s: k for s, k in known.items() if key_fingerprint(encode_public_openssh(k)) in pins})

    def take_list(self, values: object) -> None:
        """Take a newer list from the server, and keep it; raises `Refused` if the authority did not sign it."""
        found = self._newer(values)
        if found.version == self._list.version:
            return
        for sentence in _changes(self._list, found):
            self.report(sentence)
        write_json(self.config.folder / PEERS, values)
        self._list = found

    def _newer(self, values: object) -> PeerList:
        found = verify_peers(values, self.authority, self.config.federation)
        return found if found.version > self._list.version else self._list


def check_own_kit(config: SiteConfig) -> Iterator[str]:
    """Raise `EngineError` if the kit's files are not as its authority signed them.

    Yields a sentence on each thing that nobody checks, and on what site.yaml allows beyond the kit.
    """
    if config.allow.least_sites == 1:
        yield "allow.least_sites in site.yaml is 1, so that a server may train with this site alone"
    if config.ca is None or not config.ca.exists():
        return
    if not config.ca.with_name(MANIFEST).exists():
        yield f"there is no {MANIFEST} beside {config.ca}, so that the kit's signature was not checked"
        return
    check_kit(config.ca.parent, config.ca)
    with suppress(RecipeError, StoreError):  # a kit that was made before it held its settings
        made = SiteConfig.load(config.ca.with_name(DELIVERED))
        if looser := list_looser_keys(config.allow, config.budget, made.allow, made.budget):
            yield f"site.yaml allows more than when the coordinator made it ({DELIVERED}): {', '.join(looser)}"


def load_peers(config: SiteConfig, report: Callable[[str], None] = lambda _: None) -> SitePeers | None:
    """What this site knows of the others; None without the files of a kit, as in a rehearsal."""
    if config.ca is None or config.key is None or not config.ca.exists() or not config.key.exists():
        return None
    if not config.ca.with_name(PEERS).exists() and not (config.folder / PEERS).exists():
        return None
    return SitePeers(config, report)


def _read_list(path: Path) -> object:
    """The content of a peers.json; raises `Refused` if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused("peers", f"there is no {path}") from None
    except (OSError, ValueError):
        raise EngineError(f"{path} is damaged; remove it if it is in `folder`, else copy the kit's") from None


def _changes(former: PeerList, found: PeerList) -> Iterator[str]:
    """Sentences on who is new, has another key, or is gone."""
    for site, line in found.sites.items():
        if former.sites.get(site) != line:
            word = "has another key than before" if site in former.sites else "is a site of this federation"
            yield f"{site} {word}, says the federation's authority: {key_fingerprint(line.encode())}"
    for site in former.sites.keys() - found.sites.keys():
        yield f"{site} is no longer a site of this federation, says the federation's authority"


def _fingerprint(signer: SiteSigner) -> str:
    return key_fingerprint(encode_public_openssh(signer.key.public_key()))
