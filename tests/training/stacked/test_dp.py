"""L5 for private training: sites trained as one stack give what they give alone, noise included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyclinic.core.errors import EngineError
from polyclinic.core.jobs import Fit, Fitted, Site, Step
from polyclinic.core.options import Augment, Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.training.dp.dp_sgd import draw_poisson_batches
from polyclinic.training.fit import fit
from polyclinic.training.losses import corrected_loss, proximal_loss, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import NotStackableError, fit_stacked, job_signature, why_not_stackable
from polyclinic.training.stacked.memory import max_stack_size
from tests.training.dp.test_dp_sgd import contrast, twice

SIZES = (30, 21, 9, 30)
MOMENTUM, ADAM = Optimiser("sgd", 0.05, 0.9, 1e-3), Optimiser("adam", 0.05)
NOISY = Private(0.5, 0.3)


def seats(
    model: str,
    training: Training,
    objective: Callable[..., Tensor] = task_loss,
    dtype: torch.dtype = torch.float64,
    **job: Any,
) -> tuple[LiveNetwork, list[StackMember]]:
    """Sites of unequal size, each with its own reference and its own noise."""
    module = build_model(model, classes=10, channels=1, size=8, dropout=0.3, seed=Stream(1)).to(dtype)
    weights, found = copy_module_weights(module), []
    for number, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(number)
        images = torch.randn(size, 1, 8, 8, generator=generator, dtype=dtype)
        data = Images(images, torch.randint(10, (size,), generator=generator))
        reference: Bundle = {
            "anchor": {n: t + 0.1 * number for n, t in weights["model"].items()},
            "scalars": {"mu": torch.tensor(0.5, dtype=dtype)},
            "correction": {n: torch.full_like(t, 0.01 * number) for n, t in weights["model"].items()},
        }
        own = replace(
            training,
            private=training.private and replace(training.private, noise=training.private.noise * (number + 1)),
        )
        work = Fit(weights, objective, own, reference, **{"optimiser_state": {}, **job})
        found.append(StackMember(work, data, Site(str(number), size, 2, 3, 0.05), Stream(number), Stream(100 + number)))
    return LiveNetwork(module), found


def alone(network: LiveNetwork, found: list[StackMember]) -> list[Fitted]:
    return [fit(seat.job, network, seat.data, seat.site, seat.stream, seat.secret) for seat in found]


def assert_same(one: list[Fitted], other: list[Fitted], bar: float = 1e-10) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.steps, mine.dropped) == (theirs.steps, theirs.dropped)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        for name, tensor in theirs.weights["model"].items():
            torch.testing.assert_close(mine.weights["model"][name], tensor, rtol=bar, atol=bar)
        assert mine.optimiser_state.keys() == theirs.optimiser_state.keys()


CASES: dict[str, tuple[str, Training, Callable[..., Tensor], dict[str, Any]]] = {
    "momentum": ("mlp", Training(MOMENTUM, 8, epochs=2, private=NOISY), task_loss, {}),
    "adam": ("cnn_b", Training(ADAM, 8, epochs=2, private=NOISY), task_loss, {}),
    "fedprox": ("groupnorm_cnn", Training(MOMENTUM, 8, private=NOISY), proximal_loss, {}),
    "scaffold": ("groupnorm_cnn", Training(ADAM, 8, private=NOISY), corrected_loss, {}),
    "shuffled": (
        "groupnorm_cnn",
        Training(MOMENTUM, 8, private=replace(NOISY, sampling="shuffle")),
        corrected_loss,
        {},
    ),
    "views": (
        "groupnorm_cnn",
        Training(MOMENTUM, 8, private=replace(NOISY, views=3), augment=Augment(rotation=10, flip=True)),
        task_loss,
        {},
    ),
    "empty batches, and one that is cut in two": ("mlp", Training(MOMENTUM, 2, epochs=8, private=NOISY), task_loss, {}),
    "whole": ("mlp", Training(MOMENTUM, 8, epochs=2, private=NOISY), task_loss, {"full_batch": True}),
    "whole, shuffled": (
        "cnn_b",
        Training(MOMENTUM, 8, epochs=2, private=replace(NOISY, sampling="shuffle")),
        task_loss,
        {"full_batch": True},
    ),
    "steps": ("mlp", Training(MOMENTUM, 8, epochs=None, steps=5, private=NOISY), task_loss, {}),
    "frozen": ("groupnorm_cnn", Training(MOMENTUM, 8, fine_tune=0.3, private=NOISY), proximal_loss, {}),
    "no clip": ("mlp", Training(MOMENTUM, 8, epochs=2, private=Private(math.inf, 0.0)), task_loss, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_l5_a_stack_gives_what_its_sites_give_alone(case: str) -> None:
    model, training, objective, job = CASES[case]
    network, found = seats(model, training, objective, **job)
    assert len({job_signature(seat.job, seat.site) for seat in found}) == 1
    assert why_not_stackable(found[0].job, network) == ""
    assert_same(fit_stacked(found, network), alone(network, found))


def test_the_cases_hold_what_they_say() -> None:
    steps = [
        len(who)
        for number in range(4)
        for who in draw_poisson_batches(30, 2 / 30, 120, Stream(100 + number, ("sample",)))
    ]
    assert min(steps) == 0
    _, found = seats("mlp", Training(MOMENTUM, 8, private=NOISY))
    assert len({seat.job.training.private for seat in found}) == len(SIZES)


def test_l5_in_float32() -> None:
    network, found = seats("cnn_b", Training(MOMENTUM, 8, private=NOISY), dtype=torch.float32)
    assert_same(fit_stacked(found, network), alone(network, found), 1e-5)


def test_l2_without_clip_and_noise_a_stack_is_the_stack_without_privacy() -> None:
    plain = Training(MOMENTUM, 8, epochs=2)
    ends = []
    for private in (None, Private(math.inf, 0.0, "shuffle")):
        network, found = seats("groupnorm_cnn", replace(plain, private=private))
        ends.append(fit_stacked(found, network))
    for one, other in zip(*ends, strict=True):
        assert one.loss == other.loss
        assert all(torch.equal(one.weights["model"][n], t) for n, t in other.weights["model"].items())


def test_a_bad_example_costs_its_own_site_nothing_but_itself() -> None:
    network, found = seats("groupnorm_cnn", Training(MOMENTUM, 8, epochs=2, private=replace(NOISY, sampling="shuffle")))
    found[1].data.images[5, 0, 3, 3] = math.nan  # type: ignore[attr-defined]
    together = fit_stacked(found, network)
    assert [fitted.dropped for fitted in together] == [0, 2, 0, 0]
    assert_same(together, alone(network, found))


def test_m4_every_site_and_step_has_noise_of_its_own() -> None:
    training = Training(Optimiser("sgd", 1.0), 64, epochs=None, steps=1, private=Private(1e-9, 1e9))
    network, found = seats("mlp", training)
    start = found[0].job.weights["model"]
    rounds = [found, [replace(seat, site=replace(seat.site, round=3)) for seat in found]]
    moved = [
        torch.cat([(t - start[n]).flatten() for n, t in fitted.weights["model"].items()])
        for some in rounds
        for fitted in fit_stacked(some, network)
    ]
    alike = torch.corrcoef(torch.stack(moved)) - torch.eye(len(moved))
    assert float(alike.abs().max()) < 5 / math.sqrt(len(moved[0]))


def test_what_is_clipped_one_by_one_does_not_stack() -> None:
    network, found = seats("mlp", Training(MOMENTUM, 8, private=NOISY), contrast)
    assert "one by one" in why_not_stackable(found[0].job, network)
    two = replace(found[0].job, steps=(Step(task_loss), Step(task_loss)))
    assert "site by site" in why_not_stackable(two, network)
    module = twice()
    job = Fit(copy_module_weights(module), task_loss, Training(MOMENTUM, 4, private=NOISY))
    data = Images(torch.randn(8, 1, 12, 12, dtype=torch.float64), torch.zeros(8, dtype=torch.int64))
    seat = StackMember(job, data, Site("a", 8, 1, 1, 0.1), Stream(0), Stream(1))
    with pytest.raises(NotStackableError, match="called twice"):
        fit_stacked([seat, seat], LiveNetwork(module))


def test_a_stack_without_secrets_is_refused() -> None:
    network, found = seats("mlp", Training(MOMENTUM, 8, private=NOISY))
    with pytest.raises(EngineError, match="secret"):
        fit_stacked([replace(seat, secret=None) for seat in found], network)


def test_private_jobs_need_more_room() -> None:
    private = Training(MOMENTUM, 8, private=NOISY)
    rooms = []
    for training in (private, replace(private, private=None)):
        network, found = seats("groupnorm_cnn", training)
        rooms.append(max_stack_size(found[0], network))
    assert 1 <= rooms[0] < rooms[1]
