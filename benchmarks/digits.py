"""`recipes/adaptive-dp/beyond.yaml`, all methods and seeds side by side, each in a process of its own.

python -m benchmarks.digits OUT --validation    # trains on the first 50,000 training images, tries on the others
python -m benchmarks.digits OUT                 # the official test images: only when everything has been chosen
polyclinic compare recipes/adaptive-dp/beyond.yaml --seeds 5 --out OUT    # the table; finished runs are not repeated
"""

import argparse
import gzip
import multiprocessing
import struct
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from polyclinic import Recipe
from polyclinic.core import slugify
from polyclinic.data.data_dir import data_folder
from polyclinic.runs.experiment import run

RECIPE = Path(__file__).parent.parent / "recipes" / "adaptive-dp" / "beyond.yaml"
HEADERS = {"images-idx3": struct.Struct(">IIII"), "labels-idx1": struct.Struct(">II")}
TRAINED = 50_000


def write_validation_set(folder: Path) -> Path:
    """Write a data folder in which MNIST's last 10,000 training images are the test part; return it."""
    (folder / "mnist").mkdir(parents=True, exist_ok=True)
    for kind, header in HEADERS.items():
        with gzip.open(data_folder(None) / "mnist" / f"train-{kind}-ubyte.gz") as file:
            magic, total, *shape = header.unpack(file.read(header.size))
            rows = np.frombuffer(file.read(), np.uint8).reshape(total, -1)
        for part, chosen in (("train", rows[:TRAINED]), ("t10k", rows[TRAINED:])):
            content = header.pack(magic, len(chosen), *shape) + chosen.tobytes()
            (folder / "mnist" / f"{part}-{kind}-ubyte").write_bytes(content)
    return folder


def run_method(method: str, seed: int, out: Path, data: Path | None) -> tuple[str, float]:
    recipe = Recipe.load(RECIPE).method_recipe(method).model_copy(update={"seed": seed})
    found = run(recipe, out / slugify(method) / f"seed-{seed}", data).summary.headline
    assert found is not None
    print(f"{method}, seed {seed}: {found.scores.value('accuracy'):.4f}", flush=True)
    return method, found.scores.value("accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="*", default=list(Recipe.load(RECIPE).methods))
    parser.add_argument("--at-once", type=int, default=15, help="processes that run at the same time")
    given = parser.parse_args()
    data = write_validation_set(given.out / "data") if given.validation else None
    found = defaultdict(list)
    with ProcessPoolExecutor(given.at_once, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(run_method, method, seed, given.out, data)
            for method in given.methods
            for seed in range(given.seeds)
        ]
        for job in jobs:
            method, accuracy = job.result()
            found[method].append(100 * accuracy)
    for method, values in found.items():
        print(f"{method}: {np.mean(values):.2f} ± {np.std(values):.2f} ({', '.join(f'{v:.2f}' for v in values)})")


if __name__ == "__main__":
    main()
