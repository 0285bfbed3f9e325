"""Reads `site.yaml`: a site's server, its data and what it allows. `polyclinic join` calls `SiteConfig.load`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, field_validator

from polyclinic.core import DataError, SiteId, StoreError, read_yaml
from polyclinic.data.sources.folder import clean_text
from polyclinic.deploy.config import find_host_problem, validate_config
from polyclinic.deploy.site.policy import CLOSED, Allow, Budget
from polyclinic.deploy.site.release_log import ReleaseLog
from polyclinic.runs.sites import check_site_name
from polyclinic.storage.files import ANOTHER

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
    retry: float = Field(300.0, ge=1, le=3600)
    """The longest pause in seconds between two tries to connect while somebody has to mend something."""
    cache_gigabytes: float = Field(20.0, gt=0)
    """How much disk prepared images may take; the sets that were not used for longest are removed beyond it."""
    log: Literal["text", "json"] = "text"
    """The form of terminal and log: lines to read, or one JSON object an event."""
    notify: tuple[str, ...] = Field(default=(), strict=False)
    """A command that is run with an event and a sentence when people are needed."""
    peers: tuple[str, ...] = ()
    """Fingerprints of other sites' keys that people here have compared: only these sites count. (): all that the
    federation's authority names."""
    device: str | None = None
    """Where to compute; None: where the recipe says, if that device is available here, else on the CPU."""

    @field_validator("server")
    @classmethod
    def _check_address(cls, server: str) -> str:
        host, _, port = server.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        is_host = host.startswith("[") == (":" in bare) and not find_host_problem(bare)
        if server and not (is_host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16):
            raise ValueError("it should be HOST:PORT as in the kit, such as fl.example.org:9443 (no https://, no path)")
        return server

    @field_validator("site")
    @classmethod
    def _check_site_name(cls, site: SiteId) -> SiteId:
        site = clean_text(site)
        try:
            check_site_name(site)
        except DataError as error:
            raise ValueError(str(error)) from None
        return site

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read site.yaml; relative paths start at its folder."""
        values = read_yaml(path, "site.yaml", "give the one of the site's kit", "site, server and data")
        known = f"known are: {', '.join(cls.model_fields)}, and below `allow`: {', '.join(Allow.model_fields)}"
        found = validate_config(cls, str(path), values, known)
        home = path.resolve().parent
        places = {name: home / place for name in ("ca", "key", "folder") if (place := getattr(found, name)) is not None}
        data = {name: home / place.expanduser() for name, place in found.data.items()}
        return found.model_copy(update={**places, "data": data})


def config_warnings(config: SiteConfig) -> Iterator[str]:
    """What people should know at the start: images that are not found, and runs that a budget comes too late for."""
    yield from budget_remarks(config)
    for name, path in config.data.items():
        if not os.access(path, os.R_OK):
            yield f"data in site.yaml says that {name!r} lies at {path}, where nothing can be read; correct it"


def budget_remarks(config: SiteConfig) -> Iterator[str]:
    """Say what a site's budget does not count: the runs that left without a plan."""
    before = ReleaseLog(config.folder).count_unbounded().sentence
    if config.budget is not None and before:
        yield f"{before}: `budget` in site.yaml counts the runs with a plan only"
