"""Loads a site's own images for a recipe, from the paths that site.yaml registers; `message_handler.py` calls it.

Image files are decoded as in a simulation, by `data/loading` with `data/sources/decoder.py`. Splits are drawn from a
stream named by the site, so a site that has only its own rows gets the parts that it would have among all. A path in a
recipe is a name to look up in site.yaml and nothing else: a server cannot point at a file.
"""

import os
from dataclasses import replace
from pathlib import Path

from polyclinic.config.recipe import Recipe
from polyclinic.core import DataError, Refused, SiteId, Stream
from polyclinic.data import DATASETS, NAMED_DATASETS
from polyclinic.data.datasets.user_data import MultiOptions, UserDataOptions
from polyclinic.data.loading.cache import trim_cache
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.loading.loader import apply_task, load_collection
from polyclinic.data.partitioning.dry_run import check_missing_fields
from polyclinic.data.partitioning.partitions import Natural
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.patients import count_unnamed, max_images_per_patient
from polyclinic.data.records import Listing, find_classes
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.runs.sites import FederatedDataset, load_sites
from polyclinic.storage.files import explain_os_errors


def load_own_site(recipe: Recipe, config: SiteConfig) -> FederatedDataset:
    """Load the dataset of this site alone, and keep the cache of prepared images within the site's bound.

    Its classes are those that the recipe names, else those of the site's own labels; no server chooses them.
    """
    found = _load_own_dataset(recipe, config)
    trim_cache(int(config.cache_gigabytes * 1e9))
    return found


def _load_own_dataset(recipe: Recipe, config: SiteConfig) -> FederatedDataset:
    spec, given = DATASETS[recipe.data.name], recipe.data.options
    if issubclass(spec.options, UserDataOptions):
        path = registered_path(str(given.get("path")), config)
        return _load_single_site(recipe, config.site, spec.options.model_validate({**given, "path": str(path)}), None)
    if issubclass(spec.options, MultiOptions):
        parts = _select_site_parts(spec.options.model_validate(given), config)
        return _load_single_site(recipe, config.site, parts, _link_data_folder(config))
    if recipe.data.name in NAMED_DATASETS:
        registered_path(recipe.data.name, config)
    whole = load_sites(recipe, _link_data_folder(config))  # a generated or public set is loaded as a whole
    if config.site not in whole.sites:
        raise Refused("data", f"no part of this recipe's data is that of a site called {config.site}")
    return replace(whole, sites={config.site: whole.sites[config.site]}, held_out=None)


def registered_path(name: str, config: SiteConfig) -> Path:
    """The path that site.yaml registers under this name."""
    if name not in config.data:
        raise Refused(
            "data",
            f"{config.site} has no data called {name!r:.100}; it can add `data: {{NAME: PATH}}` to its site.yaml",
        )
    path = config.data[name]
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read here, or is not there; correct {name!r} below `data` in site.yaml.")
    return path


def _load_single_site(recipe: Recipe, site: SiteId, options: ImageOptions, data: Path | None) -> FederatedDataset:
    """Load data whose rows are all this site's own."""
    partition, stream, spec = recipe.build_partition(), Stream(recipe.seed), DATASETS[recipe.data.name]
    if not isinstance(partition, Natural) or (partition.only and site not in partition.only):
        raise Refused(
            "data", f"real sites have their own images, {site} among them; set data.partition: {{by: natural}}"
        )
    if options.limit is not None:
        raise Refused("data", "data.limit is drawn among the images of all sites, which nobody has; leave it out")
    assert spec.read is not None
    listing = select_site_rows(spec.read(options, data), site)
    collection = load_collection(listing, options, stream.child("data"))
    natural = Natural(minimum=partition.minimum)
    if "" in (*(collection.sites or ()), *(collection.split or ())):
        check_missing_fields(apply_task(listing, options.task), natural, recipe.data.split)
    sites = build_site_data(
        collection, natural, recipe.data.split, stream.child("sites"), recipe.data.allow_single_class
    )
    return FederatedDataset(collection.classes, sites, None, collection.images.shape[1], collection.images.shape[-1])


def select_site_rows(listing: Listing, site: SiteId) -> Listing:
    """The rows of this site; all rows where the source names no sites."""
    if not any(record.site for record in listing.records):
        return replace(listing, records=tuple(replace(record, site=site) for record in listing.records))
    own = tuple(record for record in listing.records if record.site in (site, ""))  # rows without a site fail later
    if not any(record.site == site for record in own):
        raise DataError(
            f"No image of {listing.name} is from site '{site}', although the data name sites; correct the site "
            "column (or folders), leave it out if all images are this site's, or correct `site` in site.yaml."
        )
    classes = listing.classes if listing.declared else find_classes(record.label for record in own)
    return replace(listing, records=own, classes=classes)


def _select_site_parts(options: MultiOptions, config: SiteConfig) -> MultiOptions:
    """The options of a combined data set with this site's parts only."""
    own = [part for part in options.parts if _belongs_to_site(config.site, part.site, part.pieces)]
    for part in own:
        registered_path(part.set, config)
    if not own:
        raise Refused("data", f"no part of this recipe's data is that of a site called {config.site}")
    return options.model_copy(update={"parts": own})


def _belongs_to_site(site: SiteId, named: str, pieces: int) -> bool:
    return site == named if pieces == 1 else site in {f"{named}-{number}" for number in range(1, pieces + 1)}


def _link_data_folder(config: SiteConfig) -> Path:
    """A data folder with links under the names that public sets expect."""
    home = config.folder / "data"
    with explain_os_errors(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, path in config.data.items():
            link = home / ((NAMED_DATASETS[name].folder or name) if name in NAMED_DATASETS else name)
            if name in NAMED_DATASETS and not (link.is_symlink() and link.readlink() == path):
                link.unlink(missing_ok=True)
                link.symlink_to(path)
    return home


def build_site_profile(dataset: FederatedDataset, site: SiteId, version: str, mark: str) -> dict[str, object]:
    """What the server learns about a site's images: counts, classes, shape, and a keyed hash to detect changes."""
    own = dataset.sites[site]
    parts = own.train, own.validation, own.test
    return {
        "version": version,
        "classes": list(dataset.classes),
        "channels": dataset.channels,
        "size": dataset.size,
        "train": len(own.train),
        "validation": len(own.validation),
        "test": len(own.test),
        "groups": [max_images_per_patient(part) for part in parts[:2]],
        "unnamed": [count_unnamed(part) for part in parts],
        "left_out": own.left_out,
        "fingerprint": mark,
    }
