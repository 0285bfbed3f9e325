"""What is in a kit: every file as bytes with its mode. Nothing here touches a disk or makes a key."""

from __future__ import annotations

import io
import platform
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import distributions

import yaml

from polyclinic import __version__
from polyclinic.core.contract import SiteId
from polyclinic.deploy.config import FederationConfig, folder_of, host_and_port

FLWR = "1.41.0"
SECRET, PLAIN, PROGRAM = 0o600, 0o644, 0o755
SOURCE = "The versions come from a Python package index: PyPI, or your hospital's mirror of it (`PIP_INDEX_URL`)."
CARRIED = (
    "polyclinic itself is the `.whl` file in this folder; what it needs comes from PyPI or a mirror (`PIP_INDEX_URL`)."
)


@dataclass(frozen=True)
class File:
    data: bytes
    mode: int = PLAIN


Files = Mapping[str, File]
"""By path, relative to the kit."""


@dataclass(frozen=True)
class Wheel:
    """The package itself, for federations whose sites cannot get it from an index."""

    name: str
    data: bytes


def site_kit(
    federation: FederationConfig, site: SiteId, ca: bytes, key: bytes, wheel: Wheel | None = None
) -> dict[str, File]:
    folder = folder_of(site)
    words = _words(federation, wheel) | {
        "site": site,
        "folder": folder,
        "site_quoted": quoted(site),
        "role": "site",
        "place": f"/opt/polyclinic/{folder}",
        "purpose": "joins the federation",
        "key": "site.key",
        "command": "join site.yaml",
        "service_command": "join site.yaml",
    }
    wheels = [f"!{wheel.name}"] if wheel else []
    return {
        "site.yaml": _text("site.yaml", words),
        "ca.crt": File(ca),
        "site.key": File(key, SECRET),
        "start.sh": _text("start.sh", words, PROGRAM),
        "polyclinic-site.service": _text("polyclinic.service", words),
        "Dockerfile": _text("Dockerfile.txt", words),
        ".dockerignore": _lines(["*", "!requirements.txt", "!constraints.txt", *wheels]),
        "README.md": _text("README-site.md", words),
        **_versions(wheel),
    }


def server_kit(
    federation: FederationConfig,
    ca: bytes,
    certificate: bytes,
    key: bytes,
    sites: Mapping[SiteId, bytes],
    wheel: Wheel | None,
) -> dict[str, File]:
    """sites: the public key of each, in OpenSSH's form."""
    words = _words(federation, wheel) | {
        "role": "server",
        "place": "/opt/polyclinic/server",
        "purpose": "serves the federation",
        "key": "server.key",
        "command": "serve server.yaml",
        "service_command": "serve server.yaml recipe.yaml --out run",
    }
    return {
        "server.yaml": server_yaml(federation),
        "ca.crt": File(ca),
        "server.crt": File(certificate),
        "server.key": File(key, SECRET),
        "revoked.yaml": revoked_yaml([]),
        "start.sh": _text("start.sh", words, PROGRAM),
        "polyclinic-server.service": _text("polyclinic.service", words),
        "README.md": _text("README-server.md", words),
        **{public_key_path(site): File(line) for site, line in sites.items()},
        **_versions(wheel),
    }


def public_key_path(site: SiteId) -> str:
    return f"sites/{folder_of(site)}.pub"


def federation_yaml(federation: FederationConfig) -> File:
    return _yaml(federation.model_dump(mode="json"))


def server_yaml(federation: FederationConfig) -> File:
    server = federation.server
    settings = {"federation": federation.federation, "host": server.host, "port": server.port}
    files = {"certificate": "server.crt", "key": "server.key", "ca": "ca.crt", "folder": "state"}
    sites = {site: public_key_path(site) for site in federation.sites}
    return _yaml({**settings, **files, "sites": sites, "insecure": False})


def revoked_yaml(rows: list[dict[str, str]]) -> File:
    """Rows of site, date, why, fingerprint and key."""
    return _yaml({"revoked": rows})


def zipped(folder: str, files: Files) -> bytes:
    """The same bytes for the same files, modes among them. Stored, since compressors differ between machines."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(f"{folder}/{name}")
            entry.create_system = 3  # Unix, where modes mean something
            entry.external_attr = (0o100000 | files[name].mode) << 16
            archive.writestr(entry, files[name].data)
    return held.getvalue()


def quoted(text: str) -> str:
    """Text as YAML has it: plain where that is safe."""
    return yaml.safe_dump(text, allow_unicode=True, width=10**6).removesuffix("...\n").strip()


def _words(federation: FederationConfig, wheel: Wheel | None) -> dict[str, str]:
    server = federation.server
    address = host_and_port(server.host, server.port)
    return {
        "federation": federation.federation,
        "federation_quoted": quoted(federation.federation),
        "server": address,
        "server_quoted": quoted(address),
        "host": server.host,
        "port": str(server.port),
        "version": __version__,
        "flwr": FLWR,
        "python": platform.python_version(),
        "wheel": f"{wheel.name} " if wheel else "",
        "source": CARRIED if wheel else SOURCE,
    }


def _text(name: str, words: Mapping[str, str], mode: int = PLAIN) -> File:
    """A text of ours with its blanks, @{word}, filled in."""
    text = (resources.files("polyclinic.deploy") / "texts" / name).read_text(encoding="utf-8")
    return File(re.sub(r"@\{(\w+)\}", lambda blank: words[blank[1]], text).encode(), mode)


def _yaml(values: object) -> File:
    return File(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6).encode())


def _lines(lines: list[str]) -> File:
    return File("".join(f"{line}\n" for line in lines).encode())


def _versions(wheel: Wheel | None) -> dict[str, File]:
    """Exactly what may be installed: polyclinic and Flower by name, everything else as it is here."""
    ours = f"./{wheel.name}[flower]" if wheel else f"polyclinic[flower]=={__version__}"
    carried = {wheel.name: File(wheel.data)} if wheel else {}
    return {
        "requirements.txt": _lines([ours, f"flwr=={FLWR}"]),
        "constraints.txt": _lines(
            ["# What was installed where this kit was made; pip takes from here what it needs.", *_installed()]
        ),
        **carried,
    }


@cache
def _installed() -> list[str]:
    """`+cpu`, `+cu128` and the like name a build, which the site's own machine decides."""
    found = {re.sub(r"[-_.]+", "-", package.name).lower(): package.version.split("+")[0] for package in distributions()}
    for left_out in ("polyclinic", "pip", "flwr"):
        found.pop(left_out, None)
    return [f"{name}=={version}" for name, version in sorted(found.items())]
