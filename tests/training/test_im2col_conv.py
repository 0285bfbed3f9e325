"""Convolutions as matrix products are convolutions."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from polyclinic.core.rng import Stream
from polyclinic.models import build_model
from polyclinic.training.im2col_conv import MAX_KERNEL_PIXELS, Im2colConv2d, copy_with_im2col

sides = st.integers(1, 3)


@settings(max_examples=60, deadline=None)
@given(
    channels=sides,
    filters=sides,
    kernel=st.tuples(sides, sides),
    stride=st.tuples(sides, sides),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    bias=st.booleans(),
)
def test_they_agree_with_torch_in_values_and_gradients(
    channels: int,
    filters: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    bias: bool,
) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(channels, filters, kernel, stride, padding, dilation, bias=bias).double()
    product = copy_with_im2col(plain)
    assert isinstance(product, Im2colConv2d)
    images = torch.rand(2, channels, 9, 8, dtype=torch.float64, requires_grad=True)
    outputs = [module(images) for module in (plain, product)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    for module, output in zip((plain, product), outputs, strict=True):
        (output**2).sum().backward()
        assert module.weight.grad is not None
    torch.testing.assert_close(product.weight.grad, plain.weight.grad, rtol=1e-10, atol=1e-10)


def test_convolutions_that_are_not_ordinary_stay_as_they_are() -> None:
    odd = nn.ModuleList(
        [
            nn.Conv2d(4, 4, 3, groups=2),
            nn.Conv2d(1, 1, 3, padding="same"),
            nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(1, 1, int(MAX_KERNEL_PIXELS**0.5) + 1),
        ]
    )
    assert {type(layer) for layer in copy_with_im2col(odd)} == {nn.Conv2d}


def test_a_whole_network_says_the_same_and_the_original_is_left_alone() -> None:
    module = build_model("resnet18", classes=3, channels=3, size=32, seed=Stream(0)).double().eval()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    copy = copy_with_im2col(module)
    torch.testing.assert_close(copy(images), module(images), rtol=1e-10, atol=1e-10)
    kinds = [type(m) for m in module.modules() if isinstance(m, nn.Conv2d)]
    assert set(kinds) == {nn.Conv2d}
    assert sum(isinstance(m, Im2colConv2d) for m in copy.modules()) == len(kinds) - 1, "all but the 7 × 7 stem"
