"""Clusters of sites, each with a network of its own: any algorithm, once per cluster.

The state holds the kinds of every cluster as `kind@cluster`. Within a cluster the inner algorithm sees no other one;
only the server's work at the end (`finish`) uses the models of several. A site that moves to another cluster starts
there from what it receives; when it returns, it finds its old memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import torch

from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.core import Bundle, Federation, Job, ServerWork, Site, SiteId, Stream, Updates, Work

CLUSTER_MARKER = "cluster"
"""The kind whose one tensor is named after the cluster of the site that receives it."""
ClusterSchedule = Callable[[SiteId, int], str]
"""(site, round) -> the site's cluster."""


@dataclass(frozen=True)
class Clustered(Wrapper):
    initials: Mapping[str, Bundle] = field(kw_only=True)
    """The initial weights of each cluster."""
    norms: Mapping[str, frozenset[str]] = field(kw_only=True)
    """The names of parameters and statistics of normalisation layers in each cluster's network."""
    shapes: Mapping[str, tuple[int, ...]] = field(kw_only=True, default_factory=dict)
    """The shape of the features of one image in each cluster's network."""
    cluster_schedule: ClusterSchedule = field(kw_only=True)
    rates: Mapping[str, float] = field(kw_only=True)
    """The factor on the learning rate in each cluster."""

    def init(self, federation: Federation) -> Bundle:
        state: Bundle = {"clock": {"round": torch.ones((), dtype=torch.int64)}}
        for cluster, initial in self.initials.items():
            members = {s: n for s, n in federation.sites.items() if self.cluster_schedule(s, 1) == cluster}
            here = Federation(federation.classes, members, initial, self.norms[cluster], self.shapes.get(cluster, ()))
            state |= _add_cluster_suffix(cluster, self.inner.init(here))
        return state

    def cluster_of(self, state: Bundle, site: SiteId) -> str:
        return self.cluster_schedule(site, int(state["clock"]["round"]))

    def cluster_state(self, state: Bundle, cluster: str) -> Bundle:
        return _kinds_of_cluster(state, cluster)

    def broadcast(self, state: Bundle, site: SiteId) -> Bundle:
        cluster = self.cluster_of(state, site)
        return {
            **self.inner.broadcast(self.cluster_state(state, cluster), site),
            CLUSTER_MARKER: {cluster: torch.ones(())},
        }

    def cluster_from_broadcast(self, received: Bundle) -> str:
        return next(iter(received[CLUSTER_MARKER]))

    def lr_scale(self, cluster: str) -> float:
        return self.rates.get(cluster, 1.0)

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        cluster = self.cluster_from_broadcast(received)
        update, kept = yield from self.inner.local(
            _without_marker(received), _kinds_of_cluster(memory, cluster) or None, site, rng
        )
        others = {kind: group for kind, group in (memory or {}).items() if not kind.endswith(f"@{cluster}")}
        return update, {**others, **_add_cluster_suffix(cluster, kept)} if kept is not None else memory

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        after = dict(state)
        for cluster, some in groupby(updates, lambda update: self.cluster_of(state, update.site)):
            after |= _add_cluster_suffix(cluster, self.inner.aggregate(self.cluster_state(state, cluster), some))
        return {**after, "clock": {"round": state["clock"]["round"] + 1}}

    def server_step(self, state: Bundle, server: Site, rng: Stream) -> ServerWork:
        for cluster in self.initials:
            work, answer = self.inner.server_step(self.cluster_state(state, cluster), server, rng.child(cluster)), None
            while True:
                try:
                    job: Job = work.send(answer)[1]
                except StopIteration as end:
                    state = {**state, **_add_cluster_suffix(cluster, end.value)}
                    break
                answer = yield cluster, job
        return state

    def final_state(self, state: Bundle) -> Bundle:
        """Finish every cluster and set the clock back, so that sites are evaluated in their last round's cluster."""
        state = {**state, "clock": {"round": state["clock"]["round"] - 1}}
        for cluster in self.initials:
            state = {
                **state,
                **_add_cluster_suffix(cluster, self.inner.final_state(self.cluster_state(state, cluster))),
            }
        return state

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return self.inner.models(
            _without_marker(received), _kinds_of_cluster(memory, self.cluster_from_broadcast(received)) or None
        )


def _kinds_of_cluster(bundle: Bundle | None, cluster: str) -> Bundle:
    mark = f"@{cluster}"
    return {kind.removesuffix(mark): tensors for kind, tensors in (bundle or {}).items() if kind.endswith(mark)}


def _without_marker(received: Bundle) -> Bundle:
    return {kind: tensors for kind, tensors in received.items() if kind != CLUSTER_MARKER}


def _add_cluster_suffix(cluster: str, bundle: Bundle) -> Bundle:
    return {f"{kind}@{cluster}": tensors for kind, tensors in bundle.items()}
