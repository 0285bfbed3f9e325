"""How much memory the server needs to average many updates, in copies of the model, and how long one takes.

    python -m benchmarks.aggregation [--updates 1000] [--json FILE]

A 3.5-million-parameter model (MobileNetV2's size, 262 tensors); every update passes the whole way: decode, checksum,
validation, streaming mean. Memory is the process's peak above what it held with the model and one message in hand.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from polyclinic import wire
from polyclinic.algorithms.fedavg import FedAvg
from polyclinic.core import Bundle, Failure, Federation
from polyclinic.journal import RamJournal
from polyclinic.rounds import Progress, Rounds, Rules

TENSORS, PARAMETERS = 262, 3_500_000


def model() -> Bundle:
    size = PARAMETERS // TENSORS
    return {"model": {f"layer-{i}": torch.full((size,), i / TENSORS) for i in range(TENSORS)}, "buffers": {}}


class Recorded:
    """Replies made from one body with each site's own header: what 1,000 sites would send, one at a time."""

    def __init__(self, body: wire.Body) -> None:
        self.body = body

    def exchange(
        self, round: int, sent: Mapping[str, bytes], deadline: float | None
    ) -> Iterable[tuple[str, bytes | Failure]]:
        for site in sent:
            yield site, wire.pack({"run": "run", "round": round, "site": site, "examples": 10}, self.body)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = model()
    moved = {"model": {n: t + 0.01 for n, t in start["model"].items()}, "buffers": {}}
    engine = Recorded(wire.encode_body(moved))
    del moved
    sites = {f"site-{i}": 10 for i in range(options.updates)}
    loop = Rounds(Federation(("a", "b"), sites, start), FedAvg(), engine, Rules(rounds=1), RamJournal())
    baseline, began = peak_bytes(), time.process_time()
    state, _ = loop.play(start, Progress())
    seconds, copies = time.process_time() - began, (peak_bytes() - baseline) / (PARAMETERS * 4)
    error = max(float((state["model"][n] - t - 0.01).abs().max()) for n, t in start["model"].items())
    row = {
        "updates": options.updates,
        "parameters": PARAMETERS,
        "copies_above_baseline": copies,
        "ms_per_update": seconds / options.updates * 1e3,
        "largest_error": error,
    }
    print(
        f"{options.updates} updates of {PARAMETERS:,} parameters: {copies:.2f} model copies above the baseline, ",
        end="",
    )
    print(f"{row['ms_per_update']:.1f} ms CPU per update (decode, checksum, validate, average), error {error:.1e}")
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
