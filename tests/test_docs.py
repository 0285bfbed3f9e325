"""What the documentation names is there: pages, headings, commands with their options, recipes; and the site builds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from polyclinic import Recipe
from polyclinic.cli.main import app
from polyclinic.config.bundled import bundled_recipes

ROOT = Path(__file__).parents[1]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAPERS = [name for name in PAGES if name.startswith("docs/papers/")]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


UNSAID = {"polyclinic provision": "make"}
"""Commands that may be left out."""


@cache
def commands() -> Any:
    return typer.main.get_command(app)


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    return FENCED.sub("", text_of(page))


def slug(heading: str) -> str:
    """As GitHub and MkDocs name a heading."""
    plain = re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: str) -> set[str]:
    return {slug(found) for found in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


def named_commands(page: str) -> Iterator[str]:
    """Calls of `polyclinic` in shell blocks, and in the text."""
    for language, block in FENCED.findall(text_of(page)):
        if language in ("sh", "bash"):
            told = re.sub(r"(^|\s)#.*", "", block)
            yield from re.findall(r"\bpolyclinic (?:[^\n|&]|\|(?! ))+", told)
    yield from (code for code in CODE.findall(prose(page)) if code.startswith("polyclinic "))


def wrong_in(call: str) -> str:
    """What is not there of a call's commands and options; `a|b` names several."""
    command = commands()
    words, called = shlex.split(call.replace("…", ""))[1:], "polyclinic"
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        names = words.pop(0).split("|")
        if missing := [name for name in names if name not in command.commands]:
            if called not in UNSAID:
                return f"there is no {called} {missing[0]}"
            names = [UNSAID[called]]
        command, called = command.commands[names[0]], f"{called} {names[0]}"
    known = {"--help", *(flag for option in command.params for flag in option.opts + option.secondary_opts)}
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    return ", ".join(f"{called} has no {flag}" for flag in given if flag not in known)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_their_anchors_resolve(page: str) -> None:
    here, broken = (ROOT / page).parent, []
    for link in LINK.findall(prose(page)):
        if re.match(r"(https?|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (here / path).resolve() if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.relative_to(ROOT).as_posix())):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    assert {call: wrong for call in named_commands(page) if (wrong := wrong_in(call))} == {}


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("polyclinic run my.yaml --seed 1 --set a=b", ""),
        ("polyclinic data check|fetch x", ""),
        ("polyclinic ran my.yaml", "there is no polyclinic ran"),
        ("polyclinic data chek", "there is no polyclinic data chek"),
        ("polyclinic run my.yaml --sede 1", "polyclinic run has no --sede"),
        ("polyclinic provision federation.yaml --out kits/", ""),
        ("polyclinic provision rotate kits/ --all", ""),
        ("polyclinic provision rotate kits/ --al", "polyclinic provision rotate has no --al"),
    ],
)
def test_the_check_of_commands_sees_what_is_wrong(call: str, wrong: str) -> None:
    assert wrong_in(call) == wrong


@pytest.mark.parametrize("page", PAGES)
def test_recipes_that_are_named_exist(page: str) -> None:
    named = set(re.findall(r"\brecipes/[\w/-]+\.yaml", text_of(page)))
    assert [name for name in named if not (ROOT / name).is_file()] == []
    papers = {name.split("/")[0] for name in bundled_recipes() if "/" in name}
    called = [word for call in named_commands(page) for word in call.split() if word.split("/")[0] in papers]
    assert [word for word in called if "/" in word and word not in bundled_recipes()] == []


@pytest.mark.parametrize("page", PAPERS)
def test_a_papers_page_names_its_recipes_and_no_others(page: str) -> None:
    folder = ROOT / "recipes" / Path(page).stem
    named = set(re.findall(r"`(?:[\w/-]*/)?([\w-]+\.yaml)`", text_of(page)))
    assert named <= {path.name for path in folder.glob("*.yaml")}


def test_recipes_to_copy_can_be_run_and_other_yaml_can_be_read() -> None:
    whole = []
    for page in PAGES:
        for language, block in FENCED.findall(text_of(page)):
            values = yaml.safe_load(block) if language == "yaml" else None
            if isinstance(values, dict) and {"name", "rounds", "data", "model", "algorithm"} <= values.keys():
                whole.append(Recipe.from_values(values, source=page).name)
    assert len(whole) >= 7  # the README's, the quickstart's, one of every tutorial


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning_and_asks_nobody_else_for_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path / "site"): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(PAGES)
    assert {page: found for page, text in pages.items() if (found := ELSEWHERE.findall(text))} == {}
    assert "quantise" in (tmp_path / "site" / "search" / "search_index.js").read_text(encoding="utf-8")


def test_every_module_that_the_map_names_exists() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+\.py)`", text))
    assert len(named) > 20
    assert (
        sorted(name for name in named if not any((top / name).exists() for top in (ROOT / "src/polyclinic", ROOT)))
        == []
    )
