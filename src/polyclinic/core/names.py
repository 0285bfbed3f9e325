"""Reserved names in messages, run folders and results, and names as parts of paths."""

import re

HELD_OUT = "held-out"
POOLED = "pooled"
PUBLIC = "public"
STUDENT = "student"
ENSEMBLE = "ensemble"


def slugify(name: str) -> str:
    """Return a name in a form that is safe as part of a path."""
    return re.sub(r"\W+", "-", name.lower()).strip("-")[:100] or "method"
