"""Weights with which a hostile server reads single images out of honest updates.

After the first round a server may send any weights of the agreed network, and a site trains from them. Here a hidden
dense layer becomes an imprint (L. Fowl, J. Geiping, W. Czaja, M. Goldblum, T. Goldstein: "Robbing the Fed: directly
obtaining private data in federated learning with modified models", ICLR 2022), made of the network's own layers:

    (1)  h_j = relu(s · (a·f − c_j))     unit j fires for images f whose brightness a·f exceeds the threshold c_j
    (2)  ∂L/∂W_j = Σ v·f,  ∂L/∂b_j = Σ v over the images of the batch that fire it and are of the classes asked for
    (3)  f = (ΔW_j − ΔW_j+1) / (Δb_j − Δb_j+1)      exactly, if one image of the batch lies between both thresholds

The head's bias makes the network certain of one answer (p = 1), so that an image counts either v or not at all.

Departures: many local steps would blur (2). With s far below a step's length a unit falls silent after the first batch
that fires it, whatever comes later, so what it recorded stays. (`steady`: s is so large that no unit ever changes, and
all steps add up, which is better where noise is added in each of them.) Adam would keep only the signs of gradients; v
is so small that its ε, a constant, is the denominator. Earlier convolutions become shifts of the image, and what max
pooling does to it is undone as far as it can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyclinic.core import Bundle, Stream, Tensors
from polyclinic.models.classifier import Classifier

CERTAIN = 1e6
"""The logit of one answer that no round's training brings down to those of the others: its probability is 1."""
SHIFTS = tuple(product((0, 1), repeat=2))
PARITIES = ((0, 0), (1, 1), (0, 1), (1, 0))
"""Where the images of a coarser grid begin; the first two are a chessboard."""
STEADY = 1e3
"""s of a steady imprint; its v is the square, and the head's bias the square of that."""
BLOCK = 4
"""Pixels along the side of the square that one place after two poolings stands for."""
TEXTURES, RIDGE = 100, 1e-3
"""Random images to fit a decoder on, and what keeps the fit stable."""


@dataclass(frozen=True)
class Imprint:
    """A network's hidden dense layer that can be turned into an imprint, and what its inputs are of an image.

    A network without such a layer still tells its sites' class counts: by (2), from the bias of the head alone.
    """

    dense: str
    head: str
    units: int
    image: tuple[int, int, int]
    """Channels, height and width."""
    range: float
    """The largest magnitude of a normalised pixel."""
    layout: str
    """"pixels", "shifts" (two convolutions made into shifts), "features" (earlier layers as they are), or "labels"
    where there is no imprint."""
    gain: float
    """v of (2) …"""
    slope: float
    """… and s of (1)."""

    @property
    def shows_images(self) -> bool:
        """Whether guesses are images; otherwise they are the features of images."""
        return self.layout in ("pixels", "shifts")

    def craft(self, weights: Bundle, thresholds: Tensor, first_class: bool, steady: bool) -> Bundle:
        """Return the weights to send: those given, with the imprint in them.

        Args:
            weights: Weights of the network, by kind.
            thresholds: c of (1), ascending: `bins` of them.
            first_class: Read images of the first class, otherwise those of all others.
            steady: Make an imprint that stays as it is over all steps of a round.
        """
        model = {name: tensor.detach().clone() for name, tensor in weights["model"].items()}
        if self.layout == "shifts":
            _shift_images(model, self.range)
        for name in ("weight", "bias"):
            model[f"{self.head}.{name}"].zero_()
        sign = -1.0 if first_class else 1.0
        model[f"{self.head}.bias"][0] = sign * (STEADY**4 if steady else CERTAIN)
        if self.layout == "labels":
            return {**weights, "model": model}
        slope = STEADY if steady else self.slope
        model[f"{self.dense}.weight"] = slope * self.direction(model).expand(self.units, -1).contiguous()
        cuts = thresholds.repeat_interleave(self.units // len(thresholds))
        model[f"{self.dense}.bias"] = -slope * cuts.to(model[f"{self.dense}.bias"])
        model[f"{self.head}.weight"][0] = sign * (STEADY**2 * self._pair_signs() if steady else self.gain)
        return {**weights, "model": model}

    def bins(self, steady: bool) -> int:
        """Return the number of thresholds; in a steady imprint two units share one.

        They count with opposite signs, so that no gradient reaches the layers before: it would use up the clip.
        """
        return self.units // 2 if steady else self.units

    def _pair_signs(self) -> Tensor:
        return torch.tensor([1.0, -1.0]).repeat(self.units // 2)

    def direction(self, model: Tensors) -> Tensor:
        """Return a of (1), for the layer's inputs: their mean, over those that grow with an image's brightness."""
        weight = model[f"{self.dense}.weight"]
        use = torch.ones_like(weight[0])
        if self.layout == "shifts":
            signs = torch.tensor([sign for sign, _, _ in _plan_channels(len(model["extractor.conv2.bias"]))])
            use = (signs > 0).to(weight).repeat_interleave(len(use) // len(signs))
        return use / use.sum()

    def read_bins(self, sent: Bundle, back: Bundle, steady: bool) -> tuple[Tensor, Tensor]:
        """Return what the bins between adjacent thresholds recorded: sums of images' features, and of their weights."""
        moved = [
            (sent["model"][f"{self.dense}.{name}"] - back["model"][f"{self.dense}.{name}"]).double()
            for name in ("weight", "bias")
        ]
        if steady:
            moved = [t[0::2] - t[1::2] for t in moved]
        images, counts = (torch.cat([t[:-1] - t[1:], t[-1:]]) for t in moved)
        return images, counts

    def show(self, features: Tensor, decoder: Tensor | None = None) -> Tensor:
        """Return guesses as rows of grey pixels in normalised units; features that are no image, as they are.

        `decoder`: what `fit_decoder` returned, which the layout "shifts" needs.
        """
        channels, height, width = self.image
        if self.layout == "pixels":
            return features.reshape(len(features), channels, -1).mean(1)
        if not self.shows_images:
            return features
        assert decoder is not None
        blocks = (_neighbour_columns(features, height, width) @ decoder).reshape(len(features), -1, BLOCK**2)
        return nn.functional.fold(blocks.transpose(1, 2), (height, width), BLOCK, stride=BLOCK).flatten(1)


def find_imprint(network: Classifier, blank: Tensor, pixel_range: float, adam: bool = False) -> Imprint | None:
    """Return the imprint that fits a network: None if its last layer is not a dense one with a bias.

    Args:
        network: The network that the recipe names.
        blank: One image of its size.
        pixel_range: The largest magnitude of a normalised pixel.
        adam: Whether sites train with Adam.
    """
    layers = network.leaf_layers()
    head = network.get_submodule(layers[-1])
    if not isinstance(head, nn.Linear) or f"{layers[-1]}.bias" not in dict(network.named_parameters()):
        return None
    channels, height, width = blank.shape[1:]
    shape = (channels, height, width)
    dense = network.get_submodule(layers[-2]) if len(layers) > 1 else None
    if not isinstance(dense, nn.Linear) or not _rectifies(network, dense, head, blank):
        return Imprint("", layers[-1], 0, shape, pixel_range, "labels", 1.0, 1.0)
    layout = "features"
    if dense.in_features == blank[0].numel() and len(layers) == 2:
        layout = "pixels"
    elif layers[:2] == ["extractor.conv1", "extractor.conv2"] and _are_shiftable(network, shape):
        layout = "shifts"
    gain, slope = (1e-10, 1e-13) if adam else (1.0, 1e-6)
    return Imprint(layers[-2], layers[-1], dense.out_features, shape, pixel_range, layout, gain, slope)


@torch.no_grad()
def _rectifies(network: Classifier, dense: nn.Linear, head: nn.Linear, blank: Tensor) -> bool:
    """Return whether negative outputs of a layer arrive at the last one as zeros."""
    mode, found = network.training, torch.ones(1)

    def keep_input(_: nn.Module, given: tuple[Tensor]) -> None:
        nonlocal found
        found = given[0]

    handles = [
        dense.register_forward_hook(lambda *_: blank.new_full((1, dense.out_features), -1.0)),
        head.register_forward_pre_hook(keep_input),
    ]
    try:
        network.eval()(blank)
        return dense.out_features == head.in_features and not bool(found.any())
    finally:
        for handle in handles:
            handle.remove()
        network.train(mode)


def _are_shiftable(network: Classifier, shape: Sequence[int]) -> bool:
    first, second = (network.get_submodule(f"extractor.conv{n}") for n in (1, 2))
    wide = isinstance(first, nn.Conv2d) and first.out_channels >= 8 and first.kernel_size == (3, 3)
    return wide and isinstance(second, nn.Conv2d) and second.out_channels >= 8 and shape[1] % 4 == shape[2] % 4 == 0


def _plan_channels(channels: int) -> list[tuple[int, int, int]]:
    """Return the sign, the parity and the shift of every channel of the second convolution; spare ones repeat."""
    chosen = [
        (sign, parity, shift) for parity in range(len(PARITIES)) for sign in (1, -1) for shift in range(len(SHIFTS))
    ]
    return [chosen[n % len(chosen)] for n in range(channels)]


def _shift_images(model: Tensors, offset: float) -> None:
    """Make two convolutions with max pooling pass on the largest and the smallest pixel of every small square.

    The first gives, for each of four places where a grid of 2 × 2 squares can begin, their maximum and (as the maximum
    of the negative) their minimum; the second their middle, for each neighbour on the grid, with both signs.
    `offset` keeps all values positive, so that the rectifiers pass them.
    """
    first, second = (model[f"extractor.conv{n}.weight"].zero_() for n in (1, 2))
    for number, ((down, right), sign) in enumerate(product(PARITIES, (1, -1))):
        first[number, :, 1 + down, 1 + right] = sign / first.shape[1]
    model["extractor.conv1.bias"].fill_(offset)
    for number, (sign, parity, shift) in enumerate(_plan_channels(len(second))):
        down, right = SHIFTS[shift]
        for place, side in enumerate((1, -1)):
            second[number, 2 * parity + place, 1 + down, 1 + right] = sign * side / 2
    model["extractor.conv2.bias"].fill_(offset)


@torch.no_grad()
def fit_decoder(network: Classifier, imprint: Imprint, weights: Bundle, stream: Stream) -> Tensor:
    """Return the least-squares map from shifts and their neighbours to pixels, learnt from random textures.

    `weights`: with the imprint in them. No image of anybody is needed.
    """
    channels, height, width = imprint.image
    pixels = draw_textures(TEXTURES, height, width, stream).clamp(0, 1)
    shown = (pixels * imprint.range)[:, None].expand(-1, channels, -1, -1)
    columns = _neighbour_columns(dense_inputs(network, imprint.dense, weights, shown), height, width)
    wanted = nn.functional.unfold(pixels[:, None] * imprint.range, BLOCK, stride=BLOCK).transpose(1, 2).flatten(0, 1)
    left = columns.T @ columns + RIDGE * torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    found: Tensor = torch.linalg.solve(left, columns.T @ wanted.to(columns))
    return found


def draw_textures(number: int, height: int, width: int, stream: Stream) -> Tensor:
    """Draw random images whose amplitudes fall with frequency as those of photographs do."""
    noise = torch.randn(number, height, width, generator=stream.generator())
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None])
    amplitude = frequency.clamp(min=1 / max(height, width)) ** -1.5
    found = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(height, width))
    deviation, mean = torch.std_mean(found, dim=(1, 2), keepdim=True)
    drawn: Tensor = 0.35 + 0.2 * (found - mean) / deviation
    return drawn


@torch.no_grad()
def dense_inputs(network: Classifier, layer: str, weights: Bundle, images: Tensor) -> Tensor:
    """Return what a layer receives for normalised images, with the weights given, in evaluation mode."""
    found: list[Tensor] = []
    handle = network.get_submodule(layer).register_forward_hook(lambda _, given, __: found.append(given[0]))
    try:
        for part in torch.split(images, 64):
            functional_call(network.eval(), weights["model"] | weights.get("buffers", {}), (part,))
    finally:
        handle.remove()
    return torch.cat(found)


def _neighbour_columns(features: Tensor, height: int, width: int) -> Tensor:
    """Return a row for every block of 4 × 4 pixels: the values of all channels there and around it, and a one."""
    maps = features.double().reshape(len(features), -1, height // BLOCK, width // BLOCK)
    around = nn.functional.unfold(nn.functional.pad(maps, (1, 1, 1, 1), mode="replicate"), 3).transpose(1, 2)
    return nn.functional.pad(around, (0, 1), value=1.0).flatten(0, 1)
