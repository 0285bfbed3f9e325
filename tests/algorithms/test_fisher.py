"""Fisher's information by the definition: a plain loop over examples, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.algorithms.personalisation.pfedcdp import (
    per_example_squared_gradients,
    squared_gradients,
    squared_mean_gradient,
)
from polyclinic.core.jobs import Score
from polyclinic.core.network import Network, Scorer
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, Tensors
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.training.dp.per_example_gradients import GradientTape, NotRecordableError, copy_with_record
from polyclinic.training.fit import score
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import small

SIDE, CLASSES = 8, 3


def built(name: str, **options: float) -> Callable[[], LiveNetwork]:
    def make() -> LiveNetwork:
        shape = {"classes": CLASSES, "channels": 1, "size": SIDE}
        return LiveNetwork(build_model(name, **shape, dropout=options.get("dropout"), seed=Stream(5)).double())

    return make


RECORDED: dict[str, Callable[[], LiveNetwork]] = {
    "mlp": built("mlp"),
    "convolutions": built("cnn_c"),
    "dropout, which evaluation leaves out": built("cnn_c", dropout=0.5),
    "GroupNorm and a skip": built("groupnorm_cnn"),
}
"""Networks whose gradients come from one pass …"""
OTHERS: dict[str, Callable[[], LiveNetwork]] = {
    "BatchNorm": lambda: small(norm=True, dtype=torch.float64),
    "resnet18": built("resnet18"),
}
"""… and those that are asked example by example."""


def pictures(network: LiveNetwork, count: int) -> Images:
    generator = Stream(6, ("pictures", count)).generator()
    side = 4 if "extractor.conv.weight" in network.live["model"] else SIDE
    images = torch.randn(count, 1, side, side, generator=generator, dtype=torch.float64)
    return Images(images, torch.randint(CLASSES, (count,), generator=generator))


def trained(network: LiveNetwork) -> LiveNetwork:
    """With statistics and affine weights that are not those of the first moment."""
    generator = Stream(7).generator()
    with torch.no_grad():
        for layer in network.module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.running_mean is not None
                assert layer.running_var is not None
                layer.running_mean.normal_(0, 0.3, generator=generator)
                layer.running_var.uniform_(0.5, 2, generator=generator)
            if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
                layer.weight.uniform_(0.5, 1.5, generator=generator)
    return network


def asked(function: Scorer, network: LiveNetwork, data: Images, batch: int | None = None) -> Tensors:
    return score(Score(copy_module_weights(network.module), function, reduce="mean"), network, data, batch)


def gradients(network: LiveNetwork, images: Tensor, labels: Tensor) -> Tensors:
    """Of the mean loss, by autograd alone."""
    module = network.module.eval().requires_grad_(True)
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(F.cross_entropy(module(images), labels), parameters)
    return dict(zip(names, found, strict=True))


def squares_by_hand(network: LiveNetwork, data: Images, sizes: Iterable[int]) -> Tensors:
    """Σ (n/N)·(gradient of the mean loss of some)², some after some."""
    total: Tensors = {}
    parts = [torch.split(t, list(sizes)) for t in (data.images, data.labels)]
    for images, labels in zip(*parts, strict=True):
        for name, g in gradients(network, images, labels).items():
            total[name] = total.get(name, torch.zeros_like(g)) + len(labels) / len(data) * g**2
    return total


def assert_equal(found: Tensors, wanted: Tensors, bar: float = 1e-12) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape
        assert float((found[name] - tensor).abs().max()) <= bar * float(tensor.abs().max()), name
        assert float(found[name].max()) > 0, name


@pytest.mark.parametrize("make", [*RECORDED.values(), OTHERS["BatchNorm"]], ids=[*RECORDED, "BatchNorm"])
def test_it_is_the_mean_of_the_squares_of_each_examples_gradient(make: Callable[[], LiveNetwork]) -> None:
    network = trained(make())
    data = pictures(network, 11)
    wanted = squares_by_hand(network, data, [1] * 11)
    for batch in (1, 3, 8, 11):
        assert_equal(asked(squared_gradients, network, data, batch), wanted)


def test_a_network_of_a_library_is_asked_example_by_example() -> None:
    """With BatchNorm in evaluation mode, layers that write in place, and skips."""
    network = trained(OTHERS["resnet18"]())
    data = pictures(network, 2)
    assert_equal(asked(squared_gradients, network, data), squares_by_hand(network, data, [1, 1]))


def slowly(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    return per_example_squared_gradients(network, weights, batch)


@pytest.mark.parametrize("make", RECORDED.values(), ids=RECORDED)
def test_both_ways_give_the_same(make: Callable[[], LiveNetwork]) -> None:
    """More examples than are held side by side."""
    network = trained(make())
    data = pictures(network, 19)
    assert_equal(asked(squared_gradients, network, data), asked(slowly, network, data))


def test_which_networks_can_be_recorded() -> None:
    """Else the tests above would look at one way only."""
    for make in RECORDED.values():
        network = make()
        copy_with_record(network.module, frozenset(network.live["model"]), GradientTape(network.device))
    for make in OTHERS.values():
        network = make()
        with pytest.raises(NotRecordableError):
            copy_with_record(network.module, frozenset(network.live["model"]), GradientTape(network.device))


@pytest.mark.parametrize(
    "make", [RECORDED["GroupNorm and a skip"], OTHERS["BatchNorm"]], ids=["GroupNorm", "BatchNorm"]
)
@pytest.mark.parametrize("sizes", [(11,), (4, 4, 3), (1,) * 11])
def test_the_papers_is_the_square_of_a_batchs_gradient(make: Callable[[], LiveNetwork], sizes: tuple[int, ...]) -> None:
    network = trained(make())
    data = pictures(network, 11)
    found = asked(squared_mean_gradient, network, data, sizes[0])
    assert_equal(found, squares_by_hand(network, data, sizes))
    by_examples = asked(squared_gradients, network, data)
    alike = [torch.allclose(found[n], t, rtol=1e-9, atol=0) for n, t in by_examples.items()]
    assert all(alike) if max(sizes) == 1 else not any(alike)


def test_a_job_may_say_how_many_examples_it_looks_at_together() -> None:
    """So that the paper's figure does not depend on what a device likes."""
    network = trained(RECORDED["mlp"]())
    data = pictures(network, 11)
    job = Score(copy_module_weights(network.module), squared_mean_gradient, reduce="mean", batch=4)
    assert_equal(score(job, network, data), squares_by_hand(network, data, (4, 4, 3)))


def test_looking_leaves_the_network_as_it_was() -> None:
    network = trained(RECORDED["GroupNorm and a skip"]())
    data, before = pictures(network, 5), copy_module_weights(network.module)
    network.require_gradients(frozenset({"head.weight"}))
    asked(squared_gradients, network, data)
    after = copy_module_weights(network.module)
    assert all(torch.equal(t, after[kind][name]) for kind, group in before.items() for name, t in group.items())
    assert [n for n, p in network.module.named_parameters() if p.requires_grad] == ["head.weight"]
    assert all(p.grad is None for p in network.module.parameters())
