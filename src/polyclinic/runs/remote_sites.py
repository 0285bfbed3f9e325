"""Sites on other machines, as a server knows them: by the profiles that they send."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from polyclinic.core import Batch, DataError, EngineError, Refused, SiteId
from polyclinic.data.examples import Images, SiteData
from polyclinic.data.partitioning.site_data import SiteSummary
from polyclinic.runs.sites import FederatedDataset, check_site_name

Count: TypeAlias = Annotated[int, Field(ge=0, le=10**9)]
PositiveCount: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
Word: TypeAlias = Annotated[str, Field(max_length=200)]


class SiteProfile(BaseModel):
    """A site's description of its images: numbers, shape, and a fingerprint that shows whether they changed."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: Word
    classes: Annotated[tuple[Word, ...], Field(min_length=2, max_length=10_000, strict=False)]
    channels: PositiveCount
    size: PositiveCount
    train: PositiveCount
    validation: Count
    test: Count
    groups: Annotated[tuple[Count, Count], Field(strict=False)]
    """Training and validation images of the patient who has most."""
    unnamed: Annotated[tuple[Count, Count, Count], Field(strict=False)]
    """Training, validation and test images whose patient is not named."""
    left_out: Count
    """Training images beyond privacy.group, which are not used."""
    fingerprint: Word

    @property
    def images(self) -> int:
        """The number of images of all parts."""
        return self.train + self.validation + self.test

    @staticmethod
    def from_fields(fields: object) -> SiteProfile:
        """Read a profile from the JSON of a message; raises `Refused` if a field is missing or invalid."""
        try:
            return SiteProfile.model_validate(fields)
        except ValidationError as error:
            lacks = error.errors()[0]["type"] in ("missing", "model_type")
            raise Refused("json", f"a site's profile {'lacks a field' if lacks else 'has invalid values'}") from None


@dataclass(frozen=True)
class RemoteImages:
    """Images on another machine: their number and shape, and how many are of one patient, or of nobody named."""

    count: int
    shape: tuple[int, ...]
    largest: int = 1
    unnamed: int = 0

    def __len__(self) -> int:
        return self.count

    @property
    def labels(self) -> Tensor:
        raise EngineError("labels of another site's images were asked for, which never leave it")

    @property
    def patients(self) -> None:
        """Not known: a site tells counts alone, and a billion names made from a count would fill the memory."""

    def batch(self, index: Tensor) -> Batch:
        """Return a blank batch, whose shape is used in the dry run of a round."""
        return torch.zeros(len(index), *self.shape), torch.zeros(len(index), dtype=torch.int64)

    def to(self, device: torch.device) -> RemoteImages:
        return self


@dataclass(frozen=True)
class RemoteSites(FederatedDataset):
    """Sites on other machines, in the federation's order, as a dataset without images."""

    profiles: Mapping[SiteId, SiteProfile]

    @staticmethod
    def from_profiles(profiles: Mapping[SiteId, SiteProfile]) -> RemoteSites:
        """Combine the profiles; raises `DataError` with the site that has to change if they do not fit together."""
        first = next(iter(profiles.values()))
        for site, why in find_misfits(profiles).items():
            raise DataError(f"Site {site} does not fit: {why}.")
        for site in profiles:
            check_site_name(site)
        sites: dict[SiteId, SiteData] = {}
        for site, profile in profiles.items():
            shape = (profile.channels, profile.size, profile.size)
            sites[site] = SiteData(
                site,
                RemoteImages(profile.train, shape, profile.groups[0], profile.unnamed[0]),
                RemoteImages(profile.validation, shape, profile.groups[1], profile.unnamed[1]),
                RemoteImages(profile.test, shape, 1, profile.unnamed[2]),
                left_out=profile.left_out,
            )
        return RemoteSites(first.classes, sites, None, first.channels, first.size, dict(profiles))

    @cached_property
    def fingerprint(self) -> str:
        marks = "|".join(f"{site}:{profile.fingerprint}" for site, profile in self.profiles.items())
        return hashlib.sha256(marks.encode()).hexdigest()

    def describe(self) -> list[SiteSummary]:
        """Describe the sites without the numbers of images per class, which they do not send."""
        return [
            SiteSummary(site=site, train=profile.train, validation=profile.validation, test=profile.test, classes={})
            for site, profile in self.profiles.items()
        ]

    def on_device(self, device: torch.device, room: int | None = None) -> dict[SiteId, SiteData]:
        return dict(self.sites)

    def with_features(self, part: nn.Module, device: torch.device) -> tuple[dict[SiteId, SiteData], Images | None]:
        """Return the sites unchanged: they compute features themselves."""
        return dict(self.sites), None


def find_misfits(profiles: Mapping[SiteId, SiteProfile]) -> dict[SiteId, str]:
    """Return the sites whose classes or image shape differ from most sites' (or the first's), and how."""
    kinds = [(profile.classes, profile.channels, profile.size) for profile in profiles.values()]
    usual = max(kinds, key=kinds.count, default=None)
    like = next((site for site, kind in zip(profiles, kinds, strict=True) if kind == usual), "")
    found: dict[SiteId, str] = {}
    for site, kind in zip(profiles, kinds, strict=True):
        for what, own, other in zip(("classes", "channels", "size"), kind, usual or kind, strict=True):
            if own != other:
                found.setdefault(
                    site,
                    f"it has {what} {_format_value(own)}, {like} has {_format_value(other)}; correct its data, or set "
                    "it in the recipe's data section",
                )
    return found


def _format_value(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
