"""Reads a torch checkpoint in a process that can do nothing else: a program of its own, which `convert` starts.

A checkpoint is a pickle, and a pickle is a program. torch's `weights_only=True` interprets only what tensors need and
refuses the rest; it has had holes (CVE-2025-32434), so this process has shut itself in before it looks at the file:
it was given one file to read and one to write, and can open no other file, no socket and no pipe, raise no limit, start
no program, and take no more memory, time or disk than the checkpoint's size accounts for.

Everything it says is one sentence on standard output; whoever started it believes none of it without looking.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
FORBIDDEN = ("open", "import", "compile", "exec", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "resource.")
"""What Python itself reports before doing it, or groups of such things."""
MEMORY_FACTOR = 8
"""The memory that reading may take, in sizes of the file: tensors, their copies, and what is written."""
MEMORY_ALLOWANCE = 1 << 30
MAX_NAMES = 6


class UnreadableCheckpoint(Exception):  # noqa: N818  it says what the file is
    """A checkpoint that gives no weights; the text says why and what to do."""


def cpu_seconds(size: int) -> int:
    """Of computing, for a file of so many bytes."""
    return 60 + size // 10_000_000


def isolate_network() -> None:
    """A network of its own, with nothing in it, where the system lets anybody have one. Before there are threads."""
    with contextlib.suppress(AttributeError, OSError):  # no such call here
        ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK)


def lock_process(size: int) -> None:
    """From here on this process computes, reads and writes what it has open, and nothing else."""
    import resource

    import psutil

    room = MEMORY_FACTOR * size + MEMORY_ALLOWANCE
    limits = {
        "RLIMIT_AS": psutil.Process().memory_info().vms + room,
        "RLIMIT_FSIZE": room,
        "RLIMIT_CPU": cpu_seconds(size),
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
        "RLIMIT_NOFILE": 0,  # the last: whatever is asked for from now on would need a number, and there is none
    }
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (AttributeError, ValueError, OSError):
            if name in ("RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):  # other systems do not have them all
                raise
    sys.addaudithook(_deny_event)


def _deny_event(event: str, arguments: tuple[Any, ...]) -> None:
    del arguments
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"{event} is not for readers of weights")


def rehearse_reading(torch: Any, save: Callable[[dict[str, Any]], bytes]) -> None:
    """Convert a file of our own in either format, and one of neither: what is imported at first use is there then."""
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"": torch.zeros(1)}, file, _use_new_zipfile_serialization=zipped)
        file.seek(0)
        save(read_checkpoint(file, torch))
    with contextlib.suppress(UnreadableCheckpoint):
        read_checkpoint(io.BytesIO(b"nothing"), torch)


def read_checkpoint(file: Any, torch: Any) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise anything
        said = " ".join(str(error).split())
        code = re.search(r"GLOBAL (\S+)", said)
        if code:
            raise UnreadableCheckpoint(
                f"it asks for {_format_name(code[1])}, which is code and not weights; nothing of it was run: "
                "save the state_dict alone, or get the weights from somewhere else"
            ) from None
        file.seek(8)
        if file.read(1) == b"{":
            raise UnreadableCheckpoint(
                "it is safetensors already, which needs no conversion: name it in model.weights"
            ) from None
        reason = f" ({said.split('. ')[0][:100].rstrip('. ')})" if isinstance(error, RuntimeError) else ""
        raise UnreadableCheckpoint(f"it cannot be read as a torch file{reason}; download or copy it again") from None


def select_tensors(found: Any, key: str | None, prefix: str, torch: Any) -> dict[str, Any]:
    """The named tensors below `key` whose names begin with `prefix`, without it."""
    if isinstance(found, Mapping) and key is not None:
        if key not in found:
            raise UnreadableCheckpoint(
                f"it has no key {_format_name(key)}; it has {_format_names(found)}: give one of these as --key"
            )
        found = found[key]
    if not isinstance(found, Mapping):
        raise UnreadableCheckpoint(
            f"it holds a {type(found).__name__} where named tensors should be; give another --key"
        )
    named = {n: t for n, t in found.items() if isinstance(n, str) and isinstance(t, torch.Tensor)}
    kept = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
    if not found:
        raise UnreadableCheckpoint("there is nothing in it; get the weights from somewhere else")
    if not named:
        raise UnreadableCheckpoint(
            f"there are no named tensors here, but {_format_names(found)}; give one of these as --key"
        )
    if not kept:
        raise UnreadableCheckpoint(
            f"no tensor's name begins with {_format_name(prefix)}; there are {_format_names(named)}"
        )
    return {name: _copy_plain(name, tensor, torch) for name, tensor in kept.items()}


def _copy_plain(name: str, tensor: Any, torch: Any) -> Any:
    """A copy that lies by itself and without gaps, as a file of tensors needs it."""
    floating = torch.float16, torch.bfloat16, torch.float32, torch.float64
    whole = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
    if tensor.dtype not in (*floating, *whole) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.layout} {tensor.dtype}".replace("torch.", "").replace("strided ", "")
        raise UnreadableCheckpoint(
            f"{_format_name(name)} is {kind}, but weights are floating-point or whole numbers; choose others by --prefix"
        )
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _format_names(found: Mapping[Any, Any]) -> str:
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(_format_name(name) for name in list(found)[:MAX_NAMES]) + more if found else "nothing"


def _format_name(name: object) -> str:
    """Of a name that may have been chosen to harm a terminal."""
    text = ascii(name)
    return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"


def convert_file(source: int, target: int, key: str | None, prefix: str) -> None:
    """From one open file to another."""
    import safetensors.torch
    import torch

    torch.set_num_threads(1)
    rehearse_reading(torch, safetensors.torch.save)
    with open(source, "rb") as file, open(target, "wb", buffering=0) as written:
        size = os.fstat(source).st_size
        lock_process(size)
        try:
            data = memoryview(safetensors.torch.save(select_tensors(read_checkpoint(file, torch), key, prefix, torch)))
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise UnreadableCheckpoint(
                f"its tensors take more memory than {MEMORY_FACTOR} times its {size:,} bytes and a gigabyte; it is not what it "
                "seems: get the weights from somewhere else"
            ) from None
        try:
            while data:
                data = data[written.write(data) :]
        except OSError as error:
            raise UnreadableCheckpoint(
                f"its weights cannot be written ({error.strerror}); make room, or choose OUT elsewhere"
            ) from None


def main(order: Mapping[str, Any]) -> int:
    sys.path[:] = order["path"]
    isolate_network()
    try:
        convert_file(order["source"], order["target"], order["key"], order["prefix"])
    except UnreadableCheckpoint as sentence:
        print(sentence, flush=True)
        return 1
    except Exception as error:  # its walls, or a torch that cannot be imported behind them
        said = ascii(" ".join(str(error).split())[:200])
        print(f"its reader was stopped ({type(error).__name__}: {said}); do not use it before you know why", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))  # at once: what Python does on its way out may want to open something
