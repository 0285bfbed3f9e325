"""Literals that the command line repeats, so that help loads no torch, are those of the library."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from polyclinic.analysis.attack.campaign import AttackOptions
from polyclinic.analysis.attack.decoder import DecoderTraining
from polyclinic.analysis.attack.gradient_inversion import Search
from polyclinic.analysis.features import FeatureOptions
from polyclinic.analysis.privacy_audit import audit_recipe
from polyclinic.analysis.saliency import SaliencyOptions
from polyclinic.cli import data, display, inspect as inspecting, privacy, run, server
from polyclinic.core.jobs import Failure
from polyclinic.dashboard import open_board
from polyclinic.data.findings import Level
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.storage.run_folder import RunFolder

ATTACK, FEATURES, SALIENCY, AUDIT, BOARD = (
    AttackOptions(),
    FeatureOptions(),
    SaliencyOptions(),
    audit_recipe,
    open_board,
)


def default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


@pytest.mark.parametrize(
    ("command", "option", "expected"),
    [
        (privacy.attack_command, "images", ATTACK.most),
        (privacy.attack_command, "noise", ATTACK.noise),
        (privacy.attack_command, "step_clip", ATTACK.step_clip),
        (privacy.attack_command, "step_noise", ATTACK.step_noise),
        (privacy.attack_command, "steps", DecoderTraining().steps),
        (privacy.attack_command, "iterations", Search().iterations),
        (privacy.audit_command, "canaries", default(AUDIT, "canaries")),
        (privacy.audit_command, "confidence", default(AUDIT, "confidence")),
        (privacy.audit_command, "rounds", default(AUDIT, "rounds")),
        (inspecting.features_command, "most", FEATURES.most),
        (inspecting.features_command, "part", FEATURES.part),
        (inspecting.explain_command, "of", SALIENCY.of),
        (inspecting.explain_command, "cases", SALIENCY.cases),
        (inspecting.board_command, "host", default(BOARD, "host")),
        (inspecting.board_command, "port", default(BOARD, "port")),
        (data.diagnose_command, "channels", ImageOptions().channels),
    ],
)
def test_the_defaults_of_options(command: Callable[..., Any], option: str, expected: object) -> None:
    assert default(command, option) == expected


def test_the_names_of_a_run_s_files() -> None:
    folder = RunFolder(Path())
    for file, modules in {
        folder.recipe: (run, server, privacy),
        folder.result: (server,),
        folder.status: (server,),
    }.items():
        for module in modules:
            assert file.name in inspect.getsource(module)


def test_every_level_of_a_finding_has_a_colour_and_every_outcome_a_mark() -> None:
    assert set(data.COLOURS) == set(get_args(Level))
    assert set(display.MARKS) == {"accepted", *get_args(inspect.get_annotations(Failure, eval_str=True)["kind"])}
