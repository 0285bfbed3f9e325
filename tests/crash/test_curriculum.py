"""A curriculum depends on what sites remember: killed and resumed, it orders cases as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.runs import KILLED, RECIPES, Driver, assert_same_end, measured


def filed(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("sites/*/scores/*")}


@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("site-trained", 7),
        ("memory-half-written", 8),
        ("memory-saved", 7),
        ("reply-accepted", 6),
        ("snapshot-written", 2),
    ],
)
def test_killed_with_a_curriculum(
    driver: Driver, whole: Callable[[str], Path], place: Path, point: str, times: int
) -> None:
    wanted, folder = whole("curriculum"), place / "run"
    assert driver.run(RECIPES["curriculum"], folder, fault=(point, times)).code == KILLED
    assert driver.run(RECIPES["curriculum"], folder).code == 0
    assert_same_end(folder, wanted)
    assert len(filed(wanted)) > 6
    assert filed(folder) == filed(wanted)
    assert any(row.get("scalars", {}).get("forgotten") for row in measured(wanted))
