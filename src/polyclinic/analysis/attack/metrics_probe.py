"""Reads an image out of metrics: a server chooses the weights whose loss on validation images a site reports.

One hidden unit fires for the brightest validation image only, and its output is the only logit that is not 0. The mean
loss then tells that output, and the weights of the unit choose what it says of the image's features f:

    (1)  z = s·(a·f − c) + g·f_k          for the brightest image; all others have z = 0
    (2)  n·loss = (n − 1)·ln C + ln(e^z + C − 1)      so z follows from the loss, and f_k from two rounds
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyclinic.analysis.attack.hostile_server import HostileServer, open_server
from polyclinic.config.recipe import Recipe
from polyclinic.core import Bundle, DataError, Failure, RecipeError, RoundFailed, SiteId
from polyclinic.storage.messages import Message

VALUES = 12
"""How many values are read: one a round, after one honest round and two to find the level."""
MARGIN, GAIN = 25.0, 5.0
"""s·(a·f − c) of the brightest image, and g of (1): logits of float32 probabilities that are neither 0 nor 1."""


@dataclass(frozen=True)
class MetricsProbe:
    """What the losses of a few rounds told about one validation image."""

    site: SiteId
    images: int
    """The validation images behind each loss."""
    read: tuple[float, ...]
    true: tuple[float, ...]

    @property
    def sentence(self) -> str:
        """What was found, in one sentence."""
        return (
            f"from the losses that {self.site} reports it reads {len(self.read)} values of one of {self.images} "
            f"validation images, one a round, with an error of {self.error:.1g} of a pixel's range at most"
        )

    def as_json(self) -> dict[str, object]:
        return {"images": self.images, "values": len(self.read), "largest_error": self.error}

    @property
    def error(self) -> float:
        """The largest difference between what was read and what is true, both in units of a pixel's range."""
        return max(abs(a - b) for a, b in zip(self.read, self.true, strict=True))


def attack_metrics(recipe: Recipe, seed: int | None = None, data: Path | None = None) -> MetricsProbe | None:
    """Play a recipe as a server that reads validation images out of metrics; None where it tells no exact metrics."""
    if recipe.privacy is not None:
        return None
    server = open_server(recipe, seed, data)
    sites = [site for site in server.setup.sites if len(server.part_of(site, "validation")) > 1]
    values = min(VALUES, recipe.rounds - 3)
    return probe_metrics(server, sites[0], values) if sites and values > 0 and server.imprint.units else None


def probe_metrics(server: HostileServer, site: SiteId, values: int) -> MetricsProbe:
    """Read some features of a site's brightest validation image, one in each round after the first two.

    The server is told how bright the brightest two are; it could find out by bisection.
    """
    imprint, part = server.imprint, server.part_of(site, "validation")
    if not imprint.units or len(part) < 2:
        raise RecipeError(f"{server.setup.recipe.model.name} has no hidden dense layer, or {site} no validation images")
    weights = server.craft_even()
    features = server.features_of(part, weights)
    direction = imprint.direction(weights["model"]).double()
    second, first = (features @ direction).sort().values[-2:]
    target = features[int((features @ direction).argmax())]
    if first <= second:
        raise DataError(f"two validation images of {site} are equally bright; probe another site")
    slope, middle = 2 * MARGIN / float(first - second), float(first + second) / 2
    chosen = torch.randperm(len(target), generator=server.stream.child("probe").generator())[:values]
    plain = _aim(server, weights, slope * direction, -slope * middle, 0)
    answer = 0 if _logit(_report_loss(server, site, 2, plain), server, len(part)) > 1 else 1
    levels = []
    for number, feature in enumerate([None, *chosen.tolist()]):
        aimed = slope * direction
        if feature is not None:
            aimed[feature] += GAIN / imprint.range
        sent = _aim(server, weights, aimed, -slope * middle, answer)
        levels.append(_logit(_report_loss(server, site, number + 3, sent), server, len(part)))
    read = tuple((level - levels[0]) / GAIN for level in levels[1:])
    return MetricsProbe(site, len(part), read, tuple((target[chosen] / imprint.range).tolist()))


def _aim(server: HostileServer, weights: Bundle, row: Tensor, bias: float, answer: int) -> Bundle:
    """Return the weights with one unit that fires, and the logit of one answer that it raises."""
    dense, head = server.imprint.dense, server.imprint.head
    model = {name: tensor.clone() for name, tensor in weights["model"].items()}
    for name, fill in (
        (f"{dense}.weight", 0.0),
        (f"{dense}.bias", -1.0),
        (f"{head}.weight", 0.0),
        (f"{head}.bias", 0.0),
    ):
        model[name].fill_(fill)
    model[f"{dense}.weight"][0] = row.to(model[f"{dense}.weight"])
    model[f"{dense}.bias"][0] = bias
    model[f"{head}.weight"][answer, 0] = 1.0
    return {**weights, "model": model}


def _report_loss(server: HostileServer, site: SiteId, round: int, sent: Bundle) -> float:
    """Return the validation loss that a site reports of the weights it was sent."""
    outbox = server.rounds.prepare_outbox("train", round, sent, [site], ["validation"])
    for _, reply in server.rounds.engine.exchange(round, outbox, None):
        if isinstance(reply, Message) and reply.fields["report"] and reply.fields["report"][0]["loss"] is not None:
            return float(reply.fields["report"][0]["loss"])
        raise RoundFailed(f"{site} told no loss: {reply.sentence if isinstance(reply, Failure) else 'none reported'}")
    raise RoundFailed(f"{site} did not answer")


def _logit(loss: float, server: HostileServer, images: int) -> float:
    """Return z of (2); 0 where the image is of the class whose logit was raised, which then costs nothing."""
    classes = len(server.setup.dataset.classes)
    rest = math.exp(images * loss - (images - 1) * math.log(classes)) - (classes - 1)
    return math.log(rest) if rest > 1 else 0.0
