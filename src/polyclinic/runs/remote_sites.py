"""What sites that are elsewhere said of themselves: all that a server knows of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic import __version__
from polyclinic.core.contract import Batch, SiteId
from polyclinic.core.errors import DataError, EngineError, Refused
from polyclinic.data.examples import Images, SiteData
from polyclinic.data.partitioning.federate import SiteSummary
from polyclinic.runs.sites import FederatedDataset, check_site_name

MOST = 10**9


@dataclass(frozen=True)
class SiteProfile:
    """What a site says of its images: how many, of what shape, and a mark by which to see that they changed."""

    version: str
    classes: tuple[str, ...]
    channels: int
    size: int
    train: int
    validation: int
    test: int
    groups: tuple[int, int]
    """Training and validation images of the patient with the most."""
    fingerprint: str

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> SiteProfile:
        """Refused unless everything is what it should be."""
        try:
            counts = [fields[name] for name in ("channels", "size", "train", "validation", "test")]
            groups, classes = tuple(fields["groups"]), tuple(fields["classes"])
            version, mark = fields["version"], fields["fingerprint"]
        except (KeyError, TypeError):
            raise Refused("json", "a site's card lacks what it must say") from None
        whole = all(type(number) is int and 0 <= number <= MOST for number in (*counts, *groups))
        words = all(isinstance(word, str) and len(word) <= 200 for word in (version, mark, *classes))
        if not whole or not words or len(groups) != 2 or not 2 <= len(classes) <= 10_000 or not all(counts[:3]):
            raise Refused("json", "a site's card holds values that cannot be")
        channels, size, train, validation, test = counts
        return SiteProfile(version, classes, channels, size, train, validation, test, (groups[0], groups[1]), mark)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RemoteImages:
    """Images that are elsewhere: a number of them, of a shape."""

    count: int
    shape: tuple[int, ...]
    largest: int = 1

    def __len__(self) -> int:
        return self.count

    @property
    def labels(self) -> Tensor:
        raise EngineError("labels of another site's images were asked for, which never leave it")

    @property
    def patients(self) -> tuple[str, ...]:
        """Nobody's names; but as many images are of one patient as the site says."""
        alike = min(self.largest, self.count)
        return (*("1",) * alike, *(str(number) for number in range(2, self.count - alike + 2)))

    def batch(self, index: Tensor) -> Batch:
        """Blank: only its shape counts, when work is rehearsed."""
        return torch.zeros(len(index), *self.shape), torch.zeros(len(index), dtype=torch.int64)

    def to(self, device: torch.device) -> RemoteImages:
        return self


@dataclass(frozen=True)
class RemoteSites(FederatedDataset):
    """Sites that are elsewhere, in the federation's order, as a consortium without images."""

    cards: Mapping[SiteId, SiteProfile]

    @staticmethod
    def from_profiles(profiles: Mapping[SiteId, SiteProfile]) -> RemoteSites:
        """Refused where they do not fit together; each sentence names who has to mend it."""
        first = next(iter(profiles.values()))
        for site, why in find_misfits(profiles).items():
            raise DataError(f"Site {site} does not fit: {why}.")
        for site in profiles:
            check_site_name(site)
        sites = {site: _remote_site(site, card) for site, card in profiles.items()}
        return RemoteSites(first.classes, sites, None, first.channels, first.size, dict(profiles))

    @property
    def visible_sites(self) -> Mapping[SiteId, SiteData]:
        return {}

    @cached_property
    def fingerprint(self) -> str:
        marks = "|".join(f"{site}:{card.fingerprint}" for site, card in self.cards.items())
        return hashlib.sha256(marks.encode()).hexdigest()

    def describe(self) -> list[SiteSummary]:
        """How many images of each class a site has is its own affair."""
        return [
            SiteSummary(site=site, train=card.train, validation=card.validation, test=card.test, classes={})
            for site, card in self.cards.items()
        ]

    def on_device(self, device: torch.device, room: int | None = None) -> dict[SiteId, SiteData]:
        return dict(self.sites)

    def with_features(self, part: nn.Module, device: torch.device) -> tuple[dict[SiteId, SiteData], Images | None]:
        """Sites compute it themselves."""
        return dict(self.sites), None


def find_misfits(profiles: Mapping[SiteId, SiteProfile]) -> dict[SiteId, str]:
    """Who has another version, other classes or another shape than most (of equally many, than the first), and why."""
    kinds = [(card.classes, card.channels, card.size) for card in profiles.values()]
    usual = max(kinds, key=kinds.count, default=None)
    like = next((site for site, kind in zip(profiles, kinds, strict=True) if kind == usual), "")
    found: dict[SiteId, str] = {}
    for site, kind in zip(profiles, kinds, strict=True):
        if (theirs := profiles[site].version) != __version__:
            found[site] = f"it runs polyclinic {theirs}, this server {__version__}; install the same on both"
        for what, own, other in zip(("classes", "channels", "size"), kind, usual or kind, strict=True):
            if own != other:
                told = f"it has {what} {_format_value(own)}, {like} has {_format_value(other)}"
                found.setdefault(site, f"{told}; mend its data, or have the recipe's data say which")
    return found


def _remote_site(site: SiteId, card: SiteProfile) -> SiteData:
    shape = (card.channels, card.size, card.size)
    train, validation = (
        RemoteImages(n, shape, of) for n, of in zip((card.train, card.validation), card.groups, strict=True)
    )
    return SiteData(site, train, validation, RemoteImages(card.test, shape))


def _format_value(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
