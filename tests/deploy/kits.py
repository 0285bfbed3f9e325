"""What is in kits, and a TLS connection between them."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from datetime import timedelta
from pathlib import Path

import yaml

from polyclinic.deploy.config import FederationConfig, ServerSection, site_folder_name

SITES = ("harbour", "hill", "St. Mary's & co")
NORTH = FederationConfig(
    federation="north-sea", server=ServerSection(host="127.0.0.1", port=9443), days=90, sites=SITES
)
GOOD = {"federation": "north-sea", "server": {"host": "fl.example.org", "port": 9443}, "sites": ["harbour", "hill"]}
YEARS = timedelta(days=800)
HELLO = b"hello"


def site_of(kits: Path, name: str) -> Path:
    return kits / "sites" / site_folder_name(name)


def revoked(kits: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = yaml.safe_load((kits / "server" / "revoked.yaml").read_text())["revoked"]
    return rows


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def handshake(server: Path, ca: Path, host: str = "127.0.0.1") -> bytes:
    """What a client hears over a real TLS connection on loopback; it is as strict as Python 3.13's is by itself."""
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(server / "server.crt", server / "server.key")
    trusting = ssl.create_default_context(cafile=str(ca))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)

        def serve() -> None:
            raw, _ = listening.accept()
            with raw:
                raw.settimeout(5)
                try:
                    with shown.wrap_socket(raw, server_side=True) as secure:
                        secure.sendall(HELLO)
                except OSError:  # the client hung up, as it should where the certificate is wrong
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            raw = socket.create_connection(listening.getsockname(), 5)
            with raw, trusting.wrap_socket(raw, server_hostname=host) as secure:
                return secure.recv(len(HELLO))
        finally:
            thread.join()
