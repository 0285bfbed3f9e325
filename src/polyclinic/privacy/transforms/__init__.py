"""What may happen to an update on its way from a site to the server, one file each."""

from __future__ import annotations

from typing import Any

from polyclinic.privacy.transforms.quantise import Quantise

STAGES: dict[str, Any] = {"quantise": Quantise}
