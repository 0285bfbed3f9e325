"""`polyclinic weights convert`: weights come out as they went in, nothing in a checkpoint is ever run."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save
from torch import Tensor
from typer.testing import CliRunner

from polyclinic.cli.main import app
from polyclinic.core.errors import WeightsError
from polyclinic.core.rng import Stream
from polyclinic.models import build_model
from polyclinic.models.weights import sandboxed_reader
from polyclinic.models.weights.convert import convert_checkpoint
from polyclinic.models.weights.load import load_weights
from tests.models.test_resnet22 import CC, published


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["weights", "convert", *arguments])


class Harm:
    """Unpickled as pickles usually are, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def written(value: Any, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def chosen(data: bytes, key: str | None = None, prefix: str = "") -> dict[str, Tensor]:
    """What the reader does, without the walls around it."""
    return sandboxed_reader.select_tensors(
        sandboxed_reader.read_checkpoint(io.BytesIO(data), torch), key, prefix, torch
    )


def test_the_public_checkpoint_becomes_a_weights_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cc = published()
    model = OrderedDict((f"{CC}{name}", tensor) for name, tensor in cc.items())
    model["four_view_resnet.mlo.first_conv.weight"] = torch.ones(16, 1, 7, 7)
    Path("in.p").write_bytes(written({"model": model, "epoch": 3}, zipped=False))  # of 2019: the format of then
    result = call("in.p", "out.safetensors", "--key", "model", "--prefix", CC, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["file"], told["tensors"]) == ("out.safetensors", len(cc))
    found = load_file("out.safetensors")
    assert found.keys() == cc.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in cc.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.p", "out.safetensors"]
    load_weights(build_model("resnet22", classes=2, channels=1, size=64, seed=Stream(1)), Path("out.safetensors"))


def test_a_checkpoint_with_a_command_in_it_is_refused_and_the_command_is_not_run(tmp_path: Path) -> None:
    trap, target = tmp_path / "trapped", tmp_path / "out.safetensors"
    source = tmp_path / "in.pt"
    source.write_bytes(written({"model": {"a": torch.ones(1)}, "more": Harm(f"touch {trap}")}))
    result = call(str(source), str(target), "--key", "model")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {source}: it asks for 'posix.system', which is code and not weights")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [source]
    # The trap is a real one: whoever unpickles as usual falls into it.
    torch.load(source, weights_only=False)
    assert trap.exists()


def test_tensors_of_more_memory_than_the_file_accounts_for_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.pt"
    source.write_bytes(written({"a": torch.ones(1).expand(10**11)}))
    with pytest.raises(WeightsError, match=r"its tensors take more memory than 8 times its .* bytes and a gigabyte"):
        convert_checkpoint(source, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == [source]


def test_numbers_and_layouts_survive_without_their_names_beginning() -> None:
    values = {
        "half": torch.randn(3).half(),
        "brain": torch.randn(3).bfloat16(),
        "double": torch.randn(3).double(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "picture": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "view": torch.randn(4, 4).t()[1:],
    }
    both = {f"net.{name}": tensor for name, tensor in values.items()} | {"other": torch.ones(1), "epoch": 3}
    found = chosen(written({"state": both}), "state", "net.")
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
        assert found[name].is_contiguous()


GOOD = written({"model": {"a.weight": torch.ones(2)}, "epoch": 3})
BAD: dict[str, tuple[bytes, str | None, str, str]] = {
    "text": (b"these are not weights", None, "", "cannot be read as a torch file; download"),
    "empty": (b"", None, "", "cannot be read as a torch file"),
    "cut": (GOOD[: len(GOOD) // 2], None, "", r"cannot be read as a torch file \(.*central directory.*\); download"),
    "cut, old": (written({"a": torch.ones(999)}, False)[:-400], None, "", r"torch file \(.*EOF.*\)"),
    "no tensors": (written({"epoch": 3}), None, "", "it has no named tensors here, but 'epoch'; give one"),
    "nothing": (written({}), None, "", "it is empty; get the weights"),
    "safetensors": (
        save({"a": torch.ones(1)}),
        None,
        "",
        r"it is a safetensors file already .* name it in model\.weights",
    ),
    "below a key": (GOOD, None, "", "no named tensors here, but 'model', 'epoch'; give one of these as --key"),
    "missing key": (GOOD, "mode", "", "it has no key 'mode'; it has 'model', 'epoch': give one of these as --key"),
    "key of a number": (GOOD, "epoch", "", "it holds an object of type int instead of named tensors"),
    "a list": (written([torch.ones(1)]), None, "", "it holds an object of type list instead of named tensors"),
    "prefix": (GOOD, "model", "b.", "no tensor's name begins with 'b.'; the names are 'a.weight'"),
    "complex": (written({"a": torch.ones(1, dtype=torch.complex64)}), None, "", "'a' is complex64, but weights are"),
    "sparse": (written({"a": torch.ones(1).to_sparse()}), None, "", "'a' is sparse_coo float32, but weights are"),
    "a command": (
        written(Harm("exit 1"), False),
        None,
        "",
        "it asks for 'posix.system', which is code and not weights",
    ),
    "a whole network": (written(torch.nn.Linear(1, 1)), None, "", r"it asks for 'torch\.nn\.\S+Linear', which is code"),
    "a terminal's codes": (written({"\x1b[31m": 1}), None, "", r"but '\\x1b\[31m'; give"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch has something to say about sparse tensors
@pytest.mark.parametrize("case", BAD)
def test_what_gives_no_weights_gets_one_sentence(case: str) -> None:
    data, key, prefix, sentence = BAD[case]
    with pytest.raises(sandboxed_reader.UnreadableCheckpoint, match=sentence) as told:
        chosen(data, key, prefix)
    assert "\n" not in str(told.value)


def test_paths_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    source, there = tmp_path / "in.pt", tmp_path / "there.safetensors"
    source.write_bytes(GOOD)
    there.write_bytes(b"mine")
    with pytest.raises(WeightsError, match="There is no checkpoint at"):
        convert_checkpoint(tmp_path / "absent.pt", tmp_path / "out.safetensors")
    with pytest.raises(WeightsError, match="already exists"):
        convert_checkpoint(source, there)
    with pytest.raises(WeightsError, match="There is no folder"):
        convert_checkpoint(source, tmp_path / "nowhere" / "out.safetensors")
    assert there.read_bytes() == b"mine"


BREAKOUTS = """
import ctypes, json, os, resource, socket, subprocess, sys
from polyclinic.models.weights import sandboxed_reader

folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
called = libc.open, libc.socket, libc.setrlimit, libc.system  # looked up while that is still allowed
libc_deeds = {
    "open": lambda: libc.open(f"{folder}/kernel".encode(), os.O_CREAT | os.O_WRONLY, 0o600),
    "read": lambda: libc.open(b"/etc/hostname", os.O_RDONLY),
    "socket": lambda: libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0),
    "raise limits": lambda: libc.setrlimit(resource.RLIMIT_NOFILE, (ctypes.c_ulong * 2)(99, 99)),
}
deeds = {
    "write": lambda: open(f"{folder}/python", "w"),
    "read": lambda: open("/etc/hostname"),
    "socket": lambda: socket.socket(),
    "system": lambda: os.system(f"touch {folder}/system"),
    "program": lambda: subprocess.run(["touch", f"{folder}/program"]),
    "fork": lambda: os.fork(),
    "exec": lambda: os.execv("/bin/sh", ["sh", "-c", f"touch {folder}/exec"]),
    "remove": lambda: os.remove(f"{folder}/mine"),
    "raise limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99)),
    "import": lambda: __import__("xml.dom.minidom"),
    "memory": lambda: bytearray(3 << 30),
}
before = os.readlink("/proc/self/ns/user") if os.path.exists("/proc/self/ns/user") else ""
own = open(f"{folder}/own", "w")
sandboxed_reader.isolate_network()
namespaces = before != "" and os.readlink("/proc/self/ns/user") != before
sandboxed_reader.lock_process(0)
done = []
for name, deed in deeds.items():
    try:
        deed()
        done.append(name)
    except (PermissionError, OSError, MemoryError):
        pass
done += [f"libc {name}" for name, deed in libc_deeds.items() if deed() != -1]
libc.system(f"touch {folder}/libc-system".encode())
own.write("still open")
own.flush()
print(json.dumps({"done": done, "namespaces": namespaces}), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the walls are looked at where they are highest")
def test_whoever_gets_out_of_the_unpickler_is_still_shut_in(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    command = [sys.executable, "-c", BREAKOUTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # A system that gives nobody a namespace of their own cannot keep root from raising limits again.
    allowed = [] if found["namespaces"] or os.geteuid() else ["libc raise limits"]
    assert [deed for deed in found["done"] if deed not in allowed] == []
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "own"}
    assert (tmp_path / "own").read_text() == "still open"


def test_a_reader_that_lies_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, liar = tmp_path / "in.pt", tmp_path / "liar.py"
    source.write_bytes(GOOD)
    monkeypatch.setattr(sandboxed_reader, "__file__", str(liar))
    for program, sentence in {
        "pass": "its reader did not write a set of tensors",
        "import sys; print('\\x1b[2J' + 'x' * 5000); print('more'); sys.exit(1)": r"\?\[2Jx{900,1000}\.$",
        "import sys; sys.exit(1)": "its reader was stopped",
        "import os; os.kill(os.getpid(), 9)": "seconds of computing",
        "import os; print(sorted(os.environ), flush=True); os._exit(1)": r"\['(LC_CTYPE', ')?OMP_NUM_THREADS'\]",
    }.items():
        liar.write_text(program)
        with pytest.raises(WeightsError, match=sentence) as told:
            convert_checkpoint(source, tmp_path / "out.safetensors")
        assert "\n" not in str(told.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "liar.py"]
