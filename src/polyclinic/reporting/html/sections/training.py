"""What happens over rounds: accuracy, drift, forgetting; and how much better a model is on what it has seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist

from polyclinic.core.contract import SiteId
from polyclinic.evaluation import claims
from polyclinic.evaluation.comparison import metric_value
from polyclinic.evaluation.statistics import summarise_sample
from polyclinic.federation.rounds import POOLED
from polyclinic.reporting.html.charts import Axes, line_chart
from polyclinic.reporting.html.formatting import fixed
from polyclinic.reporting.html.report_data import Method, ReportData, Run
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.svg import Banded
from polyclinic.reporting.html.tags import join_cells, paragraph, table

Z = NormalDist().inv_cdf(0.975)
Told = Mapping[int, tuple[float, int]]
"""By round: a share, and the images that it is of."""
ACCURACY = Axes("round", "accuracy")


def wilson_interval(right: float, images: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of images."""
    if images <= 0:
        return math.nan, math.nan
    right = min(max(right, 0.0), 1.0)  # counts that were noised may tell of more than all
    middle = (right + Z * Z / (2 * images)) / (1 + Z * Z / images)
    half = Z / (1 + Z * Z / images) * math.sqrt(right * (1 - right) / images + Z * Z / (4 * images * images))
    return middle - half, middle + half


def learning_section(material: ReportData) -> Section | None:
    """Accuracy on validation images from round to round."""
    series = {method.name: _over_seeds([_accuracy(run) for run in method.runs]) for method in material.methods}
    known = {name: points for name, points in series.items() if len(points) > 1}
    if not known:
        return None
    several = any(len(method.runs) > 1 for method in material.methods)
    band = (
        "Bands: Student's 95 % interval over seeds."
        if several
        else "Bands: 95 % intervals (Wilson), as if every image were of another patient."
    )
    parts = [line_chart("Accuracy on the hospitals' validation images, by round", known, ACCURACY, band)]
    if material.single:
        run = material.first
        sites = {site: _over_seeds([_accuracy(run, site)]) for site in run.summary["sites"]}
        shown = {site: points for site, points in sites.items() if len(points) > 1}
        if len(shown) > 1:
            seed = " First seed." if several else ""
            parts.append(line_chart("The same at each hospital", shown, ACCURACY, f"Wilson's 95 % intervals.{seed}"))
    note = "A round's point is of the model that it left behind, told by hospitals when they next received it."
    if missing := [name for name in series if name not in known]:
        note += f" Not shown, as no hospital told figures by round: {', '.join(missing)}."
    asked: Asked = {"Engineer": "Did it converge?", "Statistician": "How steady was learning?"}
    body = join_cells([paragraph(note, class_="note"), *parts])
    return Section("learning", "Learning curves", body, asked)


def _accuracy(run: Run, site: SiteId | None = None) -> Told:
    """The mean over sites' validation images, weighted by their number, of personal models where there are some."""
    told = [
        row
        for row in run.rows
        if row["event"] == "evaluate" and row["part"] == "validation" and row.get("accuracy") is not None
    ]
    model = "personal" if any(row["model"] == "personal" for row in told) else "global"
    here = [row for row in told if row["model"] == model and site in (None, row["site"]) and row["site"] != POOLED]
    found: dict[int, tuple[float, int]] = {}
    for row in here:
        right, images = found.get(row["round"], (0.0, 0))
        found[row["round"]] = right + row["accuracy"] * row["n"], images + row["n"]
    last = _last(run, model, site)
    if found and last is not None:
        found[int(run.summary["rounds"])] = last
    return {round: (right / images, images) for round, (right, images) in sorted(found.items()) if images}


def _last(run: Run, model: str, site: SiteId | None) -> tuple[float, int] | None:
    """Of the final model, which no later round tells of."""
    models = run.summary["sites"].get(site, {}) if site else run.summary.get("merged", {})
    found = models.get(model, {}).get("validation", {})
    return (found["accuracy"] * found["n"], found["n"]) if found.get("accuracy") is not None else None


def _over_seeds(told: Sequence[Told]) -> list[Banded]:
    """At rounds that all seeds have: the mean, with an interval over seeds, or over images where there is one seed."""
    common = sorted(set.intersection(*(set(one) for one in told))) if told else []
    points: list[Banded] = []
    for at in common:
        values = [one[at][0] for one in told]
        if len(values) == 1:
            points.append((float(at), values[0], *wilson_interval(*told[0][at])))
        else:
            found = summarise_sample(values)
            points.append((float(at), found.mean, found.low, found.high))
    return points


def _bare(points: Iterable[tuple[float, float]]) -> list[Banded]:
    return [(float(x), y, math.nan, math.nan) for x, y in points]


def drift_section(material: ReportData) -> Section | None:
    """How far sites' weights move away in a round."""
    if material.single:
        run = material.first
        series = {site: _bare(_moved(run, site).items()) for site in run.summary["sites"]}
    else:
        series = {method.name: _mean_moved(method) for method in material.methods}
    known = {name: points for name, points in series.items() if len(points) > 1}
    if not known:
        return None
    top = max(point[1] for points in known.values() for point in points)
    axes = Axes("round", "distance", lambda v: f"{v:.3g}", (0.0, 2 * top or 1.0), 0.2 * top)
    who = "hospital" if material.single else "method"
    words = "No unit: the Euclidean norm of the difference of all weights."
    drawn = line_chart(f"Distance of a hospital's weights from the shared ones, by {who}", known, axes, words)
    note = (
        "Drift is ‖w_k − w‖₂: how far a hospital's training moved from the model that it was sent. Hospitals that "
        "drift far pull the average apart."
    )
    title = "Drift: how far hospitals pull the model apart"
    return Section("drift", title, join_cells([paragraph(note), drawn]), {"Engineer": "Do hospitals pull it apart?"})


def _moved(run: Run, site: SiteId | None = None) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for row in run.rows:
        told = row["event"] == "train" and row.get("drift") is not None and row["site"] != POOLED
        if told and site in (None, row["site"]):
            found.setdefault(row["round"], []).append(row["drift"])
    return {round: sum(values) / len(values) for round, values in sorted(found.items())}


def _mean_moved(method: Method) -> list[Banded]:
    told = [{at: (moved, 1) for at, moved in _moved(run).items()} for run in method.runs]
    return [(x, y, *((low, high) if len(told) > 1 else (math.nan, math.nan))) for x, y, low, high in _over_seeds(told)]


def forgetting_section(material: ReportData) -> Section | None:
    """What deployments made sites forget, and gain."""
    series: dict[str, list[Banded]] = {}
    for method in material.methods:
        found = [run["forgetting"] for run in method.summaries if run.get("forgetting")]
        for kind in ("forgotten", "gained") if material.single else ("forgotten",):
            told = [{at: (share, 0) for at, share in one[kind]} for one in found if one.get(kind)]
            if told:
                points = _over_seeds(told)
                shares = [(x, y, max(low, 0.0), min(high, 1.0)) for x, y, low, high in points]  # NaN stays
                series[kind if material.single else method.name] = shares
    known = {name: points for name, points in series.items() if points}
    if not known:
        return None
    axes = Axes("round whose model was deployed", "share of training images")
    note = (
        "Forgotten: training images that a hospital's model had right before it received the shared one, and wrong "
        "after; gained: the other way round."
    )
    what = "lost and gained" if material.single else "forgotten, by method"
    drawn = line_chart(f"Training images {what} when a model is deployed", known, axes)
    return Section("forgetting", "Forgetting", join_cells([paragraph(note), drawn]), {"Engineer": "What is forgotten?"})


def gap_section(material: ReportData) -> Section | None:
    """Accuracy on training against validation images."""
    rows = _gap_sites(material.first) if material.single else _gap_methods(material.methods)
    if not rows:
        return None
    head = ["hospital" if material.single else "method", "training", "validation", "gap"]
    note = (
        "The gap is what a model does beyond validation images on those it has learnt from: large where it memorises."
    )
    several = "" if material.single else " (mean ± standard deviation over seeds)"
    found = table(f"Accuracy on training and validation images{several}", head, rows)
    asked: Asked = {"Engineer": "Does it memorise?", "Data-protection officer": "Does it memorise training images?"}
    return Section("gap", "Train–validation gap", join_cells([paragraph(note), found]), asked)


def _gap_sites(run: Run) -> list[list[str]]:
    model, every = run.best["model"], {**run.summary["sites"], "all": run.summary.get("merged", {})}
    rows = []
    for site, models in every.items():
        parts = models.get(model, {})
        if parts.get("gap") is not None:
            seen = [fixed(parts[part]["accuracy"]) for part in ("train", "validation")]
            rows.append([site, *seen, fixed(parts["gap"])])
    return rows


def _gap_methods(methods: Sequence[Method]) -> list[list[str]]:
    rows = []
    for method in methods:
        if not math.isnan(metric_value(method.summaries[0], "gap")):
            models = [run["merged"][run["headline"]["model"]] for run in method.summaries]
            seen = [_spread([found[part]["accuracy"] for found in models]) for part in ("train", "validation")]
            rows.append([method.name, *seen, claims.format_mean_and_std(method.summaries, "gap")])
    return rows


def _spread(values: Sequence[float]) -> str:
    found = summarise_sample(values)
    return fixed(found.mean) + ("" if math.isnan(found.std) else f" ± {found.std:.3f}")
