"""A run between real sites, as its server plays it: who is there, what they have, then the rounds as anywhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyclinic import __version__
from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import Failure, SiteId
from polyclinic.core.errors import RecipeError, Refused, RoundFailed, StoreError
from polyclinic.federation.engines import Answer, Elsewhere, Engine
from polyclinic.federation.rounds import Watch
from polyclinic.privacy.plan import Plan
from polyclinic.reporting.run_folder import ENROLMENT, finished, refuse_other
from polyclinic.runs.experiment import Experiment, RunResult
from polyclinic.runs.remote_sites import RemoteSites, SiteProfile, misfits
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.runs.tracking.events import tracked
from polyclinic.storage import messages
from polyclinic.storage.run_files import prepare, write_json

UNFIT = "unfit"
"""Stands for the run in which a site that does not fit cannot be."""
FAREWELL = 30.0
"""Seconds that a run that is over waits for sites to hear of it."""


def deploy(
    recipe: Recipe,
    elsewhere: Elsewhere,
    sites: Sequence[SiteId],
    folder: Path,
    watch: Watch = lambda *_: None,
    data: Path | None = None,
    missing: Mapping[SiteId, str] | None = None,
) -> RunResult:
    """Run a recipe between `sites`, in the federation's order; one that was interrupted goes on where it stopped.

    data: where the server's own public images lie, if the recipe has any. missing: sites that need not be asked whether
    they take part, and why.
    """
    refuse_unservable(recipe, sites, folder)
    if (folder / "result.json").exists():
        return finished(folder, recipe)
    cards, absent = enrolled(recipe, elsewhere, sites, folder, watch, missing or {})
    began = AnnouncedEngine(elsewhere.engine, elsewhere.deadline)
    there = replace(elsewhere, engine=began, absent=absent)
    experiment = Experiment(recipe, folder, data, watch, RemoteSites.of(cards), there)
    began.order = _beginning(experiment)
    write_json(folder / ENROLMENT, {site: card.as_json() for site, card in cards.items()})
    result = tracked(experiment)
    began.end()
    return result


def refuse_unservable(recipe: Recipe, sites: Sequence[SiteId], folder: Path) -> None:
    """What can be known to be wrong before any site has come."""
    if recipe.methods:
        raise RecipeError(
            f"{recipe.name} compares {len(recipe.methods)} methods, and hospitals run one; write a recipe of that one"
        )
    if recipe.algorithm_of().pooled:
        raise RecipeError(
            f"{recipe.algorithm.name} needs all sites' images in one place; it is a yardstick for simulations alone"
        )
    for name in ("quorum", "cohort"):
        wanted = getattr(recipe, name)
        if wanted is not None and wanted > len(sites):
            raise RecipeError(f"a {name} of {wanted} is asked of {len(sites)} sites; lower or drop {name}")
    check_tracking(recipe.track, folder)
    refuse_other(folder, recipe, served=True)
    if not (folder / "result.json").exists():
        prepare(folder)


def told_to_sites(recipe: Recipe) -> str:
    """The recipe, without what is the server's affair: where the run is followed, and how many sites are enough."""
    return recipe.model_copy(update={"track": (), "quorum": None}).to_yaml()


def enrolled(
    recipe: Recipe,
    elsewhere: Elsewhere,
    sites: Sequence[SiteId],
    folder: Path,
    watch: Watch,
    missing: Mapping[SiteId, str],
) -> tuple[dict[SiteId, SiteProfile], dict[SiteId, str]]:
    """The cards of all who take part, and why others do not. A run that goes on has the sites and the cards that it
    began with: one whose data changed is refused, and a further one cannot enter."""
    kept, desk = _kept(folder / ENROLMENT), Enrolment(recipe, elsewhere, watch)
    for site in sites:
        if kept and site not in kept:
            desk.leave_out(site, Failure("refused", "it was not there when this run began; only a new run can have it"))
        elif site in missing:
            desk.leave_out(site, Failure("dead", missing[site]))
    desk.ask([site for site in sites if site not in desk.absent])
    for site in desk.cards:
        if site in kept and kept[site] != desk.cards[site]:
            raise StoreError(
                f"site {site} has other data than when this run began; give it the same again, or start anew in "
                "another folder"
            )
    needed = recipe.quorum or len(kept or sites)
    absent = {site: desk.absent[site] for site in sites if site in desk.absent}
    if not desk.cards or len(desk.cards) < needed:
        why = "; ".join(f"{site}: {said}" for site, said in absent.items())
        raise RoundFailed(
            f"{len(desk.cards)} of {len(sites)} sites enrolled, {needed} are needed ({why}); mend that, or set quorum"
        )
    there = kept or desk.cards
    taking = {site: there[site] for site in sites if site in there}  # who is only late may still come into a round
    return taking, {site: why for site, why in absent.items() if site not in taking}


@dataclass
class Enrolment:
    """Asks sites whether they take part."""

    recipe: Recipe
    elsewhere: Elsewhere
    watch: Watch
    cards: dict[SiteId, SiteProfile] = field(default_factory=dict)
    absent: dict[SiteId, str] = field(default_factory=dict)

    def ask(self, sites: Sequence[SiteId]) -> None:
        cards: dict[SiteId, SiteProfile] = {}
        for site, answer in self._asked({"purpose": "enrol", "run": ""}, sites):
            if isinstance(answer, Failure):
                self.leave_out(site, answer)
                continue
            try:
                cards[site] = SiteProfile.read(answer.get("card", {}))
            except Refused as refusal:
                self.leave_out(site, Failure("refused", str(refusal)))
        self.cards = {site: cards[site] for site in sites if site in cards}
        odd = misfits(self.cards)
        self.cards = {site: card for site, card in self.cards.items() if site not in odd}
        for site, why in odd.items():
            self._explain(site)
            self.leave_out(site, Failure("refused", why))

    def leave_out(self, site: SiteId, failure: Failure) -> None:
        self.absent[site] = f"{failure.kind}: {failure.sentence}"
        self.watch("absent", {"site": site, "kind": failure.kind, "why": failure.sentence})

    def _explain(self, site: SiteId) -> None:
        """A site is told what others have as if a run began with that: so it says to its own people what to mend."""
        common = next(iter(self.cards.values()), None)
        if common is None:
            return
        shape = {"classes": list(common.classes), "channels": common.channels, "size": common.size}
        plan = self.recipe.privacy and {"noise": 0.0, "metrics_noise": None, "holders": 1}
        for _, answer in self._asked({"purpose": "begin", "run": UNFIT, **shape, "plan": plan}, [site]):
            if not isinstance(answer, Failure):
                list(ask(self.elsewhere.engine, {"purpose": "end", "run": UNFIT}, [site], self.elsewhere.deadline))

    def _asked(
        self, order: Mapping[str, Any], sites: Sequence[SiteId]
    ) -> Iterable[tuple[SiteId, dict[str, Any] | Failure]]:
        told = {"version": __version__, "recipe": told_to_sites(self.recipe), "seed": self.recipe.seed}
        return ask(self.elsewhere.engine, {**order, **told}, sites, self.elsewhere.deadline) if sites else ()


def _kept(path: Path) -> dict[SiteId, SiteProfile]:
    if not path.exists():
        return {}
    try:
        return {site: SiteProfile.read(card) for site, card in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, Refused) as error:
        raise StoreError(f"{path} is damaged ({error}); restore it, or start anew in another folder") from None


def ask(
    engine: Engine, order: Mapping[str, Any], sites: Sequence[SiteId], deadline: float | None
) -> Iterable[tuple[SiteId, dict[str, Any] | Failure]]:
    """One message without tensors to each site, and what each says to it."""
    sent = {site: messages.encode({**order, "site": site}, {}) for site in sites}
    for site, answer in engine.exchange(0, sent, deadline):
        if isinstance(answer, Failure):
            yield site, answer
            continue
        try:
            fields = (answer if isinstance(answer, messages.Message) else messages.decode(answer)).fields
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
        "run": experiment.run_id(),
        "version": __version__,
        "recipe": told_to_sites(recipe),
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
class AnnouncedEngine:
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
        patience = FAREWELL if self.deadline is None else min(FAREWELL, self.deadline)
        for _ in ask(self.engine, {"purpose": "end", "run": self.order["run"]}, sorted(self.ready), patience):
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
