"""What is encoded comes back as it was: every dtype, every shape, every name; and the digest tells any two apart."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load as read_safetensors
from torch import Tensor

from polyclinic.core.errors import Refused
from polyclinic.core.types import Bundle
from polyclinic.federation.mailbox import Outbox
from polyclinic.storage import messages
from tests.wire.frames import body_of, sealed

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KINDS = NAMES.filter(lambda kind: "/" not in kind)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
quick = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any dtype: NaN, infinity, −0 and denormals among them."""
    dtype, shape = draw(st.sampled_from(list(messages.DTYPES.values()))), draw(SHAPES)
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


BUNDLES = st.dictionaries(KINDS, st.dictionaries(NAMES, tensors(), min_size=1, max_size=3), max_size=3)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def everything(bundle: Bundle) -> dict[str, dict[str, tuple[torch.dtype, torch.Size, bytes]]]:
    return {kind: {name: bits(t) for name, t in group.items()} for kind, group in bundle.items()}


@quick
@given(BUNDLES, st.dictionaries(NAMES.filter(lambda n: n not in ("schema", "body")), JSON, max_size=4))
def test_every_bit_comes_back(bundle: Bundle, fields: dict[str, Any]) -> None:
    message = messages.decode(messages.encode(fields, bundle))
    assert everything(message.tensors) == everything(bundle)
    assert json.dumps({k: message.fields[k] for k in fields}) == json.dumps(fields)
    assert messages.hash_tensors(message.tensors) == messages.hash_tensors(bundle)


@quick
@given(BUNDLES)
def test_the_body_is_safetensors(bundle: Bundle) -> None:
    theirs = messages.unflatten(read_safetensors(messages.encode_body(bundle).data))
    assert everything(theirs) == everything(bundle)


@quick
@given(BUNDLES, st.randoms(use_true_random=False))
def test_the_digest_ignores_order(bundle: Bundle, chance: Any) -> None:
    def shuffled(mapping: dict[str, Any]) -> dict[str, Any]:
        return {key: mapping[key] for key in chance.sample(sorted(mapping), len(mapping))}

    other = shuffled({kind: shuffled(group) for kind, group in bundle.items()})
    assert messages.hash_tensors(other) == messages.hash_tensors(bundle)


@quick
@given(BUNDLES, st.data())
def test_the_digest_sees_every_bit(bundle: Bundle, data: st.DataObject) -> None:
    bundle = {**bundle, "more": {"one": torch.tensor(1.5)}}
    places = [(k, n) for k, g in bundle.items() for n, t in g.items() if t.numel() and t.dtype != torch.bool]
    kind, name = data.draw(st.sampled_from(places))
    changed = bundle[kind][name].clone()
    flat = changed.reshape(-1).view(torch.uint8)
    flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert messages.hash_tensors({**bundle, kind: {**bundle[kind], name: changed}}) != messages.hash_tensors(bundle)


def test_the_digest_tells_apart_what_could_be_mistaken() -> None:
    """Names, dtypes, shapes, and names that look like the end of another tensor."""
    one, zero = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    bundles: list[Bundle] = [
        {},
        {"m": {"a": torch.zeros(0)}},
        {"m": {"a": torch.zeros(0, 2)}},
        {"m": {"a": torch.zeros(4)}},
        {"m": {"a": torch.zeros(2, 2)}},
        {"m": {"a": torch.zeros(4, dtype=torch.int32)}},
        {"m": {"a": -torch.zeros(4)}},
        {"m": {"b": torch.zeros(4)}},
        {"n": {"a": torch.zeros(4)}},
        {"m": {"a": 88 * one, "b": zero}},
        {"m": {"a|torch.uint8|(1,)|Xm/b": zero}},
        {"m": {'a", "torch.uint8", [1]]X["m/b': zero}},
    ]
    for first, second in itertools.combinations(bundles, 2):
        assert messages.hash_tensors(first) != messages.hash_tensors(second)


@pytest.mark.parametrize(
    "bundle",
    [
        {"model": {"w": torch.arange(6.0).reshape(2, 3).T}},
        {"model": {"w": torch.ones(1).expand(3, 4)}},
        {"model": {"w": torch.arange(6.0)[::2]}},
        {"model": {"w": torch.ones(3, requires_grad=True)}},
    ],
    ids=["transposed", "expanded", "every other", "with a gradient"],
)
def test_any_layout_can_be_sent(bundle: Bundle) -> None:
    assert everything(messages.decode(messages.encode({}, bundle)).tensors) == everything(plain(bundle))


def plain(bundle: Bundle) -> Bundle:
    return {kind: {name: t.detach().clone() for name, t in group.items()} for kind, group in bundle.items()}


def test_the_same_tensor_can_be_sent_twice() -> None:
    """As a model and as its own teacher, whole and in part."""
    w = torch.arange(6.0).reshape(2, 3)
    bundle = {"model": {"w": w, "again": w}, "teacher": {"w": w}, "part": {"row": w[1]}}
    assert everything(messages.decode(messages.encode({}, bundle)).tensors) == everything(bundle)


def test_what_was_decoded_can_be_sent_on() -> None:
    bundle = {"model": {"a": torch.rand(3), "b": torch.rand(2, 2)}, "buffers": {"n": torch.tensor(3)}}
    first = messages.decode(messages.encode({"round": 1}, bundle))
    assert messages.encode(first.fields, first.tensors) == messages.encode({"round": 1}, bundle)


def test_encoding_depends_on_nothing_but_its_input() -> None:
    forth = {"model": {"a": torch.ones(2), "b": torch.zeros(3)}, "buffers": {"n": torch.tensor(3)}}
    back = {kind: dict(reversed(group.items())) for kind, group in reversed(forth.items())}
    assert messages.encode_body(forth) == messages.encode_body(back)


def test_the_outbox_sends_what_each_site_is_meant_to_get() -> None:
    common, own = {"m": {"w": torch.zeros(2)}}, {"m": {"w": torch.ones(2)}}
    bundles = {"a": common, "b": common, "c": own, "d": common}
    outbox = Outbox({site: {"site": site} for site in bundles}, lambda site: bundles[site])
    for site in ("d", "c", "a", "b", "c"):
        message = messages.decode(outbox[site])
        assert message.fields["site"] == site
        assert messages.hash_tensors(message.tensors) == messages.hash_tensors(bundles[site])
    assert outbox.sizes == {site: len(outbox[site]) for site in bundles}


@pytest.mark.parametrize("byte", [2, 128, 255])
def test_a_truth_value_is_zero_or_one(byte: int) -> None:
    """Other bytes would be a bool that is neither equal to true nor to false, depending on who asks."""
    line = {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}
    assert messages.decode(sealed({}, body_of({"m/a": line}, b"\0\1\1"))).tensors["m"]["a"].tolist() == [
        False,
        True,
        True,
    ]
    with pytest.raises(Refused, match="neither true nor false"):
        messages.decode(sealed({}, body_of({"m/a": line}, bytes([1, byte, 0]))))


def test_a_kind_with_a_slash_is_refused_before_it_becomes_another() -> None:
    with pytest.raises(ValueError, match="it would come back as another kind"):
        messages.flatten({"model@a/b": {"w": torch.zeros(1)}})
