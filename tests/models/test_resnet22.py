"""ResNet-22 of Wu et al.: its published size and shapes, its blocks, its published weights, and every engine."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from polyclinic.core.errors import WeightsError
from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Tensors
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import cut_after, replace_batch_norm
from polyclinic.models.resnet22 import PreActivationBlock
from polyclinic.models.weights.load import adopt_weights, load_weights
from polyclinic.training.dp.dp_sgd import PrivateGradients
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import fit_stacked, why_not_stackable
from tests.models.networks import fresh, parameters

SIDE = 24
CC = "four_view_resnet.cc."


def small(dropout: float | None = None) -> Classifier:
    return build_model("resnet22", classes=3, channels=1, size=SIDE, dropout=dropout, seed=Stream(1))


def pictures(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Images:
    generator = Stream(2, (seed,)).generator()
    images = torch.randn(count, 1, SIDE, SIDE, generator=generator).to(dtype)
    return Images(images, torch.randint(3, (count,), generator=generator))


@pytest.mark.parametrize(("channels", "more"), [(1, 0), (3, 2 * 16 * 7 * 7)])
def test_the_trunk_has_the_published_number_of_parameters(channels: int, more: int) -> None:
    network = build_model("resnet22", classes=2, channels=channels, size=2048, seed=Stream(1))
    assert parameters(network.extractor) == 2_799_536 + more
    dense, norms = (256 + 1) * 128 + (128 + 1) * 64 + (64 + 1) * 2, 2 * (128 + 64)
    assert parameters(network.head) == dense + norms


def test_2048_pixels_a_side_end_as_32_places_a_side_of_256_values() -> None:
    network = build_model("resnet22", classes=2, channels=1, size=2048, seed=Stream(1)).to("meta").eval()
    image = torch.empty(1, 1, 2048, 2048, device="meta")
    stages = [(16, 510, 510), (32, 255, 255), (64, 128, 128), (128, 64, 64)]
    for stage, shape in enumerate(stages, 1):
        assert cut_after(network, stage).extractor(image).shape == (1, *shape)
    last = dict(network.extractor.named_children())
    before_pooling = nn.Sequential(*(layer for name, layer in last.items() if name not in ("average", "flatten")))
    assert before_pooling(image).shape == (1, 256, 32, 32)
    assert network.extractor(image).shape == (1, 256)
    assert network(image).shape == (1, 2)


def test_blocks_are_identity_mappings_with_the_shortcut_behind_the_first_activation() -> None:
    values = torch.randn(2, 16, 5, 5, generator=Stream(1).generator())
    second, first = PreActivationBlock(16, 16, 1, first=False), PreActivationBlock(16, 16, 1, first=True)
    assert first.downsample is not None
    for block in (second, first):
        nn.init.zeros_(block.conv2.weight)
    nn.init.dirac_(first.downsample[0].weight)  # type: ignore[arg-type]
    assert torch.equal(second(values), values)
    torch.testing.assert_close(first(values), F.batch_norm(values, None, None, training=True).relu())


def published(channels: int = 1) -> Tensors:
    """Made-up numbers under the names and in the shapes of the public checkpoint's CC encoder."""
    generator = Stream(3).generator()
    found: Tensors = {}

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean"):
            found[f"{name}.{part}"] = torch.randn(width, generator=generator)
        found[f"{name}.running_var"] = torch.rand(width, generator=generator) + 0.5
        found[f"{name}.num_batches_tracked"] = torch.tensor(7)

    def conv(name: str, *shape: int) -> None:
        scale = (shape[1] * shape[2] * shape[3]) ** -0.5
        found[f"{name}.weight"] = scale * torch.randn(shape, generator=generator)

    conv("first_conv", 16, channels, 7, 7)
    before = 16
    for stage, width in enumerate((16, 32, 64, 128, 256)):
        for block in (0, 1):
            name = f"layer_list.{stage}.{block}"
            norm(f"{name}.bn1", before)
            norm(f"{name}.bn2", width)
            conv(f"{name}.conv1", width, before, 3, 3)
            conv(f"{name}.conv2", width, width, 3, 3)
            if block == 0:
                conv(f"{name}.downsample.0", width, before, 1, 1)
            before = width
    norm("final_bn", 256)
    return found


def by_hand(tensors: Tensors, images: Tensor) -> Tensor:
    """The network of the description, on the checkpoint's own names."""

    def ready(name: str, values: Tensor) -> Tensor:
        mean, variance, scale, shift = (
            tensors[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(values, mean, variance, scale, shift).relu()

    values = F.max_pool2d(F.conv2d(images, tensors["first_conv.weight"], stride=2), 3, 2)
    for stage in range(5):
        for block in (0, 1):
            name, stride = f"layer_list.{stage}.{block}", 2 if stage and not block else 1
            active = ready(f"{name}.bn1", values)
            inner = F.conv2d(active, tensors[f"{name}.conv1.weight"], stride=stride, padding=1)
            inner = F.conv2d(ready(f"{name}.bn2", inner), tensors[f"{name}.conv2.weight"], padding=1)
            beside = tensors.get(f"{name}.downsample.0.weight")
            values = inner + (values if beside is None else F.conv2d(active, beside, stride=stride))
    return ready("final_bn", values).mean((2, 3))


def test_the_public_checkpoint_fills_the_trunk_and_leaves_the_head(tmp_path: Path) -> None:
    cc = published()
    others = {"four_view_resnet.mlo.first_conv.weight": torch.ones(16, 1, 7, 7), "fc1_cc.weight": torch.ones(4, 4)}
    save_file({f"{CC}{name}": tensor for name, tensor in cc.items()} | others, tmp_path / "whole.safetensors")
    save_file(cc, tmp_path / "part.safetensors")
    images, first = pictures(2, dtype=torch.float32).images, small().state_dict()
    for file in ("whole", "part"):
        network = small().eval()
        loaded = load_weights(network, tmp_path / f"{file}.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(network.extractor(images), by_hand(cc, images), rtol=1e-4, atol=1e-4)
        head = [name for name in first if name.startswith("head.")]
        assert loaded.skipped == tuple(head)
        assert all(torch.equal(network.state_dict()[name], first[name]) for name in head)


def test_a_checkpoint_that_lacks_a_layer_or_sees_heatmaps_or_is_for_another_network_is_refused() -> None:
    short = {name: tensor for name, tensor in published().items() if name != "layer_list.4.1.conv2.weight"}
    with pytest.raises(WeightsError, match=r"extractor\.layer5\.1\.conv2\.weight \(missing\)"):
        adopt_weights(small(), short, "a file")
    with pytest.raises(WeightsError, match="16×3×7×7 instead of 16×1×7×7"):
        adopt_weights(small(), published(3), "a file")
    with pytest.raises(WeightsError, match="do not fit this network"):
        adopt_weights(fresh("resnet18", 1), published(), "a file")


def test_group_norm_keeps_pictures_apart_and_their_gradients_can_be_noted() -> None:
    module = replace_batch_norm(small(0.0)).double()
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    data = pictures(4)
    alone, together = module.train()(data.images[:1]), module(data.images)[:1]
    torch.testing.assert_close(alone, together)
    network = LiveNetwork(module)
    training = Training(Optimiser("sgd", 0.1), batch=4, private=Private(0.5, 0.0))
    steps = PrivateGradients(Fit(copy_module_weights(module), task_loss, training), network, network.live, 4, Stream(1))
    names = network.trainable_names(1, ())
    batch = data.images, data.labels
    noted, each = (way(task_loss, names, batch, {}, 4)[1] for way in (steps._sum_with_tape, steps._sum_with_vmap))
    for name in names:
        torch.testing.assert_close(noted[name], each[name])


def test_a_stack_of_sites_gives_what_each_gives_alone() -> None:
    module = small().double()
    training = Training(Optimiser("sgd", 0.05), batch=4)
    work = Fit(copy_module_weights(module), task_loss, training)
    seats = [StackMember(work, pictures(8, n), Site(str(n), 8, 1, 1, 0.05), Stream(n)) for n in range(2)]
    assert why_not_stackable(work, LiveNetwork(copy.deepcopy(module))) == ""
    stacked = fit_stacked(seats, LiveNetwork(copy.deepcopy(module)))
    for seat, found in zip(seats, stacked, strict=True):
        alone = fit(seat.job, LiveNetwork(copy.deepcopy(module)), seat.data, seat.site, seat.stream)
        for kind, group in alone.weights.items():
            for name, tensor in group.items():
                torch.testing.assert_close(found.weights[kind][name], tensor, rtol=1e-9, atol=1e-9, msg=name)
