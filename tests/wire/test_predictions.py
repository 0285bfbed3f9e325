"""The last message of a site, its predictions, is as strictly read as its updates; a wrong one names its site."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.errors import Refused, RoundFailed
from polyclinic.core.types import SiteId, Tensors
from polyclinic.federation.progress import Outcome, RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.update_check import split_predictions
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from tests.federation.mock_engine import MockEngine
from tests.wire.frames import REGISTERED, RUN, federation, start

GROUP = "global|test"
ROUND = 4


def predictions(rows: int = 5) -> Tensors:
    return {
        f"{GROUP}|probabilities": torch.full((rows, 2), 0.5),
        f"{GROUP}|labels": torch.zeros(rows, dtype=torch.int64),
        f"{GROUP}|patients": torch.arange(rows),
    }


def evaluated(answer: Callable[[SiteId], bytes]) -> dict[SiteId, dict[str, Tensors]]:
    engine = MockEngine(lambda site, data: answer(site))
    rounds = Rounds(federation(), FedAvg(), engine, RoundOptions(rounds=ROUND - 1, run=RUN), RamJournal())
    return rounds.collect_predictions(Outcome(start(), ROUND - 1, False), ["test"])


def sent(site: SiteId, tensors: Tensors, round: int = ROUND, run: str = RUN) -> bytes:
    return messages.encode({"run": run, "round": round, "site": site}, {"predictions": tensors})


def test_predictions_come_back_by_site_and_part() -> None:
    found = evaluated(lambda site: sent(site, predictions(REGISTERED[site])))
    assert list(found) == list(REGISTERED)
    for site, groups in found.items():
        assert groups.keys() == {GROUP}
        assert {key: len(column) for key, column in groups[GROUP].items()} == dict.fromkeys(
            ("probabilities", "labels", "patients"), REGISTERED[site]
        )


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("probabilities", None),
        ("probabilities", torch.tensor(0.5)),
        ("probabilities", torch.zeros(5)),
        ("probabilities", torch.zeros(5, 3)),
        ("probabilities", torch.zeros(4, 2)),
        ("probabilities", torch.zeros(5, 2, 1)),
        ("probabilities", torch.ones(5, 2, dtype=torch.int64)),
        ("probabilities", torch.full((5, 2), torch.nan)),
        ("probabilities", torch.full((5, 2), torch.inf)),
        ("labels", None),
        ("labels", torch.tensor(0)),
        ("labels", torch.zeros(4, dtype=torch.int64)),
        ("labels", torch.zeros(5, 1, dtype=torch.int64)),
        ("labels", torch.zeros(5)),
        ("patients", None),
        ("patients", torch.zeros(0, dtype=torch.int64)),
        ("patients", torch.zeros(5, dtype=torch.bool)),
    ],
)
def test_wrong_predictions_are_refused(key: str, tensor: torch.Tensor | None) -> None:
    wrong = {name: t for name, t in {**predictions(), f"{GROUP}|{key}": tensor}.items() if t is not None}
    with pytest.raises(Refused) as refusal:
        split_predictions(wrong, classes=2)
    assert refusal.value.kind == "predictions"
    with pytest.raises(RoundFailed, match="site east could not be evaluated: predictions"):
        evaluated(lambda site: sent(site, wrong if site == "east" else predictions()))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", b""),
        ("format", b"predictions"),
        ("checksum", sent("east", predictions())[:-1]),
        ("round", sent("east", predictions(), round=ROUND - 1)),
        ("run", sent("east", predictions(), run="another")),
        ("site", sent("south", predictions())),
        ("predictions", sent("east", {"": torch.zeros(1)})),
    ],
)
def test_a_wrong_message_names_its_site_and_its_kind(kind: str, message: bytes) -> None:
    with pytest.raises(RoundFailed, match=f"site east could not be evaluated: {kind}"):
        evaluated(lambda site: message if site == "east" else sent(site, predictions()))
