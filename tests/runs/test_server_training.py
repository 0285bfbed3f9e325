"""The server's own work: heads fitted on public images in every round, and one student of all at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from polyclinic import RunResult, run
from polyclinic.algorithms.distillation.refine import logits_and_labels
from polyclinic.algorithms.distillation.shapley import coalition_value
from polyclinic.core.errors import RecipeError, RoundFailed, StoreError
from polyclinic.core.jobs import Fit, Fitted, Score, Site
from polyclinic.core.options import Private
from polyclinic.core.types import Bundle
from polyclinic.data.examples import Images, SiteData
from polyclinic.evaluation.comparison import Comparison, summarise_methods
from polyclinic.evaluation.flops import count_parameters, training_step_flops
from polyclinic.evaluation.summary import RunSummary
from polyclinic.federation.rounds import Watch
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_results_page
from polyclinic.runs import server_training
from polyclinic.runs.experiment import Experiment
from polyclinic.runs.networks import server_models
from polyclinic.runs.privacy_plan import privacy_limits
from polyclinic.runs.public_data import load_public
from polyclinic.runs.server_training import ServerTrainer
from polyclinic.storage import messages
from polyclinic.storage.run_folder import RunFolder
from polyclinic.training.fit import fit, score
from tests.runs.test_networks import PUBLIC, SITES, hospitals, prepared, recipe

QUICK = {"name": "refine", "epochs": 2, "batch": 64}
PFEDCDP: dict[str, Any] = {"algorithm": {"name": "pfedcdp", "server_epochs": 2}, "public": PUBLIC}


def at_desk(round: int = 1, lr: float = 0.01) -> Site:
    return Site("server", 0, round, 2, lr)


def server_of(experiment: Experiment) -> ServerTrainer:
    assert experiment.server_trainer is not None
    return experiment.server_trainer


def changed(before: Bundle, after: Bundle) -> set[str]:
    assert before.keys() == after.keys()
    return {k for k in before if messages.hash_tensors({k: before[k]}) != messages.hash_tensors({k: after[k]})}


def noisy(part: Any) -> Images:
    """The same labels under other images."""
    found, labels = part.batch(torch.arange(len(part)))
    return Images(torch.rand(found.shape, generator=torch.Generator().manual_seed(3)), labels)


# In every round


def test_it_fits_the_heads_and_nothing_else() -> None:
    experiment = prepared(**PFEDCDP)
    state = experiment.setup.algorithm.init(experiment.setup.federation)
    after = server_of(experiment)(state, at_desk())
    assert changed(state, after) == {"head@high", "head@medium", "head@low"}


def test_without_clusters_too() -> None:
    experiment = prepared(**PFEDCDP, clusters={}, capability={})
    state = experiment.setup.algorithm.init(experiment.setup.federation)
    assert changed(state, server_of(experiment)(state, at_desk())) == {"head"}


def test_fitted_heads_know_more_about_public_images() -> None:
    experiment = prepared(**PFEDCDP)
    server, state = server_of(experiment), experiment.setup.algorithm.init(experiment.setup.federation)
    before, after = (server.evaluate_models(found, None) for found in (state, server(state, at_desk())))
    assert before.keys() == after.keys() == {"high", "medium", "low"}
    assert all(after[cluster].value("loss") < before[cluster].value("loss") for cluster in after)


def test_every_clusters_head_is_fitted_at_its_own_rate() -> None:
    """`low` learns as everyone would at half the rate, the others as before."""
    halved, plain = (prepared(**PFEDCDP, clusters__low__lr_scale=rate) for rate in (0.5, 1.0))
    state = plain.setup.algorithm.init(plain.setup.federation)
    slow, fast = server_of(halved)(state, at_desk()), server_of(plain)(state, at_desk())
    slower = server_of(plain)(state, at_desk(lr=0.005))
    assert changed(slow, fast) == {"head@low"}
    assert changed(slow, slower) == {"head@high", "head@medium"}


def test_it_works_on_public_training_images_and_on_no_others() -> None:
    """The sites' images may be anything, and so may the public ones that are kept for trying."""
    experiment = prepared(**PFEDCDP)
    server, state = server_of(experiment), experiment.setup.algorithm.init(experiment.setup.federation)
    wanted = server(state, at_desk())
    others = {n: SiteData(n, *map(noisy, (s.train, s.validation, s.test))) for n, s in hospitals().sites.items()}
    elsewhere = Experiment(experiment.recipe, dataset=replace(hospitals(), sites=others))
    public = replace(server.public, validation=noisy(server.public.validation), test=noisy(server.public.test))
    found = replace(server_of(elsewhere), public=public)(state, at_desk())
    assert changed(wanted, found) == set()
    public = replace(server.public, train=noisy(server.public.train))
    assert changed(wanted, replace(server, public=public)(state, at_desk())) == {"head@high", "head@medium", "head@low"}


def test_the_same_again_and_another_order_in_another_round() -> None:
    experiment = prepared(**PFEDCDP)
    server, state = server_of(experiment), experiment.setup.algorithm.init(experiment.setup.federation)
    first, again, later = server(state, at_desk()), server(state, at_desk()), server(state, at_desk(2))
    assert changed(first, again) == set()
    assert len(changed(first, later)) == 3
    other = server_of(prepared(**PFEDCDP))
    assert changed(first, other(state, at_desk())) == set()


@pytest.mark.parametrize("public", [PUBLIC, None], ids=["the server fits heads", "it does not"])
@pytest.mark.parametrize("settings", [{}, {"clusters": {}, "capability": {}}], ids=["clusters", "none"])
def test_with_everything_off_hospitals_have_what_fedper_gives_them(settings: dict[str, Any], public: Any) -> None:
    """Bit for bit, though the server fits heads: nobody at a site looks at them."""
    off = {"name": "pfedcdp", "keep": 0, "head_epochs": 0, "server_epochs": 1}
    mine = run(recipe(algorithm=off, public=public, **settings), dataset=hospitals())
    theirs = run(recipe(algorithm="fedper", public=public, **settings), dataset=hospitals())
    assert {kind.partition("@")[0] for kind in changed(theirs.state, mine.state)} == ({"head"} if public else set())
    for site in SITES:
        assert mine.summary.sites[site]["personal"] == theirs.summary.sites[site]["personal"]
    assert mine.summary.drift == theirs.summary.drift


# At the end


@cache
def finished(how: str) -> tuple[Experiment, RunResult]:
    settings = {
        "fedavg": {"algorithm": "fedavg", "clusters": {}, "capability": {}, "finish": QUICK},
        "pfedcdp": {**PFEDCDP, "finish": QUICK},
        "feddf": {**PFEDCDP, "finish": {"name": "feddf", "epochs": 2, "batch": 64}},
        "paper": {**PFEDCDP, "finish": {**QUICK, "variant": "paper"}},
    }[how]
    experiment = prepared(**{"public": PUBLIC, **settings})
    return experiment, experiment.run()


THREE = ["high", "medium", "low"]
TEACHERS = {"fedavg": ["global"], "pfedcdp": THREE, "feddf": THREE, "paper": THREE}


@pytest.mark.parametrize("how", TEACHERS)
def test_a_student_is_tried_everywhere(how: str) -> None:
    experiment, result = finished(how)
    summary, parts = result.summary, server_of(experiment).public
    assert list(summary.public) == [*TEACHERS[how], "student"]
    for scores in summary.public.values():
        assert scores.n == len(parts.test)
        assert {"accuracy", "f1", "auc", "precision", "recall", "specificity"} <= scores.metrics.keys()
    for site in SITES:
        assert summary.sites[site]["student"]["test"].n == 12
    assert summary.merged["student"]["test"].n == 36
    assert summary.finish is not None
    assert list(summary.finish.teacher_weights) == TEACHERS[how]
    assert math.fsum(summary.finish.teacher_weights.values()) == pytest.approx(1)
    assert len(summary.finish.history) == summary.finish.epochs + 1
    assert RunSummary.model_validate(json.loads(json.dumps(summary.to_json(), allow_nan=False))) == summary


@pytest.mark.parametrize("how", ["fedavg", "pfedcdp", "paper"])
def test_shapley_values_add_up_to_what_all_teachers_are_worth_together(how: str) -> None:
    experiment, result = finished(how)
    networks = experiment.setup.networks.by_cluster
    models, public = server_models(experiment.setup.algorithm, result.state, networks), server_of(experiment).public
    logits = {
        group or "global": score(Score(weights, logits_and_labels), networks[group], public.validation)["logits"]
        for group, weights in models.items()
    }
    worth = coalition_value(logits, public.validation.labels)(frozenset(logits))
    assert result.summary.finish is not None
    values = result.summary.finish.shapley
    assert list(values) == TEACHERS[how]
    assert math.fsum(values.values()) == pytest.approx(worth, abs=1e-9)
    assert worth > 0, "they know something"


def test_plain_distillation_asks_nobody_what_teachers_are_worth() -> None:
    found = finished("feddf")[1].summary.finish
    assert found is not None
    assert found.shapley == {}
    assert set(found.teacher_weights.values()) == {1 / 3}


def test_the_student_is_the_recipes_own_model_and_is_written(tmp_path: Path) -> None:
    """Read back, it gives the figures that the result tells; the run's state has nothing of it."""
    wanted = recipe(**PFEDCDP, finish=QUICK)
    result = run(wanted, tmp_path, dataset=hospitals())
    assert result.summary.sha256 == finished("pfedcdp")[1].summary.sha256
    weights = messages.unflatten(load_file(tmp_path / "student.safetensors"))
    server = server_of(finished("pfedcdp")[0])
    network = server.networks.student
    assert network is not None
    assert weights["model"].keys() == network.live["model"].keys()
    logits = score(Score({"buffers": {}, **weights}, logits_and_labels), network, server.public.test)
    right = (logits["logits"].argmax(1) == logits["labels"]).double().mean()
    told = result.summary.public["student"]
    assert told.value("accuracy") == pytest.approx(float(right), abs=1e-12)
    assert told.value("loss") == pytest.approx(float(F.cross_entropy(logits["logits"], logits["labels"])), abs=1e-5)
    kept = messages.unflatten(load_file(tmp_path / "model.safetensors"))
    assert kept.keys() == {kind for kind, group in result.state.items() if group}
    assert not any("student" in kind for kind in kept)
    assert RunFolder(tmp_path).read_summary().finish == result.summary.finish


def test_what_networks_weigh_and_cost_is_told_of_every_cluster() -> None:
    """By the networks themselves, each alone; sums are sums of these."""
    told = finished("pfedcdp")[1].summary.model
    shape = (16, 1, 8, 8)
    for cluster, live in prepared(**PFEDCDP).setup.networks.by_cluster.items():
        one = told.clusters[cluster]
        assert (one.parameters, one.flops_per_step) == (
            count_parameters(live.module),
            training_step_flops(live.module, shape),
        )
        assert f"cluster {cluster}: {one.name} ({one.parameters:,} parameters, " in page("pfedcdp")
    assert told.parameters == sum(one.parameters for one in told.clusters.values())
    assert told.flops_per_step == sum(one.flops_per_step for one in told.clusters.values())
    assert not finished("fedavg")[1].summary.model.clusters
    assert "digits data, mlp (" in page("fedavg")


def page(how: str) -> str:
    results = {"x": [finished(how)[1].summary]}
    return to_markdown(build_results_page(Comparison("x", tuple(summarise_methods(results)), results, None)))


def test_a_run_is_judged_by_the_model_that_was_asked_for() -> None:
    for wanted, of in (("student", "student"), ("global", "global"), ("personal", "personal"), ("public", "student")):
        found = prepared(**PFEDCDP, finish=QUICK, rounds=1, evaluate__headline=wanted).run().summary
        assert found.headline.model == wanted
        figures = found.public[of] if wanted == "public" else found.merged[of]["test"]
        assert found.headline.scores.value("accuracy") == figures.value("accuracy")


def test_the_student_follows_from_the_servers_models() -> None:
    experiment, result = finished("pfedcdp")
    again = server_of(experiment).train_student(result.state)
    assert result.summary.finish is not None
    assert again.shapley == result.summary.finish.shapley
    assert again.history == result.summary.finish.history


def test_an_algorithm_that_leaves_the_server_nothing_is_refused_before_training(tmp_path: Path) -> None:
    played: list[str] = []
    for name in ("local", "fedper", "cross-site"):
        settings = {"algorithm": name, "clusters": {}, "capability": {}, "public": PUBLIC, "finish": QUICK}
        with pytest.raises(RecipeError, match=f"{name} leaves the server no model"):
            run(recipe(**settings), tmp_path / name, watch=lambda event, _: played.append(event), dataset=hospitals())
        assert not (tmp_path / name).exists()
    assert played == []


# Stopped and begun again


def stopping(round: int) -> Watch:
    """Ends a run as a round begins."""

    def watch(event: str, fields: Mapping[str, Any]) -> None:
        if event == "round" and fields["round"] == round:
            raise RoundFailed("the server went down")

    return watch


def moving(**settings: Any) -> Any:
    """Sites that move every other round, masks, the server's heads, and a student."""
    halves = {"more": {"min_score": 0.5, "model": "cnn_c"}, "less": {"min_score": 0, "model": "mlp"}}
    moves = {"clusters": halves, "capability": {"reassess_every": 2}, "seed": 4, "rounds": 4, "finish": QUICK}
    return recipe(**PFEDCDP, **moves, **settings)


@cache
def whole() -> RunResult:
    return run(moving(), dataset=hospitals())


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_was_stopped_ends_in_the_same_bits(at: int, tmp_path: Path) -> None:
    with pytest.raises(RoundFailed):
        run(moving(), tmp_path, watch=stopping(at), dataset=hospitals())
    assert not (tmp_path / "result.json").exists()
    result = run(moving(), tmp_path, dataset=hospitals())
    for key in ("sha256", "sites", "merged", "public", "finish", "drift", "clusters"):
        assert result.summary.model_dump()[key] == whole().summary.model_dump()[key], key


def test_worker_processes_change_nothing() -> None:
    found = run(moving(engine__workers=2), dataset=hospitals()).summary
    assert {key: found.model_dump()[key] for key in ("sha256", "sites", "public")} == {
        key: whole().summary.model_dump()[key] for key in ("sha256", "sites", "public")
    }


def test_a_run_goes_on_with_its_own_public_images_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RoundFailed):
        run(moving(), tmp_path, watch=stopping(3), dataset=hospitals())

    def others(*arguments: Any) -> SiteData:
        found = load_public(*arguments)
        return replace(found, train=noisy(found.train))

    monkeypatch.setattr("polyclinic.runs.assemble.load_public", others)
    with pytest.raises(StoreError, match="other data"):
        run(moving(), tmp_path, dataset=hospitals())


# Under a privacy plan


IMAGE = {"noise": 1.0, "delta": 1e-3, "clip": 1.0}


def test_fishers_information_has_no_price_and_the_way_out_is_told() -> None:
    for algorithm in ({"name": "pfedcdp"}, {"name": "pfedcdp", "variant": "paper"}):
        with pytest.raises(
            RecipeError, match=r"other than for training.*pfedcdp.*variant: corrected and keep: 0"
        ) as caught:
            prepared(algorithm=algorithm, public=PUBLIC, privacy=IMAGE)
        assert "\n" not in str(caught.value)


def test_without_masks_both_trainings_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-entropy of everything, then distillation into the head: batches of 16 from 60 images, 4 an epoch."""
    algorithm = {"name": "pfedcdp", "keep": 0, "head_epochs": 3, "server_epochs": 1}
    experiment = prepared(algorithm=algorithm, public=PUBLIC, privacy=IMAGE)
    assert experiment.setup.plan is not None
    for site in SITES:
        jobs = experiment.setup.plan.jobs[site]
        assert [job.times for job in jobs] == [4, 12]
        assert all(job.rate == pytest.approx(16 / 60, rel=1e-2) for job in jobs)
        assert len(privacy_limits(experiment.setup.plan, site, experiment.secret).priced_jobs) == 2
    alone = prepared(algorithm={**algorithm, "head_epochs": 0}, public=PUBLIC, privacy=IMAGE)
    assert alone.setup.plan is not None
    assert experiment.setup.plan.epsilon > alone.setup.plan.epsilon > 0
    noticed: list[Private | None] = []

    def spied(job: Fit, *rest: Any) -> Fitted:
        noticed.append(job.training.private)
        return fit(job, *rest)

    monkeypatch.setattr(server_training, "fit", spied)
    result = experiment.run()
    assert result.summary.epsilon == pytest.approx(experiment.setup.plan.epsilon)
    assert noticed == [None] * 6, "public images need no protection"
    assert set(result.summary.sites[SITES[0]]) == {"personal", "global"}


def test_whole_sites_are_protected_cluster_by_cluster() -> None:
    """One site in each cluster, one round: what its extractor moved is the clipped update and noise of that size."""
    wish = {"unit": "site", "noise": 2.0, "delta": 1e-2, "clip": 0.5}
    algorithm = {"name": "pfedcdp", "server_epochs": 1}
    experiment = prepared(algorithm=algorithm, public=PUBLIC, privacy=wish, rounds=1)
    result = experiment.run()
    start = experiment.setup.algorithm.init(experiment.setup.federation)
    for cluster in experiment.setup.networks.by_cluster:
        share, first = (experiment.setup.algorithm.cluster_state(state, cluster) for state in (result.state, start))
        moved = torch.cat([(share["model"][n] - t).flatten() for n, t in first["model"].items()]).double()
        assert not any(name.startswith("head") for name in share["model"])
        std = float(moved.norm()) / math.sqrt(moved.numel())
        assert std == pytest.approx(2.0 * 0.5, rel=6 / math.sqrt(2 * moved.numel()))
    assert experiment.setup.plan is not None
    assert result.summary.epsilon == pytest.approx(experiment.setup.plan.epsilon)


def test_the_hospitals_of_these_tests_share_no_image_with_the_server() -> None:
    """Else what is said of public images alone would say little."""
    public = server_of(prepared(**PFEDCDP)).public
    own = {image.numpy().tobytes() for s in hospitals().sites.values() for image in s.train.batch(torch.arange(60))[0]}
    theirs = public.train.batch(torch.arange(len(public.train)))[0]
    assert not own & {image.numpy().tobytes() for image in theirs}
