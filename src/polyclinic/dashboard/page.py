"""The board as HTML: a page that stands by itself, and the parts of it that change."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from markupsafe import Markup

from polyclinic.dashboard.follow import PageState
from polyclinic.dashboard.privacy_spent import Spent
from polyclinic.dashboard.run import APART, METRICS, RECENT, STATES, Curve, RunStatus, SiteStatus, format_ago
from polyclinic.reporting.html.charts import Axes, Series, line_chart
from polyclinic.reporting.html.formatting import count, duration, fixed, megabytes, of_hundred, series, some
from polyclinic.reporting.html.sections.costs import MEANING, MOST_ROWS
from polyclinic.reporting.html.style import CSS
from polyclinic.reporting.html.svg import Banded, plain
from polyclinic.reporting.html.tags import Cell, bullet_list, join_cells, paragraph, table, tag
from polyclinic.reporting.privacy_statement import UNITS, round_up

STYLE = CSS + "progress{width:100%;accent-color:var(--c0)}[hidden]{display:none}"
SCRIPT = resources.files("polyclinic.dashboard").joinpath("board.js").read_text(encoding="utf-8")
MOST_POINTS, MOST_SITES = 200, 100
LEARNING = "Learning curves"
AXES = {
    "accuracy": ("Accuracy", Axes("round", "accuracy")),
    "auc": ("ROC-AUC", Axes("round", "AUC (0.5 is chance)", lambda v: f"{v:.3g}")),
}


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
"""One script, one style, and no server but this one: whatever a name may smuggle in, a browser runs none of it."""


def render_page(view: PageState) -> str:
    """The whole page, as it stands now."""
    made = render_parts(view)
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", tab_title(view)),
        Markup('<link rel="icon" href="data:,">'),
        tag("style", Markup(STYLE)),
    ]
    state = [
        tag("p", view.sentence, id="state", class_="lead", aria_live="polite"),
        tag("div", made["now"], id="now"),
    ]
    rest = (
        tag("section", html, id=name, aria_labelledby=f"{name}-title", hidden=None if html else "hidden")
        for name, html in made.items()
        if name != "now"
    )
    body = [
        tag("a", "Skip to the board", href="#main", class_="skip"),
        tag("header", tag("p", page_kind(view), class_="kind", id="kind"), tag("h1", view.title, id="title")),
        tag("main", *state, *rest, id="main", tabindex="-1"),
        _footer(),
        tag("script", Markup(SCRIPT)),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def tab_title(view: PageState) -> str:
    """Short first: this is what a narrow tab shows."""
    played, total = view.rounds_played
    how_far = f"{played}/{total} " if view.state == "running" else ""
    return f"{how_far}{view.state} · {view.title} · polyclinic board"


def page_kind(view: PageState) -> str:
    return "Board of a run" if view.single else "Board of a comparison"


def _footer() -> Markup:
    alone = tag("noscript", "Without JavaScript this page stands still: reload it for news. ")
    link = tag("span", "", id="link", role="status")
    words = "The board reads the folder and writes nothing. Research software, no medical device."
    return tag("footer", paragraph(alone, link), paragraph(words))


def render_parts(view: PageState) -> dict[str, Markup]:
    """What may change, by where it stands; empty where there is nothing to show."""
    makers: dict[str, Callable[[PageState], Markup]] = {
        "runs": _runs_part,
        "learning": _learning_part,
        "hospitals": _sites_part,
        "failures": _failures_part,
        "privacy": _privacy_part,
    }
    return {"now": _status_part(view)} | {name: make(view) for name, make in makers.items()}


def _section(name: str, heading: str, *inside: Cell) -> Markup:
    return join_cells([tag("h2", heading, id=f"{name}-title"), *inside])


def _status_part(view: PageState) -> Markup:
    played, total = view.rounds_played
    share = f"{played} of {count(total, 'round')} played"
    bar = tag("progress", share, max=max(total, 1), value=played, aria_label=share) if total else ""
    cards = [
        _fact_card("Rounds", _round_facts(view)),
        _fact_card("Time", _time_facts(view)),
        _fact_card("Bytes, measured", _byte_facts(view)),
    ]
    cards.append(_fact_card("Hospitals' replies", _reply_facts(view)))
    return join_cells([bar, *(paragraph(words) for words in _next_steps(view)), bullet_list(cards, class_="who")])


def _fact_card(heading: str, facts: Sequence[Cell]) -> Markup:
    return join_cells([tag("h3", heading), bullet_list(facts)])


def _next_steps(view: PageState) -> list[str]:
    """What to make of a state in which nothing goes on."""
    if view.state == "finished":
        best = (view.runs[0].summary or {}).get("headline", {}) if view.single else {}
        right = f"The model is right in {of_hundred(best)}; " if best.get("accuracy") is not None else ""
        return [f"{right or 'Now '}polyclinic report tells the whole, with what is beyond chance."]
    quiet = f"No news for {format_ago(view.seconds_since_news)}. " if view.seconds_since_news is not None else ""
    if view.state == "failed" and view.single:
        return [f"{quiet}Mend what is named below, then go on with polyclinic resume."]
    if view.state == "stopped":
        again = "polyclinic resume goes on with it" if view.single else "the same command goes on where it stopped"
        return [f"{quiet}Nothing that was finished is lost: {again}."]
    if view.current_run is not None and view.state == "running" and view.current_run.is_slow:
        return [f"{quiet}Its process lives, but this takes longer than its rounds did."]
    return []


def _round_facts(view: PageState) -> list[Cell]:
    played, total = view.rounds_played
    told = [f"{played} of {total} played"] if total else ["the recipe is not written yet"]
    if not view.single:
        found = {state: len(view.runs_in_state(state)) for state in STATES}
        told.append("runs: " + ", ".join(f"{number} {state}" for state, number in found.items() if number))
    run = view.current_run
    if run is not None and run.state == "running" and run.seconds_since_news is not None:
        doing = "the test" if run.is_testing else f"round {run.current_round}" if run.current_round else "preparing"
        told.append(
            f"{doing} began {format_ago(run.seconds_since_news)} ago"
            if run.current_round > run.rounds_done or run.is_testing
            else f"now: {doing}"
        )
    return list(told)


def _time_facts(view: PageState) -> list[Cell]:
    run, told = view.current_run, []
    if run is not None and run.median_round_seconds is not None:
        of = "of the last ten" if run.rounds_done >= RECENT else "so far"
        told.append(f"{duration(run.median_round_seconds)} a round (median {of})")
    if view.seconds_left is not None:
        told.append(f"about {duration(view.seconds_left)} left, without final tests")
    elif view.state == "running" and not (run is not None and run.is_testing):
        told.append("the first round will tell how long it takes")
    if view.seconds_since_news is not None:
        told.append(f"last news {format_ago(view.seconds_since_news)} ago")
    return list(told) or ["nothing yet"]


def _byte_facts(view: PageState) -> list[Cell]:
    cost = view.cost
    return [f"{megabytes(cost['bytes_down'])} MB sent to hospitals", f"{megabytes(cost['bytes_up'])} MB received"]


def _reply_facts(view: PageState) -> list[Cell]:
    cost, told = view.cost, []
    if view.current_run is not None and view.current_run.sites and view.current_run.rounds_done:
        counted = sum(stay.last == view.current_run.rounds_done for stay in view.current_run.sites)
        told.append(f"{counted} of {len(view.current_run.sites)} counted in round {view.current_run.rounds_done}")
    wrong = [f"{cost['refused']} refused", f"{cost['failed']} lost"]
    return [*told, ", ".join(wrong)]


def _runs_part(view: PageState) -> Markup:
    """Methods × seeds, and what each method has come to so far."""
    if view.single:
        return Markup("")
    most = max(len(runs) for runs in view.methods.values())
    states = [
        [name, *(_run_cell(run) for run in runs), *([""] * (most - len(runs)))] for name, runs in view.methods.items()
    ]
    grid = table("Runs by method and seed", ["method", *(f"run {n}" for n in range(1, most + 1))], states)
    head = ["method", "rounds", "time a round", "accuracy, last told", "MB to hospitals", "MB from them", "lost"]
    return _section(
        "runs", "Methods and seeds", grid, table("Methods so far", head, [_method_row(view, n) for n in view.methods])
    )


def _run_cell(run: RunStatus) -> Cell:
    if run.state == "running":
        where = (
            "testing"
            if run.is_testing
            else f"round {run.current_round} of {run.rounds}"
            if run.current_round
            else "preparing"
        )
        return tag("strong", f"▶ {where}")
    marks = {"finished": "✓ finished", "waiting": "waiting", "failed": "✗ failed", "stopped": "‖ stopped"}
    return (
        f"{marks.get(run.state, run.state)}{f', {run.rounds_done} of {run.rounds}' if run.state == 'stopped' else ''}"
    )


def _method_row(view: PageState, method: str) -> list[str]:
    runs = view.methods[method]
    seconds = [run.median_round_seconds for run in runs if run.median_round_seconds is not None]
    curve, total = view.curves_by_name("accuracy")[method], sum(run.rounds for run in runs)
    moved = [megabytes(sum(run.cost[way] for run in runs)) for way in ("bytes_down", "bytes_up")]
    lost = sum(run.cost["refused"] + run.cost["failed"] for run in runs)
    told = [duration(sum(seconds) / len(seconds)) if seconds else "–", fixed(curve[-1][1]) if curve else "–"]
    return [method, f"{sum(run.rounds_done for run in runs)} of {total}", *told, *moved, str(lost)]


def _learning_part(view: PageState) -> Markup:
    curves = {metric: _drawn_series(view, view.curves_by_name(metric)) for metric in METRICS}
    drawn = [
        line_chart(_curve_title(name, found), found, axes)
        for metric, (name, axes) in AXES.items()
        if (found := curves[metric])
    ]
    if loss := curves["loss"]:
        top = max(point[1] for points in loss.values() for point in points)
        axes = Axes("round", "cross-entropy (nats)", lambda v: f"{v:.3g}", (0.0, 2 * top or 1.0), 0.2 * top)
        drawn.append(line_chart(_curve_title("Loss", loss), loss, axes))
    if time := _drawn_series(view, view.seconds_by_method()):
        top = max(point[1] for points in time.values() for point in points)
        drawn.append(
            line_chart("Time a round", time, Axes("round", "seconds", plain, (0.0, 2 * top or 1.0), 0.2 * top))
        )
    if not any(curves.values()):
        return (
            Markup("")
            if view.state == "waiting"
            else _section("learning", LEARNING, paragraph(_explain_no_curves(view)), *drawn)
        )
    wide = any(len(found) > 3 for found in curves.values())
    shown = join_cells(drawn) if wide else tag("div", *drawn, class_="figures")
    by_site = _nonempty_series(view.runs[0].by_site) if view.single else {}
    if len(by_site) > 1:
        shown += line_chart("Accuracy at each hospital", by_site, AXES["accuracy"][1])
    several = any(len(runs) > 1 for runs in view.methods.values())
    over = "Lines are means over the seeds that have come so far. " if several else ""
    note = f"{over}A round's point is of the model that it left behind, told by hospitals when they next received it."
    return _section("learning", LEARNING, paragraph(note, class_="note"), shown)


def _curve_title(metric: str, found: Series) -> str:
    if APART not in found:
        return f"{metric} on validation images"
    return f"{metric} on {APART}" if len(found) == 1 else metric


def _explain_no_curves(view: PageState) -> str:
    wishes = [run.recipe.privacy for run in view.runs if run.recipe is not None and run.recipe.privacy is not None]
    if any(wish.metrics == "suppress" for wish in wishes):
        return "Hospitals keep their figures back while this private run goes on (privacy.metrics: suppress)."
    if any(run.recipe is not None and run.recipe.evaluate.every == 0 for run in view.runs):
        return "The recipe asks for no figures before the end (evaluate.every: 0)."
    return "None yet: hospitals tell of a model when they receive it in the round after."


def _drawn_series(view: PageState, curves: Mapping[str, Curve]) -> Series:
    """Who tells least comes last, so that everyone has one colour in all pictures."""
    told = [name for metric in METRICS for name, points in view.curves_by_name(metric).items() if points]
    return _nonempty_series({name: curves[name] for name in sorted(curves, key=lambda name: -told.count(name))})


def _nonempty_series(curves: Mapping[str, Curve]) -> Series:
    return {name: _thin_curve(points) for name, points in curves.items() if points}


def _thin_curve(points: Curve) -> list[Banded]:
    """No more than can be seen, the last among them."""
    every = math.ceil(len(points) / MOST_POINTS)
    return [(float(round), value, math.nan, math.nan) for round, value in points[::-every][::-1]]


def _sites_part(view: PageState) -> Markup:
    run = view.current_run
    if run is None or not run.sites:
        return Markup("")
    there = any(stay.now for stay in run.sites)
    head = [
        "hospital",
        "last round that counted",
        "rounds counted",
        "refused",
        "lost",
        "MB received",
        "MB sent",
        "work",
    ]
    shown = sorted(run.sites, key=lambda stay: -(stay.refused + stay.lost))[:MOST_SITES]
    kept = [stay for stay in run.sites if stay in shown]
    rows = [[*_site_row(stay), *([stay.now] if there else [])] for stay in kept]
    more = len(run.sites) - len(kept)
    note = paragraph(f"{more} more hospitals, with fewer failures, are not shown.", class_="note") if more else ""
    name = "Hospitals" if view.single else f"Hospitals in {view.run_label(run)}"
    found = table("What became of each hospital's replies", [*head, *(["now"] if there else [])], rows)
    return _section("hospitals", name, found, note)


def _site_row(stay: SiteStatus) -> list[str]:
    last = "–" if stay.last is None else str(stay.last)
    counts = [last, str(stay.counted), str(stay.refused), str(stay.lost)]
    return [stay.site, *counts, megabytes(stay.down), megabytes(stay.up), duration(stay.seconds)]


def _failures_part(view: PageState) -> Markup:
    found = [(run, one) for run in view.runs for one in run.failures]
    rows = [
        [
            one.site,
            *([] if view.single else [view.run_label(run)]),
            f"{one.kind}: {MEANING[one.kind]}",
            one.why,
            str(len(one.rounds)),
            some([str(round) for round in one.rounds]),
        ]
        for run, one in found[-MOST_ROWS:]
    ]
    told = [f"{view.run_label(run)}: {run.sentence}" for run in view.runs if run.state in ("failed", "unreadable")]
    for run in view.runs:
        resumed = sum(row["event"] == "resumed" for row in run.ledger)
        told += [f"{view.run_label(run)} was interrupted and resumed {count(resumed, 'time')}."] if resumed else []
        told += _connection_refusals(run)
    head = ["hospital", *([] if view.single else ["run"]), "what", "why, the last time", "times", "in rounds"]
    made: list[Cell] = [bullet_list(told)] if told else []
    if rows:
        made.append(table("Replies that were refused or lost", head, rows))
    if len(found) > MOST_ROWS:
        made.append(paragraph(f"{len(found) - MOST_ROWS} earlier kinds are in the ledger.", class_="note"))
    if not made and view.state == "waiting":
        return Markup("")
    return _section("failures", "Refusals and failures", *(made or [paragraph("None so far.")]))


def _connection_refusals(run: RunStatus) -> list[str]:
    """Between real sites: who knocked and was not let in."""
    found = (run.status or {}).get("refusals", ())
    return [f"Refused {each['site'] or 'a stranger'}, {count(each['times'], 'time')}: {each['why']}." for each in found]


def _privacy_part(view: PageState) -> Markup:
    if view.state == "waiting":
        return Markup("")
    if not view.spent:
        return _section("privacy", "Privacy", paragraph("Nothing is claimed: no recipe here has a privacy plan."))
    if view.single:
        return _section("privacy", "Privacy", *map(paragraph, _privacy_sentences(view.spent[view.runs[0]])))
    rows = [[view.run_label(run), *_privacy_row(spent)] for run, spent in view.spent.items()]
    head = ["run", "protects", "ε so far", "δ", "allowed ε", "charged to round"]
    notes = dict.fromkeys(f"ε leaves out {one.beside}." for one in view.spent.values() if one.beside)
    bare = dict.fromkeys(r.method for r in view.runs if r.recipe is not None and r.recipe.privacy is None)
    if bare:
        notes[f"Nothing is claimed of {series(list(bare))}."] = None
    return _section("privacy", "Privacy", table("Privacy spent so far", head, rows), *map(paragraph, notes))


def _privacy_sentences(spent: Spent) -> list[Cell]:
    _, paid, delta, allowed, _ = _privacy_row(spent)
    limit = f"{allowed} allowed" if spent.wish.epsilon is not None else "no limit set"
    when = (
        "over the whole run" if spent.over else f"so far, round {spent.round} included, which was charged as it began"
    )
    told: list[Cell] = [f"{spent.caveat[:1].upper()}{spent.caveat[1:]}: no guarantee."] if spent.caveat else []
    told.append(
        join_cells([tag("strong", f"ε = {paid} at δ = {delta}"), f" for {UNITS[spent.wish.unit]}, {when}; {limit}."])
    )
    return [*told, f"The figure leaves out {spent.beside}; privacy.md tells it in the end."] if spent.beside else told


def _privacy_row(spent: Spent) -> list[str]:
    protects = f"no guarantee: {spent.caveat}" if spent.caveat else UNITS[spent.wish.unit]
    paid = "∞" if spent.epsilon is None else round_up(spent.epsilon)
    allowed = "not limited" if spent.wish.epsilon is None else f"{spent.wish.epsilon:g}"
    return [protects, paid, round_up(spent.wish.delta, 2), allowed, str(spent.round)]
