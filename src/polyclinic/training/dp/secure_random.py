"""All random numbers on which privacy rests: ChaCha20 (RFC 8439), keyed by a stream, as uniform and normal numbers.

The cipher's keystream is cut into words k of 64 bits. Normal numbers are drawn from pairs of words in float64 (Box and
Muller 1958), and rounded to the type that is asked for:

    (1)  z₁ = √(−2 ln u) · cos 2πv,  z₂ = √(−2 ln u) · sin 2πv     u = (k₁ mod 2⁶³ + 1/2) / 2⁶³, v = k₂ / 2⁶⁴

The largest radius is √(−2 ln 2⁻⁶⁴) = 9.42; only the mass beyond, 2⁻⁶⁴ = 5·10⁻²⁰ of all pairs, is moved inwards.

Numbers of one stream are a prefix of any longer draw from it. Take a `child` of a stream for every purpose: streams are
independent, draws from the same stream are equal.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from polyclinic.core import Stream

BLOCK_WORDS = 8
"""A block of the cipher is 64 bytes, or 8 words of 64 bits."""
CHUNK = 1 << 16
"""Numbers drawn at a time on the CPU, so that the float64 between words and results stays in the cache."""
DEVICE_CHUNK = 1 << 24
"""The same on a GPU, where it bounds memory: about 1 GB."""
DEVICE_WORDS = 1 << 20
"""From so many words on a GPU computes the keystream itself; below, launching its kernels takes longer than a copy."""
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
"""ChaCha20's four first words, "expand 32-byte k"."""


def draw_words(stream: Stream, count: int, block: int = 0) -> Tensor:
    """Return `count` words of a stream's keystream as int64 on the CPU, from the cipher's `block`-th block on."""
    out = bytearray(8 * count + 63)  # as `update_into` demands
    _cipher(stream, block).update_into(bytes(8 * count), out)
    return torch.from_numpy(np.frombuffer(out, np.int64, count))


def draw_uniforms(stream: Stream, count: int) -> Tensor:
    """Return `count` numbers in (0, 1], in float64 on the CPU; the smallest possible is 2⁻⁶⁴."""
    return _to_uniforms(draw_words(stream, count))


def draw_normals(
    streams: Sequence[Stream], size: int, device: torch.device, dtype: torch.dtype, block: int = 0
) -> Tensor:
    """Draw independent standard normal numbers, a row of `size` numbers for each stream.

    Args:
        streams: The secret streams.
        size: Numbers of each.
        device: Where they are wanted. A GPU's last bits may differ from a CPU's; the keystream is the same.
        dtype: The type to which they are rounded.
        block: The first of the cipher's blocks to use.
    """
    out = torch.empty(len(streams), size, device=device, dtype=dtype)
    if device.type == "cuda":
        most = max(CHUNK, DEVICE_CHUNK // max(len(streams), 1) // BLOCK_WORDS * BLOCK_WORDS)
        for start in range(0, size, most):
            piece = out[:, start : start + most]
            words = draw_words_on_device(streams, _even(piece.shape[1]), device, block + start // BLOCK_WORDS)
            piece.copy_(_to_normals(words)[:, : piece.shape[1]])
        return out
    for row, stream in zip(out, streams, strict=True):
        cipher, zeros = _cipher(stream, block), bytes(8 * min(CHUNK, _even(size)))
        buffer = bytearray(len(zeros) + 63)
        for piece in torch.split(row, CHUNK):
            count = _even(len(piece))
            cipher.update_into(memoryview(zeros)[: 8 * count], buffer)
            words = torch.from_numpy(np.frombuffer(buffer, np.int64, count))
            piece.copy_(_to_normals(words)[: len(piece)])
    return out


def draw_geometric(stream: Stream, rate: float, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return `count` numbers of independent trials up to and with the first success, of probability `rate` < 1.

    By inversion: P(⌊ln u / ln(1 − rate)⌋ ≥ k) = P(u ≤ (1 − rate)ᵏ) = (1 − rate)ᵏ.
    """
    trials = (draw_uniforms(stream, count).log() / math.log1p(-rate)).clamp(max=2.0**62)
    return trials.long().add_(1).numpy()


def draw_permutation(stream: Stream, count: int) -> Tensor:
    """Return a random order of `count` things."""
    return draw_words(stream, count).argsort(stable=True)


def draw_words_on_device(streams: Sequence[Stream], count: int, device: torch.device, block: int = 0) -> Tensor:
    """Return what `draw_words` does for each stream, on a device; there the device computes long keystreams itself."""
    if len(streams) * count < DEVICE_WORDS:
        words = torch.stack([draw_words(stream, count, block) for stream in streams])
        return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words.to(device)
    keys = np.stack([np.frombuffer(stream.key(), np.int32) for stream in streams])
    return chacha20_words(torch.from_numpy(keys).to(device), -(-count // BLOCK_WORDS), block)[:, :count]


def chacha20_words(keys: Tensor, blocks: int, start: int = 0, nonce: tuple[int, int, int] = (0, 0, 0)) -> Tensor:
    """Compute keystreams of ChaCha20 by integer operations on the keys' device.

    Args:
        keys: Keys × 8 int32, whose bytes are those of the keys.
        blocks: The number of blocks of each keystream, computed at once: those of all keys, and four columns each.
        start: The number of the first block; the last must be below 2³¹.
        nonce: The nonce's three words of 32 bits.

    Returns:
        Keys × (8 · blocks) int64.
    """
    count, device = len(keys), keys.device
    counter = torch.arange(start, start + blocks, dtype=torch.int32, device=device).expand(count, 1, blocks)
    fixed = torch.tensor([_signed(word) for word in CONSTANTS], dtype=torch.int32, device=device)
    last = torch.tensor([_signed(word) for word in nonce], dtype=torch.int32, device=device)
    first = [
        fixed[None, :, None].expand(count, 4, blocks),
        keys[:, :4, None].expand(count, 4, blocks),
        keys[:, 4:, None].expand(count, 4, blocks),
        torch.cat([counter, last[None, :, None].expand(count, 3, blocks)], 1),
    ]
    a, b, c, d = (row.clone() for row in first)
    for _ in range(10):
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(-1, 1), c.roll(-2, 1), d.roll(-3, 1)  # the columns are now the diagonals
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(1, 1), c.roll(2, 1), d.roll(3, 1)
    state = torch.cat([row.add_(given) for row, given in zip((a, b, c, d), first, strict=True)], 1)
    return state.transpose(1, 2).reshape(count, 2 * BLOCK_WORDS * blocks).view(torch.int64)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """Apply the quarter round (RFC 8439, 2.1) to all columns, in place."""
    for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x.add_(y)
        z.bitwise_xor_(x)
        low = (z >> (32 - turn)).bitwise_and_((1 << turn) - 1)  # which fills with the sign
        z.bitwise_left_shift_(turn).bitwise_or_(low)


def _to_uniforms(words: Tensor) -> Tensor:
    """Return u of (1)."""
    return words.bitwise_and(2**63 - 1).double().add_(0.5).mul_(2.0**-63)


def _to_normals(words: Tensor) -> Tensor:
    """Return as many standard normal numbers as there are words in a row, in float64, by (1)."""
    first, second = words.view(*words.shape[:-1], -1, 2).unbind(-1)
    radius = _to_uniforms(first).log_().mul_(-2).sqrt_()
    angle = second.double().mul_(math.pi * 2.0**-63)
    found = torch.empty(words.shape, dtype=torch.float64, device=words.device)
    one, other = found.view(*words.shape[:-1], -1, 2).unbind(-1)
    torch.mul(radius, angle.cos(), out=one)
    torch.mul(radius, angle.sin_(), out=other)
    return found


def _cipher(stream: Stream, block: int) -> CipherContext:
    """Return ChaCha20 under the stream's key; the nonce is 0, as no key is used for two purposes."""
    return Cipher(ChaCha20(stream.key(), block.to_bytes(8, "little") + bytes(8)), None).encryptor()


def _even(count: int) -> int:
    return count + count % 2


def _signed(word: int) -> int:
    """Return the int32 that has the bits of a word."""
    return word - (1 << 32) if word >> 31 else word
