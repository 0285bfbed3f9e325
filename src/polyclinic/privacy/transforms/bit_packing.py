"""Integers of b bits that take b bits: without it, each would take a whole byte, or two.

Eight values of up to 8 bits lie in the eight bytes of one 64-bit word. Neighbours are pushed together there: bytes into
pairs, pairs into fours, fours into eight; so the eight values take the word's first b bytes. Of wider values the low
bytes come first, and then the rest, packed likewise.
"""

import torch
from torch import Tensor

LANES = (8, 16, 32)


def packed_size(bits: int, count: int) -> int:
    """Bytes of `count` packed values."""
    return -(-count * bits // 8)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """The lowest `bits` (1 to 16) of every integer in a vector, as bytes without gaps."""
    if bits > 8:
        return torch.cat([values.to(torch.uint8), pack_bits(values >> 8, bits - 8)])
    if bits == 8:
        return values.to(torch.uint8)
    words = _load_words(values.to(torch.uint8), 8) & _lane_mask(8, bits)
    for lane in LANES:
        kept = _lane_mask(2 * lane, lane)
        words = (words & kept) | ((words >> lane & kept) << lane * bits // 8)
    return words.view(torch.uint8)[:, :bits].reshape(-1)[: packed_size(bits, len(values))]


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` integers that were packed into these bytes; as bytes where they fit, else of 32 bits."""
    if bits > 8:
        return unpack_bits(packed[count:], bits - 8, count).int().bitwise_left_shift_(8).bitwise_or_(packed[:count])
    if bits == 8:
        return packed
    words = _load_words(packed, bits)
    for lane in reversed(LANES):
        width = lane * bits // 8
        kept = _lane_mask(2 * lane, width)
        words = (words & kept) | ((words >> width & kept) << lane)
    return words.view(torch.uint8).view(-1)[:count]


def _load_words(data: Tensor, width: int) -> Tensor:
    """A column of 64-bit words whose first `width` bytes are the data's next ones; the others are 0."""
    count = -(-len(data) // width)
    rows = torch.zeros(count, 8, dtype=torch.uint8)
    whole = len(data) // width
    rows[:whole, :width] = data[: whole * width].view(whole, width)
    rows.view(-1)[8 * whole : 8 * whole + len(data) % width] = data[whole * width :]
    return rows.view(torch.int64)


def _lane_mask(lane: int, bits: int) -> int:
    """The lowest `bits` of every `lane` bits of a word."""
    return sum(((1 << bits) - 1) << place for place in range(0, 64, lane))
