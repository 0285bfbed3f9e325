"""Every named set's folder has the same files, and its README the same headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polyclinic.data.datasets as sets
from polyclinic.core.errors import DataError
from polyclinic.data import DATASETS, NAMED_DATASETS

HOME = Path(str(sets.__file__)).parent
HEADINGS = ["What it is", "Licence and terms", "How to get it", "Layout", "Split", "Heterogeneity"]
NEEDED = """mnist cbis_ddsm mias inbreast busi covid_qu_ex neojaundice aptos2019 retino idrid tb_montgomery tb_shenzhen
tb_india office_caltech10 breakhis rsna_mammography roboflow_breast breast_ct ddsm_views deepdrid covid_cxr medmnist"""


def test_every_set_of_the_papers_is_there() -> None:
    assert set(NEEDED.split()) == set(NAMED_DATASETS)
    assert set(NAMED_DATASETS) <= set(DATASETS)


@pytest.mark.parametrize("name", NAMED_DATASETS)
def test_every_folder_has_the_same_files(name: str) -> None:
    files = {path.name for path in (HOME / name).iterdir() if path.name != "__pycache__"}
    assert files == {"__init__.py", "dataset.py", "README.md"}
    assert NAMED_DATASETS[name].name == name


@pytest.mark.parametrize("name", NAMED_DATASETS)
def test_every_readme_has_the_same_headings_and_a_table(name: str) -> None:
    text = (HOME / name / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    assert "|---|" in text.split("## Heterogeneity")[1]


@pytest.mark.parametrize("name", NAMED_DATASETS)
def test_what_is_fetched_comes_by_https_or_is_checked_or_told(name: str) -> None:
    for download in NAMED_DATASETS[name].downloads:
        assert download.url.startswith(("https://", "http://"))
        assert re.fullmatch(r"|[0-9a-f]{64}", download.sha256)
        assert "/" not in download.name
    assert NAMED_DATASETS[name].downloads or "fetch" not in NAMED_DATASETS[name].obtain


@pytest.mark.parametrize("name", NAMED_DATASETS)
def test_a_set_that_is_not_there_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    spec = DATASETS[name]
    assert spec.read is not None
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        spec.read(spec.options(), tmp_path)
