"""Keys and values of recipes that have a new name: an old one is refused in a sentence that gives the new one."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

RENAMED_KEYS: Mapping[str, str] = {
    "turns": "cohort_order",
    "model.cut": "model.split_after",
    "model.checkpoint": "model.activation_checkpointing",
    "clusters.*.at_least": "clusters.*.min_score",
    "clusters.*.lr": "clusters.*.lr_scale",
    "clusters.*.model.cut": "clusters.*.model.split_after",
    "clusters.*.model.checkpoint": "clusters.*.model.activation_checkpointing",
    "capability.cards": "capability.profiles",
    "capability.every": "capability.reassess_every",
    "capability.latency": "capability.max_latency_ms",
    "training.order": "training.curriculum.by",
    "training.emphasis": "training.curriculum.strength",
    "training.order_after": "training.curriculum.warmup_rounds",
    "data.join_copies": "data.merge_near_duplicates",
    "public.join_copies": "public.merge_near_duplicates",
    "privacy.views": "privacy.augmentation_multiplicity",
    "privacy.at": "privacy.noise_at",
    "privacy.holders": "privacy.max_sites_per_record",
}
"""`*` stands for the name of a cluster."""

RENAMED_VALUES: Mapping[tuple[str, str], str] = {
    ("data.name", "several"): "multi",
    ("public.name", "several"): "multi",
    ("model.norm", "own"): "default",
    ("clusters.*.model.norm", "own"): "default",
    ("algorithm.variant", "sound"): "corrected",
    ("finish.variant", "sound"): "corrected",
    ("claims.metric", "told_apart"): "site_classifier_accuracy",
}


def find_renamed(values: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield a sentence for each key or value of a recipe that has a new name."""
    for key, value in values.items():
        where = f"{place}{key}"
        pattern = re.sub(r"^clusters\.[^.]+", "clusters.*", where)
        if pattern in RENAMED_KEYS:
            cluster = where.split(".")[1] if "*" in pattern else ""
            yield f"{where} is now {RENAMED_KEYS[pattern].replace('*', cluster)}; use the new key"
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from find_renamed(item, f"{where}.")
            elif isinstance(item, str):
                named = pattern if (pattern, item) in RENAMED_VALUES else f"{pattern}.name"
                if (named, item) in RENAMED_VALUES:
                    yield f"{where}: {item} is now {where}: {RENAMED_VALUES[named, item]}; use the new name"
