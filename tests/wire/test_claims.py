"""W4: a short message that claims to be huge is refused at once, and nothing is allocated for it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import psutil
import pytest
import torch

from polyclinic.core.errors import Refused
from polyclinic.core.types import Part
from polyclinic.federation import update_check
from polyclinic.storage import messages
from tests.wire.frames import RUN, body_of, framed, sealed

TIB = 1 << 40
MEGABYTE = 1 << 20
FIELDS = {"run": RUN, "round": 1, "site": "north", "examples": 1}


def table_of(length: int) -> bytes:
    """192 bytes in all: as short a header as there can be, and a body whose table claims to be `length` bytes long."""
    body = length.to_bytes(8, "little") + b"{" + bytes(55)
    return framed(b'{"body":"%s","schema":1}' % hashlib.sha256(body).hexdigest().encode(), body)


def tensor_of(dtype: str, shape: list[int], size: int) -> bytes:
    """192 bytes of prefix and header, then a table whose only tensor claims `size` bytes that are not there."""
    return sealed({}, body_of({"m/a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}, b""))


CLAIMS: dict[str, tuple[str, bytes]] = {
    "a header of 4 GiB": ("header", messages.PREFIX.pack(messages.MAGIC, (1 << 32) - 1, bytes(32)) + bytes(152)),
    "a table of 4 TiB": ("tensors", table_of(4 * TIB)),
    "a table of 16 EiB": ("tensors", table_of((1 << 64) - 1)),
    "a tensor of 4 TiB": ("tensors", tensor_of("F32", [TIB], 4 * TIB)),
    "a square of 4 TiB": ("tensors", tensor_of("U8", [1 << 21, 1 << 21], 4 * TIB)),
    "2^768 elements": ("tensors", tensor_of("U8", [(1 << 48) - 1] * 16, ((1 << 48) - 1) ** 16)),
    "4 TiB in no bytes": ("tensors", tensor_of("F32", [TIB], 0)),
    "an empty tensor of 16 square TiB": ("shape", tensor_of("F32", [4 * TIB, 4 * TIB, 0], 0)),
}


def refuse(kind: str, read: Callable[[], object]) -> float:
    """Seconds until it was refused."""
    began = time.perf_counter()
    with pytest.raises(Refused) as refusal:
        read()
    assert refusal.value.kind == kind
    return time.perf_counter() - began


@pytest.mark.parametrize(("kind", "message"), CLAIMS.values(), ids=CLAIMS.keys())
def test_a_huge_claim_is_refused_at_once(kind: str, message: bytes) -> None:
    assert len(message) < 1024
    process = psutil.Process()
    refuse(kind, lambda: messages.decode(message))
    before = process.memory_info().rss
    seconds = [refuse(kind, lambda: messages.decode(message)) for _ in range(20)]
    assert process.memory_info().rss - before <= MEGABYTE
    assert sorted(seconds)[10] < 0.010


def test_sizes_are_what_the_names_say() -> None:
    assert len(table_of(4 * TIB)) == 192
    assert tensor_of("F32", [TIB], 4 * TIB).index(b'{"m/a"') == 192 + 8


def test_a_table_may_not_hide_in_the_room_for_tensors() -> None:
    """JSON grows about twentyfold when it is read. The room for 16 MB of weights must not hold 16 MB of it."""
    like = {"model": {"w": torch.zeros(4 * MEGABYTE)}}
    expected = update_check.ExpectedUpdate(RUN, 1, "north", like, like, examples=1)
    bomb = sealed(FIELDS, body_of(b'{"model/w": [' + b"[],[]," * (2 * MEGABYTE) + b"[]]}", b""))
    assert 12 * MEGABYTE < len(bomb) < expected.max_bytes
    process = psutil.Process()
    before = process.memory_info().rss
    assert refuse("tensors", lambda: update_check.check_update(bomb, expected)) < 0.5
    assert process.memory_info().rss - before <= 4 * MEGABYTE


def test_a_header_may_not_outgrow_its_limit() -> None:
    """Readers without an expected size, such as a site, hold to the header's own."""
    body = messages.encode_body({})
    padding = "x" * (messages.MAX_HEADER - 200)
    assert messages.decode(messages.encode_with_body({"padding": padding}, body)).fields["padding"] == padding
    refuse("header", lambda: messages.decode(messages.encode_with_body({"padding": padding + "x" * 200}, body)))


def test_an_honest_message_of_many_tensors_has_room() -> None:
    """Long names, a long report and many tensors: what a site of a deep network sends stays within the limits."""
    model = {f"features.denseblock{i}.layer.{'é' * 40}": torch.full((1,), i / 7) for i in range(2000)}
    row = {"model": "global", "part": "validation", "n": 5, "loss": 0.1234567890123456, "accuracy": 0.1234567890123456}
    fields = {**FIELDS, "report": [{**row, "model": f"site {i}"} for i in range(200)]}
    reports: list[tuple[str, Part]] = [(f"site {i}", "validation") for i in range(200)]
    expected = update_check.ExpectedUpdate(RUN, 1, "north", {"model": model}, {"model": model}, reports=reports)
    reply = update_check.check_update(messages.encode(fields, {"model": model}), expected)
    assert reply.drift == 0.0
