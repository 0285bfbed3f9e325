"""The server's own models on its public images, its student and its teachers."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from polyclinic.evaluation.summary import PartScores
from polyclinic.reporting.blocks import Block, Figure, Section, Table
from polyclinic.reporting.charts import LineAxes, line_chart, without_band
from polyclinic.reporting.formatting import MISSING
from polyclinic.reporting.report_data import ReportData, format_sample

SIX = ("accuracy", "precision", "recall", "f1", "specificity", "auc")
"""The metrics of PFedCDP's tables."""


def server_section(data: ReportData) -> Section | None:
    """Six metrics of the headline and of the server's models, the student's epochs, the teachers' values."""
    if not any(run.public for method in data.methods for run in method.summaries):
        return None
    headlines = {
        (method.name, method.first.summary.headline.model): [run.headline.scores for run in method.summaries]
        for method in data.methods
    }
    public = {
        (method.name, model): [run.public[model] for run in method.summaries if model in run.public]
        for method in data.methods
        for model in next((run.public for run in method.summaries if run.public), {})
    }
    count = next(iter(public.values()))[0].n
    blocks: list[Block] = [
        _six_metrics(f"Six metrics ({data.comparison.judged_on}){data.spread_note}", headlines),
        _six_metrics(f"On the server's public test images ({count} in the first seed){data.spread_note}", public),
    ]
    blocks += [*_teacher_table(data), *_student_chart(data)]
    return Section("server", "On the server's public images", blocks, {"Engineer": "How do the server's models do?"})


def _six_metrics(title: str, found: Mapping[tuple[str, str], Sequence[PartScores]]) -> Table:
    rows = [
        [method, model, *(_format_spread([one[metric].value for one in scores]) for metric in SIX)]
        for (method, model), scores in found.items()
    ]
    return Table(title, ["method", "model", *SIX], rows)


def _format_spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return format_sample(known) if known else MISSING


def _teacher_table(data: ReportData) -> list[Table]:
    """The Shapley value and the weight of each teacher."""
    rows = []
    for method in data.methods:
        students = [run.finish for run in method.summaries if run.finish]
        if students and students[0].shapley:
            teachers = students[0].shapley
            values = [_format_spread([one.shapley[name] for one in students]) for name in teachers]
            weights = [_format_spread([one.teacher_weights[name] for one in students]) for name in teachers]
            rows.append([method.name, *map(", ".join, (teachers, values, weights))])
    head = ["method", "teachers", "value", "weight"]
    return [Table("Shapley values of the teachers", head, rows)] if rows else []


def _student_chart(data: ReportData) -> list[Figure]:
    """Students over epochs, the mean over seeds; one that stopped early keeps its last value."""
    lines = {}
    for method in data.methods:
        curves = [[row["validation_accuracy"] for row in run.finish.history] for run in method.summaries if run.finish]
        curves = [curve for curve in curves if curve]
        last = max(map(len, curves), default=0)
        if last > 1:
            means = (fmean(curve[min(at, len(curve) - 1)] for curve in curves) for at in range(last))
            lines[method.name] = without_band(enumerate(means))
    axes = LineAxes("epoch", "accuracy on public validation images")
    return [line_chart("student", "The student over epochs", lines, axes)] if lines else []
