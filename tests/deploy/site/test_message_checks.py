"""Whatever a server sends, a desk answers: with what was agreed, or with one sentence; and it writes down what left."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from polyclinic.core import PROTOCOL, __version__
from polyclinic.deploy.cohort import FIELDS as SIGNATURES
from polyclinic.deploy.site.message_handler import MOST_RUNS, SiteMessageHandler
from polyclinic.federation.secure_aggregation.cohort import MASKS
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.runs.experiment import Experiment
from polyclinic.storage import messages
from tests.deploy.example_sites import (
    CLUSTERS,
    ApprovingHandler,
    Crossing,
    answers_of,
    asked,
    beginning,
    config,
    deployed,
    desks,
    loop,
    recipe,
    refusal,
    said,
    simulation,
)


@pytest.fixture(scope="module")
def begun(home: Path) -> tuple[SiteMessageHandler, bytes, Experiment]:
    """A desk in the middle of a run, and an order that it would obey."""
    made = simulation(recipe(algorithm="scaffold"), home)
    desk = ApprovingHandler(config(home, "hill", "begun"))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    outbox = loop(made, Crossing({})).prepare_outbox(
        "train", 1, made.setup.algorithm.init(made.setup.federation), ["hill"], ["validation"]
    )
    return desk, outbox["hill"], made


FIELDS: dict[str, list[Any]] = {
    "purpose": ["", "explode", None, 5, ["train"], "end "],
    "site": ["lake", "", None, 5, {"a": 1}],
    "run": ["", "other", "../../hill", "/etc", None, 7, "x" * 5000, "a\x00b"],
    "round": [0, -1, 6, "1", 1.0, None, True, 10**30, [1]],
    "rounds": [1, 6, "5", None, 10**12],
    "seed": [1, "0", None, -1, [], True],
    "lr": ["0.1", None, -1.0, 1e300, [], True],
    "parts": ["validation", None, ["train"], ["validation", "validation"], [["a"]], ["nothing"], [1], {"a": 1}],
    "oldest_snapshot": [-1, "x", None, 1.5],
    "memory_round": [-1, "x", None, 1.5, True, 1, 6],
}


@pytest.mark.parametrize("name", FIELDS)
def test_orders_with_wrong_values_are_refused(name: str, begun: tuple[SiteMessageHandler, bytes, Experiment]) -> None:
    desk, order, _ = begun
    message = messages.decode(order)
    before = len(desk.releases.read_entries())
    fields = dict(message.fields)
    for value in FIELDS[name]:
        reply = said(desk.answer_message(messages.encode({**fields, name: value}, message.tensors)))
        assert reply["failure"] == "refused", (name, value, reply)
    without = {key: value for key, value in fields.items() if key != name}
    assert said(desk.answer_message(messages.encode(without, message.tensors)))["failure"] == "refused"
    assert len(desk.releases.read_entries()) == before


BEGINNINGS: dict[str, list[Any]] = {
    "version": [None, 1],
    "protocol": [PROTOCOL + 1, f"{PROTOCOL}", None],
    "recipe": [
        "",
        "a: [",
        "5",
        "- a",
        "name: x",
        None,
        {"a": 1},
        "x" * (1 << 19),
        "a: &a [1]\nb: *a\n",
        "a: " + "[" * 9999,
    ],
    "seed": [3, "0", None],
    "classes": [None, "benign", [1, 2], [], ["x" * 999]],
    "channels": [3, 0, "1", None],
    "size": [16, -8, None, 1 << 40],
    "sites": [None, "hill", [], [1, 2], [""], ["harbour", "lake"], ["hill", "hill"]],
    "plan": [5, {}, {"noise": 1.0, "metrics_noise": None, "holders": 1}],
    "run": ["", "..", "a/b", None],
    "site": ["lake", None],
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_beginnings_with_wrong_values_are_refused(
    name: str, home: Path, begun: tuple[SiteMessageHandler, bytes, Experiment]
) -> None:
    made = begun[2]
    desk = ApprovingHandler(config(home, "hill", "beginnings"))
    for value in BEGINNINGS[name]:
        reply = said(desk.answer_message(beginning(made, "hill", {"run": "fresh", name: value})))
        assert reply["failure"] in ("refused", "error"), (name, value, reply)
        assert str(home) not in reply["why"]
    assert not list((home / "hill" / "beginnings" / "runs").glob("*"))
    assert not any("Traceback" in line for line in desk.site_log.read_lines())


def test_the_page_says_of_every_field_of_a_message_what_bounds_it(
    begun: tuple[SiteMessageHandler, bytes, Experiment],
) -> None:
    """So that none is added without a thought about what a server could choose by it."""
    page = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text(encoding="utf-8")
    table = page.partition("**Fields.**")[2].partition("\n\n")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall("`([a-z_.]+)`", row.split("|")[1])}
    plan = {"noise", "site_noise", "metrics_noise", "holders"}
    sent = {*messages.decode(beginning(begun[2], "hill")).fields, *messages.decode(begun[1]).fields} - {
        "schema",
        "body",
    }
    assert named == {*sent, *(f"plan.{key}" for key in plan), MASKS, SIGNATURES, "peers"} - {"plan"}


def test_the_protocol_decides_and_another_version_alone_does_not(home: Path) -> None:
    desk = ApprovingHandler(config(home, "hill", "version"))
    assert "card" in said(desk.answer_message(asked("enrol", "hill", recipe(), {"version": "0.0.9"})))
    why = refusal(said(desk.answer_message(asked("enrol", "hill", recipe(), {"version": "9.9", "protocol": 77}))))
    assert all(word in why for word in ("9.9", "77", __version__, "install the same on both"))


def test_a_recipe_of_another_version_is_read_as_written_or_refused(home: Path) -> None:
    """A key that this version does not know is refused; one that the server did not know has its default."""
    desk = ApprovingHandler(config(home, "hill", "other recipes"))
    whole = yaml.safe_load(recipe().to_yaml())
    for name, changed, taken in (
        ("an older server", {key: value for key, value in whole.items() if key != "max_norm"}, True),
        ("a newer server", whole | {"novelty": 1}, False),
        ("other words", whole | {"rounds": "5"}, False),
    ):
        reply = said(desk.answer_message(asked("enrol", "hill", recipe(), {"recipe": yaml.safe_dump(changed)})))
        assert ("card" in reply) == taken, (name, reply)


@pytest.mark.parametrize("data", [b"", b"PCL1", pickle.dumps({"a": 1}), b"\x93NUMPY", b"\0" * 400, b"{}"])
def test_bytes_that_are_no_message_get_a_failure(
    data: bytes, begun: tuple[SiteMessageHandler, bytes, Experiment]
) -> None:
    assert said(begun[0].answer_message(data))["failure"] == "refused"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_bytes_never_raise(
    place: float, byte: int, cut: bool, begun: tuple[SiteMessageHandler, bytes, Experiment]
) -> None:
    desk, order, _ = begun
    at = int(place * (len(order) - 1))
    data = order[:at] if cut else order[:at] + bytes([byte]) + order[at + 1 :]
    if data != order:
        assert said(desk.answer_message(data))["failure"] == "refused"


def test_tensors_that_fit_nothing_are_refused(begun: tuple[SiteMessageHandler, bytes, Experiment]) -> None:
    """Nothing is trained from what happens to lie in the network, and nothing is broadcast to fit."""
    desk, order, _ = begun
    message = messages.decode(order)
    model = message.tensors["model"]
    first = next(iter(model))
    for wrong in (
        {},
        {name: tensor[:1] for name, tensor in model.items()},
        {name: tensor.double() for name, tensor in model.items()},
        {name: tensor for name, tensor in model.items() if name != first},
        {**model, "extra": torch.zeros(1)},
    ):
        reply = said(desk.answer_message(messages.encode(message.fields, {**message.tensors, "model": wrong})))
        assert reply["failure"] == "refused"
        assert reply["why"].startswith("shape: the model sent to hill")


def test_kinds_that_lack_or_come_unasked_are_refused(begun: tuple[SiteMessageHandler, bytes, Experiment]) -> None:
    desk, order, _ = begun
    message = messages.decode(order)
    without = {kind: group for kind, group in message.tensors.items() if kind != "control"}
    assert "the control sent to hill" in refusal(said(desk.answer_message(messages.encode(message.fields, without))))
    more = {**message.tensors, "bank": {"a": torch.zeros(1)}}
    assert "was sent 'bank'" in refusal(said(desk.answer_message(messages.encode(message.fields, more))))


def test_a_programming_error_is_reported_in_general_and_logged_in_full(
    begun: tuple[SiteMessageHandler, bytes, Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, order, _ = begun
    message = messages.decode(order)
    monkeypatch.setattr(SiteRunner, "start_local", lambda *_: 1 / 0)
    reply = said(desk.answer_message(order))
    assert (reply["failure"], reply["run"]) == ("error", message.fields["run"])
    assert reply["why"] == "hill met a mistake in its own program; its log has the details"
    assert any("Traceback" in line for line in desk.site_log.read_lines())


def test_a_run_that_was_never_begun_is_refused_and_one_that_ended_is_forgotten(home: Path) -> None:
    found = recipe(algorithm="scaffold", training__curriculum__by="forgotten", rounds=2)
    crossing = Crossing(desks(home, "forgotten"))
    rounds, _ = deployed(found, home, crossing)
    site, order = crossing.sent[-1]
    desk, folder = crossing.desks[site], home / site / "forgotten" / "runs" / rounds.rules.run
    assert list(folder.rglob("*.pcl"))
    ended = said(desk.answer_message(messages.encode({"purpose": "end", "run": rounds.rules.run, "site": site}, {})))
    assert ended["ended"] is True
    assert list(folder.rglob("*.pcl")) == []
    assert list(folder.rglob("*.safetensors")), "what was filed for the site's own people stays"
    assert "knows of no run" in refusal(said(desk.answer_message(order)))
    assert len(desk.releases.read_entries()) == 2


def test_a_run_keeps_its_terms_and_old_runs_make_room(home: Path) -> None:
    made = simulation(recipe(rounds=1), home)
    other = simulation(recipe(rounds=2), home)
    desk = ApprovingHandler(config(home, "hill", "many"))
    assert said(desk.answer_message(beginning(made, "hill", {"run": "a"})))["ready"]
    assert said(desk.answer_message(beginning(made, "hill", {"run": "a"})))["ready"]
    assert "other terms" in refusal(said(desk.answer_message(beginning(other, "hill", {"run": "a"}))))
    for number in range(MOST_RUNS + 3):
        assert said(desk.answer_message(beginning(made, "hill", {"run": f"run-{number}"})))["ready"]
    assert len(list((home / "hill" / "many" / "runs").iterdir())) == MOST_RUNS


def test_the_log_of_releases_tells_every_byte_that_left(home: Path) -> None:
    crossing = Crossing(desks(home, "log"))
    found = recipe(algorithm="scaffold", rounds=2)
    rounds, outcome = deployed(found, home, crossing)
    answers_of(found, home, rounds, outcome)
    left = [reply for (site, _), reply in zip(crossing.sent, crossing.replies, strict=True) if site == "lake"]
    rows = crossing.desks["lake"].releases.read_entries()
    assert [row["sha256"] for row in rows] == [hashlib.sha256(reply).hexdigest() for reply in left]
    assert [row["bytes"] for row in rows] == [len(reply) for reply in left]
    assert [(row["round"], row["purpose"]) for row in rows] == [(1, "train"), (2, "train"), (3, "evaluate")]
    assert {row["epsilon"] for row in rows} == {"unprotected"}
    for row, reply in zip(rows, left, strict=True):
        sent = messages.decode(reply)
        sizes = {kind: sum(t.nbytes for t in group.values()) for kind, group in sent.tensors.items()}
        assert {kind: size for kind, size in row["kinds"].items() if kind in sizes} == sizes
        assert ("metrics" in row["kinds"]) == bool(sent.fields.get("report") or sent.fields.get("scores"))
    assert json.loads((home / "lake" / "log" / "releases.jsonl").read_text().splitlines()[0]) == rows[0]


@pytest.mark.parametrize(
    "settings", [{"algorithm": "scaffold"}, {"algorithm": "fedmp"}, {"stages": [{"name": "quantise"}]}, CLUSTERS]
)
def test_a_preview_is_what_then_leaves(settings: dict[str, Any], home: Path) -> None:
    found, state = recipe(**settings, rounds=1), f"preview {len(str(settings))}"
    desk = ApprovingHandler(config(home, "hill", f"{state} alone"))
    rows = desk.preview_releases(found)
    assert desk.releases.read_entries() == []
    crossing = Crossing(desks(home, state))
    deployed(found, home, crossing)
    reply = messages.decode(
        next(r for (site, _), r in zip(crossing.sent, crossing.replies, strict=True) if site == "hill")
    )
    cluster = "medium" if "clusters" in settings else ""
    sent = {
        kind: ({name: tuple(t.shape) for name, t in group.items()}, sum(t.nbytes for t in group.values()))
        for kind, group in reply.tensors.items()
    }
    said = {row.kind: (dict(row.shapes), row.bytes) for row in rows if row.cluster == cluster and row.shapes}
    assert said == {kind: found for kind, found in sent.items() if found[0]}
    assert {"metrics", "predictions"} <= {row.kind for row in rows}
    assert all(row.protection for row in rows)
