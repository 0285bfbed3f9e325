"""Loads weights into a classifier, from a local safetensors file or from torchvision's server.

Three naming schemes are understood: torchvision's (`features.0.0.weight`, `fc.bias`), polyclinic's (`extractor.…`,
`head.…`, with or without the kind of a saved bundle in front: `model/extractor.…`, `buffers/extractor.…`), and that of
the published ResNet-22 (`first_conv.weight`, with or without `four_view_resnet.cc.` in front), whose head differs from
ours. Either all tensors fit and are loaded, or nothing changes and `WeightsError` says why.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polyclinic.core import Tensors, WeightsError
from polyclinic.models.classifier import Classifier

MAX_LISTED = 3
KINDS = ("model/", "buffers/")
PARTS = ("extractor.", "head.")
WAY_OUT = "set `weights` to a local safetensors file instead"

MAMMOGRAM_VIEW = "four_view_resnet.cc."
"""The part for craniocaudal views of the published model for four views."""

# torchvision's published DenseNets still carry the names of an early version: `norm.1` for `norm1`.
EARLY_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")

# torchvision's Inception was trained on pixels in [−1, 1]; it rescales ImageNet-normalised ones on entry.
INCEPTION_STEM = "extractor.Conv2d_1a_3x3"
INCEPTION_SCALE = (0.229 / 0.5, 0.224 / 0.5, 0.225 / 0.5)
INCEPTION_SHIFT = ((0.485 - 0.5) / 0.5, (0.456 - 0.5) / 0.5, (0.406 - 0.5) / 0.5)


@dataclass(frozen=True)
class LoadedWeights:
    """How a set of weights was loaded."""

    source: str
    skipped: tuple[str, ...]
    """Names that keep their first values: the final layer's if the weights are for another number of classes, the whole
    head's if they are the published ResNet-22's, which has none of ours."""
    summed: bool
    """Whether the first convolution was summed over RGB for images of one channel."""


def load_weights(classifier: Classifier, path: Path) -> LoadedWeights:
    """Load a safetensors file into `classifier`, as `adopt_weights` does."""
    if not path.is_file():
        raise WeightsError(f"There is no weights file at {path}; correct the path in the recipe.")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read as safetensors ({error}); convert or copy it again.") from error
    return adopt_weights(classifier, tensors, str(path))


def adopt_weights(classifier: Classifier, tensors: Tensors, source: str) -> LoadedWeights:
    """Load named tensors into `classifier`.

    Half-precision values become the classifier's float32. The final layer keeps its first weights if it differs only in
    the number of classes; the published ResNet-22 leaves the whole head as it is. A first convolution over RGB is
    summed for a classifier of one channel, but not the ResNet-22's, whose three channels are an image and two heatmaps.
    BatchNorm's counters of batches may be missing: old files lack them and nothing depends on them.

    Args:
        classifier: The network to load them into.
        tensors: The weights, named by one of the three schemes.
        source: Where they come from, for reports and errors.
    """
    wanted = classifier.state_dict()
    found = _translate_names(classifier, tensors, source)
    found = {name: _cast_like(tensor, wanted.get(name)) for name, tensor in found.items()}
    layers = classifier.leaf_layers()
    headless = not _is_polyclinic(tensors) and _mammogram_prefix(tensors) is not None
    if not _is_polyclinic(tensors):
        found = _fold_inception_input(found)
    summed = not headless and _sum_over_rgb(f"{layers[0]}.weight", found, wanted)
    skipped = _drop_other_classes(layers[-1], found, wanted)
    if headless:
        skipped = tuple(name for name in wanted if name.startswith("head."))
    _check_mismatches(list(_find_mismatches(wanted, found, skipped)), source)
    classifier.load_state_dict(wanted | found)
    return LoadedWeights(source, skipped, summed)


def download_weights(name: str, *, progress: bool = False) -> Tensors:
    """Download torchvision's best ImageNet weights for the network `name`; they have torchvision's names.

    torchvision publishes pickled checkpoints, and reads them by `torch.load` with `weights_only=True`, which rebuilds
    tensors and refuses any other object. A download is checked against the first digits of its SHA-256, which are part
    of its name; a file that is already in torch's cache (`TORCH_HOME`) is not.
    """
    from torchvision.models import get_model_weights

    try:
        weights = get_model_weights(name).DEFAULT
    except ValueError:
        raise WeightsError(f"torchvision has no weights for '{name}'; {WAY_OUT}.") from None
    try:
        # torch announces the download on standard output, which belongs to the command's own result.
        with redirect_stdout(sys.stderr):
            state = weights.get_state_dict(progress=progress, check_hash=True, weights_only=True, map_location="cpu")
    # Network, disk, hash and unpickling errors have no common base but this.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:120].rstrip(". ")
        raise WeightsError(
            f"The weights of '{name}' could not be downloaded from {weights.url} ({reason}); {WAY_OUT}."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"{weights.url} is not a set of named tensors; {WAY_OUT}.")
    return {key: value.detach() for key, value in state.items()}


def _is_polyclinic(tensors: Tensors) -> bool:
    return any(name.startswith(KINDS + PARTS) for name in tensors)


def _mammogram_prefix(tensors: Tensors) -> str | None:
    """Return the prefix of the published ResNet-22's names; None if these are other weights."""
    return next((prefix for prefix in (MAMMOGRAM_VIEW, "") if f"{prefix}first_conv.weight" in tensors), None)


def _translate_names(classifier: Classifier, tensors: Tensors, source: str) -> Tensors:
    """Rename tensors to the classifier's names; unknown names are refused later."""
    if _is_polyclinic(tensors):
        kinds = {f"model/{name}": name for name, _ in classifier.named_parameters()}
        kinds |= {f"buffers/{name}": name for name, _ in classifier.named_buffers()}
        # A state may hold more, such as control variates.
        pairs = [(kinds.get(name, name), t) for name, t in tensors.items() if name.startswith(KINDS + PARTS)]
    elif (prefix := _mammogram_prefix(tensors)) is not None:
        # Beside this view's weights are other views', and a head.
        used = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        pairs = [(_from_mammogram_name(name), t) for name, t in used.items()]
    else:
        last = classifier.leaf_layers()[-1]
        pairs = [
            (_from_torchvision_name(name, last), t) for name, t in tensors.items() if not name.startswith("AuxLogits.")
        ]
    counts = Counter(name for name, _ in pairs)
    _check_mismatches([f"{name} (twice)" for name in sorted(counts) if counts[name] > 1], source)
    return dict(pairs)


def _from_torchvision_name(name: str, last_layer: str) -> str:
    slot, _, rest = name.partition(".")
    if slot not in ("classifier", "fc"):
        return "extractor." + EARLY_DENSENET.sub(r"\1\2", name)
    return f"{last_layer}.{rest}" if rest in ("weight", "bias") else f"head.{rest}"


def _from_mammogram_name(name: str) -> str:
    name = re.sub(r"^layer_list\.(\d)\.", lambda found: f"layer{int(found[1]) + 1}.", name)
    return "extractor." + name.replace("first_conv.", "conv.").replace("final_bn.", "norm.")


def _cast_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    if like is None or not (like.is_floating_point() and tensor.is_floating_point()):
        return tensor
    return tensor.to(like.dtype)


def _fold_inception_input(found: Tensors) -> Tensors:
    """Fold Inception's rescaling of its input (x·scale + shift) into its first layer.

    This is exact, because that convolution has neither padding nor bias and is followed by BatchNorm, which subtracts a
    mean. A flag on the network would not survive saving, and would not work for images of one channel.
    """
    weight, mean = found.get(f"{INCEPTION_STEM}.conv.weight"), found.get(f"{INCEPTION_STEM}.bn.running_mean")
    if weight is None or mean is None or weight.ndim != 4 or weight.shape[:2] != (len(mean), 3):
        return found
    scale, shift = (weight.new_tensor(rgb).view(1, 3, 1, 1) for rgb in (INCEPTION_SCALE, INCEPTION_SHIFT))
    return found | {
        f"{INCEPTION_STEM}.conv.weight": weight * scale,
        f"{INCEPTION_STEM}.bn.running_mean": mean - (weight * shift).sum(dim=(1, 2, 3)),
    }


def _sum_over_rgb(name: str, found: Tensors, wanted: Tensors) -> bool:
    tensor, like = found.get(name), wanted.get(name)
    if (
        tensor is None
        or like is None
        or not tensor.ndim == like.ndim == 4
        or tensor.shape[1] != 3
        or like.shape[1] != 1
    ):
        return False
    found[name] = tensor.sum(dim=1, keepdim=True)
    return True


def _drop_other_classes(layer: str, found: Tensors, wanted: Tensors) -> tuple[str, ...]:
    """Remove the final layer from `found` if it differs from the wanted one in the number of classes only."""
    names = (f"{layer}.weight", f"{layer}.bias")
    weight, bias = (found.get(name) for name in names)
    if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        return ()
    features, classes = wanted[names[0]].shape[1], wanted[names[0]].shape[0]
    if weight.shape[1] != features or weight.shape[0] == classes:
        return ()
    for name in names:
        del found[name]
    return names


def _find_mismatches(wanted: Tensors, found: Tensors, skipped: tuple[str, ...]) -> Iterator[str]:
    for name, like in wanted.items():
        tensor = found.get(name)
        if tensor is None:
            if name not in skipped and not name.endswith(".num_batches_tracked"):
                yield f"{name} (missing)"
        elif tensor.shape != like.shape:
            yield f"{name} ({_format_shape(tensor)} instead of {_format_shape(like)})"
        elif tensor.dtype != like.dtype:
            yield f"{name} ({tensor.dtype} instead of {like.dtype})"
        elif not torch.isfinite(tensor).all():
            yield f"{name} (not finite)"
    yield from (f"{name} (unknown)" for name in found if name not in wanted)


def _format_shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a single number"


def _check_mismatches(mismatches: list[str], source: str) -> None:
    if not mismatches:
        return
    more = f" and {len(mismatches) - MAX_LISTED} more" if len(mismatches) > MAX_LISTED else ""
    raise WeightsError(
        f"The weights from {source} do not fit this network: {', '.join(mismatches[:MAX_LISTED])}{more};"
        " give the weights of this architecture."
    )
