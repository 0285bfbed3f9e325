"""From a recipe to a finished run: data, network, sites, engine, rounds, result."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from polyclinic.algorithms.base import classifier
from polyclinic.algorithms.distillation.refine import check_public
from polyclinic.algorithms.wrappers.ensemble import members, models_by_site
from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import Bundle, Federation, Score, SiteId, Stage, Stream
from polyclinic.core.errors import RecipeError, RoundFailed
from polyclinic.core.failpoints import failpoint
from polyclinic.data.examples import SiteData
from polyclinic.evaluation.metrics import Predictions, finite, measure
from polyclinic.evaluation.summary import (
    assess,
    cost,
    drift,
    forgetting,
    headline,
    package_versions,
    progress,
    reported,
)
from polyclinic.federation.engines import Elsewhere, Engine
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.rounds import POOLED, Outcome, Rounds, Rules, Watch
from polyclinic.federation.site_runner import STUDENT, SiteRunner
from polyclinic.privacy.plan import Plan
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.reporting.markdown.rounds import draw_run
from polyclinic.reporting.privacy_statement import handed_out, page, privacy_of, released
from polyclinic.reporting.remarks import remarks
from polyclinic.reporting.run_folder import RunResult as RunResult
from polyclinic.reporting.run_folder import finished as finished
from polyclinic.reporting.run_folder import identity as identity
from polyclinic.reporting.run_folder import predicted, with_absolute_paths
from polyclinic.reporting.run_folder import refuse_other as refuse_other
from polyclinic.runs.engine_choice import ASKED, ELSEWHERE, Choice, choose, make_engine, read_choice
from polyclinic.runs.networks import build_networks, device_of, refuse_unplayable, server_models, sites_on_device
from polyclinic.runs.networks import network_of as network_of
from polyclinic.runs.pretraining import pretrain
from polyclinic.runs.privacy_plan import bind, discretion_of, keep_noise, kept_noise, placeholder, secret_of, stages_of
from polyclinic.runs.public_data import gather_public
from polyclinic.runs.server_training import ServerTrainer, told
from polyclinic.runs.sites import FederatedDataset as FederatedDataset
from polyclinic.runs.sites import load_sites as load_sites
from polyclinic.runs.sites import pool as pool
from polyclinic.runs.sites import site_on
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.runs.tracking.events import told_again, tracked
from polyclinic.storage import messages, run_files
from polyclinic.storage.journal import FolderJournal, RamJournal
from polyclinic.storage.run_files import (
    DiskMemory,
    Ledger,
    MemoryStore,
    RamMemory,
    locked,
    write_atomically,
    write_json,
)
from polyclinic.training.fit import score
from polyclinic.training.losses import probabilities
from polyclinic.training.network import norm_names, weights_of


def rules_of(recipe: Recipe, mark: str) -> Rules:
    return Rules(
        rounds=recipe.rounds,
        run=mark,
        seed=recipe.seed,
        cohort=recipe.cohort,
        turns=recipe.turns,
        quorum=recipe.quorum or 1,
        schedule=recipe.schedule,
        early_stop=recipe.early_stop,
        evaluate_every=recipe.evaluate.every,
        snapshot_every=recipe.snapshot_every,
        max_norm=recipe.max_norm,
    )


def quorum_of(recipe: Recipe, sites: Collection[SiteId]) -> int:
    """Between real sites a run does not become smaller unless its recipe says how small."""
    return recipe.quorum or recipe.cohort or len(sites)


class Experiment:
    """One recipe, one algorithm, one seed, put together; `run` plays it."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None = None,
        data: Path | None = None,
        watch: Watch = lambda *_: None,
        consortium: FederatedDataset | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        if recipe.methods:
            raise RecipeError(f"{recipe.name} compares {len(recipe.methods)} methods; use `polyclinic compare`")
        recipe = with_absolute_paths(recipe)
        self.recipe, self.folder, self.data, self.watch, self.elsewhere = recipe, folder, data, watch, elsewhere
        self.consortium = consortium or load_sites(recipe, data)
        self.module = network_of(recipe, self.consortium, data)
        device = device_of(recipe)
        self.lineup = build_networks(recipe, self.consortium, self.module, device, data)
        refuse_unplayable(self.lineup, self.consortium)
        self.public = self._public(data)
        pretrain(self.lineup, self.public, device)
        self.algorithm = self.lineup.wrap_algorithm(recipe.algorithm_of())
        self.network = next(iter(self.lineup.networks.values()))
        self.sites, self.apart = sites_on_device(recipe, self.consortium, self.module, device)
        if self.algorithm.pooled:
            self.sites[POOLED] = pool(self.sites)
        registered = {name: len(site.train) for name, site in self.sites.items()}
        start = weights_of(self.module) if recipe.clusters else self.network.take()
        norms = norm_names(self.module)
        self.federation = Federation(self.consortium.classes, registered, start, norms, self.lineup.shapes.get("", ()))
        self.plan = self._plan()
        if self.plan is not None:
            self.algorithm = self.lineup.wrap_algorithm(recipe.algorithm_of(self.plan.private()))
        self.server = self._server(device)

    def _public(self, data: Path | None) -> SiteData | None:
        """The images that the server may look at."""
        recipe, consortium = self.recipe, self.consortium
        if recipe.public is None:
            return None
        shape = consortium.classes, consortium.channels, consortium.size
        sites = consortium.seen if recipe.privacy is None else None
        stream = Stream(recipe.seed, ("public",))
        public = gather_public(recipe.public, data, *shape, stream, sites, consortium.held_out)
        if recipe.finish is not None:
            check_public(public)
        return public

    def _server(self, device: torch.device) -> ServerTrainer | None:
        if self.public is None:
            return None
        public, start = site_on(self.public, device, {}), classifier(self.federation.initial)
        server = ServerTrainer(self.algorithm, self.lineup, public, self.recipe.seed, start)
        server.check(self.algorithm.init(self.federation))
        return server

    def _plan(self) -> Plan | None:
        """What privacy will cost, before anything is trained."""
        wish, sites = self.recipe.privacy, self.sites
        if wish is None:
            return None
        rehearsed = self.lineup.wrap_algorithm(self.recipe.algorithm_of(placeholder(wish)))
        trainers = [POOLED] if rehearsed.pooled else [name for name in sites if name != POOLED]
        book = self._passbook()
        rules, earlier = rules_of(self.recipe, ""), book.earlier() if book else ()
        plan = bind(wish, rehearsed, self.federation, sites, trainers, self.lineup.networks, rules, earlier)
        return kept_noise(plan, self.folder)

    def _passbook(self) -> SharedLedger | None:
        """The ledger that this run shares with others on the same images."""
        wish = self.recipe.privacy
        if wish is None or wish.ledger is None:
            return None
        own = self.folder / "ledger.jsonl" if self.folder else None
        rows = Ledger(own).read() if own and own.exists() else []
        charged = [(row["round"], row["privacy"]) for row in rows if row["event"] == "charge" and row["privacy"]]
        known = [(round, found["of"]) for round, found in charged]
        seen = next((tuple(found["account"]) for _, found in reversed(charged) if "account" in found), None)
        own_mark = f"{self.run_id()}-{self.secret.integer() % 2**32:08x}"
        return SharedLedger(Path(wish.ledger), own_mark, wish.unit, known, seen)

    @cached_property
    def secret(self) -> Stream:
        """Where a private run's noise comes from."""
        assert self.recipe.privacy is not None
        return secret_of(self.recipe.privacy, self.recipe.seed, self.folder)

    def run(self) -> RunResult:
        """Play the rounds that are left, evaluate, and write the result."""
        with locked(self.folder) if self.folder else contextlib.nullcontext():
            return self._run()

    def _run(self) -> RunResult:
        began, recipe = time.perf_counter(), self.recipe
        journal = FolderJournal(self.folder) if self.folder else RamJournal()
        if self.folder:
            write_atomically(self.folder / "recipe.yaml", recipe.to_yaml().encode())
            if self.plan is not None:
                keep_noise(self.plan, self.folder)
        with contextlib.ExitStack() as lent:
            guard = PrivacyBudget(self.plan, self.secret.child("server"), self._passbook()) if self.plan else None
            engine, choice = self._engine(lent)
            judge = self.judge if self.has_held_out() else None
            rules = rules_of(recipe, self.run_id())
            if self.elsewhere is not None:
                rules = replace(rules, deadline=self.elsewhere.deadline, quorum=quorum_of(recipe, self.sites))
            rounds = Rounds(
                self.federation,
                self.algorithm,
                engine,
                rules,
                journal,
                self.watch,
                judge,
                self.stages(),
                guard,
                self.server,
            )
            for remark in self.remarks:
                logging.getLogger(__name__).warning("%s", remark)
            if self.plan is not None:
                self.watch("plan", {"epsilon": self.plan.epsilon, **self.plan.as_json()})
            gc.freeze()  # what is there now stays: looking through all of it again and again took a tenth of a second
            lent.callback(gc.unfreeze)
            outcome = rounds.run()
            refined = self.server.refined(outcome.state) if self.server and recipe.finish else None
            student = refined.weights if refined else {}
            beside = {f"{kind}@{STUDENT}": group for kind, group in student.items()} | members(outcome.state)
            predictions = rounds.predictions(outcome, predicted(recipe), beside, tolerant=self.elsewhere is not None)
            failpoint("evaluated")
        held_out = self.held_out(outcome.state, student) if self.has_held_out() else None
        if predictions:
            scores = assess(predictions, held_out, recipe.evaluate.bootstrap, Stream(recipe.seed, ("bootstrap",)))
        else:
            scores = reported(journal.rows)
            if not scores["merged"]:
                self._keep_model(outcome.state)
                raise RoundFailed(
                    "all rounds were played, but no site lets predictions or metrics leave, so there is nothing to "
                    "report; the model is in model.safetensors"
                )
        if refined is not None and refined.best == 0:
            logging.getLogger(__name__).warning(
                "the student never became better than it began on public validation images: it is of no use; look at "
                "its teachers and the public set, or give finish more epochs"
            )
        scores["public"] = self.server.judged(outcome.state, student or None) if self.server else None
        scores["finish"] = told(refined) if refined else None
        summary = self.summarise(outcome, scores, journal, time.perf_counter() - began) | {"engine": asdict(choice)}
        if self.elsewhere is not None:
            summary["absent"] = dict(self.elsewhere.absent)
            summary["released"] = handed_out(summary["released"], predicted(recipe), self.federation.sites, predictions)
        summary["privacy"] = privacy_of(guard, outcome.broke, journal.rows) if guard else None
        if self.folder:
            run_files.keep_predictions(self.folder, predictions, held_out)
            self.write(outcome, summary, student)
        return RunResult(summary, outcome.state, self.folder)

    def stages(self) -> list[Stage]:
        """What happens to an update on its way: by the privacy plan, then by the recipe."""
        return [*(stages_of(self.plan) if self.plan else ()), *self.recipe.stages_of()]

    def _engine(self, lent: contextlib.ExitStack) -> tuple[Engine, Choice]:
        """Where sites work: elsewhere, or here, each with its own images."""
        if self.elsewhere is not None:
            return self.elsewhere.engine, Choice(self.elsewhere.name, ELSEWHERE)
        memory, options = self._memory(lent), self.recipe.engine
        runners = self.runners(memory)
        choice = self._choice(runners)
        engine = make_engine(choice.name, runners, options.workers, options.threads, options.compile, self)
        lent.callback(engine.close)
        return engine, choice

    def runners(self, memory: MemoryStore) -> dict[SiteId, SiteRunner]:
        """Every site, to be played in this process."""
        stages = self.stages()
        return {
            name: SiteRunner(
                name,
                site,
                self.algorithm,
                self.lineup.all,
                memory,
                stages,
                discretion_of(self.plan, name, self.secret.child("site", name)) if self.plan else None,
            )
            for name, site in self.sites.items()
        }

    def run_id(self) -> str:
        """What this run is: a hash over everything that decides its result, the images among it."""
        seen = [self.consortium]
        if self.public is not None:
            seen.append(replace(self.consortium, sites={self.public.name: self.public}))
        images = "|".join(each.fingerprint for each in seen)
        return hashlib.sha256(f"{identity(self.recipe)}|{images}".encode()).hexdigest()[:16]

    def _choice(self, runners: Mapping[SiteId, SiteRunner]) -> Choice:
        """What `auto` once chose for a run stays, so that going on ends in the same bits."""
        if (name := self.recipe.engine.name) != "auto":
            return Choice(name, ASKED)
        noted = self.folder / "engine.json" if self.folder else None
        if noted is not None and noted.exists():
            return read_choice(noted)
        state, recipe = self.algorithm.init(self.federation), self.recipe
        choice = choose(runners, self.algorithm, state, recipe.engine.threads, recipe.cohort)
        if noted is not None:
            write_json(noted, asdict(choice))
        return choice

    def _memory(self, lent: contextlib.ExitStack) -> MemoryStore:
        """Where sites remember: in the run's folder; without one in this process, or where workers share a disk."""
        if self.folder:
            return DiskMemory(self.folder / "sites")
        if not self.recipe.engine.workers and self.recipe.engine.name != "ray":
            return RamMemory()
        return DiskMemory(Path(lent.enter_context(tempfile.TemporaryDirectory(prefix="polyclinic-"))))

    def has_held_out(self) -> bool:
        """Whether there are test images that belong to no site, and a global model to try on them."""
        state = self.algorithm.init(self.federation)
        return self.consortium.held_out is not None and bool(server_models(self.algorithm, state, self.lineup.networks))

    def held_out(self, state: Bundle, student: Bundle | None = None, last: bool = True) -> Predictions:
        """On the test set that belongs to no site: what the student says, or the global model; of several clusters, or
        at the end of an ensemble, the mean of what their models say."""
        assert self.apart is not None
        models = server_models(self.algorithm, state, self.lineup.networks)
        if student:
            models = {STUDENT: student}
        pairs = [(self.lineup.all[group], model) for group, model in models.items()]
        if last and not student and (together := models_by_site(state)):
            pairs = [(self.network, model) for model in together.values()]
        found = [score(Score(model, probabilities), network, self.apart) for network, model in pairs]
        mean = torch.stack([rows["probabilities"].double() for rows in found]).mean(0)
        return Predictions(mean.cpu().numpy(), found[0]["labels"].cpu().numpy())

    def judge(self, state: Bundle) -> dict[str, Any]:
        found = self.held_out(state, last=False)
        return {"n": len(found), **finite(measure(found.probabilities, found.labels))}

    @property
    def remarks(self) -> list[str]:
        return remarks(self.recipe, self.algorithm, self.federation.sites.values())

    def summarise(
        self, outcome: Outcome, scores: Mapping[str, Any], journal: FolderJournal | RamJournal, seconds: float
    ) -> dict[str, Any]:
        recipe, consortium = self.recipe, self.consortium
        clusters = self.lineup.members(consortium.sites) if recipe.clusters else {}
        model, best = headline(scores["merged"], scores["public"], recipe.evaluate.headline)
        batch, side = recipe.training.size(max(self.federation.sites.values())), consortium.size
        shape = (batch, consortium.channels, side, side)
        return {
            "name": recipe.name,
            "algorithm": recipe.algorithm.name,
            "data": recipe.data.name,
            "seed": recipe.seed,
            "rounds": outcome.rounds,
            "stopped_early": outcome.stopped_early,
            "classes": list(consortium.classes),
            "hospitals": list(consortium.describe()),
            "model": self.lineup.sizes(shape),
            "clusters": clusters or None,
            "progress": progress(journal.rows) or None,
            "forgetting": (forgetting(journal.rows) or None) if recipe.evaluate.forgetting else None,
            "headline": {"model": model, **best},
            **scores,
            "drift": drift(journal.rows),
            "cost": {**cost(journal.costs), "run_seconds": seconds},
            "released": released(self.plan, self.algorithm.exchanges),
            "pooled": self.algorithm.pooled,
            "remarks": self.remarks,
            "sha256": messages.digest(outcome.state),
            "versions": package_versions(),
        }

    def _keep_model(self, state: Bundle) -> None:
        if self.folder:
            write_atomically(self.folder / "model.safetensors", messages.encode_body(state).data)

    def write(self, outcome: Outcome, summary: Mapping[str, Any], student: Bundle) -> None:
        assert self.folder is not None
        self._keep_model(outcome.state)
        if student:
            write_atomically(self.folder / "student.safetensors", messages.encode_body(student).data)
            assert self.server is not None
            self.server.picture(outcome.state, self.consortium.classes, self.folder / "teachers.png")
        if summary["forgetting"]:
            draw_run(summary, self.folder / "forgetting.png")
        failpoint("model-written")
        write_atomically(self.folder / "privacy.md", page(summary).encode())
        write_json(self.folder / "result.json", summary)
        failpoint("result-written")


def run(
    recipe: Recipe,
    out: Path | str | None = None,
    data: Path | str | None = None,
    watch: Watch = lambda *_: None,
    consortium: FederatedDataset | None = None,
) -> RunResult:
    """Run a recipe. With `out`, everything is written there and an interrupted run goes on where it stopped."""
    folder, recipe = Path(out) if out is not None else None, with_absolute_paths(recipe)
    check_tracking(recipe.track, folder)
    if folder is not None and (folder / "result.json").exists():
        return told_again(finished(folder, recipe), recipe)
    if folder is not None:
        refuse_other(folder, recipe)
    return tracked(Experiment(recipe, folder, Path(data) if data else None, watch, consortium))
