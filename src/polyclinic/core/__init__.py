"""The vocabulary of the package: types, random streams, options, jobs and errors.

Each name is imported when it is first used, so that names that need no torch do not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyclinic.core.errors import (
        DataError as DataError,
        EngineError as EngineError,
        PolyclinicError as PolyclinicError,
        RecipeError as RecipeError,
        Refused as Refused,
        RoundFailed as RoundFailed,
        StoreError as StoreError,
        WeightsError as WeightsError,
    )
    from polyclinic.core.failpoints import failpoint as failpoint
    from polyclinic.core.flat_tensors import (
        BLOCK_SIZE as BLOCK_SIZE,
        FlatDifference as FlatDifference,
        FlatTensors as FlatTensors,
        contiguous_vector as contiguous_vector,
        copy_tensors as copy_tensors,
        flatten_if_contiguous as flatten_if_contiguous,
        l2_distance as l2_distance,
        layout_of as layout_of,
        split_vector as split_vector,
    )
    from polyclinic.core.jobs import (
        Exchange as Exchange,
        Failure as Failure,
        Federation as Federation,
        Fit as Fit,
        Fitted as Fitted,
        Job as Job,
        Score as Score,
        ServerWork as ServerWork,
        Site as Site,
        Step as Step,
        Update as Update,
        Updates as Updates,
        Work as Work,
    )
    from polyclinic.core.names import (
        ENSEMBLE as ENSEMBLE,
        HELD_OUT as HELD_OUT,
        POOLED as POOLED,
        PUBLIC as PUBLIC,
        STUDENT as STUDENT,
        slugify as slugify,
    )
    from polyclinic.core.network import Network as Network, Objective as Objective
    from polyclinic.core.options import (
        Augment as Augment,
        CurriculumOptions as CurriculumOptions,
        Optimiser as Optimiser,
        Private as Private,
        Training as Training,
        check_training as check_training,
    )
    from polyclinic.core.registry import Registry as Registry
    from polyclinic.core.rng import Stream as Stream, seed_generators as seed_generators
    from polyclinic.core.strict_parsing import parse_json as parse_json, read_yaml as read_yaml
    from polyclinic.core.types import (
        AUX_PREFIX as AUX_PREFIX,
        Batch as Batch,
        Bundle as Bundle,
        Examples as Examples,
        Part as Part,
        Precision as Precision,
        SiteId as SiteId,
        Tensors as Tensors,
    )
    from polyclinic.core.validation import (
        PositiveShare as PositiveShare,
        Share as Share,
        check_options as check_options,
        validate_as as validate_as,
    )

__version__ = "0.1.0"
PROTOCOL = 1
"""Of a server and its sites: equal numbers may talk, whatever their versions. Raise it when messages, or what sites or
server compute from them, change."""
_NAMES = {
    "errors": (
        "DataError",
        "EngineError",
        "PolyclinicError",
        "RecipeError",
        "Refused",
        "RoundFailed",
        "StoreError",
        "WeightsError",
    ),
    "failpoints": ("failpoint",),
    "flat_tensors": (
        "BLOCK_SIZE",
        "FlatDifference",
        "FlatTensors",
        "contiguous_vector",
        "copy_tensors",
        "flatten_if_contiguous",
        "l2_distance",
        "layout_of",
        "split_vector",
    ),
    "jobs": (
        "Exchange",
        "Failure",
        "Federation",
        "Fit",
        "Fitted",
        "Job",
        "Score",
        "ServerWork",
        "Site",
        "Step",
        "Update",
        "Updates",
        "Work",
    ),
    "names": ("ENSEMBLE", "HELD_OUT", "POOLED", "PUBLIC", "STUDENT", "slugify"),
    "network": ("Network", "Objective"),
    "options": ("Augment", "CurriculumOptions", "Optimiser", "Private", "Training", "check_training"),
    "registry": ("Registry",),
    "rng": ("Stream", "seed_generators"),
    "strict_parsing": ("parse_json", "read_yaml"),
    "types": ("AUX_PREFIX", "Batch", "Bundle", "Examples", "Part", "Precision", "SiteId", "Tensors"),
    "validation": ("PositiveShare", "Share", "check_options", "validate_as"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
