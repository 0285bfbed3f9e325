"""What kits install: a wheel that is the code that runs here, and packages of which every hash is known."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polyclinic.core import __version__
from polyclinic.core.errors import EngineError, RecipeError
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.deploy.provisioning.software import (
    Software,
    Wheel,
    _locked_lines,
    build_wheel,
    list_wheel_hashes,
    lock_requirements,
    read_requirements,
)
from tests.deploy.kits import NORTH, site_of

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--quiet"]


def offline(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, **settings}


def test_the_record_of_the_wheel_is_true() -> None:
    with zipfile.ZipFile(io.BytesIO(build_wheel().data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = f"polyclinic-{__version__}.dist-info/RECORD"
    rows = {row[0]: row[1:] for row in csv.reader(files[record].decode().splitlines())}
    assert rows.keys() == files.keys()
    for name, (digest, size) in rows.items():
        if name != record:
            found = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(files[name])), name


def test_what_the_wheel_installs_is_this_code_and_makes_the_same_wheel(tmp_path: Path) -> None:
    """A coordinator who has installed a kit's wheel makes kits with the same wheel."""
    wheel = tmp_path / build_wheel().name
    wheel.write_bytes(build_wheel().data)
    there = tmp_path / "there"
    subprocess.run([*PIP, "--no-deps", "--target", str(there), str(wheel)], check=True, env=offline())
    script = (
        "import polyclinic; from polyclinic.config.bundled import bundled_recipes; "
        "from polyclinic.deploy.provisioning.software import build_wheel; "
        "print(polyclinic.__file__, 'demo' in bundled_recipes(), build_wheel().sha256)"
    )
    environment = {**os.environ, "PYTHONPATH": str(there), "PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [str(there / "polyclinic" / "__init__.py"), "True", build_wheel().sha256]


def test_a_requirements_file_without_a_hash_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    good = f"numpy==2.0.0 --hash=sha256:{'a' * 64}\n"
    path.write_text(f"# made elsewhere\n{good}torch==2.6.0 \\\n    --hash=sha256:{'b' * 64}\n")
    assert read_requirements(path) == f"{good}torch==2.6.0 --hash=sha256:{'b' * 64}\n"
    for bad in ("numpy==2.0.0\n", f"numpy --hash=sha256:{'a' * 64}\n", ""):
        path.write_text(bad)
        with pytest.raises(RecipeError, match="provision lock"):
            read_requirements(path)


def test_a_package_without_a_hash_is_not_locked() -> None:
    package = {"metadata": {"name": "numpy", "version": "2"}, "download_info": {"url": "file:///n.whl", "dir_info": {}}}
    with pytest.raises(EngineError, match="no SHA-256 for numpy 2"):
        list(_locked_lines({"install": [package]}))


def test_hashes_of_wheels_for_other_machines_are_those_that_the_index_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, of the same version, and of wheels only."""
    page = tmp_path / "simple" / "some-name" / "index.html"
    page.parent.mkdir(parents=True)
    files = [
        "some_name-1.0-cp311-a.whl",
        "Some.Name-1.0-cp312-b.whl",
        "some_name-1.0.1-cp312-c.whl",
        "some_name-1.0.tar.gz",
    ]
    hashes = [hashlib.sha256(file.encode()).hexdigest() for file in files]
    rows = (f'<a href="../{f}#sha256={h}" data-x="y">{f}</a>' for f, h in zip(files, hashes, strict=True))
    page.write_text("<br/>\n".join(rows))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
        assert list_wheel_hashes("some-name", "1.0") == set(hashes[:2])
        assert list_wheel_hashes("other", "1.0") == set()
        server.shutdown()
        thread.join()


def test_without_an_index_there_are_no_hashes_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EngineError, match=r"no hashes .*--without-hashes"):
        lock_requirements(build_wheel())


def a_wheel(name: str, version: str, content: str, requires: str = "") -> bytes:
    """A wheel with one module and at most one requirement."""
    info = f"{name}-{version}.dist-info"
    extra = f"Provides-Extra: flower\nRequires-Dist: {requires}\n" if requires else ""
    script = "[console_scripts]\npolyclinic = polyclinic:main\n" if name == "polyclinic" else ""
    files = {
        f"{name}.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extra}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": script,
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return held.getvalue()


@pytest.mark.heavy
def test_start_installs_what_the_kit_names_and_nothing_else(tmp_path: Path) -> None:
    """The hashes are pip's, the index a folder; whoever controls the index changes a package, or offers another
    polyclinic, and it is not installed. `./scripts/test --heavy tests/deploy/provisioning/test_software.py`"""
    index = tmp_path / "index"
    index.mkdir()
    helper = index / "helper-1.0-py3-none-any.whl"
    helper.write_bytes(a_wheel("helper", "1.0", "word = 'honest'\n"))
    honest = helper.read_bytes()
    (index / f"polyclinic-{__version__}-py3-none-any.whl").write_bytes(a_wheel("polyclinic", __version__, "1/0\n"))
    (index / "polyclinic-9.9-py3-none-any.whl").write_bytes(a_wheel("polyclinic", "9.9", "1/0\n"))
    ours = Wheel(
        f"polyclinic-{__version__}-py3-none-any.whl",
        a_wheel(
            "polyclinic",
            __version__,
            "import helper\ndef main(): print(helper.word)\nif __name__ == '__main__': main()\n",
            "helper",
        ),
    )
    digest = hashlib.sha256(honest).hexdigest()
    provision_federation(NORTH, tmp_path / "kits", Software(ours, f"helper==1.0 --hash=sha256:{digest}\n"))
    folder = site_of(tmp_path / "kits", "hill")
    environment = offline(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index), PYTHON=sys.executable)

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "start.sh", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    helper.write_bytes(a_wheel("helper", "1.0", "word = 'hostile'\n"))
    refused = start("--install", "--keep")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not list(folder.glob(".venv/lib/python*/site-packages/helper.py"))
    helper.write_bytes(honest)
    assert "--install --keep" in start().stderr, "what was begun and not ended is not started"
    installed = start("--install", "--keep")
    assert installed.returncode == 0, installed.stderr
    joined = start()
    assert joined.stdout == "honest\n", joined.stderr
    assert start("key").stdout == "honest\n"
    shutil.copytree(folder, tmp_path / "another hospital", symlinks=True)
    folder = tmp_path / "another hospital"
    refused = start()
    assert refused.returncode == 1, "a .venv that was made elsewhere"
    assert ".venv was not made here" in refused.stderr
    again = start("--install", "--keep")
    assert "removing the folder .venv" in again.stdout
    (folder / "json").mkdir()
    planted = folder / "json" / "__init__.py"
    planted.write_text("1/0\n")
    assert "not of the signed kit, or links: json;" in start().stderr
    shutil.rmtree(folder / "json")
    assert start().stdout == "honest\n"
