"""The registry of update transforms: what happens to an update on its way from a site to the server, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyclinic.core import Registry

if TYPE_CHECKING:
    from polyclinic.privacy.transforms.base import UpdateTransform

STAGES: Registry[type[UpdateTransform]] = Registry(
    "polyclinic.privacy.transforms", {"quantise": "quantise:Quantise", "mask": "mask:Mask"}
)
register_transform = STAGES.register
describe_transforms = STAGES.describe

__all__ = ["STAGES", "describe_transforms", "register_transform"]
