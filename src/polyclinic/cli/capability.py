"""The command `site capability`, which measures a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.table import Column
from rich.text import Text

import polyclinic
from polyclinic.cli.common import Json, find_recipe, out, plain_table, print_json
from polyclinic.core import RecipeError

if TYPE_CHECKING:
    from polyclinic.config.capability import Capability, ResourceWeights


def capability_command(
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The server, to measure the network latency.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="The recipe that gives the clusters and weights.")
    ] = None,
    site: Annotated[str, typer.Option("--name", help="The name of this site in the recipe.")] = "this-site",
    most: Annotated[
        float | None,
        typer.Option("--max-latency", metavar="MS", help="The largest acceptable latency in milliseconds."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="C,M,B,N", help="The weights of cpu, memory, battery and network.")
    ] = None,
    high: Annotated[float | None, typer.Option(help="The lowest score of the cluster `high`.")] = None,
    medium: Annotated[float | None, typer.Option(help="The lowest score of the cluster `medium`.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine, name the cluster that it would join, and print its profile for a recipe."""
    from polyclinic.config.capability import GIGABYTE, RESOURCES, capability_score, find_cluster

    address = None if server is None else _parse_address(server)
    thresholds, asked = _read_clusters(recipe, high, medium)
    weighed = asked.weights if weights is None else _parse_weights(weights)
    most = asked.max_latency_ms if most is None else _check_latency(most)
    from polyclinic.deploy.machine import measure_machine  # psutil is for this alone

    found = measure_machine(address, most)
    shares = {name: round(getattr(found, name), 6) for name in RESOURCES}  # the score is that of the printed profile
    profile = replace(found, **shares)
    assert profile.total_memory is not None
    total = capability_score(profile, weighed)
    cluster = find_cluster(total, thresholds)
    pasted = {"capability": {"profiles": {site: {**shares, "gigabytes": profile.total_memory / GIGABYTE}}}}
    if as_json:
        document = {
            **shares,
            "total_memory": profile.total_memory,
            "notes": dict(zip(RESOURCES, profile.notes, strict=True)),
            "score": total,
            "cluster": cluster,
            "weights": asdict(weighed),
            "thresholds": thresholds,
            "recipe": pasted,
        }
        print_json(document)
        return
    table = plain_table("", Column("share", justify="right"), Column("weight", justify="right"), "measured by")
    for name, note in zip(RESOURCES, profile.notes, strict=True):
        table.add_row(*map(Text, (name, f"{shares[name]:.3f}", f"{getattr(weighed, name):g}", note)))
    out.print(table)
    ranges = ", ".join(f"{name} from {least:g}" for name, least in thresholds.items())
    out.print(Text(f"score {total:.3f}: cluster {cluster} ({ranges})"))
    written = yaml.safe_dump(pasted, sort_keys=False, allow_unicode=True).rstrip()
    out.print(Text(f"\nfor a recipe:\n\n{written}"), soft_wrap=True)


def _read_clusters(
    recipe: str | None, high: float | None, medium: float | None
) -> tuple[Mapping[str, float], Capability]:
    """Return the lowest score of each cluster and the capability options, from the recipe or from the options."""
    from polyclinic.config.capability import THRESHOLDS, Capability, check_thresholds

    if recipe is None:
        given = {"high": high, "medium": medium}
        thresholds = {**THRESHOLDS, **{name: least for name, least in given.items() if least is not None}}
        for sentence in check_thresholds(thresholds):
            raise typer.BadParameter(sentence, param_hint="--high / --medium")
        return thresholds, Capability()
    if high is not None or medium is not None:
        raise typer.BadParameter(
            "the recipe gives the scores of its clusters; leave out --high and --medium, or --recipe",
            param_hint="--recipe",
        )
    loaded = polyclinic.Recipe.load(find_recipe(recipe))
    if not loaded.clusters:
        raise typer.BadParameter(
            f"{recipe} has no clusters; leave out --recipe to use high, medium and low", param_hint="--recipe"
        )
    return loaded.thresholds, loaded.capability


def _parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT; an IPv6 address stands in brackets."""
    from polyclinic.deploy.config import split_host_port

    try:
        return split_host_port(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not HOST:PORT; write for example server.hospital.org:8080, or [::1]:8080",
            param_hint="--server",
        ) from None


def _check_latency(milliseconds: float) -> float:
    from polyclinic.config.capability import Capability
    from polyclinic.core import check_options

    try:
        check_options(Capability(max_latency_ms=milliseconds), "capability.")
    except RecipeError as error:
        raise typer.BadParameter(str(error), param_hint="--max-latency") from None
    return milliseconds


def _parse_weights(text: str) -> ResourceWeights:
    from polyclinic.config.capability import RESOURCES, ResourceWeights

    try:
        numbers = dict(zip(RESOURCES, map(float, text.split(",")), strict=True))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not four numbers, for {', '.join(RESOURCES)}; write for example 0.3,0.3,0.1,0.3",
            param_hint="--weights",
        ) from None
    try:
        return ResourceWeights(**numbers)
    except (RecipeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--weights") from None
