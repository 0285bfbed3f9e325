"""A site's whole part in a round, the same class on every engine:
decode → load memory → evaluate → drive `local` → stages → encode → save memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch

from polyclinic import wire
from polyclinic.core import (
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
from polyclinic.errors import Refused, StoreError
from polyclinic.faults import reach
from polyclinic.learning.fit import fit, score
from polyclinic.learning.network import LiveNetwork, on
from polyclinic.learning.objectives import probabilities
from polyclinic.metrics import finite, measure
from polyclinic.store import MemoryStore

Predict = Callable[[Bundle, Part], Tensors]
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
class Visit:
    """A round at a site, begun: what came, and the work to be driven."""

    order: wire.Message
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
        network: LiveNetwork,
        memory: MemoryStore,
        stages: Sequence[Stage] = (),
    ) -> None:
        self.name, self.holdings, self.algorithm = name, holdings, algorithm
        self.network, self.memory, self.stages = network, memory, tuple(stages)

    def answer(self, data: bytes) -> bytes:
        """One message in, one message out, driving jobs one after another."""
        reply = self.reply(wire.decode(data))
        return wire.encode(reply.fields, reply.tensors)

    def reply(self, order: wire.Message) -> wire.Message:
        """The same within one process, where nothing needs to be encoded."""
        self.check(order)
        if order.fields["purpose"] == "evaluate":
            return self.evaluate(order)
        visit = self.begin(order)
        update, memory = drive(self.work(visit), lambda job, number: self.run(job, visit, number))
        return self.end(visit, update, memory)

    def check(self, order: wire.Message) -> None:
        """Whether an order says all it must."""
        if missing := ORDER - order.fields.keys():
            raise Refused("json", f"the order to {self.name} lacks {', '.join(sorted(missing))}")

    def begin(self, order: wire.Message, predict: Predict | None = None) -> Visit:
        """`predict`: another way to this site's predictions than one by one."""
        begun = time.perf_counter()
        fields = order.fields
        if fields["site"] != self.name:
            raise Refused("site", f"a message for {fields['site']!r} reached {self.name!r}")
        reach("site-received")
        memory = self.recall(int(fields["round"]))
        if memory is None and fields.get("remembers"):
            raise StoreError(f"site {self.name} lost what it remembered; restore its folder, or start the run anew")
        site = Site(self.name, len(self.holdings.train), fields["round"], fields["rounds"], fields["lr"])
        report = self.report(order.tensors, memory, fields["parts"], predict or self.predict)
        reach("site-evaluated")
        return Visit(order, memory, site, Stream(fields["seed"], ("site", self.name)), report, begun)

    def recall(self, round: int) -> Bundle | None:
        """What the site remembers from before a round, where it computes."""
        memory = self.memory.load(self.name, round)
        return None if memory is None else on(memory, self.network.device)

    def work(self, visit: Visit) -> Work:
        return self.algorithm.local(visit.order.tensors, visit.memory, visit.site, visit.rng)

    def run(self, job: Job, visit: Visit, number: int) -> Fitted | Tensors:
        """The `number`-th job of the round; later ones draw their own order of the data."""
        if isinstance(job, Fit):
            rng = visit.rng.child("job", number) if number else visit.rng
            return fit(job, self.network, self.holdings.train, visit.site, rng)
        return score(job, self.network, getattr(self.holdings, job.part))

    def end(
        self, visit: Visit, update: Update, memory: Bundle | None, together: int = 1, alone: str = ""
    ) -> wire.Message:
        """Remember before anything leaves: a round that is asked for again starts from the memory before it."""
        reach("site-trained")
        fields, tensors = visit.order.fields, update.tensors
        if any(t.requires_grad for group in tensors.values() for t in group.values()):
            tensors = {kind: {n: t.detach() for n, t in group.items()} for kind, group in tensors.items()}
        for number, stage in enumerate(self.stages):
            tensors = stage.out(tensors, visit.order.tensors, visit.rng.child("stage", number, visit.site.round))
        if memory is not None:
            self.memory.save(self.name, visit.site.round, memory, int(fields["durable"]))
            reach("memory-saved")
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
        wire.scalars_of(reply)  # refused here already: it could not even be written down
        return wire.Message(reply, tensors)

    def report(
        self, received: Bundle, memory: Bundle | None, parts: Sequence[Part], predict: Predict
    ) -> list[dict[str, Any]]:
        """Metrics of the model(s) this site would predict with now, by part."""
        rows = []
        models = self.algorithm.models(received, memory) if parts else {}
        for name, weights in models.items():
            for part in self.nonempty(parts):
                found = predict(weights, part)
                values = measure(found["probabilities"].double().numpy(), found["labels"].numpy())
                rows.append({"model": name, "part": part, "n": len(found["labels"]), **finite(values)})
        return rows

    def nonempty(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if len(getattr(self.holdings, part))]

    def predict(self, weights: Bundle, part: Part) -> Tensors:
        found = score(Score(weights, probabilities), self.network, getattr(self.holdings, part))
        return {name: tensor.cpu() for name, tensor in found.items()}

    def evaluate(self, order: wire.Message, predict: Predict | None = None) -> wire.Message:
        """Predictions of every model on the asked parts, patients as anonymous numbers; nothing is trained."""
        fields = order.fields
        memory = self.recall(int(fields["round"]))
        found: Tensors = {}
        for name, weights in self.algorithm.models(order.tensors, memory).items():
            for part in self.nonempty(fields["parts"]):
                for key, value in (predict or self.predict)(weights, part).items():
                    found[f"{name}|{part}|{key}"] = value
                found[f"{name}|{part}|patients"] = _patient_numbers(getattr(self.holdings, part))
        reply = {"run": fields["run"], "round": fields["round"], "site": self.name}
        return wire.Message(reply, {"predictions": found})


def drive(work: Work, run: Callable[[Job, int], Fitted | Tensors]) -> tuple[Update, Bundle | None]:
    """Send each job's result back into the generator until it returns."""
    result: Fitted | Tensors | None = None
    for number in count():
        try:
            job = work.send(result)
        except StopIteration as end:
            update, memory = end.value
            return update, memory
        result = run(job, number)
    raise AssertionError("count() never ends")


def _patient_numbers(examples: Examples) -> torch.Tensor:
    if examples.patients is None:
        return torch.arange(len(examples))
    return torch.from_numpy(np.unique(np.array(examples.patients), return_inverse=True)[1].astype(np.int64))
