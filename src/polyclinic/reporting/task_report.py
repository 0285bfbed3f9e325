"""The interface of a task's part of the report: sentences, site metrics, sections."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from polyclinic.evaluation.summary import PartScores, RunSummary
from polyclinic.reporting.blocks import Section
from polyclinic.reporting.report_data import ReportData


class TaskReport(ABC):
    site_metrics: ClassVar[Mapping[str, str]]
    """Metrics that the table of sites has beside the task's columns, with their titles."""
    sections: ClassVar[tuple[Callable[[ReportData], Section | None], ...]]
    results_sections: ClassVar[tuple[Callable[[ReportData], Section | None], ...]]
    """The sections of a page of kept results."""

    @abstractmethod
    def describe_value(self, value: float, low: float, high: float, part: str, over: str = "") -> str:
        """The main metric in words, with its interval."""

    @abstractmethod
    def describe_errors(self, summary: RunSummary) -> Iterator[str]:
        """Sentences on the kinds of errors, for the summary of a run."""

    @abstractmethod
    def warn(self, summaries: Mapping[str, RunSummary]) -> Iterator[str]:
        """Sentences on methods, given by name, whose figures mislead."""

    def describe_scores(self, scores: PartScores, metric: str, part: str) -> str:
        return self.describe_value(scores.value(metric), *scores.interval(metric), part)
