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

from polyclinic.algorithms.representation.fed_align_pooled import Joint, fit_jointly
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
from polyclinic.data.examples import Pool
from polyclinic.evaluation.metrics import finite, measure
from polyclinic.privacy.releases import noised_metrics
from polyclinic.privacy.sampling import sampled
from polyclinic.storage import messages
from polyclinic.storage.run_files import MemoryStore
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import probabilities
from polyclinic.training.network import LiveNetwork, on

Predict = Callable[[Bundle, Part], Tensors]
STUDENT = "student"
"""The model that the server made of all others at the end; sites only try it."""
ORDER = frozenset({"run", "seed", "purpose", "site", "round", "rounds", "lr", "parts", "durable"})
"""What a message to a site must say."""


class Holdings(Protocol):
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
    allowed: tuple[tuple[float, int], ...]
    """The training jobs of a round that were priced: sampling rate and steps of each …"""
    least: float
    """… with no less noise than this."""
    metrics_noise: float | None = None
    """Noise on the counts it tells of its validation images; None: they are told as they are."""
    parts: tuple[Part, ...] = ("validation",)
    """Whose metrics may be asked for in a round."""
    rounds: int = sys.maxsize
    scores: bool = True
    """Whether the algorithm's looks at images are paid for."""
    seeded: bool = False
    """The secret is none, but drawn from the recipe's seed: then equal seeds give equal noise, whatever the run."""

    def of(self, order: messages.Message, memory: Bundle | None = None, device: str = "cpu") -> Stream:
        """A stream of this round's own, named by all that its releases depend on: should the round be played again from
        other weights, at another rate or with other noise, the numbers are others; else nothing new is released."""
        fields = order.fields
        known = messages.digest(order.tensors), messages.digest(memory) if memory else ""
        terms = f"{self.least!r}|{fields.get('lr')!r}|{device}"
        run = () if self.seeded else (fields["run"],)
        return self.secret.child(*run, fields["site"], int(fields["round"]), *known, terms)

    def check(self, fields: Mapping[str, Any], name: SiteId) -> None:
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
    begun: float


class SiteRunner:
    """Plays one site. Many runners of one process may share a network: jobs load their own weights."""

    def __init__(
        self,
        name: SiteId,
        holdings: Holdings,
        algorithm: Algorithm,
        network: LiveNetwork | Mapping[str, LiveNetwork],
        memory: MemoryStore,
        stages: Sequence[Stage] = (),
        discretion: SitePrivacyLimits | None = None,
    ) -> None:
        self.name, self.holdings, self.algorithm = name, holdings, algorithm
        self.networks = {"": network} if isinstance(network, LiveNetwork) else dict(network)
        self.network = next(iter(self.networks.values()))
        """The one that it computes with now."""
        self.memory, self.stages, self.discretion = memory, tuple(stages), discretion

    def answer(self, data: bytes) -> bytes:
        """One message in, one message out, driving jobs one after another."""
        reply = self.reply(messages.decode(data))
        return messages.encode(reply.fields, reply.tensors)

    def reply(self, order: messages.Message) -> messages.Message:
        """The same within one process, where nothing needs to be encoded."""
        self.check(order)
        if order.fields["purpose"] == "evaluate":
            return self.evaluate(order)
        visit = self.begin(order)
        update, memory = drive(self.work(visit), lambda job, number: self.run(job, visit, number))
        return self.end(visit, update, memory)

    def check(self, order: messages.Message) -> None:
        """Whether an order says all it must."""
        if missing := ORDER - order.fields.keys():
            raise Refused("json", f"the order to {self.name} lacks {', '.join(sorted(missing))}")
        if self.discretion is not None:
            self.discretion.check(order.fields, self.name)
        group = self.algorithm.cluster_from_broadcast(order.tensors)
        if group not in self.networks:
            raise Refused("site", f"{self.name} was given a place in {group!r:.60}, for which it has no network")
        self.network = self.networks[group]

    def begin(self, order: messages.Message, predict: Predict | None = None) -> SiteRound:
        """`predict`: another way to this site's predictions than one by one."""
        begun = time.perf_counter()
        fields = order.fields
        if fields["site"] != self.name:
            raise Refused("site", f"a message for {fields['site']!r} reached {self.name!r}")
        failpoint("site-received")
        memory = self.recall(fields)
        if memory is None and fields.get("remembers"):
            raise StoreError(f"site {self.name} lost what it remembered; restore its folder, or start the run anew")
        secret = self.discretion.of(order, memory, self.network.device.type) if self.discretion else None
        site = Site(self.name, len(self.holdings.train), fields["round"], fields["rounds"], fields["lr"], secret)
        report = self.report(order.tensors, memory, fields["parts"], predict or self.predict, secret)
        failpoint("site-evaluated")
        return SiteRound(order, memory, site, Stream(fields["seed"], ("site", self.name)), report, begun)

    def recall(self, fields: Mapping[str, Any]) -> Bundle | None:
        """What the site remembers of the last of its rounds that counted, where it computes; what it remembers of later
        ones is dropped. An order that does not say which counted means the one before."""
        round = int(fields["round"])
        counted = fields.get("remembers", round - 1)
        if type(counted) is not int or not 0 <= counted < max(round, 1):
            raise Refused("json", f"the order to {self.name} has no sensible round that it remembers")
        self.memory.forget(self.name, counted, round)
        memory = self.memory.load(self.name, counted + 1)
        return None if memory is None else on(memory, self.network.device)

    def work(self, visit: SiteRound) -> Work:
        work = self.algorithm.local(visit.order.tensors, visit.memory, visit.site, visit.rng)
        return work if self.discretion is None else within(work, self.discretion, visit.site)

    def run(self, job: Job, visit: SiteRound, number: int) -> Fitted | Tensors:
        """The `number`-th job of the round."""
        if isinstance(job, Joint):
            return fit_jointly(job, self.network, self._members(), visit.site, visit.rng)
        if isinstance(job, Fit):
            return fit(job, self.network, self.holdings.train, visit.site, *streams(visit, number))
        return score(job, self.network, getattr(self.holdings, job.part))

    def _members(self) -> Mapping[SiteId, Examples]:
        if not isinstance(self.holdings, Pool):
            raise EngineError(
                f"{self.name} was asked to train all sites at once, which needs all their images in one process; set "
                "algorithm.variant: sound, or run it on one machine"
            )
        return self.holdings.members

    def end(
        self, visit: SiteRound, update: Update, memory: Bundle | None, together: int = 1, alone: str = ""
    ) -> messages.Message:
        """Remember before anything leaves: a round that is asked for again starts from the memory before it."""
        failpoint("site-trained")
        fields, tensors = visit.order.fields, update.tensors
        if any(t.requires_grad for group in tensors.values() for t in group.values()):
            tensors = {kind: {n: t.detach() for n, t in group.items()} for kind, group in tensors.items()}
        drawn = visit.site.secret or visit.rng
        for number, stage in enumerate(self.stages):
            tensors = stage.out(tensors, visit.order.tensors, drawn.child("stage", number, visit.site.round))
        memory, filed = (None, {}) if memory is None else split_memory(memory)
        if filed:
            self.memory.file(self.name, visit.site.round, filed)
        if memory is not None:
            self.memory.save(self.name, visit.site.round, memory, int(fields["durable"]))
            failpoint("memory-saved")
        reply = {
            "run": fields["run"],
            "round": visit.site.round,
            "site": self.name,
            "examples": update.examples,
            "scalars": dict(update.scalars),
            "report": visit.report,
            "remembers": memory is not None,
            "together": together,
            "alone": alone,
            "seconds": (time.perf_counter() - visit.begun) / together,
        }
        messages.scalars_of(reply)  # refused here already: it could not even be written down
        return messages.Message(reply, tensors)

    def report(
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
            for part in self.nonempty(parts):
                values = self.told(self._sound(predict(weights, part)), secret and secret.child("metrics", name, part))
                rows.append({"model": name, "part": part, "n": len(getattr(self.holdings, part)), **values})
        return rows

    def told(self, found: Tensors, secret: Stream | None) -> dict[str, Any]:
        """Metrics as they are, or under a plan as noised counts."""
        noise = None if self.discretion is None else self.discretion.metrics_noise
        if noise is None or secret is None:
            return finite(measure(found["probabilities"].double().numpy(), found["labels"].numpy()))
        return finite(noised_metrics(found["probabilities"], found["labels"], noise, secret))

    def _sound(self, found: Tensors) -> Tensors:
        """Under a plan a single bad image must not end a run for all to see: nothing is known of it."""
        if self.discretion is None:
            return found
        chance = found["probabilities"]
        bad = ~chance.isfinite().all(1, keepdim=True)
        return {**found, "probabilities": torch.where(bad, 1 / chance.shape[1], chance)}

    def nonempty(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if len(getattr(self.holdings, part))]

    def predict(self, weights: Bundle, part: Part) -> Tensors:
        found = score(Score(weights, probabilities), self.network, getattr(self.holdings, part))
        return {name: tensor.cpu() for name, tensor in found.items()}

    def evaluate(self, order: messages.Message, predict: Predict | None = None) -> messages.Message:
        """Predictions of every model on the asked parts, patients as anonymous numbers; nothing is trained."""
        fields = order.fields
        memory = self.recall(fields)
        received, student = _without_student(without_ensemble(order.tensors))
        found = self._predictions(self.algorithm.models(received, memory), fields["parts"], predict or self.predict)
        if together := models_by_site(order.tensors):
            found |= _mean(self._predictions(together, fields["parts"], predict or self.predict))
        if student:
            self.network = self.networks[STUDENT]
            found |= self._predictions({STUDENT: student}, fields["parts"], predict or self.predict)
        reply = {"run": fields["run"], "round": fields["round"], "site": self.name}
        return messages.Message(reply, {"predictions": found})

    def _predictions(self, models: Mapping[str, Bundle], parts: Sequence[Part], predict: Predict) -> Tensors:
        found: Tensors = {}
        for name, weights in models.items():
            for part in self.nonempty(parts):
                for key, value in self._sound(predict(weights, part)).items():
                    found[f"{name}|{part}|{key}"] = value
                found[f"{name}|{part}|patients"] = _patient_numbers(getattr(self.holdings, part))
        return found


def _mean(found: Tensors) -> Tensors:
    """What models say together: the mean of their probabilities."""
    pools: dict[str, list[torch.Tensor]] = {}
    for key, value in found.items():
        pools.setdefault(f"{ENSEMBLE}|{key.partition('|')[2]}", []).append(value)
    return {
        key: torch.stack(values).mean(0) if key.endswith("|probabilities") else values[0]
        for key, values in pools.items()
    }


def _without_student(tensors: Bundle) -> tuple[Bundle, Bundle]:
    mark = f"@{STUDENT}"
    student = {kind.removesuffix(mark): group for kind, group in tensors.items() if kind.endswith(mark)}
    return {kind: group for kind, group in tensors.items() if not kind.endswith(mark)}, student


def streams(visit: SiteRound, number: int) -> tuple[Stream, Stream | None]:
    """What the `number`-th job of a round draws from: later ones draw their own order of the data, and noise."""
    secret = visit.site.secret
    return visit.rng.child("job", number) if number else visit.rng, secret and secret.child("job", number)


def within(work: Work, priced: SitePrivacyLimits, site: Site) -> Work:
    """The same work, which ends in an error before it trains more than the privacy plan has priced."""
    result: Any = None
    done = 0
    while True:
        try:
            job = work.send(result)
        except StopIteration as end:
            update, memory = end.value
            return update, memory
        if priced.allowed and (job.training.private is None if isinstance(job, Fit) else not priced.scores):
            raise EngineError(
                f"site {site.name} was asked to look at its images in a way that the privacy plan has not priced"
            )
        if isinstance(job, Fit) and job.training.private is not None:
            rate, times = sampled(job, site.examples)
            most = priced.allowed[done] if done < len(priced.allowed) else (0.0, 0)
            if rate > most[0] or times > most[1] or job.training.private.noise < priced.least:
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


def drive(work: Work, run: Callable[[Job, int], Fitted | Tensors]) -> tuple[Update, Bundle | None]:
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
        number += counts(job)


def counts(job: Job) -> bool:
    """Whether later jobs of the round draw other numbers for it."""
    return isinstance(job, Fit) or not job.aside


def _patient_numbers(examples: Examples) -> torch.Tensor:
    if examples.patients is None:
        return torch.arange(len(examples))
    return torch.from_numpy(np.unique(np.array(examples.patients), return_inverse=True)[1].astype(np.int64))
