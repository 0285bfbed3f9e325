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
from polyclinic.federation.engines import Answer, Engine, RemoteExecution
from polyclinic.federation.rounds import Watch
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.reporting.run_folder import ENROLMENT, check_same_recipe, read_result
from polyclinic.runs.experiment import Experiment, RunResult
from polyclinic.runs.remote_sites import RemoteSites, SiteProfile, find_misfits
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.runs.tracking.events import run_tracked
from polyclinic.storage import messages
from polyclinic.storage.run_files import prepare_folder, write_json

UNFIT = "unfit"
"""Stands for the run in which a site that does not fit cannot be."""
FAREWELL = 30.0
"""Seconds that a run that is over waits for sites to hear of it."""


def run_deployed(
    recipe: Recipe,
    remote: RemoteExecution,
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
    check_servable(recipe, sites, folder)
    if (folder / "result.json").exists():
        return read_result(folder, recipe)
    cards, absent = enrol_sites(recipe, remote, sites, folder, watch, missing or {})
    began = AnnouncedEngine(remote.engine, remote.deadline)
    there = replace(remote, engine=began, absent=absent)
    experiment = Experiment(recipe, folder, data, watch, RemoteSites.from_profiles(cards), there)
    began.order = _begin_fields(experiment)
    write_json(folder / ENROLMENT, {site: card.as_json() for site, card in cards.items()})
    result = run_tracked(experiment)
    began.end_run()
    return result


def check_servable(recipe: Recipe, sites: Sequence[SiteId], folder: Path) -> None:
    """What can be known to be wrong before any site has come."""
    if recipe.methods:
        raise RecipeError(
            f"{recipe.name} compares {len(recipe.methods)} methods, and hospitals run one; write a recipe of that one"
        )
    if recipe.build_algorithm().pooled:
        raise RecipeError(
            f"{recipe.algorithm.name} needs all sites' images in one place; it is a yardstick for simulations alone"
        )
    for name in ("quorum", "cohort"):
        wanted = getattr(recipe, name)
        if wanted is not None and wanted > len(sites):
            raise RecipeError(f"a {name} of {wanted} is asked of {len(sites)} sites; lower or drop {name}")
    check_tracking(recipe.track, folder)
    check_same_recipe(folder, recipe, served=True)
    if not (folder / "result.json").exists():
        prepare_folder(folder)


def recipe_for_sites(recipe: Recipe) -> str:
    """The recipe, without what is the server's affair: where the run is followed, and how many sites are enough."""
    return recipe.model_copy(update={"track": (), "quorum": None}).to_yaml()


def enrol_sites(
    recipe: Recipe,
    remote: RemoteExecution,
    sites: Sequence[SiteId],
    folder: Path,
    watch: Watch,
    missing: Mapping[SiteId, str],
) -> tuple[dict[SiteId, SiteProfile], dict[SiteId, str]]:
    """The cards of all who take part, and why others do not. A run that goes on has the sites and the cards that it
    began with: one whose data changed is refused, and a further one cannot enter."""
    kept, desk = _read_enrolment(folder / ENROLMENT), Enrolment(recipe, remote, watch)
    for site in sites:
        if kept and site not in kept:
            desk.exclude_site(
                site, Failure("refused", "it was not there when this run began; only a new run can have it")
            )
        elif site in missing:
            desk.exclude_site(site, Failure("dead", missing[site]))
    desk.enrol_all([site for site in sites if site not in desk.absent])
    for site in desk.profiles:
        if site in kept and kept[site] != desk.profiles[site]:
            raise StoreError(
                f"site {site} has other data than when this run began; give it the same again, or start anew in "
                "another folder"
            )
    needed = recipe.quorum or len(kept or sites)
    absent = {site: desk.absent[site] for site in sites if site in desk.absent}
    if not desk.profiles or len(desk.profiles) < needed:
        why = "; ".join(f"{site}: {said}" for site, said in absent.items())
        raise RoundFailed(
            f"{len(desk.profiles)} of {len(sites)} sites enrolled, {needed} are needed ({why}); mend that, or set quorum"
        )
    there = kept or desk.profiles
    taking = {site: there[site] for site in sites if site in there}  # who is only late may still come into a round
    return taking, {site: why for site, why in absent.items() if site not in taking}


@dataclass
class Enrolment:
    """Asks sites whether they take part."""

    recipe: Recipe
    remote: RemoteExecution
    watch: Watch
    profiles: dict[SiteId, SiteProfile] = field(default_factory=dict)
    absent: dict[SiteId, str] = field(default_factory=dict)

    def enrol_all(self, sites: Sequence[SiteId]) -> None:
        cards: dict[SiteId, SiteProfile] = {}
        for site, answer in self._send_recipe({"purpose": "enrol", "run": ""}, sites):
            if isinstance(answer, Failure):
                self.exclude_site(site, answer)
                continue
            try:
                cards[site] = SiteProfile.from_fields(answer.get("card", {}))
            except Refused as refusal:
                self.exclude_site(site, Failure("refused", str(refusal)))
        self.profiles = {site: cards[site] for site in sites if site in cards}
        odd = find_misfits(self.profiles)
        self.profiles = {site: card for site, card in self.profiles.items() if site not in odd}
        for site, why in odd.items():
            self._explain_misfit(site)
            self.exclude_site(site, Failure("refused", why))

    def exclude_site(self, site: SiteId, failure: Failure) -> None:
        self.absent[site] = f"{failure.kind}: {failure.sentence}"
        self.watch("absent", {"site": site, "kind": failure.kind, "why": failure.sentence})

    def _explain_misfit(self, site: SiteId) -> None:
        """A site is told what others have as if a run began with that: so it says to its own people what to mend."""
        common = next(iter(self.profiles.values()), None)
        if common is None:
            return
        shape = {"classes": list(common.classes), "channels": common.channels, "size": common.size}
        plan = self.recipe.privacy and {"noise": 0.0, "metrics_noise": None, "holders": 1}
        for _, answer in self._send_recipe({"purpose": "begin", "run": UNFIT, **shape, "plan": plan}, [site]):
            if not isinstance(answer, Failure):
                list(ask_sites(self.remote.engine, {"purpose": "end", "run": UNFIT}, [site], self.remote.deadline))

    def _send_recipe(
        self, order: Mapping[str, Any], sites: Sequence[SiteId]
    ) -> Iterable[tuple[SiteId, dict[str, Any] | Failure]]:
        told = {"version": __version__, "recipe": recipe_for_sites(self.recipe), "seed": self.recipe.seed}
        return ask_sites(self.remote.engine, {**order, **told}, sites, self.remote.deadline) if sites else ()


def _read_enrolment(path: Path) -> dict[SiteId, SiteProfile]:
    if not path.exists():
        return {}
    try:
        return {site: SiteProfile.from_fields(card) for site, card in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, Refused) as error:
        raise StoreError(f"{path} is damaged ({error}); restore it, or start anew in another folder") from None


def ask_sites(
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


def _begin_fields(experiment: Experiment) -> dict[str, Any]:
    """What a site must know to play its part."""
    recipe, consortium, plan = experiment.recipe, experiment.dataset, experiment.plan
    return {
        "purpose": "begin",
        "run": experiment.run_id(),
        "version": __version__,
        "recipe": recipe_for_sites(recipe),
        "seed": recipe.seed,
        "classes": list(consortium.classes),
        "channels": consortium.channels,
        "size": consortium.size,
        "plan": None if plan is None else _plan_fields(plan),
    }


def _plan_fields(plan: PrivacyPlan) -> dict[str, Any]:
    quiet = None if math.isinf(plan.metrics_noise) else plan.metrics_noise
    return {"noise": plan.noise, "metrics_noise": quiet, "holders": plan.max_sites_per_record}


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
        for site, answer in ask_sites(self.engine, self.order, new, self.deadline) if new else ():
            if isinstance(answer, Failure):
                yield site, answer
            elif answer.get("ready") is True:
                self.ready.add(site)
            else:
                yield site, Failure("error", f"{site} is not ready for this run")
        there = ReadyOrders(sent, self.ready)
        if there:
            yield from self.engine.exchange(round, there, deadline)

    def end_run(self) -> None:
        """All is over: sites may forget what they remembered for it. Nothing depends on whether they heard."""
        patience = FAREWELL if self.deadline is None else min(FAREWELL, self.deadline)
        for _ in ask_sites(self.engine, {"purpose": "end", "run": self.order["run"]}, sorted(self.ready), patience):
            pass


class ReadyOrders(Mapping[SiteId, bytes]):
    """Orders to those who are ready, encoded when asked for."""

    def __init__(self, sent: Mapping[SiteId, bytes], ready: Iterable[SiteId]) -> None:
        self.sent, self.names = sent, [site for site in sent if site in set(ready)]

    def __getitem__(self, site: SiteId) -> bytes:
        return self.sent[site]

    def __iter__(self) -> Iterator[SiteId]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
