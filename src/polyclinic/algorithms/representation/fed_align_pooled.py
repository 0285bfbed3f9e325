"""All sites in one process, step by step: equations 1, 5 and 6 of fed_align.py, which hospitals cannot run.

Each site has a network of its own and the same batches as in separate training. So without alignment every site's
weights are those of separate training, bit for bit.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyclinic.algorithms.representation.fed_align_losses import (
    DISCRIMINATOR,
    add_noise,
    confusion_loss,
    separation_loss,
)
from polyclinic.core import AUX_PREFIX, Batch, Examples, Fitted, Site, SiteId, Stream, Training
from polyclinic.core.rng import seed_generators
from polyclinic.training.data_order import schedule_steps
from polyclinic.training.fit import MultiSiteFit, augment_batch, make_optimiser
from polyclinic.training.keyed_dropout import dropout_key, first_key
from polyclinic.training.network import LiveNetwork


@dataclass(frozen=True)
class PooledFit(MultiSiteFit):
    """A training job for all sites at once, from the same weights.

    `reference` holds the discriminator of each site as `discriminator@SITE`; the resulting `Fitted` holds its weights
    as `model@SITE` and `buffers@SITE`.
    """

    align: float = 0.0
    """α; 0: no alignment."""
    variance: float = 0.0
    """σ² of the noise on features that another site uses."""

    def fit_sites(self, network: LiveNetwork, images: Mapping[SiteId, Examples], site: Site, stream: Stream) -> Fitted:
        """Train all sites, each on its own images. `site` and `stream` are those of the pooled site."""
        members = [_load_pooled_site(self, network, name, data, site, stream.seed) for name, data in images.items()]
        optimisers = [
            make_optimiser(_trainable_weights(own, members), self.training.optimiser, site.lr) for own in members
        ]
        total, taken = torch.zeros((), device=network.device), 0
        with ExitStack() as modes:
            modes.enter_context(seed_generators(stream.child("dropout", site.round), network.device))
            for member in members:
                modes.enter_context(member.network.use_precision(self.training.precision))
                modes.enter_context(member.network.use_checkpointing())
            for turn in range(max(len(member.plan) for member in members)):
                seen = [member.batch_at(turn, self.training) for member in members]
                for own, batch, optimiser in zip(members, seen, optimisers, strict=True):
                    if turn >= len(own.plan):
                        continue
                    loss = self.sequence[0].objective(own.network, own.network.live, batch, {})
                    _optimiser_step(optimiser, loss, own.classifier)  # (1)
                    total, taken = total + loss.detach(), taken + 1
                    for other, (foreign, _) in zip(members, seen, strict=True):
                        if self.align and other is not own:
                            align_pair(self, (own, batch[0]), (other, foreign), optimiser, own.plan[turn][0])
        found = {f"{kind}@{m.name}": group for m in members for kind, group in m.network.copy_weights().items()}
        return Fitted(found, taken, float(total) / max(taken, 1), {})


@dataclass(frozen=True)
class PooledSite:
    """A site with its network, data and the parameters that each step trains."""

    name: SiteId
    network: LiveNetwork
    data: Examples
    plan: Sequence[tuple[int, list[Tensor]]]
    stream: Stream
    classifier: list[nn.Parameter]
    extractor: list[nn.Parameter]
    discriminator: list[nn.Parameter]

    def batch_at(self, turn: int, training: Training) -> Batch:
        """Return the batch of a step, beginning again after the site's last one."""
        number, [rows] = self.plan[turn % len(self.plan)]
        self.network.set_dropout_key(dropout_key(first_key(self.stream), number, 0))
        images, labels = (tensor.to(self.network.device) for tensor in self.data.batch(rows))
        return augment_batch(images, labels, training, self.stream.child("augment", number, 0))

    def features(self, images: Tensor) -> Tensor:
        return self.network.features(self.network.live, images).flatten(1)

    def discriminate(self, features: Tensor) -> Tensor:
        """Return the logits of the site's discriminator."""
        return self.network.auxiliary(self.network.live, DISCRIMINATOR, features)


def align_pair(
    job: PooledFit,
    here: tuple[PooledSite, Tensor],
    there: tuple[PooledSite, Tensor],
    optimiser: torch.optim.Optimizer,
    number: int,
) -> None:
    """Train one site's discriminator, then both extractors, on a batch of each. Features are computed once, since the
    extractors do not change in between."""
    (own, images), (other, foreign) = here, there
    draws = own.stream.child("shown", other.name, number).generator()
    mine, theirs = own.features(images), add_noise({"": other.features(foreign)}, job.variance, draws)[""]
    _optimiser_step(
        optimiser,
        separation_loss(own.discriminate(mine.detach()), own.discriminate(theirs.detach())),
        own.discriminator,
    )  # (5)
    loss = job.align * confusion_loss(own.discriminate(mine), own.discriminate(theirs))
    _optimiser_step(optimiser, loss, [*own.extractor, *other.extractor])  # (6)


def _load_pooled_site(
    job: PooledFit, network: LiveNetwork, name: SiteId, data: Examples, site: Site, seed: int
) -> PooledSite:
    beside = {own: copy.deepcopy(module) for own, module in network.auxiliary_modules.items()}
    live = LiveNetwork(copy.deepcopy(network.module), network.device, beside, network.task)
    stream = Stream(seed, ("site", name))
    live.load_weights({**job.weights, "model": {**job.weights["model"], **job.reference[f"{DISCRIMINATOR}@{name}"]}})
    groups = ("extractor.", "head."), ("extractor.",), (f"{AUX_PREFIX}{DISCRIMINATOR}.",)
    names = [live.trainable_names(job.training.fine_tune, prefixes) for prefixes in groups]
    live.set_training_mode(names[0])
    live.require_gradients(names[0] | names[2])
    chosen = [[p for n, p in live.live["model"].items() if n in some and isinstance(p, nn.Parameter)] for some in names]
    plan = schedule_steps(job, data.labels, stream, None, site.round)
    return PooledSite(name, live, data, plan, stream, *chosen)


def _trainable_weights(own: PooledSite, members: Sequence[PooledSite]) -> list[nn.Parameter]:
    """Return the parameters of a site's optimiser: all of its own, and the extractors of the others."""
    others = [parameter for other in members if other is not own for parameter in other.extractor]
    return [*own.classifier, *own.discriminator, *others]


def _optimiser_step(optimiser: torch.optim.Optimizer, loss: Tensor, moving: list[nn.Parameter]) -> None:
    """Take a step along the gradient of the `moving` parameters."""
    optimiser.zero_grad(set_to_none=True)
    if moving:  # a frozen extractor has none
        torch.autograd.backward(loss, inputs=moving)
        optimiser.step()
