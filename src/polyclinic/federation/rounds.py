"""The round loop, written once for every engine: `Rounds.play_round` plays a round, `Rounds.play_all` a run.

A round: draw the cohort → charge the privacy budget → broadcast → local work at the sites → sort the replies by site →
check each update (`update_check`) → aggregate → add the server's noise → the server's own training → evaluate the
held-out images → log costs → snapshot. A site's part is `site_runner`.
The model that a site receives in round t is evaluated there before training, and logged as that of round t − 1: so
evaluation costs no extra message, exactly as it would between real hospitals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.core import (
    POOLED,
    Bundle,
    Failure,
    Federation,
    Part,
    Refused,
    RoundFailed,
    Site,
    SiteId,
    StoreError,
    Stream,
    Update,
    failpoint,
)
from polyclinic.evaluation.rows import CostRow
from polyclinic.federation.engines import Answer, Engine
from polyclinic.federation.mailbox import Outbox, in_site_order
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.progress import Outcome, Progress, RoundOptions, advance_progress
from polyclinic.federation.robust.screen import Outlier, UpdateScreen
from polyclinic.federation.round_log import (
    RoundLog,
    accepted_fields,
    clusters_without_updates,
    format_failure,
    mean_report,
    metric_rows,
    outlier_streaks,
)
from polyclinic.federation.secure_aggregation.server import MaskedRound
from polyclinic.federation.secure_aggregation.transcript import Transcript
from polyclinic.federation.server_state import canonical_layout, check_not_mutated, device_of, version_counters
from polyclinic.federation.update_check import ExpectedUpdate, check_address, check_update, split_predictions
from polyclinic.privacy.transforms.base import UpdateTransform
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.storage import messages
from polyclinic.storage.journal import Journal
from polyclinic.storage.signatures import PeerKeys
from polyclinic.training.network import move_bundle

Watch = Callable[[str, Mapping[str, Any]], None]
"""Called with the name of an event, and its facts by name."""
EVALUATION_PATIENCE, EVALUATION_ROUNDS = 600.0, 10.0
"""The final evaluation between real sites waits so many seconds, and as long as so many of the longest round, unless a
deadline is set."""
T = TypeVar("T")


class ReadAnswer(NamedTuple, Generic[T]):
    """A site's reply after the last round, decoded and checked."""

    fields: messages.Fields
    answer: T
    withheld: str = ""
    """Why the site tells nothing."""


@dataclass
class _RoundExchange:
    """The messages of one training round, and what must come back."""

    round: int
    state: Bundle
    outbox: Outbox
    log: RoundLog
    parts: Sequence[Part] = ()
    """The parts of their images that the sites are to report on."""
    layouts: dict[str, tuple[Bundle, int]] = field(default_factory=dict)
    """By cluster: the names, shapes and dtypes of an update as it is sent, and its size in bytes."""


def _drain(updates: list[Update]) -> Iterator[Update]:
    """Yield each of them without keeping it."""
    while updates:
        yield updates.pop(0)


def draw_cohort(sites: Sequence[SiteId], rules: RoundOptions, round: int) -> list[SiteId]:
    """Return the sites of a round, drawn from a public stream, in the federation's order."""
    if rules.cohort is None or rules.cohort >= len(sites):
        return list(sites)
    if rules.cohort_order == "cyclic":
        chosen = [((round - 1) * rules.cohort + place) % len(sites) for place in range(rules.cohort)]
    else:
        generator = Stream(rules.seed, ("run", "cohort", round)).generator()
        chosen = torch.randperm(len(sites), generator=generator)[: rules.cohort].tolist()
    return [sites[place] for place in sorted(chosen)]


class Rounds:
    """The round loop of one run: a federation, an algorithm, an engine, and the journal that a resume reads."""

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        engine: Engine,
        rules: RoundOptions,
        journal: Journal,
        watch: Watch = lambda *_: None,
        evaluate_held_out: Callable[[Bundle], Mapping[str, float | None]] | None = None,
        transforms: Sequence[UpdateTransform] = (),
        budget: PrivacyBudget | None = None,
        server_trainer: Callable[[Bundle, Site], Bundle] | None = None,
        peers: PeerKeys | None = None,
        believed: Mapping[SiteId, int] | None = None,
    ) -> None:
        """`peers`: the sites' public keys, with which the signatures of masked rounds are checked. `believed`: as how
        many images each site counts whose number nobody has registered."""
        self.peers, self.believed = peers, believed or {}
        self.federation, self.algorithm, self.engine = federation, algorithm, engine
        self.rules, self.journal, self.watch, self.evaluate_held_out = rules, journal, watch, evaluate_held_out
        self.transforms, self.budget, self.server_trainer = tuple(transforms), budget, server_trainer
        doubted = [site for site, images in self.believed.items() if images < federation.sites[site]]
        self.screen = UpdateScreen(rules.aggregate, algorithm, rules.update_memory, doubted)
        self.mask = next((stage for stage in transforms if isinstance(stage, Mask)), None)
        self.trainers = [POOLED] if algorithm.pooled else [s for s in federation.sites if s != POOLED]

    def play_all(self) -> Outcome:
        """Play the rounds that are left, after a resume from the last snapshot if there is one, then `finish`."""
        resumed = self.journal.resume()
        state = self.algorithm.init(self.federation)
        state = canonical_layout(state, state)
        if resumed:
            state = canonical_layout(move_bundle(resumed.tensors, device_of(state)), state)
        progress = Progress.from_json(resumed.fields["progress"]) if resumed else Progress(run=self.rules.run)
        if progress.run != self.rules.run:
            raise StoreError(
                "this run was started with other data or another recipe; give the same --data and recipe.yaml to "
                "resume it, or start a new run in another folder"
            )
        if self.budget is not None:
            self.budget.load_charges(self.journal.read_charges())
        self.screen.streaks = outlier_streaks(self.journal.costs, progress.round)
        while progress.round < self.rules.rounds and not progress.stopped:
            if not self.can_afford(state, progress):
                progress = replace(progress, stopped=True, budget_exhausted=True)
            else:
                state, progress = self.play_round(state, progress)
            last = progress.stopped or progress.round == self.rules.rounds
            if last or progress.round % self.rules.snapshot_every == 0:
                self.journal.save_snapshot(progress.round, state, progress.as_json())
        state = self.algorithm.final_state(state)
        failpoint("finished")
        return Outcome(state, progress.round, progress.stopped, progress.budget_exhausted, progress.memory_rounds)

    def can_afford(self, state: Bundle, progress: Progress) -> bool:
        """Return whether the privacy budget covers the next round; raises `RoundFailed` if it covers none."""
        round = progress.round + 1
        if self.budget is None or self.budget.can_afford(round, draw_cohort(self.trainers, self.rules, round), state):
            return True
        if round == 1 and self.budget.was_charged(round):
            raise RoundFailed(
                "round 1 was charged and then cut off, and charged once more it would exceed privacy.epsilon; start "
                "anew in another folder, or raise privacy.epsilon"
            )
        if round == 1:
            raise RoundFailed(
                "privacy.epsilon is too small for one round at this noise; raise privacy.epsilon or privacy.noise"
            )
        return False

    def play_round(self, state: Bundle, progress: Progress) -> tuple[Bundle, Progress]:
        """Play one round: state in, state out."""
        round = progress.round + 1
        failpoint("round-begun")
        cohort, log = draw_cohort(self.trainers, self.rules, round), RoundLog()
        self.watch("round", {"round": round, "cohort": cohort})
        evaluating = self.rules.evaluate_every > 0 and (round - 1) % self.rules.evaluate_every == 0
        held_out = self.evaluate_held_out(state) if self.evaluate_held_out and evaluating else None
        began = time.perf_counter()
        charge = self.budget.charge_round(round, cohort, state, bool(progress.memory_rounds)) if self.budget else None
        self.journal.charge_round(round, cohort, charge)
        reporting = evaluating and (self.budget is None or self.budget.reports_metrics)
        clusters = {site: self.algorithm.cluster_of(state, site) for site in self.trainers}
        updates = self.receive_updates(
            round, state, cohort, progress, ["validation"] if reporting else [], log, clusters
        )
        before, versions = state, version_counters(state)
        # Behind masks there are no single updates; and noise at the server is priced for a plain mean.
        if self.mask is None and (self.budget is None or not self.budget.hides_drift):
            updates = self.screen.screen(updates, state, partial(self._record_outlier, round, log))
        if first := list(islice(updates, 1)):
            state = self.algorithm.aggregate(state, chain(_drain(first), updates))
        check_not_mutated(before, versions)
        if self.budget is not None and log.accepted:
            state = self.budget.add_server_noise(round, before, state, log.accepted_weights)
        state = canonical_layout(state, before)
        if self.server_trainer is not None and self.algorithm.trains_on_server() and log.accepted:
            server = Site("server", 0, round, self.rules.rounds, self._learning_rate(round, progress))
            state = canonical_layout(self.server_trainer(state, server), before)
        if log.accepted < max(1, self.rules.quorum):
            self.journal.append_cost("failed round", round, time.perf_counter() - began, log.to_json())
            raise RoundFailed(format_failure(round, log, self.rules.quorum))
        failpoint("aggregated")
        seconds = time.perf_counter() - began
        self.journal.append_metrics(metric_rows(round, log, held_out))
        self.journal.append_cost("round", round, seconds, log.to_json())
        memory_rounds = {**progress.memory_rounds, **dict.fromkeys(sorted(log.sites_with_memory), round)}
        progress = advance_progress(replace(progress, round=round, memory_rounds=memory_rounds), log, self.rules)
        means = (
            {m: mean_report(log, m, self.rules.aggregate) for m in ("loss", "accuracy", "auc")} if evaluating else {}
        )
        facts = {"round": round, "seconds": seconds, "stopped": progress.stopped, **means}
        self.watch("round done", {**facts, "clusters_without_updates": clusters_without_updates(log, clusters)})
        return state, progress

    def _record_outlier(self, round: int, log: RoundLog, found: Outlier) -> None:
        log.add(found.site, outlier=found.done, ratio=found.ratio, outlier_rounds=found.running)
        self.watch("outlier", {"round": round, **asdict(found), "why": found.sentence})

    def _learning_rate(self, round: int, progress: Progress) -> float:
        rules = self.rules
        return self.algorithm.training.optimiser.lr * rules.schedule.lr_factor(
            round, rules.rounds, progress.lr_reductions
        )

    def receive_updates(
        self,
        round: int,
        state: Bundle,
        cohort: Sequence[SiteId],
        progress: Progress,
        parts: list[Part],
        log: RoundLog,
        clusters: Mapping[SiteId, str],
    ) -> Iterator[Update]:
        """Send the round's messages and yield accepted updates by cluster and site; `log` gets an entry per site."""
        exchange = _RoundExchange(
            round, state, self.prepare_outbox("train", round, state, cohort, parts, progress), log, parts
        )
        if self.mask is not None:
            yield self._receive_sum(exchange, self.mask, cohort, parts, progress)
            return
        arrivals = self.engine.exchange(round, exchange.outbox, self.rules.deadline)
        order = list(dict.fromkeys(clusters[site] for site in cohort))
        # Side by side, so that each cluster's updates can be aggregated one at a time.
        by_cluster = sorted(cohort, key=lambda site: order.index(clusters[site]))
        for site, reply in in_site_order(arrivals, by_cluster, log.add_refusal):
            log.add(site, down=exchange.outbox.sizes.get(site, 0))
            if clusters[site]:
                log.add(site, cluster=clusters[site])
            update = self._receive_update(exchange, site, clusters[site], reply)
            del reply
            self.watch("site", {"round": round, "site": site, **log.sites[site].to_json()})
            if update is not None:
                log.accepted += 1
                log.accepted_weights.append(update.examples if self.algorithm.training.weights == "examples" else 1.0)
                failpoint("reply-accepted")
                precision = 1.0 if self.budget is None else self.budget.plan.precision_of(site)
                shallow_copy = replace(update, tensors=dict(update.tensors), precision=precision)
                del update
                yield shallow_copy
                shallow_copy.tensors.clear()  # frees the tensors, even if something still refers to the update

    def _receive_sum(
        self, exchange: _RoundExchange, mask: Mask, cohort: Sequence[SiteId], parts: list[Part], progress: Progress
    ) -> Update:
        """Play a round whose updates are added up behind masks, and return their mean as one update."""
        round, state, log, rules = exchange.round, exchange.state, exchange.log, self.rules
        transcript = Transcript(self.journal.masks, self.journal.oldest_snapshot())
        plain = {e.kind: state.get(e.like, {}) for e in self.algorithm.exchanges()}
        prepare = partial(self.prepare_outbox, round=round, state=state, parts=parts, progress=progress)
        expected = partial(self._expected_update, exchange)
        where = self.algorithm, self.engine, rules.deadline, prepare, expected, plain, log, transcript
        update = MaskedRound(mask, *where, rules.run, round, rules.quorum, self.peers).play(cohort)
        for site, outcome in log.sites.items():
            self.watch("site", {"round": round, "site": site, **outcome.to_json()})
        return update

    def _receive_update(self, exchange: _RoundExchange, site: SiteId, cluster: str, reply: Answer) -> Update | None:
        """Return a site's update if `check_update` accepts it; the outcome is logged either way."""
        log, received = exchange.log, exchange.outbox.take(site)
        if isinstance(reply, Failure):
            log.add(site, up=0, outcome=reply.kind, why=reply.sentence)
            return None
        try:
            expected = self._expected_update(exchange, site, cluster, received)
            accepted = check_update(reply, expected, self.transforms, self.algorithm.check_update)
        except Refused as refusal:
            log.add(site, up=messages.message_size(reply), outcome="refused", kind=refusal.kind, why=str(refusal))
            return None
        complete = not isinstance(reply, bytes) and reply.tensors.keys() == expected.like.keys()
        size = messages.message_size(reply, exchange.layouts[cluster][1] if complete else None)
        drift = None if self.budget is not None and self.budget.hides_drift else accepted.drift
        log.add(site, up=size, **accepted_fields(accepted.fields, accepted.update.scalars, drift))
        log.reports[site] = accepted.report
        if accepted.fields.get("keeps_memory") is True:
            log.sites_with_memory.add(site)
        most = self.believed.get(site, accepted.update.examples)
        return replace(accepted.update, examples=min(accepted.update.examples, most))

    def prepare_outbox(
        self,
        purpose: str,
        round: int,
        state: Bundle,
        sites: Sequence[SiteId],
        parts: list[Part],
        progress: Progress = Progress(),
    ) -> Outbox:
        """Return the messages to `sites`: the round, the learning rate, the parts to report on, and the weights."""
        rules = self.rules
        common = {
            "run": rules.run,
            "seed": rules.seed,
            "purpose": purpose,
            "round": round,
            "rounds": rules.rounds,
            "parts": parts,
            "oldest_snapshot": self.journal.oldest_snapshot(),
        }
        counted, rate = progress.memory_rounds, self._learning_rate(round, progress)
        fields = {
            site: {
                **common,
                "site": site,
                "lr": rate * self.algorithm.lr_scale(self.algorithm.cluster_of(state, site)),
                "memory_round": counted.get(site, 0),
            }
            for site in sites
        }
        return Outbox(fields, partial(self.algorithm.broadcast, state))

    def _expected_update(
        self, exchange: _RoundExchange, site: SiteId, cluster: str, received: Bundle
    ) -> ExpectedUpdate:
        exchanges = self.algorithm.exchanges()
        if cluster not in exchange.layouts:
            share = self.algorithm.cluster_state(exchange.state, cluster)
            like = {exchange.kind: share.get(exchange.like, {}) for exchange in exchanges}
            for transform in self.transforms:
                like = transform.encode(like, received, Stream(0))  # only the layout counts, not the values
            exchange.layouts[cluster] = like, messages.body_size(like)
        return ExpectedUpdate(
            run=self.rules.run,
            round=exchange.round,
            site=site,
            received=received,
            like=exchange.layouts[cluster][0],
            optional=frozenset(exchange.kind for exchange in exchanges if exchange.optional),
            examples=self._most_examples(site),
            held=self.federation.held.get(site, {}),
            reports=[(model, part) for part in exchange.parts for model in self.algorithm.models(received, None)],
            max_norm=self.rules.max_norm,
        )

    def _most_examples(self, site: SiteId) -> int:
        """Return the most examples that a reply may claim: behind masks no weight can be lowered afterwards."""
        told = self.federation.sites[site]
        return told if self.mask is None else min(told, self.believed.get(site, told))

    def collect_predictions(
        self, outcome: Outcome, parts: list[Part], extra_tensors: Bundle | None = None
    ) -> dict[SiteId, Bundle]:
        """Return what each site of a simulation predicts after the last round, by `model|part`, with the final models
        and with those in `extra_tensors`."""

        def read(_: SiteId, reply: bytes | messages.Message) -> ReadAnswer[Bundle]:
            message = reply if isinstance(reply, messages.Message) else messages.decode(reply)
            predictions = message.tensors.get("predictions", {})
            return ReadAnswer(message.fields, split_predictions(predictions, len(self.federation.classes)))

        return self.evaluate_sites(outcome, parts, read, extra_tensors)

    def evaluate_sites(
        self,
        outcome: Outcome,
        parts: list[Part],
        read: Callable[[SiteId, bytes | messages.Message], ReadAnswer[T]],
        extra_tensors: Bundle | None = None,
        withheld: dict[SiteId, str] | None = None,
    ) -> dict[SiteId, T]:
        """Ask every site for its evaluation of the final models, and of the models in `extra_tensors`.

        `read` decodes and checks a site's reply, or raises `Refused`. With `withheld`, a site that fails, is refused or
        stays silent is left out, and noted there with the reason, as is one that tells nothing; without it, the run
        ends.
        """
        round, began, log = outcome.rounds + 1, time.perf_counter(), RoundLog()
        sites = [s for s in self.federation.sites if s != POOLED]
        self.journal.charge_round(round, sites)
        outbox = self.prepare_outbox(
            "evaluate", round, outcome.state, sites, parts, Progress(memory_rounds=outcome.memory_rounds)
        )
        if extra_tensors:
            outbox.tensors = lambda site: {**self.algorithm.broadcast(outcome.state, site), **extra_tensors}
        found: dict[SiteId, T] = {}
        deadline = self.rules.deadline if withheld is None else self._evaluation_deadline()
        for site, reply in in_site_order(self.engine.exchange(round, outbox, deadline), sites, lambda *_: None):
            outbox.take(site)
            try:
                if isinstance(reply, Failure):
                    raise Refused(reply.kind, reply.sentence)
                answer = read(site, reply)
                check_address(answer.fields, self.rules.run, round, site)
            except Refused as refusal:
                failure = reply if isinstance(reply, Failure) else Failure("refused", str(refusal))
                log.add(site, outcome=failure.kind, why=failure.sentence)
                self.watch("evaluated", {"site": site, **log.sites[site].to_json()})
                if withheld is None:
                    raise RoundFailed(f"site {site} could not be evaluated: {failure.sentence}") from None
                withheld[site] = f"{failure.kind}: {failure.sentence}"
                continue
            found[site], facts = answer.answer, {}
            if answer.withheld and withheld is not None:
                facts = {"outcome": "withheld", "why": answer.withheld}
                withheld[site] = answer.withheld
            log.add(site, down=outbox.sizes[site], up=messages.message_size(reply), **facts)
            self.watch("evaluated", {"site": site, **facts})
        self.journal.append_cost("evaluation", round, time.perf_counter() - began, log.to_json())
        return found

    def _evaluation_deadline(self) -> float:
        """Seconds that the evaluation waits for a site: no run waits for ever for figures alone."""
        rounds = [row.seconds for row in self.journal.costs if isinstance(row, CostRow) and row.event == "round"]
        return self.rules.deadline or max(EVALUATION_PATIENCE, EVALUATION_ROUNDS * max(rounds, default=0.0))
