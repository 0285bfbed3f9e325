"""Reads a torch checkpoint in a sandboxed process, which `convert` starts as a program of its own.

A checkpoint is a pickle, and a pickle is a program. torch's `weights_only=True` runs only what tensors need, but it has
had holes (CVE-2025-32434). So this process locks itself before it reads the file: it has one file open to read and one
to write, and can open no other file, socket or pipe, raise no limit, start no program, and use no more memory, time or
disk than the checkpoint's size justifies.

It reports an error as one sentence on standard output. `convert` checks all that comes back.
"""

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
"""Events of Python's audit hooks, or the beginnings of their names, that are denied."""
MEMORY_FACTOR = 8
"""The memory that reading may take, in sizes of the file: for tensors, their copies, and the output."""
MEMORY_ALLOWANCE = 1 << 30
MAX_NAMES = 6


class UnreadableCheckpoint(Exception):  # noqa: N818  it names the file's state
    """A checkpoint that holds no weights; the text says why and what to do."""


def cpu_seconds(size: int) -> int:
    """Return the CPU time that reading a file of `size` bytes may take."""
    return 60 + size // 10_000_000


def isolate_network() -> None:
    """Move to an empty network namespace, if the system allows it. Call it before there are threads."""
    with contextlib.suppress(AttributeError, OSError):  # not available on every system
        ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK)


def lock_process(size: int) -> None:
    """Let this process from now on only compute, and read and write the files that it has open.

    `size` is the checkpoint's, in bytes, and determines how much memory, time and disk is allowed.
    """
    import resource

    import psutil

    room = MEMORY_FACTOR * size + MEMORY_ALLOWANCE
    limits = {
        "RLIMIT_AS": psutil.Process().memory_info().vms + room,
        "RLIMIT_FSIZE": room,
        "RLIMIT_CPU": cpu_seconds(size),
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
        "RLIMIT_NOFILE": 0,  # the last: opening anything from now on would need a file descriptor
    }
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (AttributeError, ValueError, OSError):
            if name in ("RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):  # some systems lack the others
                raise
    sys.addaudithook(_deny_event)


def _deny_event(event: str, _arguments: tuple[Any, ...]) -> None:
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"{event} is not allowed while weights are read")


def rehearse_reading(torch: Any, save: Callable[[dict[str, Any]], bytes]) -> None:
    """Convert small files in both formats and one that is unreadable, so that lazy imports are done before the lock."""
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"": torch.zeros(1)}, file, _use_new_zipfile_serialization=zipped)
        file.seek(0)
        save(read_checkpoint(file, torch))
    with contextlib.suppress(UnreadableCheckpoint):
        read_checkpoint(io.BytesIO(b"nothing"), torch)


def read_checkpoint(file: Any, torch: Any) -> Any:
    """Unpickle a file with torch's restricted unpickler."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise anything
        message = " ".join(str(error).split())
        code = re.search(r"GLOBAL (\S+)", message)
        if code:
            raise UnreadableCheckpoint(
                f"it asks for {_format_name(code[1])}, which is code and not weights; none of it was run: "
                "save only the state_dict, or get the weights from another source"
            ) from None
        file.seek(8)
        if file.read(1) == b"{":
            raise UnreadableCheckpoint(
                "it is a safetensors file already and needs no conversion: name it in model.weights"
            ) from None
        reason = f" ({message.split('. ')[0][:100].rstrip('. ')})" if isinstance(error, RuntimeError) else ""
        raise UnreadableCheckpoint(f"it cannot be read as a torch file{reason}; download or copy it again") from None


def select_tensors(found: Any, key: str | None, prefix: str, torch: Any) -> dict[str, Any]:
    """Return copies of the named tensors below `key` whose names begin with `prefix`, which is removed."""
    if isinstance(found, Mapping) and key is not None:
        if key not in found:
            raise UnreadableCheckpoint(
                f"it has no key {_format_name(key)}; it has {_format_names(found)}: give one of these as --key"
            )
        found = found[key]
    if not isinstance(found, Mapping):
        raise UnreadableCheckpoint(
            f"it holds an object of type {type(found).__name__} instead of named tensors; give another --key"
        )
    named = {n: t for n, t in found.items() if isinstance(n, str) and isinstance(t, torch.Tensor)}
    kept = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
    if not found:
        raise UnreadableCheckpoint("it is empty; get the weights from another source")
    if not named:
        raise UnreadableCheckpoint(
            f"it has no named tensors here, but {_format_names(found)}; give one of these as --key"
        )
    if not kept:
        raise UnreadableCheckpoint(
            f"no tensor's name begins with {_format_name(prefix)}; the names are {_format_names(named)}"
        )
    return {name: _copy_plain(name, tensor, torch) for name, tensor in kept.items()}


def _copy_plain(name: str, tensor: Any, torch: Any) -> Any:
    """Return a contiguous copy that shares no memory, as safetensors requires."""
    floating = torch.float16, torch.bfloat16, torch.float32, torch.float64
    whole = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
    if tensor.dtype not in (*floating, *whole) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.layout} {tensor.dtype}".replace("torch.", "").replace("strided ", "")
        raise UnreadableCheckpoint(
            f"{_format_name(name)} is {kind}, but weights are floating-point or integer; choose others with --prefix"
        )
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _format_names(found: Mapping[Any, Any]) -> str:
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(_format_name(name) for name in list(found)[:MAX_NAMES]) + more if found else "nothing"


def _format_name(name: object) -> str:
    """Escape a name, which may contain control codes for terminals, and cut it to 60 characters."""
    text = ascii(name)
    return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"


def convert_file(source: int, target: int, key: str | None, prefix: str) -> None:
    """Convert from one open file to another, given by their descriptors."""
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
                f"its tensors take more memory than {MEMORY_FACTOR} times its {size:,} bytes and a gigabyte; "
                "it is not what it seems: get the weights from another source"
            ) from None
        try:
            while data:
                data = data[written.write(data) :]
        except OSError as error:
            raise UnreadableCheckpoint(
                f"its weights cannot be written ({error.strerror}); free space, or choose another place for OUT"
            ) from None


def main(order: Mapping[str, Any]) -> int:
    sys.path[:] = order["path"]
    isolate_network()
    try:
        convert_file(order["source"], order["target"], order["key"], order["prefix"])
    except UnreadableCheckpoint as sentence:
        print(sentence, flush=True)
        return 1
    except Exception as error:  # a denied event, or torch that cannot be imported in the sandbox
        message = ascii(" ".join(str(error).split())[:200])
        print(f"its reader was stopped ({type(error).__name__}: {message}); find out why before you use it", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))  # at once, as Python's shutdown may open files
