"""The board as HTML: a page that stands by itself, and the parts of it that change, made of the report's blocks."""

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from markupsafe import Markup

from polyclinic.dashboard.follow import PageState
from polyclinic.dashboard.privacy_spent import Spent
from polyclinic.dashboard.run import HELD_OUT_IMAGES, METRICS, RECENT, Curve, RunStatus
from polyclinic.evaluation.task import task_of
from polyclinic.reporting.blocks import Block, Bullets, Cell, Grid, Inline, Paragraph, Strong, Table
from polyclinic.reporting.charts import LineAxes, Series, line_chart, without_band
from polyclinic.reporting.formatting import (
    MISSING,
    format_compact,
    format_count,
    format_digits,
    format_duration,
    format_megabytes,
    format_names,
    format_number,
    round_up,
)
from polyclinic.reporting.html.render import bullet_list, page_head, render_blocks, render_inline
from polyclinic.reporting.html.style import CSS
from polyclinic.reporting.html.tags import join_markup, tag
from polyclinic.reporting.privacy_statement import UNITS
from polyclinic.reporting.sections.costs import MEANING, MOST_ROWS
from polyclinic.reporting.sections.tasks import task_report
from polyclinic.storage.run_folder import STATES

STYLE = CSS + "progress{width:100%;accent-color:var(--c0)}[hidden]{display:none}"
SCRIPT = resources.files("polyclinic.dashboard").joinpath("board.js").read_text(encoding="utf-8")
MOST_POINTS, MOST_SITES = 200, 100
AXES = {
    "accuracy": ("Accuracy", LineAxes("round", "accuracy")),
    "auc": ("ROC-AUC", LineAxes("round", "AUC (0.5 is chance)", format_digits)),
}
RUN_MARKS = {"finished": "✓ finished", "waiting": "waiting", "failed": "✗ failed", "stopped": "‖ stopped"}


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_csp_hash(SCRIPT)}",
        f"style-src {_csp_hash(STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""One script, one style, and no server but this one: the browser runs nothing that a name may contain."""


def render_page(view: PageState) -> str:
    """The whole page, as it stands now."""
    parts = render_parts(view)
    head = [*page_head(tab_title(view), STYLE), Markup('<link rel="icon" href="data:,">')]
    sections = (
        tag("section", html, id=name, aria_labelledby=f"{name}-title", hidden=None if html else "hidden")
        for name, html in parts.items()
        if name != "now"
    )
    without_script = tag("noscript", "Without JavaScript this page does not update: reload it for news. ")
    body = [
        tag("a", "Skip to the board", href="#main", class_="skip"),
        tag("header", tag("p", page_kind(view), class_="kind", id="kind"), tag("h1", view.title, id="title")),
        tag(
            "main",
            tag("p", view.sentence, id="state", class_="lead", aria_live="polite"),
            tag("div", parts["now"], id="now"),
            *sections,
            id="main",
            tabindex="-1",
        ),
        tag(
            "footer",
            tag("p", without_script, tag("span", "", id="link", role="status")),
            tag("p", "The board reads the folder and writes nothing. Research software, no medical device."),
        ),
        tag("script", Markup(SCRIPT)),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def tab_title(view: PageState) -> str:
    """The state first, since a narrow tab shows only the beginning."""
    played, total = view.rounds_played
    progress = f"{played}/{total} " if view.state == "running" else ""
    return f"{progress}{view.state} · {view.title} · polyclinic board"


def page_kind(view: PageState) -> str:
    return "Board of a run" if view.single else "Board of a comparison"


def render_parts(view: PageState) -> dict[str, Markup]:
    """The parts that change, by the id of their element; empty where there is nothing to show."""
    current = view.current_run
    sites = "Sites" if view.single or current is None else f"Sites in {view.run_label(current)}"
    builders: dict[str, tuple[str, Callable[[PageState], list[Block]]]] = {
        "runs": ("Methods and seeds", _run_blocks),
        "learning": ("Learning curves", _learning_blocks),
        "sites": (sites, _site_blocks),
        "failures": ("Refusals and failures", _failure_blocks),
        "privacy": ("Privacy", _privacy_blocks),
    }
    parts = {"now": _status_part(view)}
    for name, (heading, build) in builders.items():
        blocks = build(view)
        parts[name] = tag("h2", heading, id=f"{name}-title") + render_blocks(blocks) if blocks else Markup("")
    return parts


def _status_part(view: PageState) -> Markup:
    (played, total), cost = view.rounds_played, view.cost
    share = f"{played} of {format_count(total, 'round')} played"
    bar = tag("progress", share, max=max(total, 1), value=played, aria_label=share) if total else ""
    facts: dict[str, Sequence[Inline]] = {
        "Rounds": _round_facts(view),
        "Time": _time_facts(view),
        "Bytes, measured": [
            f"{format_megabytes(cost.bytes_down)} MB sent to sites",
            f"{format_megabytes(cost.bytes_up)} MB received",
        ],
        "Sites' replies": _reply_facts(view),
    }
    cards = [tag("h3", heading) + bullet_list(map(render_inline, items)) for heading, items in facts.items()]
    return join_markup([bar, *(tag("p", words) for words in _next_steps(view)), bullet_list(cards, class_="who")])


def _next_steps(view: PageState) -> list[str]:
    """What a reader can do in a state in which nothing goes on."""
    if view.state == "finished":
        summary = view.runs[0].summary if view.single else None
        result = "Now "
        if summary is not None and not math.isnan(summary.headline.scores.value(task_of(summary).main_metric)):
            headline, metric = summary.headline, task_of(summary).main_metric
            scores = task_report(summary).describe_scores(headline.scores, metric, headline.part)
            result = f"The model is right in {scores}; "
        return [f"{result}polyclinic report shows all figures and which differences are beyond chance."]
    silence = view.seconds_since_news
    quiet = f"No news for {format_duration(silence, 0)}. " if silence is not None else ""
    if view.state == "failed" and view.single:
        return [f"{quiet}Correct what is named below, then continue with polyclinic resume."]
    if view.state == "stopped":
        again = "polyclinic resume continues it" if view.single else "the same command continues where it stopped"
        return [f"{quiet}Nothing that was finished is lost: {again}."]
    if view.current_run is not None and view.state == "running" and view.current_run.is_slow:
        return [f"{quiet}Its process lives, but this takes longer than its rounds did."]
    return []


def _round_facts(view: PageState) -> list[str]:
    played, total = view.rounds_played
    facts = [f"{played} of {total} played"] if total else ["the recipe is not written yet"]
    if not view.single:
        counts = {state: len(view.runs_in_state(state)) for state in STATES}
        facts.append("runs: " + ", ".join(f"{number} {state}" for state, number in counts.items() if number))
    run = view.current_run
    if run is not None and run.state == "running" and run.seconds_since_news is not None:
        now = "the test" if run.is_testing else f"round {run.current_round}" if run.current_round else "preparing"
        began = run.current_round > run.rounds_done or run.is_testing
        facts.append(f"{now} began {format_duration(run.seconds_since_news, 0)} ago" if began else f"now: {now}")
    return facts


def _time_facts(view: PageState) -> list[str]:
    run, facts = view.current_run, []
    if run is not None and run.median_round_seconds is not None:
        of = "of the last ten" if run.rounds_done >= RECENT else "so far"
        facts.append(f"{format_duration(run.median_round_seconds)} a round (median {of})")
    if view.seconds_left is not None:
        facts.append(f"about {format_duration(view.seconds_left)} left, without final tests")
    elif view.state == "running" and not (run is not None and run.is_testing):
        facts.append("the first round will show how long a round takes")
    if view.seconds_since_news is not None:
        facts.append(f"last news {format_duration(view.seconds_since_news, 0)} ago")
    return facts or ["nothing yet"]


def _reply_facts(view: PageState) -> list[str]:
    run, lost = view.current_run, f"{view.cost.refused} refused, {view.cost.failed} lost"
    if run is None or not run.sites or not run.rounds_done:
        return [lost]
    counted = sum(site.last == run.rounds_done for site in run.sites)
    return [f"{counted} of {len(run.sites)} counted in round {run.rounds_done}", lost]


def _run_blocks(view: PageState) -> list[Block]:
    """Methods × seeds, and the figures of each method so far."""
    if view.single:
        return []
    most = max(len(runs) for runs in view.methods.values())
    states: list[list[str | Cell]] = [
        [name, *(_run_cell(run) for run in runs), *([""] * (most - len(runs)))] for name, runs in view.methods.items()
    ]
    return [
        Table("Runs by method and seed", ["method", *(f"run {n}" for n in range(1, most + 1))], states),
        Table(
            "Methods so far",
            ["method", "rounds", "time a round", "accuracy, last reported", "MB to sites", "MB from them", "lost"],
            [_method_row(view, name) for name in view.methods],
        ),
    ]


def _run_cell(run: RunStatus) -> Cell:
    if run.state == "running":
        where = f"round {run.current_round} of {run.rounds}" if run.current_round else "preparing"
        return Cell(f"▶ {'testing' if run.is_testing else where}", strong=True)
    progress = f", {run.rounds_done} of {run.rounds}" if run.state == "stopped" else ""
    return Cell(f"{RUN_MARKS.get(run.state, run.state)}{progress}")


def _method_row(view: PageState, method: str) -> list[str]:
    runs = view.methods[method]
    seconds = [run.median_round_seconds for run in runs if run.median_round_seconds is not None]
    curve, costs = view.curves_by_name("accuracy")[method], [run.cost for run in runs]
    return [
        method,
        f"{sum(run.rounds_done for run in runs)} of {sum(run.rounds for run in runs)}",
        format_duration(sum(seconds) / len(seconds)) if seconds else "–",
        format_number(curve[-1][1] if curve else None),
        format_megabytes(sum(cost.bytes_down for cost in costs)),
        format_megabytes(sum(cost.bytes_up for cost in costs)),
        str(sum(cost.lost for cost in costs)),
    ]


def _learning_blocks(view: PageState) -> list[Block]:
    curves = {metric: _drawn_series(view, view.curves_by_name(metric)) for metric in METRICS}
    loss, times = curves["loss"], _drawn_series(view, view.seconds_by_method())
    nats = LineAxes.from_zero("round", "cross-entropy (nats)", loss, format_digits)
    known = [
        *((metric, _curve_title(name, curves[metric]), curves[metric], axes) for metric, (name, axes) in AXES.items()),
        ("loss", _curve_title("Loss", loss), loss, nats),
        ("time", "Time a round", times, LineAxes.from_zero("round", "seconds", times, format_compact)),
    ]
    charts = [line_chart(*chart) for chart in known if chart[2]]
    if not any(curves.values()):
        return [] if view.state == "waiting" else [Paragraph(_explain_no_curves(view)), *charts]
    several = any(len(runs) > 1 for runs in view.methods.values())
    over = "Lines are means over the seeds that have reported so far. " if several else ""
    wide = any(chart.panels for chart in charts)
    blocks: list[Block] = [
        Paragraph(
            f"{over}A round's point is of the model that it left behind, reported by sites when they next received it.",
            "note",
        ),
        *(charts if wide else [Grid(charts)]),
    ]
    by_site = _nonempty_series(view.runs[0].by_site) if view.single else {}
    if len(by_site) > 1:
        blocks.append(line_chart("sites", "Accuracy at each site", by_site, AXES["accuracy"][1]))
    return blocks


def _curve_title(metric: str, found: Series) -> str:
    if HELD_OUT_IMAGES not in found:
        return f"{metric} on validation images"
    return f"{metric} on {HELD_OUT_IMAGES}" if len(found) == 1 else metric


def _explain_no_curves(view: PageState) -> str:
    recipes = [run.recipe for run in view.runs if run.recipe is not None]
    if any(recipe.privacy is not None and recipe.privacy.metrics == "suppress" for recipe in recipes):
        return "Sites keep their figures back while this private run goes on (privacy.metrics: suppress)."
    if any(recipe.evaluate.every == 0 for recipe in recipes):
        return "The recipe asks for no figures before the end (evaluate.every: 0)."
    return "None yet: sites report on a model when they receive it in the round after."


def _drawn_series(view: PageState, curves: Mapping[str, Curve]) -> Series:
    """The names with the fewest curves come last, so that each has the same colour in all charts."""
    names = [name for metric in METRICS for name, points in view.curves_by_name(metric).items() if points]
    return _nonempty_series({name: curves[name] for name in sorted(curves, key=lambda name: -names.count(name))})


def _nonempty_series(curves: Mapping[str, Curve]) -> Series:
    """Without empty curves, and of each no more points than can be seen, the last among them."""
    return {
        name: without_band(points[:: -math.ceil(len(points) / MOST_POINTS)][::-1])
        for name, points in curves.items()
        if points
    }


def _site_blocks(view: PageState) -> list[Block]:
    run = view.current_run
    if run is None or not run.sites:
        return []
    connected = any(site.now for site in run.sites)
    shown = sorted(run.sites, key=lambda site: -(site.refused + site.lost))[:MOST_SITES]
    kept = [site for site in run.sites if site in shown]
    rows = [
        [
            site.site,
            MISSING if site.last is None else str(site.last),
            *(str(count) for count in (site.counted, site.refused, site.lost)),
            format_megabytes(site.down),
            format_megabytes(site.up),
            format_duration(site.seconds),
            *([site.now] if connected else []),
        ]
        for site in kept
    ]
    head = ["site", "last round that counted", "rounds counted", "refused", "lost", "MB received", "MB sent", "work"]
    blocks: list[Block] = [Table("Each site's replies", [*head, *(["now"] if connected else [])], rows)]
    if more := len(run.sites) - len(kept):
        blocks.append(Paragraph(f"{more} more sites, with fewer failures, are not shown.", "note"))
    return blocks


def _failure_blocks(view: PageState) -> list[Block]:
    failures = [(run, failure) for run in view.runs for failure in run.failures]
    events = [f"{view.run_label(run)}: {run.sentence}" for run in view.runs if run.state in ("failed", "unreadable")]
    for run in view.runs:
        if resumed := sum(row.event == "resumed" for row in run.ledger):
            events.append(f"{view.run_label(run)} was interrupted and resumed {format_count(resumed, 'time')}.")
        if run.status is not None and run.status.get("alive"):
            events += [f"Warning: {sentence}." for sentence in run.status.get("warnings", ())]
        events += [
            f"Refused {each['site'] or 'a stranger'}, {format_count(each['times'], 'time')}: {each['why']}."
            for each in (run.status or {}).get("refusals", ())
        ]
    blocks: list[Block] = [Bullets(tuple(events))] if events else []
    if failures:
        rows = [
            [
                one.site,
                *([] if view.single else [view.run_label(run)]),
                f"{one.kind}: {MEANING[one.kind]}",
                one.why,
                str(len(one.rounds)),
                format_names([str(round) for round in one.rounds], 5),
            ]
            for run, one in failures[-MOST_ROWS:]
        ]
        blocks.append(
            Table(
                "Replies that were refused or lost",
                ["site", *([] if view.single else ["run"]), "what", "why, the last time", "times", "in rounds"],
                rows,
            )
        )
    if len(failures) > MOST_ROWS:
        blocks.append(Paragraph(f"{len(failures) - MOST_ROWS} earlier kinds are in the ledger.", "note"))
    return blocks or ([] if view.state == "waiting" else [Paragraph("None so far.")])


def _privacy_blocks(view: PageState) -> list[Block]:
    if view.state == "waiting":
        return []
    if not view.spent:
        return [Paragraph("Nothing is claimed: no recipe here has a privacy plan.")]
    if view.single:
        return _describe_spent(view.spent[view.runs[0]])
    rows = [[view.run_label(run), *_privacy_row(spent)] for run, spent in view.spent.items()]
    notes = dict.fromkeys(f"ε leaves out {one.left_out}." for one in view.spent.values() if one.left_out)
    if bare := dict.fromkeys(r.method for r in view.runs if r.recipe is not None and r.recipe.privacy is None):
        notes[f"Nothing is claimed for {format_names(list(bare))}."] = None
    return [
        Table("Privacy spent so far", ["run", "protects", "ε so far", "δ", "allowed ε", "charged to round"], rows),
        *map(Paragraph, notes),
    ]


def _describe_spent(spent: Spent) -> list[Block]:
    _, paid, delta, allowed, _ = _privacy_row(spent)
    limit = f"{allowed} allowed" if spent.config.epsilon is not None else "no limit set"
    so_far = f"so far, round {spent.round} included, which was charged as it began"
    reason = spent.no_guarantee_reason
    blocks: list[Block] = [Paragraph(f"{reason[0].upper()}{reason[1:]}: no guarantee.")] if reason else []
    blocks.append(
        Paragraph(
            (
                Strong(f"ε {paid if reason else f'= {paid}'} at δ = {delta}"),
                f" for {UNITS[spent.config.unit]}, {'over the whole run' if spent.is_final else so_far}; {limit}.",
            )
        )
    )
    if spent.left_out:
        blocks.append(
            Paragraph(f"The figure leaves out {spent.left_out}; privacy.md includes it when the run has ended.")
        )
    return blocks


def _privacy_row(spent: Spent) -> list[str]:
    reason, config = spent.no_guarantee_reason, spent.config
    protects = f"no guarantee: {reason}" if reason else UNITS[config.unit]
    paid = "∞" if spent.epsilon is None else round_up(spent.epsilon)
    paid = f"would be {paid}" if reason else paid
    allowed = "not limited" if config.epsilon is None else f"{config.epsilon:g}"
    return [protects, paid, round_up(config.delta, 2), allowed, str(spent.round)]
