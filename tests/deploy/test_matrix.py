"""L4 in full: every algorithm between real processes, with TLS and keys, ends in the bits of the local engine.

One command: `./scripts/test --heavy tests/deploy/test_matrix.py`. Its table goes, as JSON, into the file that the
environment variable POLYCLINIC_MATRIX names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.algorithms import ALGORITHMS
from tests.deploy.example_sites import CLUSTERS, SITES, recipe
from tests.deploy.real_processes import Ward, furnish
from tests.driving import Ask
from tests.small import NEEDED

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(os.name != "posix", reason="forks processes")]
SEEDED = {"delta": 1e-3, "randomness": "seed"}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, **NEEDED.get(name, {})} for name, kind in ALGORITHMS.items() if not kind.pooled},
    "pfedcdp in three clusters": {**NEEDED["pfedcdp"], **CLUSTERS},
    "fed-align after its warm-up": {"algorithm": {"name": "fed-align", "warmup": 1}},
    "ensemble": {"ensemble": True},
    "a privacy plan for images": {"privacy": {**SEEDED, "epsilon": 8, "metrics": "count"}},
    "a privacy plan for sites": {"privacy": {**SEEDED, "noise": 1.0, "unit": "site"}},
}


class Table:
    """What became of each case, written down as it is known, so that a run that was stopped has one too."""

    def __init__(self, path: str | None) -> None:
        self.path, self.rows = path and Path(path), list[dict[str, Any]]()

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print(row)
        if self.path:
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")


@pytest.fixture(scope="module")
def table() -> Table:
    return Table(os.environ.get("POLYCLINIC_MATRIX"))


@pytest.fixture(scope="module")
def ward(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    """Three sites, each of which stays up from the first recipe to the last."""
    folder = tmp_path_factory.mktemp("matrix")
    with Ward(folder, ask) as found:
        furnish(folder, least_sites=3)
        for site in SITES:
            found.join(site)
        first = found.pids()
        yield found
        assert found.pids() == first, found.said()


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_between_real_processes(case: str, ward: Ward, table: Table) -> None:
    begun, equal, sha = time.monotonic(), False, ""
    try:
        result, simulated = ward.play(recipe(**CASES[case]), case)
        sha, equal = result.sha256, result.sha256 == simulated.sha256
    finally:
        table.add(algorithm=case, seconds=round(time.monotonic() - begun, 1), sha_equal=equal, sha256=sha)
    assert equal, ward.said()
    assert (result.rounds, len(result.sites)) == (5, 3)
