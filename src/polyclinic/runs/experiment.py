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

from polyclinic.algorithms.base import classifier_weights
from polyclinic.algorithms.distillation.refine import check_public
from polyclinic.algorithms.wrappers.ensemble import ensemble_members, models_by_site
from polyclinic.config.recipe import Recipe
from polyclinic.core.contract import Bundle, Federation, Score, SiteId, Stage, Stream
from polyclinic.core.errors import RecipeError, RoundFailed
from polyclinic.core.failpoints import failpoint
from polyclinic.data.examples import SiteData
from polyclinic.evaluation.metrics import Predictions, finite_or_none, measure
from polyclinic.evaluation.summary import (
    assess_predictions,
    choose_headline,
    forgetting_by_round,
    mean_drift,
    metric_by_cluster,
    package_versions,
    sum_costs,
    summarise_reports,
)
from polyclinic.federation.engines import Engine, RemoteExecution
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.rounds import POOLED, Outcome, Rounds, Rules, Watch
from polyclinic.federation.site_runner import STUDENT, SiteRunner
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.reporting.markdown.rounds import draw_run
from polyclinic.reporting.privacy_statement import (
    list_releases,
    list_site_releases,
    summarise_privacy,
    write_privacy_page,
)
from polyclinic.reporting.remarks import collect_warnings
from polyclinic.reporting.run_folder import RunResult as RunResult
from polyclinic.reporting.run_folder import check_same_recipe as check_same_recipe
from polyclinic.reporting.run_folder import identity as identity
from polyclinic.reporting.run_folder import predicted_parts, with_absolute_paths
from polyclinic.reporting.run_folder import read_result as read_result
from polyclinic.runs.engine_choice import (
    REASON_REMOTE,
    REASON_REQUESTED,
    EngineChoice,
    choose_engine,
    make_engine,
    read_choice,
)
from polyclinic.runs.networks import build_network as build_network
from polyclinic.runs.networks import build_networks, check_playable, device_of, server_models, sites_on_device
from polyclinic.runs.pretraining import pretrain_networks
from polyclinic.runs.privacy_plan import (
    bind_plan,
    noise_secret,
    placeholder_private,
    plan_transforms,
    privacy_limits,
    restore_noise,
    write_noise,
)
from polyclinic.runs.public_data import load_public
from polyclinic.runs.server_training import ServerTrainer, student_fields
from polyclinic.runs.sites import FederatedDataset as FederatedDataset
from polyclinic.runs.sites import load_sites as load_sites
from polyclinic.runs.sites import pool_sites as pool_sites
from polyclinic.runs.sites import site_on_device
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.runs.tracking.events import run_tracked, track_finished
from polyclinic.storage import messages, run_files
from polyclinic.storage.journal import FolderJournal, RamJournal
from polyclinic.storage.run_files import (
    DiskMemory,
    Ledger,
    RamMemory,
    SiteMemory,
    lock_folder,
    write_atomically,
    write_json,
)
from polyclinic.training.fit import score
from polyclinic.training.losses import predict_probabilities
from polyclinic.training.network import copy_module_weights, normalisation_names


def rules_of(recipe: Recipe, run_id: str) -> Rules:
    return Rules(
        rounds=recipe.rounds,
        run=run_id,
        seed=recipe.seed,
        cohort=recipe.cohort,
        cohort_order=recipe.turns,
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
        dataset: FederatedDataset | None = None,
        remote: RemoteExecution | None = None,
    ) -> None:
        if recipe.methods:
            raise RecipeError(f"{recipe.name} compares {len(recipe.methods)} methods; use `polyclinic compare`")
        recipe = with_absolute_paths(recipe)
        self.recipe, self.folder, self.data, self.watch, self.remote = recipe, folder, data, watch, remote
        self.dataset = dataset or load_sites(recipe, data)
        self.module = build_network(recipe, self.dataset, data)
        device = device_of(recipe)
        self.networks = build_networks(recipe, self.dataset, self.module, device, data)
        check_playable(self.networks, self.dataset)
        self.public = self._load_public(data)
        pretrain_networks(self.networks, self.public, device)
        self.algorithm = self.networks.wrap_algorithm(recipe.build_algorithm())
        self.network = next(iter(self.networks.by_cluster.values()))
        self.sites, self.held_out_images = sites_on_device(recipe, self.dataset, self.module, device)
        if self.algorithm.pooled:
            self.sites[POOLED] = pool_sites(self.sites)
        registered = {name: len(site.train) for name, site in self.sites.items()}
        start = copy_module_weights(self.module) if recipe.clusters else self.network.copy_weights()
        norms = normalisation_names(self.module)
        self.federation = Federation(self.dataset.classes, registered, start, norms, self.networks.shapes.get("", ()))
        self.plan = self._make_plan()
        if self.plan is not None:
            self.algorithm = self.networks.wrap_algorithm(recipe.build_algorithm(self.plan.private_options()))
        self.server_trainer = self._make_server_trainer(device)

    def _load_public(self, data: Path | None) -> SiteData | None:
        """The images that the server may look at."""
        recipe, consortium = self.recipe, self.dataset
        if recipe.public is None:
            return None
        shape = consortium.classes, consortium.channels, consortium.size
        sites = consortium.visible_sites if recipe.privacy is None else None
        stream = Stream(recipe.seed, ("public",))
        public = load_public(recipe.public, data, *shape, stream, sites, consortium.held_out)
        if recipe.finish is not None:
            check_public(public)
        return public

    def _make_server_trainer(self, device: torch.device) -> ServerTrainer | None:
        if self.public is None:
            return None
        public, start = site_on_device(self.public, device, {}), classifier_weights(self.federation.initial)
        server = ServerTrainer(self.algorithm, self.networks, public, self.recipe.seed, start)
        server.check_usable(self.algorithm.init(self.federation))
        return server

    def _make_plan(self) -> PrivacyPlan | None:
        """What privacy will cost, before anything is trained."""
        wish, sites = self.recipe.privacy, self.sites
        if wish is None:
            return None
        rehearsed = self.networks.wrap_algorithm(self.recipe.build_algorithm(placeholder_private(wish)))
        trainers = [POOLED] if rehearsed.pooled else [name for name in sites if name != POOLED]
        book = self._open_shared_ledger()
        rules, earlier = rules_of(self.recipe, ""), book.earlier_spends() if book else ()
        plan = bind_plan(wish, rehearsed, self.federation, sites, trainers, self.networks.by_cluster, rules, earlier)
        return restore_noise(plan, self.folder)

    def _open_shared_ledger(self) -> SharedLedger | None:
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
        return noise_secret(self.recipe.privacy, self.recipe.seed, self.folder)

    def run(self) -> RunResult:
        """Play the rounds that are left, evaluate, and write the result."""
        with lock_folder(self.folder) if self.folder else contextlib.nullcontext():
            return self._run_locked()

    def _run_locked(self) -> RunResult:
        began, recipe = time.perf_counter(), self.recipe
        journal = FolderJournal(self.folder) if self.folder else RamJournal()
        if self.folder:
            write_atomically(self.folder / "recipe.yaml", recipe.to_yaml().encode())
            if self.plan is not None:
                write_noise(self.plan, self.folder)
        with contextlib.ExitStack() as lent:
            guard = (
                PrivacyBudget(self.plan, self.secret.child("server"), self._open_shared_ledger()) if self.plan else None
            )
            engine, choice = self._make_engine(lent)
            judge = self.evaluate_held_out if self.has_held_out() else None
            rules = rules_of(recipe, self.run_id())
            if self.remote is not None:
                rules = replace(rules, deadline=self.remote.deadline, quorum=quorum_of(recipe, self.sites))
            rounds = Rounds(
                self.federation,
                self.algorithm,
                engine,
                rules,
                journal,
                self.watch,
                judge,
                self.make_transforms(),
                guard,
                self.server_trainer,
            )
            for remark in self.remarks:
                logging.getLogger(__name__).warning("%s", remark)
            if self.plan is not None:
                self.watch("plan", {"epsilon": self.plan.epsilon, **self.plan.as_json()})
            gc.freeze()  # what is there now stays: looking through all of it again and again took a tenth of a second
            lent.callback(gc.unfreeze)
            outcome = rounds.play_all()
            refined = (
                self.server_trainer.train_student(outcome.state) if self.server_trainer and recipe.finish else None
            )
            student = refined.weights if refined else {}
            beside = {f"{kind}@{STUDENT}": group for kind, group in student.items()} | ensemble_members(outcome.state)
            predictions = rounds.collect_predictions(
                outcome, predicted_parts(recipe), beside, tolerant=self.remote is not None
            )
            failpoint("evaluated")
        held_out = self.score_held_out(outcome.state, student) if self.has_held_out() else None
        if predictions:
            scores = assess_predictions(
                predictions, held_out, recipe.evaluate.bootstrap, Stream(recipe.seed, ("bootstrap",))
            )
        else:
            scores = summarise_reports(journal.rows)
            if not scores["merged"]:
                self._write_model(outcome.state)
                raise RoundFailed(
                    "all rounds were played, but no site lets predictions or metrics leave, so there is nothing to "
                    "report; the model is in model.safetensors"
                )
        if refined is not None and refined.best == 0:
            logging.getLogger(__name__).warning(
                "the student never became better than it began on public validation images: it is of no use; look at "
                "its teachers and the public set, or give finish more epochs"
            )
        scores["public"] = (
            self.server_trainer.evaluate_models(outcome.state, student or None) if self.server_trainer else None
        )
        scores["finish"] = student_fields(refined) if refined else None
        summary = self.summarise(outcome, scores, journal, time.perf_counter() - began) | {"engine": asdict(choice)}
        if self.remote is not None:
            summary["absent"] = dict(self.remote.absent)
            summary["released"] = list_site_releases(
                summary["released"], predicted_parts(recipe), self.federation.sites, predictions
            )
        summary["privacy"] = summarise_privacy(guard, outcome.budget_exhausted, journal.rows) if guard else None
        if self.folder:
            run_files.save_predictions(self.folder, predictions, held_out)
            self.write_result(outcome, summary, student)
        return RunResult(summary, outcome.state, self.folder)

    def make_transforms(self) -> list[Stage]:
        """What happens to an update on its way: by the privacy plan, then by the recipe."""
        return [*(plan_transforms(self.plan) if self.plan else ()), *self.recipe.build_stages()]

    def _make_engine(self, resources: contextlib.ExitStack) -> tuple[Engine, EngineChoice]:
        """Where sites work: elsewhere, or here, each with its own images."""
        if self.remote is not None:
            return self.remote.engine, EngineChoice(self.remote.name, REASON_REMOTE)
        memory, options = self._make_memory(resources), self.recipe.engine
        runners = self.make_runners(memory)
        choice = self._choose_engine(runners)
        engine = make_engine(choice.name, runners, options.workers, options.threads, options.compile, self)
        resources.callback(engine.close)
        return engine, choice

    def make_runners(self, memory: SiteMemory) -> dict[SiteId, SiteRunner]:
        """Every site, to be played in this process."""
        stages = self.make_transforms()
        return {
            name: SiteRunner(
                name,
                site,
                self.algorithm,
                self.networks.with_student,
                memory,
                stages,
                privacy_limits(self.plan, name, self.secret.child("site", name)) if self.plan else None,
            )
            for name, site in self.sites.items()
        }

    def run_id(self) -> str:
        """What this run is: a hash over everything that decides its result, the images among it."""
        seen = [self.dataset]
        if self.public is not None:
            seen.append(replace(self.dataset, sites={self.public.name: self.public}))
        images = "|".join(each.fingerprint for each in seen)
        return hashlib.sha256(f"{identity(self.recipe)}|{images}".encode()).hexdigest()[:16]

    def _choose_engine(self, runners: Mapping[SiteId, SiteRunner]) -> EngineChoice:
        """What `auto` once chose for a run stays, so that going on ends in the same bits."""
        if (name := self.recipe.engine.name) != "auto":
            return EngineChoice(name, REASON_REQUESTED)
        noted = self.folder / "engine.json" if self.folder else None
        if noted is not None and noted.exists():
            return read_choice(noted)
        state, recipe = self.algorithm.init(self.federation), self.recipe
        choice = choose_engine(runners, self.algorithm, state, recipe.engine.threads, recipe.cohort)
        if noted is not None:
            write_json(noted, asdict(choice))
        return choice

    def _make_memory(self, resources: contextlib.ExitStack) -> SiteMemory:
        """Where sites remember: in the run's folder; without one in this process, or where workers share a disk."""
        if self.folder:
            return DiskMemory(self.folder / "sites")
        if not self.recipe.engine.workers and self.recipe.engine.name != "ray":
            return RamMemory()
        return DiskMemory(Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="polyclinic-"))))

    def has_held_out(self) -> bool:
        """Whether there are test images that belong to no site, and a global model to try on them."""
        state = self.algorithm.init(self.federation)
        return self.dataset.held_out is not None and bool(
            server_models(self.algorithm, state, self.networks.by_cluster)
        )

    def score_held_out(self, state: Bundle, student: Bundle | None = None, last: bool = True) -> Predictions:
        """On the test set that belongs to no site: what the student says, or the global model; of several clusters, or
        at the end of an ensemble, the mean of what their models say."""
        assert self.held_out_images is not None
        models = server_models(self.algorithm, state, self.networks.by_cluster)
        if student:
            models = {STUDENT: student}
        pairs = [(self.networks.with_student[group], model) for group, model in models.items()]
        if last and not student and (together := models_by_site(state)):
            pairs = [(self.network, model) for model in together.values()]
        found = [score(Score(model, predict_probabilities), network, self.held_out_images) for network, model in pairs]
        mean = torch.stack([rows["probabilities"].double() for rows in found]).mean(0)
        return Predictions(mean.cpu().numpy(), found[0]["labels"].cpu().numpy())

    def evaluate_held_out(self, state: Bundle) -> dict[str, Any]:
        found = self.score_held_out(state, last=False)
        return {"n": len(found), **finite_or_none(measure(found.probabilities, found.labels))}

    @property
    def remarks(self) -> list[str]:
        return collect_warnings(self.recipe, self.algorithm, self.federation.sites.values())

    def summarise(
        self, outcome: Outcome, scores: Mapping[str, Any], journal: FolderJournal | RamJournal, seconds: float
    ) -> dict[str, Any]:
        recipe, consortium = self.recipe, self.dataset
        clusters = self.networks.cluster_members(consortium.sites) if recipe.clusters else {}
        model, best = choose_headline(scores["merged"], scores["public"], recipe.evaluate.headline)
        batch, side = recipe.training.batch_size(max(self.federation.sites.values())), consortium.size
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
            "model": self.networks.model_sizes(shape),
            "clusters": clusters or None,
            "progress": metric_by_cluster(journal.rows) or None,
            "forgetting": (forgetting_by_round(journal.rows) or None) if recipe.evaluate.forgetting else None,
            "headline": {"model": model, **best},
            **scores,
            "drift": mean_drift(journal.rows),
            "cost": {**sum_costs(journal.costs), "run_seconds": seconds},
            "released": list_releases(self.plan, self.algorithm.exchanges),
            "pooled": self.algorithm.pooled,
            "remarks": self.remarks,
            "sha256": messages.hash_tensors(outcome.state),
            "versions": package_versions(),
        }

    def _write_model(self, state: Bundle) -> None:
        if self.folder:
            write_atomically(self.folder / "model.safetensors", messages.encode_body(state).data)

    def write_result(self, outcome: Outcome, summary: Mapping[str, Any], student: Bundle) -> None:
        assert self.folder is not None
        self._write_model(outcome.state)
        if student:
            write_atomically(self.folder / "student.safetensors", messages.encode_body(student).data)
            assert self.server_trainer is not None
            self.server_trainer.draw_teachers(outcome.state, self.dataset.classes, self.folder / "teachers.png")
        if summary["forgetting"]:
            draw_run(summary, self.folder / "forgetting.png")
        failpoint("model-written")
        write_atomically(self.folder / "privacy.md", write_privacy_page(summary).encode())
        write_json(self.folder / "result.json", summary)
        failpoint("result-written")


def run(
    recipe: Recipe,
    out: Path | str | None = None,
    data: Path | str | None = None,
    watch: Watch = lambda *_: None,
    dataset: FederatedDataset | None = None,
) -> RunResult:
    """Run a recipe. With `out`, everything is written there and an interrupted run goes on where it stopped."""
    folder, recipe = Path(out) if out is not None else None, with_absolute_paths(recipe)
    check_tracking(recipe.track, folder)
    if folder is not None and (folder / "result.json").exists():
        return track_finished(read_result(folder, recipe), recipe)
    if folder is not None:
        check_same_recipe(folder, recipe)
    return run_tracked(Experiment(recipe, folder, Path(data) if data else None, watch, dataset))
