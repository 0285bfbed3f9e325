"""Our messages in Flower's records."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from polyclinic.core import Refused

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message, RecordDict

RECORD, NAME = "polyclinic", "message"


def pack_message(data: bytes) -> RecordDict:
    """Return a record of one array, which holds the bytes of one of our messages."""
    from flwr.app import Array, ArrayRecord, RecordDict  # takes a second to load

    return RecordDict({RECORD: ArrayRecord({NAME: Array("uint8", (len(data),), "bytes", data)})})


def unpack_message(message: Message) -> bytes:
    """Return the bytes of our message in a message of Flower's."""
    try:
        return cast("ArrayRecord", message.content[RECORD])[NAME].data
    except (KeyError, ValueError, TypeError):
        raise Refused("flower", "a message that is not of polyclinic") from None
