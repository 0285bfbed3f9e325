"""`polyclinic site …`: its output, and its errors about wrong arguments."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from polyclinic.cli.common import out
from polyclinic.config.capability import (
    RESOURCES,
    THRESHOLDS,
    MachineProfile,
    ResourceWeights,
    capability_score,
    find_cluster,
    site_profile,
)
from polyclinic.config.recipe import Recipe
from polyclinic.core.rng import Stream
from tests import commands
from tests.small import TINY, write_recipe


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "width", 80)


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


CAPABILITY = ("site", "capability")
call, document = partial(commands.call, *CAPABILITY), partial(commands.document, *CAPABILITY)


def flat(text: str) -> str:
    """A sentence as it was before it was broken into the lines of a box."""
    return " ".join(text.replace("│", " ").split())


def test_the_card_fits_a_terminal(server: str) -> None:
    result = call("--server", server)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first_words = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert first_words == [*RESOURCES, "score", "for", "capability:"]
    assert server in flat(result.stdout)


def test_the_document_agrees_with_itself(server: str) -> None:
    answer = document("--server", server, "--weights", "0.3,0.3,0.1,0.3")
    card = MachineProfile(**{name: answer[name] for name in RESOURCES}, total_memory=answer["total_memory"])
    assert answer["weights"] == dict(zip(RESOURCES, (0.3, 0.3, 0.1, 0.3), strict=True))
    assert answer["score"] == capability_score(card, ResourceWeights(**answer["weights"]))
    assert answer["thresholds"] == THRESHOLDS
    assert answer["cluster"] == find_cluster(answer["score"], THRESHOLDS)
    assert answer["total_memory"] == psutil.virtual_memory().total
    assert list(answer["notes"]) == list(RESOURCES)
    assert answer["network"] > 0.9


def test_the_options_reach_the_figures(server: str) -> None:
    network_alone = ("--weights", "0,0,0,1")
    assert document("--server", server, *network_alone, "--max-latency", "0.000001")["score"] == 0
    assert document("--server", server, *network_alone)["score"] > 0.9
    assert document(*network_alone, "--high", "1")["cluster"] == "high"
    assert document("--server", server, *network_alone, "--high", "1")["cluster"] == "medium"


CLUSTERED: dict[str, Any] = TINY | {
    "clusters": {"strong": {"min_score": 0.9, "model": "mlp"}, "weak": {"min_score": 0, "model": "mlp"}},
    "capability": {"weights": {"cpu": 0, "memory": 0, "battery": 0, "network": 1}, "max_latency_ms": 150.0},
}


def test_a_profile_that_is_pasted_into_the_recipe_gives_the_printed_cluster(server: str, tmp_path: Path) -> None:
    """By the recipe's weights, thresholds and latency, unless an option says otherwise."""
    recipe = write_recipe(tmp_path, CLUSTERED)
    asked = ("--recipe", str(recipe), "--server", server, "--name", "St. Mary's: west")
    answer = document(*asked)
    assert answer["cluster"] == "strong"
    assert (answer["weights"], answer["thresholds"]) == (CLUSTERED["capability"]["weights"], {"strong": 0.9, "weak": 0})
    assert "150 ms counts 0" in answer["notes"]["network"]
    assert document(*asked, "--max-latency", "0.000001")["cluster"] == "weak"
    shown = yaml.safe_load(call(*asked).stdout.split("for a recipe:")[1])
    for snippet in (answer["recipe"], shown):
        cards = snippet["capability"]["profiles"]
        pasted = Recipe.from_values(CLUSTERED, {"capability.profiles": cards})
        card = site_profile(pasted.capability, "St. Mary's: west", 0, Stream(0))
        assert list(cards) == ["St. Mary's: west"]
        assert card.total_memory == psutil.virtual_memory().total
        assert find_cluster(capability_score(card, pasted.capability.weights), pasted.thresholds) == "strong"
    same = answer["recipe"]["capability"]["profiles"]["St. Mary's: west"]
    assert {name: same[name] for name in RESOURCES} == {name: answer[name] for name in RESOURCES}


def test_a_recipe_and_options_that_contradict_it_are_refused(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, CLUSTERED))
    alone = str(write_recipe(tmp_path, name="alone.yaml"))
    for arguments, words in {
        ("--recipe", recipe, "--high", "0.5"): "the recipe gives the scores of its clusters",
        ("--recipe", alone): "has no clusters",
    }.items():
        result = call(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in flat(result.stderr)
    missing = call("--recipe", "nowhere")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "there is no recipe 'nowhere'" in missing.stderr


def test_without_a_server_it_says_that_the_network_was_not_measured() -> None:
    answer = document()
    assert answer["network"] == 1
    assert "not measured" in answer["notes"]["network"]


USAGE = [
    (("--weights", "1,2"), "'1,2' is not four numbers"),
    (("--weights", "a,b,c,d"), "'a,b,c,d' is not four numbers"),
    (("--weights", ""), "'' is not four numbers"),
    (("--weights", "1,1,1,1"), "the weights add up to 4"),
    (("--weights", "1.5,-0.5,0,0"), "the weight of memory is -0.5"),
    (("--weights", "nan,0,0,1"), "the weight of cpu is nan"),
    (("--high", "0.3"), "cluster high begins at a score of 0.3 and medium, which is less capable, at 0.33"),
    (("--medium", "0.66"), "cluster high begins at a score of 0.66 and medium, which is less capable, at 0.66"),
    (("--medium", "0"), "cluster medium begins at a score of 0.0 and low"),
    (("--high", "2"), "which no site reaches"),
    (("--high", "nan"), "cluster high begins at a score of nan"),
    (("--max-latency", "0"), "max_latency_ms is 0.0"),
    (("--max-latency", "nan"), "max_latency_ms is nan"),
    (("--max-latency", "1e300"), "max_latency_ms is 1e+300"),
    (("--server", "hospital"), "'hospital' is not HOST:PORT"),
    (("--server", ":80"), "':80' is not HOST:PORT"),
    (("--server", "hospital:"), "'hospital:' is not HOST:PORT"),
    (("--server", "hospital:0"), "'hospital:0' is not HOST:PORT"),
    (("--server", "hospital:70000"), "'hospital:70000' is not HOST:PORT"),
    (("--server", "http://hospital:80"), "'http://hospital:80' is not HOST:PORT"),
    (("--server", "::1:80"), "'::1:80' is not HOST:PORT"),
    (("--server", "[::1]"), "'[::1]' is not HOST:PORT"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE)
def test_wrong_usage_gets_a_sentence_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in flat(result.stderr)
    assert arguments[0] in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_an_unreachable_server_gets_a_sentence(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as deaf:
        try:
            deaf.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {family.name}")
        port = deaf.getsockname()[1]
        result = call("--server", f"{host}:{port}" if family == socket.AF_INET else f"[{host}]:{port}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: the server {host}:{port} cannot be reached (Connection refused)")
    assert result.stderr.count("\n") == 1
