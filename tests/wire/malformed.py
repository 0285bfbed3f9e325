"""The catalogue of malformed updates: by name, under which kind each must be refused, and how it is made.

Checksums are true unless the case is about checksums, so that each case reaches the check it is meant for.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as write_safetensors
from torch import Tensor

from polyclinic.core.rng import Stream
from polyclinic.storage import messages
from tests.wire.frames import Reply, body_of, framed, sealed

Make = Callable[[Reply], bytes]
W, B = "layer.weight", "layer.bias"
BIAS = f"model/{B}"


def fields(**changes: Any) -> Make:
    return lambda reply: sealed({**reply.fields, **changes}, reply.body)


def without(name: str) -> Make:
    return lambda reply: sealed({k: v for k, v in reply.fields.items() if k != name}, reply.body)


def later(rounds: float) -> Make:
    return lambda reply: fields(round=reply.fields["round"] + rounds)(reply)


def row(**changes: Any) -> Make:
    """Another row in the report; None: left out."""

    def make(reply: Reply) -> bytes:
        cells = {**reply.fields["report"][0], **changes}
        return fields(report=[{k: v for k, v in cells.items() if v is not None}])(reply)

    return make


def header(change: Callable[[bytes], bytes]) -> Make:
    return lambda reply: framed(change(reply.header), reply.body)


def field_text(text: str) -> Make:
    """One more field, as text: for what no JSON writer would write."""
    return header(lambda found: found[:-1] + b", " + text.encode() + b"}")


def tensors(kind: str, **changes: Tensor | None) -> Make:
    """Other tensors; None: left out."""

    def make(reply: Reply) -> bytes:
        group = {**reply.tensors.get(kind, {}), **changes}
        bundle = {**reply.tensors, kind: {name: t for name, t in group.items() if t is not None}}
        return replace(reply, tensors=bundle).frame

    return make


def spoilt(value: float) -> Make:
    """One entry of a weight is `value`."""

    def make(reply: Reply) -> bytes:
        weight = reply.tensors["model"][W].clone()
        weight[1, 2] = value
        return tensors("model", **{W: weight})(reply)

    return make


def table(change: Callable[[dict[str, Any]], object], raw: Callable[[bytes], bytes] = bytes) -> Make:
    return lambda reply: sealed(reply.fields, body_of(json.dumps(change(reply.table)).encode(), raw(reply.raw)))


def entry(**changes: Any) -> Make:
    """Another line for the bias in the table of tensors, the bytes as they were; None: left out."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        line = {k: v for k, v in {**found[BIAS], **changes}.items() if v is not None}
        return {**found, BIAS: line}

    return table(change)


def table_text(change: Callable[[bytes], bytes]) -> Make:
    return lambda reply: sealed(reply.fields, body_of(change(json.dumps(reply.table).encode()), reply.raw))


def renamed(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda found: {name if key == BIAS else key: line for key, line in found.items()}


def shifted(start: int, end: int) -> Make:
    """The bias said to lie elsewhere: over its neighbour, behind a gap, beyond the end."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        low, high = found[BIAS]["data_offsets"]
        return {**found, BIAS: {**found[BIAS], "data_offsets": [low + start, high + end]}}

    return table(change)


def as_floats(found: dict[str, Any]) -> dict[str, Any]:
    low, high = found[BIAS]["data_offsets"]
    return {**found, BIAS: {**found[BIAS], "data_offsets": [low, float(high)]}}


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def npz(reply: Reply) -> bytes:
    file = io.BytesIO()
    np.savez(file, weight=reply.tensors["model"][W].numpy())
    return file.getvalue()


def pickled(reply: Reply) -> bytes:
    return pickle.dumps({name: t.tolist() for name, t in reply.tensors["model"].items()})


def announced(length: int) -> Make:
    """Another length of the header than it has."""
    return lambda reply: messages.PREFIX.pack(messages.MAGIC, length, bytes(32)) + reply.frame[messages.PREFIX.size :]


def noise(size: int) -> bytes:
    generator = Stream(1, ("noise",)).generator()
    return bytes(torch.randint(256, (size,), generator=generator, dtype=torch.uint8).tolist())


NOT_A_MESSAGE: dict[str, tuple[str, Make]] = {
    "empty": ("empty", lambda reply: b""),
    "random bytes": ("format", lambda reply: noise(500)),
    "random bytes behind our magic": ("header", lambda reply: messages.MAGIC + noise(500)),
    "only the magic": ("format", lambda reply: messages.MAGIC),
    "another protocol": ("format", lambda reply: b"PCL2" + reply.frame[4:]),
    "a pickle": ("format", pickled),
    "an npz file": ("format", npz),
    "bare safetensors": ("format", lambda reply: write_safetensors(reply.tensors["model"])),
    "cut in the prefix": ("format", lambda reply: reply.frame[: messages.PREFIX.size - 1]),
    "cut in the header": ("header", lambda reply: reply.frame[: messages.PREFIX.size + 20]),
    "cut behind the header": ("checksum", lambda reply: framed(reply.header, b"")),
    "cut by one byte": ("checksum", lambda reply: reply.frame[:-1]),
    "trailing bytes": ("checksum", lambda reply: reply.frame + b"\0"),
    "two frames": ("checksum", lambda reply: reply.frame * 2),
    "a flipped bit in the header": ("checksum", lambda reply: flipped(reply.frame, messages.PREFIX.size + 5)),
    "a flipped bit in the tensors": ("checksum", lambda reply: flipped(reply.frame, len(reply.frame) - 2)),
    "another body's checksum": ("checksum", lambda reply: framed(reply.header, body_of({}, b""))),
    "a header bomb": ("header", announced((1 << 32) - 1)),
    "a header longer than allowed": ("header", announced(messages.MAX_HEADER + 24)),
    "a header of odd length": ("header", lambda reply: framed(reply.header, reply.body, shift=1)),
    "oversize": ("oversize", fields(padding="x" * 100_000)),
    "oversize by its tensors": ("oversize", tensors("model", extra=torch.zeros(50_000))),
}
HEADER: dict[str, tuple[str, Make]] = {
    "bad JSON": ("json", header(lambda text: text[:-1])),
    "JSON that is a list": ("json", header(lambda text: b"[" + text + b"]")),
    "no JSON at all": ("json", header(lambda text: b"")),
    "not UTF-8": ("json", header(lambda text: text.replace(b"winter", b"w\xffnter"))),
    "UTF-16": ("json", header(lambda text: text.decode().encode("utf-16"))),
    "a byte order mark": ("json", header(lambda text: b"\xef\xbb\xbf" + text)),
    "half a surrogate pair": ("json", field_text(r'"note": "\ud800"')),
    "a key twice": ("json", field_text('"site": "north"')),
    "a NaN in the header": ("json", field_text('"loss": NaN')),
    "an infinity in the header": ("json", field_text('"loss": -Infinity')),
    "a number beyond all": ("json", field_text('"seconds2": 1e999')),
    "an integer of 5,000 digits": ("json", field_text(f'"count": {"9" * 5000}')),
    "lists nested 20,000 deep": ("json", field_text(f'"more": {"[" * 20_000}{"]" * 20_000}')),
    "objects nested 5,000 deep": ("json", field_text('"more": ' + '{"a": ' * 5000 + "1" + "}" * 5000)),
    "no checksum of the body": ("json", header(lambda text: text.replace(b'"body"', b'"b0dy"'))),
    "a stale schema": ("schema", fields(schema=0)),
    "a future schema": ("schema", fields(schema=2)),
    "schema true": ("schema", fields(schema=True)),
    "schema as nested lists": ("schema", fields(schema=[[[[[]]]]])),
    "another run": ("run", fields(run="summer study")),
    "another run by a hard space": ("run", fields(run="winter\u00a0study")),
    "no run": ("run", without("run")),
    "another site": ("site", lambda reply: fields(site="east" if reply.fields["site"] != "east" else "south")(reply)),
    "a site with a Cyrillic letter": ("site", lambda reply: fields(site=reply.fields["site"][:-1] + "һ")(reply)),
    "a site in a list": ("site", lambda reply: fields(site=[reply.fields["site"]])(reply)),
    "a replayed round": ("round", later(-1)),
    "a future round": ("round", later(1)),
    "a fractional round": ("round", later(0.0)),
    "round true": ("round", fields(round=True)),
    "round as text": ("round", lambda reply: fields(round=str(reply.fields["round"]))(reply)),
    "n negative": ("examples", fields(examples=-30)),
    "n zero": ("examples", fields(examples=0)),
    "n 1e9": ("examples", fields(examples=10**9)),
    "n of 400 digits": ("examples", fields(examples=10**400)),
    "n one too many": ("examples", lambda reply: fields(examples=reply.fields["examples"] + 1)(reply)),
    "n fractional": ("examples", fields(examples=5.0)),
    "n true": ("examples", fields(examples=True)),
    "n as text": ("examples", fields(examples="5")),
    "n nested": ("examples", fields(examples=[[5]])),
    "no n": ("examples", without("examples")),
    "scalars in a list": ("scalars", fields(scalars=[1.0])),
    "scalars null": ("scalars", fields(scalars=None)),
    "a scalar of 400 digits": ("scalars", fields(scalars={"steps": 10**400})),
    "a scalar NaN": ("json", fields(scalars={"steps": float("nan")})),
    "a scalar as text": ("scalars", fields(scalars={"steps": "2"})),
    "a scalar true": ("scalars", fields(scalars={"steps": True})),
    "a scalar null": ("scalars", fields(scalars={"steps": None})),
}
REPORT: dict[str, tuple[str, Make]] = {
    "a report that is an object": ("report", fields(report={})),
    "a report that is null": ("report", fields(report=None)),
    "a row that is a list": ("report", fields(report=[["loss", 1.0]])),
    "a row without a count": ("report", row(n=None)),
    "a row with a negative count": ("report", row(n=-1)),
    "a row with a fractional count": ("report", row(n=5.0)),
    "a row with a count of 400 digits": ("report", row(n=10**400)),
    "a metric as text": ("report", row(loss="0.7")),
    "a metric true": ("report", row(accuracy=True)),
    "a metric NaN": ("json", row(loss=float("nan"))),
    "a metric of 400 digits": ("report", row(loss=-(10**400))),
    "a metric nobody knows": ("report", row(charm=1.0)),
    "a row that poses as another round": ("report", row(round=999)),
    "a row that poses as another site": ("report", row(site=7)),
    "a row without a model": ("report", row(model=None)),
    "a row without a part": ("report", row(part=None)),
    "a row of a part that nobody asked about": ("report", row(part="test")),
    "a row of a part that there is not": ("report", row(part="validation2")),
    "a row of a model that this run has not": ("report", row(model="personal")),
    "rows of twenty models": (
        "report",
        lambda reply: fields(report=[{**reply.fields["report"][0], "model": f"m{n}"} for n in range(20)])(reply),
    ),
    "a model's name that is a list": ("report", row(model=["global"])),
    "a model's name that clears the screen": ("report", row(model="global\x1b[2J")),
    "a model's name without end": ("report", row(model="g" * 10_000)),
    "the same row twice": ("report", lambda reply: fields(report=reply.fields["report"] * 2)(reply)),
}
TABLE: dict[str, tuple[str, Make]] = {
    "a table beyond the message": ("tensors", lambda reply: sealed(reply.fields, (1 << 42).to_bytes(8, "little"))),
    "a body of seven bytes": ("tensors", lambda reply: sealed(reply.fields, bytes(7))),
    "no body": ("tensors", lambda reply: sealed(reply.fields, b"")),
    "a table that is no JSON": ("tensors", table_text(lambda text: text[1:])),
    "a table that is a list": ("tensors", table(lambda found: list(found))),
    "a table nested 20,000 deep": ("tensors", table_text(lambda text: b'{"model/a": ' + b"[" * 20_000)),
    "a tensor twice": ("tensors", table_text(lambda text: text.replace(b"model/layer.weight", BIAS.encode()))),
    "half a surrogate in a name": ("tensors", table(renamed("model/\ud800"))),
    "metadata": ("tensors", table(lambda found: {**found, "__metadata__": {"format": "pt"}})),
    "a line that is a list": ("tensors", table(lambda found: {**found, "model/more": [1, 2]})),
    "a line that is null": ("tensors", table(lambda found: {**found, "model/more": None})),
    "a line that says more": ("tensors", entry(strides=[1])),
    "no place": ("tensors", entry(data_offsets=None)),
    "a place without numbers": ("tensors", entry(data_offsets=[])),
    "a place as text": ("tensors", entry(data_offsets="12")),
    "a place in floats": ("tensors", table(as_floats)),
    "overlapping tensors": ("tensors", shifted(-4, -4)),
    "a gap between tensors": ("tensors", shifted(4, 4)),
    "a tensor that ends early": ("tensors", shifted(0, -4)),
    "a tensor at a negative place": ("tensors", shifted(-(1 << 40), -(1 << 40))),
    "bytes that no tensor owns": ("tensors", table(dict, lambda raw: raw + bytes(8))),
    "tensors cut off": ("tensors", table(dict, lambda raw: raw[:-4])),
    "a table of odd length": (
        "tensors",
        lambda reply: sealed(reply.fields, body_of(reply.table, reply.raw, shift=1)),
    ),
    "a claim of 4 TiB": ("tensors", entry(shape=[1 << 40], data_offsets=[0, 1 << 42])),
    "a shape of 2^768": ("tensors", entry(shape=[(1 << 48) - 1] * 16)),
    "a negative shape": ("shape", entry(shape=[-3])),
    "two negative sides": ("shape", entry(shape=[-1, -3])),
    "a fractional shape": ("shape", entry(shape=[3.0])),
    "a shape of truths": ("shape", entry(shape=[True, 3])),
    "a shape as text": ("shape", entry(shape="3")),
    "no shape": ("shape", entry(shape=None)),
    "a shape of 17 sides": ("shape", entry(shape=[1] * 16 + [3])),
    "a side of 400 digits": ("shape", entry(shape=[10**400])),
    "an empty tensor too large to handle": ("shape", entry(shape=[1 << 47, 1 << 47, 0])),
    "a dtype nobody speaks": ("dtype", entry(dtype="C64")),
    "a dtype that is a list": ("dtype", entry(dtype=["F32"])),
    "a dtype that is an object": ("dtype", entry(dtype={"F32": 1})),
    "no dtype": ("dtype", entry(dtype=None)),
    "a name without a kind": ("name", table(renamed("bias"))),
}
TENSORS: dict[str, tuple[str, Make]] = {
    "a NaN": ("finite", spoilt(float("nan"))),
    "an infinity": ("finite", spoilt(float("inf"))),
    "a negative infinity": ("finite", spoilt(float("-inf"))),
    "1e30": ("norm", spoilt(1e30)),
    "the largest float": ("norm", spoilt(torch.finfo(torch.float32).max)),
    "a weight moved too far": ("norm", spoilt(1.1e6)),
    "a statistic that is NaN": ("finite", tensors("buffers", **{"norm.mean": torch.full((3,), torch.nan)})),
    "a counter beyond all counting": ("norm", tensors("buffers", **{"norm.batches": torch.tensor(-(1 << 63))})),
    "a wrong shape": ("shape", tensors("model", **{W: torch.zeros(3, 2)})),
    "a shape that would broadcast": ("shape", tensors("model", **{B: torch.zeros(1)})),
    "a scalar that would broadcast": ("shape", tensors("model", **{B: torch.tensor(0.0)})),
    "a row that would broadcast": ("shape", tensors("model", **{W: torch.zeros(1, 3)})),
    "an empty tensor": ("shape", tensors("model", **{W: torch.zeros(0, 3)})),
    "double precision": ("dtype", tensors("model", **{W: torch.zeros(2, 3, dtype=torch.float64)})),
    "half precision": ("dtype", tensors("model", **{W: torch.zeros(2, 3, dtype=torch.float16)})),
    "integers of the same size": ("dtype", entry(dtype="I32")),
    "a fractional counter": ("dtype", tensors("buffers", **{"norm.batches": torch.tensor(4.0)})),
    "a missing name": ("missing", tensors("model", **{B: None})),
    "a missing kind": ("missing", lambda reply: replace(reply, tensors={"model": reply.tensors["model"]}).frame),
    "no tensors": ("missing", lambda reply: replace(reply, tensors={}).frame),
    "an extra name": ("extra", tensors("model", more=torch.zeros(1))),
    "an extra name, empty": ("extra", tensors("model", **{"": torch.zeros(0)})),
    "an extra name, invisible": ("extra", tensors("model", **{B + "\u200b": torch.zeros(3)})),
    "an extra name that clears the screen": ("extra", tensors("model", **{"\x1b[2J": torch.zeros(3)})),
    "a name in other letters": ("missing", table(renamed("model/layer.biаs"))),
    "a kind that was not agreed": ("kind", tensors("images", first=torch.zeros(3))),
    "a kind without a name": ("kind", table(renamed(f"/{B}"))),
}
MALFORMED = NOT_A_MESSAGE | HEADER | REPORT | TABLE | TENSORS
