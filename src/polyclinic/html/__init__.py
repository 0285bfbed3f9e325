"""Reports: one HTML file of a run or a comparison, which needs no other file and no network."""

from __future__ import annotations

from polyclinic.html.material import Material, read
from polyclinic.html.page import page
from polyclinic.html.pdf import write_pdf

__all__ = ["Material", "page", "read", "write_pdf"]
