"""Reads `federation.yaml`, written by the coordinator, and `server.yaml`, which is in the server's kit."""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from polyclinic.core import RecipeError, SiteId, read_yaml
from polyclinic.data.sources.folder import clean_text
from polyclinic.runs.sites import check_site_name

MAX_NAME_LENGTH = 64
"""Of a federation's name: a certificate's common name may have no more characters."""
LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True)

M = TypeVar("M", bound=BaseModel)


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The host as an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    address = parse_address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def find_host_problem(host: str) -> str:
    """Why sites could not reach a server by this name; "" if they could."""
    if (address := parse_address(host)) is not None:
        every = f"{host} means every address of a machine; give the one name or address by which sites reach the server"
        return every if address.is_unspecified or address.is_multicast else ""
    if len(host) > 253 or not re.fullmatch(rf"{LABEL}(\.{LABEL})*", host) or re.fullmatch(r"[0-9.]+", host):
        return "it should be one DNS name or IP address, such as fl.example.org (no scheme, port, path or wildcard)"
    return ""


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, where an IPv6 address has brackets; raises ValueError with a sentence."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if (
        host.startswith("[") != (":" in bare)
        or not bare
        or not re.fullmatch("[0-9]{1,5}", port)
        or not 0 < int(port) < 1 << 16
    ):
        raise ValueError("it should be HOST:PORT, such as 0.0.0.0:9443 or [::]:9443")
    return bare, int(port)


def site_folder_name(site: SiteId) -> str:
    """A folder name for a site, whatever characters its name has."""
    return re.sub(r"[^\w.-]", "_", site).lstrip(".-")[:60] or "_"


def site_command(name: str, arguments: str = "") -> str:
    """Return how people call `polyclinic site NAME` here: by start.sh, if this process works in the folder of a kit,
    where `polyclinic` is on nobody's PATH."""
    called = f"sh start.sh {name}" if Path("start.sh").is_file() else f"polyclinic site {name} site.yaml"
    return f"{called} {arguments}".rstrip()


class ServerSection(BaseModel):
    model_config = CLOSED

    host: str
    port: int = Field(default=9443, ge=1, le=65535)
    listen: str = ""
    """HOST:PORT to listen on, if sites reach the server by another address or port; "": every interface, on `port`."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, address: str) -> str:
        if address:
            split_host_port(address)
        return address

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if problem := find_host_problem(host):
            raise ValueError(problem)
        return host


class FederationConfig(BaseModel):
    """The keys of federation.yaml, from which keys and kits are made."""

    model_config = CLOSED

    federation: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    server: ServerSection
    days: int = Field(default=365, ge=1, le=3650)
    """How long the server's certificate is valid."""
    sites: tuple[SiteId, ...] = Field(strict=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        values = read_yaml(path, "federation.yaml", "docs/deploy.md shows one", "federation, server and sites")
        return validate_config(cls, path.name, values)

    def with_site(self, site: SiteId) -> Self:
        return validate_config(type(self), "federation.yaml", {**self.model_dump(), "sites": [*self.sites, site]})

    @field_validator("federation")
    @classmethod
    def _check_printable(cls, name: str) -> str:
        if not name.isprintable() or set('/"\\%$') & set(name) or name.strip() != name:
            raise ValueError("a federation's name has no slash, quote, %, $, or blank at its ends")
        return name

    @field_validator("sites")
    @classmethod
    def _check_sites(cls, sites: tuple[SiteId, ...]) -> tuple[SiteId, ...]:
        folders: dict[str, SiteId] = {}
        sites = tuple(map(clean_text, sites))
        for site in sites:
            check_site_name(site)
            other = folders.setdefault(site_folder_name(site).casefold(), site)
            if sites.count(site) > 1 or other != site:
                raise ValueError(f"the sites {other!r} and {site!r} would share one folder; rename one")
        return sites


class ServerConfig(BaseModel):
    """The keys of server.yaml; `load` makes the paths absolute, starting at the file's folder."""

    model_config = CLOSED

    federation: str
    host: str
    port: int = Field(ge=1, le=65535)
    certificate: Path = Field(default=Path("server.crt"), strict=False)
    key: Path = Field(default=Path("server.key"), strict=False)
    ca: Path = Field(default=Path("ca.crt"), strict=False)
    revoked: Path = Field(default=Path("revoked.yaml"), strict=False)
    """Lists revoked keys, so that the server's log can name a site that still uses one."""
    peers: Path = Field(default=Path("peers.json"), strict=False)
    """The list of sites that the authority has signed, which sites are given."""
    folder: Path = Field(default=Path("state"), strict=False)
    sites: Mapping[SiteId, Annotated[Path, Field(strict=False)]]
    """The file of each site's public key."""
    images: Mapping[SiteId, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """The most images, of all parts together, that a site may register: as many as its people have told you of."""
    insecure: bool = False
    """Serve without TLS: for rehearsals on one machine."""
    listen: str = ""
    """HOST:PORT to listen on, if it is not the one in the certificate; "": every interface, on `port`."""
    monitor: str = ""
    """HOST:PORT for /health and /metrics, such as 127.0.0.1:9100; "": none."""
    log: Literal["text", "json"] = "text"
    """The form of the log: lines to read, or one JSON object an event."""
    notify: tuple[str, ...] = Field(default=(), strict=False)
    """A command that is run with an event and a sentence when a run ends or people are needed."""

    @property
    def listen_address(self) -> tuple[str, int]:
        """Where to listen: as `listen` says, or on the loopback interface if sites find the server there, or on all."""
        if self.listen:
            return split_host_port(self.listen)
        if is_loopback(self.host):
            return "127.0.0.1" if parse_address(self.host) is None else self.host, self.port
        address = parse_address(self.host)
        return "::" if address is not None and address.version == 6 else "0.0.0.0", self.port

    @field_validator("listen", "monitor", mode="before")
    @classmethod
    def _check_text(cls, address: object) -> object:
        if not isinstance(address, str):
            raise ValueError(f"it should be HOST:PORT, such as 127.0.0.1:{address if type(address) is int else 9443}")
        return address

    @field_validator("listen", "monitor")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if address and parse_address(host := split_host_port(address)[0]) is None and not is_loopback(host):
            raise ValueError("it should begin with an address of this machine, such as 127.0.0.1 or 0.0.0.0")
        return address

    @classmethod
    def load(cls, path: Path) -> Self:
        values = read_yaml(path, "server.yaml", "give the one of the server's kit", "federation, host, port and sites")
        config = validate_config(cls, path.name, values)
        here = path.resolve().parent
        places = {
            name: here / getattr(config, name) for name in ("certificate", "key", "ca", "revoked", "peers", "folder")
        }
        return config.model_copy(update={**places, "sites": {site: here / key for site, key in config.sites.items()}})

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        for site in self.images.keys() - self.sites.keys():
            raise ValueError(f"images names {site!r}, which is not among sites; correct one of them")
        return self

    @model_validator(mode="after")
    def _check_loopback(self) -> Self:
        for host in (self.host, self.listen_address[0]):
            if self.insecure and not is_loopback(host):
                raise ValueError(
                    f"insecure: true is for rehearsals on one machine, and {host} is not this machine; "
                    "set insecure: false, or host: 127.0.0.1"
                )
        return self


def validate_config(kind: type[M], file: str, values: Mapping[str, object], known: str = "") -> M:
    """Raise `RecipeError` for the first wrong key of a file. `known`: a sentence that lists the keys that there are."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        known = known or f"there are: {', '.join(kind.model_fields)}"
        raise RecipeError(f"{file}: {_format_error(error, known)}") from None


def _format_error(error: ValidationError, known: str) -> str:
    found = error.errors()  # of a value that may be the word `all` or a list, the list is asked for
    first = next((one for one in found if "literal['all']" not in one["loc"]), found[0])
    key = ".".join(str(step) for step in first["loc"] if step not in ("tuple[str, ...]", "[key]"))
    if first["type"] == "missing":
        return f"the key {key!r} is missing; add it"
    if first["type"] == "extra_forbidden":
        return f"there is no key {key!r}; {known}"
    if first["type"] in ("model_type", "mapping_type", "dict_type"):
        return f"{key} should hold keys of its own, written as {{key: value}} or indented below it"
    if first["input"] is None:
        return f"{key!r} has no value; write one behind a colon and a blank, or leave the key out"
    expected = _plain_expectation(first["type"], first["input"])
    expected = expected or re.sub("^(Input|String|Value error,) ", "", first["msg"])
    return f"{key} is {first['input']!r:.60}, but {expected}" if key else expected


def _plain_expectation(kind: str, value: object) -> str:
    """Return what a value should be, in words; "" where the type checker's own words will do."""
    if kind == "tuple_type":
        return f"it should be a list, such as [{value if isinstance(value, str | int | float) else 'one, two'}]"
    words = {
        "string_type": "it should be text; put it in quotes, if it is meant so",
        "path_type": "it should be a path",
        "int_type": "it should be a whole number",
        "int_from_float": "it should be a whole number",
        "int_parsing": "it should be a whole number",
        "float_type": "it should be a number",
        "float_parsing": "it should be a number",
        "bool_type": "it should be true or false",
        "bool_parsing": "it should be true or false",
    }
    return words.get(kind, "")
