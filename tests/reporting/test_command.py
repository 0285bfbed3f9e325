"""The command: what it writes, and the one sentence a mistake gets."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from polyclinic.reporting.html import pdf
from tests import commands

call, refused = partial(commands.call, "report"), partial(commands.refused, "report")


@pytest.fixture
def folder(compared: Path, tmp_path: Path) -> Path:
    shutil.copytree(compared / "together", tmp_path / "run")
    return tmp_path / "run"


def test_a_report_lies_in_the_folder_or_where_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    result = call(folder)
    assert result.exit_code == 0, result.output
    assert "report.html" in result.stdout
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert call(folder, "--out", tmp_path / "new" / "page.html", "--md").exit_code == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"page.html", "page.md", "page-figures"}
    assert (tmp_path / "new" / "page.md").read_text(encoding="utf-8").startswith("# Together\n")


def test_a_report_with_patients_is_for_its_owner_alone(folder: Path) -> None:
    result = call(folder, "--with-images")
    assert "it shows patients' images; do not share it" in result.stdout
    assert (folder / "report.html").stat().st_mode & 0o777 == 0o600


def test_mistakes_get_one_sentence(folder: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "absent")
    assert "name an HTML file" in refused(folder, "--out", tmp_path / "x.pdf")
    (folder / "seed-0" / "metrics.jsonl").unlink()
    (folder / "seed-0" / "result.json").write_text("{")
    assert "is damaged" in refused(folder)


def test_without_chromium_a_pdf_is_refused_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf, "BROWSERS", ("no-such-browser",))
    assert "install it (Debian: apt-get install chromium)" in refused(folder, "--pdf")
    assert not (folder / "report.html").exists()
