"""The page in a real browser, on a desk, a phone and paper: skipped where there is no Chromium or no driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from polyclinic.reporting.html.pdf import BROWSERS, write_pdf

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)")
SERIOUS = ("serious", "critical")
LOOKS = [("two", 1280, "light"), ("seeds", 390, "light"), ("one", 1280, "dark"), ("two", 390, "dark")]


@pytest.fixture(scope="module")
def files(pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.mark.parametrize(("name", "width", "scheme"), LOOKS)
def test_a_page_is_quiet_fits_and_can_be_used_by_everyone(
    browser: Any, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    # the page's own policy would keep axe out as well, so that is tested apart
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    view = context.new_page()
    said: list[str] = []
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    asked: list[str] = []
    view.on("request", lambda request: asked.append(request.url))
    view.goto(files[name].as_uri())
    assert asked == [files[name].as_uri()]
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    view.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    view.evaluate(axe.AXE_FILE_PATH.read_text(encoding="utf-8"))
    found = view.evaluate("axe.run().then(told => told.violations)")
    wrong = [(each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in SERIOUS]
    context.close()
    assert wrong == []
    assert said == []


def test_the_first_stop_of_the_keyboard_skips_to_the_findings(browser: Any, files: dict[str, Path]) -> None:
    view = browser.new_page()
    view.goto(files["two"].as_uri())
    view.keyboard.press("Tab")
    assert view.evaluate("document.activeElement.textContent") == "Skip to the findings"
    view.keyboard.press("Enter")
    assert view.evaluate("document.activeElement.id") == "main"
    view.close()


def test_the_policy_of_the_page_lets_no_script_run_and_nothing_be_fetched(
    browser: Any, files: dict[str, Path], tmp_path: Path
) -> None:
    harm = "<script>document.title = 'run'</script><img src='http://127.0.0.1:9/x.png' onerror='document.title = 1'>"
    page = tmp_path / "harmed.html"
    page.write_text(files["run"].read_text(encoding="utf-8").replace("</main>", f"{harm}</main>"), encoding="utf-8")
    view = browser.new_page()
    fetched: list[str] = []
    view.on("requestfinished", lambda request: fetched.append(request.url))
    view.goto(page.as_uri())
    title = view.title()
    view.close()
    assert title.endswith("polyclinic report")
    assert fetched == [page.as_uri()]


def test_on_paper_it_is_a_pdf_of_some_pages(files: dict[str, Path], tmp_path: Path) -> None:
    write_pdf(files["run"], tmp_path / "report.pdf")
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")
    assert 3 <= printed.count(b"/Type /Page\n") <= 40
    assert [path.name for path in tmp_path.iterdir()] == ["report.pdf"]
