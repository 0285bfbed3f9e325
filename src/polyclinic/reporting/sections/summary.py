"""The findings in sentences. A method is called better only where a test found it."""

import math
from collections.abc import Iterator, Sequence

from polyclinic.core import HELD_OUT, PUBLIC
from polyclinic.evaluation.comparison import UNTESTED, PairwiseTest, metric_value
from polyclinic.evaluation.statistics import summarise_sample
from polyclinic.evaluation.task import task_of
from polyclinic.reporting.blocks import Block, Bullets, Callout, Paragraph, Section
from polyclinic.reporting.formatting import format_count, format_megabytes, format_names
from polyclinic.reporting.privacy_statement import privacy_line
from polyclinic.reporting.remarks import describe_pooling
from polyclinic.reporting.report_data import Method, ReportData, Run
from polyclinic.reporting.sections.tasks import task_report


def summary_section(data: ReportData) -> Section:
    lead, *rest = _describe_run(data) if data.is_single else _describe_methods(data)
    blocks: list[Block] = [Paragraph(lead, "lead"), *([Bullets(tuple(rest))] if rest else [])]
    return Section(
        "answer",
        "Summary",
        [Callout(blocks)],
        {"Clinician": "What was found?", "Statistician": "What was found?"},
    )


def _describe_run(data: ReportData) -> Iterator[str]:
    method = data.methods[0]
    run = method.first
    if run.summary.pooled_from == "nothing" and math.isnan(metric_value(run.summary, data.main_metric)):
        yield f"{method.name} played {format_count(run.summary.rounds, 'round')}, and its figures are at the sites."
        yield from describe_pooling(run.summary)
        yield from _describe_cost(run)
        return
    yield f"{method.name} was right on {_describe_result(method)}{_describe_images(run)}."
    yield from task_report(run.summary).describe_errors(run.summary)
    yield from _describe_extremes(data, run, len(method.runs))
    if run.summary.pooled_from != "predictions":
        yield from describe_pooling(run.summary)
    if run.summary.algorithm != "local":
        yield (
            "This run alone does not show whether a site would do as well with its own images: run the recipe with "
            "algorithm: local as well and give both folders."
        )
    yield from _describe_cost(run)


def _describe_result(method: Method) -> str:
    """The main metric, with an interval over seeds where there are several."""
    summary = method.first.summary
    report, headline = task_report(summary), summary.headline
    if len(method.runs) == 1:
        return report.describe_scores(headline.scores, task_of(summary).main_metric, headline.part)
    spread = summarise_sample([metric_value(found, task_of(summary).main_metric) for found in method.summaries])
    bounds = max(0.0, spread.low), min(1.0, spread.high)
    return report.describe_value(spread.mean, *bounds, headline.part, f" over {spread.n} seeds")


def _describe_images(run: Run) -> str:
    known = {HELD_OUT: " that belong to no site", PUBLIC: " of the server's public set"}
    return known.get(run.summary.headline.model, f" of {format_count(len(run.summary.sites), 'site')}")


def _describe_extremes(data: ReportData, run: Run, seeds: int) -> Iterator[str]:
    """The sites with the lowest and the highest accuracy."""
    values = {site: scores.value(data.main_metric) for site, scores in run.site_scores.items()}
    known = {site: value for site, value in values.items() if not math.isnan(value)}
    if len(known) > 1:
        part, report = run.summary.headline.part, task_report(run.summary)
        low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        level = {report.describe_value(value, math.nan, math.nan, part) for value in known.values()}
        if len(level) == 1:
            first = "" if seeds == 1 else " (first seed)"
            yield f"Sites do not differ{first}: {level.pop()} are right at each of {format_count(len(known), 'site')}."
            return
        lowest, highest = (
            report.describe_scores(run.site_scores[site], data.main_metric, part) for site in (low, high)
        )
        whose = "Sites differ" if seeds == 1 else "Sites differ (first seed)"
        yield f"{whose}: {low} has the lowest share right, {lowest}, and {high} the highest, {highest}."


def _describe_cost(run: Run) -> Iterator[str]:
    cost, privacy = run.summary.cost, run.summary.privacy
    nothing = "privacy: nothing is claimed, no figure bounds how much the model reveals about patients"
    claim = nothing if privacy is None else privacy_line(privacy)
    moved = f"{format_megabytes(cost.bytes_up + cost.bytes_down)} MB were sent in {run.summary.rounds} rounds"
    yield f"{'All images were pooled in one place' if run.summary.pooled else moved}; {claim}."


def _describe_methods(data: ReportData) -> Iterator[str]:
    ranked = sorted(data.federated or data.methods, key=_mean_result, reverse=True)
    top = ranked[0]
    level = [method.name for method in ranked[1:] if _mean_result(method) == _mean_result(top)]
    shared = f", as was {format_names(level)}" if level else ""
    rest = f"{shared}, the highest share of the methods that learn together" if len(ranked) > 1 else ""
    yield f"{top.name} was right on {_describe_result(top)}{_describe_images(top.first)}{rest}."
    if others := [f"{method.name} {100 * _mean_result(method):.0f}" for method in data.methods if method not in ranked]:
        yield f"For comparison, right of 100: {format_names(others)}."
    yield from _describe_tests(top, [method for method in data.methods if method is not top], data.pairs)
    yield from _describe_local_training(data, top)
    yield from _describe_extremes(data, top.first, len(top.runs))
    yield from _describe_cost(top.first)


def _mean_result(method: Method) -> float:
    metric = task_of(method.first.summary).main_metric
    found = summarise_sample([metric_value(run, metric) for run in method.summaries]).mean
    return -math.inf if math.isnan(found) else found


def _describe_tests(top: Method, others: Sequence[Method], pairs: Sequence[PairwiseTest]) -> Iterator[str]:
    verdicts = {other.name: _verdict(top.name, other.name, pairs) for other in others}
    tested = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    over = next((pair.over for pair in pairs if pair.over), "")
    beaten, beating, undecided = ([n for n, v in tested.items() if v == sign] for sign in (1, -1, 0))
    test = f"p < 0.05 over {over}, corrected for {len(pairs)} comparisons"
    once = "" if "seeds" in over else ", of these trained models: one seed says nothing of training again"
    if beaten:
        yield f"{top.name} is better than {format_names(beaten)} ({test}{once})."
    if beating:
        yield f"{format_names(beating)} {'is' if len(beating) == 1 else 'are'} better than {top.name} ({test}{once})."
    if undecided:
        yield f"{top.name} against {format_names(undecided)}: the difference may be chance, not decided ({over})."
    if untested := [name for name in verdicts if name not in tested]:
        yield f"Against {format_names(untested)} nothing was tested: {UNTESTED}."


def _verdict(a: str, b: str, pairs: Sequence[PairwiseTest]) -> int | None:
    """1 if `a` is better, −1 if `b` is, 0 if it is not decided, None if it was not tested."""
    for pair in pairs:
        if {pair.a, pair.b} == {a, b}:
            return None if math.isnan(pair.p) else pair.verdict * (1 if pair.a == a else -1)
    return None


def _describe_local_training(data: ReportData, top: Method) -> Iterator[str]:
    """At which sites the best method is better than training alone."""
    tests = [test for test in data.site_tests if test.a == top.name and not math.isnan(test.p)]
    if not tests:
        return
    gains, losses = ([test.site or "" for test in tests if test.verdict == sign] for sign in (1, -1))
    undecided = len(tests) - len(gains) - len(losses)
    where = "all" if undecided == len(tests) else f"{undecided} of the"
    parts = {
        f"at {format_names(gains, 5)} {top.name} was better than training alone": gains,
        f"at {format_names(losses, 5)} training alone was better": losses,
        f"at {where} {len(tests)} sites the test images do not decide": undecided,
    }
    yield f"Site by site: {'; '.join(words for words, sites in parts.items() if sites)}."
