"""A small federation, an honest reply, and frames whose checksums are right whatever else is wrong with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Failure, Federation
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, SiteId
from polyclinic.federation import update_check
from polyclinic.federation.progress import Outcome, RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import as_json

RUN = "winter study"
REGISTERED: Mapping[SiteId, int] = {"north": 30, "east": 20, "south": 50}
NORTH = "north"
Answer = Callable[[SiteId, bytes], bytes | Failure]


def weights(stream: Stream) -> Bundle:
    """Parameters, and statistics with an integer counter, as a network with BatchNorm has them."""
    generator = stream.generator()
    return {
        "model": {
            "layer.weight": torch.randn(2, 3, generator=generator),
            "layer.bias": torch.randn(3, generator=generator),
        },
        "buffers": {"norm.mean": torch.randn(3, generator=generator), "norm.batches": torch.tensor(4)},
    }


def start() -> Bundle:
    zero = {n: torch.zeros_like(t) for n, t in weights(Stream(0))["model"].items()}
    return {"model": zero, "buffers": {"norm.mean": torch.zeros(3), "norm.batches": torch.tensor(0)}}


def federation(sites: Mapping[SiteId, int] = REGISTERED) -> Federation:
    return Federation(("healthy", "ill"), sites, start())


@dataclass(frozen=True)
class Reply:
    """What a site would send: taken apart by the tests, put together again wrongly. Shared, so never changed."""

    fields: dict[str, Any]
    tensors: Bundle

    @cached_property
    def frame(self) -> bytes:
        return messages.encode(self.fields, self.tensors)

    @cached_property
    def header(self) -> bytes:
        _, length, _ = messages.PREFIX.unpack_from(self.frame)
        return self.frame[messages.PREFIX.size : messages.PREFIX.size + length].rstrip()

    @cached_property
    def body(self) -> bytes:
        return messages.encode_body(self.tensors).data

    @cached_property
    def table(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body[8 : 8 + int.from_bytes(self.body[:8], "little")])
        return found

    @cached_property
    def raw(self) -> bytes:
        return self.body[8 + int.from_bytes(self.body[:8], "little") :]


@cache
def honest(site: SiteId = NORTH, round: int = 1) -> Reply:
    row = {"model": "global", "part": "validation", "n": 5, "loss": 0.7, "accuracy": 0.6, "auc": None}
    fields = {"run": RUN, "round": round, "site": site, "examples": REGISTERED[site], "scalars": {"steps": 2.0}}
    return Reply({**fields, "report": [row], "seconds": 0.25}, weights(Stream(round, ("site", site))))


@cache
def expected(site: SiteId = NORTH, round: int = 1) -> update_check.ExpectedUpdate:
    return update_check.ExpectedUpdate(
        RUN, round, site, start(), start(), examples=REGISTERED[site], reports=[("global", "validation")]
    )


def framed(header: bytes, body: bytes, shift: int = 0) -> bytes:
    """The header as it is, padded (`shift` bytes too far), under its true checksum."""
    header += b" " * (-(messages.PREFIX.size + len(header)) % messages.ALIGNMENT + shift)
    return messages.PREFIX.pack(messages.MAGIC, len(header), hashlib.sha256(header).digest()) + header + body


def sealed(fields: Mapping[str, Any], body: bytes) -> bytes:
    """Any fields around any body, the checksum of the body true; NaN goes through."""
    checksum = hashlib.sha256(body).hexdigest()
    return framed(json.dumps({"schema": messages.SCHEMA, "body": checksum, **fields}).encode(), body)


def body_of(table: bytes | Mapping[str, Any], raw: bytes, shift: int = 0) -> bytes:
    """A table of tensors, padded as safetensors does (`shift` bytes too far), and their bytes."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += b" " * (-len(text) % 8 + shift)
    return len(text).to_bytes(8, "little") + text + raw


def played(answer: Answer, sites: Mapping[SiteId, int] = REGISTERED, **options: Any) -> tuple[Outcome, RamJournal]:
    """One round (or more) among sites that answer by script, under the real round loop."""
    rules = RoundOptions(**{"rounds": 1, "run": RUN, **options.pop("rules", {})})
    algorithm: Algorithm = options.pop("algorithm", FedAvg())
    journal = RamJournal()
    rounds = Rounds(federation(sites), algorithm, MockEngine(answer, **options), rules, journal)
    return rounds.play_all(), journal


def notes(journal: RamJournal) -> dict[SiteId, dict[str, Any]]:
    """By site, what became of its reply in the last round; as JSON, since that is how it is kept."""
    rows = json.loads(json.dumps(as_json(journal.rows), allow_nan=False))
    return {row["site"]: row for row in rows if row["event"] == "train"}


def asked_round(data: bytes) -> int:
    return int(messages.decode(data).fields["round"])
