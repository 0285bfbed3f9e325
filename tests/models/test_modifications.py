"""A network that is cut elsewhere is the same function of the same weights."""

from __future__ import annotations

import copy

import pytest
import torch

from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream
from polyclinic.models import build_model
from polyclinic.models.modifications import count_stages, cut_after
from polyclinic.training.network import LiveNetwork, feature_shape

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "resnet50": [(256, 64, 64), (512, 32, 32), (1024, 16, 16), (2048,)],
    "resnet22": [(16, 62, 62), (32, 31, 31), (64, 16, 16), (128, 8, 8), (256,)],
    "small_cnn": [(32, 128, 128), (64, 64, 64), (128,)],
    "mobilenet_v2": [(24, 64, 64), (32, 32, 32), (96, 16, 16), (1280,)],
    "densenet201": [(256, 64, 64), (512, 32, 32), (1792, 16, 16), (1920,)],
    "groupnorm_cnn": [(256,)],
}
"""At 256 × 256 pixels: 1,048,576, 524,288 and 262,144 values, as FedMP's Table 2 has them (but for a misprint)."""


@pytest.mark.parametrize("name", SHAPES)
def test_every_cut_is_the_same_function_and_hands_on_what_its_stage_makes(name: str) -> None:
    whole = build_model(name, classes=3, channels=1, size=256, seed=Stream(1)).eval()
    images = torch.randn(1, 1, 256, 256, generator=Stream(2).generator())
    assert count_stages(whole) == len(SHAPES[name])
    with torch.no_grad():
        wanted = whole(images)
        for stage, shape in enumerate(SHAPES[name], 1):
            cut = cut_after(whole, stage).eval()
            assert torch.equal(cut(images), wanted)
            assert feature_shape(LiveNetwork(copy.deepcopy(cut)), images) == shape
            assert {id(p) for p in cut.parameters()} == {id(p) for p in whole.parameters()}
            assert all(n.startswith(("extractor.", "head.")) for n, _ in cut.named_parameters())


@pytest.mark.parametrize(("name", "stage"), [("resnet18", 5), ("small_cnn", 0), ("inception_v3", 2)])
def test_a_stage_that_is_not_there_is_refused(name: str, stage: int) -> None:
    with pytest.raises(RecipeError, match=rf"model.split_after is {stage}, but this network has stages 1 to \d"):
        cut_after(build_model(name, classes=2, channels=3, size=96, seed=Stream(1)), stage)


def test_a_calm_head_moves_no_statistics_and_has_gradients() -> None:
    network = LiveNetwork(cut_after(build_model("resnet18", classes=2, channels=1, size=32, seed=Stream(1)), 3))
    weights = network.live
    network.set_training_mode(frozenset(weights["model"]))
    before = {name: tensor.clone() for name, tensor in weights["buffers"].items()}
    features = torch.randn(4, 256, 2, 2, generator=Stream(2).generator())
    network.head(weights, features, eval_mode=True).sum().backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights["buffers"].items())
    moved = {name for name, tensor in weights["model"].items() if tensor.grad is not None}
    assert moved == {name for name in weights["model"] if name.startswith("head.")}
    one, other = (network.head(weights, features[:n], eval_mode=True)[:1] for n in (1, 4))
    torch.testing.assert_close(one, other)  # nobody else's batch matters
