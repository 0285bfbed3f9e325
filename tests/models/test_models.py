"""Every network of the registry: shape, split, size, seed, order of layers."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn
from torchvision.models import get_model_weights

from polyclinic import models
from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream
from polyclinic.models import MODELS, build_model, register_model
from polyclinic.models.classifier import Classifier
from tests.models.networks import (
    CLASSES,
    STREAM,
    TORCHVISION,
    fresh,
    logits,
    network,
    parameters,
    pictures,
    theirs,
)

every_model = pytest.mark.parametrize("name", MODELS)
every_torchvision_model = pytest.mark.parametrize("name", TORCHVISION)


@every_model
@pytest.mark.parametrize("channels", [1, 3])
def test_smallest_images_give_finite_logits_by_way_of_flat_features(name: str, channels: int) -> None:
    classifier, images = network(name, channels), pictures(name, channels)
    with torch.no_grad():
        features = classifier.extractor(images)
        split = classifier.head(features)
    whole = logits(classifier, images)
    assert features.ndim == 2
    assert len(features) == len(images)
    assert whole.shape == (2, CLASSES)
    assert torch.isfinite(whole).all()
    assert torch.equal(whole, split)


@every_model
def test_extractor_and_head_are_the_only_children_and_share_out_all_names(name: str) -> None:
    classifier = network(name, 3)
    assert [child for child, _ in classifier.named_children()] == ["extractor", "head"]
    extractor = {f"extractor.{key}" for key in classifier.extractor.state_dict()}
    head = {f"head.{key}" for key in classifier.head.state_dict()}
    assert head
    assert not extractor & head
    assert extractor | head == set(classifier.state_dict())


@every_model
def test_weights_survive_safetensors_and_depend_on_the_stream_alone(name: str) -> None:
    first, other = network(name, 3), fresh(name, seed=STREAM.child("other"))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    other.load_state_dict(load(save(first.state_dict())))
    images = pictures(name, 3)
    assert torch.equal(logits(first, images), logits(other, images))


@every_model
def test_same_stream_gives_the_same_weights_and_leaves_torchs_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    again = fresh(name).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    for key, value in network(name, 3).state_dict().items():
        assert torch.equal(value, again[key]), key


@pytest.mark.parametrize("name", ["cnn_a", "groupnorm_cnn", "mlp", "resnet18"])
def test_first_weights_ignore_the_global_seed(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = fresh(name).state_dict()
        torch.manual_seed(2)
        second = fresh(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@every_model
def test_leaf_layers_are_listed_in_the_order_in_which_they_run(name: str) -> None:
    classifier = network(name, 3)
    ran: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
        for layer, module in classifier.named_modules()
        if not list(module.children()) and module.state_dict()
    ]
    logits(classifier, pictures(name, 3))
    for hook in hooks:
        hook.remove()
    assert classifier.leaf_layers() == ran


@every_model
def test_one_pixel_less_than_the_minimum_is_refused_with_the_minimum(name: str) -> None:
    minimum = MODELS[name].min_size
    with pytest.raises(RecipeError, match=f"'{name}' needs images of at least {minimum} pixels"):
        build_model(name, classes=2, channels=1, size=minimum - 1, seed=STREAM)


@every_torchvision_model
def test_size_dropout_and_parameters_are_torchvisions_own(name: str) -> None:
    published = get_model_weights(name).DEFAULT.meta["min_size"]
    auxiliary = getattr(theirs(name), "AuxLogits", nn.Identity())
    assert published == (MODELS[name].min_size, MODELS[name].min_size)
    own = MODELS[name].dropout
    assert [m.p for m in theirs(name).modules() if isinstance(m, nn.Dropout)] == ([own] if own else [])
    assert parameters(network(name, 3)) == parameters(theirs(name)) - parameters(auxiliary)


@every_torchvision_model
def test_one_channel_is_the_three_channel_network_on_a_grey_picture(name: str) -> None:
    grey, colour = network(name, 1), network(name, 3)
    first, summed = f"{colour.leaf_layers()[0]}.weight", grey.state_dict()
    for key, value in colour.state_dict().items():
        expected = value.sum(dim=1, keepdim=True) if key == first else value
        assert torch.equal(summed[key], expected), key
    images = pictures(name, 1)
    seen, expected = logits(grey, images), logits(colour, images.expand(-1, 3, -1, -1))
    assert (seen - expected).abs().max() <= 1e-4 * expected.abs().max()


def two_blocks(channels: int, first: int, second: int, dense: int, size: int, classes: int) -> int:
    convolutions = 9 * channels * first + first + 9 * first * second + second
    return convolutions + second * (size // 4) ** 2 * dense + dense + dense * classes + classes


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [4, 28, 33])
@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("cnn_a", (32, 64, 128)),
        ("small_cnn", (32, 64, 128)),
        ("cnn_b", (16, 32, 64)),
        ("student", (16, 32, 64)),
        ("cnn_c", (8, 16, 32)),
    ],
)
def test_pfedcdp_networks_have_the_parameters_of_the_paper(
    name: str, widths: tuple[int, int, int], size: int, channels: int
) -> None:
    classifier = build_model(name, classes=5, channels=channels, size=size, seed=STREAM)
    assert parameters(classifier) == two_blocks(channels, *widths, size, 5)
    assert logits(classifier, torch.zeros(1, channels, size, size)).shape == (1, 5)


def test_groupnorm_cnn_flattens_1152_values_and_has_the_parameters_of_the_paper() -> None:
    classifier = build_model("groupnorm_cnn", classes=10, channels=1, size=28, seed=STREAM)
    convolutions = (9 * 1 * 32 + 32) + (9 * 32 * 64 + 64) + (9 * 64 * 128 + 128)
    norms, skip = 2 * (32 + 64 + 128), 32 * 128 + 128
    dense = (1152 * 256 + 256) + (256 * 10 + 10)
    assert parameters(classifier) == convolutions + norms + skip + dense


@pytest.mark.parametrize("size", [8, 15, 28, 64])
def test_groupnorm_cnn_joins_its_branches_at_any_size(size: int) -> None:
    classifier = build_model("groupnorm_cnn", classes=2, channels=1, size=size, seed=STREAM)
    assert logits(classifier, torch.zeros(1, 1, size, size)).shape == (1, 2)


def test_groupnorm_cnn_skip_carries_the_first_block_past_the_other_two() -> None:
    classifier = fresh("groupnorm_cnn", 1)
    images = pictures("groupnorm_cnn", 1)
    for name, parameter in classifier.named_parameters():
        if "block2" in name or "block3" in name:
            parameter.data.zero_()
    answer = logits(classifier, images)
    assert not torch.equal(answer[0], answer[1])
    nn.init.zeros_(classifier.get_parameter("extractor.skip.conv.weight"))
    answer = logits(classifier, images)
    assert torch.equal(answer[0], answer[1])


def test_small_networks_have_the_parameters_of_their_closed_form() -> None:
    pixels = 3 * 5 * 5
    mlp = build_model("mlp", classes=4, channels=3, size=5, seed=STREAM)
    linear = build_model("linear", classes=4, channels=3, size=5, seed=STREAM)
    assert parameters(mlp) == (pixels * 64 + 64) + (64 * 4 + 4)
    assert parameters(linear) == pixels * 4 + 4


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"resnet50", "resnet152"}))
def test_asked_dropout_is_set_once_in_two_layers_of_resnet22_and_changes_no_name(name: str) -> None:
    size = MODELS[name].min_size
    asked = build_model(name, classes=CLASSES, channels=3, size=size, dropout=0.4, seed=STREAM)
    assert [m.p for m in asked.modules() if isinstance(m, nn.Dropout)] == [0.4] * (2 if name == "resnet22" else 1)
    assert list(asked.state_dict()) == list(network(name, 3).state_dict())


@pytest.mark.parametrize("name", ["cnn_b", "resnet18", "mobilenet_v3_small", "linear"])
def test_dropout_acts_in_training_only(name: str) -> None:
    size = MODELS[name].min_size
    classifier = build_model(name, classes=CLASSES, channels=1, size=size, dropout=0.5, seed=STREAM).eval()
    images = pictures(name, 1)
    assert torch.equal(logits(classifier, images), logits(classifier, images))
    for module in classifier.modules():
        module.train(isinstance(module, nn.Dropout))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.equal(logits(classifier, images), logits(classifier, images))


def test_tail_of_mobilenet_v2_is_the_head_and_the_last_blocks() -> None:
    classifier = network("mobilenet_v2", 3)
    layers = classifier.leaf_layers()
    # 52 convolutions, each with its BatchNorm, and one linear layer; 30 % of 105 is 31.5, so 32 layers: the
    # head, the last convolution with its norm, four blocks of six, five of the six layers before them.
    assert len(layers) == 105
    expected = {
        name
        for name, _ in classifier.named_parameters()
        if name.startswith(("head.", *(f"extractor.features.{block}." for block in range(13, 19))))
        and not name.startswith("extractor.features.13.conv.0.0.")
    }
    assert classifier.tail_parameters(0.3) == expected


@given(low=st.floats(0, 1), high=st.floats(0, 1))
def test_tail_grows_with_the_fraction_from_nothing_to_everything(low: float, high: float) -> None:
    classifier = network("cnn_a", 1)
    low, high = sorted((low, high))
    names = {name for name, _ in classifier.named_parameters()}
    assert classifier.tail_parameters(low) <= classifier.tail_parameters(high) <= names
    assert classifier.tail_parameters(0) == frozenset()
    assert classifier.tail_parameters(1) == names
    assert bool(classifier.tail_parameters(high)) == (high > 0)


@every_model
def test_the_smallest_tail_is_the_last_layer(name: str) -> None:
    classifier = network(name, 3)
    last = classifier.leaf_layers()[-1]
    assert last.startswith("head")
    assert classifier.tail_parameters(1e-9) == {f"{last}.weight", f"{last}.bias"}
    assert classifier.tail_parameters(1) == {name for name, _ in classifier.named_parameters()}


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_tail_outside_zero_to_one_is_refused(fraction: float) -> None:
    with pytest.raises(RecipeError, match="between 0 and 1"):
        network("linear", 1).tail_parameters(fraction)


def test_an_unknown_model_is_refused_with_close_matches() -> None:
    with pytest.raises(RecipeError, match="no model 'mobilnet_v2'; did you mean mobilenet_v2"):
        build_model("mobilnet_v2", classes=2, channels=1, size=32, seed=STREAM)
    with pytest.raises(RecipeError, match="choose one of cnn_a, cnn_b"):
        build_model("?", classes=2, channels=1, size=32, seed=STREAM)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"classes": 1}, "1 classes"),
        ({"channels": 2}, "2 channels"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"dropout": -0.1}, "dropout -0.1"),
    ],
)
def test_impossible_tasks_are_refused(wrong: dict[str, int], sentence: str) -> None:
    task = {"classes": 2, "channels": 1, "size": 28, "dropout": None} | wrong
    with pytest.raises(RecipeError, match=sentence):
        build_model("cnn_a", seed=STREAM, **task)  # type: ignore[arg-type]


def test_a_classifier_lists_a_module_that_owns_tensors_beside_its_children() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.layer = nn.Linear(2, 2)

    classifier = Classifier(Scaled(), nn.Linear(2, 2))
    assert classifier.tail_parameters(1) == {name for name, _ in classifier.named_parameters()}


def test_streams_that_differ_in_path_only_give_other_weights() -> None:
    one, two = fresh("linear", seed=Stream(1, ("a",))), fresh("linear", seed=Stream(1, ("b",)))
    assert not torch.equal(one.get_parameter("head.weight"), two.get_parameter("head.weight"))


# The registry


def test_models_are_described_without_loading_torch() -> None:
    program = "import sys; from polyclinic.models import MODELS; print('torch' in sys.modules, len(MODELS))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(len(MODELS))]
    assert MODELS["mlp"].description == "one hidden layer of 64 units"


def test_a_registered_model_can_be_built_and_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS", dict(MODELS))

    @register_model("mine", min_size=3, dropout=0.25)
    def mine(*, classes: int, channels: int, size: int, dropout: float) -> Classifier:
        """A linear model with dropout.

        More about it.
        """
        flat = nn.Sequential(nn.Flatten(), nn.Dropout(dropout))
        return Classifier(flat, nn.Linear(channels * size**2, classes))

    network = build_model("mine", classes=4, channels=3, size=5, seed=STREAM)
    assert (network(torch.ones(2, 3, 5, 5)).shape, network.extractor[1].p) == ((2, 4), 0.25)  # type: ignore[index]
    assert models.MODELS["mine"].description == "A linear model with dropout."
    with pytest.raises(RecipeError, match="at least 3 pixels"):
        build_model("mine", classes=4, channels=3, size=2, seed=STREAM)


def test_the_name_of_a_built_in_model_cannot_be_registered() -> None:
    with pytest.raises(RecipeError, match="'mlp' is already a model of polyclinic"):
        register_model("mlp")


def test_networks_built_in_threads_have_the_weights_of_their_seeds() -> None:
    """torch's generator is one for all threads: sites of one process must not draw from each other's seeds."""

    def build(number: int) -> dict[str, Tensor]:
        return build_model("small_cnn", classes=2, channels=1, size=16, seed=Stream(number)).state_dict()

    wanted = [build(number) for number in range(24)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(build, range(24)))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(wanted, found, strict=True) for name in a)
