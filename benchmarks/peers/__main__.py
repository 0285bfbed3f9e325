"""Polyclinic against other frameworks on the CPU: the same work, each in its own environment.

    python -m benchmarks.peers [--workloads A,B,enh,null] [--peers flower,fedlab,...] [--rounds 10] [--repeats 3]
                               [--environments DIR] [--pfllib DIR] [--shipped] [--json FILE]

All play FedAvg: A is 100 clients × 200 images 1×28×28, 10 a round, batch 32, one epoch of SGD, small CNN; B is
50 × 600, 5 a round, batch 64; enh is A with the GroupNorm CNN; null is a tiny MLP, 8 images a client, 10 a round.
Nobody evaluates. One thread, one client at a time. CPU-seconds are those of all processes of a side, memory is the
peak of their summed PSS (see tree.py). `s/round` is the mean from the third round on, `whole run` includes start-up.
Medians over the repeats; sides take turns, the order moves on each time; `× ours` is the median of the ratios within a
repeat. `loss` is that of the global model on 1,000 images before and after: it did train.
The second table gives the others the arithmetic of our training step (channels last, freed memory is kept): what is
left are start-up, overhead and memory.

Environments are made on first use (the registry is needed then); all share this interpreter's torch. PFLlib is not on
the registry: name a copy of github.com/TsingZ0/PFLlib with --pfllib.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import tree

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = {"A": 10, "B": 10, "enh": 10, "null": 30}
LIMIT = 1800.0


@dataclass(frozen=True)
class Peer:
    title: str
    requirements: tuple[str, ...] = ()
    bar: float | None = None
    """How many times our CPU-seconds per round it should take on A at least."""


PEERS = {
    "fedlab": Peer("FedLab 1.3", ("fedlab==1.3.0",), 1.5),
    "pfl_research": Peer("pfl-research 0.6", ("pfl[pytorch]==0.6.0",), 1.65),
    "pfllib": Peer("PFLlib", ("h5py==3.14.0",), 1.75),
    "flower": Peer("Flower 1.41 on Ray", ("flwr==1.41.0", "ray==2.55.1"), 1.9),
    "nvflare": Peer("NVFlare 2.9", ("nvflare==2.9.0",), 2.0),
}
HERE = {"ours": Peer("polyclinic"), "bare": Peer("bare PyTorch loop")}
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class Side:
    name: str
    tuned: bool


class NotMeasuredError(Exception):
    """Why a side has no figures, in one line."""


def interpreter(name: str, environments: Path) -> Path:
    """The Python of a side's environment, which is made if it is not there."""
    if name in HERE:
        return Path(sys.executable)
    folder, wanted = environments / name, " ".join(PEERS[name].requirements)
    done = folder / "installed"
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {wanted} in {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        _called([sys.executable, "-m", "venv", str(folder)])
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "torch.pth").write_text(f"{_torch_folder()}\n")
        _called([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *PEERS[name].requirements])
        done.write_text(wanted)
    return folder / "bin/python"


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotMeasuredError("torch is not installed here")
    return Path(spec.origin).parents[1]


def _called(command: list[str]) -> str:
    # Without PYTHONPATH: pip would take what lies there for installed.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | QUIET
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode != 0:
        raise NotMeasuredError(last_line(done.stderr or done.stdout))
    return done.stdout


def last_line(text: str) -> str:
    """Of what a failed command printed: the last line that names an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "ERROR" in line]
    return ([*lines, "ended without a word"] if not lines else errors or lines)[-1][:160]


def work(deed: str, workload: str, folder: Path) -> str:
    return _called([sys.executable, "-m", "benchmarks.peers.workload", deed, workload, str(folder)])


def measure(side: Side, workload: str, rounds: int, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of one side, in a folder of its own."""
    if side.name == "pfllib" and options.pfllib is None:
        raise NotMeasuredError("not measured: not on the registry; name a copy with --pfllib")
    python = interpreter(side.name, options.environments)
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for part in ("images.npy", "labels.npy"):
            (folder / part).symlink_to(data / part)
        environment = {**os.environ, **QUIET, "POLYCLINIC_PEERS_MARKS": str(folder / "marks")}
        environment |= {"FLWR_HOME": str(folder / "flwr"), "POLYCLINIC_PEERS_PFLLIB": str(options.pfllib)}
        inherited = [os.environ.get("PYTHONPATH", "")] if side.name == "ours" else []
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *inherited])
        command = [str(python), "-m", f"benchmarks.peers.{side.name}", "--workload", workload]
        command += ["--rounds", str(rounds), "--folder", str(folder), *(["--tuned"] if side.tuned else [])]
        measured = tree.run(command, environment, folder / "marks", folder / "log", LIMIT)
        return figures(measured, workload, folder)


def figures(measured: tree.Measured, workload: str, folder: Path) -> dict[str, Any]:
    steady = measured.steady()
    if measured.status != 0 or steady is None or not (folder / "weights.npz").exists():
        why = "took too long" if measured.status is None else last_line((folder / "log").read_text(errors="replace"))
        raise NotMeasuredError(f"failed ({measured.status}): {why}")
    seen: dict[str, float] = json.loads(work("judge", workload, folder))
    return {"s_per_round": steady, "whole_run_s": measured.cpu, "peak_mb": measured.peak / 1e6, **seen}


def interleaved(workload: str, sides: list[Side], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every side `repeats` times, in turn; one that fails once is not tried again."""
    rounds = options.rounds or ROUNDS[workload]
    taken: dict[Side, list[dict[str, Any]]] = {side: [] for side in sides}
    failed: dict[Side, str] = {}
    with tempfile.TemporaryDirectory(prefix="peers-data-") as name:
        work("prepare", workload, Path(name))
        for number in range(options.repeats):
            shift = number * len(sides) // options.repeats
            for side in sides[shift:] + sides[:shift]:
                if side in failed:
                    continue
                try:
                    taken[side].append(measure(side, workload, rounds, Path(name), options))
                except NotMeasuredError as reason:
                    failed[side] = str(reason)
                print(f"{workload} {number + 1}/{options.repeats} {side.name}", end=" ", file=sys.stderr)
                print("tuned" if side.tuned else "", failed.get(side, ""), file=sys.stderr, flush=True)
    ours = taken[Side("ours", False)]
    return [row(side, workload, rounds, taken[side], ours, failed.get(side)) for side in sides]


def row(
    side: Side, workload: str, rounds: int, runs: list[dict[str, Any]], ours: list[dict[str, Any]], error: str | None
) -> dict[str, Any]:
    found = {"workload": workload, "side": side.name, "tuned": side.tuned, "rounds": rounds, "repeats": len(runs)}
    if error is not None or not runs:
        return {**found, "error": error}
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    pairs = list(zip(runs, ours, strict=False))
    for key in ("s_per_round", "whole_run_s", "peak_mb"):
        middle[f"{key}_times_ours"] = statistics.median(a[key] / b[key] for a, b in pairs) if pairs else None
    return {**found, **middle, "runs": runs}


def show(rows: list[dict[str, Any]], tuned: bool) -> None:
    chosen = [row for row in rows if row["tuned"] == tuned or row["side"] == "ours"]
    print("\n" + ("given the same tuned step" if tuned else "as shipped") + ", CPU-seconds of all processes")
    columns = f"{'s/round':>9}{'× ours':>8}{'bar':>7}{'whole run':>11}{'× ours':>8}{'peak MB':>9}{'loss':>15}"
    print(f"{'workload':<9}{'':<19}{columns}")
    for row in chosen:
        print(f"{row['workload']:<9}{({**PEERS, **HERE})[row['side']].title:<19}{_cells(row)}")


def _cells(row: dict[str, Any]) -> str:
    if "s_per_round" not in row:
        return f"  {row['error']}"[:72]
    bar = PEERS[row["side"]].bar if row["side"] in PEERS and row["workload"] == "A" and not row["tuned"] else None
    ratios = (row[f"{key}_times_ours"] for key in ("s_per_round", "whole_run_s"))
    times = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    loss = f"{row['loss_before']:.2f} → {row['loss_after']:.2f}"
    return (
        f"{row['s_per_round']:>9.4f}{times[0]:>8}{'' if bar is None else f'≥ {bar}':>7}"
        f"{row['whole_run_s']:>11.1f}{times[1]:>8}{row['peak_mb']:>9.0f}{loss:>15}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(ROUNDS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, help="default: 10; null 30")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache/polyclinic/peers")
    parser.add_argument("--pfllib", type=Path)
    parser.add_argument("--shipped", action="store_true", help="only the first table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for asked, known in ((options.workloads, ROUNDS), (options.peers, PEERS)):
        if unknown := set(asked.split(",")) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return options


def main() -> None:
    options = arguments()
    names = ["bare", *options.peers.split(",")]
    sides = [Side("ours", False), *(Side(name, False) for name in names)]
    if not options.shipped:
        sides += [Side(name, True) for name in names]
    rows = [row for workload in options.workloads.split(",") for row in interleaved(workload, sides, options)]
    for tuned in [False] if options.shipped else [False, True]:
        show(rows, tuned)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
