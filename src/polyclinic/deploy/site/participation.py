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

from polyclinic.algorithms.base import WEIGHT_KINDS, Averaging
from polyclinic.algorithms.baselines.local import Local
from polyclinic.algorithms.baselines.one_shot import OneShot
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.algorithms.wrappers.clustered import Clustered
from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import Bundle, Federation, Stage, Stream
from polyclinic.core.errors import EngineError, Refused
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.policy import METRICS, PREDICTIONS, check_kinds, check_sent_kinds, image_report_kinds
from polyclinic.deploy.site.privacy_account import PrivacyAccount
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.federation.site_runner import SitePrivacyLimits, SiteRunner, drive_jobs
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.reporting.privacy_statement import list_releases
from polyclinic.reporting.run_folder import predicted_parts
from polyclinic.runs.experiment import rules_of
from polyclinic.runs.networks import build_network, build_networks, device_of, recipe_for_site, sites_on_device
from polyclinic.runs.privacy_plan import bind_plan, noise_secret, placeholder_private, plan_transforms, privacy_limits
from polyclinic.runs.sites import FederatedDataset
from polyclinic.storage import messages
from polyclinic.storage.run_files import SiteMemory
from polyclinic.training.network import copy_module_weights, normalisation_names

TOLD = {"report": METRICS, "scalars": "scalars"}
"""What a reply's fields tell; scalars are a few numbers that an algorithm needs, such as how many steps it took."""


@dataclass(frozen=True)
class RunTerms:
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
    def digest(self) -> str:
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

    def __init__(self, config: SiteConfig, terms: RunTerms, dataset: FederatedDataset, memory: SiteMemory) -> None:
        self.config, self.terms, self.site = config, terms, config.site
        self.recipe = recipe = _choose_device(terms.recipe, config)
        device = device_of(recipe)
        torch.set_num_threads(recipe.engine.threads)
        keep_freed_memory()
        module = build_network(recipe, dataset)
        self.lineup = build_networks(recipe, dataset, module, device)
        self.dataset, self.holdings = dataset, sites_on_device(recipe, dataset, module, device)[0][self.site]
        start = (
            copy_module_weights(module)
            if recipe.clusters
            else next(iter(self.lineup.by_cluster.values())).copy_weights()
        )
        registered = {self.site: len(self.holdings.train)}
        shape = self.lineup.shapes.get("", ())
        self.federation = Federation(dataset.classes, registered, start, normalisation_names(module), shape)
        self.plan = self._plan()
        private = self.plan.private_options() if self.plan else None
        self.algorithm: Averaging = self.lineup.wrap_algorithm(recipe.build_algorithm(private))
        self.stages: list[Stage] = [*(plan_transforms(self.plan) if self.plan else ()), *recipe.build_stages()]
        self.runner = SiteRunner(
            self.site,
            self.holdings,
            self.algorithm,
            self.lineup.with_student,
            memory,
            self.stages,
            self._privacy_limits(),
        )

    def _plan(self) -> PrivacyPlan | None:
        """The server's plan as far as it concerns this site: with its noise, priced by this site's own counts."""
        wish, terms, site = self.recipe.privacy, self.terms, self.site
        if wish is None:
            return None
        rehearsed = self.lineup.wrap_algorithm(self.recipe.build_algorithm(placeholder_private(wish)))
        asked = wish if terms.noise is None else replace(wish, noise=terms.noise, epsilon=None, metrics="suppress")
        plan = bind_plan(
            asked,
            rehearsed,
            self.federation,
            {site: self.holdings},
            [site],
            self.lineup.by_cluster,
            replace(rules_of(self.recipe, ""), cohort=None),
        )
        if terms.noise is not None and wish.noise not in (None, terms.noise):
            raise Refused("privacy", f"the recipe's noise is {wish.noise:g}, but that of the plan {terms.noise:g}")
        if terms.noise is not None and (wish.metrics == "count") != math.isfinite(terms.metrics_noise):
            raise Refused("privacy", "noise on metrics is for plans whose metrics are noised counts, and for no others")
        if self.config.budget and plan.no_guarantee_reason:
            raise Refused("budget", f"{site} has a privacy budget, and of this recipe nothing can be promised")
        return plan if terms.noise is None else replace(plan, config=wish, metrics_noise=terms.metrics_noise)

    def _privacy_limits(self) -> SitePrivacyLimits | None:
        """Noise from the site's own secret, named by all that a release depends on, the images among it."""
        if self.plan is None:
            return None
        secret = Stream(self.config.load_secret(), ("secret", self.terms.digest, self.dataset.fingerprint))
        if self.plan.config.randomness == "seed":
            secret = noise_secret(self.plan.config, self.recipe.seed, None)
        return privacy_limits(self.plan, self.site, secret.child("site", self.site))

    @cached_property
    def account(self) -> PrivacyAccount | None:
        """Its page in the site's ledger."""
        if self.plan is None:
            return None
        run = f"{self.terms.run}-{self.terms.digest[:16]}-{self.dataset.fingerprint[:16]}"
        cohorts = self.recipe.cohort is not None
        return PrivacyAccount(self.config.folder, self.site, run, self.plan, self.config.budget, cohorts)

    def train(self, order: messages.Message) -> messages.Message:
        """A round. It is charged before it is played, and what it gives is looked at once more before it leaves."""
        if order.fields["parts"]:
            check_kinds((METRICS,), self.site, self.config.allow)
        self.runner.check_order(order)
        self._check_complete(order)
        visit = self.runner.begin_round(order)
        if self.account is not None:
            assert visit.site.secret is not None
            of = f"{visit.site.secret.integer():016x}"
            self.account.charge_round(visit.site.round, of, self.account.round_releases(len(visit.report)))
        update, memory = drive_jobs(
            self.runner.start_local(visit), lambda job, number: self.runner.run_job(job, visit, number)
        )
        return self.runner.finish_round(visit, update, memory)

    def evaluate(self, order: messages.Message) -> messages.Message:
        check_kinds((PREDICTIONS,), self.site, self.config.allow)
        if "train" in order.fields["parts"] and "train" not in predicted_parts(self.recipe):
            why = "are protected by a plan" if self.plan else "the recipe leaves out (evaluate.train: false)"
            raise Refused("privacy", f"{self.site} was asked for predictions of training images, which {why}")
        self.runner.check_order(order)
        return self.runner.evaluate(order)

    def _check_complete(self, order: messages.Message) -> None:
        """Weights that an order leaves out would stay in the network as they are, perhaps a site's own of a round
        before. Where sites train alone there may be none at all: then they go on from what they remember."""
        sent = order.tensors
        if not any(sent.get(kind) for kind in WEIGHT_KINDS) and isinstance(self._unwrapped_algorithm, Local | OneShot):
            return
        for kind in WEIGHT_KINDS:
            like, found = (
                self.broadcast_templates[self.algorithm.cluster_from_broadcast(sent)].get(kind, {}),
                sent.get(kind, {}),
            )
            if {n: (t.shape, t.dtype) for n, t in like.items()} != {n: (t.shape, t.dtype) for n, t in found.items()}:
                raise Refused("shape", f"the {kind} sent to {self.site} has other names, shapes or types than its own")

    @property
    def _unwrapped_algorithm(self) -> Averaging:
        """The algorithm itself, without what is wrapped around it."""
        algorithm = self.algorithm
        while isinstance(algorithm, Wrapper):
            algorithm = algorithm.inner
        return algorithm

    def check_reply(self, reply: messages.Message) -> dict[str, int]:
        """The kinds of a reply with their bytes, if all of it was agreed."""
        sent = {kind: _count_bytes(group) for kind, group in reply.tensors.items()}
        fields = reply.fields
        told = {kind: len(json.dumps(fields[key])) for key, kind in TOLD.items() if fields.get(key)}
        asked = {METRICS: told.get(METRICS, 0)} if "report" in fields else {PREDICTIONS: sent.get(PREDICTIONS, 0)}
        beside = {kind: size for kind, size in told.items() if kind == METRICS}
        check_sent_kinds({**sent, **beside}, {**self.byte_limits, **asked}, self.site, self.config.allow)
        return {**sent, **told}

    @cached_property
    def byte_limits(self) -> dict[str, int]:
        """By kind, the most bytes that the algorithm sends in a round."""
        found: dict[str, int] = {}
        for like in self.update_templates.values():
            for kind, group in like.items():
                found[kind] = max(found.get(kind, 0), _count_bytes(group))
        return found

    @cached_property
    def update_templates(self) -> dict[str, Bundle]:
        """By cluster, what an update looks like as it leaves."""
        found = {}
        for cluster, received in self.broadcast_templates.items():
            like: Bundle = {e.kind: self._initial_states[cluster].get(e.like, {}) for e in self.algorithm.exchanges}
            for stage in self.stages:
                like = stage.encode(like, received, Stream(0))
            found[cluster] = like
        return found

    @cached_property
    def broadcast_templates(self) -> dict[str, Bundle]:
        """By cluster, what a site that is new there is sent; only its looks count, the values are the server's."""
        return {
            cluster: self._inner_algorithm.broadcast(state, self.site)
            for cluster, state in self._initial_states.items()
        }

    @cached_property
    def _initial_states(self) -> dict[str, Bundle]:
        """By cluster, the server's state as if this site were in it, alone."""
        known = self.federation
        return {
            cluster: self._inner_algorithm.init(
                replace(
                    known,
                    initial=live.copy_weights(),
                    norms=normalisation_names(live.module),
                    features=self.lineup.shapes[cluster],
                )
            )
            for cluster, live in self.lineup.by_cluster.items()
        }

    @property
    def _inner_algorithm(self) -> Averaging:
        return self.algorithm.inner if isinstance(self.algorithm, Clustered) else self.algorithm

    def preview_releases(self) -> list[ReleasePreview]:
        """All that would leave."""
        words = {row["kind"]: row["protection"] for row in list_releases(self.plan, self.algorithm.exchanges)}
        cost = self.plan.epsilon if self.plan is not None and self.plan.has_guarantee else None
        optional = {e.kind for e in self.algorithm.exchanges if e.optional}
        rows = [
            ReleasePreview(
                kind,
                "in some rounds" if kind in optional else "every round",
                {name: tuple(tensor.shape) for name, tensor in group.items()},
                _count_bytes(group),
                words.get(kind, "none"),
                cluster,
                cost,
            )
            for cluster, like in self.update_templates.items()
            for kind, group in like.items()
            if group
        ]
        if image_report_kinds(self.recipe):
            rows.append(ReleasePreview(METRICS, "every evaluated round", {}, 0, words[METRICS], epsilon=cost))
        counts = {part: len(getattr(self.holdings, part)) for part in predicted_parts(self.recipe)}
        *most, last = (f"{count} {'training' if part == 'train' else part}" for part, count in counts.items())
        each = 4 * len(self.dataset.classes) + 16  # probabilities in float32, a label and a patient's number
        why = f"of {', '.join(most)} and {last} images, each with its label; no plan protects it"
        size = sum(counts.values()) * each
        if PREDICTIONS not in self.config.allow.kinds:
            return [
                *rows,
                ReleasePreview(PREDICTIONS, KEPT, {}, 0, "does not leave: allow.kinds in site.yaml lacks it"),
            ]
        return [*rows, ReleasePreview(PREDICTIONS, "after the last round, of each model", {}, size, why)]


def _choose_device(recipe: Recipe, config: SiteConfig) -> Recipe:
    """Where the site says nothing of a device, and the recipe's is not to be had, on the CPU."""
    found = recipe_for_site(recipe, config.device or recipe.engine.device)
    try:
        device_of(found)
    except EngineError:
        if config.device is not None:
            raise EngineError(
                f"the device {config.device!r} is not to be had here; correct `device` in site.yaml, or leave it out"
            ) from None
        return recipe_for_site(recipe, "cpu")
    return found


def _count_bytes(group: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in group.values())
