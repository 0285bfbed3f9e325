"""The round loop, written once, used by every engine.

cohort → charge → broadcast → sites work → replies, put into site order → validate → aggregate → cost → snapshot.
The model a site receives in round t is evaluated there, before training, and entered as round t − 1: so evaluation
costs no extra message, exactly as it would between real hospitals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal

import torch

from polyclinic.core.contract import Algorithm, Bundle, Failure, Federation, Part, Site, SiteId, Stage, Stream, Update
from polyclinic.core.errors import Refused, RoundFailed, StoreError
from polyclinic.core.failpoints import failpoint
from polyclinic.federation.engines import Answer, Engine
from polyclinic.federation.mailbox import Outbox, in_site_order
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.reply_checks import check_report, split_predictions, training_seconds
from polyclinic.federation.round_log import HELD_OUT as HELD_OUT
from polyclinic.federation.round_log import (
    RoundLog,
    clusters_without_updates,
    failure_entry,
    format_failure,
    mean_report,
    metric_rows,
)
from polyclinic.federation.schedules import EarlyStop, Schedule
from polyclinic.federation.server_state import canonical_layout, check_not_mutated, device_of, version_counters
from polyclinic.storage import messages
from polyclinic.storage.journal import Journal
from polyclinic.training.network import move_bundle

Watch = Callable[[str, Mapping[str, Any]], None]
HeldOutEvaluation = Callable[[Bundle], dict[str, Any]]
ServerStep = Callable[[Bundle, Site], Bundle]
"""The server's own work on its public set."""
POOLED: SiteId = "pooled"
PLATEAU_THRESHOLD = 1e-4
"""The share by which a loss must fall to count as better for the plateau schedule, as in torch."""
LOWER_IS_BETTER = ("loss", "ece")


@dataclass(frozen=True)
class Rules:
    """How a run proceeds, whatever the algorithm and the engine."""

    rounds: int
    run: str = "run"
    seed: int = 0
    cohort: int | None = None
    """Sites per round; None: all."""
    cohort_order: Literal["random", "cyclic"] = "random"
    """A cohort is drawn anew each time, or sites take turns in the federation's order."""
    quorum: int = 1
    deadline: float | None = None
    schedule: Schedule = Schedule()
    early_stop: EarlyStop | None = None
    evaluate_every: int = 1
    """Evaluate where the round number is a multiple of this; 0: only at the end."""
    snapshot_every: int = 1
    max_norm: float = 1e6


@dataclass(frozen=True)
class Progress:
    """The loop's own state: what resume needs beside the algorithm's."""

    round: int = 0
    cuts: int = 0
    best_loss: float = math.inf
    stale: int = 0
    best: float = math.inf
    waited: int = 0
    stopped: bool = False
    broke: bool = False
    """Stopped because the next round could not be paid by the privacy plan."""
    run: str = ""
    """The run's own mark, of recipe and data: resume goes on with the same ones or not at all."""
    remembering: Mapping[SiteId, int] = field(default_factory=dict)
    """Sites that keep a memory, and the last round of theirs that counted: others are as if they had never been."""

    def as_json(self) -> dict[str, Any]:
        return {k: None if v == math.inf else v for k, v in asdict(self).items()}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Progress:
        values: dict[str, Any] = {k: math.inf if v is None else v for k, v in fields.items()}
        return Progress(**values)


@dataclass(frozen=True)
class Outcome:
    """The end of a run: the final state, how many rounds were played, and whether it stopped early."""

    state: Bundle
    rounds: int
    stopped_early: bool
    budget_exhausted: bool = False
    memory_rounds: Mapping[SiteId, int] = field(default_factory=dict)


def _drain(updates: list[Update]) -> Iterator[Update]:
    """Each of them, without keeping it."""
    while updates:
        yield updates.pop(0)


def draw_cohort(sites: Sequence[SiteId], rules: Rules, round: int) -> list[SiteId]:
    """The sites of a round, from a public stream, in the federation's order."""
    if rules.cohort is None or rules.cohort >= len(sites):
        return list(sites)
    if rules.cohort_order == "cyclic":
        first = (round - 1) * rules.cohort
        taking = {(first + place) % len(sites) for place in range(rules.cohort)}
        return [site for place, site in enumerate(sites) if place in taking]
    generator = Stream(rules.seed, ("run", "cohort", round)).generator()
    chosen = torch.randperm(len(sites), generator=generator)[: rules.cohort]
    return [sites[i] for i in sorted(chosen.tolist())]


class Rounds:
    """A run in progress: a federation, an algorithm, an engine, and the journal that makes it survive."""

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        engine: Engine,
        rules: Rules,
        journal: Journal,
        watch: Watch = lambda *_: None,
        evaluate_held_out: HeldOutEvaluation | None = None,
        transforms: Sequence[Stage] = (),
        budget: PrivacyBudget | None = None,
        server_trainer: ServerStep | None = None,
    ) -> None:
        self.federation, self.algorithm, self.engine = federation, algorithm, engine
        self.rules, self.journal, self.watch, self.evaluate_held_out = rules, journal, watch, evaluate_held_out
        self.transforms, self.budget, self.server_trainer = tuple(transforms), budget, server_trainer
        self._expected_layouts: dict[tuple[int, str], tuple[Bundle, int]] = {}
        """What a group's updates must look like in a round, and their bytes."""
        self.trainers = [POOLED] if algorithm.pooled else [s for s in federation.sites if s != POOLED]

    def play_all(self) -> Outcome:
        """Play all rounds that are left, then finish."""
        resumed = self.journal.resume()
        state = self.algorithm.init(self.federation)
        state = canonical_layout(state, state)
        if resumed:
            state = canonical_layout(move_bundle(resumed.state, device_of(state)), state)
        progress = Progress.from_json(resumed.progress) if resumed else Progress(run=self.rules.run)
        if progress.run != self.rules.run:
            raise StoreError(
                "this run was begun with other data or another recipe than it would now go on with; give it the same "
                "--data and recipe.yaml, or start anew in another folder"
            )
        if self.budget is not None:
            self.budget.load_charges(self.journal.read_charges())
        while progress.round < self.rules.rounds and not progress.stopped:
            if not self.can_afford(state, progress):
                progress = replace(progress, stopped=True, broke=True)
            else:
                state, progress = self.play_round(state, progress)
            due = progress.round % self.rules.snapshot_every == 0 or progress.round == self.rules.rounds
            if due or progress.stopped:
                self.journal.save_snapshot(progress.round, state, progress.as_json())
        state = self.algorithm.finish(state)
        failpoint("finished")
        return Outcome(state, progress.round, progress.stopped, progress.broke, progress.remembering)

    def can_afford(self, state: Bundle, progress: Progress) -> bool:
        """Whether the privacy plan, if there is one, can pay the next round."""
        round = progress.round + 1
        if self.budget is None or self.budget.can_afford(round, draw_cohort(self.trainers, self.rules, round), state):
            return True
        if round == 1:
            raise RoundFailed("not even one round can be paid by privacy.epsilon; raise it or privacy.noise")
        return False

    def play_round(self, state: Bundle, progress: Progress) -> tuple[Bundle, Progress]:
        """One round: state in, state out."""
        round = progress.round + 1
        failpoint("round-begun")
        cohort, book = draw_cohort(self.trainers, self.rules, round), RoundLog()
        self.watch("round", {"round": round, "cohort": cohort})
        evaluating = self.rules.evaluate_every > 0 and (round - 1) % self.rules.evaluate_every == 0
        judged = self.evaluate_held_out(state) if self.evaluate_held_out and evaluating else None
        began = time.perf_counter()
        paid = self.budget.charge_round(round, cohort, state, bool(progress.remembering)) if self.budget else None
        self.journal.charge_round(round, cohort, paid)
        told = evaluating and (self.budget is None or self.budget.reports_metrics)
        updates = self.receive_updates(round, state, cohort, progress, ["validation"] if told else [], book)
        before, touched = state, version_counters(state)
        first = list(islice(updates, 1))
        if first:
            state = self.algorithm.aggregate(state, chain(_drain(first), updates))
        check_not_mutated(before, touched)
        if self.budget is not None and book.accepted:
            state = self.budget.add_server_noise(round, before, state, book.accepted_weights)
        state = canonical_layout(state, before)
        if self.server_trainer is not None and self.algorithm.trains_on_server and book.accepted:
            at_desk = Site("server", 0, round, self.rules.rounds, self._learning_rate(round, progress))
            state = canonical_layout(self.server_trainer(state, at_desk), before)
        if book.accepted < max(1, self.rules.quorum):
            self.journal.append_cost("failed round", round, time.perf_counter() - began, book.sites)
            raise RoundFailed(format_failure(round, book, self.rules.quorum))
        failpoint("aggregated")
        seconds = time.perf_counter() - began
        self.journal.append_metrics(metric_rows(round, book, judged))
        self.journal.append_cost("round", round, seconds, book.sites)
        remembering = {**progress.remembering, **dict.fromkeys(sorted(book.sites_with_memory), round)}
        progress = advance_progress(replace(progress, round=round, remembering=remembering), book, self.rules)
        summary: dict[str, Any] = {m: mean_report(book, m) for m in ("loss", "accuracy", "auc")} if evaluating else {}
        summary["unheard"] = clusters_without_updates(
            book, {site: self.algorithm.cluster_of(before, site) for site in self.trainers}
        )
        self.watch("round done", {"round": round, "seconds": seconds, "stopped": progress.stopped, **summary})
        return state, progress

    def _learning_rate(self, round: int, progress: Progress) -> float:
        rules = self.rules
        return self.algorithm.training.optimiser.lr * rules.schedule.lr_factor(round, rules.rounds, progress.cuts)

    def receive_updates(
        self,
        round: int,
        state: Bundle,
        cohort: Sequence[SiteId],
        progress: Progress,
        parts: list[Part],
        log: RoundLog,
    ) -> Iterator[Update]:
        """Send, receive, validate: yields each acceptable update in site order and notes what became of every one."""
        outbox = self.prepare_outbox("train", round, state, cohort, parts, progress)

        def refuse(site: SiteId, refusal: Refused) -> None:
            log.sites.setdefault(site, {}).setdefault("extra", []).append(refusal.kind)

        arrivals = self.engine.exchange(round, outbox, self.rules.deadline)
        for site, answer in in_site_order(arrivals, self._sort_by_cluster(state, cohort), refuse):
            note = log.sites.setdefault(site, {})
            note["down"] = outbox.sizes.get(site, 0)
            if cluster := self.algorithm.cluster_of(state, site):
                note["cluster"] = cluster
            update = self.check_update(round, state, site, answer, log)
            del answer
            self.watch("site", {"round": round, "site": site, **note})
            if update is not None:
                log.accepted += 1
                log.accepted_weights.append(update.examples if self.algorithm.training.weights == "examples" else 1.0)
                failpoint("reply-accepted")
                lent = replace(update, tensors=dict(update.tensors))
                del update
                yield lent
                lent.tensors.clear()  # whatever still holds it, the tensors are gone

    def _sort_by_cluster(self, state: Bundle, cohort: Sequence[SiteId]) -> list[SiteId]:
        """The sites of a group side by side, so that each group's updates can be taken one at a time."""
        groups = {site: self.algorithm.cluster_of(state, site) for site in cohort}
        order = list(dict.fromkeys(groups.values()))
        return sorted(cohort, key=lambda site: order.index(groups[site]))

    def check_update(self, round: int, state: Bundle, site: SiteId, reply: Answer, log: RoundLog) -> Update | None:
        """A site's update if it is acceptable; what became of it is noted either way."""
        note = log.sites[site]
        if isinstance(reply, Failure):
            note |= {"up": 0, **failure_entry(reply)}
            return None
        try:
            expected = self.expected_update(round, state, site)
            accepted = messages.accept_update(reply, expected, lambda sent: self.undo_transforms(sent, expected.received))
            self.algorithm.check_update(accepted.update)
            log.reports[site] = check_report(accepted.fields)
        except Refused as refusal:
            note |= {
                "up": messages.message_size(reply),
                "outcome": "refused",
                "kind": refusal.kind,
                "why": str(refusal),
            }
            return None
        note["up"] = messages.message_size(reply, self._known_body_size(reply, expected))
        note |= {"outcome": "accepted", "seconds": training_seconds(accepted.fields)}
        if isinstance(together := accepted.fields.get("together"), int) and together > 1:
            note["together"] = together
        if isinstance(alone := accepted.fields.get("alone"), str) and alone.isprintable() and alone:
            note["alone"] = alone[:200]
        if accepted.update.scalars:
            note["scalars"] = dict(accepted.update.scalars)
        if accepted.fields.get("remembers") is True:
            log.sites_with_memory.add(site)
        if accepted.drift is not None and not (self.budget and self.budget.hides_drift):
            note["drift"] = accepted.drift
        return accepted.update

    def _known_body_size(self, answer: bytes | messages.Message, expected: messages.ExpectedUpdate) -> int | None:
        """Known beforehand of a message that has all it might have: it looks as it must."""
        if isinstance(answer, bytes) or answer.tensors.keys() != expected.like.keys():
            return None
        return next((size for like, size in self._expected_layouts.values() if like is expected.like), None)

    def prepare_outbox(
        self,
        purpose: str,
        round: int,
        state: Bundle,
        sites: Sequence[SiteId],
        parts: list[Part],
        progress: Progress = Progress(),
    ) -> Outbox:
        rules = self.rules
        common = {
            "run": rules.run,
            "seed": rules.seed,
            "purpose": purpose,
            "round": round,
            "rounds": rules.rounds,
            "parts": parts,
            "durable": self.journal.oldest_snapshot(),
        }
        counted, rate = progress.remembering, self._learning_rate(round, progress)
        rates = {s: rate * self.algorithm.lr_scale(self.algorithm.cluster_of(state, s)) for s in sites}
        fields = {s: {**common, "site": s, "lr": rates[s], "remembers": counted.get(s, 0)} for s in sites}
        return Outbox(fields, lambda site: self.algorithm.broadcast(state, site))

    def expected_update(self, round: int, state: Bundle, site: SiteId) -> messages.ExpectedUpdate:
        exchanges, received = self.algorithm.exchanges, self.algorithm.broadcast(state, site)
        key = round, self.algorithm.cluster_of(state, site)
        if key not in self._expected_layouts:
            self._expected_layouts = {
                (of, group): found for (of, group), found in self._expected_layouts.items() if of == round
            }
            share = self.algorithm.cluster_state(state, key[1])
            like = {exchange.kind: share.get(exchange.like, {}) for exchange in exchanges}
            for stage in self.transforms:
                like = stage.encode(like, received, Stream(0))  # only what it looks like counts, not its values
            self._expected_layouts[key] = like, messages.body_size(like)
        return messages.ExpectedUpdate(
            run=self.rules.run,
            round=round,
            site=site,
            received=received,
            like=self._expected_layouts[key][0],
            optional=frozenset(exchange.kind for exchange in exchanges if exchange.optional),
            examples=self.federation.sites[site],
            max_norm=self.rules.max_norm,
        )

    def undo_transforms(self, tensors: Bundle, received: Bundle) -> Bundle:
        """Undo the stages, last first."""
        for stage in reversed(self.transforms):
            tensors = stage.decode(tensors, received)
        return tensors

    def collect_predictions(
        self, outcome: Outcome, parts: list[Part], extra_tensors: Bundle | None = None, tolerant: bool = False
    ) -> dict[SiteId, Bundle]:
        """After the last round: what sites predict with the final model(s) and with what is sent `beside`, by model and
        part; tolerant: without the sites that have none."""
        round, began, book = outcome.rounds + 1, time.perf_counter(), RoundLog()
        sites = [s for s in self.federation.sites if s != POOLED]
        self.journal.charge_round(round, sites)
        outbox = self.prepare_outbox(
            "evaluate", round, outcome.state, sites, parts, Progress(remembering=outcome.memory_rounds)
        )
        if extra_tensors:
            models = outbox.tensors
            outbox.tensors = lambda site: {**models(site), **extra_tensors}
        found: dict[SiteId, Bundle] = {}
        arrivals = self.engine.exchange(round, outbox, self.rules.deadline)
        for site, answer in in_site_order(arrivals, sites, lambda *_: None):
            book.sites[site] = failed = failure_entry(answer)
            self.watch("evaluated", {"site": site, **failed})
            if failed and tolerant:
                continue
            if isinstance(answer, Failure):
                raise RoundFailed(f"site {site} could not be evaluated: {answer.sentence}")
            try:
                message = answer if isinstance(answer, messages.Message) else messages.decode(answer)
                messages.check_address(message.fields, self.rules.run, round, site)
                found[site] = split_predictions(message.tensors.get("predictions", {}), len(self.federation.classes))
            except Refused as refusal:
                raise RoundFailed(f"site {site} could not be evaluated: {refusal}") from refusal
            book.sites[site] = {"down": outbox.sizes[site], "up": messages.message_size(answer)}
        self.journal.append_cost("evaluation", round, time.perf_counter() - began, book.sites)
        return found


def advance_progress(progress: Progress, log: RoundLog, rules: Rules) -> Progress:
    """Move schedule and early stopping on by what the sites reported of the model they received."""
    loss = mean_report(log, "loss")
    if loss is not None:
        better = loss < progress.best_loss * (1 - PLATEAU_THRESHOLD)
        stale = 0 if better else progress.stale + 1
        cut = rules.schedule.name == "plateau" and stale > rules.schedule.patience
        progress = replace(
            progress,
            best_loss=loss if better else progress.best_loss,
            stale=0 if cut else stale,
            cuts=progress.cuts + cut,
        )
    stop = rules.early_stop
    value = mean_report(log, stop.metric) if stop else None
    if stop is not None and value is not None:
        value = value if stop.metric in LOWER_IS_BETTER else -value
        better = value < progress.best - stop.min_delta
        waited = 0 if better else progress.waited + 1
        best = value if better else progress.best  # small steps add up to an improvement
        progress = replace(progress, best=best, waited=waited, stopped=waited >= stop.patience)
    return progress
