"""Bytes ↔ messages. No other code reads data from another machine, in any engine.

A message is one frame: `PCL1 | header length | SHA-256 of header | header (JSON) | body (safetensors)`. The header
holds the body's SHA-256, so every bit is covered. Nothing is executed, nothing is pickled, and nothing larger than what
was announced is ever allocated. Anything else is `Refused` by name.
"""

import hashlib
import json
import math
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyclinic.core import Bundle, Refused, Tensors, flatten_if_contiguous, parse_json

MAGIC = b"PCL1"
SCHEMA = 1
PREFIX = struct.Struct("<4sI32s")
MAX_HEADER = 1 << 20
MAX_TABLE = 100_000_000
"""Bytes of names, shapes and dtypes: safetensors' own limit, for readers that do not know what to expect."""
Fields: TypeAlias = Mapping[str, Any]
"""The JSON fields of a message or statement, of which nothing is checked."""
Entry: TypeAlias = tuple[str, torch.dtype, tuple[int, ...], int]
"""A tensor's name, dtype, shape and bytes."""
ALIGNMENT = 64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    torch.frombuffer(b"\0", dtype=torch.uint8)  # torch warns once per process that messages cannot be written to


@dataclass(frozen=True)
class Message:
    """A decoded frame: JSON fields and tensors by kind."""

    fields: Fields
    tensors: Bundle


@dataclass(frozen=True)
class Body:
    """Encoded tensors, made once and sent to many."""

    data: bytes
    sha256: str


def flatten(bundle: Bundle) -> Tensors:
    if wrong := [kind for kind in bundle if "/" in kind]:
        raise ValueError(f"the kind {wrong[0]!r} has a slash: it would come back as another kind")
    return {f"{kind}/{name}": t for kind, tensors in bundle.items() for name, t in tensors.items()}


def unflatten(tensors: Mapping[str, Tensor]) -> Bundle:
    bundle: Bundle = {}
    for path, tensor in tensors.items():
        kind, slash, name = path.partition("/")
        if not slash:
            raise Refused("name", f"tensor {path[:60]!r} has no kind")
        bundle.setdefault(kind, {})[name] = tensor
    return {kind: flatten_if_contiguous(group) for kind, group in bundle.items()}


def hash_tensors(bundle: Bundle) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values; the order of insertion does not matter."""
    total = hashlib.sha256()
    for path, tensor in sorted(flatten(bundle).items()):
        total.update(json.dumps([path, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def encode_body(bundle: Bundle) -> Body:
    """The tensors as a safetensors file, the widest dtypes first so that every tensor lies at a proper address."""
    data = b"".join(_body_views(bundle))
    return Body(data, hashlib.sha256(data).hexdigest())


def _body_views(bundle: Bundle) -> list[bytes | memoryview]:
    """Return the parts of a body as views of the tensors: no copy."""
    tensors = sorted(flatten(bundle).items(), key=lambda item: (-item[1].element_size(), item[0]))
    table = _encode_table(tuple((path, tensor.dtype, tensor.shape) for path, tensor in tensors))
    views = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for _, t in tensors)
    return [len(table).to_bytes(8, "little"), table, *views]


@lru_cache(maxsize=16)
def _encode_table(layout: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> bytes:
    table, position = {}, 0
    for path, dtype, shape in layout:
        end = position + math.prod(shape) * dtype.itemsize
        table[path] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def encode_with_body(fields: Mapping[str, object], body: Body) -> bytes:
    return b"".join(encode_parts(fields, body))


def encode_parts(fields: Mapping[str, object], body: Body) -> tuple[bytes, bytes]:
    """Return a message as its head and its body, so that messages to many sites can share the body."""
    return b"".join(_encode_head(fields, body.sha256)), body.data


def encode(fields: Mapping[str, object], bundle: Bundle) -> bytes:
    """A message that is sent once: its tensors are copied once, straight into it."""
    pieces, total = _body_views(bundle), hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return b"".join((*_encode_head(fields, total.hexdigest()), *pieces))


def _encode_head(fields: Mapping[str, object], checksum: str) -> tuple[bytes, bytes]:
    header = _encode_header(fields, checksum)
    return PREFIX.pack(MAGIC, len(header), hashlib.sha256(header).digest()), header


def _encode_header(fields: Mapping[str, object], checksum: str) -> bytes:
    header = json.dumps({**fields, "schema": SCHEMA, "body": checksum}, allow_nan=False).encode()
    return header + b" " * (-(PREFIX.size + len(header)) % ALIGNMENT)


def message_size(message: bytes | Message, body: int | None = None) -> int:
    """Return the size of a message in bytes as it is sent; `body`: the bytes of its tensors, if known."""
    if isinstance(message, bytes):
        return len(message)
    header = _encode_header(message.fields, "0" * 2 * hashlib.sha256().digest_size)
    return PREFIX.size + len(header) + (body_size(message.tensors) if body is None else body)


def body_size(bundle: Bundle) -> int:
    return _body_size(tuple((p, t.dtype, t.shape) for p, t in flatten(bundle).items()))


@lru_cache(maxsize=16)
def _body_size(layout: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    values = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in layout)
    return 8 + len(_encode_table(tuple(sorted(layout, key=lambda entry: (-entry[1].itemsize, entry[0]))))) + values


def decode(data: bytes, max_bytes: int | None = None, max_table_bytes: int = MAX_TABLE) -> Message:
    """Decode a message, or raise `Refused`. All is checked that can be checked without knowing what was expected.

    Args:
        data: The bytes as they arrived.
        max_bytes: The largest size of the message; None: no limit.
        max_table_bytes: The largest size of the table of its tensors.
    """
    if max_bytes is not None and len(data) > max_bytes:
        raise Refused("oversize", f"{len(data)} bytes where at most {max_bytes} were expected")
    fields, start = _decode_header(data)
    body = memoryview(data)[start:]
    if hashlib.sha256(body).hexdigest() != fields["body"]:
        raise Refused("checksum", "the tensors do not match their checksum")
    return Message(fields, unflatten(_parse_body(body, max_table_bytes)))


def decode_fields(data: bytes) -> Fields:
    """Decode the JSON fields of a message without its tensors, or raise `Refused`."""
    return _decode_header(data)[0]


def _decode_header(data: bytes) -> tuple[Fields, int]:
    """Return the fields of a message and where its body starts."""
    if not data:
        raise Refused("empty", "the message has no bytes")
    if len(data) < PREFIX.size or data[:4] != MAGIC:
        raise Refused("format", "this is not a polyclinic message")
    _, length, checksum = PREFIX.unpack_from(data)
    if length > MAX_HEADER or PREFIX.size + length > len(data):
        raise Refused("header", f"a header of {length} bytes is announced in a message of {len(data)}")
    if (PREFIX.size + length) % ALIGNMENT:
        raise Refused("header", f"the header's {length} bytes would leave the tensors at an odd address")
    header = data[PREFIX.size : PREFIX.size + length]
    if hashlib.sha256(header).digest() != checksum:
        raise Refused("checksum", "the header does not match its checksum")
    return _parse_header(header), PREFIX.size + length


def _parse_header(header: bytes) -> Fields:
    fields = parse_json(header, "json")
    schema = fields.get("schema")
    if not isinstance(fields.get("body"), str):
        raise Refused("json", "the header names no checksum of the body")
    if type(schema) is not int or schema != SCHEMA:
        raise Refused("schema", f"schema {format_untrusted(schema)} where {SCHEMA} is spoken; install the same version")
    return fields


def format_untrusted(value: object) -> str:
    """Format a value from another machine for a log: short and escaped; of lists and mappings only the type."""
    return repr(value)[:60] if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _parse_body(body: memoryview, most: int) -> Tensors:
    """Read safetensors without a copy: tensors are views of the message, and read-only by contract.

    Stricter than the format: every byte belongs to exactly one tensor, in the order of the header, and a tensor's
    bytes are exactly what its shape and dtype need. So a message cannot announce more than it holds.
    """
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > min(len(body) - 8, most):
        raise Refused("tensors", f"a table of {length} bytes is announced in a body of {len(body)}")
    tensors: Tensors = {}
    position = 8 + length
    for dtype, entries in groupby(_parse_table(bytes(body[8:position])), key=lambda entry: entry[1]):
        alike = list(entries)
        sizes = [size for _, _, _, size in alike]
        end = position + sum(sizes)
        if end > len(body):
            raise Refused("tensors", f"{alike[-1][0][:60]!r} ends beyond the message")
        pieces = torch.split(
            _view_as_tensor(alike, body[position:end], dtype), [size // dtype.itemsize for size in sizes]
        )
        tensors |= {name: piece.view(shape) for (name, _, shape, _), piece in zip(alike, pieces, strict=True)}
        position = end
    if position != len(body):
        raise Refused("tensors", f"{len(body) - position} bytes belong to no tensor")
    return tensors


@lru_cache(maxsize=16)
def _parse_table(table: bytes) -> tuple[Entry, ...]:
    """Parse and check a table. Sites of one federation send the same table again and again."""
    entries, position = [], 0
    for name, entry in sorted(parse_json(table, "tensors").items(), key=_entry_offset):
        dtype, shape, size = _parse_entry(name, entry, position)
        if (8 + len(table) + position) % dtype.itemsize:
            raise Refused("tensors", f"{name[:60]!r} lies at an odd address")
        entries.append((name, dtype, shape, size))
        position += size
    return tuple(entries)


def _entry_offset(item: tuple[str, Any]) -> int:
    try:
        start = item[1]["data_offsets"][0]
    except (TypeError, KeyError, IndexError):
        raise Refused("tensors", f"{item[0][:60]!r} has no place in the message") from None
    return start if type(start) is int else -1


def _parse_entry(name: str, entry: Any, start: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    spoken, shape, place = entry.get("dtype"), entry.get("shape"), entry["data_offsets"]
    dtype = DTYPES.get(spoken) if isinstance(spoken, str) else None
    if dtype is None:
        raise Refused("dtype", f"{name[:60]!r} is {format_untrusted(spoken)}, which is not spoken here")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape) or len(shape) > 16:
        raise Refused("shape", f"{name[:60]!r} has no proper shape")
    size = math.prod(shape) * dtype.itemsize
    if not size and math.prod(n or 1 for n in shape) >> 48:
        raise Refused("shape", f"{name[:60]!r} is empty, but its shape is too large to be handled")
    if place != [start, start + size] or not all(type(n) is int for n in place) or len(entry) > 3:
        raise Refused("tensors", f"{name[:60]!r} does not lie where its shape and dtype put it")
    return dtype, tuple(shape), size


def _view_as_tensor(entries: Sequence[Entry], data: memoryview, dtype: torch.dtype) -> Tensor:
    """All tensors of one dtype, which lie side by side, as one."""
    if not data:
        return torch.empty(0, dtype=dtype)
    if dtype is torch.bool and bytes(data).translate(None, b"\0\1"):
        names = ", ".join(name[:60] for name, *_ in entries[:3])
        raise Refused("tensors", f"{names!r} hold bytes that are neither true nor false")
    return torch.frombuffer(data, dtype=dtype)
