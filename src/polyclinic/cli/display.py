"""The progress of runs, as a live panel in a terminal or as plain lines, and the tables of their results."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from polyclinic.cli.common import (
    err,
    number_columns,
    out,
    print_json,
    print_message,
    titled_table,
)
from polyclinic.core import HELD_OUT, PUBLIC, STUDENT
from polyclinic.reporting.formatting import format_number, round_up

if TYPE_CHECKING:
    from polyclinic.config.recipe import Recipe
    from polyclinic.evaluation.comparison import Comparison
    from polyclinic.evaluation.summary import PartScores, RunSummary
    from polyclinic.runs.result import RunResult


MARKS = {"accepted": "✓", "refused": "refused", "dead": "dead", "late": "late", "error": "error"}
SITES = 24
"""The largest number of sites that the live panel names."""
SAME_COMMAND = "continue with the same command"
DAY = 86_400.0


class Display:
    """Shows the progress of runs by their events. It prints nothing before the first event, so that an error message
    stands alone."""

    def __init__(self, console: Console, about: str = "") -> None:
        self.console, self.about = console, about
        self.live: Live | None = None
        self.heading, self.rounds, self.done, self.playing = "", 0, 0, False
        self.sites: dict[str, str] = {}
        self.summary = ""
        self.bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(max_width=30, no_wrap=True)),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            speed_estimate_period=DAY,  # a round may take hours
        )
        self.overall = self.bars.add_task("all methods", total=1, unit="runs", visible=False)
        self.current = self.bars.add_task("", total=1, unit="rounds", visible=False)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live = Live(
                console=self.console, get_renderable=self.render_panel, refresh_per_second=5, transient=True
            )
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def start_run(self, recipe: Recipe, done: int, total: int) -> None:
        """Begin the display of a run, number `done + 1` of `total`."""
        number = f" ({done + 1} of {total})" if total > 1 else ""
        self.heading, self.rounds, self.done = f"{recipe.name}, seed {recipe.seed}{number}", recipe.rounds, done
        self.sites, self.summary = {}, "preparing images and network"
        self.bars.update(self.overall, total=total, completed=done, visible=total > 1)
        self.bars.reset(self.current, total=recipe.rounds, description=recipe.name, visible=True)

    def on_event(self, event: str, info: Mapping[str, Any]) -> None:
        if self.about:
            self.console.print(Text(self.about))
        if self.live is None and self.heading:
            self.print_line(self.heading)
        self.about = self.heading = ""
        if event == "round":
            self.sites = dict.fromkeys(info["cohort"], "…")
            self.summary = "" if info["round"] == 1 else self.summary
            self._advance_bar(info["round"] - 1)
        elif event == "plan":
            self.print_line(f"  {plan_line(info)}")
        elif event == "site":
            self.sites[info["site"]] = MARKS[info["outcome"]]
            if info["outcome"] != "accepted":
                self.print_line(f"  round {info['round']}: {info['site']} {info['outcome']}: {info['why']}")
        elif event == "outlier":
            self.print_line(f"  round {info['round']}: {info['why']}")
        elif event == "round done":
            self._finish_round(info)
        elif event == "absent":
            self.print_line(f"  {info['site']} does not take part: {info['kind']}: {info['why']}")
        elif event == "doubted":
            self.print_line(f"  {info['site']} {info['why']}")
        elif event == "unregistered":
            self.print_line(f"  {info['why']}")
        elif event == "evaluated":
            self.sites[info["site"]] = MARKS.get(info.get("outcome", ""), "tested")
            if "why" in info:
                self.print_line(f"  after the last round: {info['site']} {info['outcome']}: {info['why']}")

    def _advance_bar(self, round: int) -> None:
        """Count a round as a part of its run, so that the remaining time is known before the first run ends."""
        self.bars.update(self.current, completed=round)
        if not self.playing:  # runs that were read from disk say nothing about the speed of others
            self.bars.reset(self.overall)
            self.playing = True
        self.bars.update(self.overall, completed=self.done + round / self.rounds)

    def _finish_round(self, info: Mapping[str, Any]) -> None:
        known = [f"{name} {info[name]:.3f}" for name in ("loss", "accuracy", "auc") if info.get(name) is not None]
        if known:
            self.summary = f"validation after round {info['round'] - 1}: {', '.join(known)}"
        self._advance_bar(info["round"])
        if self.live is None:
            notes = f"  {self.summary}" if known else ""
            self.print_line(f"  round {info['round']}/{self.rounds}  {info['seconds']:.1f} s{notes}")
        for cluster in info.get("clusters_without_updates", ()):
            self.print_line(f"  round {info['round']}: cluster {cluster} got no update and keeps its model")
        if info["stopped"]:
            self.print_line(f"  stopped early after round {info['round']}: validation no longer improves")
        if info["stopped"] or info["round"] == self.rounds:
            self.sites = dict.fromkeys(self.sites, "…")
            self.summary = f"{self.summary}; testing the final model".removeprefix("; ")

    def print_line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def render_panel(self) -> Group:
        marks = [f"{site} {mark}" for site, mark in list(self.sites.items())[:SITES]]
        more = [f"and {len(self.sites) - SITES} more"] if len(self.sites) > SITES else []
        spinner = "◐◓◑◒"[int(time.monotonic() * 4) % 4]
        cells = Table.grid(padding=(0, 2))
        cells.add_row(Text(spinner), Columns([Text(mark) for mark in marks + more], padding=(0, 3)))
        cells.add_row("", Text(self.summary))
        return Group(self.bars, cells)


def comparison_table(comparison: Comparison) -> Table:
    """Return the table of a comparison, 80 columns wide."""
    figures = number_columns("accuracy [95 %]", "AUC [95 %]", "worst AUC, at", "MB", "s")
    figures[2].no_wrap = False
    table = titled_table(f"{comparison.title}: {comparison.judged_on}", "method", *figures)
    for line in comparison.lines:
        worst = f"{strip_zeros(format_number(line.worst_score, 2))} {line.worst_site[:12]}".rstrip()
        estimates = (line.figures[metric] for metric in ("accuracy", "auc"))
        shown = [_estimate_cell(estimate.mean, estimate.low, estimate.high) for estimate in estimates]
        sent = "images" if line.pools_images else f"{line.megabytes:.1f}"
        table.add_row(*map(Text, [line.name, *shown, worst, sent, f"{line.seconds:.0f}"]))
    lost = [f"{line.name}: {line.lost} updates refused or lost!" for line in comparison.lines if line.lost]
    notes = [f"intervals over {comparison.interval_description}; MB both ways; s: wall-clock"]
    notes += [f"figures of {comparison.judged_by}", *_privacy_notes(comparison), *lost]
    table.caption = Text("\n".join(notes))
    return table


def _privacy_notes(comparison: Comparison) -> list[str]:
    """Return the privacy cost of each method, if any method has a plan."""
    from polyclinic.reporting.privacy_statement import privacy_line

    plans = {name: runs[0].privacy for name, runs in comparison.results.items()}
    if not any(plans.values()):
        return []
    free = [name for name, found in plans.items() if not found]
    paid = [f"{name}: {privacy_line(found).removeprefix('privacy: ')}" for name, found in plans.items() if found]
    return [*paid, *([f"no privacy claimed: {', '.join(free)}"] if free else [])]


def result_table(summary: RunSummary) -> Table:
    """Return the table of one finished run, with a row for every site."""
    from polyclinic.evaluation.task import class_names
    from polyclinic.reporting.privacy_statement import privacy_line
    from polyclinic.runs.engines.choice import REASON_REQUESTED

    best, cost, engine = summary.headline, summary.cost, summary.engine
    early = " (stopped early)" if summary.stopped_early else ""
    figures = number_columns("n", "accuracy [95 %]", "AUC [95 %]", "sensit.", "specif.")
    table = titled_table(f"{summary.name}: {summary.rounds} rounds{early}, {best.images}", "site", *figures)
    for site in summary.sites:
        if here := summary.headline_at(site):
            table.add_row(*map(Text, [site, *format_scores(here)]))
    judged = f"public ({best.of})" if best.model == PUBLIC else f"all ({best.model})"
    table.add_row(*map(Text, [judged, *format_scores(best.scores)]), style="bold")
    others = {
        "held-out": summary.merged.get(HELD_OUT, {}).get("test") if best.model != HELD_OUT else None,
        f"all ({STUDENT})": summary.merged.get(STUDENT, {}).get(best.part),
        f"public ({STUDENT})": summary.public.get(STUDENT),
    }
    for name, scores in others.items():
        if scores and name != judged:
            table.add_row(*map(Text, [name, *format_scores(scores)]))
    has_intervals = any(metric.low is not None for metric in best.scores.metrics.values())
    intervals = "; intervals over patients (bootstrap)" if has_intervals else ""
    notes = [note] if (note := describe_positive(class_names(summary))) else []
    notes += [privacy_line(summary.privacy)] if summary.privacy else []
    if engine is not None and engine.reason != REASON_REQUESTED:
        notes.append(f"engine {engine.name}: {engine.reason}")
    notes += _missing_notes(summary)
    table.caption = Text("\n".join([f"{cost.megabytes:.1f} MB both ways, {cost.seconds:.1f} s{intervals}", *notes]))
    return table


def _missing_notes(summary: RunSummary) -> list[str]:
    """Return notes on sites that took no part, on figures that stayed at sites, and on updates that were lost."""
    from polyclinic.reporting.remarks import describe_pooling

    notes = [f"without {site}: {why}" for site, why in summary.absent.items()]
    notes += [f"{site} {why}" for site, why in summary.doubted.items()]
    notes += describe_pooling(summary)
    if lost := summary.cost.lost:
        notes.append(f"{lost} updates of sites were refused or lost; ledger.jsonl says why")
    return notes


def plan_line(plan: Mapping[str, Any]) -> str:
    """Return the cost of a privacy plan in one line."""
    from polyclinic.evaluation.summary import PUBLIC_SEED
    from polyclinic.privacy.plan import describe_clip, describe_noise

    is_seeded = plan["no_guarantee_reason"] == PUBLIC_SEED
    if plan["no_guarantee_reason"] and not is_seeded:
        return f"privacy: noise {plan['noise']:.3g}, NO guarantee: {plan['no_guarantee_reason']}"
    limit = plan["max_epsilon"]
    stop = f"; it stops before ε = {limit:g}" if limit and plan["epsilon"] > limit else ""
    if is_seeded:
        stop += f"; no guarantee: {PUBLIC_SEED}"
    return (
        f"privacy: ε {'would be' if is_seeded else '='} {round_up(plan['epsilon'])} per {plan['unit']} at "
        f"δ = {plan['delta']:.2g} for the whole run "
        f"(noise {describe_noise(plan['noise'], plan['site_noise'])}, {describe_clip(plan['clip'])}){stop}"
    )


def strip_zeros(text: str) -> str:
    """Shorten 0.873 to .873, which saves columns in a table."""
    return re.sub(r"\b0\.", ".", text).replace(", ", " ")


def _estimate_cell(value: float, low: float, high: float) -> str:
    """Return a value and its interval without leading zeros: .873 [.812 .921]."""
    interval = "" if math.isnan(low) else f" [{low:.3f} {high:.3f}]"
    return strip_zeros(format_number(value) + interval)


def format_scores(scores: PartScores) -> list[str]:
    """Return the cells of images, accuracy, AUC, sensitivity and specificity."""
    intervals = [_estimate_cell(scores.value(name), *scores.interval(name)) for name in ("accuracy", "auc")]
    points = [_estimate_cell(scores.value(name), math.nan, math.nan) for name in ("recall", "specificity")]
    return [str(scores.n), *intervals, *points]


def describe_positive(classes: Sequence[str]) -> str:
    """Return of which class sensitivity and specificity are; "" where the classes are not known."""
    if len(classes) == 2:
        return f"sensit.: the share of {classes[1]} that was found; specif.: of {classes[0]}"
    return "sensit., specif.: means over the classes" if classes else ""


@contextmanager
def progress_display(way_on: Callable[[], str] = lambda: SAME_COMMAND, about: str = "") -> Iterator[Display]:
    """Show the progress of runs. After Ctrl-C, print how to continue and exit with code 130."""
    try:
        with Display(err, about) as display:
            yield display
    except KeyboardInterrupt:
        print_message(f"stopped; no finished round is lost: {way_on()}")
        raise typer.Exit(130) from None


def print_comparison(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        print_json(comparison.to_json())
        return
    out.print(comparison_table(comparison))
    if comparison.folder is not None:
        written = [comparison.folder / name for name in ("report.html", "report.md")]
        out.print(Text("written: " + "  ".join(str(path) for path in written if path.exists())), soft_wrap=True)


def report_failures(comparison: Comparison) -> None:
    """Print the runs that did not finish, and exit with code 1 if there are any."""
    for failure in comparison.failures:
        print_message(f"error: {failure}")
    if comparison.failures:
        raise typer.Exit(1)


def print_result(result: RunResult, folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(result.summary.to_json())
        return
    out.print(result_table(result.summary))
    out.print(Text(f"run: {folder}"), soft_wrap=True)
