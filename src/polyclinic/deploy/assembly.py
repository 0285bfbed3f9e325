"""A run between real sites, as its server plays it: who is there, what they have, then the rounds as anywhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyclinic import __version__, wire
from polyclinic.core import Failure, SiteId
from polyclinic.deploy.roster import Card, Roster
from polyclinic.engines import Answer, Elsewhere, Engine
from polyclinic.errors import RecipeError, Refused, RoundFailed, StoreError
from polyclinic.experiment import Experiment, Result
from polyclinic.privacy.plan import Plan
from polyclinic.recipe import Recipe
from polyclinic.rounds import Watch
from polyclinic.runs import finished, refuse_other
from polyclinic.store import write_json

ENROLMENT = "enrolled.json"


def deploy(
    recipe: Recipe,
    elsewhere: Elsewhere,
    sites: Sequence[SiteId],
    folder: Path,
    watch: Watch = lambda *_: None,
    data: Path | None = None,
) -> Result:
    """Run a recipe between `sites`, in the federation's order; one that was interrupted goes on where it stopped.

    data: where the server's own public images lie, if the recipe has any.
    """
    if recipe.algorithm_of().pooled:
        raise RecipeError(
            f"{recipe.algorithm.name} needs all sites' images in one place; it is a yardstick for simulations alone"
        )
    if (folder / "result.json").exists():
        return finished(folder, recipe)
    refuse_other(folder, recipe)
    roster = Roster.of(enrolled(recipe, elsewhere, sites, folder, watch))
    began = Begun(elsewhere.engine, elsewhere.deadline)
    experiment = Experiment(recipe, folder, data, watch, roster, Elsewhere(began, elsewhere.name, elsewhere.deadline))
    began.order = _beginning(experiment)
    result = experiment.run()
    began.end()
    return result


def enrolled(
    recipe: Recipe, elsewhere: Elsewhere, sites: Sequence[SiteId], folder: Path, watch: Watch
) -> dict[SiteId, Card]:
    """Every site's card. A run that goes on keeps the cards it began with, and refuses a site whose data changed."""
    kept, fresh = _kept(folder / ENROLMENT), {}
    order = {"purpose": "enrol", "run": "", "version": __version__, "recipe": recipe.to_yaml(), "seed": recipe.seed}
    for site, answer in ask(elsewhere.engine, order, sites, elsewhere.deadline):
        if isinstance(answer, Failure):
            watch("absent", {"site": site, "kind": answer.kind, "why": answer.sentence})
            continue
        fresh[site] = Card.read(answer.get("card", {}))
        if site in kept and kept[site] != fresh[site]:
            raise StoreError(
                f"site {site} has other data than when this run began; give it the same again, or start anew in "
                "another folder"
            )
    there = {site: kept.get(site) or fresh[site] for site in sites if site in (kept or fresh)}
    if not there or len(fresh) < recipe.quorum:
        raise RoundFailed(
            f"{len(fresh)} of {len(sites)} sites enrolled, {recipe.quorum} are needed; `polyclinic status` says why"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ENROLMENT, {site: card.as_json() for site, card in there.items()})
    return there


def _kept(path: Path) -> dict[SiteId, Card]:
    if not path.exists():
        return {}
    try:
        return {site: Card.read(card) for site, card in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, Refused) as error:
        raise StoreError(f"{path} is damaged ({error}); restore it, or start anew in another folder") from None


def ask(
    engine: Engine, order: Mapping[str, Any], sites: Sequence[SiteId], deadline: float | None
) -> Iterable[tuple[SiteId, dict[str, Any] | Failure]]:
    """One message without tensors to each site, and what each says to it."""
    sent = {site: wire.encode({**order, "site": site}, {}) for site in sites}
    for site, answer in engine.exchange(0, sent, deadline):
        if isinstance(answer, Failure):
            yield site, answer
            continue
        try:
            fields = (answer if isinstance(answer, wire.Message) else wire.decode(answer)).fields
        except Refused as refusal:
            yield site, Failure("refused", str(refusal))
            continue
        if fields.get("site") != site or fields.get("run") != order["run"]:
            yield site, Failure("refused", f"{site} answered for another site or run")
        else:
            yield site, dict(fields)


def _beginning(experiment: Experiment) -> dict[str, Any]:
    """What a site must know to play its part."""
    recipe, consortium, plan = experiment.recipe, experiment.consortium, experiment.plan
    return {
        "purpose": "begin",
        "run": experiment.mark(),
        "version": __version__,
        "recipe": recipe.to_yaml(),
        "seed": recipe.seed,
        "classes": list(consortium.classes),
        "channels": consortium.channels,
        "size": consortium.size,
        "plan": None if plan is None else _priced(plan),
    }


def _priced(plan: Plan) -> dict[str, Any]:
    quiet = None if math.isinf(plan.metrics_noise) else plan.metrics_noise
    return {"noise": plan.noise, "metrics_noise": quiet, "holders": plan.holders}


@dataclass
class Begun:
    """An engine whose sites are told of the run before their first order, whenever they come."""

    engine: Engine
    deadline: float | None
    order: dict[str, Any] = field(default_factory=dict)
    ready: set[SiteId] = field(default_factory=set)

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        new = [site for site in sent if site not in self.ready]
        for site, answer in ask(self.engine, self.order, new, self.deadline) if new else ():
            if isinstance(answer, Failure):
                yield site, answer
            elif answer.get("ready") is True:
                self.ready.add(site)
            else:
                yield site, Failure("error", f"{site} is not ready for this run")
        there = Ready(sent, self.ready)
        if there:
            yield from self.engine.exchange(round, there, deadline)

    def end(self) -> None:
        """All is over: sites may forget what they remembered for it. Nothing depends on whether they heard."""
        for _ in ask(self.engine, {"purpose": "end", "run": self.order["run"]}, sorted(self.ready), self.deadline):
            pass


class Ready(Mapping[SiteId, bytes]):
    """Orders to those who are ready, encoded when asked for."""

    def __init__(self, sent: Mapping[SiteId, bytes], ready: Iterable[SiteId]) -> None:
        self.sent, self.names = sent, [site for site in sent if site in set(ready)]

    def __getitem__(self, site: SiteId) -> bytes:
        return self.sent[site]

    def __iter__(self) -> Iterator[SiteId]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
