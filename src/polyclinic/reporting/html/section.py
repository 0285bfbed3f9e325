"""A section of a report, and the questions that it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from markupsafe import Markup

from polyclinic.reporting.html.tags import tag

Reader = Literal["Clinician", "Statistician", "Engineer", "Data-protection officer"]
Asked: TypeAlias = Mapping[Reader, str]
"""The question that a section answers, by who asks it."""
READERS: tuple[Reader, ...] = get_args(Reader)


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    body: Markup
    asked: Asked = field(default_factory=dict)

    def html(self) -> Markup:
        heading = tag("h2", self.title, id=f"{self.id}-title")
        return tag("section", heading, self.body, id=self.id, aria_labelledby=f"{self.id}-title")
