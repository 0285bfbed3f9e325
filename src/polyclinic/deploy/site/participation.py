"""One run at one site: its networks, its plan, its runner; what `Experiment` puts together for all sites at once.

All streams are named as there, so that the bits are the same. What depends on others' images comes with the `begin`
message (classes, shape, noise); first weights come with the orders, so no file that a recipe names is read here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from polyclinic.algorithms.base import WEIGHTS, Averaging
from polyclinic.algorithms.baselines.local import Local
from polyclinic.algorithms.baselines.one_shot import Single
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.algorithms.wrappers.clustered import Clustered
from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import Bundle, Federation, Stage, Stream
from polyclinic.core.errors import EngineError, Refused
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.policy import METRICS, PREDICTIONS, refuse_excess, refuse_kinds, told_of_images
from polyclinic.deploy.site.privacy_account import Account
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.federation.site_runner import SitePrivacyLimits, SiteRunner, drive
from polyclinic.privacy.plan import Plan
from polyclinic.reporting.privacy_statement import released
from polyclinic.reporting.run_folder import predicted
from polyclinic.runs.experiment import rules_of
from polyclinic.runs.networks import at_site, build_networks, device_of, network_of, sites_on_device
from polyclinic.runs.privacy_plan import bind, discretion_of, placeholder, secret_of, stages_of
from polyclinic.runs.sites import FederatedDataset
from polyclinic.storage import messages
from polyclinic.storage.run_files import MemoryStore
from polyclinic.training.network import norm_names, weights_of

TOLD = {"report": METRICS, "scalars": "scalars"}
"""What a reply's fields tell; scalars are a few numbers that an algorithm needs, such as how many steps it took."""


@dataclass(frozen=True)
class Terms:
    """What a run asks of a site, as its `begin` message says it."""

    run: str
    recipe: Recipe
    classes: tuple[str, ...]
    channels: int
    size: int
    noise: float | None = None
    """Of the server's privacy plan; None without one (or, before the run begins, where the site solves it itself) …"""
    metrics_noise: float = math.inf
    """… and the noise on metrics, where these are told as noised counts."""

    @cached_property
    def mark(self) -> str:
        """A hash of all of it."""
        priced = None if math.isinf(self.metrics_noise) else self.metrics_noise
        said = [self.recipe.to_yaml(), self.classes, self.channels, self.size, self.noise, priced]
        return hashlib.sha256(json.dumps([self.run, *said]).encode()).hexdigest()


KEPT = "asked for, and kept back"


@dataclass(frozen=True)
class ReleasePreview:
    """One kind of thing that would leave the site, for people to read before anything does."""

    kind: str
    when: str
    shapes: Mapping[str, tuple[int, ...]]
    bytes: int
    """Each time; 0 where it depends on what is asked."""
    protection: str
    cluster: str = ""
    epsilon: float | None = None
    """Of the whole run; None where nothing is promised."""


class Participation:
    """A run as this site plays it."""

    def __init__(self, config: SiteConfig, terms: Terms, consortium: FederatedDataset, memory: MemoryStore) -> None:
        self.config, self.terms, self.site = config, terms, config.site
        self.recipe = recipe = _at_site(terms.recipe, config)
        device = device_of(recipe)
        torch.set_num_threads(recipe.engine.threads)
        keep_freed_memory()
        module = network_of(recipe, consortium)
        self.lineup = build_networks(recipe, consortium, module, device)
        self.consortium, self.holdings = consortium, sites_on_device(recipe, consortium, module, device)[0][self.site]
        start = weights_of(module) if recipe.clusters else next(iter(self.lineup.networks.values())).take()
        registered = {self.site: len(self.holdings.train)}
        shape = self.lineup.shapes.get("", ())
        self.federation = Federation(consortium.classes, registered, start, norm_names(module), shape)
        self.plan = self._plan()
        private = self.plan.private() if self.plan else None
        self.algorithm: Averaging = self.lineup.wrap_algorithm(recipe.algorithm_of(private))
        self.stages: list[Stage] = [*(stages_of(self.plan) if self.plan else ()), *recipe.stages_of()]
        self.runner = SiteRunner(
            self.site, self.holdings, self.algorithm, self.lineup.all, memory, self.stages, self._discretion()
        )

    def _plan(self) -> Plan | None:
        """The server's plan as far as it concerns this site: with its noise, priced by this site's own counts."""
        wish, terms, site = self.recipe.privacy, self.terms, self.site
        if wish is None:
            return None
        rehearsed = self.lineup.wrap_algorithm(self.recipe.algorithm_of(placeholder(wish)))
        asked = wish if terms.noise is None else replace(wish, noise=terms.noise, epsilon=None, metrics="suppress")
        plan = bind(
            asked,
            rehearsed,
            self.federation,
            {site: self.holdings},
            [site],
            self.lineup.networks,
            replace(rules_of(self.recipe, ""), cohort=None),
        )
        if terms.noise is not None and wish.noise not in (None, terms.noise):
            raise Refused("privacy", f"the recipe's noise is {wish.noise:g}, but that of the plan {terms.noise:g}")
        if terms.noise is not None and (wish.metrics == "count") != math.isfinite(terms.metrics_noise):
            raise Refused("privacy", "noise on metrics is for plans whose metrics are noised counts, and for no others")
        if self.config.budget and plan.caveat:
            raise Refused("budget", f"{site} has a privacy budget, and of this recipe nothing can be promised")
        return plan if terms.noise is None else replace(plan, wish=wish, metrics_noise=terms.metrics_noise)

    def _discretion(self) -> SitePrivacyLimits | None:
        """Noise from the site's own secret, named by all that a release depends on, the images among it."""
        if self.plan is None:
            return None
        secret = Stream(self.config.secret(), ("secret", self.terms.mark, self.consortium.fingerprint))
        if self.plan.wish.randomness == "seed":
            secret = secret_of(self.plan.wish, self.recipe.seed, None)
        return discretion_of(self.plan, self.site, secret.child("site", self.site))

    @cached_property
    def account(self) -> Account | None:
        """Its page in the site's ledger."""
        if self.plan is None:
            return None
        run = f"{self.terms.run}-{self.terms.mark[:16]}-{self.consortium.fingerprint[:16]}"
        cohorts = self.recipe.cohort is not None
        return Account(self.config.folder, self.site, run, self.plan, self.config.budget, cohorts)

    def train(self, order: messages.Message) -> messages.Message:
        """A round. It is charged before it is played, and what it gives is looked at once more before it leaves."""
        if order.fields["parts"]:
            refuse_kinds((METRICS,), self.site, self.config.allow)
        self.runner.check(order)
        self._refuse_gaps(order)
        visit = self.runner.begin(order)
        if self.account is not None:
            assert visit.site.secret is not None
            of = f"{visit.site.secret.integer():016x}"
            self.account.charge(visit.site.round, of, self.account.round(len(visit.report)))
        update, memory = drive(self.runner.work(visit), lambda job, number: self.runner.run(job, visit, number))
        return self.runner.end(visit, update, memory)

    def evaluate(self, order: messages.Message) -> messages.Message:
        refuse_kinds((PREDICTIONS,), self.site, self.config.allow)
        if "train" in order.fields["parts"] and "train" not in predicted(self.recipe):
            why = "are protected by a plan" if self.plan else "the recipe leaves out (evaluate.train: false)"
            raise Refused("privacy", f"{self.site} was asked for predictions of training images, which {why}")
        self.runner.check(order)
        return self.runner.evaluate(order)

    def _refuse_gaps(self, order: messages.Message) -> None:
        """Weights that an order leaves out would stay in the network as they are, perhaps a site's own of a round
        before. Where sites train alone there may be none at all: then they go on from what they remember."""
        sent = order.tensors
        if not any(sent.get(kind) for kind in WEIGHTS) and isinstance(self._plain, Local | Single):
            return
        for kind in WEIGHTS:
            like, found = self.received[self.algorithm.cluster_from_broadcast(sent)].get(kind, {}), sent.get(kind, {})
            if {n: (t.shape, t.dtype) for n, t in like.items()} != {n: (t.shape, t.dtype) for n, t in found.items()}:
                raise Refused("shape", f"the {kind} sent to {self.site} has other names, shapes or types than its own")

    @property
    def _plain(self) -> Averaging:
        """The algorithm itself, without what is wrapped around it."""
        algorithm = self.algorithm
        while isinstance(algorithm, Wrapper):
            algorithm = algorithm.inner
        return algorithm

    def refuse_excess(self, reply: messages.Message) -> dict[str, int]:
        """The kinds of a reply with their bytes, if all of it was agreed."""
        sent = {kind: _bytes(group) for kind, group in reply.tensors.items()}
        fields = reply.fields
        told = {kind: len(json.dumps(fields[key])) for key, kind in TOLD.items() if fields.get(key)}
        asked = {METRICS: told.get(METRICS, 0)} if "report" in fields else {PREDICTIONS: sent.get(PREDICTIONS, 0)}
        beside = {kind: size for kind, size in told.items() if kind == METRICS}
        refuse_excess({**sent, **beside}, {**self.agreed, **asked}, self.site, self.config.allow)
        return {**sent, **told}

    @cached_property
    def agreed(self) -> dict[str, int]:
        """By kind, the most bytes that the algorithm sends in a round."""
        found: dict[str, int] = {}
        for like in self.looks.values():
            for kind, group in like.items():
                found[kind] = max(found.get(kind, 0), _bytes(group))
        return found

    @cached_property
    def looks(self) -> dict[str, Bundle]:
        """By cluster, what an update looks like as it leaves."""
        found = {}
        for cluster, received in self.received.items():
            like: Bundle = {e.kind: self._starts[cluster].get(e.like, {}) for e in self.algorithm.exchanges}
            for stage in self.stages:
                like = stage.out(like, received, Stream(0))
            found[cluster] = like
        return found

    @cached_property
    def received(self) -> dict[str, Bundle]:
        """By cluster, what a site that is new there is sent; only its looks count, the values are the server's."""
        return {cluster: self._inner.broadcast(state, self.site) for cluster, state in self._starts.items()}

    @cached_property
    def _starts(self) -> dict[str, Bundle]:
        """By cluster, the server's state as if this site were in it, alone."""
        known = self.federation
        return {
            cluster: self._inner.init(
                replace(known, initial=live.take(), norms=norm_names(live.module), features=self.lineup.shapes[cluster])
            )
            for cluster, live in self.lineup.networks.items()
        }

    @property
    def _inner(self) -> Averaging:
        return self.algorithm.inner if isinstance(self.algorithm, Clustered) else self.algorithm

    def preview(self) -> list[ReleasePreview]:
        """All that would leave."""
        words = {row["kind"]: row["protection"] for row in released(self.plan, self.algorithm.exchanges)}
        cost = self.plan.epsilon if self.plan is not None and self.plan.claims else None
        optional = {e.kind for e in self.algorithm.exchanges if e.optional}
        rows = [
            ReleasePreview(
                kind,
                "in some rounds" if kind in optional else "every round",
                {name: tuple(tensor.shape) for name, tensor in group.items()},
                _bytes(group),
                words.get(kind, "none"),
                cluster,
                cost,
            )
            for cluster, like in self.looks.items()
            for kind, group in like.items()
            if group
        ]
        if told_of_images(self.recipe):
            rows.append(ReleasePreview(METRICS, "every evaluated round", {}, 0, words[METRICS], epsilon=cost))
        counts = {part: len(getattr(self.holdings, part)) for part in predicted(self.recipe)}
        *most, last = (f"{count} {'training' if part == 'train' else part}" for part, count in counts.items())
        each = 4 * len(self.consortium.classes) + 16  # probabilities in float32, a label and a patient's number
        why = f"of {', '.join(most)} and {last} images, each with its label; no plan protects it"
        size = sum(counts.values()) * each
        if PREDICTIONS not in self.config.allow.kinds:
            return [
                *rows,
                ReleasePreview(PREDICTIONS, KEPT, {}, 0, "does not leave: allow.kinds in site.yaml lacks it"),
            ]
        return [*rows, ReleasePreview(PREDICTIONS, "after the last round, of each model", {}, size, why)]


def _at_site(recipe: Recipe, config: SiteConfig) -> Recipe:
    """Where the site says nothing of a device, and the recipe's is not to be had, on the CPU."""
    found = at_site(recipe, config.device or recipe.engine.device)
    try:
        device_of(found)
    except EngineError:
        if config.device is not None:
            raise EngineError(
                f"the device {config.device!r} is not to be had here; correct `device` in site.yaml, or leave it out"
            ) from None
        return at_site(recipe, "cpu")
    return found


def _bytes(group: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in group.values())
