"""A site's part in a round, the same class on every engine.

Order → check against the site's limits → load memory → report metrics → local work → transforms (clip, noise, quantise)
→ save memory → reply. A site's memory is kept by `storage.site_memory`; nothing of it leaves the site.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.wrappers.curriculum import split_memory
from polyclinic.algorithms.wrappers.ensemble import models_by_site, without_ensemble
from polyclinic.core import (
    ENSEMBLE,
    STUDENT,
    Bundle,
    EngineError,
    Examples,
    Fit,
    Fitted,
    Job,
    Part,
    Refused,
    Score,
    Site,
    SiteId,
    StoreError,
    Stream,
    Tensors,
    Update,
    Work,
    failpoint,
)
from polyclinic.data.examples import PooledData, SiteData
from polyclinic.evaluation.metrics import finite_or_none, measure
from polyclinic.federation.job_loop import JobLoop
from polyclinic.federation.secure_aggregation.cohort import MASKS, PHASES
from polyclinic.federation.secure_aggregation.site import MaskingSite
from polyclinic.federation.site_limits import SitePrivacyLimits, limit_to_plan
from polyclinic.federation.update_check import ReportRow, read_scalars
from polyclinic.privacy.releases import release_metrics
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.storage import messages
from polyclinic.storage.site_memory import SiteMemory
from polyclinic.training.fit import MultiSiteFit, fit, score
from polyclinic.training.losses import predict_probabilities
from polyclinic.training.network import LiveNetwork, move_bundle

Predict = Callable[[Bundle, Part], Tensors]
ORDER = frozenset({"run", "seed", "purpose", "site", "round", "rounds", "lr", "parts", "oldest_snapshot"})
"""The fields that a message to a site must have."""


@dataclass(frozen=True)
class SiteRound:
    """A round at a site that has begun: the order, and everything that the local work starts from."""

    order: messages.Message
    memory: Bundle | None
    site: Site
    rng: Stream
    report: Sequence[ReportRow]
    started_at: float


class SiteRunner:
    """Runs one site. Several runners of a process may share a network, since each job loads its own weights."""

    def __init__(
        self,
        name: SiteId,
        images: SiteData,
        algorithm: Algorithm,
        network: LiveNetwork | Mapping[str, LiveNetwork],
        memory: SiteMemory,
        transforms: Sequence[UpdateTransform] = (),
        limits: SitePrivacyLimits | None = None,
        masking: MaskingSite | None = None,
    ) -> None:
        self.name, self.images, self.algorithm = name, images, algorithm
        self.networks = {"": network} if isinstance(network, LiveNetwork) else dict(network)
        self.network = next(iter(self.networks.values()))
        """The network of the cluster that the last order names."""
        self.memory, self.transforms, self.limits = memory, tuple(transforms), limits
        self.masking = masking
        """Masks the updates, if the recipe asks for it."""

    def answer(self, data: bytes) -> bytes:
        """Return the encoded reply to an encoded order."""
        reply = self.reply(messages.decode(data))
        return messages.encode(reply.fields, reply.tensors)

    def reply(self, order: messages.Message) -> messages.Message:
        """Return the reply to an order; local jobs run one after another."""
        self.check_order(order)
        if (found := self.reply_without_training(order)) is not None:
            return found
        site_round = self.begin_round(order)
        done = drive_jobs(self.start_local(site_round), lambda job, number: self.run_job(job, site_round, number))
        return self.finish_round(site_round, *done)

    def reply_without_training(
        self, order: messages.Message, predict: Predict | None = None
    ) -> messages.Message | None:
        """Return the reply to an order of any purpose but `train`; None for that."""
        if order.fields["purpose"] == "evaluate":
            return self.evaluate(order, predict)
        if order.fields["purpose"] in PHASES:
            if self.masking is None:
                raise Refused("purpose", f"{self.name} was asked about masks, which the recipe does not have")
            return self.masking.answer(order)
        return None

    def check_order(self, order: messages.Message) -> None:
        """Refuse an order that lacks a field, breaks the privacy limits, or names a cluster without a model here."""
        if missing := ORDER - order.fields.keys():
            raise Refused("json", f"the order to {self.name} lacks {', '.join(sorted(missing))}")
        if self.limits is not None:
            self.limits.check_order(order, self.name)
        if order.fields["purpose"] in PHASES:
            return
        if self.masking is not None:
            self.masking.check_order(order)
        group = self.algorithm.cluster_from_broadcast(order.tensors)
        if group not in self.networks:
            raise Refused("site", f"{self.name} was assigned to cluster {group!r:.60}, but has no model for it")
        self.network = self.networks[group]

    def begin_round(self, order: messages.Message, predict: Predict | None = None) -> SiteRound:
        """Load the memory and report metrics of the received model; `predict` replaces the site's own prediction."""
        begun = time.perf_counter()
        fields = order.fields
        if fields["site"] != self.name:
            raise Refused("site", f"a message for {fields['site']!r} reached {self.name!r}")
        failpoint("site-received")
        memory = self.load_memory(order)
        if memory is None and fields.get("memory_round"):
            raise StoreError(
                f"site {self.name} lost its memory of earlier rounds; restore its folder, or start a new run"
            )
        secret = self.limits.noise_stream(order, memory, self.network.device.type) if self.limits else None
        site = Site(self.name, len(self.images.train), fields["round"], fields["rounds"], fields["lr"], secret)
        report = self.report_metrics(order.tensors, memory, fields["parts"], predict or self.predict, secret)
        failpoint("site-evaluated")
        return SiteRound(order, memory, site, Stream(fields["seed"], ("site", self.name)), report, begun)

    def load_memory(self, order: messages.Message) -> Bundle | None:
        """Return the site's memory of its last round that counted, on its device, and drop that of later rounds.

        The order says which round counted (`memory_round`); without it, it is the one before.
        """
        round = int(order.fields["round"])
        counted = order.fields.get("memory_round", round - 1)
        if type(counted) is not int or not 0 <= counted < max(round, 1):
            raise Refused("json", f"the order to {self.name} names no valid round for its memory")
        self.memory.forget(self.name, counted, round)
        memory = self.memory.load(self.name, counted + 1)
        return None if memory is None else move_bundle(memory, self.network.device)

    def start_local(self, site_round: SiteRound) -> Work:
        work = self.algorithm.local(site_round.order.tensors, site_round.memory, site_round.site, site_round.rng)
        return work if self.limits is None else limit_to_plan(work, self.limits, site_round.site)

    def run_job(self, job: Job, site_round: SiteRound, number: int) -> Fitted | Tensors:
        """Run a job; `number` counts the jobs of the round and seeds its random draws."""
        if isinstance(job, MultiSiteFit):
            if not isinstance(self.images, PooledData):
                raise EngineError(
                    f"{self.name} was asked to train all sites at once, which needs all their images in one process; "
                    "set algorithm.variant: corrected, or run it on one machine"
                )
            return job.fit_sites(self.network, self.images.members, site_round.site, site_round.rng)
        if isinstance(job, Fit):
            return fit(job, self.network, self.images.train, site_round.site, *job_streams(site_round, number))
        return score(job, self.network, getattr(self.images, job.part))

    def finish_round(
        self,
        site_round: SiteRound,
        update: Update,
        memory: Bundle | None,
        stack_size: int = 1,
        unstacked_reason: str = "",
    ) -> messages.Message:
        """Apply the transforms, save the memory, then return the reply.

        In this order, because a round that is repeated starts from the memory before it.
        """
        failpoint("site-trained")
        fields, tensors = site_round.order.fields, update.tensors
        if any(t.requires_grad for group in tensors.values() for t in group.values()):
            tensors = {kind: {n: t.detach() for n, t in group.items()} for kind, group in tensors.items()}
        for number, stage in enumerate(self.transforms):
            stream = (site_round.site.secret or site_round.rng).child("stage", number, site_round.site.round)
            tensors = stage.encode(tensors, site_round.order.tensors, stream)
        masks: messages.Fields = {}
        if self.masking is not None:
            if update.scalars:
                raise Refused("scalars", f"{self.name} would send numbers of its own beside a masked update")
            tensors, masks = self.masking.mask_update(site_round.order, tensors, site_round.site.secret)
        memory, filed = (None, {}) if memory is None else split_memory(memory)
        if filed:
            self.memory.save_report(self.name, site_round.site.round, filed)
        if memory is not None:
            self.memory.save(self.name, site_round.site.round, memory, int(fields["oldest_snapshot"]))
            failpoint("memory-saved")
        reply = {
            "run": fields["run"],
            "round": site_round.site.round,
            "site": self.name,
            "examples": update.examples,
            "scalars": dict(update.scalars),
            "report": site_round.report,
            "keeps_memory": memory is not None,
            "stack_size": stack_size,
            "unstacked_reason": unstacked_reason,
            "seconds": (time.perf_counter() - site_round.started_at) / stack_size,
        }
        if masks:
            reply[MASKS] = masks
        read_scalars(reply)  # checked before sending, since a NaN could not be encoded
        return messages.Message(reply, tensors)

    def report_metrics(
        self,
        received: Bundle,
        memory: Bundle | None,
        parts: Sequence[Part],
        predict: Predict,
        secret: Stream | None = None,
    ) -> list[ReportRow]:
        """Return the metrics of the model(s) that this site would predict with now, by part."""
        rows: list[ReportRow] = []
        models = self.algorithm.models(received, memory) if parts else {}
        for name, part, found in self._predict_parts(models, parts, predict):
            values = self._measure(found, secret and secret.child("metrics", name, part))
            rows.append({"model": name, "part": part, "n": len(getattr(self.images, part)), **values})
        return rows

    def _predict_parts(
        self, models: Mapping[str, Bundle], parts: Sequence[Part], predict: Predict
    ) -> Iterator[tuple[str, Part, Tensors]]:
        """Yield each model's name, each part that has images, and the predictions."""
        for name, weights in models.items():
            for part in parts:
                if len(getattr(self.images, part)):
                    yield name, part, self._replace_non_finite(predict(weights, part))

    def _measure(self, found: Tensors, secret: Stream | None) -> Mapping[str, float | None]:
        """Return metrics without noise, or from noised counts where the plan charges for them."""
        noise = None if self.limits is None else self.limits.metrics_noise
        if noise is None or secret is None:
            return finite_or_none(measure(found["probabilities"].double().numpy(), found["labels"].numpy()))
        return finite_or_none(release_metrics(found["probabilities"], found["labels"], noise, secret))

    def _replace_non_finite(self, found: Tensors) -> Tensors:
        """Under a plan, or behind masks, predict all classes alike for a bad image: if it ended the run,
        everybody would see it."""
        if self.limits is None and self.masking is None:
            return found
        chance = found["probabilities"]
        bad = ~chance.isfinite().all(1, keepdim=True)
        return {**found, "probabilities": torch.where(bad, 1 / chance.shape[1], chance)}

    def predict(self, weights: Bundle, part: Part) -> Tensors:
        job = Score(weights, predict_probabilities)
        return {n: t.cpu() for n, t in score(job, self.network, getattr(self.images, part)).items()}

    def evaluate(self, order: messages.Message, predict: Predict | None = None) -> messages.Message:
        """Return every model's predictions on the parts that the order names, with patients as anonymous numbers."""
        fields = order.fields
        memory = self.load_memory(order)
        received, student = _split_student(without_ensemble(order.tensors))
        found = self._predictions(self.algorithm.models(received, memory), fields["parts"], predict or self.predict)
        if together := models_by_site(order.tensors):
            found |= _mean_predictions(self._predictions(together, fields["parts"], predict or self.predict))
        if student:
            self.network = self.networks[STUDENT]
            found |= self._predictions({STUDENT: student}, fields["parts"], predict or self.predict)
        return messages.Message(
            {"run": fields["run"], "round": fields["round"], "site": self.name}, {"predictions": found}
        )

    def _predictions(self, models: Mapping[str, Bundle], parts: Sequence[Part], predict: Predict) -> Tensors:
        found: Tensors = {}
        for name, part, predictions in self._predict_parts(models, parts, predict):
            found |= {f"{name}|{part}|{key}": value for key, value in predictions.items()}
            found[f"{name}|{part}|patients"] = _patient_numbers(getattr(self.images, part))
        return found


def _mean_predictions(found: Tensors) -> Tensors:
    """Return the mean of the models' probabilities."""
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
    """Return the random stream and the noise stream of the `number`-th job of a round."""
    secret = site_round.site.secret
    return site_round.rng.child("job", number) if number else site_round.rng, secret and secret.child("job", number)


def drive_jobs(work: Work, run: Callable[[Job, int], Fitted | Tensors]) -> tuple[Update, Bundle | None]:
    """Run the jobs of a site's local work (`number` counts those that advance the counter); return what it returns."""
    jobs, number = JobLoop(work), 0
    for job in jobs:
        jobs.result = run(job, number)
        number += advances_counter(job)
    return jobs.returned


def advances_counter(job: Job) -> bool:
    """Whether the job advances the counter that seeds later jobs."""
    return isinstance(job, Fit) or job.counts


def _patient_numbers(examples: Examples) -> torch.Tensor:
    if examples.patients is None:
        return torch.arange(len(examples))
    return torch.from_numpy(np.unique(np.array(examples.patients), return_inverse=True)[1].astype(np.int64))
