"""Names as parts of paths."""

from __future__ import annotations

import re


def slugify(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"\W+", "-", name.lower()).strip("-")[:100] or "method"
