"""What the figures come from: recipe, seeds, versions; and how to have them again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from polyclinic.reporting.html.report_data import Method, ReportData
from polyclinic.reporting.html.section import Asked, Section
from polyclinic.reporting.html.sections.privacy import is_seed_withheld
from polyclinic.reporting.html.tags import Cell, fold_details, join_cells, paragraph, table, tag

ASIDE = ("name", "about", "paper", "claims", "methods", "engine", "seed", "track")
"""What may differ between recipes without being a difference of methods."""
KEPT = "withheld"


def provenance_section(material: ReportData) -> Section:
    """Recipes and versions."""
    secret = is_seed_withheld(material)
    parts: list[Cell] = [table("Network and runs", ["method", *HEAD], [_row(m, secret) for m in material.methods])]
    if not material.single:
        parts += _differences(material)
    text = _recipe(material.methods[0], secret)
    parts.append(
        fold_details(f"The whole recipe of {material.methods[0].name}", tag("pre", tag("code", text), tabindex=0))
    )
    versions = material.first.summary.get("versions", {})
    parts.append(paragraph(f"Versions: {', '.join(f'{name} {number}' for name, number in versions.items())}."))
    asked: Asked = {"Engineer": "Which recipe and versions?", "Statistician": "What exactly was run?"}
    return Section("recipe", "Recipe and versions", join_cells(parts), asked)


HEAD = ("algorithm", "data", "network", "parameters", "seeds", "model’s SHA-256, first digits")


def _row(method: Method, secret: bool) -> list[str]:
    found = method.first.summary
    sizes = found["model"].get("clusters") or {"": found["model"]}
    names = ", ".join(dict.fromkeys(str(one["name"]) for one in sizes.values()))
    weights = ", ".join(dict.fromkeys(f"{one['parameters']:,}" for one in sizes.values()))
    seeds = KEPT if secret else ", ".join(str(run.recipe.seed) for run in method.runs)
    return [method.name, found["algorithm"], found["data"], names, weights, seeds, str(found.get("sha256", "–"))[:16]]


def _recipe(method: Method, secret: bool) -> str:
    values = yaml.safe_load(method.first.recipe.to_yaml())
    if secret:
        values["seed"] = KEPT
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _differences(material: ReportData) -> list[Cell]:
    """Keys in which methods' recipes differ."""
    flat = {method.name: dict(_flat(yaml.safe_load(method.first.recipe.to_yaml()))) for method in material.methods}
    keys = dict.fromkeys(key for found in flat.values() for key in found if key.partition(".")[0] not in ASIDE)
    differ = [key for key in keys if len({_shown(found.get(key)) for found in flat.values()}) > 1]
    if not differ:
        return []
    rows = [[key, *(_shown(found.get(key)) for found in flat.values())] for key in differ]
    return [table("Where the recipes differ", ["key", *flat], rows)]


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        inner = isinstance(value, Mapping) and value
        found += _flat(value, f"{before}{key}.") if inner else [(f"{before}{key}", value)]
    return found


def _shown(value: Any) -> str:
    return "–" if value is None or value in ({}, []) else f"{value:g}" if isinstance(value, float) else str(value)


def reproduce_section(material: ReportData) -> Section:
    """The commands."""
    secret = is_seed_withheld(material)
    run = material.first
    folder = "DIR" if secret else shlex.quote(str(run.folder))
    repeat = f"polyclinic run {folder}/recipe.yaml --out again"
    given = "DIR" if secret else " ".join(shlex.quote(str(path)) for path in material.folders)
    lines = [repeat]
    if material.single and run.summary["algorithm"] != "local":
        lines.append(f"polyclinic run {folder}/recipe.yaml --set algorithm=local --out alone")
        lines.append(f"polyclinic report {given} alone")
    if not material.single:
        lines.append("# each method and seed has its own recipe.yaml in its folder")
    lines.append(f"polyclinic report {given}")
    words = (
        "The same recipe, versions and kind of machine give the same model to the bit: compare sha256 in result.json "
        "with the one above. Data sets that are not drawn need --data."
    )
    kept = " DIR stands for the run's folder, whose name may hold the seed." if secret else ""
    body = join_cells([tag("pre", tag("code", "\n".join(lines)), tabindex=0), paragraph(words, kept)])
    return Section("again", "How to reproduce", body, {"Engineer": "How do I run it again?"})
