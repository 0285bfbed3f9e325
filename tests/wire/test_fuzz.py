"""W2: 10,000 damaged payloads a run, the same ones every time. Nothing but `Refused` is raised, no memory is lost."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator

import psutil
import torch
from safetensors.torch import load as read_safetensors

from polyclinic.algorithms.optimisation.fednova import FedNova
from polyclinic.core.errors import Refused
from polyclinic.core.options import Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.federation import update_check
from polyclinic.federation.update_check import check_report
from polyclinic.storage import messages
from tests.wire.frames import Reply, expected, honest
from tests.wire.mutations import MUTATIONS

UPDATES, OTHERS = 8_000, 2_000
MEGABYTE = 1 << 20
ALGORITHM = FedNova(Training(batch=16))
PARSERS = {"header", "checksum", "json", "tensors", "dtype", "shape"}
GATES = {
    "schema",
    "name",
    "run",
    "site",
    "round",
    "examples",
    "kind",
    "missing",
    "finite",
    "norm",
    "scalars",
    "report",
    "accepted",
}


def damaged(reply: Reply, number: int, name: str) -> Iterator[bytes]:
    chance, mutations = random.Random(Stream(2026, (name,)).integer()), list(MUTATIONS.values())
    return (mutations[i % len(mutations)](chance, reply) for i in range(number))


def verdict(data: bytes, check: Callable[[bytes], None]) -> str:
    try:
        check(data)
    except Refused as refusal:
        return refusal.kind if str(refusal).isprintable() else "unprintable"
    return "accepted"


def survey(payloads: Iterator[bytes], check: Callable[[bytes], None]) -> tuple[Counter[str], int]:
    """How often each kind was refused, and by how many bytes the process grew at most since the first hundred."""
    kinds: Counter[str] = Counter()
    process, before, most = psutil.Process(), 0, 0
    for number, data in enumerate(payloads):
        kinds[verdict(data, check)] += 1
        if number % 100 == 0:
            resident = process.memory_info().rss
            before, most = before if number > 100 else resident, max(most, resident)
    return kinds, most - before


def check_update(data: bytes) -> None:
    """All gates between a site's bytes and the model. What passes them must be as sound as what an honest site sends.

    Some damage is harmless: another value, another order of keys.
    """
    reply = update_check.check_update(data, expected())
    ALGORITHM.check_update(reply.update)
    rows = check_report(reply.fields, expected())
    tensors, like = reply.update.tensors, expected().like
    assert {k: {n: (t.shape, t.dtype) for n, t in group.items()} for k, group in tensors.items()} == {
        k: {n: (t.shape, t.dtype) for n, t in group.items()} for k, group in like.items()
    }
    assert all(bool(torch.isfinite(t).all()) for group in tensors.values() for t in group.values())
    assert 0 < reply.update.examples <= expected().examples
    assert reply.drift is not None
    assert reply.drift <= expected().max_norm
    json.dumps(rows, allow_nan=False)
    check_alike(tensors, data)


def check_message(data: bytes) -> None:
    """What a site reads from the server and a run from its own disk; it can be written again as it was read."""
    message = messages.decode(data)
    check_alike(message.tensors, data)
    again = messages.decode(messages.encode(message.fields, message.tensors))
    assert messages.hash_tensors(again.tensors) == messages.hash_tensors(message.tensors)


def check_alike(tensors: Bundle, data: bytes) -> None:
    """The library whose format it is reads the same from the same bytes, but for JSON's −0, which it does not read."""
    _, length, _ = messages.PREFIX.unpack_from(data)
    theirs = read_safetensors(data[messages.PREFIX.size + length :].replace(b"[-0", b"[ 0"))
    assert messages.hash_tensors(messages.unflatten(theirs)) == messages.hash_tensors(tensors)


def test_damaged_updates_are_refused_or_sound() -> None:
    kinds, growth = survey(damaged(honest(), UPDATES, "updates"), check_update)
    assert kinds.total() == UPDATES
    assert "unprintable" not in kinds
    assert kinds.keys() >= PARSERS | GATES, "the fuzzer no longer reaches every check"
    assert growth <= 64 * MEGABYTE


def test_damaged_messages_are_refused_or_sound() -> None:
    """With every dtype, a scalar and an empty tensor."""
    group = {name: torch.ones(2, 3).to(dtype) for name, dtype in messages.DTYPES.items()}
    bundle = {"model": group, "buffers": {"one": torch.tensor(1.5), "none": torch.zeros(0, 3)}}
    kinds, growth = survey(damaged(Reply({"round": 3, "ü": "é"}, bundle), OTHERS, "messages"), check_message)
    assert kinds.total() == OTHERS
    assert kinds.keys() >= PARSERS | {"accepted"}
    assert growth <= 64 * MEGABYTE
