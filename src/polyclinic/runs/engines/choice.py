"""The choice of an engine: the recipe's, or for `auto` the faster one in a short measurement."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.core import Bundle, Fit, Site, SiteId, StoreError, Stream
from polyclinic.federation.engines.local import LocalEngine, WorkerEngine
from polyclinic.federation.engines.stacked import Compile, StackedEngine
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.training.fit import fit
from polyclinic.training.network import LiveNetwork
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import NotStackableError, fit_stacked, job_signature, why_not_stackable

log = logging.getLogger(__name__)

TRIED = 8
"""The most sites in the measurement."""
STEPS = 2
WORTH = 0.9
"""Stacking is chosen if it takes at most this share of the time."""


REASON_REQUESTED = "the recipe says so"
REASON_REMOTE = "the sites are elsewhere"


@dataclass(frozen=True)
class EngineChoice:
    name: str
    why: str


def make_engine(
    name: str, runners: Mapping[SiteId, SiteRunner], workers: int, threads: int, compile: Compile = "auto"
) -> LocalEngine | WorkerEngine | StackedEngine:
    """Return an engine for sites in this process, or in `workers` forked ones.

    A process that has used a GPU cannot be forked: sites then train one after another, with the same result.
    """
    if name == "stacked":
        return StackedEngine(runners, threads, compile=compile)
    if workers and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        log.warning("engine.workers is ignored, since this process has used a GPU before and cannot be forked")
        workers = 0
    return WorkerEngine(runners, workers, threads) if workers else LocalEngine(runners, threads)


def read_choice(path: Path) -> EngineChoice:
    """Return the stored choice of this run."""
    try:
        choice = EngineChoice(**json.loads(path.read_text()))
        if choice.name not in ("local", "stacked"):
            raise ValueError(f"there is no engine {choice.name!r}")
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error}); remove it, and the engines are measured anew") from error
    return choice


def choose_engine(
    runners: Mapping[SiteId, SiteRunner],
    algorithm: Algorithm,
    state: Bundle,
    threads: int = 1,
    cohort: int | None = None,
) -> EngineChoice:
    """Time a few steps of as many sites as train at once, if not too many, on both engines; nothing of it is kept.

    Of several clusters, sites of the largest one are timed.
    """
    torch.set_num_threads(threads)
    clusters = {site: algorithm.cluster_of(state, site) for site in runners}
    group = Counter(clusters.values()).most_common(1)[0][0]
    chosen = [site for site in runners if clusters[site] == group][: min(TRIED, cohort or TRIED)]
    if algorithm.pooled or len(chosen) < 2:
        return EngineChoice("local", "one place trains, and there is nothing to stack")
    jobs = [_first_job(runners[site], algorithm, algorithm.broadcast(state, site)) for site in chosen]
    network = runners[chosen[0]].networks[group]
    if reason := _unstackable_reason(jobs, network):
        return EngineChoice("local", f"sites do not stack: {reason}")
    ready = [job for job in jobs if job is not None]
    apart = _time_steps(lambda: [fit(s.job, network, s.data, s.site, s.stream, s.secret) for s in ready], network)
    try:
        together = _time_steps(lambda: fit_stacked(ready, network), network)
    except NotStackableError as error:
        return EngineChoice("local", f"sites do not stack: {error}")
    except torch.OutOfMemoryError:
        return EngineChoice("local", f"{len(ready)} sites as one stack do not fit into the device's memory")
    figures = f"{STEPS} steps of {len(ready)} sites took {apart * 1e3:.1f} ms apart and {together * 1e3:.1f} ms stacked"
    return EngineChoice("stacked" if together < WORTH * apart else "local", figures)


def _first_job(runner: SiteRunner, algorithm: Algorithm, received: Bundle) -> StackMember | None:
    """Return a site's first job, cut to a few steps; None if it does not begin with training."""
    examples, stream = runner.images.train, Stream(0, ("choice", runner.name))
    site = Site(runner.name, len(examples), 1, 1, algorithm.training.optimiser.lr)
    job = next(algorithm.local(received, None, site, stream), None)
    if not isinstance(job, Fit):
        return None
    job = replace(job, training=replace(job.training, epochs=None, steps=STEPS))
    return StackMember(job, examples, site, stream, stream.child("secret"))


def _unstackable_reason(members: list[StackMember | None], network: LiveNetwork) -> str:
    jobs = [member for member in members if member is not None]
    if len(jobs) < len(members):
        return "their work does not begin with training"
    if len({job_signature(member.job, member.site) for member in jobs}) > 1:
        return "their jobs differ in shape"
    return why_not_stackable(jobs[0].job, network)


def _time_steps(call: Callable[[], Any], network: LiveNetwork) -> float:
    """Return the seconds of a second call, when everything is loaded and compiled."""
    call()
    began = time.perf_counter()
    call()
    if network.device.type == "cuda":
        torch.cuda.synchronize(network.device)
    return time.perf_counter() - began
