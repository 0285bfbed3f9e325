"""Ways to damage a frame. Checksums are made true again afterwards, so that the damage reaches the inner parsers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from polyclinic.core.types import SiteId
from tests.wire.frames import REGISTERED, Reply, body_of, framed, honest, sealed

Mutation = Callable[[random.Random, Reply], bytes]
NASTY: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    3,
    1 << 31,
    (1 << 48) - 1,
    1 << 63,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "north",
    "F32",
    "I64",
    "BOOL",
    "\ud800",
    "\x00",
    "model/layer.bias",
    "x" * 300,
    [],
    {},
    [0, 12],
    [3],
    [[[[]]]],
    {"n": 1},
    [{"n": 1, "loss": 1e308}],
)
SNIPPETS = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"1e999",
    b"NaN",
    b"-",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"[" * 2000,
)


def flip(chance: random.Random, data: bytes) -> bytes:
    """One to four bits."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4) if data else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def splice(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """The beginning of one, the end of another."""
    return data[: chance.randint(0, len(data))] + other[chance.randint(0, len(other)) :]


def scribble(chance: random.Random, data: bytes) -> bytes:
    """Cut something out, repeat something, or write something in."""
    low, high = sorted(chance.randint(0, len(data)) for _ in range(2))
    choice = chance.randrange(3)
    middle = (b"", data[low:high] * 2, chance.choice(SNIPPETS))[choice]
    return data[:low] + middle + data[low if choice == 2 else high :]


def spoil(chance: random.Random, value: Any) -> Any:
    """Something nasty in the place of a value, or of something within it."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        return spoil_one(chance, value)
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [spoil(chance, v) if i == place else v for i, v in enumerate(value)]
    return chance.choice(NASTY)


def spoil_one(chance: random.Random, values: Mapping[str, Any]) -> dict[str, Any]:
    """Something nasty under one of the keys, seldom under a new one."""
    key = chance.choice(sorted(values)) if chance.random() < 0.9 else str(chance.choice(NASTY))
    return {**values, key: spoil(chance, values.get(key))}


def another(chance: random.Random) -> Reply:
    site: SiteId = chance.choice(sorted(REGISTERED))
    return honest(site, chance.randint(1, 3))


def table_text(reply: Reply) -> bytes:
    return json.dumps(reply.table).encode()


MUTATIONS: dict[str, Mutation] = {
    "bits of the header": lambda chance, reply: framed(flip(chance, reply.header), reply.body),
    "scribbled header": lambda chance, reply: framed(scribble(chance, reply.header), reply.body),
    "spliced headers": lambda chance, r: framed(splice(chance, r.header, another(chance).header), r.body),
    "a field": lambda chance, reply: sealed(spoil_one(chance, reply.fields), reply.body),
    "bits of the table": lambda chance, r: sealed(r.fields, body_of(flip(chance, table_text(r)), r.raw)),
    "scribbled table": lambda chance, r: sealed(r.fields, body_of(scribble(chance, table_text(r)), r.raw)),
    "a line of the table": lambda chance, r: sealed(r.fields, body_of(spoil_one(chance, r.table), r.raw)),
    "spliced bodies": lambda chance, r: sealed(r.fields, splice(chance, r.body, another(chance).body)),
    "bits of the tensors": lambda chance, r: sealed(r.fields, body_of(r.table, flip(chance, r.raw))),
    "bits of the body": lambda chance, r: sealed(r.fields, flip(chance, r.body)),
    "bits of the frame": lambda chance, r: flip(chance, r.frame),
    "spliced frames": lambda chance, r: splice(chance, r.frame, another(chance).frame),
    "random bytes": lambda chance, r: chance.randbytes(chance.randint(0, 600)),
    "random bytes in a frame": lambda chance, r: sealed(r.fields, chance.randbytes(chance.randint(0, 300))),
}
