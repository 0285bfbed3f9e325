"""Packed integers: they come back, take the bits they need and no more, and lie where numpy would put them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from polyclinic.core.rng import Stream
from polyclinic.privacy.transforms.bit_packing import pack_bits, packed_size, unpack_bits

WIDTHS = range(1, 17)


def integers(bits: int, count: int, seed: int = 0) -> Tensor:
    drawn = torch.randint(0, 1 << bits, (count,), generator=Stream(seed, (bits, count)).generator(), dtype=torch.int32)
    return drawn.to(torch.uint8) if bits <= 8 else drawn


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_short_vectors_come_back(bits: int, count: int) -> None:
    values = integers(bits, count)
    packed = pack_bits(values, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == packed_size(bits, count) == (count * bits + 7) // 8
    found = unpack_bits(packed, bits, count)
    assert found.dtype == values.dtype
    assert torch.equal(found, values)


@settings(max_examples=200, deadline=None)
@given(bits=st.sampled_from(WIDTHS), count=st.integers(0, 3000), seed=st.integers(0, 9))
def test_any_vector_comes_back(bits: int, count: int, seed: int) -> None:
    values = integers(bits, count, seed)
    packed = pack_bits(values, bits)
    assert len(packed) == (count * bits + 7) // 8
    assert torch.equal(unpack_bits(packed, bits, count), values)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 8, 13, 400])
def test_bits_follow_each_other_as_numpy_packs_them(bits: int, count: int) -> None:
    values = integers(bits, count)
    each = np.unpackbits(values.numpy()[:, None], axis=1, count=bits, bitorder="little")
    assert pack_bits(values, bits).numpy().tolist() == np.packbits(each.reshape(-1), bitorder="little").tolist()


@pytest.mark.parametrize("bits", range(9, 17))
def test_of_wider_values_the_low_bytes_come_first(bits: int) -> None:
    values = integers(bits, 21)
    expected = torch.cat([(values % 256).to(torch.uint8), pack_bits((values // 256).to(torch.uint8), bits - 8)])
    assert torch.equal(pack_bits(values, bits), expected)


@pytest.mark.parametrize("bits", WIDTHS)
def test_higher_bits_do_not_reach_the_neighbours(bits: int) -> None:
    values = integers(bits, 50).int()
    stray = integers(8, 50).int() << bits
    assert torch.equal(pack_bits(values | stray, bits), pack_bits(values, bits))


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_part_of_a_longer_tensor_packs_alike(bits: int) -> None:
    """Wherever it begins in memory."""
    values = integers(bits, 30)
    packed = pack_bits(values[5:], bits)
    assert torch.equal(packed, pack_bits(values[5:].clone(), bits))
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])
    assert torch.equal(unpack_bits(shifted[3:], bits, 25), values[5:])
