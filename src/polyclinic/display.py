"""What a run looks like while it runs: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from polyclinic.compare import Comparison, decimal, sent, show
from polyclinic.recipe import Recipe

MARKS = {"accepted": "✓", "refused": "refused", "dead": "dead", "late": "late", "error": "error"}


class Display:
    """Follows runs through their `watch` events."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self.name, self.rounds, self.done, self.total = "", 0, 0, 1
        self.sites: dict[str, str] = {}
        self.summary = ""
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.overall = self.bars.add_task("runs", total=1, unit="runs", visible=False)
        self.current = self.bars.add_task("", total=1, unit="rounds")

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live = Live(console=self.console, get_renderable=self.render, refresh_per_second=5, transient=True)
            self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.__exit__(kind, error, traceback)

    def begin(self, recipe: Recipe, done: int, total: int) -> None:
        """A run begins, the `done + 1`-th of `total`."""
        self.name, self.rounds, self.done, self.total = recipe.name, recipe.rounds, done, total
        self.sites, self.summary, self.started = {}, "", time.perf_counter()
        self.bars.update(self.overall, total=total, completed=done, visible=total > 1)
        self.bars.reset(self.current, total=recipe.rounds, description=recipe.name, unit="rounds")
        if self.live is None:
            number = f" ({done + 1} of {total})" if total > 1 else ""
            self.line(f"{recipe.name}, seed {recipe.seed}{number}")

    def watch(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "round":
            self.sites = dict.fromkeys(info["cohort"], "…")
        elif event == "site":
            self.sites[info["site"]] = MARKS[info["outcome"]]
            if info["outcome"] != "accepted":
                self.line(f"  round {info['round']}: {info['site']} {info['outcome']}: {info['why']}")
        elif event == "round done":
            known = [f"{name} {info[name]:.3f}" for name in ("loss", "accuracy", "auc") if info.get(name) is not None]
            self.summary = f"model of round {info['round'] - 1}, validation: {', '.join(known)}" if known else ""
            self.bars.update(self.current, completed=info["round"])
            if self.live is None:
                self.line(f"  round {info['round']}/{self.rounds}  {info['seconds']:.1f} s  {self.summary}".rstrip())
            if info["stopped"]:
                self.line(f"  stopped early after round {info['round']}: validation no longer improves")

    def line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def render(self) -> Group:
        marks = [f"{site} {mark}" for site, mark in list(self.sites.items())[:12]]
        more = f" … {len(self.sites) - 12} more" if len(self.sites) > 12 else ""
        return Group(self.bars, Text("  " + "  ".join(marks) + more), Text("  " + self.summary))


def comparison_table(comparison: Comparison) -> Table:
    """The table of a comparison, for 80 columns."""
    seeds = comparison.lines[0].seeds
    table = Table(
        title=f"{comparison.title}: test images of all hospitals", title_justify="left", box=None, padding=(0, 1)
    )
    table.add_column("method")
    table.add_column("accuracy [95 %]", justify="right")
    table.add_column("AUC [95 %]", justify="right")
    table.add_column("worst AUC at", justify="right")
    table.add_column("MB", justify="right")
    table.add_column("s", justify="right")
    for line in comparison.lines:
        worst = f"{line.worst_site[:10]} {decimal(line.worst_auc, 2)}"
        figures = [compact(show(line.figures[metric])) for metric in ("accuracy", "auc")]
        table.add_row(line.name, *figures, worst, sent(line), f"{line.seconds:.0f}")
    over = "test patients (bootstrap)" if seeds == 1 else f"{seeds} seeds (Student)"
    table.caption = f"intervals over {over}; MB both ways; s: wall-clock"
    table.caption_justify = "left"
    return table


def compact(text: str) -> str:
    """0.873 → .873: a table of eighty columns has no room for zeros."""
    return text.replace("0.", ".").replace(", ", " ")


def result_table(summary: Mapping[str, Any]) -> Table:
    """One finished run, by hospital."""
    model = summary["headline"]["model"]
    title = f"{summary['name']}: {summary['rounds']} rounds, test images"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in ("hospital", "n", "accuracy [95 %]", "AUC [95 %]", "sensitivity", "specificity"):
        table.add_column(name, justify="left" if name == "hospital" else "right")
    for site, models in summary["sites"].items():
        parts = models.get(model) or next(iter(models.values()))
        if "test" in parts:
            table.add_row(site, *_cells(parts["test"]))
    table.add_row(f"all ({model})", *_cells(summary["headline"]), style="bold")
    cost = summary["cost"]
    megabytes = (cost["bytes_up"] + cost["bytes_down"]) / 1e6
    table.caption = f"{megabytes:.1f} MB both ways, {cost['seconds']:.1f} s; intervals over patients (bootstrap)"
    table.caption_justify = "left"
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    bounds = row.get("intervals") or {}
    cells = [str(row["n"])]
    for metric in ("accuracy", "auc"):
        low, high = bounds.get(metric, (None, None))
        interval = f" [{low:.3f} {high:.3f}]" if low is not None else ""
        cells.append("–" if row.get(metric) is None else compact(f"{row[metric]:.3f}{interval}"))
    return cells + ["–" if row.get(m) is None else f"{row[m]:.3f}" for m in ("recall", "specificity")]
