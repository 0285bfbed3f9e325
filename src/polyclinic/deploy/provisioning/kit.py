"""Builds the files of a kit, each as bytes with a mode; touches no disk and generates no key.

`provision.py` writes them.
"""

import io
import platform
import re
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources

import yaml

from polyclinic.core import SiteId, __version__
from polyclinic.deploy.config import FederationConfig, join_host_port, site_folder_name, split_host_port
from polyclinic.deploy.provisioning.certificates import PrivateKey
from polyclinic.deploy.provisioning.manifest import sign_kit
from polyclinic.deploy.provisioning.peer_list import PEERS
from polyclinic.deploy.provisioning.software import FLWR, HASHED, Software, build_wheel

SECRET, PLAIN, PROGRAM = 0o600, 0o644, 0o755
LEAST_SITES = 3
"""Of a cohort, as a kit's policy asks; a federation of fewer sites has fewer."""
START_SITE = """case "${1:-}" in
    "" | -*) exec .venv/bin/python -I -m polyclinic join site.yaml "$@" ;;
esac
name=$1
shift
exec .venv/bin/python -I -m polyclinic site "$name" site.yaml "$@\""""
WITH_HASHES = "Every package has a SHA-256 in `requirements.txt`, and pip installs nothing else."
WITHOUT_HASHES = (
    "This kit has **no hashes** of the other packages: whoever controls the index can change them. Ask the "
    "coordinator for a kit with hashes (`polyclinic provision lock`); to install without: "
    "`sh start.sh --install --without-hashes`."
)


@dataclass(frozen=True)
class KitFile:
    data: bytes
    mode: int = PLAIN


Files = Mapping[str, KitFile]
"""The files of a kit, by path."""


def build_site_kit(
    federation: FederationConfig,
    site: SiteId,
    ca: bytes,
    key: bytes | None = None,
    software: Software | None = None,
    peers: bytes = b"{}",
) -> dict[str, KitFile]:
    """A site's kit: its settings, the authority's certificate, the list of sites and how to start it.

    `key`: the site's private key; None: the site makes its own.
    """
    folder, software = site_folder_name(site), software or Software(build_wheel())
    words = _template_values(federation, software) | {
        "site": site,
        "folder": folder,
        "site_quoted": quote_yaml(site),
        "role": "site",
        "place": f"/opt/polyclinic/{folder}",
        "purpose": "joins the federation",
        "key": "site.key",
        "settings": "site.yaml",
        "own_folders": "state recipes wheels",
        "own_files": "site.yaml site.key site.key.former request.json",
        "made": "state recipes site.key site.key.former request.json",
        "other_commands": "NAME WORDS …      polyclinic site NAME site.yaml WORDS …: key, approve, log",
        "start": START_SITE,
        "container_command": '["join", "site.yaml"]',
        "service_command": "",
        "service_folders": "state",
        "capability": "",
    }
    return {
        "site.yaml": _render_text("site.yaml", words),
        "ca.crt": KitFile(ca),
        PEERS: KitFile(peers),
        **({} if key is None else {"site.key": KitFile(key, SECRET)}),
        "polyclinic-site.service": _render_text("polyclinic.service", words),
        "README.md": _render_text("README-site.md", words),
        **_program_files(words, software),
    }


def build_server_kit(
    federation: FederationConfig,
    ca: bytes,
    certificate: bytes,
    key: bytes,
    sites: Mapping[SiteId, bytes],
    software: Software | None = None,
    peers: bytes = b"{}",
) -> dict[str, KitFile]:
    """The server's kit; `sites`: the public key in OpenSSH's format of each site that has one."""
    software = software or Software(build_wheel())
    words = _template_values(federation, software) | {
        "folder": "server",
        "role": "server",
        "place": "/opt/polyclinic/server",
        "purpose": "serves the federation",
        "key": "server.key",
        "settings": "server.yaml",
        "own_folders": "state recipes runs wheels sites",
        "own_files": "server.yaml server.key",
        "made": "state recipes runs",
        "other_commands": "RECIPE --out FOLDER   runs a recipe between the sites (polyclinic serve)",
        "start": 'exec .venv/bin/python -I -m polyclinic serve server.yaml "$@"',
        "container_command": '["serve", "server.yaml", "recipes", "--out", "runs"]',
        "service_command": " recipes --out runs",
        "service_folders": "state recipes",
        "capability": "CAP_NET_BIND_SERVICE",
    }
    return {
        "server.yaml": render_server_yaml(federation, sites),
        "ca.crt": KitFile(ca),
        "server.crt": KitFile(certificate),
        "server.key": KitFile(key, SECRET),
        "revoked.yaml": render_revoked_yaml([]),
        PEERS: KitFile(peers),
        "polyclinic-server.service": _render_text("polyclinic.service", words),
        "README.md": _render_text("README-server.md", words),
        **{public_key_path(site): KitFile(line) for site, line in sites.items()},
        **_program_files(words, software),
    }


def _program_files(words: Mapping[str, str], software: Software) -> dict[str, KitFile]:
    """What installs and starts: the same for server and sites but for the words."""
    installed = software.files()
    return {
        "start.sh": _render_text("start.sh", words, PROGRAM),
        "Dockerfile": _render_text("Dockerfile.txt", words),
        "compose.yaml": _render_text(f"compose-{words['role']}.yaml", words),
        ".dockerignore": _join_lines(["*", *(f"!{name}" for name in sorted(installed))]),
        **{name: KitFile(data) for name, data in installed.items()},
    }


def sign_files(files: Files, authority_key: PrivateKey) -> dict[str, KitFile]:
    """The files of a kit with its manifest and signature."""
    signed = sign_kit({name: file.data for name, file in files.items()}, authority_key)
    return {**files, **{name: KitFile(data) for name, data in signed.items()}}


def public_key_path(site: SiteId) -> str:
    return f"sites/{site_folder_name(site)}.pub"


def render_federation_yaml(federation: FederationConfig) -> KitFile:
    return _render_yaml(federation.model_dump(mode="json"))


def render_server_yaml(
    federation: FederationConfig, registered: Collection[SiteId], former: Mapping[str, object] | None = None
) -> KitFile:
    """server.yaml with the sites whose keys are `registered`.

    `former`: the settings of an earlier one, of which only the sites are replaced.
    """
    server = federation.server
    settings: dict[str, object] = {"federation": federation.federation, "host": server.host, "port": server.port}
    if server.listen:
        settings["listen"] = server.listen
    files = {"certificate": "server.crt", "key": "server.key", "ca": "ca.crt", "folder": "state"}
    keys = {site: public_key_path(site) for site in federation.sites if site in registered}
    kept = dict(former or {**settings, **files, "sites": {}, "insecure": False})
    if isinstance(images := kept.get("images"), dict):  # bounds by site; one that is gone has none
        kept["images"] = {site: most for site, most in images.items() if site in keys}
    return _render_yaml({**kept, "sites": keys})


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


def _template_values(federation: FederationConfig, software: Software) -> dict[str, str]:
    server = federation.server
    address = join_host_port(server.host, server.port)
    return {
        "federation": federation.federation,
        "federation_quoted": quote_yaml(federation.federation),
        "server": address,
        "server_quoted": quote_yaml(address),
        "host": server.host,
        "port": str(server.port),
        "listening_port": str(split_host_port(server.listen)[1] if server.listen else server.port),
        "least_sites": str(min(LEAST_SITES, len(federation.sites))),
        "version": __version__,
        "flwr": FLWR,
        "python": platform.python_version(),
        "installed": " ".join(sorted(software.files())),
        "hashes": "--require-hashes " if software.packages else "",
        "hashed": HASHED,
        "source": WITH_HASHES if software.packages else WITHOUT_HASHES,
    }


def _render_text(name: str, words: Mapping[str, str], mode: int = PLAIN) -> KitFile:
    """One of the texts in `deploy/texts`, with every @{word} filled in."""
    text = (resources.files("polyclinic.deploy") / "texts" / name).read_text(encoding="utf-8")
    return KitFile(re.sub(r"@\{(\w+)\}", lambda blank: words[blank[1]], text).encode(), mode)


def _render_yaml(values: object) -> KitFile:
    return KitFile(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6).encode())


def _join_lines(lines: list[str]) -> KitFile:
    return KitFile("".join(f"{line}\n" for line in lines).encode())
