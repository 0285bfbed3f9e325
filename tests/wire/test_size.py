"""What a message would take on a wire is what it takes there."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from polyclinic.storage import messages

DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16, torch.int8, torch.bool)
shapes = st.lists(st.integers(0, 5), max_size=3)
groups = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=9), st.tuples(st.sampled_from(DTYPES), shapes), max_size=5
)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=5), groups, max_size=3), st.text(max_size=40), st.integers())
def test_a_message_that_is_handed_over_counts_as_if_it_had_travelled(
    kinds: dict[str, dict[str, tuple[torch.dtype, list[int]]]], words: str, number: int
) -> None:
    fields = {"site": words, "round": number, "report": [{"auc": number / 7}]}
    bundle = {k: {n: torch.zeros(shape, dtype=d) for n, (d, shape) in g.items()} for k, g in kinds.items()}
    assert messages.message_size(messages.Message(fields, bundle)) == len(messages.encode(fields, bundle))
