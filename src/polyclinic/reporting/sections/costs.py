"""Bytes, seconds, refusals and failures."""

from collections import Counter
from collections.abc import Iterator

from polyclinic.evaluation.comparison import mean_of_known
from polyclinic.evaluation.rows import RollbackRow, SiteOutcome, group_pairs
from polyclinic.reporting.blocks import Block, Bullets, Paragraph, Section, Table
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
    return Section(
        "costs",
        "Communication and time",
        [
            table,
            Paragraph(
                "Bytes are measured on the wire: down to sites, up to the server, the final evaluation and "
                "repeated rounds included. Seconds are of this machine and engine; compare them within this report "
                f"alone.{f' Engine: {engine.name}.' if engine else ''}",
                "note",
            ),
        ],
        {"Engineer": "What did it cost to run?"},
    )


def _site_rows(run: Run) -> list[list[str]]:
    replies = group_pairs((site, (row.event, reply)) for row in run.cost_rows for site, reply in row.sites.items())
    rows = [
        [
            site,
            format_megabytes(sum(reply.down for _, reply in found)),
            format_megabytes(sum(reply.up for _, reply in found)),
            format_duration(sum(reply.seconds for _, reply in found)),
            str(sum(event == "round" for event, _ in found)),
        ]
        for site, found in replies.items()
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
    return [
        method.name,
        f"{rounds:g}",
        *map(format_megabytes, (down, up, (down + up) / max(rounds, 1))),
        seconds,
        format_duration(mean_of_known([cost.site_seconds for cost in costs])),
    ]


def failures_section(data: ReportData) -> Section:
    """Refused and lost updates, rounds that failed, resumed runs, runs that have not ended."""
    runs = [(method, run) for method in data.methods for run in method.runs]
    rows = [row for one in runs for row in (*_outlier_rows(*one), *_failure_rows(*one))]
    events = [
        *(f"Not ended: {one.progress} ({one.folder})." for one in data.unfinished),
        *(words for m in data.methods for run in m.runs for words in _describe_events(m, run, data.is_single)),
    ]
    blocks: list[Block] = [Bullets(tuple(events))] if events else []
    if rows:
        blocks.append(
            Table(
                "Updates that were refused, lost or left out",
                ["site", "run", "what", "why", "times", "in rounds"],
                rows[:MOST_ROWS],
            )
        )
        if len(rows) > MOST_ROWS:
            blocks.append(Paragraph(f"{len(rows) - MOST_ROWS} more kinds are in the ledgers.", "note"))
    blocks = blocks or [Paragraph("None: every site that was asked answered, and every answer was accepted.")]
    return Section(
        "failures",
        "Refusals and failures",
        blocks,
        {"Engineer": "What went wrong?", "Data-protection officer": "Was anything refused?"},
    )


def _failure_rows(method: Method, run: Run) -> list[list[str]]:
    replies = ((row.round, site, reply) for row in run.cost_rows for site, reply in row.sites.items())
    rounds = group_pairs(
        ((site, _kind_of_loss(reply), reply.why or "–"), round)
        for round, site, reply in replies
        if reply.outcome in LOST
    )
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


def _outlier_rows(method: Method, run: Run) -> list[list[str]]:
    """Return a row for each site whose updates were far from the others'."""
    replies = ((row.round, site, reply) for row in run.cost_rows for site, reply in row.sites.items())
    found = group_pairs(
        ((site, reply.outlier), (round, reply.ratio)) for round, site, reply in replies if reply.outlier
    )
    return [
        [
            site,
            _run_label(method, run),
            f"outlier: {done}",
            f"moved up to {max(ratio or 0 for _, ratio in rounds):,.3g} times as far as the median site",
            str(len(rounds)),
            format_names([str(round) for round, _ in rounds], 5),
        ]
        for (site, done), rounds in found.items()
    ]


def _kind_of_loss(reply: SiteOutcome) -> str:
    """The outcome; "declined" where the site refused, since a kind says what the server refused."""
    return "declined" if reply.outcome == "refused" and reply.kind is None else str(reply.outcome)


def _run_label(method: Method, run: Run) -> str:
    """The method, with the run's number where there are several."""
    return method.name if len(method.runs) == 1 else f"{method.name}, run {method.runs.index(run) + 1}"


def _describe_events(method: Method, run: Run, single: bool) -> Iterator[str]:
    events = Counter(row.event for row in run.ledger)
    name = "" if single and len(method.runs) == 1 else f"{_run_label(method, run)}: "
    for site, why in run.summary.absent.items():
        yield f"{name}{site} took no part: {why}."
    for site, why in run.summary.doubted.items():
        yield f"{name}{site} {why}."
    for site, why in run.summary.withheld.items():
        yield f"{name}{site} told no scores of the final model: {why}."
    if failed := events["failed round"]:
        yield f"{name}{format_count(failed, 'round')} failed: too few updates were accepted, the model is unchanged."
    if resumed := events["resumed"]:
        yield f"{name}interrupted and resumed {format_count(resumed, 'time')}; interrupted rounds are counted in costs."
    for row in run.ledger:
        if isinstance(row, RollbackRow):
            yield f"{name}went back from round {row.undone} to round {row.round}; what the rounds cost stays counted."
    if run.summary.stopped_early:
        yield f"{name}stopped early after round {run.summary.rounds}, as the recipe asks."
