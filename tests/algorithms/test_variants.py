"""Options that would do nothing: those of another variant, and stages for what nobody sends."""

from __future__ import annotations

from typing import Any

import pytest

from polyclinic import Recipe
from polyclinic.algorithms.distillation.refine import RefinementOptions
from polyclinic.core.errors import RecipeError
from tests.runs.test_networks import PUBLIC, recipe, sentence_of

IDLE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a weight of (S) in (18)": (
        {"finish": {"name": "refine", "variant": "paper", "ce": 0.9}, "public": PUBLIC},
        ("finish.ce has no effect in variant paper", "leave it out"),
    ),
    "(18)'s α in (S)": (
        {"finish": {"alpha": 0.2}, "public": PUBLIC},
        ("finish.alpha has no effect in variant corrected",),
    ),
    "a contrast in FedDF": (
        {"finish": {"name": "feddf", "tau": 0.2}, "public": PUBLIC},
        ("finish.tau has no effect in variant feddf",),
    ),
    "the paper has no share": (
        {"algorithm": {"name": "pfedcdp", "variant": "paper", "keep": 0.1}},
        ("algorithm.keep has no effect in variant paper", "leave it out"),
    ),
    "a share has no threshold": (
        {"algorithm": {"name": "pfedcdp", "threshold": 0.5}, "public": PUBLIC},
        ("algorithm.threshold has no effect in variant corrected",),
    ),
    "what nobody sends is quantised": (
        {"algorithm": "elastic", "stages": [{"name": "quantise", "kinds": ["model", "sensitivities"]}]},
        ("has 'sensitivities'", "elastic", "did you mean 'sensitivity'?", "they send: model, buffers, sensitivity"),
    ),
}


@pytest.mark.parametrize(("settings", "words"), IDLE.values(), ids=IDLE)
def test_a_key_without_effect_is_told_in_one_sentence(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**settings)
    sentence_of(caught.value, *words)


def test_kinds_that_are_sent_are_fine_and_so_are_stages_where_nothing_is() -> None:
    for name, kinds in {"elastic": ["model", "sensitivity"], "fedavg": ["buffers"], "local": ["model"]}.items():
        assert recipe(algorithm=name, stages=[{"name": "quantise", "kinds": kinds}]).stages


THEIRS = {"algorithm.variant": "paper", "finish.variant": "paper", "finish.alpha": 0.2}


def test_another_variant_drops_the_options_that_it_does_not_have() -> None:
    """So a comparison may give `corrected` its options once, and one of its methods say `variant: paper`."""
    ours = {"algorithm": {"name": "pfedcdp", "keep": 0.2, "distil": 0.5}, "finish": {"ce": 0.9, "lr": 0.01}}
    both = recipe(**ours, public=PUBLIC, methods={"ours": {}, "theirs": THEIRS})
    theirs = both.method_recipe("theirs")
    assert theirs.algorithm.options == {"variant": "paper", "distil": 0.5}
    assert theirs.finish == RefinementOptions(variant="paper", lr=0.01, alpha=0.2)
    assert Recipe.from_values(theirs.model_dump(mode="json")) == theirs, "a run that was stopped can be read back"
    assert both.method_recipe("ours").algorithm.options == {"keep": 0.2, "distil": 0.5}
    with pytest.raises(RecipeError, match=r"method wrong: algorithm\.keep has no effect in variant paper"):
        recipe(**ours, public=PUBLIC, methods={"wrong": {"algorithm.keep": 0.3, **THEIRS}})
