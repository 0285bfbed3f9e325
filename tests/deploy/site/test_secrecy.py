"""S4 at a real site: a patient's name, planted wherever one may stand, is in no reply, no failure, no file of ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyclinic.core import Part
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.runs.experiment import Experiment
from polyclinic.runs.final_evaluation import expected_sites, read_answer
from tests.data.test_secrecy import FAILURES, NAME, SITES, Rows, hits, recipe, rows as rows, told_in, write_table
from tests.deploy.example_sites import EVERYTHING, ApprovingHandler, Crossing, asked, beginning, loop, said

TABLE = "hospital/labels.csv"
COUNTED = re.compile(r"\d+ (listed )?files? ")
"""Of all sites' files each desk counts its own."""


def desk_of(site: str, home: Path) -> SiteMessageHandler:
    values = {"federation": "north-sea", "site": site, "allow": EVERYTHING, "folder": home / "state" / site}
    return ApprovingHandler(SiteConfig.model_validate({**values, "data": {TABLE: home / TABLE}}))


@pytest.mark.parametrize("settings", [{}, {"algorithm": "fedmp", "training__curriculum__by": "forgotten"}])
def test_a_run_between_sites_tells_nobody(
    settings: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    request.getfixturevalue("rows")
    found = recipe(**settings)
    made, crossing = Experiment(found), Crossing({site: desk_of(site, tmp_path) for site in SITES})
    for site in SITES:
        for order in (asked("enrol", site, found), beginning(made, site)):
            assert isinstance(crossing.answer(site, order), bytes)
    rounds = loop(made, crossing)
    parts: list[Part] = ["train", "validation", "test"]
    expected = expected_sites(made.setup.sites, parts, len(made.setup.dataset.classes))
    told = rounds.evaluate_sites(rounds.play_all(), parts, lambda site, reply: read_answer(reply, expected[site]))
    assert all(answer.scores and answer.predictions for answer in told.values())
    assert len(crossing.replies) == 3 * (2 + 2 + 1)
    assert all(site.encode() in reply for (site, _), reply in zip(crossing.sent, crossing.replies, strict=True))
    assert hits(b"".join(crossing.replies)) == 0
    assert told_in(tmp_path / "state") == 0
    said = capfd.readouterr()
    assert hits((said.out + said.err).encode()) == 0
    assert not any(b"hospital/" in reply or str(tmp_path).encode() in reply for reply in crossing.replies)


@pytest.mark.parametrize(("spoil", "words"), FAILURES)
def test_no_failure_tells_the_name(
    spoil: Callable[[Rows], None], words: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rows: Rows = request.getfixturevalue("rows")
    spoil(rows)
    write_table(rows)
    desk = desk_of("north", tmp_path)
    reply = desk.answer_message(asked("enrol", "north", recipe()))
    if words.startswith(("1 patients have", "Site 1 of 4")):
        assert "card" in said(reply), "what is said of other sites' images is not this site's to judge"
    else:
        assert said(reply)["why"] == "north's images cannot be used for this recipe as they are; its own log says why"
        assert COUNTED.sub("", words) in COUNTED.sub("", desk.site_log.read_lines()[-1])
    others = [desk_of(site, tmp_path).answer_message(asked("enrol", site, recipe())) for site in ("south",)]
    assert hits(b"".join([reply, *others])) == 0
    assert told_in(tmp_path / "state") == 0


def test_a_label_that_may_be_a_name_is_on_no_card(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    rows: Rows = request.getfixturevalue("rows")
    rows[5]["label"] = NAME
    write_table(rows)
    desk = desk_of("north", tmp_path)
    assert said(desk.answer_message(asked("enrol", "north", recipe())))["failure"] == "error"
    declared = recipe(data__task={"a": ["benign"], "b": ["malignant"]})
    reply = desk.answer_message(asked("enrol", "north", declared))
    assert said(reply)["card"]["classes"] == ["a", "b"]
    assert hits(reply) == 0
