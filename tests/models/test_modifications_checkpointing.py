"""Activation checkpointing gives the same numbers, bit for bit, and moves BatchNorm statistics once."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit, Fitted, Site
from polyclinic.core.network import Network
from polyclinic.core.options import Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, Precision
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import CheckpointedBlock, cut_after, enable_checkpointing, replace_batch_norm
from polyclinic.runs.experiment import load_sites
from polyclinic.runs.networks import build_network
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import fit_stacked
from tests.small import tiny

SIDE, IMAGES = 48, 6
"""At 16 pixels a convolution would see 1 × 1 places, where PyTorch's bfloat16 gradients on CPUs are not repeatable."""


def built(name: str) -> Classifier:
    return build_model(name, classes=2, channels=1, size=SIDE, seed=Stream(1))


def data() -> Images:
    generator = Stream(2).generator()
    images = torch.randn(IMAGES, 1, SIDE, SIDE, generator=generator)
    return Images(images, torch.randint(2, (IMAGES,), generator=generator))


def site() -> Site:
    return Site("here", IMAGES, 1, 1, 1e-4)


def fitted(module: Classifier, training: Training) -> Fitted:
    secret = None if training.private is None else Stream(4)
    return fit(
        Fit(copy_module_weights(module), task_loss, training), LiveNetwork(module), data(), site(), Stream(3), secret
    )


def same(one: Bundle, other: Bundle) -> bool:
    return all(torch.equal(other[kind][name], t) for kind, group in one.items() for name, t in group.items())


class Calls:
    """How often a layer computes."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.count = 0
        layer.register_forward_hook(self._note)

    def _note(self, *_: object) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("resnet22", "float32"),
        ("resnet22", "bfloat16"),
        ("mobilenet_v3_small", "float32"),
        ("efficientnet_b0", "float32"),  # draws at random which blocks are left out
    ],
)
def test_training_is_the_same_bit_for_bit_and_statistics_move_once(name: str, precision: Precision) -> None:
    training = Training(Optimiser("sgd", momentum=0.9), batch=3, precision=precision)
    plain, again = built(name), enable_checkpointing(built(name))
    assert list(plain.state_dict()) == list(again.state_dict())
    kept, twice = fitted(plain, training), fitted(again, training)
    assert kept.loss == twice.loss
    assert same(kept.weights, twice.weights)
    counters = [t for n, t in twice.weights["buffers"].items() if n.endswith("num_batches_tracked")]
    assert counters
    assert {int(counter) for counter in counters} == {IMAGES // 3}


def test_every_block_computes_twice_a_step_and_only_once_otherwise() -> None:
    module = enable_checkpointing(built("resnet22"))
    calls = [Calls(module.get_submodule(f"extractor.layer{stage}.1.conv1")) for stage in (1, 5)]
    fitted(module, Training(batch=3))
    assert [call.count for call in calls] == [2 * IMAGES // 3] * 2
    fitted(module, Training(batch=3, fine_tune=0.05))  # the gradient ends in the head: nothing to compute again
    assert [call.count for call in calls] == [3 * IMAGES // 3] * 2
    network = LiveNetwork(module)
    with torch.no_grad(), network.use_checkpointing():
        network(network.live, data().images)
    torch.autograd.backward(network(network.live, data().images).sum())
    assert [call.count for call in calls] == [3 * IMAGES // 3 + 2] * 2


def test_weights_of_a_call_of_its_own_are_those_it_is_computed_again_with() -> None:
    found = []
    for module in (built("resnet22"), enable_checkpointing(built("resnet22"))):
        network, images = LiveNetwork(module), data().images
        network.set_training_mode(frozenset(network.live["model"]))
        other = {kind: {n: t * 1.5 for n, t in group.items()} for kind, group in copy_module_weights(module).items()}
        moving = {name: t.requires_grad_() for name, t in other["model"].items()}
        with network.use_checkpointing():
            loss = network(other, images).square().sum()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()  # what lives in the module is not what the call was made with
            gradients: tuple[Tensor, ...] = torch.autograd.grad(loss, list(moving.values()))
        found.append({"model": dict(zip(moving, gradients, strict=True)), "buffers": other["buffers"]})
    assert same(*found)
    assert all(bool(t.abs().sum() > 0) for n, t in found[0]["model"].items() if n.endswith("conv1.weight"))


def test_a_cut_network_computes_both_of_its_parts_again() -> None:
    def features_too(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
        features = network.features(weights, batch[0])
        return features.square().mean() + network.head(weights, features).square().mean()

    found, calls = [], []
    for change in (lambda module: module, enable_checkpointing):
        module = cut_after(change(built("resnet22")), 2)
        calls += [Calls(module.get_submodule(f"{part}.0.conv1")) for part in ("extractor.layer2", "head.layer4")]
        job = Fit(copy_module_weights(module), features_too, Training(batch=IMAGES))
        found.append(fit(job, LiveNetwork(module), data(), site(), Stream(3)).weights)
    assert same(*found)
    assert [call.count for call in calls] == [1, 1, 2, 2]


def test_private_steps_and_stacks_keep_their_activations() -> None:
    private = Training(batch=3, private=Private(0.5, 1.0))
    one, other = (
        fitted(change(replace_batch_norm(built("resnet22"))), private) for change in (lambda m: m, enable_checkpointing)
    )
    assert same(one.weights, other.weights)
    stacks = []
    for module in (built("resnet22"), enable_checkpointing(built("resnet22"))):
        job = Fit(copy_module_weights(module), task_loss, Training(batch=3))
        seats = [StackMember(job, data(), site(), Stream(number)) for number in range(2)]
        stacks.append(fit_stacked(seats, LiveNetwork(copy.deepcopy(module))))
    assert all(same(a.weights, b.weights) for a, b in zip(*stacks, strict=True))


@pytest.mark.parametrize("name", ["cnn_a", "groupnorm_cnn", "mlp"])
def test_a_network_without_blocks_is_refused(name: str) -> None:
    with pytest.raises(
        RecipeError, match=r"model\.activation_checkpointing is true, but this network is not a chain of blocks"
    ):
        enable_checkpointing(built(name))


def test_a_recipe_asks_for_it() -> None:
    consortium = load_sites(tiny(), None)
    others: list[dict[str, object]] = [{}, {"model__split_after": 2}, {"model__norm": "group"}]
    for wanted in (False, True):
        for keys in others:
            recipe = tiny(model__name="mobilenet_v3_small", model__activation_checkpointing=wanted, **keys)
            blocks = [m for m in build_network(recipe, consortium).modules() if isinstance(m, CheckpointedBlock)]
            assert len(blocks) == (13 if wanted else 0)  # 11 blocks between two layers
    with pytest.raises(RecipeError, match=r"model\.activation_checkpointing is true"):
        build_network(tiny(model__activation_checkpointing=True), consortium)


STEP = """
import resource, sys
import torch
from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images
from polyclinic.training.fit import fit
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.losses import task_loss
from polyclinic.models import build_model
from polyclinic.models.modifications import enable_checkpointing

count, precision, wanted = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "again"
module = build_model("resnet22", classes=2, channels=1, size=2048, seed=Stream(1))
network = LiveNetwork(enable_checkpointing(module) if wanted else module)
images = Images(torch.randn(count, 1, 2048, 2048, generator=Stream(2).generator()), torch.arange(count) % 2)
training = Training(Optimiser("adam", 1e-5), batch=count, precision=precision)
fit(Fit(copy_module_weights(module), task_loss, training), network, images, Site("here", count, 1, 1, 1e-5), Stream(3))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak * (1 if sys.platform == "darwin" else 1024))
"""


def peak(count: int, precision: Precision, way: str) -> int:
    """Bytes that a process has taken at most, which trains one step on so many whole mammograms."""
    command = [sys.executable, "-c", STEP, str(count), precision, way]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500, env=environment)
    return int(done.stdout)


@pytest.mark.heavy
def test_a_step_at_2048_pixels_fits_24_gigabytes_and_takes_less_when_computed_again() -> None:
    for precision in ("float32", "bfloat16"):
        assert peak(2, precision, "again") < 24e9
    assert peak(8, "float32", "again") < 0.9 * peak(8, "float32", "kept")
