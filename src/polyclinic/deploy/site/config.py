"""Reads `site.yaml`: a site's server, its data and what it allows. `polyclinic join` calls `SiteConfig.load`."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError, field_validator

from polyclinic.algorithms import ALGORITHMS
from polyclinic.config.rules import format_suggestion
from polyclinic.core import DataError, RecipeError, SiteId, StoreError, read_yaml
from polyclinic.data.sources.folder import clean_text
from polyclinic.deploy.config import find_host_problem
from polyclinic.deploy.site.policy import CLOSED, METRICS, PREDICTIONS, Allow, Budget
from polyclinic.runs.sites import check_site_name
from polyclinic.storage.files import ANOTHER, explain_os_errors, write_atomically

OWN_FOLDER = "make room, or let this program's user write there; the folder is `folder` in site.yaml"


@contextmanager
def with_remedy() -> Iterator[None]:
    """Let errors of the disk name the remedy that a site has."""
    try:
        yield
    except StoreError as error:
        raise StoreError(str(error).replace(ANOTHER, OWN_FOLDER)) from error


class SiteConfig(BaseModel):
    """The keys of site.yaml; `load` makes all paths absolute."""

    model_config = CLOSED
    federation: str = Field(min_length=1)
    site: SiteId
    server: str = ""
    """HOST:PORT."""
    ca: Path | None = None
    key: Path | None = None
    folder: Path = Path("state")
    """Holds the site's memory, its log of releases and its ledger."""
    insecure: bool = False
    data: dict[str, Path] = Field(default_factory=dict)
    """The path of each data set that recipes refer to by name. No path leaves the site, and none is accepted."""
    allow: Allow = Allow()
    budget: Budget | None = None
    device: str | None = None
    """Where to compute; None: where the recipe says, if that device is available here, else on the CPU."""

    @field_validator("server")
    @classmethod
    def _check_address(cls, server: str) -> str:
        host, _, port = server.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        known = (
            host.startswith("[") == (":" in bare) and not find_host_problem(bare) and re.fullmatch("[0-9]{1,5}", port)
        )
        if server and not (known and 0 < int(port) < 1 << 16):
            raise ValueError("it should be HOST:PORT as in the kit, such as fl.example.org:9443 (no https://, no path)")
        return server

    @field_validator("site")
    @classmethod
    def _check_site_name(cls, site: SiteId) -> SiteId:
        try:
            check_site_name(clean_text(site))
        except DataError as error:
            raise ValueError(str(error)) from None
        return clean_text(site)

    @staticmethod
    def load(path: Path) -> SiteConfig:
        """Read site.yaml; relative paths start at its folder."""
        values = read_yaml(path, "site.yaml", "give the one of the site's kit", "site, server and data")
        try:
            found = SiteConfig.model_validate(values)
        except ValidationError as error:
            raise RecipeError(f"{path}: {_format_error(error)}") from None
        home = path.resolve().parent
        places = {name: home / place for name in ("ca", "key", "folder") if (place := getattr(found, name)) is not None}
        data = {name: home / place.expanduser() for name, place in found.data.items()}
        return found.model_copy(update={**places, "data": data})

    def load_secret(self) -> int:
        """256 random bits that never leave the site. They seed its noise and key the hash of its images."""
        path = self.folder / "secret"
        with explain_os_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            write_atomically(path, secrets.token_hex(32).encode())
            path.chmod(0o600)
        try:
            return int(path.read_text(), 16)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{path}, which seeds the noise, cannot be read ({error}); remove it, and start runs anew"
            ) from None


def config_warnings(config: SiteConfig) -> Iterator[str]:
    """Settings that are probably mistakes but harmless: an unknown kind never leaves, missing images are not found."""
    kinds = {METRICS, PREDICTIONS, *(exchange.kind for made in ALGORITHMS.values() for exchange in made().exchanges)}
    for kind in config.allow.kinds:
        if kind not in kinds:
            near = format_suggestion(kind, sorted(kinds))
            yield f"allow.kinds in site.yaml names {kind!r}{near}, which no algorithm sends by itself"
    for name, path in config.data.items():
        if not os.access(path, os.R_OK):
            yield f"data in site.yaml says that {name!r} lies at {path}, where nothing can be read; correct it"


def _format_error(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(step) for step in first["loc"] if step != "tuple[str, ...]")
    if first["type"] == "missing":
        return f"the key {key!r} is missing; add it"
    if first["type"] == "extra_forbidden":
        return (
            f"there is no key {key!r}; known are: {', '.join(SiteConfig.model_fields)}, and below `allow`: "
            + ", ".join(Allow.model_fields)
        )
    return f"{key} is {first['input']!r:.60}, but {re.sub('^(Input|String|Value error,) ', '', first['msg'])}"
