"""Builds the files of a kit, each as bytes with a mode; touches no disk and generates no key.

`provision.py` writes them.
"""

import io
import platform
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import distributions, requires

import yaml

from polyclinic.core import SiteId, __version__
from polyclinic.deploy.config import FederationConfig, join_host_port, site_folder_name

FLWR = next(
    need.partition(";")[0].removeprefix("flwr==").strip()
    for need in requires("polyclinic") or []
    if need.startswith("flwr==")
)
"""The only version of flwr that works, as pyproject.toml says: its internals change with every version."""
SECRET, PLAIN, PROGRAM = 0o600, 0o644, 0o755
SOURCE = "The versions come from a Python package index: PyPI, or your site's mirror of it (`PIP_INDEX_URL`)."
CARRIED = (
    "polyclinic itself is the `.whl` file in this folder; what it needs comes from PyPI or a mirror (`PIP_INDEX_URL`)."
)


@dataclass(frozen=True)
class KitFile:
    data: bytes
    mode: int = PLAIN


Files = Mapping[str, KitFile]
"""The files of a kit, by path."""


@dataclass(frozen=True)
class Wheel:
    """The package itself, for sites that cannot install it from an index."""

    name: str
    data: bytes


def build_site_kit(
    federation: FederationConfig, site: SiteId, ca: bytes, key: bytes, wheel: Wheel | None = None
) -> dict[str, KitFile]:
    """A site's kit: its settings, the authority's certificate, its private key and how to start it."""
    folder = site_folder_name(site)
    words = _template_values(federation, wheel) | {
        "site": site,
        "folder": folder,
        "site_quoted": quote_yaml(site),
        "role": "site",
        "place": f"/opt/polyclinic/{folder}",
        "purpose": "joins the federation",
        "key": "site.key",
        "command": "join site.yaml",
        "service_command": "join site.yaml",
        "service_folders": "state",
        "capability": "",
    }
    return {
        "site.yaml": _render_text("site.yaml", words),
        "ca.crt": KitFile(ca),
        "site.key": KitFile(key, SECRET),
        "start.sh": _render_text("start.sh", words, PROGRAM),
        "polyclinic-site.service": _render_text("polyclinic.service", words),
        "Dockerfile": _render_text("Dockerfile.txt", words),
        ".dockerignore": _join_lines(
            ["*", "!requirements.txt", "!constraints.txt", *([f"!{wheel.name}"] if wheel else [])]
        ),
        "README.md": _render_text("README-site.md", words),
        **_pinned_versions(wheel),
    }


def build_server_kit(
    federation: FederationConfig,
    ca: bytes,
    certificate: bytes,
    key: bytes,
    sites: Mapping[SiteId, bytes],
    wheel: Wheel | None,
) -> dict[str, KitFile]:
    """The server's kit; `sites`: the public key of each site in OpenSSH's format."""
    words = _template_values(federation, wheel) | {
        "role": "server",
        "place": "/opt/polyclinic/server",
        "purpose": "serves the federation",
        "key": "server.key",
        "command": "serve server.yaml",
        "service_command": "serve server.yaml recipes --out runs",
        "service_folders": "state recipes",
        "capability": "CAP_NET_BIND_SERVICE",
    }
    return {
        "server.yaml": render_server_yaml(federation),
        "ca.crt": KitFile(ca),
        "server.crt": KitFile(certificate),
        "server.key": KitFile(key, SECRET),
        "revoked.yaml": render_revoked_yaml([]),
        "start.sh": _render_text("start.sh", words, PROGRAM),
        "polyclinic-server.service": _render_text("polyclinic.service", words),
        "README.md": _render_text("README-server.md", words),
        **{public_key_path(site): KitFile(line) for site, line in sites.items()},
        **_pinned_versions(wheel),
    }


def public_key_path(site: SiteId) -> str:
    return f"sites/{site_folder_name(site)}.pub"


def render_federation_yaml(federation: FederationConfig) -> KitFile:
    return _render_yaml(federation.model_dump(mode="json"))


def render_server_yaml(federation: FederationConfig, former: Mapping[str, object] | None = None) -> KitFile:
    """server.yaml; `former`: the settings of an earlier one, of which only the sites are replaced."""
    server = federation.server
    settings = {"federation": federation.federation, "host": server.host, "port": server.port}
    files = {"certificate": "server.crt", "key": "server.key", "ca": "ca.crt", "folder": "state"}
    keys = {site: public_key_path(site) for site in federation.sites}
    return _render_yaml({**(former or {**settings, **files, "sites": {}, "insecure": False}), "sites": keys})


def render_revoked_yaml(rows: list[dict[str, str]]) -> KitFile:
    """revoked.yaml; each row has site, date, why, fingerprint and key."""
    return _render_yaml({"revoked": rows})


def zip_files(folder: str, files: Files) -> bytes:
    """A zip with the same bytes for the same files and modes. Not compressed, since compressors differ."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(f"{folder}/{name}")
            entry.create_system = 3  # Unix, so that modes are kept
            entry.external_attr = (0o100000 | files[name].mode) << 16
            archive.writestr(entry, files[name].data)
    return held.getvalue()


def quote_yaml(text: str) -> str:
    """The text as a YAML scalar, with quotes only where needed."""
    return yaml.safe_dump(text, allow_unicode=True, width=10**6).removesuffix("...\n").strip()


def _template_values(federation: FederationConfig, wheel: Wheel | None) -> dict[str, str]:
    server = federation.server
    address = join_host_port(server.host, server.port)
    return {
        "federation": federation.federation,
        "federation_quoted": quote_yaml(federation.federation),
        "server": address,
        "server_quoted": quote_yaml(address),
        "host": server.host,
        "port": str(server.port),
        "version": __version__,
        "flwr": FLWR,
        "python": platform.python_version(),
        "wheel": f"{wheel.name} " if wheel else "",
        "source": CARRIED if wheel else SOURCE,
    }


def _render_text(name: str, words: Mapping[str, str], mode: int = PLAIN) -> KitFile:
    """One of the texts in `deploy/texts`, with every @{word} filled in."""
    text = (resources.files("polyclinic.deploy") / "texts" / name).read_text(encoding="utf-8")
    return KitFile(re.sub(r"@\{(\w+)\}", lambda blank: words[blank[1]], text).encode(), mode)


def _render_yaml(values: object) -> KitFile:
    return KitFile(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6).encode())


def _join_lines(lines: list[str]) -> KitFile:
    return KitFile("".join(f"{line}\n" for line in lines).encode())


def _pinned_versions(wheel: Wheel | None) -> dict[str, KitFile]:
    """requirements.txt and constraints.txt: the versions that are installed here."""
    ours = f"./{wheel.name}[flower]" if wheel else f"polyclinic[flower]=={__version__}"
    return {
        "requirements.txt": _join_lines([ours, f"flwr=={FLWR}"]),
        "constraints.txt": _join_lines(
            ["# What was installed where this kit was made; pip takes from here what it needs.", *_installed_versions()]
        ),
        **({wheel.name: KitFile(wheel.data)} if wheel else {}),
    }


@cache
def _installed_versions() -> list[str]:
    """Versions without build names such as `+cu128`, which the site's own machine decides."""
    found = {re.sub(r"[-_.]+", "-", package.name).lower(): package.version.split("+")[0] for package in distributions()}
    return [f"{name}=={found[name]}" for name in sorted(found.keys() - {"polyclinic", "pip", "flwr"})]
