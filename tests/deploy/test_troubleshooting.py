"""The troubleshooting tables quote messages that the program really has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyclinic

PACKAGE = Path(polyclinic.__file__).parent
TABLES = {
    PACKAGE / "deploy" / "texts" / "README-site.md": "| the sentence speaks of |",
    PACKAGE.parents[1] / "docs" / "deploy.md": "| sentence |",
}


def messages() -> str:
    """Every string of the package, with the fields of f-strings as one character each; and what start.sh says."""
    found = [(PACKAGE / "deploy" / "texts" / "start.sh").read_text(encoding="utf-8")]
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted(path: Path, head: str) -> Iterator[str]:
    """What the first column of the table quotes."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    assert any(line.startswith(head) for line in lines), head
    for line in lines:
        if not line.startswith("|"):
            return
        yield from re.findall("`([^`]+)`", line.split("|")[1])


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_quoted_messages_exist(path: Path) -> None:
    if not path.exists():
        pytest.skip("the documentation is not installed")
    source = messages()
    phrases = list(quoted(path, TABLES[path]))
    assert len(phrases) > 10
    for phrase in phrases:
        pieces = re.split(r"…|\b[A-Z]\b|\b(?:HOST|NAME)\b(?!:)|\(\)|\S+\.crt", phrase)
        for piece in filter(None, (piece.strip(" ()") for piece in pieces)):
            assert piece in source, f"{path.name} quotes {phrase!r}, which no message says"
