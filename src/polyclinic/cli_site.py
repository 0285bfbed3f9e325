"""`polyclinic site …`: what a hospital asks of its own machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.capability import (
    LATENCY,
    RESOURCES,
    THRESHOLDS,
    Card,
    cluster_of,
    even_weights,
    latency_problems,
    score,
    thresholds_problems,
    weights_problems,
)
from polyclinic.terminal import Json, out, print_json

app = typer.Typer(no_args_is_help=True, help="What this site's own machine can do.")


@app.command("capability")
def capability_command(
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The server, to measure the network to it.")
    ] = None,
    most: Annotated[
        float, typer.Option("--max-latency", metavar="MS", help="The most latency that is acceptable.")
    ] = LATENCY,
    weights: Annotated[
        str | None, typer.Option(metavar="C,M,B,N", help="How much cpu, memory, battery and network count.")
    ] = None,
    high: Annotated[float, typer.Option(help="The least score of the cluster high.")] = THRESHOLDS["high"],
    medium: Annotated[float, typer.Option(help="The least score of the cluster medium.")] = THRESHOLDS["medium"],
    as_json: Json = False,
) -> None:
    """Measure what this machine can do, and say which cluster it would join."""
    address = None if server is None else _address(server)
    weighed = even_weights() if weights is None else _weights(weights)
    thresholds = {"high": high, "medium": medium, "low": 0.0}
    _refuse("--weights", weights_problems(weighed))
    _refuse("--max-latency", latency_problems(most))
    _refuse("--high / --medium", thresholds_problems(thresholds))
    from polyclinic.machine import measure  # psutil is for this alone

    card = measure(address, most)
    total = score(card, weighed)
    cluster = cluster_of(total, thresholds)
    if as_json:
        shares = {name: getattr(card, name) for name in RESOURCES}
        notes = dict(zip(RESOURCES, card.notes, strict=True))
        told = {**shares, "total_memory": card.total_memory, "notes": notes, "score": total, "cluster": cluster}
        print_json({**told, "weights": weighed, "thresholds": thresholds})
        return
    out.print(_table(card, weighed))
    out.print(Text(f"score {total:.3f}: cluster {cluster} ({_ranges(thresholds)})"))


def _refuse(option: str, problems: Iterable[str]) -> None:
    for sentence in problems:
        raise typer.BadParameter(sentence, param_hint=option)


def _address(text: str) -> tuple[str, int]:
    """HOST:PORT; colons of an IPv6 address stand in brackets."""
    found = re.fullmatch(r"(?:\[([^\s/\[\]]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", text)
    if found is None or not 0 < int(found[3]) < 2**16:
        sentence = f"{text!r} is no HOST:PORT; write for example server.hospital.org:8080, or [::1]:8080"
        raise typer.BadParameter(sentence, param_hint="--server")
    return found[1] or found[2], int(found[3])


def _weights(text: str) -> dict[str, float]:
    try:
        return dict(zip(RESOURCES, map(float, text.split(",")), strict=True))
    except ValueError:
        sentence = f"{text!r} is not four numbers, for {', '.join(RESOURCES)}; write for example 0.3,0.3,0.1,0.3"
        raise typer.BadParameter(sentence, param_hint="--weights") from None


def _table(card: Card, weights: Mapping[str, float]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("", "share", "weight", "how it was found"):
        table.add_column(name, justify="right" if name in ("share", "weight") else "left")
    for name, note in zip(RESOURCES, card.notes, strict=True):
        table.add_row(*map(Text, (name, f"{getattr(card, name):.3f}", f"{weights[name]:g}", note)))
    return table


def _ranges(thresholds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} from {least:g}" for name, least in thresholds.items())
