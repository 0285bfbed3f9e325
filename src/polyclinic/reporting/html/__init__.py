"""Reports: one HTML file of a run or a comparison, which needs no other file and no network."""

from __future__ import annotations

from polyclinic.reporting.html.page import page
from polyclinic.reporting.html.pdf import write_pdf
from polyclinic.reporting.html.report_data import ReportData, read_report_data

__all__ = ["ReportData", "page", "read_report_data", "write_pdf"]
