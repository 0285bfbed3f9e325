"""How fast messages are made, read and shrunk, beside the machine's own speed.

    python -m benchmarks.wire [--repeats 40] [--json FILE]

One message of 13.4 MiB: 3.5 million parameters in 262 tensors. `encode` makes a message with its checksum, as a site
does; `pack` puts another header before a body made once, as the server does for all sites but the first; `accept` is
all that the server does with a reply but averaging it. `quantise` and `dequantise + add` are the two passes of the
stage at 8 bits, in blocks, counted in bytes of float32 that go in (for a difference: half of what is read) or are added
to; `there` is the whole stage at a site, tensors apart. Floors: a copy of as many bytes (counted once) and SHA-256. CPU
time of one thread, all interleaved, medians; memory is kept between repeats, as every engine does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.aggregation import MOVE, PARAMETERS, TENSORS, model
from polyclinic.core.rng import Stream
from polyclinic.federation import update_check
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.privacy.transforms.quantise import Quantise, dequantise_into, quantise_vector, split_blocks
from polyclinic.storage import messages

BYTES = 4 * (PARAMETERS // TENSORS * TENSORS)


def works() -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    fields = {"run": "run", "round": 1, "site": "site", "examples": 10}
    trained, body = model(MOVE), messages.encode_body(model(MOVE))
    message, received = messages.encode_with_body(fields, body), messages.decode(messages.encode({}, model())).tensors
    expected = update_check.ExpectedUpdate("run", 1, "site", received, received, frozenset({"buffers"}), 10)
    generator = Stream(0).generator()
    new, old = (torch.randn(BYTES // 4, generator=generator) for _ in range(2))
    source, target, total = torch.randn(BYTES // 4, generator=generator), torch.empty(BYTES // 4), old.clone()
    runs = split_blocks(BYTES // 4, Quantise().block)
    values, scales = quantise_vector(new, old, runs)
    return {
        "copy": lambda: target.copy_(source),
        "sha256": lambda: hashlib.sha256(body.data),
        "encode": lambda: messages.encode(fields, trained),
        "pack": lambda: messages.encode_with_body(fields, body),
        "accept": lambda: update_check.check_update(message, expected),
        "quantise an update, nearest": lambda: quantise_vector(new, None, runs),
        "difference + quantise, nearest": lambda: quantise_vector(new, old, runs),
        "difference + quantise, stochastic": lambda: quantise_vector(new, old, runs, generator=generator),
        "dequantise + add": lambda: dequantise_into(total, values, scales, runs),
        "there, stochastic": lambda: Quantise().encode(trained, received, Stream(0)),
    }


def measure(repeats: int) -> list[dict[str, Any]]:
    todo = works()
    taken: dict[str, list[float]] = {name: [] for name in todo}
    for number in range(repeats + 2):
        for name, work in todo.items():
            began = time.process_time()
            work()
            if number >= 2:
                taken[name].append(time.process_time() - began)
    middle = {name: statistics.median(values) for name, values in taken.items()}
    return [{"what": name, "ms": seconds * 1e3, "gb_per_s": BYTES / seconds / 1e9} for name, seconds in middle.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every engine does
    keep_freed_memory()
    rows = measure(options.repeats)
    print(f"{BYTES / 2**20:.1f} MiB of float32 in {TENSORS} tensors")
    print(f"{'':<34}{'ms':>8}{'GB/s':>8}")
    for row in rows:
        print(f"{row['what']:<34}{row['ms']:>8.2f}{row['gb_per_s']:>8.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
