"""A task's part of the report, found by the task's name. A new task adds its report here."""

from collections.abc import Mapping

from polyclinic.evaluation.summary import RunSummary
from polyclinic.reporting.sections.classification import CLASSIFICATION
from polyclinic.reporting.task_report import TaskReport

TASK_REPORTS: Mapping[str, TaskReport] = {"classification": CLASSIFICATION}


def task_report(summary: RunSummary) -> TaskReport:
    return TASK_REPORTS[summary.task]
