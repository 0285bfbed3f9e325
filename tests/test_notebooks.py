"""The notebooks run from top to bottom, are kept without outputs, and can be found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IN_A_KERNEL = ("a-new-method",)
"""It leaves an algorithm behind."""
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@by_name
def test_it_is_kept_without_what_it_printed(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert [cell["source"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []


@by_name
def test_it_is_linked(path: Path) -> None:
    assert f"(../notebooks/{path.name})" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem not in IN_A_KERNEL], ids=lambda path: path.stem
)
def test_its_code_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: a kernel takes longer to start than these to run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr("tempfile.tempdir", None)  # it is asked for anew
    names: dict[str, Any] = {}
    printed = 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
            told = capsys.readouterr()
            assert told.err == ""
            printed += bool(told.out)
    assert printed >= 3


@pytest.mark.parametrize(
    "path",
    [path if path.stem in IN_A_KERNEL else pytest.param(path, marks=pytest.mark.heavy) for path in NOTEBOOKS],
    ids=[path.stem for path in NOTEBOOKS],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of jupyter_client and pyzmq
def test_it_runs_in_a_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient (pip install nbclient ipykernel)")
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient (pip install nbclient ipykernel)")
    pytest.importorskip("ipykernel", reason="needs ipykernel (pip install nbclient ipykernel)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook: Any = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    assert len(printed) >= 3
    warned = [out.text for cell in printed for out in cell.outputs if out.get("name") == "stderr"]
    assert warned == []
