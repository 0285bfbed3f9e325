"""What a run cost: bytes, seconds; and what went wrong on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyclinic.evaluation.comparison import mean_of_known
from polyclinic.reporting.html.formatting import count, duration, megabytes, some
from polyclinic.reporting.html.report_data import Method, ReportData, Run
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.sections.privacy import is_seed_withheld
from polyclinic.reporting.html.tags import Cell, bullet_list, join_cells, paragraph, table

WRONG = ("refused", "dead", "late", "error")
MEANING = {
    "refused": "the server would not take its reply",
    "dead": "no longer there",
    "late": "no reply before the deadline",
    "error": "failed on its side",
    "declined": "the hospital would not do it",
}
MOST_ROWS = 40


def costs_section(material: ReportData) -> Section:
    """Bytes both ways and seconds: by site of a run, by method of a comparison."""
    if material.single:
        head = ["hospital", "MB received", "MB sent", "working time", "rounds"]
        found = table("Communication and time at each hospital", head, _by_site(material.first))
    else:
        head = ["method", "rounds", "MB down", "MB up", "MB a round", "wall-clock", "hospitals' time"]
        found = table("Communication and time (mean over seeds)", head, [_by_method(m) for m in material.methods])
    note = (
        "Bytes are measured on the wire: down to hospitals, up to the server, the final evaluation and repeated rounds "
        "included. Seconds are of this machine and engine; compare them within this report alone."
    )
    engine = material.first.summary.get("engine") or {}
    where = f" Engine: {engine.get('name')}." if engine.get("name") else ""
    body = join_cells([found, paragraph(note, where, class_="note")])
    return Section("costs", "Communication and time", body, {"Engineer": "What did it cost to run?"})


def _by_site(run: Run) -> list[list[str]]:
    spent: dict[str, list[float]] = {}
    for row in run.ledger:
        for site, note in row["sites"].items() if isinstance(row.get("sites"), dict) else ():
            total = spent.setdefault(site, [0.0, 0.0, 0.0, 0.0])
            total[0] += note.get("down", 0)
            total[1] += note.get("up", 0)
            total[2] += note.get("seconds", 0.0)
            total[3] += row["event"] == "round"
    rows = [[site, *map(megabytes, found[:2]), duration(found[2]), f"{found[3]:.0f}"] for site, found in spent.items()]
    cost = run.summary["cost"]
    both = [megabytes(cost[way]) for way in ("bytes_down", "bytes_up")]
    whole = f"{duration(cost['site_seconds'])} ({duration(cost['seconds'])} on the clock)"
    return [*rows, ["all", *both, whole, str(run.summary["rounds"])]]


def _by_method(method: Method) -> list[str]:
    def over(name: str) -> float:
        return mean_of_known([float(run["cost"][name]) for run in method.summaries])

    rounds = mean_of_known([float(run["rounds"]) for run in method.summaries])
    if method.algorithm == "centralised":
        return [method.name, f"{rounds:g}", "images", "images", "images", duration(over("seconds")), "–"]
    both = over("bytes_down") + over("bytes_up")
    moved = [megabytes(over("bytes_down")), megabytes(over("bytes_up")), megabytes(both / max(rounds, 1))]
    return [method.name, f"{rounds:g}", *moved, duration(over("seconds")), duration(over("site_seconds"))]


def failures_section(material: ReportData) -> Section:
    """Refused and lost updates, rounds that failed, resumed runs, runs that have not ended."""
    found = [row for method in material.methods for run in method.runs for row in _wrong(method, run)]
    secret = is_seed_withheld(material)
    told: list[Cell] = [f"Not ended: {one.told}{'' if secret else f' ({one.folder})'}." for one in material.unfinished]
    for method in material.methods:
        for run in method.runs:
            told += _interruptions(method, run, material.single)
    parts: list[Cell] = [bullet_list(told)] if told else []
    if found:
        head = ["hospital", "run", "what", "why", "times", "in rounds"]
        shown = found[:MOST_ROWS]
        parts.append(table("What hospitals were asked for and was refused or lost", head, shown))
        if len(found) > len(shown):
            parts.append(paragraph(f"{len(found) - len(shown)} more kinds are in the ledgers.", class_="note"))
    if not parts:
        parts = [paragraph("None: every hospital that was asked answered, and every answer was taken.")]
    asked: Asked = {"Engineer": "What went wrong?", "Data-protection officer": "Was anything refused?"}
    return Section("failures", "Refusals and failures", join_cells(parts), asked)


def _wrong(method: Method, run: Run) -> list[list[str]]:
    times: dict[tuple[str, str, str], list[int]] = {}
    for row in run.ledger:
        for site, note in row["sites"].items() if isinstance(row.get("sites"), dict) else ():
            if note.get("outcome") in WRONG:
                declined = note["outcome"] == "refused" and "kind" not in note  # which names what the server refused
                what = "declined" if declined else note["outcome"]
                times.setdefault((site, what, str(note.get("why") or "–")), []).append(row["round"])
    return [
        [site, _called(method, run), f"{what}: {MEANING[what]}", why, str(len(rounds)), some([str(r) for r in rounds])]
        for (site, what, why), rounds in times.items()
    ]


def _called(method: Method, run: Run) -> str:
    """Not by its seed, which may have to stay secret."""
    return method.name if len(method.runs) == 1 else f"{method.name}, run {method.runs.index(run) + 1}"


def _interruptions(method: Method, run: Run, single: bool) -> Sequence[str]:
    events: Mapping[str, int] = _events(run.ledger)
    name = "" if single and len(method.runs) == 1 else f"{_called(method, run)}: "
    told = [f"{name}{site} took no part: {why}." for site, why in (run.summary.get("absent") or {}).items()]
    if failed := events.get("failed round"):
        told.append(
            f"{name}{count(failed, 'round')} failed for want of acceptable updates and left the model as it was."
        )
    if resumed := events.get("resumed"):
        told.append(f"{name}interrupted and resumed {count(resumed, 'time')}; what was cut short is counted in costs.")
    if run.summary.get("stopped_early"):
        told.append(f"{name}stopped early after round {run.summary['rounds']}, as the recipe asks.")
    return told


def _events(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row["event"]] = found.get(row["event"], 0) + 1
    return found
