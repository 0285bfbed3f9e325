"""Runs a recipe between real sites, from the server: enrolment first, then the same rounds as in a simulation.

`polyclinic serve` calls `run_deployed`.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from polyclinic.config.identity import check_same_recipe
from polyclinic.config.recipe import Recipe
from polyclinic.core import (
    PROTOCOL,
    EngineError,
    Failure,
    RecipeError,
    Refused,
    RoundFailed,
    SiteId,
    StoreError,
    __version__,
)
from polyclinic.data import DATASETS
from polyclinic.deploy.cohort import ServerCohort, hash_terms
from polyclinic.deploy.provisioning.peer_list import peer_keys
from polyclinic.deploy.site.policy import unnamed_weights
from polyclinic.federation.engines import Answer, Engine, RemoteExecution
from polyclinic.federation.mailbox import DividedMessages, Outbox, message_parts
from polyclinic.federation.robust.rules import MOST_BELIEVED, believe_counts
from polyclinic.federation.rounds import Watch
from polyclinic.runs.assemble import assemble, check_round_size, first_weights_digests, make_no_plan
from polyclinic.runs.experiment import Experiment, run_tracked
from polyclinic.runs.remote_sites import RemoteSites, SiteProfile, find_misfits
from polyclinic.runs.result import RunResult, read_result
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.storage import messages
from polyclinic.storage.files import erase_file, write_json
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.signatures import PeerKeys

Peers: TypeAlias = dict[str, object]
ReadPeers: TypeAlias = Callable[[], Peers | None]
Fields: TypeAlias = dict[str, object]
"""The JSON fields of a reply, which the caller checks."""
SPEAKS: Mapping[str, object] = {"version": __version__, "protocol": PROTOCOL}
"""What every announcement says of the server. The protocol decides whether a site takes part."""
UNFIT = "unfit"
"""Names the run that is announced to a site that does not fit, so that it can explain why."""
REVOKED = "it was revoked: server.yaml lists it no longer"
NOT_BEGUN = "not-begun"
"""Names the run that sites enrolled for, when it does not begin."""
FAREWELL = 30.0
"""Seconds that a finished run waits until the sites have heard that it is over."""


def run_deployed(
    recipe: Recipe,
    remote: RemoteExecution,
    sites: Sequence[SiteId],
    folder: Path,
    watch: Watch = lambda *_: None,
    data: Path | None = None,
    missing: Mapping[SiteId, str] | None = None,
    read_peers: ReadPeers = lambda: None,
) -> RunResult:
    """Run a recipe between real sites; an interrupted run continues where it stopped.

    Args:
        recipe: What to run.
        remote: The engine that reaches the sites.
        sites: All sites, in the federation's order.
        folder: The run's folder.
        watch: Is called with every event of the run.
        data: The folder of the server's own public images, if the recipe has any.
        missing: Sites that are not asked whether they take part, and why.
        read_peers: Returns the content of peers.json, by which sites know each other; None without kits.
    """
    check_servable(recipe, sites, folder)
    if RunFolder(folder).is_finished:
        erase_file(RunFolder(folder).secret)  # of a run that was killed as it ended
        return read_result(folder, recipe)
    profiles, absent = enrol_sites(recipe, remote, sites, folder, watch, missing or {}, read_peers)
    announced = AnnouncedEngine(remote.engine, remote.deadline, read_peers)
    listed = read_peers()
    keys = None if listed is None else peer_keys(listed)
    believed = believe_counts({site: card.train for site, card in profiles.items()}, remote.most_images)
    scored = {site: card.validation + card.test for site, card in profiles.items()}
    unscored = [site for site, most in believe_counts(scored, remote.most_images).items() if most < scored[site]]
    doubted = {
        site: describe_doubt(profiles[site], believed[site], site in unscored)
        for site in believed
        if believed[site] < profiles[site].train or site in unscored
    }
    for site, why in doubted.items():
        watch("doubted", {"site": site, "why": why})
    if believed:
        watch("unregistered", {"why": advise_registration(profiles, believed)})
    remote = replace(remote, engine=announced, absent=absent, peers=keys)
    remote = replace(remote, believed=believed, doubted=doubted, unscored=unscored)
    experiment = Experiment(recipe, folder, data, watch, RemoteSites.from_profiles(profiles), remote)
    announced.announcement = begin = _begin_fields(experiment)
    if listed is not None and keys is not None:
        statements, algorithm = RunFolder(folder).statements, experiment.setup.algorithm
        run, federation = experiment.run_id(), str(listed["federation"])
        announced.cohort = ServerCohort(federation, run, statements, algorithm, keys, hash_terms(begin))
    write_json(RunFolder(folder).enrolment, {site: card.model_dump(mode="json") for site, card in profiles.items()})
    result = run_tracked(experiment)
    announced.end_run()
    return result


def advise_registration(profiles: Mapping[SiteId, SiteProfile], unregistered: Collection[SiteId]) -> str:
    """Return what to tell the coordinator if numbers of images, which decide weights, are only the sites' word."""
    told = ", ".join(f"{site}: {profiles[site].images}" for site in profiles if site in unregistered)
    return (
        "the sites' own word decides what they weigh; compare it with what you know, and register it in server.yaml: "
        f"images: {{{told}}}"
    )


def describe_doubt(card: SiteProfile, believed: int, unscored: bool) -> str:
    """Return what to tell the coordinator of a site's unregistered numbers of images.

    `believed`: as how many training images it counts; `unscored`: whether its scores are left out of those of all.
    """
    claims = []
    if believed < card.train:
        claims.append((f"{card.train:,} training images", f"counts as one of {believed:,} in the mean of updates"))
    if unscored:
        images = f"{card.validation + card.test:,} images of validation and test"
        claims.append((images, "is left out of the scores of all sites together"))
    images, effects = (" and ".join(words) for words in zip(*claims, strict=True))
    return (
        f"claims {images}, more than {MOST_BELIEVED} times the other sites' median, and {effects}; register its number "
        "of all images under images in server.yaml, if it is true"
    )


def check_servable(recipe: Recipe, sites: Sequence[SiteId], folder: Path) -> None:
    """Raise `RecipeError` or `StoreError` for problems that are known before any site has joined."""
    if recipe.methods:
        raise RecipeError(
            f"{recipe.name} compares {len(recipe.methods)} methods, and real sites run one; write a recipe with that "
            "method only"
        )
    if recipe.build_algorithm().pooled:
        raise RecipeError(
            f"{recipe.algorithm.name} needs all sites' images in one place; it is a baseline for simulations only"
        )
    for cluster, model in recipe.trained_models.items():
        if model.starts_elsewhere and model.sha256 is None:
            raise RecipeError(unnamed_weights(f"clusters.{cluster}.model" if cluster else "model"))
    known = {"quorum": len(sites), "cohort": len(read_enrolment(folder) or sites)}
    for name, count in known.items():
        wanted = getattr(recipe, name)
        if wanted is not None and wanted > count:
            raise RecipeError(f"a {name} of {wanted} is asked of {count} sites; lower or drop {name}")
    check_round_size(recipe, known["cohort"])
    check_tracking(recipe.track, folder)
    check_same_recipe(folder, recipe, served=True)
    if not RunFolder(folder).is_finished:
        RunFolder(folder).prepare()


def hash_first_weights(recipe: Recipe, classes: tuple[str, ...], channels: int, data: Path | None) -> dict[str, str]:
    """Return the SHA-256 of a recipe's given first weights, by cluster, before any site is there.

    `classes`, `channels`: of the sites' images. `data`: the folder of the server's own public images and weights.
    """
    size = recipe.data.options.get("size") or DATASETS[recipe.data.name].options.model_fields["size"].default
    counts = {"train": 1, "validation": 0, "test": 0, "groups": (1, 0), "unnamed": (0, 0, 0), "left_out": 0}
    shape = {"version": __version__, "classes": classes, "channels": channels, "size": size, "fingerprint": ""}
    sites = RemoteSites.from_profiles({"site": SiteProfile.model_validate({**counts, **shape})})
    bare = recipe.model_copy(update={"privacy": None})
    return first_weights_digests(assemble(bare, sites, make_no_plan, data, "site"))


def recipe_for_sites(recipe: Recipe) -> str:
    """The recipe as YAML, without the keys that concern the server only: tracking and quorum."""
    return recipe.model_copy(update={"track": (), "quorum": None}).to_yaml()


def enrol_sites(
    recipe: Recipe,
    remote: RemoteExecution,
    sites: Sequence[SiteId],
    folder: Path,
    watch: Watch,
    missing: Mapping[SiteId, str],
    read_peers: ReadPeers = lambda: None,
) -> tuple[dict[SiteId, SiteProfile], dict[SiteId, str]]:
    """Ask the sites whether they take part.

    A continued run has the sites it began with, in their order, as its identity covers them all: one whose data changed
    is refused, no further one can enter, and one that was revoked since is away until it is added again.

    Returns:
        The profile of each site that takes part, and for each other site why it does not.
    """
    kept, enrolment = read_enrolment(folder), Enrolment(recipe, remote, watch, read_peers)
    everybody = list(dict.fromkeys([*kept, *sites]))
    for site in everybody:
        if kept and site not in kept:
            enrolment.exclude_site(
                site, Failure("refused", "it was not there when this run began; only a new run can have it")
            )
        elif site not in sites:
            enrolment.exclude_site(site, Failure("dead", REVOKED))
        elif site in missing:
            enrolment.exclude_site(site, Failure("dead", missing[site]))
    enrolment.enrol_all([site for site in sites if site not in enrolment.absent])
    enrolment.exclude_sites_that_want_more(len(kept or sites))
    for site in enrolment.profiles:
        if site in kept and kept[site] != enrolment.profiles[site]:
            raise StoreError(
                f"site {site} has other data than when this run began; give it the same again, or start anew in "
                "another folder"
            )
    needed = recipe.quorum or len(kept or sites)
    absent = {site: enrolment.absent[site] for site in everybody if site in enrolment.absent}
    if not enrolment.profiles or len(enrolment.profiles) < needed:
        enrolment.report_dropped_run(f"{len(enrolment.profiles)} sites enrolled for {recipe.name}, {needed} are needed")
        why = "; ".join(f"{site}: {reason}" for site, reason in absent.items())
        raise RoundFailed(
            f"{len(enrolment.profiles)} of {len(kept or sites)} sites enrolled, {needed} are needed ({why}); mend "
            "that, or set quorum"
        )
    taking = kept or enrolment.profiles  # a site that is only late may still join a round
    return taking, {site: why for site, why in absent.items() if site not in taking}


@dataclass
class Enrolment:
    """Asks sites whether they take part."""

    recipe: Recipe
    remote: RemoteExecution
    watch: Watch
    read_peers: ReadPeers = lambda: None
    profiles: dict[SiteId, SiteProfile] = field(default_factory=dict)
    absent: dict[SiteId, str] = field(default_factory=dict)
    least_sites: dict[SiteId, int] = field(default_factory=dict)
    """How many sites each of them asks for in every round."""

    def enrol_all(self, sites: Sequence[SiteId]) -> None:
        profiles: dict[SiteId, SiteProfile] = {}
        for site, answer in self._send_recipe({"purpose": "enrol", "run": ""}, sites):
            if isinstance(answer, Failure):
                self.exclude_site(site, answer)
                continue
            try:
                profiles[site] = SiteProfile.from_fields(answer.get("card", {}))
                least = answer.get("least_sites")
                self.least_sites[site] = least if type(least) is int else 1
            except Refused as refusal:
                self.exclude_site(site, Failure("refused", str(refusal)))
        for site in [site for site in profiles if site in self.remote.most_images]:
            told, most = profiles[site].images, self.remote.most_images[site]
            if told > most:
                del profiles[site]
                why = (
                    f"it tells {told} images where {most} are registered; correct images in server.yaml, or ask it why"
                )
                self.exclude_site(site, Failure("refused", why))
        odd = find_misfits({site: profiles[site] for site in sites if site in profiles})
        self.profiles = {site: profiles[site] for site in sites if site in profiles and site not in odd}
        for site, why in odd.items():
            self._explain_misfit(site)
            self.exclude_site(site, Failure("refused", why))

    def exclude_sites_that_want_more(self, sites: int) -> None:
        """Exclude the sites that ask for more sites in a round than one of this recipe may count with: they would
        refuse the next round, and all further ones. `sites`: the number of the federation's sites."""
        played = min(self.recipe.quorum or sites, self.recipe.cohort or sites)
        for site in [site for site in self.profiles if self.least_sites[site] > played]:
            least = self.least_sites[site]
            keys = " and ".join(key for key in ("quorum", "cohort") if (getattr(self.recipe, key) or sites) < least)
            remedy = f"raise {keys} to {least}" if keys and least <= sites else "more sites are needed"
            why = (
                f"it takes part only with {least} sites or more (allow.least_sites in its site.yaml), and a round of "
                f"this recipe may have {played}; {remedy}, or it can lower that"
            )
            del self.profiles[site]
            self.exclude_site(site, Failure("refused", why))

    def exclude_site(self, site: SiteId, failure: Failure) -> None:
        self.absent[site] = f"{failure.kind}: {failure.sentence}"
        self.watch("absent", {"site": site, "kind": failure.kind, "why": failure.sentence})

    def report_dropped_run(self, why: str) -> None:
        """Tell the sites that have enrolled that no run begins."""
        fields = {"purpose": "end", "run": NOT_BEGUN, "not begun": why}
        list(
            ask_sites(self.remote.engine, fields, list(self.profiles), min(FAREWELL, self.remote.deadline or FAREWELL))
        )

    def _explain_misfit(self, site: SiteId) -> None:
        """Announce a run with the other sites' shape of data, so that the site's own log says what to correct."""
        if not self.profiles:
            return
        common, plan = next(iter(self.profiles.values())), {"noise": 0.0, "metrics_noise": None, "holders": 1}
        shape = {"classes": list(common.classes), "channels": common.channels, "size": common.size}
        sites = [*self.profiles, site]
        fields = {"purpose": "begin", "run": UNFIT, **shape, "sites": sites, "plan": self.recipe.privacy and plan}
        for _, answer in self._send_recipe(fields, [site]):
            if not isinstance(answer, Failure):
                list(ask_sites(self.remote.engine, {"purpose": "end", "run": UNFIT}, [site], self.remote.deadline))

    def _send_recipe(
        self, fields: Mapping[str, object], sites: Sequence[SiteId]
    ) -> Iterable[tuple[SiteId, Fields | Failure]]:
        recipe = {**SPEAKS, "recipe": recipe_for_sites(self.recipe), "seed": self.recipe.seed}
        told = {**fields, **recipe, **_peers_field(self.read_peers())}
        return ask_sites(self.remote.engine, told, sites, self.remote.deadline) if sites else ()


def _peers_field(peers: Peers | None) -> dict[str, object]:
    return {} if peers is None else {"peers": peers}


def read_enrolment(folder: Path) -> dict[SiteId, SiteProfile]:
    """Return the profiles of the sites that a run in this folder began with; none if it has not begun."""
    path = RunFolder(folder).enrolment
    if not path.exists():
        return {}
    try:
        return {site: SiteProfile.from_fields(card) for site, card in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, Refused) as error:
        raise StoreError(f"{path} is damaged ({error}); restore it, or start anew in another folder") from None


def ask_sites(
    engine: Engine, fields: Mapping[str, object], sites: Sequence[SiteId], deadline: float | None
) -> Iterable[tuple[SiteId, Fields | Failure]]:
    """Send each site a message without tensors, and yield each site's answer."""
    sent = {site: messages.encode({**fields, "site": site}, {}) for site in sites}
    for site, answer in engine.exchange(0, sent, deadline):
        if isinstance(answer, Failure):
            yield site, answer
            continue
        try:
            reply = (answer if isinstance(answer, messages.Message) else messages.decode(answer)).fields
        except Refused as refusal:
            yield site, Failure("refused", str(refusal))
            continue
        if reply.get("site") != site or reply.get("run") != fields["run"]:
            yield site, Failure("refused", f"{site} answered for another site or run")
        else:
            yield site, dict(reply)


def _begin_fields(experiment: Experiment) -> dict[str, object]:
    """The fields of the `begin` message: everything a site needs to know about the run."""
    recipe, dataset, plan = experiment.recipe, experiment.setup.dataset, experiment.setup.plan
    return {
        "purpose": "begin",
        "run": experiment.run_id(),
        **SPEAKS,
        "recipe": recipe_for_sites(recipe),
        "seed": recipe.seed,
        "classes": list(dataset.classes),
        "channels": dataset.channels,
        "size": dataset.size,
        "sites": list(dataset.sites),
        "plan": plan
        and {
            "noise": plan.noise,
            "site_noise": dict(plan.site_noise),
            "metrics_noise": None if math.isinf(plan.metrics_noise) else plan.metrics_noise,
            "holders": plan.max_sites_per_record,
        },
    }


@dataclass
class AnnouncedEngine:
    """An engine that announces the run to each site before its first message, whenever the site joins."""

    engine: Engine
    deadline: float | None
    read_peers: ReadPeers = lambda: None
    cohort: ServerCohort | None = None
    """The statements of the sites on what they received; None without kits."""
    announcement: dict[str, object] = field(default_factory=dict)
    ready: set[SiteId] = field(default_factory=set)
    _peers: Peers | None = None

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        self._look_for_other_peers()
        new = [site for site in sent if site not in self.ready]
        told = {**self.announcement, **_peers_field(self._peers)}
        for site, answer in ask_sites(self.engine, told, new, self.deadline) if new else ():
            if isinstance(answer, Failure):
                yield site, answer
            elif answer.get("ready") is not True:
                yield site, Failure("error", f"{site} is not ready for this run")
            elif self.cohort is not None and (wrong := self.cohort.take_terms(site, answer)) is not None:
                yield site, wrong
            else:
                self.ready.add(site)
        ready = ReadyMessages(sent, self.ready)
        if not ready:
            return
        if self.cohort is None or not isinstance(sent, Outbox):
            yield from self.engine.exchange(round, ready, deadline)
            return
        self.cohort.save()
        self.cohort.show_statements(sent)
        try:
            for site, reply in self.engine.exchange(round, ready, deadline):
                taken = self.cohort.take_reply(site, reply, sent)
                if taken is not reply and (newer := self._read_newer_keys()) is not None:
                    self.cohort.peers = newer  # its key was rotated in this round
                    taken = self.cohort.take_reply(site, reply, sent)
                yield site, taken
        finally:
            self.cohort.save()

    def _read_newer_keys(self) -> PeerKeys | None:
        """Return the sites' keys if the list has changed since the exchange began; the next one announces it."""
        with suppress(EngineError):
            peers = self.read_peers()
            return None if peers is None or peers == self._peers else peer_keys(peers)
        return None

    def _look_for_other_peers(self) -> None:
        """If the list of sites has changed, announce the run again with the new one: keys may have been rotated."""
        try:
            peers = self.read_peers()
        except EngineError:  # while a new kit is being copied, the former list holds
            if self._peers is None:
                raise
            return
        if peers is not None and self.cohort is not None and peers != self._peers:
            self._peers, self.cohort.peers = peers, peer_keys(peers)
            self.ready.clear()

    def end_run(self) -> None:
        """Tell the sites that the run is over and its data can be deleted. Nothing depends on their receiving it."""
        fields, patience = {"purpose": "end", "run": self.announcement["run"]}, min(FAREWELL, self.deadline or FAREWELL)
        list(ask_sites(self.engine, fields, sorted(self.ready), patience))


class ReadyMessages(DividedMessages):
    """The messages to sites that are ready, encoded when they are read."""

    def __init__(self, sent: Mapping[SiteId, bytes], ready: Iterable[SiteId]) -> None:
        self.sent, self.names = sent, [site for site in sent if site in set(ready)]

    def __getitem__(self, site: SiteId) -> bytes:
        return self.sent[site]

    def parts(self, site: SiteId) -> tuple[bytes, ...]:
        return message_parts(self.sent, site)

    def release_shared(self) -> None:
        if isinstance(self.sent, DividedMessages):
            self.sent.release_shared()

    def __iter__(self) -> Iterator[SiteId]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
