"""Takes part in one run at one site: trains and evaluates for the server, charges privacy, checks every reply.

`message_handler.py` creates a `Participation` from the `begin` message and calls it for the message of every round. It
is assembled by the same code as a simulation (`runs/assemble.py`), with the same random streams, so the bits are the
same. Classes, shape and noise, which depend on other sites, come with the `begin` message, and the first weights with
the first round, so no file that a recipe names is read here. `policy.py` decides what may leave.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from polyclinic.algorithms.base import WEIGHT_KINDS, Algorithm, classifier_weights
from polyclinic.algorithms.baselines.cross_site import CrossSite
from polyclinic.algorithms.wrappers.clustered import CLUSTER_MARKER, Clustered
from polyclinic.algorithms.wrappers.ensemble import ENSEMBLE
from polyclinic.config.identity import predicted_parts
from polyclinic.config.recipe import Recipe
from polyclinic.core import STUDENT, Bundle, DataError, EngineError, Fit, Refused, SiteId, Stream, Work
from polyclinic.data.patients import max_images_per_patient
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.orders import check_first_weights, check_learning_rate, check_tensors
from polyclinic.deploy.site.policy import (
    METRICS,
    PREDICTIONS,
    check_images,
    check_kinds,
    check_predicted,
    check_predictions,
    check_scalars,
    check_sent_kinds,
    check_sites,
    images_of_job,
    recipe_digest,
)
from polyclinic.deploy.site.privacy_account import PrivacyAccount
from polyclinic.deploy.site.scores import HomeEvaluation, answer_evaluation, noised_scores
from polyclinic.evaluation.site_scores import FinalScores
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.federation.job_loop import JobLoop
from polyclinic.federation.rounds import draw_cohort
from polyclinic.federation.secure_aggregation.assembly import SiteIdentity, mask_of
from polyclinic.federation.site_limits import read_no_permission
from polyclinic.federation.site_runner import SiteRunner, drive_jobs
from polyclinic.federation.update_check import split_predictions
from polyclinic.privacy.plan import PrivacyConfig, PrivacyPlan, least_metrics_noise
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.runs.assemble import RunSetup, assemble, initial_states, inner_algorithm, round_options
from polyclinic.runs.final_evaluation import SCORES, rounded_bytes
from polyclinic.runs.networks import device_of, recipe_for_site
from polyclinic.runs.privacy_plan import bind_plan, noise_secret
from polyclinic.runs.sites import FederatedDataset
from polyclinic.storage import messages
from polyclinic.storage.site_memory import SiteMemory

FIELD_KINDS = {"report": METRICS, SCORES: METRICS, "scalars": "scalars"}
"""The kinds of data in a reply's fields. Scalars are numbers that an algorithm needs, such as its number of steps."""


@dataclass(frozen=True)
class RunTerms:
    """The terms of a run, from its `begin` message."""

    run: str
    recipe: Recipe
    classes: tuple[str, ...]
    channels: int
    size: int
    sites: tuple[SiteId, ...] = ()
    """All sites of the run, in the server's order; () in a preview."""
    noise: float | None = None
    """This site's noise in the server's privacy plan; None without a plan, or in a preview: the site computes it."""
    metrics_noise: float = math.inf
    """The noise on metrics, if they are reported as noised counts."""

    @cached_property
    def digest(self) -> str:
        """A hash of all terms."""
        metrics_noise = None if math.isinf(self.metrics_noise) else self.metrics_noise
        shape = self.classes, self.channels, self.size
        values = self.run, self.recipe.to_yaml(), *shape, self.sites, self.noise, metrics_noise
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    @cached_property
    def recipe_digest(self) -> str:
        return recipe_digest(self.recipe)


MESSAGE_ALLOWANCE = 256 << 20
SLACK = 0.998
"""Two machines that solve for the same noise differ by 0.1 % at most (`privacy.accounting.noise_for`)."""


class Participation:
    """One run at this site.

    Args:
        config: site.yaml.
        terms: The terms of the run.
        dataset: This site's images.
        memory: Where the site's memory of the run is kept.
        read_key: Returns the run's key, whence its noise comes; called before the first round.
        identity: What the site needs to mask its updates, if it knows other sites' keys.
        read_permission: Returns the mark of the permission by which a round is played again, as in `SitePrivacyLimits`.
    """

    def __init__(
        self,
        config: SiteConfig,
        terms: RunTerms,
        dataset: FederatedDataset,
        memory: SiteMemory,
        read_key: Callable[[], int],
        identity: SiteIdentity | None = None,
        read_permission: Callable[[int], str] = read_no_permission,
    ) -> None:
        self.config, self.terms, self.site = config, terms, config.site
        self.recipe = recipe = _choose_device(terms.recipe, config)
        torch.set_num_threads(recipe.engine.threads)
        keep_freed_memory()
        self.setup = assemble(recipe, dataset, self._make_plan, site=self.site, run_sites=len(terms.sites) or None)
        self._memory, self._read_key, self._identity = memory, read_key, identity
        self._read_permission = read_permission

    @cached_property
    def runner(self) -> SiteRunner:
        if self.mask is not None and self._identity is None:
            raise Refused(
                "masks",
                f"{self.site} has no keys of other sites, without which it masks nothing; ask the coordinator for the "
                "list of sites of a new kit",
            )
        runner = self.setup.make_runner(self.site, self._memory, self._noise_secret(), self._identity)
        if runner.limits is not None:
            runner.limits = replace(runner.limits, read_permission=self._read_permission)
        return runner

    @property
    def mask(self) -> Mask | None:
        """The stage of the recipe that masks updates, if it has one."""
        return mask_of(self.setup.transforms)

    def exchange_masks(self, message: messages.Message) -> messages.Message:
        """Answer a message about the masks of a round, in which nothing depends on images."""
        return self.runner.reply(message)

    def _make_plan(self, draft: RunSetup) -> PrivacyPlan:
        """Return the server's plan for this site alone: with the server's noise, priced by this site's own counts."""
        config, terms, site = draft.recipe.privacy, self.terms, self.site
        assert config is not None
        asked = config
        if terms.noise is not None:
            asked = replace(config, noise=terms.noise, noise_per_site=None, epsilon=None, metrics="suppress")
        rules, networks = replace(round_options(draft.recipe, ""), cohort=None), draft.networks.by_cluster
        plan = bind_plan(asked, draft.algorithm, draft.federation, draft.sites, networks, rules)
        if terms.noise is not None and config.noise not in (None, terms.noise):
            raise Refused("privacy", f"the recipe's noise is {config.noise:g}, but the plan's is {terms.noise:g}")
        if terms.noise is not None:
            self._check_metrics_noise(config, plan)
        if self.config.budget and plan.no_guarantee_reason:
            raise Refused("budget", f"{site} has a privacy budget, and this recipe gives no privacy guarantee")
        return plan if terms.noise is None else replace(plan, config=config, metrics_noise=terms.metrics_noise)

    def _check_metrics_noise(self, config: PrivacyConfig, plan: PrivacyPlan) -> None:
        """Raise `Refused` for less noise on metrics than this site's validation images need beside its training images;
        where the recipe names ε, `PrivacyAccount` refuses what would exceed it."""
        noise, site = self.terms.metrics_noise, self.site
        if (config.metrics == "count") != math.isfinite(noise):
            raise Refused("privacy", "noise on metrics is for plans whose metrics are noised counts, and for no others")
        if config.metrics != "count" or config.epsilon is not None:
            return
        least = least_metrics_noise(replace(plan, config=config), len(self.terms.sites))
        if noise < SLACK * least:
            raise Refused(
                "privacy",
                f"the noise on metrics is {noise:.4g}, and the validation images of {site} need {least:.4g} to pay no "
                "more than its training images",
            )

    def _noise_secret(self) -> Stream | None:
        """Return the source of this site's noise, named by all that a release depends on, the images among it."""
        config = self.recipe.privacy
        if config is None:
            return None
        if config.randomness == "seed":
            return noise_secret(self.recipe, None).child("site", self.site)
        named = self.terms.digest, self.setup.dataset.fingerprint
        return Stream(self._read_key(), ("secret", *named, "site", self.site))

    @cached_property
    def account(self) -> PrivacyAccount | None:
        """The run's entries in the site's ledger; None without a privacy plan."""
        if self.setup.plan is None:
            return None
        run = f"{self.terms.run}-{self.terms.digest[:16]}-{self.setup.dataset.fingerprint[:16]}"
        return PrivacyAccount(
            self.config.folder, self.site, run, self.setup.plan, self.config.budget, self.recipe.cohort is not None
        )

    def check_terms(self) -> None:
        """Raise `Refused` if the run has too few sites, or too few images stand behind this site's updates."""
        site, allow = self.site, self.config.allow
        if self.terms.sites:
            check_sites(self.terms.sites, site, allow)
        training, held = self.recipe.training, len(self.setup.sites[site].train)
        check_images(images_of_job(training, held), site, allow, held)

    def takes_part(self, round: int) -> bool:
        """Whether the recipe's public draw has this site in a round."""
        return self.site in draw_cohort(self.terms.sites or (self.site,), round_options(self.recipe, ""), round)

    def check_order(self, message: messages.Message) -> None:
        """Raise `Refused` unless an order has the recipe's learning rate, this site's cluster, and proper tensors, and
        asks for nothing that may not leave. No image is looked at for that."""
        fields, sent, site = message.fields, message.tensors, self.site
        evaluating, round = fields["purpose"] == "evaluate", int(fields["round"])
        cluster = self._read_cluster(sent)
        if cluster and not evaluating and cluster != self.setup.networks.cluster_of(site, round):
            raise Refused("site", f"{site} is not in cluster {cluster!r:.60} in round {round}")
        check_learning_rate(fields["lr"], self.recipe, round, self.setup.algorithm.lr_scale(cluster), site)
        like, optional = self.broadcast_templates[cluster], self._optional_kinds[cluster]
        if evaluating:
            like = {**like, **self._templates_after_last_round(cluster)}
            optional |= like.keys() - set(WEIGHT_KINDS)
        marker: Bundle = {CLUSTER_MARKER: {cluster: torch.ones(())}} if cluster else {}
        check_tensors(sent, {**like, **marker}, optional if evaluating or round > 1 else frozenset(), site)
        if round == 1 and not evaluating:
            own = {kind: group for kind, group in sent.items() if kind != CLUSTER_MARKER}
            check_first_weights(own, like, self._given_digest(cluster), site)
        self._check_parts(evaluating, fields["parts"])
        self.runner.check_order(message)

    def _check_parts(self, evaluating: bool, parts: Sequence[str]) -> None:
        """Raise `Refused` if an order asks about a part of the images of which nothing may leave."""
        if evaluating and not set(parts) <= set(predicted_parts(self.recipe)):
            why = "are protected by a plan" if self.setup.plan else "the recipe leaves out (evaluate.train: false)"
            raise Refused("privacy", f"{self.site} was asked for scores of training images, which {why}")
        if parts and not evaluating:
            check_kinds((METRICS,), self.site, self.config.allow)

    def _read_cluster(self, sent: Bundle) -> str:
        if not isinstance(self.setup.algorithm, Clustered):
            return ""
        (cluster, *others) = sent.get(CLUSTER_MARKER, {}) or ("",)
        if others or cluster not in self.broadcast_templates:
            raise Refused("site", f"{self.site} was assigned to cluster {cluster!r:.60}, but has no model for it")
        return cluster

    def _given_digest(self, cluster: str) -> str | None:
        """The SHA-256 of first weights that the recipe takes from elsewhere than its seed."""
        return self.terms.recipe.trained_models[cluster].sha256

    def _templates_after_last_round(self, cluster: str) -> Bundle:
        """What comes with the order for evaluation: the final weights, and the student or all sites' models."""
        inner, sites = self._inner_algorithm, self.terms.sites
        like = inner.broadcast(inner.final_state(self._initial_states[cluster]), self.site)
        found = dict(like)
        if self.setup.networks.student is not None:
            student = self.setup.networks.student.copy_weights()
            found |= {f"{kind}@{STUDENT}": group for kind, group in student.items()}
        if self.recipe.ensemble:
            members = [(kind, *item) for kind, group in classifier_weights(like).items() for item in group.items()]
            found[ENSEMBLE] = {f"{kind}/{site}/{name}": tensor for kind, name, tensor in members for site in sites}
        if isinstance(inner, CrossSite):
            found |= {f"{kind}@{site}": like.get(kind, {}) for kind in WEIGHT_KINDS for site in sites}
        return found

    def train(self, message: messages.Message) -> messages.Message:
        """Train for a round, after charging it to the site's ledger; after `check_order`, and before `check_reply`."""
        site_round = self.runner.begin_round(message)
        if self.account is not None:
            charge = self.account.round_releases(len(site_round.report))
            self.account.charge_round(site_round.site.round, _charge_name(message, site_round.site.secret), charge)
        with hide_reasons():
            update, memory = drive_jobs(
                self._check_jobs(self.runner.start_local(site_round)),
                lambda job, number: self.runner.run_job(job, site_round, number),
            )
            return self.runner.finish_round(site_round, update, memory)

    def _check_jobs(self, work: Work) -> Work:
        """Return the same work, which is refused before a training job that uses too few images."""
        jobs, held = JobLoop(work), len(self.setup.sites[self.site].train)
        for job in jobs:
            if isinstance(job, Fit):
                check_images(images_of_job(job.training, held, job.full_batch), self.site, self.config.allow, held)
            jobs.result = yield job
        return jobs.returned

    def evaluate(self, message: messages.Message) -> HomeEvaluation:
        """Score the final models on this site's images, and decide what of it leaves; after `check_order`."""
        with hide_reasons():
            predicted = self.runner.evaluate(message).tensors.get(PREDICTIONS, {})
            groups = split_predictions(predicted, len(self.setup.dataset.classes))
        return answer_evaluation(
            self.recipe,
            self.site,
            groups,
            lambda: check_kinds((METRICS,), self.site, self.config.allow),
            lambda: check_predictions(self.site, self.config.allow, self.config.budget),
            lambda scores: self._release_noised(message, groups, scores),
        )

    def _release_noised(self, message: messages.Message, groups: Bundle, scores: FinalScores) -> FinalScores:
        """Return noised scores of the models that rounds report on, after charging them to the test images."""
        limits, plan = self.runner.limits, self.setup.plan
        assert limits is not None
        assert plan is not None
        assert self.account is not None
        models = tuple(model for model, parts in scores.models.items() if "test" in parts)[: plan.models]
        secret = limits.noise_stream(message, self.runner.load_memory(message), self.runner.network.device.type)
        tests = self.setup.sites[self.site].test
        largest = max(max_images_per_patient(tests), plan.config.group or 1)
        charge = self.account.final_releases(len(models), largest)
        self.account.charge_round(int(message.fields["round"]), _charge_name(message, secret), charge)
        return noised_scores(groups, models, plan.metrics_noise, secret)

    def check_reply(self, reply: messages.Message) -> dict[str, int]:
        """Return the kinds of a reply with their bytes.

        Raises `Refused` if a kind is not allowed, or the algorithm's tensors are larger than in the agreed recipe.
        """
        sent = {kind: count_bytes(group) for kind, group in reply.tensors.items()}
        fields = reply.fields
        check_predicted(reply.tensors.get(PREDICTIONS, {}), self.site)
        check_scalars(fields.get("scalars", {}), self.scalars, self.site)
        reported = {kind: len(json.dumps(fields[key])) for key, kind in FIELD_KINDS.items() if fields.get(key)}
        tests, classes = len(self.setup.sites[self.site].test), len(self.setup.dataset.classes)
        asked = {METRICS: reported.get(METRICS, 0)}
        if "report" not in fields:
            asked[PREDICTIONS] = rounded_bytes(tests, classes)
        metrics = {METRICS: reported[METRICS]} if METRICS in reported else {}
        check_sent_kinds({**sent, **metrics}, {**self.byte_limits, **asked}, self.site, self.config.allow)
        return {**sent, **reported}

    @cached_property
    def byte_limits(self) -> dict[str, int]:
        """The most bytes of each kind that the algorithm sends in a round."""
        sizes = [(kind, count_bytes(group)) for like in self.update_templates.values() for kind, group in like.items()]
        return {kind: max(size for other, size in sizes if other == kind) for kind, _ in sizes}

    @cached_property
    def update_templates(self) -> dict[str, Bundle]:
        """For each cluster an update of the right names and shapes, as it leaves the site."""
        found = {}
        for cluster, received in self.broadcast_templates.items():
            like: Bundle = {
                e.kind: self._initial_states[cluster].get(e.like, {}) for e in self.setup.algorithm.exchanges()
            }
            for stage in self.setup.transforms:
                like = stage.encode(like, received, Stream(0))
            found[cluster] = like
        return found

    @cached_property
    def largest_message(self) -> int:
        """The most bytes of a message of this run: those of its tensors, with room for a student and for lists."""
        return MESSAGE_ALLOWANCE + 4 * max(map(messages.body_size, self.broadcast_templates.values()), default=0)

    @cached_property
    def broadcast_templates(self) -> dict[str, Bundle]:
        """For each cluster the tensors that this site receives in round 1."""
        return {
            cluster: self._inner_algorithm.broadcast(state, self.site)
            for cluster, state in self._initial_states.items()
        }

    @cached_property
    def _optional_kinds(self) -> dict[str, frozenset[str]]:
        """For each cluster the kinds that a site receives in its first round only."""
        started: Bundle = {"started": {self.site: torch.ones(())}}
        later = {
            cluster: self._inner_algorithm.broadcast({**state, **started}, self.site)
            for cluster, state in self._initial_states.items()
        }
        return {
            cluster: frozenset(kind for kind in like if not later[cluster].get(kind))
            for cluster, like in self.broadcast_templates.items()
        }

    @cached_property
    def scalars(self) -> frozenset[str]:
        """The names of the numbers that a reply may hold."""
        forgetting = ("forgotten", "gained", "cases") if self.recipe.evaluate.forgetting else ()
        return frozenset((*self.recipe.build_algorithm().scalars, *forgetting))

    @cached_property
    def _initial_states(self) -> dict[str, Bundle]:
        """For each cluster the server's state before round 1. It depends on other sites by their names only."""
        own = self.setup.federation.sites
        return initial_states(self.setup, {site: own.get(site, 1) for site in self.terms.sites} or own)

    @property
    def _inner_algorithm(self) -> Algorithm:
        return inner_algorithm(self.setup.algorithm)


def _charge_name(message: messages.Message, secret: Stream | None) -> str:
    """Return the name of a release in the ledger: its purpose, and the stream of its noise."""
    assert secret is not None
    return f"{message.fields['purpose']}-{secret.integer():016x}"


@contextlib.contextmanager
def hide_reasons() -> Iterator[None]:
    """Turn a refusal while images are at work into an `EngineError`, of which the server learns no reason: it chooses
    the weights, and so could learn from a reason what an image is like. The site's own log has it."""
    try:
        yield
    except (Refused, DataError) as error:
        raise EngineError(str(error)) from error


def _choose_device(recipe: Recipe, config: SiteConfig) -> Recipe:
    """The recipe with the device of site.yaml, else its own; the CPU if that is not available here."""
    found = recipe_for_site(recipe, config.device or recipe.engine.device)
    try:
        device_of(found)
    except EngineError:
        if config.device is not None:
            raise EngineError(
                f"the device {config.device!r} is not available on this machine; correct `device` in site.yaml, or "
                "leave it out"
            ) from None
        return recipe_for_site(recipe, "cpu")
    return found


def count_bytes(group: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.nbytes for tensor in group.values())
