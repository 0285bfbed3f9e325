"""The software that a kit installs: a wheel of the polyclinic that runs here, and what it needs, with hashes.

The name `polyclinic` is never asked of a package index. A requirements file with a SHA-256 for every package comes from
pip, which asks the configured index for what a clean machine would install (`lock_requirements`).
"""

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, distributions, requires
from pathlib import Path
from typing import Any

from polyclinic.config.bundled import recipes_folder
from polyclinic.core import EngineError, RecipeError, __version__
from polyclinic.storage.files import explain_os_errors

FLWR = next(
    need.partition(";")[0].removeprefix("flwr==").strip()
    for need in requires("polyclinic") or []
    if need.startswith("flwr==")
)
"""The only version of flwr that works, as pyproject.toml says: its internals change with every version."""
TAG = "py3-none-any"
HASHED = "--hash=sha256:"
PATIENCE = 1800.0
"""Seconds that pip may take: it may have to download packages to learn what they need."""
INDEX, LARGEST_PAGE, MOST_REQUESTS = "https://pypi.org/simple", 32 << 20, 16
WHEEL_LINK = re.compile(r'href="[^"]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+-[^<\s]+-[^<\s]+\.whl)\s*<')
"""A wheel in the list of a package's files (PEP 503)."""
KEPT_METADATA = ("METADATA", "entry_points.txt", "licenses/LICENSE")
STAMP = (1980, 1, 1, 0, 0, 0)
"""The time of all files in a wheel, so that the same code is the same wheel."""


@dataclass(frozen=True)
class Wheel:
    """The package itself as a file that pip installs."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Software:
    """What a kit installs. `packages`: the lines of requirements.txt for all packages but ours, with their hashes; ""
    if there are none, so that versions are pinned without hashes."""

    wheel: Wheel
    packages: str = ""

    def files(self) -> dict[str, bytes]:
        """The files of a kit: the wheel, requirements.txt, and without hashes constraints.txt."""
        if self.packages:
            ours = f"./{self.wheel.name}[flower] {HASHED}{self.wheel.sha256}\n"
            return {self.wheel.name: self.wheel.data, "requirements.txt": (ours + self.packages).encode()}
        pinned = [f"./{self.wheel.name}[flower]", f"flwr=={FLWR}", "-c constraints.txt"]
        return {
            self.wheel.name: self.wheel.data,
            "requirements.txt": _join_lines(pinned),
            "constraints.txt": _join_lines(
                ["# The versions installed where this kit was made.", *installed_versions()]
            ),
        }


def read_wheel(path: Path) -> Wheel:
    """Read a wheel of this version of polyclinic; raises `RecipeError` for another file."""
    if not re.fullmatch(rf"polyclinic-{re.escape(__version__)}-[\w.]+-[\w.]+-[\w.]+\.whl", path.name):
        raise RecipeError(
            f"{path.name} is not a wheel of polyclinic {__version__}, which runs here; build one with "
            "`pip wheel . --no-deps`, or leave out --wheel"
        )
    with explain_os_errors(path, "read", "give the path of a wheel"):
        return Wheel(path.name, path.read_bytes())


@cache
def build_wheel() -> Wheel:
    """Build a wheel of the code that runs here, from a checkout or an installed package, without a build tool."""
    info = f"polyclinic-{__version__}.dist-info"
    files = {f"polyclinic/{path}": data for path, data in _package_files()}
    files |= {f"{info}/{name}": data for name, data in _metadata_files()}
    files[f"{info}/WHEEL"] = _join_lines(
        ["Wheel-Version: 1.0", "Generator: polyclinic provision", "Root-Is-Purelib: true", f"Tag: {TAG}"]
    )
    rows = [f"{name},sha256={_encode_hash(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{info}/RECORD"] = _join_lines([*rows, f"{info}/RECORD,,"])
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, STAMP)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED)
    return Wheel(f"polyclinic-{__version__}-{TAG}.whl", held.getvalue())


def _package_files() -> Iterator[tuple[str, bytes]]:
    package, recipes = Path(__file__).parents[2], recipes_folder()
    for folder, prefix in ((package, ""), *([(recipes, "recipes/")] if recipes.parent != package else [])):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield f"{prefix}{path.relative_to(folder).as_posix()}", path.read_bytes()


def _metadata_files() -> Iterator[tuple[str, bytes]]:
    try:
        found = distribution("polyclinic")
    except PackageNotFoundError:
        raise EngineError(
            "polyclinic runs here without being installed, so its wheel cannot be built; install it with pip, or give "
            "--wheel"
        ) from None
    if found.version != __version__:
        raise EngineError(
            f"polyclinic {found.version} is installed, but {__version__} runs here; install this one with pip, or give "
            "--wheel"
        )
    for name in KEPT_METADATA:
        if (text := found.read_text(name)) is not None:
            yield name, text.encode()


def _encode_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def read_requirements(path: Path) -> str:
    """Read a requirements file with hashes that was made before, without its line for polyclinic."""
    with explain_os_errors(path, "read", "give the path of a requirements file"):
        text = path.read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and line.strip()[0] != "#"]
    others = [" ".join(line.split()) for line in lines if "polyclinic-" not in line.split()[0]]
    for line in others:
        if not line.startswith("--") and (HASHED not in line or "==" not in line.split()[0]):
            raise RecipeError(
                f"{path.name} has no version or no hash for {line.split()[0]!r:.80}; make it by `polyclinic provision "
                "lock`"
            )
    if not others:
        raise RecipeError(f"{path.name} names no package; make it by `polyclinic provision lock`")
    return "".join(f"{line}\n" for line in others)


def lock_requirements(wheel: Wheel) -> str:
    """Return the lines of requirements.txt for all that `wheel` needs on a machine like this one, with hashes.

    pip resolves them by the index that it is configured for (PIP_INDEX_URL …), at the versions installed here. Raises
    `EngineError` if pip cannot, for instance without network.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / wheel.name).write_bytes(wheel.data)
        (folder / "constraints.txt").write_bytes(_join_lines([*installed_versions(), f"flwr=={FLWR}"]))
        words = ["install", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet"]
        words += ["--disable-pip-version-check", "--report", "report.json", "-c", "constraints.txt"]
        command = [sys.executable, "-m", "pip", *words, f"./{wheel.name}[flower]"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ}, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"pip could not be asked for hashes ({type(error).__name__}); {NO_HASHES}") from None
        if done.returncode:
            last = next((line for line in reversed(done.stderr.splitlines()) if "ERROR" in line), "no reason given")
            raise EngineError(f"pip found no hashes ({last.strip():.200}); {NO_HASHES}")
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return "".join(sorted(_locked_lines(report)))


NO_HASHES = (
    "run `polyclinic provision lock` where pip reaches an index and give its file by --requirements, or make kits "
    "without hashes by --without-hashes"
)


def _locked_lines(report: dict[str, Any]) -> Iterator[str]:
    found: dict[tuple[str, str], str] = {}
    for package in report["install"]:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        if name == "polyclinic":
            continue
        digest = package["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise EngineError(f"the package index gives no SHA-256 for {name} {version}; {NO_HASHES}")
        found[_normal_name(name), version] = digest
    with ThreadPoolExecutor(MOST_REQUESTS) as pool:
        others = pool.map(lambda package: list_wheel_hashes(*package), found)
    for ((name, version), digest), more in zip(found.items(), others, strict=True):
        yield f"{name}=={version} {' '.join(f'{HASHED}{one}' for one in sorted({digest} | more))}\n"


def list_wheel_hashes(name: str, version: str) -> set[str]:
    """The SHA-256 of all wheels of a package's version that the index lists, for machines of other kinds; none if the
    index does not say."""
    page = f"{os.environ.get('PIP_INDEX_URL', INDEX).rstrip('/')}/{name}/"
    try:
        with urllib.request.urlopen(page, timeout=30) as answer:
            text = answer.read(LARGEST_PAGE).decode()
    except (OSError, ValueError):
        return set()
    wheels = ((digest, file.split("-")) for digest, file in WHEEL_LINK.findall(text))
    return {digest for digest, parts in wheels if [_normal_name(parts[0]), parts[1]] == [name, version]}


def _normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def installed_versions() -> list[str]:
    """Versions without build names such as `+cu128`, which the site's own machine decides."""
    found = {_normal_name(package.name): package.version.split("+")[0] for package in distributions()}
    return [f"{name}=={found[name]}" for name in sorted(found.keys() - {"polyclinic", "pip", "flwr"})]


def _join_lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
