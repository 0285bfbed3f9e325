"""Exports a model of a finished run for other programs: weights, preprocessing, optionally ONNX, and a model card.

`model.safetensors` holds tensors and nothing executable. `model.onnx` gives logits and calibrated probabilities for any
batch size; it is written only after its outputs were compared with torch's. The card is written last and lists the
checksums of the other files: a folder without a matching card is incomplete.
"""

import copy
import hashlib
import json
import math
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from polyclinic.analysis.model_card import render_model_card
from polyclinic.analysis.predict import ModelCatalogue, Preprocessing, RunModel
from polyclinic.core import EngineError, StoreError, Stream
from polyclinic.data.loading.preprocessing import BLOCKS, DARK, MARGIN, THIN
from polyclinic.evaluation.calibration import Calibration, Uncalibrated
from polyclinic.evaluation.summary import RunSummary
from polyclinic.models.scattering import FixedFeatures, Scattering
from polyclinic.storage.files import explain_os_errors, write_atomically

OPSET = 18
TOLERANCE = 1e-5
"""The largest difference allowed between ONNX and torch: of probabilities, and of logits relative to the largest."""
WEIGHTS, PREPARING, ONNX, CARD = "model.safetensors", "preprocessing.json", "model.onnx", "MODEL_CARD.md"
NEEDED = ("onnx", "onnxscript", "onnxruntime")
DICOM = (
    "as its sender meant it to be shown: modality, then its VOI table or first window, else from the least to the "
    "largest value that is not padding; MONOCHROME1 inverted"
)
CROPPING = {
    "rule": (
        "cut to the largest bright object; what does not touch it becomes black (polyclinic.data.loading.preprocessing)"
    ),
    "dark": DARK,
    "blocks": BLOCKS,
    "thin": THIN,
    "margin": MARGIN,
}


class CalibratedModel(nn.Module):
    """A model as one module: from images to logits (log-probabilities for an ensemble) and calibrated probabilities."""

    def __init__(self, model: RunModel, temperature: float) -> None:
        super().__init__()
        self.networks = nn.ModuleList(map(_to_exportable, model.networks)).cpu().eval()
        self.temperature = temperature

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        each = [network(images) for network in self.networks]
        logits = each[0] if len(each) == 1 else torch.stack([torch.softmax(z, -1) for z in each]).mean(0).log()
        return logits, torch.softmax(logits / self.temperature, -1)


class RealScattering(Scattering):
    """`Scattering` without complex numbers, which ONNX lacks: Fourier transforms are matrix products here."""

    def __init__(self, fixed: Scattering) -> None:
        super().__init__(fixed.shape[0] // fixed.paths, fixed.size, fixed.scales)
        padded = self.get_buffer("waves0").shape[-1]
        for resolution in range(self.scales):
            side = padded >> resolution
            angles = 2 * math.pi * torch.outer(torch.arange(side), torch.arange(side)).remainder(side).double() / side
            self.register_buffer(f"cos{resolution}", angles.cos().float())
            self.register_buffer(f"sin{resolution}", angles.sin().float())
            kept = torch.cat([torch.arange(side // 2), torch.arange(padded - side // 2, padded)])
            for scale in range(resolution, self.scales):
                self.register_buffer(f"waves{resolution}{scale}", self.get_buffer(f"waves{scale}")[:, kept][:, :, kept])

    def forward(self, images: Tensor) -> Tensor:
        pixels = nn.functional.pad(images, (*self.margin, *self.margin), mode="reflect")
        zeroth, first, second = [self._average_maps(pixels, 0)], [], []
        for scale in range(self.scales):
            moduli = self._wavelet_moduli(pixels, 0, scale)
            first.append(self._average_maps(moduli, scale))
            second += [
                self._average_maps(self._wavelet_moduli(moduli, scale, wider), wider)
                for wider in range(scale + 1, self.scales)
            ]
        paths = [path.reshape(*images.shape[:2], -1, self.side, self.side) for path in zeroth + first + second]
        return torch.cat(paths, 2).flatten(1, 2)

    def _wavelet_moduli(self, spectrum: Tensor, resolution: int, scale: int) -> Tensor:
        """|x ⋆ ψ| at every 2^scale-th pixel of an image that is given at every 2^resolution-th pixel."""
        cos, sin = (self.get_buffer(f"{name}{resolution}") for name in ("cos", "sin"))
        across, down = spectrum @ cos, spectrum @ sin
        waves, side = self.get_buffer(f"waves{resolution}{scale}"), cos.shape[0]
        real = (cos @ across - sin @ down).unsqueeze(-3) * waves
        imaginary = -(sin @ across + cos @ down).unsqueeze(-3) * waves
        step = 2 ** (scale - resolution)
        back, turned = cos[::step] / side, sin[::step] / side
        left, right = back @ real - turned @ imaginary, back @ imaginary + turned @ real
        real, imaginary = left @ back.mT - right @ turned.mT, left @ turned.mT + right @ back.mT
        return (real**2 + imaginary**2).sqrt()


def _to_exportable(network: nn.Module) -> nn.Module:
    """Return a copy of the network that ONNX can express."""
    found = copy.deepcopy(network)
    for part in found.modules():
        if isinstance(part, FixedFeatures):
            part.scattering = RealScattering(part.scattering)
    return found


def export_model(
    run: ModelCatalogue,
    model: RunModel,
    calibration: Calibration | Uncalibrated,
    folder: Path,
    onnx: bool = False,
    force: bool = False,
    alone: RunSummary | None = None,
) -> list[Path]:
    """Write a model's files and return their paths.

    Args:
        run: The finished run.
        model: The model to export.
        calibration: Its temperature, or why it has none.
        folder: Where to write.
        onnx: Write `model.onnx` too.
        force: Overwrite files of an earlier export.
        alone: The summary of a run in which each of the same sites trained by itself.
    """
    check_overwriting(folder, force)
    temperature = calibration.temperature if isinstance(calibration, Calibration) else 1.0
    manifest = json.dumps(build_manifest(run, model, calibration), indent=2)
    files = {WEIGHTS: collect_weights(model), PREPARING: f"{manifest}\n".encode()}
    if onnx:
        files[ONNX] = build_onnx(model, run.preprocessing, run.classes, temperature)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files[CARD] = render_model_card(run, model, calibration, sums, alone).encode()
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CARD, ONNX):  # else a half-written folder would have another model's
            (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        write_atomically(folder / name, data)
    return [folder / name for name in files]


def check_overwriting(folder: Path, force: bool) -> None:
    there = [name for name in (WEIGHTS, PREPARING, ONNX, CARD) if (folder / name).exists()]
    if there and not force:
        raise StoreError(f"{folder} holds {there[0]} already; choose another folder with --out, or add --force")


def collect_weights(model: RunModel) -> bytes:
    """Return the weights by torch's names; an ensemble's have a prefix `members.NUMBER.`, without the sites' names."""
    tensors = {
        name if len(model.networks) == 1 else f"members.{number}.{name}": tensor.detach().cpu().contiguous()
        for number, network in enumerate(model.networks)
        for name, tensor in network.state_dict().items()
    }
    return save(tensors, {"format": "pt"})  # with more entries the order would vary between runs


def build_manifest(run: ModelCatalogue, model: RunModel, calibration: Calibration | Uncalibrated) -> dict[str, object]:
    """Return everything needed to prepare an image, build the network and interpret its output."""
    wanted, section = run.preprocessing.preparation, model.sections[0]
    temperature = calibration.temperature if isinstance(calibration, Calibration) else None
    return {
        "input": {
            "name": "images",
            "dtype": "float32",
            "shape": ["batch", wanted.channels, wanted.size, wanted.size],
            "order": "channels red, green, blue" if wanted.channels == 3 else "one channel, grey",
        },
        "decode": {"bits": wanted.bits, "dicom": DICOM, "orientation": "upright, by EXIF", "transparency": "on black"},
        "crop_borders": CROPPING if wanted.crop_borders else None,
        "channels": {"number": wanted.channels, "grey": "Pillow's L", "colour": "a grey image thrice"},
        "resize": {"size": wanted.size, "fit": wanted.fit, "filter": "Pillow bilinear, antialiased", "pad": 0},
        "scale": {"divide_by": 255, "mean": run.preprocessing.mean, "std": run.preprocessing.std},
        "classes": list(run.classes),
        "output": {
            "logits": "before softmax" if len(model.networks) == 1 else "logarithms of the members' mean probabilities",
            "temperature": temperature or 1.0,
            "calibrated": temperature is not None,
            "probabilities": "softmax(logits / temperature)",
        },
        "network": {"name": section.name, "norm": section.norm, "members": len(model.networks)},
    }


def build_onnx(model: RunModel, preprocessing: Preprocessing, classes: tuple[str, ...], temperature: float) -> bytes:
    """Return the model as ONNX, after a comparison of its outputs with torch's."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise EngineError(
            f'ONNX needs {", ".join(missing)}; install with pip install "polyclinic[export]", or leave --onnx out'
        )
    wanted = preprocessing.preparation
    shape = 3, wanted.channels, wanted.size, wanted.size
    images = (torch.rand(shape, generator=Stream(0, ("onnx",)).generator()) - 0.5) * 4
    data = _convert_to_onnx(CalibratedModel(model, temperature), images, model, classes)
    for some in (images[:1], images):
        _check_same_outputs(data, some, model, temperature)
    return data


def _convert_to_onnx(whole: CalibratedModel, images: Tensor, model: RunModel, classes: tuple[str, ...]) -> bytes:
    from onnx.helper import set_model_props

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the converter's own parts
            found = torch.onnx.export(
                whole,
                (images,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=["images"],
                output_names=["logits", "probabilities"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            )
    except Exception as error:  # the converter raises whatever a layer leads it to
        raise EngineError(
            f"{model.sections[0].name} cannot be written as ONNX by this torch ({type(error).__name__}); leave --onnx "
            "out"
        ) from None
    assert found is not None
    proto = found.model_proto
    graph = proto.graph
    for part in (graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]  # the converter records the paths of source files
        part.doc_string = ""
    set_model_props(
        proto,
        {
            "classes": json.dumps(classes),
            "temperature": repr(whole.temperature),
            "opset": str(OPSET),
            "use": "research only; not a medical device",
        },
    )
    return bytes(proto.SerializeToString())


def _check_same_outputs(data: bytes, images: Tensor, model: RunModel, temperature: float) -> None:
    from onnxruntime import InferenceSession

    ran = InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"images": images.numpy()})
    logits = model.compute_probabilities(images)[1].double()
    expected = logits.numpy(), torch.softmax(logits / temperature, -1).numpy()
    for theirs, ours, scale in zip(ran, expected, (float(np.abs(expected[0]).max()), 1.0), strict=True):
        off = float(np.abs(np.asarray(theirs, dtype=np.float64) - ours).max())
        if not off <= TOLERANCE * scale:
            raise EngineError(
                f"as ONNX {model.sections[0].name} computes something else (by {off:.1e}), so it was not written; "
                "leave --onnx out, or try another version of onnxruntime"
            )
