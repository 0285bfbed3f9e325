"""The first thing a reader sees: what was found, in plain words, and never "better" without a test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from polyclinic.evaluation.comparison import metric_value, nan_if_none
from polyclinic.evaluation.statistics import summarise_sample
from polyclinic.evaluation.summary import headline_at_site, pools_images
from polyclinic.reporting.html.formatting import count, megabytes, of_hundred, series, some
from polyclinic.reporting.html.pairwise_tests import UNTESTED, Difference, all_pairs, at_sites
from polyclinic.reporting.html.report_data import Method, ReportData, Run
from polyclinic.reporting.html.section import Section
from polyclinic.reporting.html.tags import bullet_list, paragraph, tag
from polyclinic.reporting.privacy_statement import privacy_line


def summary_section(material: ReportData) -> Section:
    told = list(_of_run(material) if material.single else _of_methods(material))
    lead, *rest = told
    body = tag("div", paragraph(lead, class_="lead"), bullet_list(rest) if rest else "", class_="verdict")
    return Section(
        "answer", "In plain words", body, {"Clinician": "What was found?", "Statistician": "What was found?"}
    )


def _of_run(material: ReportData) -> Iterator[str]:
    method = material.methods[0]
    run = method.first
    yield f"{method.name} was right on {_right(method)}{_where(run)}."
    yield from _found(run, material.classes)
    yield from _extremes(run, len(method.runs))
    if run.summary["algorithm"] != "local":
        yield (
            "Whether a hospital would do as well with its own images alone, this run does not tell: run the recipe "
            "with algorithm: local and give its folder too."
        )
    yield from _price(run)


def _right(method: Method) -> str:
    """Of 100, with an interval over seeds where there are several."""
    if len(method.runs) == 1:
        return of_hundred(method.first.best)
    spread = summarise_sample([metric_value(found, "accuracy") for found in method.summaries])
    edges = f"{100 * max(0.0, spread.low):.0f} to {100 * min(1.0, spread.high):.0f} over {spread.n} seeds"
    return f"{100 * spread.mean:.0f} of 100 {method.first.best['part']} images (95 % interval {edges})"


def _where(run: Run) -> str:
    model = run.best["model"]
    if model in ("held-out", "public"):
        return " that belong to no hospital" if model == "held-out" else " of the server's public set"
    return f" of {count(len(run.summary['sites']), 'hospital')}"


def _found(run: Run, classes: Sequence[str]) -> Iterator[str]:
    """Of two classes: how many of each were recognised."""
    counts = run.best.get("confusion")
    if not counts or len(counts) != 2:
        return
    (right, missed), (wrong, found) = counts
    if right + missed and wrong + found:
        yield (
            f"Of {wrong + found:,} images of {classes[1]} it found {found:,} (sensitivity "
            f"{found / (wrong + found):.0%}); of {right + missed:,} of {classes[0]} it took {missed:,} for "
            f"{classes[1]} (specificity {right / (right + missed):.0%})."
        )


def _extremes(run: Run, seeds: int) -> Iterator[str]:
    served = {site: headline_at_site(run.summary, site) for site in run.summary["sites"]}
    known = {site: row for site, row in served.items() if row.get("accuracy") is not None}
    if len(known) > 1:
        ranked = sorted(known, key=lambda site: nan_if_none(known[site]["accuracy"]))
        low, high = ranked[0], ranked[-1]
        whose = "Hospitals differ" if seeds == 1 else "Hospitals differ (first seed)"
        yield (
            f"{whose}: {low} has the lowest share right, {of_hundred(known[low])}, and {high} the highest, "
            f"{of_hundred(known[high])}."
        )


def _price(run: Run) -> Iterator[str]:
    cost, found = run.summary["cost"], run.summary.get("privacy")
    claim = (
        privacy_line(found)
        if found
        else "privacy: nothing is claimed, no figure bounds what the model tells of patients"
    )
    sent = "All images were pooled in one place" if pools_images(run.summary) else ""
    moved = f"{megabytes(cost['bytes_up'] + cost['bytes_down'])} MB went both ways in {run.summary['rounds']} rounds"
    yield f"{sent or moved}; {claim}."


def _of_methods(material: ReportData) -> Iterator[str]:
    ranked = sorted(material.together or material.methods, key=_accuracy, reverse=True)
    top = ranked[0]
    level = [method.name for method in ranked[1:] if _accuracy(method) == _accuracy(top)]
    shared = f", as was {series(level)}" if level else ""
    rest = f"{shared}, the highest share of the methods that learn together" if len(ranked) > 1 else ""
    yield f"{top.name} was right on {_right(top)}{_where(top.first)}{rest}."
    beside = [method for method in material.methods if method not in ranked]
    if beside:
        yield f"Beside them, right of 100: {series([f'{one.name} {100 * _accuracy(one):.0f}' for one in beside])}."
    pairs = all_pairs(material.methods)
    yield from _against(top, [method for method in material.methods if method is not top], pairs)
    if material.alone is not None and material.together:
        yield from _alone(material, top)
    yield from _extremes(top.first, len(top.runs))
    yield from _price(top.first)


def _accuracy(method: Method) -> float:
    found = nan_if_none(summarise_sample([metric_value(run, "accuracy") for run in method.summaries]).mean)
    return -math.inf if math.isnan(found) else found


def _against(top: Method, others: Sequence[Method], pairs: Sequence[Difference]) -> Iterator[str]:
    """What the tests allow to be said."""
    verdicts = {other.name: _verdict(top.name, other.name, pairs) for other in others}
    tested = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    over = next((one.over for one in pairs if one.over), "")
    beaten, beating = ([n for n, v in tested.items() if v == sign] for sign in (1, -1))
    open_ = [name for name, verdict in tested.items() if verdict == 0]
    test = f"p < 0.05 over {over}, corrected for {len(pairs)} comparisons"
    once = "" if "seeds" in over else ", of these trained models: one seed says nothing of training again"
    if beaten:
        yield f"{top.name} is better than {series(beaten)} ({test}{once})."
    if beating:
        yield f"{series(beating)} {'is' if len(beating) == 1 else 'are'} better than {top.name} ({test}{once})."
    if open_:
        yield f"{top.name} against {series(open_)}: the difference may be chance, not decided ({over})."
    untested = [name for name in verdicts if name not in tested]
    if untested:
        yield f"Against {series(untested)} nothing was tested: {UNTESTED}."


def _verdict(a: str, b: str, pairs: Sequence[Difference]) -> int | None:
    for one in pairs:
        if {one.a, one.b} == {a, b}:
            return None if math.isnan(one.p) else one.verdict * (1 if one.a == a else -1)
    return None


def _alone(material: ReportData, top: Method) -> Iterator[str]:
    """The first question of a hospital."""
    assert material.alone is not None
    tests = [one for one in at_sites(material.together, material.alone, material.sites) if one.a == top.name]
    known = [one for one in tests if not math.isnan(one.p)]
    if not known:
        return
    gains, loses = ([one.site or "" for one in known if one.verdict == sign] for sign in (1, -1))
    open_ = len(known) - len(gains) - len(loses)
    parts = []
    if gains:
        parts.append(f"at {some(gains)} {top.name} was better than training alone")
    if loses:
        parts.append(f"at {some(loses)} training alone was better")
    if open_:
        where = "all" if open_ == len(known) else f"{open_} of the"
        parts.append(f"at {where} {len(known)} hospitals the test images do not decide")
    yield f"Hospital by hospital: {'; '.join(parts)}."
