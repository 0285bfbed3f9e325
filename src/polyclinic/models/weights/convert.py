"""Converts a torch checkpoint to safetensors without running code from it: a sandboxed process reads it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from polyclinic.core import WeightsError
from polyclinic.models.weights import sandboxed_reader

KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""The environment variables that the reader gets: those by which libraries are found."""
MAX_MESSAGE = 1000
NO_LIMITS = "This system cannot shut a process in (it has no resource limits); convert on Linux or macOS."


@dataclass(frozen=True)
class ConvertedWeights:
    tensors: int
    values: int


def convert_checkpoint(source: Path, target: Path, key: str | None = None, prefix: str = "") -> ConvertedWeights:
    """Convert a checkpoint.

    Args:
        source: The checkpoint.
        target: The safetensors file to write; it must not exist yet.
        key: The key of the checkpoint under which the tensors are; None if they are at its top.
        prefix: Only tensors whose names begin with it are kept. It is removed from the names.

    Returns:
        The numbers of tensors and of values.
    """
    if not source.is_file():
        raise WeightsError(f"There is no checkpoint at {source}; correct the path.")
    if target.exists():
        raise WeightsError(f"{target} already exists; remove it, or choose another name.")
    if not target.parent.is_dir():
        raise WeightsError(f"There is no folder {target.parent} to write to; create it first.")
    if importlib.util.find_spec("resource") is None:
        raise WeightsError(NO_LIMITS)
    number, name = tempfile.mkstemp(suffix=".part", prefix=f".{target.name}.", dir=target.parent)
    part = Path(name)
    try:
        with source.open("rb") as file, os.fdopen(number, "wb") as written:
            _read_in_sandbox(source, file.fileno(), written.fileno(), key, prefix)
        found = _check_converted(part, source)
        part.chmod(0o644)
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return found


def _read_in_sandbox(path: Path, source: int, target: int, key: str | None, prefix: str) -> None:
    search_path = [os.path.abspath(folder) for folder in sys.path]  # the reader starts in another folder
    order = {"source": source, "target": target, "key": key, "prefix": prefix, "path": search_path}
    limit = sandboxed_reader.cpu_seconds(path.stat().st_size)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-B", "-W", "ignore", sandboxed_reader.__file__, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(source, target),
            env={"OMP_NUM_THREADS": "1", **{name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}},
            cwd="/",
            timeout=10 * limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WeightsError(f"{path}: reading it took more than {10 * limit} seconds; try again, or copy it.") from None
    if done.returncode == 0:
        return
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        raise WeightsError(
            f"{path}: reading it took more than {limit} seconds of computing, or all memory; it is not what it seems."
        )
    message = done.stdout[:MAX_MESSAGE].decode("utf-8", "replace").split("\n")[0]
    message = "".join(letter if letter.isprintable() else "?" for letter in message)
    raise WeightsError(f"{path}: {message or 'its reader was stopped; it is not what it seems'}.")


def _check_converted(part: Path, source: Path) -> ConvertedWeights:
    """Count what the sandboxed process wrote, after checking that it is a set of tensors."""
    try:
        with safe_open(part, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  it is no dict
    except (SafetensorError, OSError):
        raise WeightsError(f"{source}: its reader did not write a set of tensors; it is not what it seems.") from None
    return ConvertedWeights(len(shapes), sum(prod(shape) for shape in shapes))
