"""The definition of a dataset: how its images are listed and loaded, its licence, and its downloads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyclinic.core import RecipeError, Stream
from polyclinic.data import GENERATED, NAMED_DATASETS, PUBLIC, USER_DATA
from polyclinic.data.data_dir import data_folder
from polyclinic.data.examples import Collection
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.loading.loader import load_collection, restrict_to_parts
from polyclinic.data.options import Options
from polyclinic.data.records import Listing

Reader = Callable[[Any, Path], Listing]
"""(options, the dataset's own folder) -> listing."""


@dataclass(frozen=True)
class Dataset:
    """A dataset as a recipe names it."""

    options: type[Options]
    licence: str
    classes: tuple[str, ...]
    """With the default options; () where they depend on the files."""
    load: Callable[[Any, Stream, Path | None], Collection]
    """(options, stream, data folder) -> collection; datasets that need no files ignore the folder."""
    read: Callable[[Any, Path | None], Listing] | None = None
    """(options, data folder) -> listing, before any file is opened; None where images are not files."""

    @staticmethod
    def from_reader(
        read: Callable[[Any, Path | None], Listing],
        options: type[Options],
        licence: str = "yours",
        classes: tuple[str, ...] = (),
    ) -> "Dataset":
        """A dataset that loads all images which `read` lists, or those of the chosen official parts."""

        def read_parts(chosen: Any, folder: Path | None) -> Listing:
            return restrict_to_parts(read(chosen, folder), getattr(chosen, "official_parts", None))

        def load(chosen: Any, stream: Stream, folder: Path | None) -> Collection:
            return load_collection(read_parts(chosen, folder), chosen, stream)

        return Dataset(options, licence, classes, load, read_parts)


class Download(NamedTuple):
    """One file to download."""

    url: str
    sha256: str
    """ "" if the publisher gives no checksum and we have not seen the file: the user is then shown its checksum."""
    name: str
    unpack: bool = False
    """Whether to unpack it (zip, tar) into the dataset's folder."""


@dataclass(frozen=True)
class NamedDataset:
    """A dataset with a name and a folder of its own inside the data folder."""

    name: str
    licence: str
    classes: tuple[str, ...]
    read: Reader
    obtain: str
    """How to get the dataset and what its folder must hold, in one or two sentences."""
    options: type[Options] = ImageOptions
    folder: str = ""
    """The name of its folder inside the data folder ("": the dataset's name)."""
    load: Callable[[Any, Stream, Path | None], Collection] | None = None
    """(options, stream, data folder) -> collection, unless the listed images are simply loaded."""
    downloads: tuple[Download, ...] = ()
    """What `polyclinic data fetch` downloads; () where the terms require an account, a form or a fee."""

    def find_folder(self, data: Path | None) -> Path:
        """The dataset's folder inside the data folder `data` (None: the one that the environment names)."""
        return data_folder(data) / (self.folder or self.name)

    def to_dataset(self) -> Dataset:
        """The dataset as a recipe names it."""

        def read(options: Any, data: Path | None) -> Listing:
            return self.read(options, self.find_folder(data))

        listed = Dataset.from_reader(read, self.options, self.licence, self.classes)
        return Dataset(self.options, self.licence, self.classes, self.load or listed.load, listed.read)


def register_dataset(
    name: str,
    *,
    licence: str = "yours",
    classes: tuple[str, ...] = (),
    options: type[Options] = ImageOptions,
    obtain: str = "",
) -> Callable[[Reader], Reader]:
    """Make a dataset of a function that lists images; recipes can then say `data: {name: NAME}`.

    The function takes the options and the folder NAME inside the data folder, and returns a `Listing`. The first line
    of its docstring describes the dataset. `classes` are those with the default options; `obtain` says how to get the
    files.
    """

    if name in {*GENERATED, *USER_DATA, *PUBLIC}:
        raise RecipeError(f"There is already a dataset '{name}'; register yours under another name.")

    def register(read: Reader) -> Reader:
        NAMED_DATASETS[name] = NamedDataset(name, licence, classes, read, obtain, options)
        return read

    return register
