"""Check that two checkouts of polyclinic train the same models, bit for bit: `python scripts/same_results.py OLD NEW`.

Every recipe below runs in both checkouts. The script compares a SHA-256 over the final server state (names, shapes,
dtypes and bytes of all tensors), so a refactoring may rename keys and tensors (say so in the tables below) but not
change a number. No hash is stored. It needs the extras of `./scripts/test --heavy` (Flower and Ray).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from safetensors import safe_open

Values = dict[str, Any]

FORMER_KEYS = {
    "training.curriculum.by": "training.order",
    "training.curriculum.strength": "training.emphasis",
    "capability.profiles.": "capability.cards.",
    ".min_score": ".at_least",
    ".lr_scale": ".lr",
}
"""Parts of recipe keys of this checkout, and how a checkout without core/jobs.py spells them."""
FORMER_TENSORS: dict[str, str] = {"auxiliary.": "beside."}
"""Parts of tensor names of this checkout, and of the older one."""

DIGITS: Values = {
    "name": "same",
    "seed": 11,
    "rounds": 3,
    "data": {"name": "digits", "partition": {"by": "dirichlet", "sites": 3, "alpha": 1.0, "minimum": 60}},
    "model": {"name": "mlp"},
    "training": {"optimiser": {"name": "sgd", "lr": 0.1}, "batch": 32, "epochs": None, "steps": 4},
    "evaluate": {"bootstrap": 0},
}
PRIVATE: Values = {"noise": 1.5, "delta": 1e-4, "randomness": "seed"}
PHANTOM: Values = {
    "name": "same",
    "seed": 5,
    "rounds": 2,
    "data": {"name": "phantom", "size": 32},
    "public": {
        "name": "phantom",
        "size": 32,
        "hospitals": [{"name": "archive", "vendor": "film", "patients": 40, "malignant": 0.5}],
    },
    "model": "student",
    "algorithm": "pfedcdp",
    "clusters": {
        "high": {"min_score": 0.66, "model": "cnn_a"},
        "low": {"min_score": 0, "model": "cnn_c", "lr_scale": 0.3},
    },
    "capability": {
        "profiles": {
            "harbour": {"cpu": 0.9, "memory": 0.8, "battery": 1, "network": 0.9},
            "hillside": {"cpu": 0.2, "memory": 0.1, "battery": 0.3, "network": 0.4},
        }
    },
    "training": {"epochs": None, "steps": 3, "optimiser": {"name": "adam", "lr": 0.001}},
    "finish": {"name": "refine", "epochs": 1},
    "evaluate": {"bootstrap": 0},
}
RECIPES: dict[str, Values] = {
    "fedavg": {**DIGITS, "algorithm": "fedavg"},
    "fedavg, two workers": {**DIGITS, "algorithm": "fedavg", "engine": {"name": "local", "workers": 2}},
    "fedprox, stacked": {**DIGITS, "algorithm": {"name": "fedprox", "mu": 0.1}, "engine": {"name": "stacked"}},
    "scaffold, on Ray": {**DIGITS, "algorithm": "scaffold", "engine": {"name": "ray", "workers": 2}},
    "differential privacy, image": {**DIGITS, "algorithm": "fedavg", "privacy": PRIVATE},
    "differential privacy, site": {**DIGITS, "algorithm": "fedavg", "privacy": {**PRIVATE, "unit": "site"}},
    "fedper": {**DIGITS, "algorithm": "fedper"},
    "fedmp": {**DIGITS, "algorithm": "fedmp"},
    "fraug": {**DIGITS, "algorithm": "fraug"},
    "curriculum and fed-align": {
        **DIGITS,
        "algorithm": {"name": "fed-align", "warmup": 1},
        "training": {
            **DIGITS["training"],
            "steps": None,
            "epochs": 1,
            "curriculum": {"by": "forgotten", "strength": 4.0},
        },
    },
    "ensemble": {**DIGITS, "algorithm": "fedavg", "ensemble": True},
    "pfedcdp, clusters, student": PHANTOM,
    "quantised fedbn": {**DIGITS, "algorithm": "fedbn", "stages": [{"name": "quantise", "bits": 8}]},
}
REAL: Values = {
    "name": "real sites",
    "rounds": 3,
    "data": {"name": "table", "path": "clinic.csv", "size": 8, "channels": 1},
    "model": {"name": "mlp"},
    "algorithm": "moon",
    "training": {"batch": 4, "optimiser": {"name": "sgd", "lr": 0.05}},
    "evaluate": {"bootstrap": 0},
}
SITES = ("harbour", "hill", "lake")


def is_older(checkout: Path) -> bool:
    return not (checkout / "src/polyclinic/core/jobs.py").exists()


def spell_recipe(recipe: Values, checkout: Path) -> Values:
    """Return the recipe as the checkout spells it."""
    if not is_older(checkout):
        return recipe
    spelt: Values = {}
    for path, value in leaves(recipe):
        *parents, last = former_key(path).split(".")
        place = spelt
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return spelt


def former_key(path: str) -> str:
    for new, old in FORMER_KEYS.items():
        path = path.replace(new, old)
    return path


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def hash_state(model: Path, older: bool) -> str:
    """Return the SHA-256 over the final state, with the names of the newer checkout."""
    found = hashlib.sha256()
    with safe_open(model, "numpy") as tensors:
        names = {name: name for name in tensors.keys()}  # noqa: SIM118  it is no mapping
        if older:
            names = {new_name(name): name for name in names}
        for name in sorted(names):
            array = tensors.get_tensor(names[name])
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def new_name(tensor: str) -> str:
    for new, old in FORMER_TENSORS.items():
        tensor = tensor.replace(old, new)
    return tensor


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def call(checkout: Path, *arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "polyclinic", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment(checkout), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: polyclinic {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


IN_ONE_PROCESS = """
import json, sys
from polyclinic import Recipe, run
if __name__ == "__main__":
    for folder, recipe in json.load(open(sys.argv[1])).items():
        run(Recipe.load(recipe), out=folder)
"""


def run_recipes(checkout: Path, folder: Path) -> dict[str, str]:
    """Run all recipes in one process of the checkout; return each final state's hash."""
    folders = {name: folder / str(number) for number, name in enumerate(RECIPES)}
    orders = {str(place): f"{place}.yaml" for place in folders.values()}
    for name, recipe in RECIPES.items():
        Path(orders[str(folders[name])]).write_text(yaml.safe_dump(spell_recipe(recipe, checkout)))
    (folder / "orders.json").write_text(json.dumps(orders))
    (folder / "run.py").write_text(IN_ONE_PROCESS)
    command = [sys.executable, str(folder / "run.py"), str(folder / "orders.json")]
    done = subprocess.run(command, cwd=folder, env=environment(checkout), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: a recipe failed:\n{done.stderr[-3000:]}")
    return {name: hash_state(folders[name] / "model.safetensors", is_older(checkout)) for name in RECIPES}


def run_real_sites(checkout: Path, folder: Path) -> dict[str, str]:
    """Run one recipe between a server and three sites, processes of their own with TLS and keys."""
    write_hospitals(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "my.yaml").write_text(yaml.safe_dump(spell_recipe(REAL, checkout)))
    federation = {"federation": "same", "server": {"host": "127.0.0.1", "port": port}, "sites": list(SITES)}
    (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
    command = (checkout / "src/polyclinic/cli/provision.py").read_text(encoding="utf-8")
    flags = [flag for flag in ("--with-keys", "--without-hashes") if flag in command]  # older checkouts have neither
    call(checkout, "provision", "federation.yaml", "--out", "kits", *flags, cwd=folder)
    for site in SITES:
        path = folder / "kits/sites" / site / "site.yaml"
        values = yaml.safe_load(path.read_text())
        kinds = ["model", "buffers", "metrics", "predictions"]
        values |= {"data": {"clinic.csv": str(folder / site / "clinic.csv")}}
        values |= {"allow": {"algorithms": "all", "kinds": kinds}}
        path.write_text(yaml.safe_dump(values))
    with contextlib.ExitStack() as stack:
        for site in SITES:
            stack.enter_context(process(checkout, folder, "join", f"kits/sites/{site}/site.yaml"))
        call(checkout, "serve", "kits/server/server.yaml", "my.yaml", "--out", "real", cwd=folder)
    return {"moon, real sites over Flower": hash_state(folder / "real/model.safetensors", is_older(checkout))}


@contextlib.contextmanager
def process(checkout: Path, folder: Path, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "polyclinic", *arguments]
    with (folder / f"{Path(arguments[-1]).parent.name}.log").open("w") as log:
        started = subprocess.Popen(command, cwd=folder, env=environment(checkout), stdout=log, stderr=log)
        try:
            yield
        finally:
            started.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(20)
            started.kill()


def write_hospitals(folder: Path) -> None:
    for place, site in enumerate(SITES):
        (folder / site).mkdir()
        rows = ["path,label,patient"]
        for number in range(24):
            malignant = bool((number * 7 + place) % 3)
            rng = np.random.default_rng(1000 * place + number)
            pixels = rng.integers(0, 200 if malignant else 256, (12, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / site / f"{number}.png")
            rows.append(f"{number}.png,{'malignant' if malignant else 'benign'},{site} patient {number // 4}")
        (folder / site / "clinic.csv").write_text("\n".join(rows) + "\n")


def main() -> int:
    old, new = (Path(argument).resolve() for argument in sys.argv[1:3])
    began, folder = time.perf_counter(), Path(tempfile.mkdtemp(prefix="same-results-"))
    jobs = [(kind, checkout) for kind in (run_recipes, run_real_sites) for checkout in (old, new)]
    places = [folder / str(number) for number in range(len(jobs))]
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(kind, checkout, place) for (kind, checkout), place in zip(jobs, places, strict=True)]
        hashes = [future.result() for future in found]
    shutil.rmtree(folder)
    before, after = hashes[0] | hashes[2], hashes[1] | hashes[3]
    for name in before:
        print(f"{'same' if before[name] == after[name] else 'DIFFERENT':10} {after[name]}  {name}")
    different = [name for name in before if before[name] != after[name]]
    seconds = time.perf_counter() - began
    print(f"{len(before) - len(different)} of {len(before)} recipes end in the same state; {seconds:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
