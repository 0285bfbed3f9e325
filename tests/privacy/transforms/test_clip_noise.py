"""Stages: what leaves a site may differ from what the algorithm sees, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Failure, Federation
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.network import copy_module_weights
from tests.federation.mock_engine import MockEngine
from tests.laws.bench import as_json, clinics, small

SITES = clinics(12, 12)
TRAINING = Training(Optimiser(lr=0.1), batch=4)


class Halve:
    """Send half precision: another dtype on the wire, the original one behind it."""

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        return {k: {n: t.half() if t.is_floating_point() else t for n, t in g.items()} for k, g in tensors.items()}

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        return {k: {n: t.float() if t.is_floating_point() else t for n, t in g.items()} for k, g in tensors.items()}


@dataclass
class Shift:
    """Send the difference from what was received, to show that both sides hold the same reference."""

    draws: list[int] = field(default_factory=list)

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        self.draws.append(rng.integer())
        return {k: {n: t - received[k][n] for n, t in g.items()} for k, g in tensors.items()}

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        return {k: {n: t + received[k][n] for n, t in g.items()} for k, g in tensors.items()}


def play(stages: Sequence[UpdateTransform]) -> tuple[Bundle, list[bytes]]:
    """Two rounds of FedAvg; the final state and every reply as it crossed."""
    network, algorithm, crossed = small(), FedAvg(TRAINING), []
    runners = {n: SiteRunner(n, s, algorithm, network, RamMemory(), stages) for n, s in SITES.items()}

    def answer(site: str, message: bytes) -> bytes | Failure:
        crossed.append(runners[site].answer(message))
        return crossed[-1]

    federation = Federation(
        ("a", "b"), {n: len(s.train) for n, s in SITES.items()}, copy_module_weights(network.module)
    )
    rounds = Rounds(federation, algorithm, MockEngine(answer), RoundOptions(rounds=2), RamJournal(), transforms=stages)
    return rounds.play_all().state, crossed


def largest_difference(one: Bundle, other: Bundle) -> float:
    return max(float((t.double() - other[k][n].double()).abs().max()) for k, g in one.items() for n, t in g.items())


def test_another_dtype_crosses_and_the_algorithm_sees_its_own() -> None:
    plain, whole = play([])
    state, halves = play([Halve()])
    assert {t.dtype for t in messages.decode(halves[0]).tensors["model"].values()} == {torch.float16}
    assert {t.dtype for t in state["model"].values()} == {torch.float32}
    assert 0 < largest_difference(state, plain) < 2e-3
    assert len(halves[0]) < len(whole[0])


def test_stages_are_undone_last_first() -> None:
    plain, _ = play([])
    stage = Shift()
    state, _ = play([stage, Halve()])
    assert 0 < largest_difference(state, plain) < 1e-3
    drawn = [draw for draw in stage.draws if draw != Stream(0).integer()]
    assert len(drawn) == len(set(drawn)) == 4


def test_what_left_without_its_stage_is_refused() -> None:
    """A server that expects half precision does not take full."""
    network, algorithm = small(), FedAvg(TRAINING)
    bare = {n: SiteRunner(n, s, algorithm, network, RamMemory()) for n, s in SITES.items()}
    staged = SiteRunner("clinic-2", SITES["clinic-2"], algorithm, network, RamMemory(), [Halve()])

    def answer(site: str, message: bytes) -> bytes | Failure:
        return (staged if site == "clinic-2" else bare[site]).answer(message)

    federation = Federation(
        ("a", "b"), {n: len(s.train) for n, s in SITES.items()}, copy_module_weights(network.module)
    )
    journal = RamJournal()
    Rounds(federation, algorithm, MockEngine(answer), RoundOptions(rounds=1), journal, transforms=[Halve()]).play_all()
    notes = next(row["sites"] for row in as_json(journal.costs) if row["event"] == "round")
    assert (notes["clinic-1"]["outcome"], notes["clinic-1"]["kind"]) == ("refused", "dtype")
    assert notes["clinic-2"]["outcome"] == "accepted"
