"""A site's whole part in a round, the same class on every engine:
decode → load memory → evaluate → drive `local` → stages → encode → save memory.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from polyclinic.algorithms.representation.fed_align_pooled import PooledFit, fit_pooled_sites
from polyclinic.algorithms.wrappers.curriculum import split_memory
from polyclinic.algorithms.wrappers.ensemble import ENSEMBLE, models_by_site, without_ensemble
from polyclinic.core.contract import (
    Algorithm,
    Bundle,
    Examples,
    Fit,
    Fitted,
    Job,
    Part,
    Score,
    Site,
    SiteId,
    Stage,
    Stream,
    Tensors,
    Update,
    Work,
)
from polyclinic.core.errors import EngineError, Refused, StoreError
from polyclinic.core.failpoints import failpoint
from polyclinic.data.examples import PooledData
from polyclinic.evaluation.metrics import finite_or_none, measure
from polyclinic.privacy.releases import release_metrics
from polyclinic.privacy.sampling import rate_and_sums
from polyclinic.storage import messages
from polyclinic.storage.run_files import SiteMemory
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities
from polyclinic.training.network import LiveNetwork, move_bundle

Predict = Callable[[Bundle, Part], Tensors]
STUDENT = "student"
"""The model that the server made of all others at the end; sites only try it."""
ORDER = frozenset({"run", "seed", "purpose", "site", "round", "rounds", "lr", "parts", "durable"})
"""What a message to a site must say."""


class SiteImages(Protocol):
    """One site's images."""

    @property
    def train(self) -> Examples: ...

    @property
    def validation(self) -> Examples: ...

    @property
    def test(self) -> Examples: ...


@dataclass(frozen=True)
class SitePrivacyLimits:
    """What a privacy plan asks of a site."""

    secret: Stream
    """Where its noise comes from."""
    priced_jobs: tuple[tuple[float, int], ...]
    """The training jobs of a round that were priced: sampling rate and steps of each …"""
    min_noise: float
    """… with no less noise than this."""
    metrics_noise: float | None = None
    """Noise on the counts it tells of its validation images; None: they are told as they are."""
    parts: tuple[Part, ...] = ("validation",)
    """Whose metrics may be asked for in a round."""
    rounds: int = sys.maxsize
    allows_scores: bool = True
    """Whether the algorithm's looks at images are paid for."""
    seeded: bool = False
    """The secret is none, but drawn from the recipe's seed: then equal seeds give equal noise, whatever the run."""

    def noise_stream(self, order: messages.Message, memory: Bundle | None = None, device: str = "cpu") -> Stream:
        """A stream of this round's own, named by all that its releases depend on: should the round be played again from
        other weights, at another rate or with other noise, the numbers are others; else nothing new is released."""
        fields = order.fields
        known = messages.hash_tensors(order.tensors), messages.hash_tensors(memory) if memory else ""
        terms = f"{self.min_noise!r}|{fields.get('lr')!r}|{device}"
        run = () if self.seeded else (fields["run"],)
        return self.secret.child(*run, fields["site"], int(fields["round"]), *known, terms)

    def check_order(self, fields: Mapping[str, Any], name: SiteId) -> None:
        """Refuse what the plan does not have."""
        if fields["purpose"] == "train" and not set(fields["parts"]) <= set(self.parts):
            raise Refused("privacy", f"{name} was asked for metrics that its privacy plan keeps back")
        if int(fields["round"]) > self.rounds + (fields["purpose"] != "train"):
            raise Refused(
                "privacy", f"{name} was asked for round {fields['round']}, its privacy plan has {self.rounds}"
            )


@dataclass(frozen=True)
class SiteRound:
    """A round at a site, begun: what came, and the work to be driven."""

    order: messages.Message
    memory: Bundle | None
    site: Site
    rng: Stream
    report: list[dict[str, Any]]
    started_at: float


class SiteRunner:
    """Plays one site. Many runners of one process may share a network: jobs load their own weights."""

    def __init__(
        self,
        name: SiteId,
        images: SiteImages,
        algorithm: Algorithm,
        network: LiveNetwork | Mapping[str, LiveNetwork],
        memory: SiteMemory,
        transforms: Sequence[Stage] = (),
        limits: SitePrivacyLimits | None = None,
    ) -> None:
        self.name, self.images, self.algorithm = name, images, algorithm
        self.networks = {"": network} if isinstance(network, LiveNetwork) else dict(network)
        self.network = next(iter(self.networks.values()))
        """The one that it computes with now."""
        self.memory, self.transforms, self.limits = memory, tuple(transforms), limits

    def answer(self, data: bytes) -> bytes:
        """One message in, one message out, driving jobs one after another."""
        reply = self.reply(messages.decode(data))
        return messages.encode(reply.fields, reply.tensors)

    def reply(self, order: messages.Message) -> messages.Message:
        """The same within one process, where nothing needs to be encoded."""
        self.check_order(order)
        if order.fields["purpose"] == "evaluate":
            return self.evaluate(order)
        visit = self.begin_round(order)
        update, memory = drive_jobs(self.start_local(visit), lambda job, number: self.run_job(job, visit, number))
        return self.finish_round(visit, update, memory)

    def check_order(self, order: messages.Message) -> None:
        """Whether an order says all it must."""
        if missing := ORDER - order.fields.keys():
            raise Refused("json", f"the order to {self.name} lacks {', '.join(sorted(missing))}")
        if self.limits is not None:
            self.limits.check_order(order.fields, self.name)
        group = self.algorithm.cluster_from_broadcast(order.tensors)
        if group not in self.networks:
            raise Refused("site", f"{self.name} was given a place in {group!r:.60}, for which it has no network")
        self.network = self.networks[group]

    def begin_round(self, order: messages.Message, predict: Predict | None = None) -> SiteRound:
        """`predict`: another way to this site's predictions than one by one."""
        begun = time.perf_counter()
        fields = order.fields
        if fields["site"] != self.name:
            raise Refused("site", f"a message for {fields['site']!r} reached {self.name!r}")
        failpoint("site-received")
        memory = self.load_memory(fields)
        if memory is None and fields.get("remembers"):
            raise StoreError(f"site {self.name} lost what it remembered; restore its folder, or start the run anew")
        secret = self.limits.noise_stream(order, memory, self.network.device.type) if self.limits else None
        site = Site(self.name, len(self.images.train), fields["round"], fields["rounds"], fields["lr"], secret)
        report = self.report_metrics(order.tensors, memory, fields["parts"], predict or self.predict, secret)
        failpoint("site-evaluated")
        return SiteRound(order, memory, site, Stream(fields["seed"], ("site", self.name)), report, begun)

    def load_memory(self, fields: Mapping[str, Any]) -> Bundle | None:
        """What the site remembers of the last of its rounds that counted, where it computes; what it remembers of later
        ones is dropped. An order that does not say which counted means the one before."""
        round = int(fields["round"])
        counted = fields.get("remembers", round - 1)
        if type(counted) is not int or not 0 <= counted < max(round, 1):
            raise Refused("json", f"the order to {self.name} has no sensible round that it remembers")
        self.memory.forget(self.name, counted, round)
        memory = self.memory.load(self.name, counted + 1)
        return None if memory is None else move_bundle(memory, self.network.device)

    def start_local(self, site_round: SiteRound) -> Work:
        work = self.algorithm.local(site_round.order.tensors, site_round.memory, site_round.site, site_round.rng)
        return work if self.limits is None else limit_to_plan(work, self.limits, site_round.site)

    def run_job(self, job: Job, site_round: SiteRound, number: int) -> Fitted | Tensors:
        """The `number`-th job of the round."""
        if isinstance(job, PooledFit):
            return fit_pooled_sites(job, self.network, self._pooled_sites(), site_round.site, site_round.rng)
        if isinstance(job, Fit):
            return fit(job, self.network, self.images.train, site_round.site, *job_streams(site_round, number))
        return score(job, self.network, getattr(self.images, job.part))

    def _pooled_sites(self) -> Mapping[SiteId, Examples]:
        if not isinstance(self.images, PooledData):
            raise EngineError(
                f"{self.name} was asked to train all sites at once, which needs all their images in one process; set "
                "algorithm.variant: sound, or run it on one machine"
            )
        return self.images.members

    def finish_round(
        self,
        site_round: SiteRound,
        update: Update,
        memory: Bundle | None,
        stack_size: int = 1,
        unstacked_reason: str = "",
    ) -> messages.Message:
        """Remember before anything leaves: a round that is asked for again starts from the memory before it."""
        failpoint("site-trained")
        fields, tensors = site_round.order.fields, update.tensors
        if any(t.requires_grad for group in tensors.values() for t in group.values()):
            tensors = {kind: {n: t.detach() for n, t in group.items()} for kind, group in tensors.items()}
        drawn = site_round.site.secret or site_round.rng
        for number, stage in enumerate(self.transforms):
            tensors = stage.encode(
                tensors, site_round.order.tensors, drawn.child("stage", number, site_round.site.round)
            )
        memory, filed = (None, {}) if memory is None else split_memory(memory)
        if filed:
            self.memory.save_report(self.name, site_round.site.round, filed)
        if memory is not None:
            self.memory.save(self.name, site_round.site.round, memory, int(fields["durable"]))
            failpoint("memory-saved")
        reply = {
            "run": fields["run"],
            "round": site_round.site.round,
            "site": self.name,
            "examples": update.examples,
            "scalars": dict(update.scalars),
            "report": site_round.report,
            "remembers": memory is not None,
            "together": stack_size,
            "alone": unstacked_reason,
            "seconds": (time.perf_counter() - site_round.started_at) / stack_size,
        }
        messages.read_scalars(reply)  # refused here already: it could not even be written down
        return messages.Message(reply, tensors)

    def report_metrics(
        self,
        received: Bundle,
        memory: Bundle | None,
        parts: Sequence[Part],
        predict: Predict,
        secret: Stream | None = None,
    ) -> list[dict[str, Any]]:
        """Metrics of the model(s) this site would predict with now, by part."""
        rows = []
        models = self.algorithm.models(received, memory) if parts else {}
        for name, weights in models.items():
            for part in self.nonempty_parts(parts):
                values = self.release_metrics(
                    self._replace_non_finite(predict(weights, part)), secret and secret.child("metrics", name, part)
                )
                rows.append({"model": name, "part": part, "n": len(getattr(self.images, part)), **values})
        return rows

    def release_metrics(self, found: Tensors, secret: Stream | None) -> dict[str, Any]:
        """Metrics as they are, or under a plan as noised counts."""
        noise = None if self.limits is None else self.limits.metrics_noise
        if noise is None or secret is None:
            return finite_or_none(measure(found["probabilities"].double().numpy(), found["labels"].numpy()))
        return finite_or_none(release_metrics(found["probabilities"], found["labels"], noise, secret))

    def _replace_non_finite(self, found: Tensors) -> Tensors:
        """Under a plan a single bad image must not end a run for all to see: nothing is known of it."""
        if self.limits is None:
            return found
        chance = found["probabilities"]
        bad = ~chance.isfinite().all(1, keepdim=True)
        return {**found, "probabilities": torch.where(bad, 1 / chance.shape[1], chance)}

    def nonempty_parts(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if len(getattr(self.images, part))]

    def predict(self, weights: Bundle, part: Part) -> Tensors:
        found = score(Score(weights, predict_probabilities), self.network, getattr(self.images, part))
        return {name: tensor.cpu() for name, tensor in found.items()}

    def evaluate(self, order: messages.Message, predict: Predict | None = None) -> messages.Message:
        """Predictions of every model on the asked parts, patients as anonymous numbers; nothing is trained."""
        fields = order.fields
        memory = self.load_memory(fields)
        received, student = _split_student(without_ensemble(order.tensors))
        found = self._predictions(self.algorithm.models(received, memory), fields["parts"], predict or self.predict)
        if together := models_by_site(order.tensors):
            found |= _mean_predictions(self._predictions(together, fields["parts"], predict or self.predict))
        if student:
            self.network = self.networks[STUDENT]
            found |= self._predictions({STUDENT: student}, fields["parts"], predict or self.predict)
        reply = {"run": fields["run"], "round": fields["round"], "site": self.name}
        return messages.Message(reply, {"predictions": found})

    def _predictions(self, models: Mapping[str, Bundle], parts: Sequence[Part], predict: Predict) -> Tensors:
        found: Tensors = {}
        for name, weights in models.items():
            for part in self.nonempty_parts(parts):
                for key, value in self._replace_non_finite(predict(weights, part)).items():
                    found[f"{name}|{part}|{key}"] = value
                found[f"{name}|{part}|patients"] = _patient_numbers(getattr(self.images, part))
        return found


def _mean_predictions(found: Tensors) -> Tensors:
    """What models say together: the mean of their probabilities."""
    pools: dict[str, list[torch.Tensor]] = {}
    for key, value in found.items():
        pools.setdefault(f"{ENSEMBLE}|{key.partition('|')[2]}", []).append(value)
    return {
        key: torch.stack(values).mean(0) if key.endswith("|probabilities") else values[0]
        for key, values in pools.items()
    }


def _split_student(tensors: Bundle) -> tuple[Bundle, Bundle]:
    mark = f"@{STUDENT}"
    student = {kind.removesuffix(mark): group for kind, group in tensors.items() if kind.endswith(mark)}
    return {kind: group for kind, group in tensors.items() if not kind.endswith(mark)}, student


def job_streams(site_round: SiteRound, number: int) -> tuple[Stream, Stream | None]:
    """What the `number`-th job of a round draws from: later ones draw their own order of the data, and noise."""
    secret = site_round.site.secret
    return site_round.rng.child("job", number) if number else site_round.rng, secret and secret.child("job", number)


def limit_to_plan(work: Work, limits: SitePrivacyLimits, site: Site) -> Work:
    """The same work, which ends in an error before it trains more than the privacy plan has priced."""
    result: Any = None
    done = 0
    while True:
        try:
            job = work.send(result)
        except StopIteration as end:
            update, memory = end.value
            return update, memory
        if limits.priced_jobs and (job.training.private is None if isinstance(job, Fit) else not limits.allows_scores):
            raise EngineError(
                f"site {site.name} was asked to look at its images in a way that the privacy plan has not priced"
            )
        if isinstance(job, Fit) and job.training.private is not None:
            rate, times = rate_and_sums(job, site.examples)
            most = limits.priced_jobs[done] if done < len(limits.priced_jobs) else (0.0, 0)
            if rate > most[0] or times > most[1] or job.training.private.noise < limits.min_noise:
                raise EngineError(
                    f"site {site.name} was asked to train {times} steps as its job {done + 1} of round {site.round}, "
                    "which the privacy plan has not priced; an algorithm's jobs must not depend on a site's images"
                )
            done += 1
        result = yield job
        if isinstance(result, Fitted) and result.dropped:
            # Told here only: how many there were is as private as the images themselves.
            logging.getLogger(__name__).warning(
                "%s: %d gradients of single images were not finite in round %d and counted as zero; look at the images",
                site.name,
                result.dropped,
                site.round,
            )


def drive_jobs(work: Work, run: Callable[[Job, int], Fitted | Tensors]) -> tuple[Update, Bundle | None]:
    """Send each job's result back into the generator until it returns."""
    result: Fitted | Tensors | None = None
    number = 0
    while True:
        try:
            job = work.send(result)
        except StopIteration as end:
            update, memory = end.value
            return update, memory
        result = run(job, number)
        number += advances_counter(job)


def advances_counter(job: Job) -> bool:
    """Whether later jobs of the round draw other numbers for it."""
    return isinstance(job, Fit) or not job.aside


def _patient_numbers(examples: Examples) -> torch.Tensor:
    if examples.patients is None:
        return torch.arange(len(examples))
    return torch.from_numpy(np.unique(np.array(examples.patients), return_inverse=True)[1].astype(np.int64))
