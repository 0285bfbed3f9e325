"""Elastic Aggregation: the sensitivity in closed form, a round by hand, and where it must be FedAvg, bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.special import softmax
from torch import Tensor, nn

from polyclinic.algorithms.optimisation.elastic import Elastic, parameter_sensitivity
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.core.jobs import Score, Update
from polyclinic.core.options import Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, SiteId
from polyclinic.data.examples import Images
from polyclinic.models.classifier import Classifier
from polyclinic.runs.experiment import Experiment
from polyclinic.training.fit import score
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import (
    CLASSES,
    SIDE,
    Played,
    Weighting,
    as_json,
    clinics,
    noise,
    play,
    same,
    site,
    small,
    tapped,
)
from tests.laws.test_stacked import SIZES, same_on_both, together
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=5)
MOMENTUM = Training(Optimiser(lr=0.1, momentum=0.9), batch=5, epochs=2)
Array = npt.NDArray[np.float64]


def linear(scale: float = 1.0) -> LiveNetwork:
    """F(x) = Wx + b in float64, with first weights that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        head = nn.Linear(SIDE**2, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(scale)
    return LiveNetwork(Classifier(nn.Sequential(OrderedDict(flatten=nn.Flatten())), head))


def flat(data: Images) -> tuple[Array, Array]:
    return data.images.flatten(1).numpy(), np.eye(CLASSES)[data.labels.numpy()]


# The sensitivity, equation 1


def by_hand(x: Array, w: Array, b: Array, batch: int) -> tuple[Array, Array]:
    """∂‖Wx + b‖²/∂W = 2(Wx + b)xᵀ, ∂/∂b = 2(Wx + b): absolute values of each batch's mean, then the mean by images."""
    of_w, of_b = np.zeros_like(w), np.zeros_like(b)
    for start in range(0, len(x), batch):
        some = x[start : start + batch]
        outputs = some @ w.T + b
        of_w += len(some) / len(x) * np.abs(2 * outputs.T @ some / len(some))
        of_b += len(some) / len(x) * np.abs(2 * outputs.mean(0))
    return of_w, of_b


@pytest.mark.parametrize("batch", [1, 4, 5, 23])
def test_the_sensitivity_of_a_linear_network_is_twice_its_outputs_times_its_inputs(batch: int) -> None:
    network, data = linear(), noise(23, "images", dtype=torch.float64)
    start = copy_module_weights(network.module)
    found = score(Score(start, parameter_sensitivity, reduce="mean", batch=batch), network, data)
    w, b = (start["model"][f"head.{name}"].numpy() for name in ("weight", "bias"))
    of_w, of_b = by_hand(flat(data)[0], w, b, batch)
    np.testing.assert_allclose(found["head.weight"].numpy(), of_w, rtol=1e-13)
    np.testing.assert_allclose(found["head.bias"].numpy(), of_b, rtol=1e-13)


def test_it_looks_at_no_label_and_changes_nothing() -> None:
    network, data = small(dropout=0.5), noise(23, "images")
    start = copy_module_weights(network.module)
    ask = Score(start, parameter_sensitivity, reduce="mean", batch=5)
    one = score(ask, network, data)
    other = score(ask, network, Images(data.images, (data.labels + 1) % CLASSES))
    assert same({"": one}, {"": other})
    assert one.keys() == start["model"].keys()
    assert same(copy_module_weights(network.module), start)


# A round, equations 2 to 4


@pytest.mark.parametrize("within", ["network", "tensor"])
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_a_round_by_hand(weights: Weighting, within: Literal["network", "tensor"]) -> None:
    """One full-batch step at each of two sites of 12 and 7 images; then (2), (3) and (4), in NumPy."""
    sites, network, tau, eta = clinics(12, 7, dtype=torch.float64), linear(), 0.3, 0.5
    training = Training(Optimiser(lr=eta), batch=64, weights=weights)
    start = {n: t.numpy() for n, t in copy_module_weights(network.module)["model"].items()}
    played = play(Elastic(training, tau, within), sites, network, 1)
    w, b = start["head.weight"], start["head.bias"]
    shares = (12 / 19, 7 / 19) if weights == "examples" else (0.5, 0.5)
    omega, moved = [np.zeros_like(w), np.zeros_like(b)], [np.zeros_like(w), np.zeros_like(b)]
    for p, held in zip(shares, sites.values(), strict=True):
        assert isinstance(held.train, Images)
        x, y = flat(held.train)
        error = (softmax(x @ w.T + b, axis=1) - y) / len(x)
        steps, slopes = (eta * error.T @ x, eta * error.sum(0)), by_hand(x, w, b, 64)
        for i in range(2):
            omega[i] += p * slopes[i]
            moved[i] += p * steps[i]
    largest = [o.max() for o in omega] if within == "tensor" else [max(o.max() for o in omega)] * 2
    for i, name in enumerate(("head.weight", "head.bias")):
        zeta = 1 + tau - omega[i] / largest[i]
        np.testing.assert_allclose(played.model[name].numpy(), start[name] - zeta * moved[i], rtol=0, atol=1e-14)


@given(
    values=st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=30),
    tau=st.floats(0, 1),
    within=st.sampled_from(["network", "tensor"]),
)
def test_the_more_sensitive_a_weight_the_less_it_moves(values: list[float], tau: float, within: Any) -> None:
    omega = torch.tensor(values, dtype=torch.float64)
    half = len(values) // 2
    found = Elastic(tau=tau, within=within).aggregation_coefficients({"a": omega[:half], "b": omega[half:]})
    for part, zeta in ((omega[:half], found["a"]), (omega[half:], found["b"])):
        assert bool((zeta.diff().sign() * part.diff().sign() <= 0).all())
        assert bool(((zeta >= tau - 1e-9) & (zeta <= 1 + tau + 1e-9)).all()) or bool((zeta == 1).all())
    whole = torch.cat([found["a"], found["b"]])
    if within == "network" and bool(omega.max() > 0):
        assert float(whole[omega.argmax()]) == pytest.approx(tau, abs=1e-12)
        assert bool((whole[omega == 0] == 1 + tau).all())


def test_of_the_way_that_fedavg_goes_sensitive_weights_go_the_smaller_part() -> None:
    sites, network, tau = clinics(12, 7, 16, dtype=torch.float64), small(dtype=torch.float64), 0.5
    start = copy_module_weights(network.module)["model"]
    played, letters = tapped(Elastic(SGD, tau), sites, network)
    fedavg = play(FedAvg(SGD), sites, network, 1).model
    omegas = [letter.answer.tensors["sensitivity"] for letter in letters]
    ratios, sizes = [], []
    for name, w in start.items():
        far = (fedavg[name] - w).abs() > 1e-6
        ratios.append(((played.model[name] - w) / (fedavg[name] - w))[far])
        sizes.append(sum(n / 35 * o[name] for n, o in zip((12, 7, 16), omegas, strict=True))[far])  # type: ignore[index]
    ratio, size = torch.cat(ratios), torch.cat(sizes)
    assert bool((ratio[size.argsort()].diff() <= 1e-8).all())
    assert tau - 1e-8 <= float(ratio.min()) < 1 < float(ratio.max()) <= 1 + tau + 1e-8


# Where it is FedAvg


class OneWeight(LiveNetwork):
    """F(x) = w·x with a single weight, which is as sensitive as the most sensitive one; the loss is ½(wx − 1)²."""

    def __init__(self) -> None:
        super().__init__(Classifier(nn.Flatten(), nn.Linear(1, 1, bias=False)))
        nn.init.constant_(self.module.head.weight, 0.3)  # type: ignore[arg-type]

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        return (self(weights, batch[0]) - 1).square().mean() / 2


def test_where_all_weights_are_equally_sensitive_tau_1_is_fedavg() -> None:
    numbers = {"a": [1.0, 2.0, -0.5], "b": [0.1, 3.0], "c": [-2.0]}
    sites = {
        name: site(name, Images(torch.tensor(x).reshape(-1, 1, 1, 1), torch.zeros(len(x), dtype=torch.int64)))
        for name, x in numbers.items()
    }
    fedavg = play(FedAvg(SGD), sites, OneWeight(), 4)
    assert same(play(Elastic(SGD, tau=1.0), sites, OneWeight(), 4).outcome.state, fedavg.outcome.state)
    assert not same(play(Elastic(SGD, tau=0.5), sites, OneWeight(), 4).outcome.state, fedavg.outcome.state)


@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("level", [1e-9, 1.0, 7.0])
def test_equal_sensitivities_of_a_whole_network_too(level: float, weights: Weighting) -> None:
    training = replace(SGD, weights=weights)
    state = copy_module_weights(small().module)
    equal = {name: torch.full_like(w, level) for name, w in state["model"].items()}
    updates = []
    for number, examples in enumerate((12, 7, 16)):
        draw = Stream(1, ("moved", number)).generator()
        model = {n: w + 0.1 * torch.randn(w.shape, generator=draw) for n, w in state["model"].items()}
        updates.append(Update({"model": model, "buffers": state["buffers"], "sensitivity": equal}, examples))
    for within in ("network", "tensor"):
        found = Elastic(training, 1.0, within).aggregate(state, iter(updates))
        assert same(found, FedAvg(training).aggregate(state, iter(updates)))


@pytest.mark.parametrize("tau", [0.0, 0.5, 2.0])
def test_where_no_weight_has_any_influence_the_round_is_fedavgs(tau: float) -> None:
    """A head of zeros: outputs are 0, and so is the slope of their square. From then on it is another algorithm."""
    sites, network = clinics(12, 7, 16), small()
    with torch.no_grad():
        for parameter in network.module.head.parameters():
            parameter.zero_()
    for rounds, equal in ((1, True), (2, False)):
        fedavg, elastic = (play(a, sites, network, rounds) for a in (FedAvg(MOMENTUM), Elastic(MOMENTUM, tau)))
        assert same(elastic.outcome.state, fedavg.outcome.state) is equal


# What it sends, and where it may not


def test_two_kinds_of_the_models_size_leave_a_site_and_are_counted() -> None:
    sites = clinics(12, 7)
    elastic, letters = tapped(Elastic(SGD), sites, small())
    fedavg = play(FedAvg(SGD), sites, small(), 1)
    size = sum(w.numel() * w.element_size() for w in elastic.model.values())
    for letter in letters:
        assert set(letter.answer.tensors) == {"model", "buffers", "sensitivity"}
        assert set(letter.sent.tensors) == {"model", "buffers"}
    for name in sites:
        more = note(elastic, name)["up"] - note(fedavg, name)["up"]
        assert size <= more <= size + 1000, "the names of the tensors, beside their values"
        assert note(elastic, name)["down"] == note(fedavg, name)["down"]


def note(played: Played, name: SiteId) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in as_json(played.journal.costs) if row["event"] == "round")["sites"][name]
    return found


def test_it_stacks_with_dropout() -> None:
    algorithm = Elastic(Training(Optimiser("sgd", 0.1), batch=4, epochs=2))
    played = same_on_both(algorithm, clinics(*SIZES, dtype=torch.float64), 1e-10, torch.float64, dropout=0.5)
    assert together(played) == {len(SIZES)}


def test_a_sensitivity_below_zero_is_refused() -> None:
    elastic = Elastic(SGD)
    elastic.check_update(Update({"sensitivity": {"w": torch.tensor([0.0, 2.0])}}, 3))
    with pytest.raises(Refused, match="below 0"):
        elastic.check_update(Update({"sensitivity": {"w": torch.tensor([0.0, -1e-6])}}, 3))


@pytest.mark.parametrize("tau", [-0.1, float("nan"), 1e9])
def test_a_step_that_cannot_work_is_refused(tau: float) -> None:
    with pytest.raises(RecipeError, match=r"algorithm\.tau"):
        Elastic(tau=tau)


@pytest.mark.parametrize(
    "wish", [{"epsilon": 3.0, "delta": 1e-4}, {"unit": "site", "epsilon": 30.0, "delta": 1e-3}], ids=["image", "site"]
)
def test_under_a_privacy_plan_it_is_refused_with_what_to_choose_instead(wish: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="choose fedavg") as caught:
        Experiment(tiny(algorithm="elastic", privacy=wish))
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="leave privacy out"):
        Elastic(replace(SGD, private=Private(1.0, 1.0)))
