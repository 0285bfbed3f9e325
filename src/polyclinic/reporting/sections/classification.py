"""The report of classification: errors by class, ROC and precision–recall curves, calibration."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from polyclinic.evaluation.metrics import BINS, Predictions
from polyclinic.evaluation.statistics import wilson_interval
from polyclinic.evaluation.summary import PartScores, RunSummary
from polyclinic.evaluation.task import class_names, confusion_of
from polyclinic.reporting.blocks import Block, Cell, Figure, Folded, Grid, Heading, Paragraph, Questions, Section, Table
from polyclinic.reporting.charts import MOST_LINES, ConfidenceBin, reliability_diagram, unit_square_curves
from polyclinic.reporting.formatting import MISSING, format_number, format_percent
from polyclinic.reporting.html.svg import Point
from polyclinic.reporting.report_data import Method, ReportData
from polyclinic.reporting.task_report import TaskReport

MOST_CLASSES = 12
MOST_MATRICES = 9
MOST_DIAGRAMS = 6
MOST_POINTS = 160
"""Of a curve; more cannot be seen."""
AVERAGES = ("precision_macro", "recall_macro", "f1_macro", "f1_weighted", "balanced_accuracy")
Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Scores, and whether each is of a positive."""


def curves_section(data: ReportData) -> Section | None:
    """ROC and precision–recall curves."""
    shown, note = _scored_by_name(data)
    if not shown:
        return None
    areas = {name: _areas(*pair) for name, pair in shown.items()}
    roc_words, pr_words = ("; ".join(f"{name} {areas[name][at]:.3f}" for name in shown) for at in range(2))
    roc = unit_square_curves(
        "roc",
        "ROC curves",
        {name: thin_points(roc_points(*pair)) for name, pair in shown.items()},
        ("false positive rate (1 − specificity)", "sensitivity"),
        f"Areas under the curve: {roc_words}.",
        [(0, 0), (1, 1)],
    )
    pr = unit_square_curves(
        "precision-recall",
        "Precision–recall curves",
        {name: thin_points(pr_points(*pair)) for name, pair in shown.items()},
        ("recall (sensitivity)", "precision (positive predictive value)"),
        f"Average precision: {pr_words}.",
    )
    return Section(
        "curves",
        "ROC and precision–recall curves",
        [Paragraph(note), Grid([roc, pr])],
        {"Clinician": "How many are found, at what price?", "Statistician": "ROC and PR curves?"},
    )


def _scored_by_name(data: ReportData) -> tuple[dict[str, Scored], str]:
    """By method; of one run by site, or, of several classes, by class. With a sentence that describes them."""
    classes, run = class_names(data.first.summary), data.first
    seeds = ", first seed" if data.has_several_seeds else ""
    positive = f"“{classes[1]}” against “{classes[0]}”" if len(classes) == 2 else "each class against the rest"
    if not data.is_single:
        every = {method.name: method.first.headline_predictions() for method in data.methods}
        known = {name: found for name, found in every.items() if found is not None and len(set(found.labels)) > 1}
        more = f" The first {MOST_LINES} of {len(known)} methods." if len(known) > MOST_LINES else ""
        micro = "" if len(classes) == 2 else ", all classes pooled (micro average)"
        shown = {name: _score(found) for name, found in list(known.items())[:MOST_LINES]}
        return shown, f"Of all sites' images together, {positive}{micro}{seeds}.{more}"
    whole = run.headline_predictions()
    if whole is None or len(set(whole.labels)) < 2:
        return {}, ""
    if len(classes) > 2:
        by_class = {
            name: (whole.probabilities[:, k].astype(np.float64), whole.labels == k) for k, name in enumerate(classes)
        }
        kept = {name: pair for name, pair in by_class.items() if pair[1].any() and not pair[1].all()}
        return dict(list(kept.items())[:MOST_LINES]), f"Of all sites' images together, {positive}{seeds}."
    sites = {site: run.headline_predictions(site) for site in run.summary.sites}
    both = {site: found for site, found in sites.items() if found is not None and len(set(found.labels)) == 2}
    chosen = {"all": whole, **(dict(list(both.items())[: MOST_LINES - 1]) if len(both) > 1 else {})}
    return {name: _score(found) for name, found in chosen.items()}, f"{positive.capitalize()}, by site{seeds}."


def _score(found: Predictions) -> Scored:
    """Of two classes the second; of more all one-against-the-rest decisions at once."""
    if found.classes == 2:
        return found.probabilities[:, 1].astype(np.float64), found.labels == 1
    return found.probabilities.astype(np.float64).ravel(), (found.labels[:, None] == np.arange(found.classes)).ravel()


def roc_points(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> list[Point]:
    from sklearn.metrics import roc_curve  # takes a second to load

    false, true, _ = roc_curve(truth, scores)
    return list(zip(false.tolist(), true.tolist(), strict=True))


def pr_points(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> list[Point]:
    from sklearn.metrics import precision_recall_curve

    precision, recall, _ = precision_recall_curve(truth, scores)
    return list(zip(recall.tolist()[::-1], precision.tolist()[::-1], strict=True))


def _areas(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> tuple[float, float]:
    from sklearn.metrics import average_precision_score, roc_auc_score

    return float(roc_auc_score(truth, scores)), float(average_precision_score(truth, scores))


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Evenly fewer points, with both ends."""
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[place] for place in np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int)]


def confusion_section(data: ReportData) -> Section | None:
    """Which classes are mistaken for which, and averages over classes."""
    classes, run = class_names(data.first.summary), data.first
    seeds = ", first seed" if data.has_several_seeds else ""
    if data.is_single:
        scores = {"all sites": run.summary.headline.scores, **run.site_scores}
    else:
        scores = {method.name: method.first.summary.headline.scores for method in data.methods}
    counts = {name: found for name, one in scores.items() if (found := confusion_of(one))}
    blocks: list[Block] = []
    if counts and 2 <= len(classes) <= MOST_CLASSES:
        most = MOST_MATRICES if data.is_from_folders else 1
        tables = [_confusion_table(f"{name}{seeds}", found, classes) for name, found in list(counts.items())[:most]]
        shown, folded = (tables[:1], tables[1:]) if data.is_single else (tables, [])
        blocks = [
            Paragraph(
                "Rows: what an image shows. Columns: what the model says. Per cent are of a row; the darker, the more.",
                "note",
            ),
            Grid(shown, small=True),
        ]
        if folded:
            blocks.append(Folded("At each site", [Grid(folded, small=True)]))
    blocks += _average_blocks(data)
    questions: Questions = {"Clinician": "What does it mistake for what?"}
    return Section("confusion", "Errors by class", blocks, questions) if blocks else None


def _confusion_table(name: str, counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Table:
    rows: list[list[str | Cell]] = [
        [f"is {label}", *(Cell(f"{count:,}", share=count / sum(line) if sum(line) else None) for count in line)]
        for label, line in zip(classes, counts, strict=True)
    ]
    return Table(f"Confusion matrix: {name}", ["", *(f"says {label}" for label in classes)], rows, matrix=True)


def _average_blocks(data: ReportData) -> list[Block]:
    """Averages over classes; on pages of results only where privacy is compared."""
    known = [m for m in data.methods if all(name in m.first.summary.headline.scores.metrics for name in AVERAGES)]
    if not known or not (data.has_privacy or data.is_from_folders):
        return []
    head = ["method", *(data.task.info(name).label for name in AVERAGES)]
    rows = [[method.name, *(method.format_spread(name) for name in AVERAGES)] for method in known]
    return [Heading("Averages over classes"), Table(f"Averages over classes{data.spread_note}", head, rows)]


def calibration_section(data: ReportData) -> Section | None:
    """The calibration of the models: share of right predictions against confidence."""
    if not (rows := _calibration_rows(data)):
        return None
    diagrams = [
        _reliability(f"reliability-{number}", method, found)
        for number, method in enumerate(data.methods[:MOST_DIAGRAMS], 1)
        if (found := method.first.headline_predictions()) is not None and len(found)
    ]
    head = ["site" if data.is_single else "method", "images", "ECE", "mean confidence", "right"]
    seeds = " (first seed)" if data.has_several_seeds else ""
    blocks: list[Block] = [
        Paragraph(
            "A calibrated model that is 80 % sure is right 80 times in 100: dots on the dashed line. Below it, it "
            f"is too sure. ECE is the mean distance from the line, weighted by images ({BINS} bins, Guo et al. "
            "2017): 0 is best. With few images it is above 0 even for a calibrated model."
        ),
        *([Grid(diagrams)] if diagrams else []),
        Table(f"Calibration{seeds}", head, rows),
    ]
    return Section(
        "calibration",
        "Calibration of probabilities",
        blocks,
        {"Clinician": "Can I trust how sure it is?", "Statistician": "Is it calibrated?"},
    )


def _calibration_rows(data: ReportData) -> list[list[str]]:
    found: dict[str, tuple[PartScores, Predictions | None]]
    if data.is_single:
        run = data.first
        found = {site: (scores, run.headline_predictions(site)) for site, scores in run.site_scores.items()}
        everyone = "all (mean of sites)" if run.summary.pooled_from == "scores" else "all"
        found[everyone] = run.summary.headline.scores, run.headline_predictions()
    else:
        found = {
            method.name: (method.first.summary.headline.scores, method.first.headline_predictions())
            for method in data.methods
        }
    return [
        [
            name,
            f"{scores.n:,}",
            format_number(scores.value("ece")),
            _mean_confidence(predictions),
            format_percent(scores.value("accuracy")),
        ]
        for name, (scores, predictions) in found.items()
        if not math.isnan(scores.value("ece"))
    ]


def _mean_confidence(found: Predictions | None) -> str:
    if found is None or not len(found):
        return MISSING
    return format_percent(float(found.probabilities.max(axis=1).mean()))


def _reliability(name: str, method: Method, found: Predictions) -> Figure:
    ece = format_number(method.first.summary.headline.scores.value("ece"))
    return reliability_diagram(
        name,
        f"Reliability of {method.name}",
        calibration_bins(found),
        f"ECE {ece}. Bars: 95 % intervals (Wilson); grey: images, by their number.",
        0.5 if found.classes == 2 else 0.0,
    )


def calibration_bins(found: Predictions) -> list[ConfidenceBin]:
    """The non-empty bins of the calibration error: equal widths, closed on the right."""
    confidence = found.probabilities.max(axis=1).astype(np.float64)
    right = found.probabilities.argmax(axis=1) == found.labels
    where = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence)
    bins = []
    for place in np.unique(where):
        here = where == place
        share, count = float(right[here].mean()), int(here.sum())
        bins.append(ConfidenceBin(float(confidence[here].mean()), share, *wilson_interval(share, count), count))
    return bins


class ClassificationReport(TaskReport):
    site_metrics: ClassVar = {"recall": "sensitivity", "specificity": "specificity", "ece": "ECE"}
    sections = (curves_section, confusion_section, calibration_section)
    results_sections = (confusion_section,)

    def describe_value(self, value: float, low: float, high: float, part: str, over: str = "") -> str:
        """ "66 of 100 test images (95 % interval 60 to 72)"."""
        interval = "" if math.isnan(low) else f" (95 % interval {100 * low:.0f} to {100 * high:.0f}{over})"
        return f"{100 * value:.0f} of 100 {part} images{interval}"

    def describe_errors(self, summary: RunSummary) -> Iterator[str]:
        """Sensitivity and specificity, of two classes."""
        counts, classes = confusion_of(summary.headline.scores), class_names(summary)
        if not counts or len(counts) != 2:
            return
        (true_negatives, false_positives), (false_negatives, true_positives) = counts
        negatives, positives = true_negatives + false_positives, false_negatives + true_positives
        if negatives and positives:
            yield (
                f"Of {positives:,} images of {classes[1]} it found {true_positives:,} (sensitivity "
                f"{true_positives / positives:.0%}); of {negatives:,} of {classes[0]} it took {false_positives:,} for "
                f"{classes[1]} (specificity {true_negatives / negatives:.0%})."
            )

    def warn(self, summaries: Mapping[str, RunSummary]) -> Iterator[str]:
        if constant := [name for name, summary in summaries.items() if _predicts_one_class(summary)]:
            yield f"{', '.join(constant)} predicted one class for all images (first seed): compare AUC, not accuracy."


def _predicts_one_class(summary: RunSummary) -> bool:
    counts = confusion_of(summary.headline.scores) or []
    return len(counts) > 1 and sum(any(column) for column in zip(*counts, strict=True)) == 1


CLASSIFICATION = ClassificationReport()
