"""Names with a meaning of their own in messages, run folders and results."""

from __future__ import annotations

HELD_OUT = "held-out"
POOLED = "pooled"
PUBLIC = "public"
STUDENT = "student"
ENSEMBLE = "ensemble"
