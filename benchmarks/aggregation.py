"""What averaging many updates costs the server: time for each, and memory in copies of the model.

    python -m benchmarks.aggregation [--updates 1000] [--json FILE]

A 3.5-million-parameter model (MobileNetV2's size, 262 tensors). "mean" is the streaming mean alone, of messages whose
checksum was just taken, as in a round. "whole way" is all that a round does with each update: decode, checksum,
validation, streaming mean; it runs in a forked process, and its memory is that process's peak above what it held with
the model and all code in use, so the message under way counts as one copy and the mean as another. What the same round
takes with next to no model (a note about every site) is told apart.
Floors: bytes that the mean must read and write at the speed of a plain copy; the checksum alone. CPU time, one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from polyclinic.algorithms.base import RunningMean
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.flat_tensors import contiguous_vector
from polyclinic.core.jobs import Failure, Federation
from polyclinic.core.types import Bundle
from polyclinic.federation.progress import Progress, RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal

TENSORS, PARAMETERS = 262, 3_500_000
MESSAGES, REPEATS = 4, 50
MOVE = 0.01


def model(shift: float = 0.0, parameters: int = PARAMETERS) -> Bundle:
    shape = (parameters // TENSORS,)
    return {"model": {f"layer-{i:03}": torch.full(shape, i / TENSORS + shift) for i in range(TENSORS)}, "buffers": {}}


class Recorded:
    """Replies made from one body with each site's own header: what 1,000 sites would send, one at a time."""

    def __init__(self, body: messages.Body) -> None:
        self.body, self.seconds = body, 0.0
        """Making the messages is the sites' work: their CPU-seconds are not counted."""

    def exchange(
        self, round: int, sent: Mapping[str, bytes], deadline: float | None
    ) -> Iterable[tuple[str, bytes | Failure]]:
        for site in sent:
            began = time.process_time()
            fields = {"run": "run", "round": round, "site": site, "examples": 10}
            message = [messages.encode_with_body(fields, self.body)]
            self.seconds += time.process_time() - began
            yield site, message.pop()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `work` in a forked process, whose peak memory begins at what is held now."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text)
    return found


def a_round(updates: int, parameters: int = PARAMETERS) -> Callable[[], dict[str, Any]]:
    """A round of FedAvg with so many replies, ready to be played."""
    engine = Recorded(messages.encode_body(model(MOVE, parameters)))
    state = messages.decode(
        messages.encode({}, model(0.0, parameters))
    ).tensors  # side by side, as after every round but one
    sites = {f"site-{i}": 10 for i in range(updates)}
    loop = Rounds(Federation(("a", "b"), sites, state), FedAvg(), engine, RoundOptions(rounds=1), RamJournal())

    def play() -> dict[str, Any]:
        baseline, began = peak_bytes(), time.process_time()
        found, _ = loop.play_round(state, Progress())
        seconds, held = time.process_time() - began - engine.seconds, peak_bytes() - baseline
        error = max(float((found["model"][n] - t - MOVE).abs().max()) for n, t in state["model"].items())
        return {"bytes": held, "ms_per_update": seconds / updates * 1e3, "largest_error": error}

    return play


def whole_way(updates: int) -> dict[str, Any]:
    def measured(parameters: int) -> dict[str, Any]:
        play, warm_up = a_round(updates, parameters), a_round(3, TENSORS)
        # A forked process maps its libraries anew: without the warm-up they would be counted as memory of the round.
        return in_fork(lambda: warm_up() and play())

    notes, found = measured(TENSORS), measured(PARAMETERS)
    return {
        "updates": updates,
        "copies_above_baseline": (found["bytes"] - notes["bytes"]) / (PARAMETERS * 4),
        "notes_mb": notes["bytes"] / 1e6,
        "whole_ms_per_update": found["ms_per_update"],
        "largest_error": found["largest_error"],
    }


def timed(work: Callable[[Any], object], given: Any) -> float:
    began = time.process_time()
    work(given)
    return (time.process_time() - began) * 1e3


def mean_alone() -> dict[str, Any]:
    """Milliseconds for one more update, interleaved with a plain copy and a checksum of as many bytes."""
    datas = [messages.encode({}, model(MOVE * i)) for i in range(MESSAGES)]
    groups = [messages.decode(data).tensors["model"] for data in datas]
    target, mean = torch.zeros(PARAMETERS // TENSORS * TENSORS), RunningMean()
    mean.add(groups[0])
    taken: dict[str, list[float]] = {"mean": [], "after": [], "copy": [], "sha256": []}
    for group in islice(cycle(groups), REPEATS):
        taken["mean"].append(timed(mean.add, group))
    for data, group in islice(cycle(zip(datas, groups, strict=True)), REPEATS):
        vector = contiguous_vector(list(group.values()))
        assert vector is not None
        taken["sha256"].append(timed(hashlib.sha256, data))
        taken["after"].append(timed(mean.add, group))
        taken["sha256"].append(timed(hashlib.sha256, data))
        taken["copy"].append(timed(target.copy_, vector))
    middle = {name: statistics.median(values) for name, values in taken.items()}
    copied, moved = 2 * 4 * PARAMETERS, 3 * 4 * PARAMETERS
    return {
        "mean_ms_per_update": middle["mean"],
        "mean_after_checksum_ms": middle["after"],
        "mean_floor_ms": middle["copy"] * moved / copied,
        "sha256_ms": middle["sha256"],
        "copy_gb_per_s": copied / middle["copy"] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = {"parameters": PARAMETERS} | whole_way(options.updates) | mean_alone()
    print(f"{options.updates} updates of {PARAMETERS:,} parameters; copy {row['copy_gb_per_s']:.1f} GB/s")
    print(f"{'':<12}{'ms/update':>11}{'floor ms':>10}{'':>3}of what the floor is")
    print(f"{'mean':<12}{row['mean_ms_per_update']:>11.2f}{row['mean_floor_ms']:>10.2f}   three passes over memory")
    print(f"{'… after':<12}{row['mean_after_checksum_ms']:>11.2f}{'':>10}   its checksum, which empties the cache")
    print(f"{'whole way':<12}{row['whole_ms_per_update']:>11.2f}{row['sha256_ms']:>10.2f}   the checksum alone")
    print(f"memory: {row['copies_above_baseline']:.2f} model copies, and {row['notes_mb']:.1f} MB of notes on sites")
    print(f"largest error {row['largest_error']:.1e}")
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
