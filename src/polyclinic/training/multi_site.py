"""Training jobs that train several sites at once and bring a loop of their own, for algorithms that pool all images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from polyclinic.core import Examples, Fit, Fitted, Site, SiteId, Stream
from polyclinic.training.network import LiveNetwork


@dataclass(frozen=True)
class MultiSiteFit(Fit):
    """A training job for all sites of one place; the site runner calls `fit_sites` in the place of `fit`."""

    @abstractmethod
    def fit_sites(self, network: LiveNetwork, images: Mapping[SiteId, Examples], site: Site, stream: Stream) -> Fitted:
        """Train on the `images` of each site; `site` and `stream` are those of the place that has them all."""
