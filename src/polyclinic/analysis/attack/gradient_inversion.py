"""Reconstructs images from gradients, as an update of one step on one or a few images reveals them.

    (1)  x = (∂L/∂W_i) / (∂L/∂b_i)      a dense first layer with a bias gives one image away exactly; any row i
    (2)  y = the class whose bias in the last layer has the negative gradient    (iDLG: Zhao, Mopuri, Bilen 2020)
    (3)  x = argmin 1 − cos(∇L(x), ∇L) + α·TV(x), by Adam on the sign of the gradient, within the pixels' range
         (J. Geiping, H. Bauermeister, H. Dröge, M. Moeller: "Inverting gradients", NeurIPS 2020)
    (4)  ∇L = (w − w') / lr              of an update of one step of plain SGD

The gradient is that of the mean cross-entropy, with the network in evaluation mode. Departures: classes of several
images are recovered one after another, each adding 1/n to the gradient of its bias; fewer iterations than the paper's
4,800.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from polyclinic.analysis.attack.attacker_data import AttackSplit
from polyclinic.analysis.attack.image_similarity import THRESHOLD, mean_ssim, rms_distance
from polyclinic.core import Stream, Tensors
from polyclinic.models.classifier import Classifier
from polyclinic.privacy.mechanism import add_noise
from polyclinic.training.dp.dp_sgd import clip_factors

Normalise: TypeAlias = Callable[[Tensor], Tensor]
"""Turns pixels in [0, 1] into the network's input."""
TRIALS = 3
"""How many gradients are inverted at a site."""
KINDS = {"plain": "from the gradient", "protected": "gradient, clip + noise", "mean": "mean image"}
HARMLESS = (nn.Flatten, nn.Dropout, nn.Identity)
DROPS = (3 / 8, 5 / 8, 7 / 8)
"""Shares of the iterations after which the step is divided by ten."""


@dataclass(frozen=True)
class Search:
    """The settings of the search (3)."""

    iterations: int = 300
    step: float = 0.1
    smooth: float = 3e-2
    """α, the weight of total variation."""


def compute_gradient(network: Classifier, images: Tensor, labels: Tensor, keep: bool = False) -> Tensors:
    """Return the gradient of the mean loss by every weight. With `keep` it can itself be differentiated."""
    weights = {name: weight.detach().requires_grad_(True) for name, weight in network.named_parameters()}
    loss = F.cross_entropy(functional_call(network.eval(), weights, (images,)), labels)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), create_graph=keep), strict=True))


def compute_dp_gradient(
    network: Classifier, images: Tensor, labels: Tensor, clip: float, noise: float, stream: Stream
) -> Tensors:
    """Return the gradient that DP-SGD releases: the mean of each image's clipped gradient, with noise on the sum."""
    total: Tensors = {}
    for row in range(len(images)):
        one = compute_gradient(network, images[row : row + 1], labels[row : row + 1])
        factor = clip_factors(torch.stack([g.norm() for g in one.values()]).norm(), clip)
        total = {name: factor * g + total.get(name, 0.0) for name, g in one.items()}
    return {name: g / len(images) for name, g in add_noise(total, noise * clip, stream).items()}


def recover_labels(found: Tensors, network: Classifier, images: int = 1) -> Tensor:
    """Recover the classes of `images` images by (2)."""
    bias = found[f"{network.leaf_layers()[-1]}.bias"].clone()
    recovered = []
    for _ in range(images):
        recovered.append(int(bias.argmin()))
        bias[recovered[-1]] += 1 / images
    return torch.tensor(sorted(recovered), device=bias.device)


def find_first_dense(network: Classifier) -> str | None:
    """Return the name of the first layer if it is a dense one with a bias whose input is the pixels themselves."""
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            return None if layer.bias is None else str(name)
        if not next(layer.children(), None) and not isinstance(layer, HARMLESS):
            return None
    return None


def invert_dense(found: Tensors, layer: str) -> Tensor:
    """Compute (1) from the row with the largest gradient of the bias: a flat image."""
    row = int(found[f"{layer}.bias"].abs().argmax())
    return found[f"{layer}.weight"][row] / found[f"{layer}.bias"][row]


def search_images(
    network: Classifier,
    found: Tensors,
    labels: Tensor,
    shape: tuple[int, ...],
    normalise: Normalise,
    search: Search,
    stream: Stream,
) -> Tensor:
    """Search the pixels of as many images as there are labels by (3)."""
    wanted = list(found.values())
    pixels = torch.rand(len(labels), *shape, generator=stream.generator()).to(labels.device).requires_grad_(True)
    optimiser = torch.optim.Adam([pixels], search.step)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [int(share * search.iterations) for share in DROPS])
    for _ in range(search.iterations):
        optimiser.zero_grad(set_to_none=True)
        mine = list(compute_gradient(network, normalise(pixels), labels, keep=True).values())
        loss = 1 - _cosine_distance(mine, wanted) + search.smooth * total_variation(pixels)
        pixels.grad = torch.autograd.grad(loss, [pixels])[0].sign()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
    return pixels.detach()


def _cosine_distance(mine: list[Tensor], wanted: list[Tensor]) -> Tensor:
    product = torch.stack([(a * b).sum() for a, b in zip(mine, wanted, strict=True)]).sum()
    lengths = [torch.stack([g.square().sum() for g in side]).sum().sqrt() for side in (mine, wanted)]
    return product / (lengths[0] * lengths[1]).clamp(min=1e-12)


def total_variation(pixels: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels."""
    down, across = pixels.diff(dim=-2), pixels.diff(dim=-1)
    return down.abs().mean() + across.abs().mean()


def invert_gradient(
    network: Classifier,
    found: Tensors,
    images: int,
    shape: tuple[int, ...],
    normalise: Normalise,
    search: Search,
    stream: Stream,
) -> tuple[Tensor, str]:
    """Return the pixels of the images behind a gradient, and the method: "exact" (1) or "search" (3)."""
    layer = find_first_dense(network)
    if layer is not None and images == 1:
        return _denormalise(invert_dense(found, layer).reshape(1, *shape), normalise), "exact"
    return search_images(
        network, found, recover_labels(found, network, images), shape, normalise, search, stream
    ), "search"


def _denormalise(shown: Tensor, normalise: Normalise) -> Tensor:
    """Return the inverse of `normalise`, which is affine."""
    zero, one = (normalise(torch.full_like(shown, value)) for value in (0.0, 1.0))
    return ((shown - zero) / (one - zero)).nan_to_num(0.0).clamp(0, 1)


def match_guesses(guesses: Tensor, originals: Tensor) -> Tensor:
    """Assign each guess to one original, the nearest overall: a mean gradient has no order of images."""
    from scipy.optimize import linear_sum_assignment

    cost = torch.stack([rms_distance(guesses, original.expand_as(guesses)) for original in originals])
    return guesses[torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(guesses.device)]


@dataclass(frozen=True, eq=False)
class GradientInversion:
    """The guesses from some gradients of a site, plain and as DP-SGD releases them."""

    method: str
    images: int
    """Behind each gradient."""
    label_accuracy: float
    """The share of gradients from which all classes were recovered."""
    originals: Tensor
    guesses: Mapping[str, Tensor]
    ssim: Mapping[str, Tensor]
    distance: Mapping[str, Tensor]

    def does_leak(self, kind: str) -> bool:
        """Return whether a guess is closer than the mean of the attacker's images, in SSIM and in distance."""
        return bool(
            self.ssim[KINDS[kind]].mean() > self.ssim[KINDS["mean"]].mean()
            and self.distance[KINDS[kind]].mean() < self.distance[KINDS["mean"]].mean()
        )

    def as_json(self) -> dict[str, object]:
        figures = {
            kind: {
                "ssim": float(self.ssim[name].mean()),
                "ssim_max": float(self.ssim[name].max()),
                "l2": float(self.distance[name].mean()),
                "l2_min": float(self.distance[name].min()),
                "below": float((self.distance[name] < THRESHOLD).double().mean()),
            }
            for kind, name in KINDS.items()
        }
        return {
            "method": self.method,
            "images": self.images,
            "attacked": len(self.originals),
            "label_accuracy": self.label_accuracy,
            "guesses": figures,
        }


def invert_batches(
    network: Classifier, split: AttackSplit, images: int, search: Search, clip: float, noise: float, stream: Stream
) -> GradientInversion:
    """Invert the gradients of a few batches of attacked images, `images` in each."""
    batches = min(TRIALS, len(split.target_images) // images)
    originals, labels = split.target_images[: batches * images], split.target_labels[: batches * images]
    found: dict[str, list[Tensor]] = {name: [] for name in KINDS}
    method, recovered = "", 0
    for number, (some, classes) in enumerate(
        zip(torch.split(originals, images), torch.split(labels, images), strict=True)
    ):
        own, shown = stream.child(number), split.normalise(some)
        plain = compute_gradient(network, shown, classes)
        hidden = compute_dp_gradient(network, shown, classes, clip, noise, own.child("noise"))
        recovered += int(torch.equal(recover_labels(plain, network, images), classes.sort().values))
        for kind, each in {"plain": plain, "protected": hidden}.items():
            guess, method = invert_gradient(network, each, images, tuple(some.shape[1:]), split.normalise, search, own)
            found[kind].append(match_guesses(guess, some))
        found["mean"].append(split.attacker_images.mean(0).expand_as(some))
    guesses = {KINDS[kind]: torch.cat(parts) for kind, parts in found.items()}
    ssim = {name: mean_ssim(guess, originals) for name, guess in guesses.items()}
    distance = {name: rms_distance(guess, originals) for name, guess in guesses.items()}
    return GradientInversion(method, images, recovered / batches, originals, guesses, ssim, distance)
