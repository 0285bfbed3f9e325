"""Weights files: what fits is loaded exactly, everything else is refused and changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision.models import mobilenet_v2

from polyclinic.core.errors import WeightsError
from polyclinic.core.types import Tensors
from polyclinic.models.classifier import Classifier
from polyclinic.models.weights.load import adopt_weights, load_weights
from tests.models.networks import STREAM, TORCHVISION, fresh, logits, network, pictures, theirs

OTHER = STREAM.child("other")


def close(first: Tensor, second: Tensor) -> bool:
    """Equal up to a thousandth of what two pictures differ by, so that a dead network is close to nothing."""
    return bool((first - second).abs().max() < 1e-3 * (second[0] - second[1]).abs().max())


def bundle(classifier: Classifier) -> Tensors:
    """The classifier's weights as a run saves them: kind/name."""
    parameters = {f"model/{name}": value.detach() for name, value in classifier.named_parameters()}
    return parameters | {f"buffers/{name}": value for name, value in classifier.named_buffers()}


@pytest.mark.parametrize("name", [name for name in TORCHVISION if name != "resnet152"])
def test_torchvisions_names_give_torchvisions_logits(name: str) -> None:
    source, classifier, images = theirs(name), fresh(name), pictures(name, 3)
    loaded = adopt_weights(classifier, source.state_dict(), "torchvision")
    assert loaded.skipped == ()
    assert not loaded.summed
    assert close(logits(classifier, images), logits(source, images))


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "inception_v3"])
def test_one_channel_gives_torchvisions_logits_on_a_grey_picture(name: str) -> None:
    source, classifier, images = theirs(name), fresh(name, channels=1), pictures(name, 1)
    assert adopt_weights(classifier, source.state_dict(), "torchvision").summed
    assert close(logits(classifier, images), logits(source, images.expand(-1, 3, -1, -1)))


def test_the_early_names_of_published_densenets_are_understood() -> None:
    source, classifier = theirs("densenet201"), fresh("densenet201")
    early = {
        re.sub(r"(denselayer\d+\.(norm|conv))([12])\.", r"\1.\3.", name): value
        for name, value in source.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    assert "features.denseblock1.denselayer1.norm.1.weight" in early
    adopt_weights(classifier, early, "an early file")
    images = pictures("densenet201", 3)
    assert close(logits(classifier, images), logits(source, images))


@pytest.fixture
def real_file() -> Path:
    path = Path(os.environ.get("POLYCLINIC_DATA", "")) / "weights" / "mobilenet_v2_imagenet.safetensors"
    if not path.is_file():
        pytest.skip("POLYCLINIC_DATA names no folder with weights/mobilenet_v2_imagenet.safetensors")
    return path


def test_a_real_half_precision_file_gives_torchvisions_logits(real_file: Path) -> None:
    source, classifier = mobilenet_v2(), fresh("mobilenet_v2", classes=1000)
    tensors = load_file(real_file)
    assert any(tensor.dtype == torch.float16 for tensor in tensors.values())
    source.eval().load_state_dict(tensors)
    assert load_weights(classifier, real_file).skipped == ()
    images = torch.rand(2, 3, 64, 64, generator=STREAM.generator())
    assert all(parameter.dtype == torch.float32 for parameter in classifier.parameters())
    assert close(logits(classifier, images), logits(source, images))


def test_a_real_file_of_other_classes_fills_all_but_the_final_layer(real_file: Path) -> None:
    classifier, before = fresh("mobilenet_v2"), network("mobilenet_v2", 3)
    loaded = load_weights(classifier, real_file)
    assert loaded.source == str(real_file)
    assert loaded.skipped == ("head.1.weight", "head.1.bias")
    tensors, after = load_file(real_file), classifier.state_dict()
    for key, value in before.state_dict().items():
        name = key.removeprefix("extractor.")
        expected = value if key in loaded.skipped else tensors[name].to(value.dtype)
        assert torch.equal(after[key], expected), key


@pytest.mark.parametrize("name", ["cnn_b", "groupnorm_cnn", "resnet18", "linear"])
@pytest.mark.parametrize("kinds", [True, False])
def test_a_saved_model_comes_back_exactly(name: str, kinds: bool, tmp_path: Path) -> None:
    saved, classifier = network(name, 3), fresh(name, seed=OTHER)
    save_file(bundle(saved) if kinds else saved.state_dict(), tmp_path / "model.safetensors")
    assert load_weights(classifier, tmp_path / "model.safetensors").skipped == ()
    after = classifier.state_dict()
    assert all(torch.equal(after[key], value) for key, value in saved.state_dict().items())


def test_a_saved_inception_is_not_rescaled_twice() -> None:
    source, first, second = theirs("inception_v3"), fresh("inception_v3"), fresh("inception_v3", seed=OTHER)
    adopt_weights(first, source.state_dict(), "torchvision")
    adopt_weights(second, bundle(first), "a saved model")
    images = pictures("inception_v3", 3)
    assert torch.equal(logits(first, images), logits(second, images))


def test_a_saved_model_of_three_channels_serves_grey_pictures() -> None:
    colour, grey = network("cnn_a", 3), fresh("cnn_a", channels=1, seed=OTHER)
    assert adopt_weights(grey, bundle(colour), "a saved model").summed
    images = pictures("cnn_a", 1)
    assert close(logits(grey, images), logits(colour, images.expand(-1, 3, -1, -1)))


Change = Callable[[Tensors], object]
CONV = "model/extractor.conv1.weight"
BAD: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: t.pop(CONV), r"extractor\.conv1\.weight \(missing\)"),
    "extra": (
        lambda t: t.update({"model/extractor.conv9.weight": torch.ones(1)}),
        r"conv9\.weight \(unknown\)",
    ),
    "wrong kind": (
        lambda t: t.update({"buffers/head.bias": t.pop("model/head.bias")}),
        r"head\.bias \(missing\)",
    ),
    "twice": (lambda t: t.update({"head.bias": torch.ones(3)}), r"head\.bias \(twice\)"),
    "shape": (lambda t: t.update({CONV: torch.ones(32, 3, 5, 5)}), r"\(32×3×5×5 instead of 32×3×3×3\)"),
    "flat": (lambda t: t.update({CONV: torch.tensor(1.0)}), r"\(a single number instead of 32×3×3×3\)"),
    "whole numbers": (
        lambda t: t.update({CONV: t[CONV].to(torch.int8)}),
        r"torch\.int8 instead of torch\.float32",
    ),
    "not finite": (lambda t: t[CONV].fill_(float("nan")), r"conv1\.weight \(not finite\)"),
    "too large": (
        lambda t: t.update({CONV: torch.full((32, 3, 3, 3), 1e300, dtype=torch.float64)}),
        r"\(not finite\)",
    ),
    "head, other features": (
        lambda t: t.update({"model/head.weight": torch.ones(9, 7)}),
        r"head\.weight \(9×7",
    ),
    "head, bias only": (
        lambda t: t.update({"model/head.bias": torch.ones(9)}),
        r"head\.bias \(9 instead of 3\)",
    ),
    "nothing": (lambda t: t.clear(), r"\(missing\), .*\(missing\), .*\(missing\) and 5 more"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(case: str, tmp_path: Path) -> None:
    change, sentence = BAD[case]
    tensors = {name: value.clone() for name, value in bundle(network("cnn_a", 3)).items()}
    change(tensors)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    classifier = fresh("cnn_a", seed=OTHER)
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    with pytest.raises(WeightsError, match=sentence) as refusal:
        load_weights(classifier, path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert all(torch.equal(value, before[name]) for name, value in classifier.state_dict().items())


@pytest.mark.parametrize(
    ("written_for", "name"),
    [("resnet18", "mobilenet_v3_small"), ("resnet18", "resnet50"), ("resnet18", "cnn_a")],
)
def test_another_network_is_refused_with_three_names_at_most(written_for: str, name: str) -> None:
    with pytest.raises(WeightsError, match=r"do not fit this network: .* and \d+ more;") as refusal:
        adopt_weights(fresh(name), theirs(written_for).state_dict(), "the file")
    assert len(re.findall(r"\((?:missing|unknown|[^()]* instead of [^()]*)\)", str(refusal.value))) == 3


def test_colour_weights_are_not_made_of_grey_ones() -> None:
    with pytest.raises(WeightsError, match="32×1×3×3 instead of 32×3×3×3"):
        adopt_weights(fresh("cnn_a", seed=OTHER), bundle(network("cnn_a", 1)), "a grey model")


def test_files_that_are_not_there_or_not_safetensors_are_refused(tmp_path: Path) -> None:
    classifier = fresh("linear")
    (tmp_path / "text.safetensors").write_text("these are not weights")
    (tmp_path / "empty.safetensors").touch()
    save_file(bundle(classifier), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-4])
    for name in ("text", "empty", "cut"):
        with pytest.raises(WeightsError, match=f"{name}.safetensors cannot be read as safetensors"):
            load_weights(classifier, tmp_path / f"{name}.safetensors")
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(WeightsError, match="There is no weights file at"):
            load_weights(classifier, path)
