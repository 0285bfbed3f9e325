"""JSON from strangers."""

from __future__ import annotations

import json
import math
from typing import Any

from polyclinic.core.errors import Refused


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is beyond every number")
    return number


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


_JSON = json.JSONDecoder(
    parse_constant=_reject_constant, parse_float=_parse_finite, object_pairs_hook=_reject_duplicates
)


def parse_json(text: bytes, kind: str) -> dict[str, Any]:
    """Strict: UTF-8, each key once, finite numbers, and only text that can be written again."""
    try:
        found = _JSON.decode(str(text, "utf-8"))
        if b"\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise Refused(kind, f"this is not valid JSON ({str(error)[:60]})") from None
    if not isinstance(found, dict):
        raise Refused(kind, "this is not a JSON object")
    return found
