"""Where training starts: networks that the server has first trained on its public set (`model.pretrain`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from polyclinic.core.contract import Fit, Site, Stream
from polyclinic.data.examples import SiteData
from polyclinic.runs.networks import Networks
from polyclinic.runs.sites import site_on_device
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss


def pretrain_networks(networks: Networks, public: SiteData | None, device: torch.device) -> None:
    """Leave in every network what the epochs that it asks for make of it, by the recipe's training on public images."""
    recipe = networks.recipe
    sections = {name: cluster.model for name, cluster in recipe.clusters.items()} or {"": recipe.model}
    if public is None or not any(section.pretrain for section in sections.values()):
        return
    images, rate = site_on_device(public, device, {}).train, recipe.training.optimiser.lr
    lesson = replace(recipe.training, steps=None, first_epochs=None, order="random", private=None)
    for name, network in networks.by_cluster.items():
        if sections[name].pretrain is not None:
            job = Fit(network.copy_weights(), task_loss, replace(lesson, epochs=sections[name].pretrain))
            server, stream = Site("server", len(images), 1, 1, rate), Stream(recipe.seed, ("pretrain", name))
            network.load_weights(fit(job, network, images, server, stream).weights)
