"""The server's state between rounds: how it lies in memory, and that nobody else changes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from polyclinic.core.contract import Bundle, Tensors
from polyclinic.core.errors import EngineError
from polyclinic.core.flat_tensors import FlatTensors, copy_tensors


def canonical_layout(state: Bundle, before: Bundle) -> Bundle:
    """The state in one form, whether it was just made or read back: so that what is measured on it is the same bits.

    Names are in the order of the state before; tensors of one floating-point type are one vector.
    """
    return {kind: _canonical_group(group, before.get(kind, {})) for kind, group in state.items()}


def _canonical_group(group: Tensors, before: Tensors) -> Tensors:
    names = list(before) if before.keys() == group.keys() else sorted(group)
    if isinstance(group, FlatTensors) and list(group) == names:
        return group
    ordered = {name: group[name] for name in names}
    kinds = {tensor.dtype for tensor in group.values()}
    return copy_tensors(ordered) if len(kinds) == 1 and kinds.pop().is_floating_point else ordered


def device_of(state: Bundle) -> torch.device:
    found = (tensor.device for group in state.values() for tensor in group.values())
    return next(found, torch.device("cpu"))


def version_counters(state: Bundle) -> dict[str, int]:
    """How often tensors were changed in place, by kind."""
    return {kind: sum(tensor._version for tensor in group.values()) for kind, group in state.items()}


def check_not_mutated(state: Bundle, before: Mapping[str, int]) -> None:
    """Within a process sites are handed the server's own tensors; what one changes, all would see."""
    for kind, version in version_counters(state).items():
        if version != before[kind]:
            raise EngineError(
                f"the algorithm changed tensors of {kind!r} in place that the server and all sites share; have it "
                "make new ones"
            )
