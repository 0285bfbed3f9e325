"""Moving weights between devices."""

from __future__ import annotations

import torch

from polyclinic.training.network import copy_to_device


def test_tensors_moved_in_one_block_arrive_as_they_were() -> None:
    generator = torch.Generator().manual_seed(0)
    sent = [
        torch.randn(3, 4, generator=generator),
        torch.tensor(7),
        torch.randn(2, 5, generator=generator).T,
        torch.randn(0, 3),
        torch.randn(3, dtype=torch.float64, generator=generator),
    ]
    got = copy_to_device(sent, torch.device("cpu"))
    for mine, theirs in zip(sent, got, strict=True):
        assert theirs.dtype == mine.dtype
        assert torch.equal(mine, theirs)
        assert mine.numel() == 0 or theirs.data_ptr() != mine.data_ptr()
        assert theirs.is_contiguous()
