"""Every old key and value of a recipe is refused in one sentence with its new name."""

from __future__ import annotations

from typing import Any

import pytest

from polyclinic import Recipe, RecipeError
from polyclinic.config.renamed_keys import RENAMED_KEYS, RENAMED_VALUES, find_renamed
from tests.small import TINY

CLUSTERS = {"clusters": {"high": {"min_score": 0, "model": "linear"}}}
FULL: dict[str, Any] = {**TINY, "model": "linear", **CLUSTERS, "public": {"name": "digits"}, "finish": "refine"}


def refused(changes: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as error:
        Recipe.from_values(FULL, changes, "old.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_an_old_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    old, new = (key.replace("*", "high") for key in (old, new))
    assert refused({old: 1}) == f"old.yaml: {old} is now {new}; use the new key"


@pytest.mark.parametrize(("key", "old", "new"), [(*place, new) for place, new in RENAMED_VALUES.items()])
def test_an_old_value_is_refused_with_its_new_name(key: str, old: str, new: str) -> None:
    key = key.replace("*", "high")
    section, _, last = key.rpartition(".")
    changes = {section: [{last: old}]} if section == "claims" else {key: old}
    assert refused(changes) == f"old.yaml: {key}: {old} is now {key}: {new}; use the new name"


@pytest.mark.parametrize("section", ["data", "public"])
def test_an_old_name_that_stands_for_its_section_is_refused(section: str) -> None:
    assert refused({section: "several"}) == f"old.yaml: {section}: several is now {section}: multi; use the new name"


def test_an_old_key_of_a_method_is_refused_with_the_methods_name() -> None:
    sentence = refused({"methods": {"ours": {"training.order": "hard"}}})
    assert sentence == "old.yaml: method ours: training.order is now training.curriculum.by; use the new key"


def test_new_names_are_not_old_ones() -> None:
    assert not set(RENAMED_KEYS.values()) & RENAMED_KEYS.keys()
    assert not {(place, new) for (place, _), new in RENAMED_VALUES.items()} & RENAMED_VALUES.keys()
    assert list(find_renamed(FULL)) == []


@pytest.mark.parametrize("new", [new for old, new in RENAMED_KEYS.items() if not old.startswith(("data", "public"))])
def test_the_new_keys_exist(new: str) -> None:
    """A value that no key takes is refused for itself, not as an unknown key."""
    sentence = refused({new.replace("*", "high"): [[]]})
    assert "there is no key" not in sentence
