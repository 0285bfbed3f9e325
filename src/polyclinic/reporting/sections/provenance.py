"""Recipes and versions behind the figures, and the commands that repeat them."""

import shlex
from collections.abc import Mapping
from typing import Any

from polyclinic.reporting.blocks import Block, Folded, Paragraph, Preformatted, Section, Table
from polyclinic.reporting.report_data import Method, ReportData

NOT_COMPARED = ("name", "about", "paper", "claims", "methods", "engine", "seed", "track")
"""Keys that may differ between recipes without being a difference of methods."""
LOCAL_DATA = "Data sets that are not generated need --data."
REMOTE_DATA = "The images are at the sites, where each has to have the same ones."
HEAD = ("algorithm", "data", "network", "parameters", "seeds", "model’s SHA-256, first digits")


def provenance_section(data: ReportData) -> Section:
    """Networks, recipes, versions."""
    rows = [_method_row(method) for method in data.methods]
    blocks: list[Block] = [Table("Networks and runs", ["method", *HEAD], rows)]
    if not data.is_single:
        blocks += _recipe_differences(data)
    if (recipe := data.first.recipe) is not None:
        blocks.append(Folded(f"The whole recipe of {data.methods[0].name}", [Preformatted(recipe.to_yaml())]))
    blocks.append(Paragraph(data.versions))
    return Section(
        "recipe",
        "Recipe and versions",
        blocks,
        {"Engineer": "Which recipe and versions?", "Statistician": "What exactly was run?"},
    )


def _method_row(method: Method) -> list[str]:
    found = method.first.summary
    networks = list((found.model.clusters or {"": found.model}).values())
    names = ", ".join(dict.fromkeys(network.name for network in networks))
    parameters = ", ".join(dict.fromkeys(f"{network.parameters:,}" for network in networks))
    seeds = ", ".join(str(run.seed) for run in method.summaries)
    return [method.name, found.algorithm, found.data, names, parameters, seeds, found.sha256[:16]]


def _recipe_differences(data: ReportData) -> list[Block]:
    """Keys in which the methods' recipes differ."""
    recipes = {method.name: method.first.recipe for method in data.methods}
    flat = {name: dict(_flatten(one.to_values())) for name, one in recipes.items() if one is not None}
    keys = dict.fromkeys(key for found in flat.values() for key in found if key.partition(".")[0] not in NOT_COMPARED)
    differ = [key for key in keys if len({_format_value(found.get(key)) for found in flat.values()}) > 1]
    rows = [[key, *(_format_value(found.get(key)) for found in flat.values())] for key in differ]
    return [Table("Where the recipes differ", ["key", *flat], rows)] if rows else []


def _flatten(values: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        inner = isinstance(value, Mapping) and value
        found += _flatten(value, f"{before}{key}.") if inner else [(f"{before}{key}", value)]
    return found


def _format_value(value: Any) -> str:
    return "–" if value is None or value in ({}, []) else f"{value:g}" if isinstance(value, float) else str(value)


def reproduce_section(data: ReportData) -> Section | None:
    """The commands that repeat the run and its report."""
    files = data.first.files
    if files is None:
        return None
    folder, given = shlex.quote(str(files.path)), " ".join(shlex.quote(str(path)) for path in data.folders)
    lines = [f"polyclinic run {folder}/recipe.yaml --out again"]
    remote = any(run.has_remote_sites for method in data.methods for run in method.summaries)
    if remote:
        lines = [f"polyclinic serve server.yaml {folder}/recipe.yaml --out again"]
        lines += ["# at the server, with its server.yaml, after the sites have approved the recipe once more"]
    if not data.is_single:
        lines += ["# each method and seed has its own recipe.yaml in its folder"]
    elif remote:
        pass
    elif data.first.summary.algorithm != "local":
        lines += [
            f"polyclinic run {folder}/recipe.yaml --set algorithm=local --out alone",
            f"polyclinic report {given} alone",
        ]
    lines += [f"polyclinic report {given}"]
    words = ("A private run draws new noise, so its model differs, and costs ε again. " if data.has_privacy else "") + (
        "Without privacy the same recipe, versions and kind of machine give the same model to the bit: compare sha256 "
        f"in result.json with the one above. {REMOTE_DATA if remote else LOCAL_DATA}"
    )
    blocks: list[Block] = [Preformatted("\n".join(lines)), Paragraph(words)]
    return Section("again", "How to reproduce", blocks, {"Engineer": "How do I run it again?"})
