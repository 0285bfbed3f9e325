"""Bytes, seconds, refusals and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from polyclinic.evaluation.comparison import mean_of_known
from polyclinic.reporting.blocks import Block, Bullets, Paragraph, Questions, Section, Table
from polyclinic.reporting.formatting import format_count, format_duration, format_megabytes, format_names
from polyclinic.reporting.report_data import Method, ReportData, Run

LOST = ("refused", "dead", "late", "error")
"""Outcomes of an update that did not count."""
MEANING = {
    "refused": "the server would not take its reply",
    "dead": "no longer there",
    "late": "no reply before the deadline",
    "error": "failed on its side",
    "declined": "the site would not do it",
}
MOST_ROWS = 40


def costs_section(data: ReportData) -> Section:
    """Bytes both ways and seconds: by site of a run, by method of a comparison."""
    if data.is_single:
        head = ["site", "MB received", "MB sent", "working time", "rounds"]
        table = Table("Communication and time at each site", head, _site_rows(data.first))
    else:
        head = ["method", "rounds", "MB down", "MB up", "MB a round", "wall-clock", "sites' time"]
        table = Table("Communication and time (mean over seeds)", head, [_method_row(m) for m in data.methods])
    engine = data.first.summary.engine
    note = (
        "Bytes are measured on the wire: down to sites, up to the server, the final evaluation and repeated rounds "
        "included. Seconds are of this machine and engine; compare them within this report alone."
        f"{f' Engine: {engine.name}.' if engine else ''}"
    )
    return Section(
        "costs", "Communication and time", [table, Paragraph(note, "note")], {"Engineer": "What did it cost to run?"}
    )


def _site_rows(run: Run) -> list[list[str]]:
    down, up, seconds, rounds = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for row in run.cost_rows:
        for site, outcome in row.sites.items():
            down[site] += outcome.down
            up[site] += outcome.up
            seconds[site] += outcome.seconds  # type: ignore[assignment]
            rounds[site] += row.event == "round"
    rows = [
        [
            site,
            format_megabytes(down[site]),
            format_megabytes(up[site]),
            format_duration(seconds[site]),
            str(rounds[site]),
        ]
        for site in down
    ]
    cost = run.summary.cost
    time = f"{format_duration(cost.site_seconds)} ({format_duration(cost.seconds)} on the clock)"
    both = format_megabytes(cost.bytes_down), format_megabytes(cost.bytes_up)
    return [*rows, ["all", *both, time, str(run.summary.rounds)]]


def _method_row(method: Method) -> list[str]:
    costs = [run.cost for run in method.summaries]
    rounds = mean_of_known([float(run.rounds) for run in method.summaries])
    seconds = format_duration(mean_of_known([cost.seconds for cost in costs]))
    if method.first.summary.pooled:
        return [method.name, f"{rounds:g}", "images", "images", "images", seconds, "–"]
    down, up = mean_of_known([float(c.bytes_down) for c in costs]), mean_of_known([float(c.bytes_up) for c in costs])
    moved = [format_megabytes(amount) for amount in (down, up, (down + up) / max(rounds, 1))]
    at_sites = format_duration(mean_of_known([cost.site_seconds for cost in costs]))
    return [method.name, f"{rounds:g}", *moved, seconds, at_sites]


def failures_section(data: ReportData) -> Section:
    """Refused and lost updates, rounds that failed, resumed runs, runs that have not ended."""
    rows = [row for method in data.methods for run in method.runs for row in _failure_rows(method, run)]
    events = [
        f"Not ended: {one.progress}{'' if data.withholds_seeds else f' ({one.folder})'}." for one in data.unfinished
    ]
    for method in data.methods:
        for run in method.runs:
            events += _describe_events(method, run, data.is_single)
    blocks: list[Block] = [Bullets(tuple(events))] if events else []
    if rows:
        head = ["site", "run", "what", "why", "times", "in rounds"]
        blocks.append(Table("Updates that were refused or lost", head, rows[:MOST_ROWS]))
        if len(rows) > MOST_ROWS:
            blocks.append(Paragraph(f"{len(rows) - MOST_ROWS} more kinds are in the ledgers.", "note"))
    blocks = blocks or [Paragraph("None: every site that was asked answered, and every answer was accepted.")]
    questions: Questions = {"Engineer": "What went wrong?", "Data-protection officer": "Was anything refused?"}
    return Section("failures", "Refusals and failures", blocks, questions)


def _failure_rows(method: Method, run: Run) -> list[list[str]]:
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for row in run.cost_rows:
        for site, reply in row.sites.items():
            if reply.outcome in LOST:
                declined = reply.outcome == "refused" and reply.kind is None  # a kind says what the server refused
                what = "declined" if declined else str(reply.outcome)
                rounds.setdefault((site, what, reply.why or "–"), []).append(row.round)
    return [
        [
            site,
            _run_label(method, run),
            f"{what}: {MEANING[what]}",
            why,
            str(len(found)),
            format_names([*map(str, found)], 5),
        ]
        for (site, what, why), found in rounds.items()
    ]


def _run_label(method: Method, run: Run) -> str:
    """Without the seed, which may have to stay secret."""
    return method.name if len(method.runs) == 1 else f"{method.name}, run {method.runs.index(run) + 1}"


def _describe_events(method: Method, run: Run, single: bool) -> Iterator[str]:
    events = Counter(row.event for row in run.ledger)
    name = "" if single and len(method.runs) == 1 else f"{_run_label(method, run)}: "
    for site, why in run.summary.absent.items():
        yield f"{name}{site} took no part: {why}."
    if failed := events["failed round"]:
        rounds = format_count(failed, "round")
        yield f"{name}{rounds} failed for want of acceptable updates and left the model as it was."
    if resumed := events["resumed"]:
        yield f"{name}interrupted and resumed {format_count(resumed, 'time')}; interrupted rounds are counted in costs."
    if run.summary.stopped_early:
        yield f"{name}stopped early after round {run.summary.rounds}, as the recipe asks."
