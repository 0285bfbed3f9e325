"""Where a model errs: ROC and precision–recall curves, confusion matrices, calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from polyclinic.evaluation.metrics import BINS, Predictions
from polyclinic.evaluation.summary import headline_at_site
from polyclinic.reporting.html.charts import MOST_LINES, Bin, reliability_diagram, unit_square_curves
from polyclinic.reporting.html.formatting import fixed
from polyclinic.reporting.html.report_data import Method, ReportData
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.sections.training import wilson_interval
from polyclinic.reporting.html.svg import Point, share
from polyclinic.reporting.html.tags import Cell, fold_details, join_cells, paragraph, table, tag

MOST_CLASSES = 12
MOST_MATRICES = 9
MOST_POINTS = 160
"""Of a curve; more cannot be seen."""


def curves_section(material: ReportData) -> Section | None:
    """ROC and precision–recall: all thresholds at once."""
    shown, whose = _curves_of(material)
    if not shown:
        return None
    areas = {name: _areas(scores, truth) for name, (scores, truth) in shown.items()}
    words = ["; ".join(f"{name} {areas[name][at]:.3f}" for name in shown) for at in range(2)]
    roc = {name: thin_points(roc_points(*pair)) for name, pair in shown.items()}
    pr = {name: thin_points(pr_points(*pair)) for name, pair in shown.items()}
    pictures = [
        unit_square_curves(
            "ROC curves",
            roc,
            ("false alarms (1 − specificity)", "found (sensitivity)"),
            f"Areas under the curve: {words[0]}.",
            [(0, 0), (1, 1)],
        ),
        unit_square_curves(
            "Precision–recall curves",
            pr,
            ("found (recall)", "of those called, right (precision)"),
            f"Average precision: {words[1]}.",
        ),
    ]
    body = join_cells([paragraph(whose), tag("div", *pictures, class_="figures")])
    asked: Asked = {"Clinician": "How many are found, at what price?", "Statistician": "ROC and PR curves?"}
    return Section("curves", "ROC and precision–recall curves", body, asked)


Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]


def _curves_of(material: ReportData) -> tuple[dict[str, Scored], str]:
    """By method; of one run by site, or, of several classes, by class."""
    classes = material.classes
    seeds = ", first seed" if len(material.methods[0].runs) > 1 else ""
    positive = f"“{classes[1]}” against “{classes[0]}”" if len(classes) == 2 else "each class against the rest"
    if not material.single:
        every = {method.name: method.first.judged() for method in material.methods}
        known = {name: found for name, found in every.items() if found is not None and len(set(found.labels)) > 1}
        left = len(known) - MOST_LINES
        more = f" The first {MOST_LINES} of {len(known)} methods." if left > 0 else ""
        micro = "" if len(classes) == 2 else ", all classes pooled (micro average)"
        told = f"Of all hospitals' images together, {positive}{micro}{seeds}.{more}"
        return {name: _scored(found) for name, found in list(known.items())[:MOST_LINES]}, told
    run = material.first
    whole = run.judged()
    if whole is None:
        return {}, ""
    if len(classes) > 2:
        by_class = {
            name: (whole.probabilities[:, k].astype(np.float64), whole.labels == k) for k, name in enumerate(classes)
        }
        kept = {name: pair for name, pair in by_class.items() if pair[1].any() and not pair[1].all()}
        return dict(list(kept.items())[:MOST_LINES]), f"Of all hospitals' images together, {positive}{seeds}."
    sites = {site: run.judged(site) for site in run.summary["sites"]}
    known = {site: found for site, found in sites.items() if found is not None and len(set(found.labels)) == 2}
    if len(set(whole.labels)) < 2:  # then there is nothing to tell apart
        return {}, ""
    shown = {"all": whole, **(dict(list(known.items())[: MOST_LINES - 1]) if len(known) > 1 else {})}
    return {name: _scored(found) for name, found in shown.items()}, f"{positive.capitalize()}, by hospital{seeds}."


def _scored(found: Predictions) -> Scored:
    """Of two classes the second; of more all decisions at once."""
    if found.classes == 2:
        return found.probabilities[:, 1].astype(np.float64), found.labels == 1
    truth = found.labels[:, None] == np.arange(found.classes)
    return found.probabilities.astype(np.float64).ravel(), truth.ravel()


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
    """Evenly fewer, with both ends."""
    if len(points) <= MOST_POINTS:
        return list(points)
    at = np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int)
    return [points[place] for place in at]


def confusion_section(material: ReportData) -> Section | None:
    """Who is taken for whom."""
    classes = material.classes
    if not 2 <= len(classes) <= MOST_CLASSES:
        return None
    run = material.first
    seeds = ", first seed" if len(material.methods[0].runs) > 1 else ""
    if material.single:
        counts = {"all hospitals": run.best.get("confusion")}
        counts |= {site: headline_at_site(run.summary, site).get("confusion") for site in run.summary["sites"]}
    else:
        counts = {method.name: method.first.best.get("confusion") for method in material.methods}
    known = {name: found for name, found in counts.items() if found}
    if not known:
        return None
    matrices = [matrix(f"{name}{seeds}", found, classes) for name, found in list(known.items())[:MOST_MATRICES]]
    shown, hidden = (matrices[:1], matrices[1:]) if material.single else (matrices, [])
    grid = tag("div", *shown, class_="figures small")
    more: list[Cell] = []
    if hidden:
        more.append(fold_details("At each hospital", tag("div", *hidden, class_="figures small")))
    note = "Rows: what an image shows. Columns: what the model says. Per cent are of a row; the darker, the more."
    body = join_cells([paragraph(note, class_="note"), grid, *more])
    return Section("confusion", "Who is taken for whom", body, {"Clinician": "What does it mistake for what?"})


def matrix(name: str, counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Markup:
    """A table whose cells are the darker the larger their share of the row is."""
    head = tag("tr", tag("td", ""), *(tag("th", f"says {label}", scope="col") for label in classes))
    rows = [
        tag("tr", tag("th", f"is {label}", scope="row"), *(_cell(count, sum(line)) for count in line))
        for label, line in zip(classes, counts, strict=True)
    ]
    caption = f"Confusion matrix: {name}"
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *rows), class_="cells")
    return tag("div", whole, class_="scroll", role="group", tabindex=0, aria_label=f"Table: {caption}")


def _cell(count: int, total: int) -> Markup:
    part = count / total if total else 0.0
    shade = f"background:rgba(var(--shade),{0.45 * part:.2f})"  # letters on it keep a contrast of 4.5 to 1
    return tag("td", f"{count:,}", tag("small", share(part) if total else "–"), style=shade)


def calibration_section(material: ReportData) -> Section | None:
    """Whether a model is right as often as it is sure."""
    rows = _errors(material)
    if not rows:
        return None
    pictures = []
    for method in material.methods[: MOST_MATRICES - 3]:
        found = method.first.judged()
        if found is not None and len(found):
            pictures.append(_reliable(method, found))
    head = ["hospital" if material.single else "method", "images", "ECE", "mean confidence", "right"]
    note = (
        f"A calibrated model that is 80 % sure is right 80 times in 100: dots on the dashed line. Below it, it is too "
        f"sure. ECE is the mean distance from the line, weighted by images ({BINS} bins, Guo et al. 2017): 0 is best. "
        "With few images it is above 0 even for a calibrated model."
    )
    seeds = " (first seed)" if len(material.methods[0].runs) > 1 else ""
    parts = [paragraph(note), tag("div", *pictures, class_="figures"), table(f"Calibration{seeds}", head, rows)]
    asked: Asked = {"Clinician": "Can I trust how sure it is?", "Statistician": "Is it calibrated?"}
    return Section("calibration", "Calibration: is it as right as it is sure?", join_cells(parts), asked)


def _errors(material: ReportData) -> list[list[str]]:
    rows: Mapping[str, tuple[Mapping[str, object], Predictions | None]]
    if material.single:
        run = material.first
        rows = {site: (headline_at_site(run.summary, site), run.judged(site)) for site in run.summary["sites"]}
        rows = {**rows, "all": (run.best, run.judged())}
    else:
        rows = {method.name: (method.first.best, method.first.judged()) for method in material.methods}
    return [
        [name, f"{row['n']:,}", fixed(_number(row["ece"])), _sure(found), share(_number(row["accuracy"]))]
        for name, (row, found) in rows.items()
        if row.get("ece") is not None
    ]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _sure(found: Predictions | None) -> str:
    return share(float(found.probabilities.max(axis=1).mean())) if found is not None and len(found) else "–"


def _reliable(method: Method, found: Predictions) -> Markup:
    sides = calibration_bins(found)
    words = f"ECE {fixed(method.first.best.get('ece'))}. Bars: 95 % intervals (Wilson); grey: images, by their number."
    start = 0.5 if found.classes == 2 else 0.0
    return reliability_diagram(f"Reliability of {method.name}", sides, words, start)


def calibration_bins(found: Predictions) -> list[Bin]:
    """As the calibration error divides them: equal widths, closed on the right, those that hold an image."""
    sure = found.probabilities.max(axis=1).astype(np.float64)
    right = found.probabilities.argmax(axis=1) == found.labels
    where = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], sure)
    sides = []
    for place in np.unique(where):
        here = where == place
        part, count = float(right[here].mean()), int(here.sum())
        sides.append(Bin(float(sure[here].mean()), part, *wilson_interval(part, count), count))
    return sides
