"""The sites of a recipe with their images: loaded, checked, and moved to the device that trains on them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyclinic.config.recipe import Recipe
from polyclinic.core import HELD_OUT, POOLED, DataError, SiteId, Stream
from polyclinic.data import DATASETS
from polyclinic.data.examples import Images, PooledData, Selection, SiteData, concatenate
from polyclinic.data.loading.loader import apply_task
from polyclinic.data.partitioning.dry_run import check_missing_fields
from polyclinic.data.partitioning.site_data import SiteSummary, build_site_data, summarise_sites

MOST_FEATURES = 4 * 2**30
"""The most bytes of features that are computed once; larger ones are computed in every step."""
HASHED = 256
"""Images hashed at a time; another number would change the fingerprint."""


@dataclass(frozen=True)
class FederatedDataset:
    """The sites of a recipe with their images, before any algorithm: all methods of a comparison share them."""

    classes: tuple[str, ...]
    sites: Mapping[SiteId, SiteData]
    held_out: Images | None
    channels: int
    size: int
    _on_devices: dict[torch.device, dict[SiteId, SiteData]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _feature_cache: dict[tuple[int, torch.device, str], tuple[Images, Images]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def describe(self) -> list[SiteSummary]:
        return summarise_sites(self.sites, self.classes)

    @cached_property
    def fingerprint(self) -> str:
        """A hash over every image and label of every site."""
        return self._hash_sites(self.sites)

    def fingerprint_of(self, site: SiteId) -> str:
        """Return a hash over every image and label of one site, the same in a simulation and at the site itself."""
        return self.fingerprint if site == POOLED else self._hash_sites([site])

    def _hash_sites(self, names: Iterable[SiteId]) -> str:
        total = hashlib.sha256()
        for name in names:
            site = self.sites[name]
            for part in (site.train, site.validation, site.test):
                total.update(f"{name}|{len(part)}".encode())
                if isinstance(part, Selection):
                    total.update(f"{part.shared.mean}|{part.shared.std}".encode())
                for index in torch.split(torch.arange(len(part)), HASHED):
                    for tensor in part.stored_batch(index) if isinstance(part, Selection) else part.batch(index):
                        total.update(tensor.contiguous().numpy().data)
        return total.hexdigest()

    def limit_group(self, most: int | None) -> FederatedDataset:
        """Return the sites with at most `most` training images of each named patient; None: with all of them."""
        sites = {name: site.limit_group(most) for name, site in self.sites.items()} if most else self.sites
        kept = all(site is self.sites[name] for name, site in sites.items())
        return self if kept else replace(self, sites=sites)

    def on_device(self, device: torch.device, room: int | None = None) -> dict[SiteId, SiteData]:
        """Return the sites with their images on `device`, where images that sites share are stored once.

        If they take more than `room` bytes there (None: half of the free memory), they stay where they are.
        """
        if device.type == "cpu":
            return dict(self.sites)
        if device not in self._on_devices:
            fits = sum(t.nbytes for t in self._distinct_tensors()) <= (free_bytes(device) if room is None else room)
            copies: dict[int, Images] = {}
            self._on_devices[device] = {
                n: site_on_device(s, device, copies) if fits else s for n, s in self.sites.items()
            }
        return dict(self._on_devices[device])

    def with_features(self, part: nn.Module, device: torch.device) -> tuple[dict[SiteId, SiteData], Images | None]:
        """Return the sites on `device` and the held-out images, with the features that a fixed part of a network
        computes in place of images, where they fit; each is computed once."""

        def cached(images: Images) -> Images:
            key = id(images), device, repr(part)
            if key not in self._feature_cache:  # which holds the images, so that no other takes their identity
                self._feature_cache[key] = images, compute_features(images, part)
            return self._feature_cache[key][1]

        sites = {name: _map_images(site, cached) for name, site in self.on_device(device).items()}
        return sites, self.held_out and cached(self.held_out)

    def _distinct_tensors(self) -> list[torch.Tensor]:
        """Return every tensor of images once."""
        parts = (part for site in self.sites.values() for part in (site.train, site.validation, site.test))
        held = (part.shared if isinstance(part, Selection) else part for part in parts)
        return list({id(h.images): h.images for h in held if isinstance(h, Images)}.values())


def load_sites(recipe: Recipe, data: Path | None = None) -> FederatedDataset:
    """Load the recipe's data set (from the folder `data`), divide it among sites, and check the result."""
    stream, spec = Stream(recipe.seed), DATASETS[recipe.data.name]
    options = spec.options.model_validate(recipe.data.options)
    collection = spec.load(options, stream.child("data"), data)
    partition = recipe.build_partition()
    if spec.read is not None and "" in (*(collection.sites or ()), *(collection.split or ())):
        listing = apply_task(spec.read(options, data), getattr(options, "task", None))  # which knows the rows
        check_missing_fields(listing, partition, recipe.data.split)
    sites = build_site_data(
        collection,
        partition,
        recipe.data.split,
        stream.child("sites"),
        recipe.data.allow_single_class,
    )
    for name in sites:
        check_site_name(name)
    channels, size = collection.images.shape[1], collection.images.shape[-1]
    return FederatedDataset(collection.classes, sites, collection.held_out, channels, size)


def check_site_name(name: SiteId) -> None:
    """Raise if a site has a reserved name, or one that cannot be part of names in messages and results."""
    if not (0 < len(name) <= 100 and name.isprintable()) or set("/@|") & set(name):
        raise DataError(
            f"The site name {name[:100]!r} is empty, too long, or holds '/', '@', '|' or a control character; "
            "rename the site."
        )
    taken = ("global", "personal", "transfer", "validation", "test", "student", "ensemble", "public", "server")
    if name in (POOLED, HELD_OUT, *taken):
        raise DataError(f"A site cannot be called {name!r}, which has a meaning in results; rename the site.")


@torch.no_grad()
def compute_features(images: Images, part: nn.Module) -> Images:
    """Return the images with the features that a fixed part of a network computes in their place, where they fit."""
    device = images.labels.device
    part = copy.deepcopy(part).to(device)
    rows = torch.split(torch.arange(len(images), device=device), HASHED)
    if not rows or not len(images):
        return images
    first = part(images.batch(rows[0])[0])
    if first[0].numel() * 4 * len(images) > MOST_FEATURES:
        return images
    block = torch.empty(len(images), *first.shape[1:], device=device)
    for index in rows:
        block[index] = part(images.batch(index)[0])
    return replace(images, images=block, mean=0.0, std=1.0)


def free_bytes(device: torch.device) -> float:
    """Return the bytes of images that may be put on `device`: half of its free memory, the rest is for training."""
    return torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else float("inf")


def site_on_device(site: SiteData, device: torch.device, copies: dict[int, Images]) -> SiteData:
    """Return the site with its images on `device`; `copies` holds those that are there already."""

    def moved(images: Images) -> Images:
        copies[id(images)] = copies.get(id(images)) or images.to(device)
        return copies[id(images)]

    return _map_images(site, moved)


def _map_images(site: SiteData, function: Callable[[Images], Images]) -> SiteData:
    """Return the site with `function` applied to its images."""
    train, validation, test = (map_part(part, function) for part in (site.train, site.validation, site.test))
    return replace(site, train=train, validation=validation, test=test)


def map_part(part: Any, function: Callable[[Images], Images]) -> Any:
    """Return a part of a site with `function` applied to its images, or to those that it selects from."""
    return part.with_images(function(part.shared)) if isinstance(part, Selection) else function(part)


def pool_sites(sites: Mapping[SiteId, SiteData]) -> PooledData:
    """Return the training and validation images of all sites as one site without test images."""
    train, validation = (concatenate([getattr(site, p) for site in sites.values()]) for p in ("train", "validation"))
    nothing, members = validation.subset(torch.arange(0)), {name: site.train for name, site in sites.items()}
    left_out = sum(site.left_out for site in sites.values())
    return PooledData(POOLED, train, validation, nothing, members, left_out=left_out)
