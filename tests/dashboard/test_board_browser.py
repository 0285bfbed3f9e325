"""The board in a real browser, on a desk and a phone: skipped where there is no Chromium or no driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from polyclinic.runs.experiment import run
from tests.dashboard.test_board import TOKEN, held, served
from tests.reporting.test_browser import CHROMIUM, SERIOUS, axe
from tests.small import tiny

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)")
FIGURES = "The figures of this picture"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(tiny(rounds=4), folder)
    return folder


@pytest.fixture
def begun(whole: Path, tmp_path: Path) -> Path:
    """The same run as it was after three rounds."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    for name, mark in (("ledger.jsonl", '"event": "charge", "round": 4'), ("metrics.jsonl", '"round": 4')):
        lines = (whole / name).read_text().splitlines(keepends=True)
        cut = next(number for number, line in enumerate(lines) if mark in line)
        (folder / name).write_text("".join(lines[:cut]))
    return folder


@pytest.mark.parametrize(
    ("which", "width", "scheme"), [("compared", 1280, "light"), ("begun", 390, "dark"), ("seeds", 390, "light")]
)
def test_a_board_is_quiet_fits_and_can_be_used_by_everyone(
    browser: Any, request: pytest.FixtureRequest, which: str, width: int, scheme: str
) -> None:
    said: list[str] = []
    asked: list[str] = []
    # the page's own policy would keep axe out as well; that it lets the page work is tested below
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    view = context.new_page()
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    with served(request.getfixturevalue(which)) as server:
        view.goto(server.board_url)
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
        view.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        view.evaluate(axe.AXE_FILE_PATH.read_text(encoding="utf-8"))
        found = view.evaluate("axe.run().then(told => told.violations)")
        wrong = [(each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in SERIOUS]
        assert wrong == []
        assert {url.partition("?")[0] for url in asked} <= {server.board_url, f"{server.board_url}state.json"}
        context.close()
    assert said == []


def test_a_page_follows_without_a_reload_and_leaves_readers_where_they_are(
    browser: Any, begun: Path, whole: Path
) -> None:
    said: list[str] = []
    context = browser.new_context(viewport={"width": 700, "height": 900})
    view = context.new_page()
    view.on("console", lambda message: said.append(message.text))
    with held(begun), served(begun, token=TOKEN) as server:
        view.goto(server.board_url)
        assert TOKEN not in view.url
        assert view.text_content("[aria-live=polite]") == "Running: round 3 of 4."
        assert view.title().startswith("3/4 running")
        view.evaluate("window.before = true")
        view.locator("#learning summary").first.click()
        for name in ("ledger.jsonl", "metrics.jsonl", "result.json"):
            shutil.copy(whole / name, begun / name)
        view.locator("#state", has_text="Finished: 4 of 4").wait_for()
        assert view.evaluate("window.before")
        assert view.evaluate("document.querySelector('#learning details').open")
        assert view.evaluate("document.activeElement.textContent") == FIGURES
        assert view.evaluate("document.activeElement.closest('#learning') !== null")
        assert view.title().startswith("finished")
        assert view.locator("#sites tbody tr").first.locator("td").first.text_content() == "4"
    assert said == [], "its own policy must let the page work"
    view.locator("#link", has_text="not up to date").wait_for()
    context.close()


def test_without_scripts_it_is_a_snapshot(browser: Any, begun: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    view = context.new_page()
    with served(begun) as server:
        view.goto(server.board_url)
        assert view.text_content("#state") == "Stopped after 3 of 4 rounds: no process is at work."
        assert "does not update" in view.text_content("footer")
        assert view.locator("svg[role=img]").count() >= 3
        assert view.locator("#sites tbody tr").count() == 3
        labels = [each.get_attribute("aria-label") for each in view.locator("svg[role=img]").all()]
        assert all(labels)
        assert any("cross-entropy (nats)" in label for label in labels)
    context.close()
