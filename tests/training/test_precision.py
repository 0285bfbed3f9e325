"""`training.precision: bfloat16`: the network computes in half the bits, everything that lasts stays float32."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from polyclinic import run
from polyclinic.core.errors import EngineError, RecipeError, StoreError
from polyclinic.core.jobs import Score
from polyclinic.core.network import Network
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, Precision
from polyclinic.data.examples import Images
from polyclinic.models.classifier import Classifier
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities, task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import CLASSES, SIDE, noise, same, small
from tests.small import tiny
from tests.training.jobs import at_round, job

STREAM = Stream(0, ("site", "here"))
ROUNDING = 2.0**-8
"""bfloat16 keeps 8 bits: a number is rounded by at most this share of it."""
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
BOTH: tuple[Precision, ...] = ("float32", "bfloat16")


def smooth(device: str = "cpu", dtype: torch.dtype = torch.float32) -> LiveNetwork:
    """No ReLU and no max-pool: where rounding tips one of those over, the gradient jumps by more than rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        layers: dict[str, nn.Module] = {"conv": nn.Conv2d(1, 4, 3, padding=1), "norm": nn.GroupNorm(2, 4)}
        layers |= {"tanh": nn.Tanh(), "flatten": nn.Flatten(), "dense": nn.Linear(4 * SIDE**2, 16)}
        module = Classifier(nn.Sequential(OrderedDict(layers)), nn.Linear(16, CLASSES))
    return LiveNetwork(module.to(dtype), torch.device(device))


def on(device: str, data: Images) -> Batch:
    return data.images.to(device), data.labels.to(device)


def gradient(network: LiveNetwork, precision: Precision, batch: Batch) -> dict[str, Tensor]:
    network.module.train().zero_grad()
    with network.use_precision(precision):
        loss = network.loss(network.live, batch)
    torch.autograd.backward(loss)
    return {name: p.grad.clone() for name, p in network.module.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference, over tensors."""
    return max(float((found[name] - e).norm() / e.norm()) for name, e in expected.items())


@DEVICES
def test_gradients_agree_with_float32_to_the_rounding_of_bfloat16(device: str) -> None:
    network, batch = smooth(device), on(device, noise(32))
    exact, rounded = (gradient(network, precision, batch) for precision in BOTH)
    assert rounded.keys() == dict(network.module.named_parameters()).keys()
    assert all(g.dtype == torch.float32 for g in rounded.values())
    assert ROUNDING / 10 < apart(rounded, exact) < 12 * ROUNDING


def test_layers_compute_in_bfloat16_and_hand_on_float32() -> None:
    network, batch = small(), on("cpu", noise(8))
    inside: set[torch.dtype] = set()
    network.module.extractor.conv.register_forward_hook(  # type: ignore[union-attr]
        lambda _module, _inputs, output: inside.add(output.dtype)
    )
    found = {}
    for precision in BOTH:
        with network.use_precision(precision):
            weights = (network.live, copy_module_weights(network.module))
            calls = [call(w, batch[0]) for call in (network, network.features) for w in weights]
            found[precision] = {t.dtype for t in (*calls, network.loss(network.live, batch))}
    assert inside == {torch.float32, torch.bfloat16}
    assert found == {precision: {torch.float32} for precision in BOTH}


def trained(precision: Precision, optimiser: Optimiser = Optimiser("adam", 0.01)) -> tuple[LiveNetwork, Bundle, Bundle]:
    network = small()
    ask = job(network, Training(optimiser, batch=5, precision=precision), optimiser_state={})
    fitted = fit(ask, network, noise(16), at_round(1), STREAM)
    return network, fitted.weights, {"optimiser": fitted.optimiser_state}


def test_weights_statistics_and_optimiser_stay_float32() -> None:
    (_, exact, exact_state), (_, rounded, rounded_state) = (trained(precision) for precision in BOTH)
    for one, other in ((exact, rounded), (exact_state, rounded_state)):
        kinds = [{(k, n): t.dtype for k, g in bundle.items() for n, t in g.items()} for bundle in (one, other)]
        assert kinds[0] == kinds[1]
        assert set(kinds[0].values()) <= {torch.float32, torch.int64}


def test_the_option_is_really_on_and_does_no_harm() -> None:
    (_, exact, _), (_, rounded, _) = (trained(precision, Optimiser(lr=0.1)) for precision in BOTH)
    start = copy_module_weights(small().module)["model"]
    travelled = {name: w - start[name] for name, w in exact["model"].items()}
    assert not same(exact, rounded)
    for kind, name in (("model", "head.weight"), ("buffers", "extractor.norm.running_var")):
        assert not torch.equal(exact[kind][name], rounded[kind][name])
    gap = sum(float((rounded["model"][n] - w).pow(2).sum()) for n, w in exact["model"].items()) ** 0.5
    assert gap < 0.2 * sum(float(t.pow(2).sum()) for t in travelled.values()) ** 0.5


def test_steps_too_small_for_bfloat16_still_add_up() -> None:
    """The weights that are kept are float32: w − η·g moves them although η·g is far below bfloat16's spacing."""
    network, data = smooth(), noise(16)
    start, slope = copy_module_weights(network.module)["model"], gradient(network, "float32", on("cpu", data))
    training = Training(Optimiser(lr=1e-3), batch=16, precision="bfloat16")
    ended = fit(job(network, training), network, data, at_round(1, lr=1e-3), STREAM).weights["model"]
    for name in ("extractor.dense.weight", "head.weight"):
        assert 1e-3 * float(slope[name].abs().max()) < ROUNDING * float(start[name].abs().max())
        assert not torch.equal(ended[name], start[name])
    assert apart({n: (start[n] - w) / 1e-3 for n, w in ended.items()}, slope) < 6 * ROUNDING


def test_evaluation_is_in_float32_whatever_training_was_in() -> None:
    network, weights, _ = trained("bfloat16")
    found = score(Score(weights, predict_probabilities), network, noise(9, "scored"), 4)["probabilities"]
    anew = small()
    expected = score(Score(weights, predict_probabilities), anew, noise(9, "scored"), 4)["probabilities"]
    assert torch.equal(found, expected)
    assert not torch.equal(found, found.bfloat16().float())


def fails(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    raise ZeroDivisionError


def test_a_job_that_fails_leaves_no_precision_behind() -> None:
    network, images = small(), noise(4).images
    before = network(network.live, images)
    with pytest.raises(ZeroDivisionError):
        fit(job(network, Training(precision="bfloat16"), steps=fails), network, noise(4), at_round(1), STREAM)
    assert torch.equal(network(network.load_weights(copy_module_weights(small().module)), images), before)


def test_float64_networks_are_refused() -> None:
    network, data = smooth(dtype=torch.float64), noise(8, dtype=torch.float64)
    with pytest.raises(EngineError, match="float64"):
        fit(job(network, Training(precision="bfloat16")), network, data, at_round(1), STREAM)


def stacked_gradient(network: LiveNetwork, precision: Precision, batch: Batch, sites: int) -> dict[str, Tensor]:
    """Of every site, its weights stacked with the others'."""
    stack = {n: torch.stack([w] * sites).requires_grad_() for n, w in network.live["model"].items()}
    images, labels = (torch.stack([t] * sites) for t in batch)
    alone = vmap(lambda model, x, y: task_loss(network, {"model": model, "buffers": {}}, (x, y), {}))
    with network.use_precision(precision):
        losses = alone(stack, images, labels)
    found = torch.autograd.grad(losses.sum(), list(stack.values()))
    return dict(zip(stack, found, strict=True))


@DEVICES
def test_stacked_weights_compute_in_bfloat16_too(device: str) -> None:
    network, batch = smooth(device), on(device, noise(32))
    network.module.train()
    exact = gradient(network, "float32", batch)
    found = stacked_gradient(network, "bfloat16", batch, 3)
    assert all(g.dtype == torch.float32 for g in found.values())
    for site in range(3):
        assert ROUNDING / 10 < apart({n: g[site] for n, g in found.items()}, exact) < 8 * ROUNDING
    plain = stacked_gradient(network, "float32", batch, 3)
    assert apart({n: g[0] for n, g in plain.items()}, exact) < 1e-4


def test_a_run_does_not_go_on_in_another_precision(tmp_path: Path) -> None:
    ended = run(tiny(training__precision="bfloat16"), tmp_path)
    assert ended.summary.sha256 != run(tiny()).summary.sha256
    with pytest.raises(StoreError, match="another recipe"):
        run(tiny(), tmp_path)
    assert run(tiny(training__precision="bfloat16"), tmp_path).summary.sha256 == ended.summary.sha256


@pytest.mark.parametrize("word", ["float16", "half", "float64", None])
def test_other_precisions_are_refused(word: str | None) -> None:
    with pytest.raises(RecipeError, match=r"training\.precision"):
        tiny(training__precision=word)
