"""Creates, reads and checks certificates and keys.

The server has a TLS certificate signed by the federation's own authority. A site has no certificate: it signs its
requests, and the server knows its public key. All keys are ECDSA on P-384. A site's keys are in OpenSSH's format, the
only one that Flower reads; the others are PEM (PKCS #8).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

import yaml
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polyclinic.core import EngineError
from polyclinic.deploy.config import is_loopback, parse_address

PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey
PublicKey: TypeAlias = ec.EllipticCurvePublicKey
Certificate: TypeAlias = x509.Certificate
Signer: TypeAlias = tuple[Certificate, PrivateKey]

SKEW = timedelta(minutes=10)
"""Certificates are valid from a little before they were made, for machines whose clocks are slow."""
AUTHORITY_DAYS = 3660
"""The authority outlives every certificate it signs, so that a new server certificate concerns no site."""
SOON = timedelta(days=30)
OPENSSH = b"-----BEGIN OPENSSH"
NEW = "ask the coordinator for a new kit"
OTHER_KIND = f"is not an ECDSA key, the only kind that Flower takes; {NEW}"


def current_time() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def generate_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def encode_private_key(key: PrivateKey, openssh: bool = False) -> bytes:
    """The private key in OpenSSH's format or as PKCS #8, without a password."""
    form = serialization.PrivateFormat.OpenSSH if openssh else serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def encode_public_openssh(key: PublicKey) -> bytes:
    """The public key in OpenSSH's format, without a comment: not every site's name would be valid there."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"


def key_file_fingerprint(path: Path) -> str:
    """The fingerprint of a public key, as `ssh-keygen -l` prints it."""
    return key_fingerprint(encode_public_openssh(read_public_key(path)))


def key_fingerprint(line: bytes) -> str:
    """The fingerprint of a public key in OpenSSH's form, as `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def certificate_fingerprint(certificate: x509.Certificate) -> str:
    """The fingerprint as `openssl x509 -fingerprint -sha256` prints it."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def encode_certificate(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def create_authority(federation: str, key: PrivateKey, now: datetime) -> x509.Certificate:
    """The certificate of the federation's authority, which may sign server certificates but no further authority."""
    name = _x509_name(federation)
    return (
        _certificate_builder(name, name, key.public_key(), now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )


def create_server_certificate(host: str, key: PublicKey, signer: Signer, now: datetime, days: int) -> x509.Certificate:
    ca, ca_key = signer
    until = min(now + timedelta(days=days), ca.not_valid_after_utc)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _certificate_builder(_x509_name(host), ca.subject, key, now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_server_names(host)), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), now - SKEW, until).add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key), critical=False
    )


def _x509_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _server_names(host: str) -> list[x509.GeneralName]:
    """The names in the server's certificate: its host, and on one machine every name for the loopback interface."""
    names = dict.fromkeys([host, "localhost", "127.0.0.1"] if is_loopback(host) else [host])
    return [x509.IPAddress(ip) if (ip := parse_address(name)) else x509.DNSName(name) for name in names]


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read_bytes(path))
    except ValueError:
        raise EngineError(f"{path} is not a certificate (PEM) or is damaged; {NEW}") from None


def read_private_key(path: Path) -> PrivateKey:
    """A private key in either format; raises `EngineError` if others can read the file."""
    data = _read_bytes(path)
    if path.stat().st_mode & 0o077:
        raise EngineError(f"others on this machine can read the private key {path}; run: chmod 600 {path}")
    load = serialization.load_ssh_private_key if data.startswith(OPENSSH) else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise EngineError(f"{path} is not a private key, is damaged, or has a password; {NEW}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise EngineError(f"{path} {OTHER_KIND}")
    return key


def read_public_key(path: Path) -> PublicKey:
    return parse_public_key(_read_bytes(path), path)


def read_revoked_keys(path: Path) -> list[tuple[PublicKey, str]]:
    """The keys in revoked.yaml, each with a description of its owner; unreadable entries are left out."""
    found: list[tuple[PublicKey, str]] = []
    with contextlib.suppress(OSError, UnicodeError, yaml.YAMLError, KeyError, TypeError):
        for row in yaml.safe_load(path.read_text(encoding="utf-8"))["revoked"]:
            with contextlib.suppress(EngineError, KeyError, TypeError):
                key = parse_public_key(str(row["key"]).encode(), path)
                found.append((key, f"the key of {row['site']} that was {row['why']} on {row['date']}"))
    return found


def parse_public_key(data: bytes, path: Path) -> PublicKey:
    try:
        key = serialization.load_ssh_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise EngineError(f"{path} is not a public key in OpenSSH's form or is damaged; {NEW}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise EngineError(f"{path} {OTHER_KIND}")
    return key


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror}; put it back, or {NEW}") from None


def check_site_files(ca: Path, key: Path, now: datetime | None = None) -> None:
    """Raise `EngineError` if a site's certificate of the authority or its key cannot be used."""
    check_authority(ca, read_certificate(ca), now or current_time())
    if not key.exists():
        raise EngineError(
            f"{key} is not there yet; make it by `sh start.sh key`, and send the request to the coordinator"
        )
    read_private_key(key)
    if not key.read_bytes().startswith(OPENSSH):
        raise EngineError(f"{key} is not in OpenSSH's form, the only one that Flower reads; {NEW}")


def check_server_files(certificate: Path, key: Path, ca: Path, host: str, now: datetime | None = None) -> None:
    """Raise `EngineError` if the server's certificate, key or authority cannot be used."""
    now = now or current_time()
    authority, shown = read_certificate(ca), read_certificate(certificate)
    check_authority(ca, authority, now)
    rotate = "run `polyclinic provision rotate KITS server` and copy the new server kit here"
    try:
        shown.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise EngineError(
            f"{certificate} was not signed by {ca}; copy the whole server kit anew, or {rotate}"
        ) from None
    _check_validity(certificate, shown, now, rotate)
    if read_private_key(key).public_key() != shown.public_key():
        raise EngineError(f"{key} is not the key of {certificate}; copy the whole server kit anew, or {rotate}")
    if set(_server_names(host)).isdisjoint(shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value):
        raise EngineError(f"{certificate} is not for {host}, so that sites would hang up; set host back, or {rotate}")


def check_authority(path: Path, found: x509.Certificate, now: datetime) -> None:
    if not any(isinstance(part.value, x509.BasicConstraints) and part.value.ca for part in found.extensions):
        raise EngineError(f"{path} is not the certificate of an authority; copy ca.crt from the kit again")
    _check_validity(path, found, now, "run `polyclinic provision rotate KITS --all` and hand out new kits")


def _check_validity(path: Path, found: x509.Certificate, now: datetime, remedy: str) -> None:
    if now > found.not_valid_after_utc:
        raise EngineError(f"{path} expired on {found.not_valid_after_utc:%Y-%m-%d}; {remedy}")
    if now < found.not_valid_before_utc:
        raise EngineError(
            f"{path} is good from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, but here it is "
            f"{now:%Y-%m-%d %H:%M} UTC; set the clock"
        )
