"""What a run looks like: a live panel in a terminal, plain lines elsewhere; and the tables at its end."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from polyclinic.config.recipe import Recipe
from polyclinic.core.names import STUDENT
from polyclinic.evaluation.comparison import Comparison, format_decimal, format_estimate, format_traffic
from polyclinic.evaluation.summary import describe_test_images, headline_at_site
from polyclinic.reporting.privacy_statement import privacy_line
from polyclinic.runs.engine_choice import REASON_REQUESTED
from polyclinic.runs.public_data import PUBLIC

MARKS = {"accepted": "✓", "refused": "refused", "dead": "dead", "late": "late", "error": "error"}
SITES = 24
"""Sites the live panel names; of more it gives the number."""
DAY = 86_400.0


class Display:
    """Follows runs through their `watch` events. Says nothing before the first: a mistake's sentence stands alone."""

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
            self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.__exit__(kind, error, traceback)

    def start_run(self, recipe: Recipe, done: int, total: int) -> None:
        """A run begins, the `done + 1`-th of `total`."""
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
            self._count_site(info)
        elif event == "round done":
            self._finish_round(info)
        elif event == "absent":
            self.print_line(f"  {info['site']} takes no part: {info['kind']}: {info['why']}")
        elif event == "evaluated":
            self.sites[info["site"]] = MARKS.get(info.get("outcome", ""), "tested")
            if "why" in info:
                self.print_line(f"  after the last round: {info['site']} {info['outcome']}: {info['why']}")

    def _advance_bar(self, round: int) -> None:
        """A round is a part of a run, so that the time left is known before the first run ends."""
        self.bars.update(self.current, completed=round)
        if not self.playing:  # runs that were only read back say nothing about the speed of others
            self.bars.reset(self.overall)
            self.playing = True
        self.bars.update(self.overall, completed=self.done + round / self.rounds)

    def _count_site(self, info: Mapping[str, Any]) -> None:
        self.sites[info["site"]] = MARKS[info["outcome"]]
        if info["outcome"] != "accepted":
            self.print_line(f"  round {info['round']}: {info['site']} {info['outcome']}: {info['why']}")

    def _finish_round(self, info: Mapping[str, Any]) -> None:
        known = [f"{name} {info[name]:.3f}" for name in ("loss", "accuracy", "auc") if info.get(name) is not None]
        if known:
            self.summary = f"validation after round {info['round'] - 1}: {', '.join(known)}"
        self._advance_bar(info["round"])
        if self.live is None:
            told = f"  {self.summary}" if known else ""
            self.print_line(f"  round {info['round']}/{self.rounds}  {info['seconds']:.1f} s{told}")
        for cluster in info.get("unheard", ()):
            self.print_line(f"  round {info['round']}: cluster {cluster} got no update, so its model stays as it was")
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
    """The table of a comparison, for 80 columns."""
    table = _titled_table(f"{comparison.title}: {comparison.judged_on}")
    table.add_column("method")
    for name in ("accuracy [95 %]", "AUC [95 %]", "worst AUC, at", "MB", "s"):
        table.add_column(name, justify="right", no_wrap=name != "worst AUC, at")
    for line in comparison.lines:
        worst = f"{strip_zeros(format_decimal(line.worst_auc, 2))} {line.worst_site[:12]}".rstrip()
        figures = [strip_zeros(format_estimate(line.figures[metric])) for metric in ("accuracy", "auc")]
        cells = [line.name, *figures, worst, format_traffic(line), f"{line.seconds:.0f}"]
        table.add_row(*map(Text, cells))
    lost = [f"{line.name}: {line.lost} updates refused or lost!" for line in comparison.lines if line.lost]
    told = [f"intervals over {comparison.interval_description}; MB both ways; s: wall-clock"]
    told += [f"figures of {comparison.judged_by}", *_privacy_notes(comparison), *lost]
    table.caption = Text("\n".join(told))
    return table


def _privacy_notes(comparison: Comparison) -> list[str]:
    """What privacy costs, where any method has a plan."""
    plans = {name: runs[0].get("privacy") for name, runs in comparison.results.items()}
    if not any(plans.values()):
        return []
    free = [name for name, found in plans.items() if not found]
    paid = [f"{name}: {privacy_line(found).removeprefix('privacy: ')}" for name, found in plans.items() if found]
    return [*paid, *([f"no privacy claimed: {', '.join(free)}"] if free else [])]


def result_table(summary: Mapping[str, Any]) -> Table:
    """One finished run, by hospital."""
    best, cost = summary["headline"], summary["cost"]
    early = " (stopped early)" if summary["stopped_early"] else ""
    table = _titled_table(f"{summary['name']}: {summary['rounds']} rounds{early}, {describe_test_images(best)}")
    table.add_column("hospital")
    for name in ("n", "accuracy [95 %]", "AUC [95 %]", "sensit.", "specif."):
        table.add_column(name, justify="right", no_wrap=True)
    for site in summary["sites"]:
        here = headline_at_site(summary, site)
        if here:
            table.add_row(*map(Text, [site, *_method_cells(here)]))
    judged = f"public ({best['of']})" if best["model"] == PUBLIC else f"all ({best['model']})"
    table.add_row(*map(Text, [judged, *_method_cells(best)]), style="bold")
    merged, part = summary["merged"], best["part"]
    beside = {
        "held-out": merged.get("held-out", {}).get("test") if best["model"] != "held-out" else None,
        f"all ({STUDENT})": merged.get(STUDENT, {}).get(part),
        f"public ({STUDENT})": (summary.get("public") or {}).get(STUDENT),
    }
    for name, figures in beside.items():
        if figures and name != judged:
            table.add_row(*map(Text, [name, *_method_cells(figures)]))
    megabytes = (cost["bytes_up"] + cost["bytes_down"]) / 1e6
    intervals = "; intervals over patients (bootstrap)" if best.get("intervals") else ""
    lost = cost.get("refused", 0) + cost.get("failed", 0)
    warning = f"\n{lost} updates of hospitals were refused or lost; ledger.jsonl says why" if lost else ""
    warning = "".join(f"\n{line}" for line in _missing_notes(summary)) + warning
    engine = summary.get("engine", {})
    chosen = (
        "" if engine.get("why", REASON_REQUESTED) == REASON_REQUESTED else f"\nengine {engine['name']}: {engine['why']}"
    )
    paid = f"\n{privacy_line(summary['privacy'])}" if summary.get("privacy") else ""
    table.caption = Text(f"{megabytes:.1f} MB both ways, {cost['seconds']:.1f} s{intervals}{paid}{chosen}{warning}")
    return table


def _missing_notes(summary: Mapping[str, Any]) -> list[str]:
    """Who took no part, and what was not to be had."""
    told = [f"without {site}: {why}" for site, why in (summary.get("absent") or {}).items()]
    withheld = summary["cost"].get("withheld", 0)
    if withheld:
        told.append(f"{withheld} of {len(summary['hospitals'])} hospitals sent no predictions; ledger.jsonl says why")
    if withheld and summary["headline"]["part"] == "validation":
        told.append("so these are the means of what hospitals told of their validation images in the last round")
    return told


def plan_line(plan: Mapping[str, Any]) -> str:
    """What a privacy plan will cost, in a line."""
    if plan["caveat"]:
        return f"privacy: noise {plan['noise']:.3g}, NO guarantee: {plan['caveat']}"
    return (
        f"privacy: ε = {plan['epsilon']:.3g} per {plan['unit']} at δ = {plan['delta']:.2g} for the whole run "
        f"(noise {plan['noise']:.4g}, clip {plan['clip']:g})"
        + (f"; it stops before ε = {plan['wanted']:g}" if plan["wanted"] and plan["epsilon"] > plan["wanted"] else "")
    )


def _titled_table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", caption_justify="left", box=None, padding=(0, 1))


def strip_zeros(text: str) -> str:
    """0.873 → .873: a table of eighty columns has no room for zeros."""
    return re.sub(r"\b0\.", ".", text).replace(", ", " ")


def _method_cells(row: Mapping[str, Any]) -> list[str]:
    bounds = row.get("intervals") or {}
    cells = [str(row["n"])]
    for metric in ("accuracy", "auc"):
        low, high = bounds.get(metric, (None, None))
        interval = f" [{low:.3f} {high:.3f}]" if low is not None else ""
        cells.append("–" if row.get(metric) is None else strip_zeros(f"{row[metric]:.3f}{interval}"))
    return cells + ["–" if row.get(m) is None else strip_zeros(f"{row[m]:.3f}") for m in ("recall", "specificity")]
