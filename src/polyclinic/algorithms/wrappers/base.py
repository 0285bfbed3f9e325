"""Wrappers: algorithms that run another algorithm and change something about it."""

from dataclasses import dataclass, field
from typing import Any

from polyclinic.algorithms.base import Algorithm


class _OfInner:
    """A method of `inner`, under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.inner, self.name)


@dataclass(frozen=True)
class Wrapper(Algorithm):
    """An algorithm that runs `inner`. Every method that a subclass does not override is that of `inner`."""

    inner: Algorithm = field(kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pooled", self.inner.pooled)

    site_kinds = _OfInner()
    exchanges = _OfInner()
    auxiliary = _OfInner()
    init = _OfInner()
    broadcast = _OfInner()
    local = _OfInner()
    check_update = _OfInner()
    averaged_kinds = _OfInner()
    needs_single_updates = _OfInner()
    update_weight = _OfInner()
    aggregate = _OfInner()
    final_state = _OfInner()
    models = _OfInner()
    trains_on_server = _OfInner()
    server_step = _OfInner()
    privacy_releases = _OfInner()
    no_guarantee_reason = _OfInner()
    warning = _OfInner()
