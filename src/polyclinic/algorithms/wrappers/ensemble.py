"""Any algorithm, keeping the last accepted model of every site: together they predict (FedMP's few-shot learning).

    (1)  p(y | x) = (1/K)·Σ_k softmax(h_k(x))_y     over the K models that the server accepted last, as it received them

Training is that of the inner algorithm, bit for bit. After the last round every site is sent all models, which are
counted: K times the bytes of one. A site that has not sent a model yet has no part in (1).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from polyclinic.algorithms.base import classifier_weights
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.core import (
    Bundle,
    Federation,
    RecipeError,
    ServerWork,
    Site,
    SiteId,
    Stream,
    Update,
    Updates,
    copy_tensors,
)

ENSEMBLE = "ensemble"
"""The kind that holds the models of all sites; a tensor is named `kind/site/name`."""


@dataclass(frozen=True)
class Ensemble(Wrapper):
    def init(self, federation: Federation) -> Bundle:
        state = self.inner.init(federation)
        sent, whole = (
            {exchange.kind for exchange in self.exchanges()},
            classifier_weights(federation.initial)["model"].keys(),
        )
        if self.inner.pooled or "model" not in sent or classifier_weights(state)["model"].keys() != whole:
            raise RecipeError("no site hands in a whole model with this algorithm; set ensemble: false, or take fedavg")
        return state

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        return self.inner.broadcast(without_ensemble(state), site)

    def needs_single_updates(self) -> str:
        return "an ensemble keeps the model of every site"

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        kept = dict(state.get(ENSEMBLE, {}))

        def keep_models() -> Iterator[Update]:
            for update in updates:
                for kind, group in classifier_weights(update.tensors).items():
                    kept.update({f"{kind}/{update.site}/{name}": t for name, t in copy_tensors(group).items()})
                yield update

        return {**self.inner.aggregate(without_ensemble(state), keep_models()), ENSEMBLE: kept}

    def server_step(self, state: Bundle, server: Site, rng: Stream) -> ServerWork:
        return {**(yield from self.inner.server_step(without_ensemble(state), server, rng)), **ensemble_members(state)}

    def final_state(self, state: Bundle) -> Bundle:
        return {**self.inner.final_state(without_ensemble(state)), **ensemble_members(state)}

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return self.inner.models(without_ensemble(received), memory)


def ensemble_members(state: Bundle) -> Bundle:
    """Return the part of a state that holds the sites' models."""
    return {kind: group for kind, group in state.items() if kind == ENSEMBLE}


def without_ensemble(state: Bundle) -> Bundle:
    """Return a state without the sites' models."""
    return {kind: group for kind, group in state.items() if kind != ENSEMBLE}


def models_by_site(bundle: Bundle) -> dict[str, Bundle]:
    """Return the weights of every site's model."""
    found: dict[str, Bundle] = {}
    for path, tensor in bundle.get(ENSEMBLE, {}).items():
        kind, _, rest = path.partition("/")
        site, _, name = rest.rpartition("/")
        found.setdefault(site, {"model": {}, "buffers": {}})[kind][name] = tensor
    return found
