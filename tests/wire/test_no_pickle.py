"""W3: nothing is ever unpickled. The source says so, and so does Python's own audit of a run from end to end.

One program reads torch's checkpoints, and only when a person asks for it (`polyclinic weights convert`): with torch's
restricted unpickler, in a process of its own that is shut in (tests/models/test_convert.py).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyclinic

PACKAGE = Path(polyclinic.__file__).parent
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {"torch.load", "torch.save", "torch.jit.load", "torch.package", "pandas.read_pickle"}
LOADERS |= {f"yaml.{name}" for name in ("Loader", "FullLoader", "UnsafeLoader", "full_load", "unsafe_load")}
NUMPY = {"np.load", "numpy.load", "np.save", "numpy.save", "np.savez", "numpy.savez"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def allows_pickle(call: ast.Call) -> bool:
    """NumPy refuses pickles unless told otherwise; anything but a plain `allow_pickle=False` counts as telling it."""
    told = [k.value for k in call.keywords if k.arg in ("allow_pickle", None)]
    return any(not (isinstance(value, ast.Constant) and value.value is False) for value in told) or len(call.args) > 2


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom):
            found = f"{node.module}.{{}}"
            yield from (found.format(a.name) for a in node.names if found.format(a.name) in LOADERS | NUMPY)
            yield from [node.module or ""] if (node.module or "").split(".")[0] in UNPICKLERS else []
        elif isinstance(node, ast.Attribute) and (dotted(node) in LOADERS or node.attr == "recv"):
            yield dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func) in NUMPY and allows_pickle(node):
            yield dotted(node.func)


READER = PACKAGE / "models" / "weights" / "sandboxed_reader.py"


def test_no_source_file_can_unpickle_but_the_reader_in_its_own_process() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    found = {file: told for file in files if (told := sorted(offences(file.read_text())))}
    assert found == {READER: ["torch.load", "torch.save"]}


def test_the_reader_unpickles_weights_only_and_nobody_calls_it() -> None:
    calls = [node for node in ast.walk(ast.parse(READER.read_text())) if isinstance(node, ast.Call)]
    loads = [call for call in calls if dotted(call.func) == "torch.load"]
    told = [{k.arg: k.value for k in call.keywords}.get("weights_only") for call in loads]
    assert [isinstance(value, ast.Constant) and value.value is True for value in told] == [True]
    knowing = {file.name for file in PACKAGE.rglob("*.py") if "sandboxed_reader" in file.read_text()}
    assert knowing == {"convert.py"}
    used = {
        node.attr
        for node in ast.walk(ast.parse((PACKAGE / "models" / "weights" / "convert.py").read_text()))
        if isinstance(node, ast.Attribute) and dotted(node.value) == "sandboxed_reader"
    }
    assert used == {"__file__", "cpu_seconds"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal",
        "from joblib.externals import cloudpickle",
        "def f():\n    from dill import loads",
        "import torch\ntorch.load('x', weights_only=True)",
        "load = torch.load",
        "from torch import save",
        "np.load('x', allow_pickle=True)",
        "np.load('x', None, True)",
        "np.load('x', **options)",
        "numpy.load('x', allow_pickle=trust)",
        "pipe.recv()",
        "yaml.load(text, yaml.Loader)",
        "class Ours(yaml.UnsafeLoader): ...",
        "from yaml import full_load",
    ],
)
def test_the_source_check_sees(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source", ["np.load('x')", "np.load('x', allow_pickle=False)", "pipe.recv_bytes()", "yaml.SafeLoader"]
)
def test_the_source_check_lets_pass(source: str) -> None:
    assert not list(offences(source))


AUDITED = """
import os, pickle, sys
import polyclinic
from collections import OrderedDict
from pathlib import Path
from polyclinic.storage import messages

folder = Path(sys.argv[1])
events = os.open(folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
bait = pickle.dumps(OrderedDict(a=1))

def note(event, arguments):
    if event == "pickle.find_class":
        os.write(events, f"{os.getpid()} {arguments}\\n".encode())

def count():
    return len((folder / "events").read_text().splitlines())

sys.addaudithook(note)
shas = []
for algorithm in ("fedavg", "scaffold"):
    for workers in (0, 2):
        recipe = polyclinic.Recipe.from_values({
            "name": "audited",
            "rounds": 2,
            "data": {"name": "digits", "partition": {"by": "iid", "sites": 3}},
            "model": {"name": "mlp"},
            "algorithm": algorithm,
            "training": {"batch": 64, "optimiser": {"lr": 0.05}},
            "evaluate": {"bootstrap": 10},
            "engine": {"workers": workers},
        })
        out = folder / f"{algorithm}-{workers}"
        result = polyclinic.run(recipe, out)
        shas.append(result.summary.sha256)
        snapshots = sorted((out / "snapshots").iterdir())
        messages.decode(messages.encode({}, messages.decode(snapshots[-1].read_bytes()).tensors))
        polyclinic.run(recipe, out)
ours = count()
pickle.loads(bait)
child = os.fork()
if child == 0:
    pickle.loads(bait)
    os._exit(0)
os.waitpid(child, 0)
import json
print(json.dumps({"ours": ours, "baits": count() - ours, "shas": shas}))
"""


def test_a_run_from_end_to_end_unpickles_nothing(tmp_path: Path) -> None:
    """FedAvg and SCAFFOLD (whose sites remember), in this process and in workers; the hook is shown to see both."""
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", AUDITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ours"] == 0, (tmp_path / "events").read_text()
    assert found["baits"] == 2
    assert found["shas"][0] == found["shas"][1] != found["shas"][2] == found["shas"][3]
