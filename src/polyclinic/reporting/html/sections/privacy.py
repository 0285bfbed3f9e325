"""Privacy: what was claimed, of whom, by what unit; and what left the building, with what protection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyclinic.evaluation.comparison import mean_of_known
from polyclinic.evaluation.summary import pools_images
from polyclinic.reporting.html.formatting import megabytes, series
from polyclinic.reporting.html.from_markdown import from_markdown
from polyclinic.reporting.html.report_data import Method, ReportData
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.tags import Cell, bullet_list, fold_details, join_cells, paragraph, table, tag
from polyclinic.reporting.privacy_statement import PAPER_METRIC, UNITS
from polyclinic.storage.run_files import explain_os_errors

NO_CLAIM = "nothing is claimed"


def privacy_section(material: ReportData) -> Section:
    claimed = [method for method in material.methods if method.first.summary.get("privacy")]
    head = ["method", "protects", "ε, worst-placed", "δ", "noise", "allowed ε"]
    metric = any(_metric(method) for method in claimed)
    rows = [[*_claim(method), *([_metric(method) or "–"] if metric else [])] for method in material.methods]
    parts: list[Cell] = [tag("h3", "What was claimed")]
    if claimed:
        parts.append(table("Privacy claimed by each method", [*head, *([PAPER_METRIC] if metric else [])], rows))
        several = any(len(method.runs) > 1 for method in claimed)
        if several:
            parts.append(paragraph("ε is the mean over seeds. Runs add up for whoever sees them all.", class_="note"))
    else:
        where = "All images were pooled in one place." if material.single and _pools(material.methods[0]) else ""
        words = (
            "Nothing. No recipe here has a privacy plan, so what was released may tell about single images, and no "
            f"figure bounds how much. {where}"
        )
        parts.append(paragraph(words))
    remarks = {f"{m.name}: {remark}." for m in material.methods for remark in m.first.summary.get("remarks") or ()}
    parts += [paragraph(remark) for remark in sorted(remarks)]
    parts += [fold_details(f"The whole privacy page of {m.name}", told) for m in claimed if (told := _page(m))]
    parts += [tag("h3", "What left the building"), _released(material.methods), _amounts(material)]
    parts += [tag("h3", "What this report itself tells"), bullet_list(_itself(material))]
    asked: Asked = {
        "Data-protection officer": "What was claimed, and what left the building?",
        "Clinician": "And privacy?",
    }
    return Section("privacy", "Privacy", join_cells(parts), asked)


def _pools(method: Method) -> bool:
    return pools_images(method.first.summary)


def _claim(method: Method) -> list[str]:
    plans: list[Mapping[str, Any]] = [run["privacy"] for run in method.summaries if run.get("privacy")]
    if not plans:
        return [method.name, NO_CLAIM, "∞", "–", "0", "–"]
    first, spent = plans[0], [plan["epsilon"][plan["accountant"]] for plan in plans]
    paid = "∞" if None in spent else f"{mean_of_known(spent):.3g}"
    allowed = "not limited" if first["wanted"] is None else f"{first['wanted']:g}"
    if first["caveat"]:
        return [method.name, f"no guarantee: {first['caveat']}", f"({paid})", f"{first['delta']:.2g}", "–", allowed]
    figures = [paid, f"{first['delta']:.2g}", f"{first['noise']:.4g}", allowed]
    return [method.name, UNITS[first["unit"]], *figures]


def _metric(method: Method) -> str:
    found = [run["privacy"]["paper_metric"] for run in method.summaries if run.get("privacy")]
    known = [value for value in found if value is not None]
    return f"{mean_of_known(known):.2f}" if known else ""


def _page(method: Method) -> Markup:
    """What privacy.md of the first seed says, but for the table below; nothing where that file is gone."""
    path = method.first.folder / "privacy.md"
    if not path.is_file():
        return Markup("")
    with explain_os_errors(path, "read", "restore the file, or remove it"):
        text, _, _ = path.read_text(encoding="utf-8", errors="replace").partition("## What is released")
    return from_markdown(text, f"Privacy of {method.name}")


def _released(methods: Sequence[Method]) -> Markup:
    """By kind and protection, with the methods that release it so."""
    whose: dict[tuple[str, str], list[str]] = {}
    for method in methods:
        kinds = [(row["kind"], row["protection"]) for row in method.first.summary.get("released", ())]
        if _pools(method):
            kinds = [("images", "none: pooled in one place"), *kinds]
        for pair in kinds:
            whose.setdefault(pair, []).append(method.name)
    several = len(methods) > 1
    head = ["what leaves", "what protects it", *(["with"] if several else [])]
    rows = [
        [*pair, *([series(names) if len(names) < len(methods) else "all methods"] if several else [])]
        for pair, names in sorted(whose.items())
    ]
    return table("What leaves a hospital", head, rows)


def _amounts(material: ReportData) -> Markup:
    """How much went out, in bytes."""
    told = []
    for method in material.methods:
        if not _pools(method):
            amount = mean_of_known([float(run["cost"]["bytes_up"]) for run in method.summaries])
            told.append(f"{method.name} {megabytes(amount)} MB")
    words = f"Sent by all hospitals together, over a whole run: {', '.join(told)}." if told else ""
    return paragraph(words, class_="note") if words else Markup("")


def _itself(material: ReportData) -> list[Cell]:
    told: list[Cell] = [
        "Numbers of images by hospital and class, and in confusion matrices down to single images; figures of test "
        "images without noise. No patient's name or number.",
        "Pictures of patients, because --with-images was asked for: keep this file where the images may be seen."
        if material.pictures
        else "No picture of a patient.",
    ]
    if is_seed_withheld(material):
        told.append(
            "No seed: noise was drawn from it, and whoever has it can remove the noise. Folders named after seeds say "
            "the same as the seed."
        )
    return told


def is_seed_withheld(material: ReportData) -> bool:
    """Whether a seed must not be told: a run's noise was drawn from it."""
    plans = [run.get("privacy") for method in material.methods for run in method.summaries]
    begun = [one.recipe.privacy for one in material.unfinished]
    drawn = any(wish is not None and wish.randomness == "seed" for wish in begun)
    return drawn or any(plan and plan["randomness"] == "seed" and not plan["caveat"] for plan in plans)
