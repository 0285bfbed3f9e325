"""The server's state between rounds: its layout in memory, and a check that nothing changes it in place."""

from collections.abc import Mapping

import torch

from polyclinic.core import Bundle, EngineError, FlatTensors, Tensors, copy_tensors


def canonical_layout(state: Bundle, before: Bundle) -> Bundle:
    """Return the state in one layout, whether it was computed or read back, so that later results are equal in bits.

    Names have the order of the state `before`; tensors of one floating-point type are one vector.
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
    return next((t.device for group in state.values() for t in group.values()), torch.device("cpu"))


def version_counters(state: Bundle) -> dict[str, int]:
    """Return how often tensors were changed in place, by kind."""
    return {kind: sum(tensor._version for tensor in group.values()) for kind, group in state.items()}


def check_not_mutated(state: Bundle, before: Mapping[str, int]) -> None:
    """Raise if tensors were changed in place since `before`: within a process all sites share the server's tensors."""
    for kind, version in version_counters(state).items():
        if version != before[kind]:
            raise EngineError(
                f"the algorithm changed tensors of {kind!r} in place, which the server and all sites share; return new "
                "tensors instead"
            )
