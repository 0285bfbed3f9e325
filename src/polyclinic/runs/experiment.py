"""A run from its recipe to its result: assemble, play the rounds, evaluate, write."""

import contextlib
import gc
import hashlib
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from polyclinic.algorithms.base import classifier_weights
from polyclinic.algorithms.distillation.refine import RefinementResult
from polyclinic.algorithms.wrappers.ensemble import ensemble_members, models_by_site
from polyclinic.config.identity import check_same_recipe, identity, predicted_parts, with_absolute_paths
from polyclinic.config.recipe import Recipe
from polyclinic.core import STUDENT, Bundle, Exchange, RecipeError, Score, SiteId, Stream, failpoint
from polyclinic.evaluation.assessment import assess_predictions, score_predictions
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.rounds import forgetting_by_round, mean_drift, metric_by_cluster, sum_costs
from polyclinic.evaluation.rows import ChargeRow
from polyclinic.evaluation.summary import EngineUsed, RunSummary, SiteSizes, StudentTraining, package_versions
from polyclinic.evaluation.task import CLASSIFICATION
from polyclinic.federation.engines import Engine, RemoteExecution
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.progress import Outcome
from polyclinic.federation.rounds import Rounds, Watch
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.reporting.privacy_statement import write_privacy_page
from polyclinic.reporting.remarks import collect_warnings
from polyclinic.reporting.report import write_forgetting_chart
from polyclinic.runs.assemble import (
    RunSetup,
    assemble,
    check_given_weights,
    check_round_size,
    first_weights_digests,
    price_plan,
    round_options,
)
from polyclinic.runs.engines.choice import (
    REASON_REMOTE,
    REASON_REQUESTED,
    EngineChoice,
    choose_engine,
    make_engine,
    read_choice,
)
from polyclinic.runs.engines.ray_engine import RayEngine, make_actor_setup
from polyclinic.runs.final_evaluation import (
    CollectedAnswers,
    FinalFigures,
    assess_answers,
    assess_reports,
    expected_sites,
    find_odd_sites,
    merge_predictions,
    read_answer,
)
from polyclinic.runs.networks import build_network as build_network, server_models
from polyclinic.runs.privacy_plan import noise_secret, write_noise
from polyclinic.runs.privacy_record import list_releases, list_site_releases, summarise_privacy
from polyclinic.runs.result import RunResult, read_result
from polyclinic.runs.server_training import ServerTrainer
from polyclinic.runs.sites import (
    FederatedDataset as FederatedDataset,
    load_sites as load_sites,
    pool_sites as pool_sites,
    site_on_device,
)
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.runs.tracking.events import RunTracking, track_finished
from polyclinic.storage import messages
from polyclinic.storage.files import erase_file, lock_folder, write_atomically, write_json
from polyclinic.storage.journal import FolderJournal, Journal, RamJournal
from polyclinic.storage.predictions import save_predictions
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.site_memory import DiskMemory, RamMemory, SiteMemory
from polyclinic.training.fit import score
from polyclinic.training.losses import predict_probabilities


class Experiment:
    """A run of one recipe, with one algorithm and one seed. `setup` is what `assemble` made of the recipe."""

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
        self.setup = assemble(recipe, dataset or load_sites(recipe, data), self._make_plan, data)
        if not self.setup.algorithm.pooled:
            sites = self.setup.dataset.sites
            groups = self.setup.networks.cluster_members(sites).values() if recipe.clusters else [sites]
            check_round_size(recipe, min(len(group) for group in groups if group))
        if any(model.sha256 for model in recipe.trained_models.values()):
            check_given_weights(recipe, first_weights_digests(self.setup))
        self.server_trainer = self._make_server_trainer()

    def _make_server_trainer(self) -> ServerTrainer | None:
        setup = self.setup
        if setup.public is None:
            return None
        trainer = ServerTrainer(
            setup.algorithm,
            setup.networks,
            site_on_device(setup.public, setup.networks.first.device, {}),
            self.recipe.seed,
            classifier_weights(setup.federation.initial),
        )
        trainer.check_usable(setup.algorithm.init(setup.federation))
        return trainer

    def _make_plan(self, draft: RunSetup) -> PrivacyPlan:
        ledger = self._open_shared_ledger(draft)
        return price_plan(draft, self.folder, ledger.earlier_runs() if ledger else ())

    def _open_shared_ledger(self, setup: RunSetup) -> SharedLedger | None:
        """Return the ledger that this run shares with others on the same images."""
        config = self.recipe.privacy
        if config is None or config.ledger is None:
            return None
        rows = RunFolder(self.folder).ledger() if self.folder else []
        charged = [(row.round, row.privacy) for row in rows if isinstance(row, ChargeRow) and row.privacy]
        known = [(round, found["of"]) for round, found in charged]
        seen = next((tuple(found["account"]) for _, found in reversed(charged) if "account" in found), None)
        mark = f"{_run_id(setup)}-{self.secret.integer() % 2**32:08x}"
        return SharedLedger(Path(config.ledger), mark, config.unit, known, seen)

    @cached_property
    def secret(self) -> Stream:
        """The source of the noise of a private run."""
        return noise_secret(self.recipe, self.folder)

    @property
    def secret_of_plan(self) -> Stream | None:
        return self.secret if self.setup.plan else None

    def run(self) -> RunResult:
        """Play the rounds that are left, evaluate, and write the result."""
        with lock_folder(self.folder) if self.folder else contextlib.nullcontext():
            return self._run_locked()

    def _run_locked(self) -> RunResult:
        began, recipe, plan = time.perf_counter(), self.recipe, self.setup.plan
        journal = FolderJournal(self.folder, recipe.keep_snapshots) if self.folder else RamJournal()
        if self.folder:
            write_atomically(RunFolder(self.folder).recipe, recipe.to_yaml().encode())
            if plan is not None:
                write_noise(plan, self.folder)
        for warning in self.warnings:
            logging.getLogger(__name__).warning("%s", warning)
        budget = None
        if plan is not None:
            budget = PrivacyBudget(plan, self.secret.child("server"), self._open_shared_ledger(self.setup))
            self.watch("plan", {"epsilon": plan.epsilon, **plan.as_json()})
        with contextlib.ExitStack() as resources:
            engine, choice = self._make_engine(resources)
            rounds = self._make_rounds(engine, journal, budget)
            gc.freeze()  # these objects stay: traversing all of them in every collection took a tenth of a second
            resources.callback(gc.unfreeze)
            outcome = rounds.play_all()
            refined = self._train_student(outcome.state)
            student = refined.weights if refined else {}
            extra = {f"{kind}@{STUDENT}": group for kind, group in student.items()} | ensemble_members(outcome.state)
            evaluate = self._predict_all if self.remote is None else self._ask_for_scores
            final = evaluate(rounds, outcome, extra)
            failpoint("evaluated")
        held_out = self.score_held_out(outcome.state, student) if self.has_held_out() else None
        scores = self._assess(final, held_out, journal)
        summary = self.summarise(outcome, scores, journal, time.perf_counter() - began, student or None)
        released = summary.released
        if self.remote is not None:
            released = list_site_releases(released, self.setup.plan, final.answers, final.withheld)
        summary = summary.model_copy(
            update={
                "engine": EngineUsed(name=choice.name, reason=choice.why),
                "finish": StudentTraining.model_validate(refined, from_attributes=True) if refined else None,
                "absent": dict(self.remote.absent) if self.remote else {},
                "doubted": dict(self.remote.doubted) if self.remote else {},
                "withheld": dict(final.withheld),
                "released": released,
                "privacy": summarise_privacy(budget, outcome.budget_exhausted, journal.rows) if budget else None,
            }
        )
        if self.folder:
            save_predictions(RunFolder(self.folder).predictions_file, final.predictions, held_out)
            self.write_result(outcome, summary, student)
            erase_file(RunFolder(self.folder).secret)
        return RunResult(summary, outcome.state, self.folder)

    def _make_rounds(self, engine: Engine, journal: Journal, budget: PrivacyBudget | None) -> Rounds:
        setup, rules = self.setup, round_options(self.recipe, self.run_id())
        if self.remote is not None:  # the quorum of real sites is all of them, unless the recipe allows fewer
            quorum = self.recipe.quorum or self.recipe.cohort or len(setup.sites)
            rules = replace(rules, deadline=self.remote.deadline, quorum=quorum)
        else:  # the sites' networks are in this memory anyway
            rules = replace(rules, update_memory=psutil.virtual_memory().available // 4)
        return Rounds(
            setup.federation,
            setup.algorithm,
            engine,
            rules,
            journal,
            self.watch,
            self.evaluate_held_out if self.has_held_out() else None,
            setup.transforms,
            budget,
            self.server_trainer,
            None if self.remote is None else self.remote.peers,
            {} if self.remote is None else self.remote.believed,
        )

    def _train_student(self, state: Bundle) -> RefinementResult | None:
        if self.server_trainer is None or self.recipe.finish is None:
            return None
        refined = self.server_trainer.train_student(state)
        if refined.best == 0:
            logging.getLogger(__name__).warning(
                "the student never became better on public validation images than before its training, so it is of no "
                "use; check its teachers and the public set, or give finish more epochs"
            )
        return refined

    def _predict_all(self, rounds: Rounds, outcome: Outcome, extra: Bundle) -> CollectedAnswers:
        """Return the predictions of all sites, which a simulation has in its own process."""
        return CollectedAnswers(rounds.collect_predictions(outcome, predicted_parts(self.recipe), extra))

    def _ask_for_scores(self, rounds: Rounds, outcome: Outcome, extra: Bundle) -> CollectedAnswers:
        """Return what real sites tell of the final models; sites that tell no scores are noted with the reason."""
        parts = predicted_parts(self.recipe)
        expected = expected_sites(self.setup.sites, parts, len(self.setup.federation.classes))
        withheld: dict[SiteId, str] = {}
        answers = rounds.evaluate_sites(
            outcome, parts, lambda site, reply: read_answer(reply, expected[site]), extra, withheld
        )
        for site, why in find_odd_sites(answers).items():
            del answers[site]
            withheld[site] = why
            self.watch("evaluated", {"site": site, "outcome": "refused", "why": why})
        return CollectedAnswers(merge_predictions(answers), answers, withheld)

    def _assess(
        self, final: CollectedAnswers, held_out: Predictions | None, journal: FolderJournal | RamJournal
    ) -> FinalFigures:
        """Return the scores of the final models; of real sites that tell none, the last reports of rounds."""
        stream, resamples = Stream(self.recipe.seed, ("bootstrap",)), self.recipe.evaluate.bootstrap
        if self.remote is None:
            found = assess_predictions(CLASSIFICATION, final.predictions, held_out, resamples, stream)
            return FinalFigures(found, "predictions")
        tested = sum(len(images.test) > 0 for images in self.setup.sites.values())
        wanted, doubted = self.recipe.evaluate.headline, self.remote.unscored
        figures = assess_answers(final.answers, tested, wanted, resamples, stream, doubted)
        return figures or assess_reports(journal.rows)

    def _make_engine(self, resources: contextlib.ExitStack) -> tuple[Engine, EngineChoice]:
        """Return the engine that sites work on, and why it was chosen."""
        if self.remote is not None:
            return self.remote.engine, EngineChoice(self.remote.name, REASON_REMOTE)
        memory, options = self._make_memory(resources), self.recipe.engine
        runners = self.setup.make_runners(memory, self.secret_of_plan)
        choice = self._choose_engine(runners)
        engine: Engine
        if choice.name == "ray":
            assert isinstance(memory, DiskMemory)
            actors = make_actor_setup(self.setup, self.folder, self.data, memory.folder, self.secret_of_plan)
            engine = RayEngine(actors, runners, options.workers, options.threads)
        else:
            engine = make_engine(choice.name, runners, options.workers, options.threads, options.compile)
        resources.callback(engine.close)
        return engine, choice

    def run_id(self) -> str:
        """Return a hash over everything that decides the result of the run, the images among it."""
        return _run_id(self.setup)

    def _choose_engine(self, runners: Mapping[SiteId, SiteRunner]) -> EngineChoice:
        """Return the engine of the recipe; a choice of `auto` is kept, so that a resumed run ends in the same bits."""
        if (name := self.recipe.engine.name) != "auto":
            return EngineChoice(name, REASON_REQUESTED)
        noted = RunFolder(self.folder).engine if self.folder else None
        if noted is not None and noted.exists():
            return read_choice(noted)
        state, recipe = self.setup.algorithm.init(self.setup.federation), self.recipe
        choice = choose_engine(runners, self.setup.algorithm, state, recipe.engine.threads, recipe.cohort)
        if noted is not None:
            write_json(noted, asdict(choice))
        return choice

    def _make_memory(self, resources: contextlib.ExitStack) -> SiteMemory:
        """Return the sites' memory: in the run's folder; without one in this process, or on a disk for workers."""
        if self.folder:
            return DiskMemory(RunFolder(self.folder).site_memory)
        if not self.recipe.engine.workers and self.recipe.engine.name != "ray":
            return RamMemory()
        return DiskMemory(Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="polyclinic-"))))

    def has_held_out(self) -> bool:
        """Whether there are test images that belong to no site, and a global model to test on them."""
        state = self.setup.algorithm.init(self.setup.federation)
        return self.setup.dataset.held_out is not None and bool(
            server_models(self.setup.algorithm, state, self.setup.networks.by_cluster)
        )

    def score_held_out(self, state: Bundle, student: Bundle | None = None, last: bool = True) -> Predictions:
        """Return predictions on the test images that belong to no site, of the student or else the global model.

        Of several clusters, and after the `last` round of an ensemble, they are the mean of all models' probabilities.
        """
        assert self.setup.held_out is not None
        models = server_models(self.setup.algorithm, state, self.setup.networks.by_cluster)
        if student:
            models = {STUDENT: student}
        pairs = [(self.setup.networks.with_student[group], model) for group, model in models.items()]
        if last and not student and (together := models_by_site(state)):
            pairs = [(self.setup.networks.first, model) for model in together.values()]
        found = [score(Score(model, predict_probabilities), network, self.setup.held_out) for network, model in pairs]
        mean = torch.stack([rows["probabilities"].double() for rows in found]).mean(0)
        return Predictions(mean.cpu().numpy(), found[0]["labels"].cpu().numpy())

    def evaluate_held_out(self, state: Bundle) -> dict[str, float | None]:
        found = score_predictions(CLASSIFICATION, self.score_held_out(state, last=False))
        return {"n": found.n, **found.values}

    @property
    def warnings(self) -> list[str]:
        setup = self.setup
        sizes, sites = setup.federation.sites.values(), setup.dataset.sites.values()
        found = collect_warnings(self.recipe, setup.algorithm, sizes, sites)
        plan = self.recipe.privacy
        if self.remote is not None and plan and plan.unit != "site" and plan.max_sites_per_record is None:
            found.append(
                f"nobody can count how many sites hold the same {plan.unit}, and privacy.max_sites_per_record does "
                f"not say so: ε is that of one {plan.unit} at one site only"
            )
        return found

    def summarise(
        self,
        outcome: Outcome,
        figures: FinalFigures,
        journal: FolderJournal | RamJournal,
        seconds: float,
        student: Bundle | None,
    ) -> RunSummary:
        recipe, dataset, rows, scores = self.recipe, self.setup.dataset, journal.rows, figures.assessment
        public = self.server_trainer.evaluate_models(outcome.state, student) if self.server_trainer else {}
        batch = recipe.training.batch_size(max(self.setup.federation.sites.values()))
        return RunSummary(
            name=recipe.name,
            algorithm=recipe.algorithm.name,
            task=CLASSIFICATION.name,
            data=recipe.data.name,
            seed=recipe.seed,
            rounds=outcome.rounds,
            stopped_early=outcome.stopped_early,
            pooled=self.setup.algorithm.pooled,
            details={"classes": list(dataset.classes)},
            site_sizes=[SiteSizes.model_validate(site) for site in dataset.describe()],
            model=self.setup.networks.model_sizes((batch, dataset.channels, dataset.size, dataset.size)),
            clusters=self.setup.networks.cluster_members(dataset.sites) if recipe.clusters else {},
            headline=figures.choose_headline(public, recipe.evaluate.headline, len(dataset.sites)),
            pooled_from=figures.pooled_from,
            sites=scores.sites,
            merged=scores.merged,
            public=public,
            progress=metric_by_cluster(rows, CLASSIFICATION.main_metric),
            forgetting=forgetting_by_round(rows) if recipe.evaluate.forgetting else {},
            drift=mean_drift(rows),
            cost=sum_costs(journal.costs, seconds),
            released=list_releases(self.setup.plan, self._list_exchanges(), self.setup.transforms),
            warnings=self.warnings,
            sha256=messages.hash_tensors(outcome.state),
            versions=package_versions(),
        )

    def _list_exchanges(self) -> list[Exchange]:
        """Return what sites send of the algorithm's kinds; networks without buffers send none."""
        found = self.setup.algorithm.exchanges()
        return [one for one in found if one.kind != "buffers" or self.setup.networks.have_buffers]

    def _write_model(self, state: Bundle) -> None:
        if self.folder:
            write_atomically(RunFolder(self.folder).model, messages.encode_body(state).data)

    def write_result(self, outcome: Outcome, summary: RunSummary, student: Bundle) -> None:
        assert self.folder is not None
        folder = RunFolder(self.folder)
        self._write_model(outcome.state)
        if student:
            write_atomically(folder.student, messages.encode_body(student).data)
            assert self.server_trainer is not None
            self.server_trainer.draw_teachers(outcome.state, self.setup.dataset.classes, folder.teachers_figure)
        if summary.forgetting:
            write_forgetting_chart(summary, folder.forgetting_figure)
        failpoint("model-written")
        write_atomically(folder.privacy_page, write_privacy_page(summary).encode())
        folder.write_summary(summary)
        failpoint("result-written")


def _run_id(setup: RunSetup) -> str:
    datasets = [setup.dataset]
    if setup.public is not None:
        datasets.append(replace(setup.dataset, sites={setup.public.name: setup.public}))
    terms = "|".join((identity(setup.recipe), *(each.fingerprint for each in datasets)))
    return hashlib.sha256(terms.encode()).hexdigest()[:16]


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
    if folder is not None and RunFolder(folder).is_finished:
        erase_file(RunFolder(folder).secret)  # of a run that was killed as it ended
        return track_finished(read_result(folder, recipe), recipe)
    if folder is not None:
        check_same_recipe(folder, recipe)
    return run_tracked(Experiment(recipe, folder, Path(data) if data else None, watch, dataset))


def run_tracked(experiment: Experiment) -> RunResult:
    """Run it, and write points to the trackers that its recipe names."""
    recipe, folder = experiment.recipe, experiment.folder
    if not recipe.track or folder is None:
        return experiment.run()
    tracking, watch = RunTracking(recipe, folder, experiment.setup.plan), experiment.watch

    def watch_rounds(event: str, info: Mapping[str, Any]) -> None:
        if event == "round":
            tracking.begin_round(info["round"])
        watch(event, info)

    experiment.watch = watch_rounds
    try:
        result = experiment.run()
    except BaseException:
        tracking.close(finished=False)
        raise
    tracking.write_final(result.summary)
    return result
