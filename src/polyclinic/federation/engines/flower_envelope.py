"""One message of ours as one record of Flower's."""

from __future__ import annotations

from typing import cast

from flwr.app import Array, ArrayRecord, Message, RecordDict

from polyclinic.core.errors import Refused

RECORD, NAME = "polyclinic", "message"


def pack_message(data: bytes) -> RecordDict:
    """One message of ours as one array of Flower's."""
    return RecordDict({RECORD: ArrayRecord({NAME: Array("uint8", (len(data),), "bytes", data)})})


def unpack_message(message: Message) -> bytes:
    try:
        return cast(ArrayRecord, message.content[RECORD])[NAME].data
    except (KeyError, ValueError, TypeError):
        raise Refused("flower", "a message that is not of polyclinic") from None
