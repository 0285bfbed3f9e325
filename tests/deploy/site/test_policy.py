"""What a hospital allows is all that a server gets: algorithms, recipes, kinds, and a privacy budget of its own."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from polyclinic import Recipe
from polyclinic.config.identity import predicted_parts
from polyclinic.core import Bundle, Part
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.deploy.site.orders import allow_round
from polyclinic.deploy.site.policy import (
    Allow,
    check_predicted,
    check_recipe,
    check_scalars,
    check_sent_kinds,
    recipe_digest,
    write_approvals,
)
from polyclinic.deploy.site.preview import WITHHELD
from polyclinic.deploy.site.release_log import ReleaseLog, RotatingLog
from polyclinic.deploy.site.scores import read_kept_scores
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.plan import least_metrics_noise
from polyclinic.runs.experiment import Experiment
from polyclinic.storage import messages
from polyclinic.storage.ledger import Ledger
from tests.deploy.example_sites import (
    CLUSTERS,
    EVERYTHING,
    KINDS,
    ApprovingHandler,
    Crossing,
    approve,
    asked,
    beginning,
    config,
    deployed,
    loop,
    recipe,
    said,
    simulation,
)

WISH = {"noise": 2.0, "delta": 1e-3}


def enrolled(home: Path, state: str, found: Recipe, **settings: Any) -> dict[str, Any]:
    return said(ApprovingHandler(config(home, "hill", state, **settings)).answer_message(asked("enrol", "hill", found)))


def allowing(**changes: Any) -> dict[str, Any]:
    return {"allow": {**EVERYTHING, **changes}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an algorithm": (allowing(algorithms=["fedavg"]), {"algorithm": "fedprox"}, "does not allow the algorithm fedprox"),
    "nothing said": ({"allow": {}}, {}, "does not allow the algorithm fedavg"),
    "a model": (allowing(models=["linear"]), {}, "does not allow the model mlp"),
    "a model of a cluster": (allowing(models=["mlp", "linear"]), CLUSTERS, "does not allow the model cnn_c"),
    "more rounds": (allowing(rounds=4), {}, "the recipe has 5 rounds, and hill allows 4"),
    "a small cohort": (allowing(least_sites=3), {"cohort": 1}, "at least 3 sites, and a round of this recipe has 1"),
    "numbers": (allowing(kinds=sorted(KINDS - {"steps"})), {"algorithm": "fednova"}, "does not let steps leave"),
    "features": (allowing(kinds=sorted(KINDS - {"features"})), {"algorithm": "fedmp"}, "does not let features leave"),
    "metrics": (allowing(kinds=["model", "buffers"]), {}, "set evaluate.every: 0"),
    "forgetting": (
        allowing(kinds=["model", "buffers"]),
        {"evaluate__every": 0, "evaluate__forgetting": True},
        "does not let metrics leave",
    ),
    "pooled": ({}, {"algorithm": "centralised"}, "needs all sites' images in one place"),
    "methods": ({}, {"methods": {"a": {}, "b": {}}}, "compares several methods"),
    "noise the server knows": (
        allowing(seeded_noise=False),
        {"privacy": {**WISH, "randomness": "seed"}},
        "privacy.randomness: secret",
    ),
    "no plan": ({"budget": {"epsilon": 8}}, {}, "add `privacy`"),
    "another unit": ({"budget": {"epsilon": 8, "unit": "patient"}}, {"privacy": WISH}, "set privacy.unit: patient"),
    "the server's noise": (
        {"budget": {"epsilon": 8, "unit": "site"}},
        {"privacy": {**WISH, "unit": "site", "noise_at": "server"}},
        "privacy.noise_at: site",
    ),
    "open metrics": ({"budget": {"epsilon": 8}}, {"privacy": {**WISH, "metrics": "open"}}, "suppress or count"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_allowed_is_refused_at_enrolment_and_at_the_beginning(case: str, home: Path) -> None:
    site, wanted, words = CASES[case]
    found = recipe(**wanted)
    desk = ApprovingHandler(config(home, "hill", f"policy {case}", **site))
    plan = None if found.privacy is None else {"noise": 2.0, "metrics_noise": None, "holders": 1}
    shape = {"run": "r", "classes": ["benign", "malignant"], "channels": 1, "size": 8, "plan": plan}
    shape |= {"sites": ["harbour", "hill", "lake"]}
    for order in (asked("enrol", "hill", found), asked("begin", "hill", found, shape)):
        reply = said(desk.answer_message(order))
        assert reply["failure"] == "refused"
        assert words in reply["why"]
        assert words in desk.site_log.read_lines()[-1]
    assert desk.releases.read_entries() == []


def test_what_is_allowed_is_not_refused(home: Path) -> None:
    modest = {"kinds": ["model", "buffers"], "algorithms": ["fedavg"], "models": ["mlp"]}
    assert "card" in enrolled(home, "modest", recipe(evaluate__every=0), allow=modest)


def test_only_what_was_approved_runs_until_it_is_withdrawn(home: Path) -> None:
    desk = SiteMessageHandler(config(home, "hill", "approved"))
    found, again = recipe(), recipe(about="other words", engine__workers=2)

    def enrol(asking: Recipe) -> str:
        return str(said(desk.answer_message(asked("enrol", "hill", asking))).get("why", "enrolled"))

    assert "nobody at hill has approved this recipe" in enrol(found)
    assert f"whose digest is {recipe_digest(found)}" in desk.site_log.read_lines()[-1]
    approve(desk.config.folder, found)
    assert enrol(found) == enrol(again) == "enrolled", "neither words nor the engine decide a round"
    for digit in (recipe(rounds=6), recipe(training__optimiser__lr=0.06), recipe(seed=1)):
        assert "nobody at hill has approved" in enrol(digit)
    made = simulation(found, home)
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    write_approvals(desk.config.folder, [])
    order = loop(made, Crossing({})).prepare_outbox("train", 1, first_state(made), ["hill"], ["validation"])["hill"]
    assert "nobody at hill has approved" in said(desk.answer_message(order))["why"], "a run that has begun ends, too"
    (desk.config.folder / "approved.yaml").write_text("- 5")
    assert "cannot write or read its own folder" in enrol(found)


def first_state(made: Experiment) -> Bundle:
    return made.setup.algorithm.init(made.setup.federation)


def played(desk: SiteMessageHandler, made: Experiment) -> tuple[Rounds, Bundle]:
    """All rounds of a run, as far as they are hill's; no weight ever moves."""
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds, state = loop(made, Crossing({})), first_state(made)
    for number in range(1, made.recipe.rounds + 1):
        order = rounds.prepare_outbox("train", number, state, ["hill"], [])["hill"]
        assert "failure" not in said(desk.answer_message(order))
    return rounds, state


def test_a_policy_that_changed_holds_for_runs_that_began_before(home: Path) -> None:
    made = simulation(recipe(algorithm="fedprox"), home)
    assert said(ApprovingHandler(config(home, "hill", "changed")).answer_message(beginning(made, "hill")))["ready"]
    order = loop(made, Crossing({})).prepare_outbox(
        "train", 1, made.setup.algorithm.init(made.setup.federation), ["hill"], []
    )["hill"]
    stricter = ApprovingHandler(config(home, "hill", "changed", **allowing(algorithms=["fedavg"])))
    assert "does not allow the algorithm" in said(stricter.answer_message(order))["why"]


def test_metrics_and_predictions_are_asked_for_in_vain_where_they_may_not_leave(home: Path) -> None:
    """A server that says one thing in its recipe and asks another in its orders."""
    made = simulation(recipe(evaluate__every=0, rounds=1), home)
    desk = ApprovingHandler(config(home, "hill", "vain", **allowing(kinds=["model", "buffers"])))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds, state = loop(made, Crossing({})), first_state(made)
    nosy = rounds.prepare_outbox("train", 1, state, ["hill"], ["validation"])["hill"]
    assert "the recipe has no metrics in round 1" in said(desk.answer_message(nosy))["why"]
    assert "examples" in said(desk.answer_message(rounds.prepare_outbox("train", 1, state, ["hill"], [])["hill"]))
    last = rounds.prepare_outbox("evaluate", 2, state, ["hill"], ["test"])["hill"]
    told = messages.decode(desk.answer_message(last))
    assert "does not let metrics leave" in told.fields["withheld"]
    assert "scores" not in told.fields
    assert told.tensors == {}
    (kept,) = read_kept_scores(desk.config.folder)
    assert kept.withheld == told.fields["withheld"]
    assert [row["kinds"].keys() - {"model", "buffers"} for row in desk.releases.read_entries()] == [set(), set()]


@pytest.mark.parametrize("expressly", [False, True])
def test_beside_a_budget_predictions_leave_only_if_the_site_says_so(expressly: bool, home: Path) -> None:
    """They evade the budget: no plan protects them."""
    limit = {"budget": {"epsilon": 50, "delta": 1e-3, "predictions": expressly}}
    made = simulation(recipe(privacy=WISH, evaluate__every=0), home)
    desk = ApprovingHandler(config(home, "hill", f"predictions {expressly}", **limit))
    rounds, state = played(desk, made)
    order = rounds.prepare_outbox("evaluate", 6, state, ["hill"], ["test"])["hill"]
    reply = messages.decode(desk.answer_message(order))
    assert ("predictions" in reply.tensors) == expressly
    (row,) = (one for one in desk.preview_releases(made.recipe) if one.kind == "predictions")
    assert (row.when == WITHHELD) != expressly
    assert expressly or "a budget, which predictions would evade" in row.protection


def test_the_last_look_at_a_reply_finds_kinds_and_bytes_that_nobody_agreed_to() -> None:
    allow = Allow(kinds=("model", "buffers"))
    check_sent_kinds({"model": 100, "buffers": 0}, {"model": 100, "buffers": 0}, "hill", allow)
    check_sent_kinds({"features": 0}, {"model": 100}, "hill", allow)
    with pytest.raises(Refused, match=r"^policy: more bytes of model would have left hill than were agreed$"):
        check_sent_kinds({"model": 101}, {"model": 100}, "hill", allow)
    with pytest.raises(Refused, match="does not let features leave"):
        check_sent_kinds({"model": 100, "features": 1}, {"model": 100, "features": 9}, "hill", allow)
    with pytest.raises(Refused, match="more bytes of buffers"):
        check_sent_kinds({"buffers": 1}, {"model": 100}, "hill", allow)


@pytest.mark.parametrize("plan", [None, WISH])
def test_training_and_validation_images_are_predicted_for_nobody(plan: dict[str, Any] | None, home: Path) -> None:
    made = simulation(recipe(privacy=plan, rounds=1), home)
    desk = ApprovingHandler(config(home, "hill", f"parts {plan}"))
    rounds, state = played(desk, made)
    asks = rounds.prepare_outbox("evaluate", 2, state, ["hill"], predicted_parts(made.recipe))["hill"]
    found = messages.decode(desk.answer_message(asks)).tensors["predictions"]
    assert {name.split("|")[1] for name in found} == {"test"}
    rows = found["global|test|thousandths"]
    assert (rows.dtype, rows.shape[1]) == (torch.int16, 1), "whole thousandths; the last class tells nothing"
    assert desk.releases.read_entries()[-1]["epsilon"] == "unprotected"


def test_the_last_look_at_predictions_finds_other_parts_and_numbers_that_are_not_rounded() -> None:
    rows = torch.zeros(4, 1, dtype=torch.int16)
    check_predicted({"m|test|thousandths": rows, "m|test|labels": torch.zeros(4).long()}, "hill")
    for name, wrong in (("thousandths", rows.double()), ("probabilities", rows.double()), ("labels", rows)):
        with pytest.raises(Refused, match="not whole thousandths"):
            check_predicted({f"m|test|{name}": wrong}, "hill")
    for part in ("train", "validation"):
        with pytest.raises(Refused, match=f"predictions of {part} images"):
            check_predicted({f"m|{part}|labels": rows}, "hill")


@pytest.mark.parametrize("scalars", [{"other": 1.0}, {"steps": float("nan")}, {"steps": "8"}, {"steps": [1]}, 5, [1]])
def test_numbers_that_the_algorithm_does_not_declare_stay(scalars: Any) -> None:
    check_scalars({"steps": 8.0}, {"steps"}, "hill")
    with pytest.raises(Refused, match="would have left hill"):
        check_scalars(scalars, {"steps"}, "hill")


def spends(rounds: int, noise: float = 2.0) -> list[Spend]:
    """Of the recipe at hill: 8 training images in batches of 4, so two steps an epoch at a rate of a half."""
    return [Spend(noise, 0.5, 2 * rounds)]


def budget(rounds: int, spare: float = 1e-6) -> dict[str, Any]:
    return {"budget": {"unit": "image", "delta": 1e-3, "epsilon": epsilon(spends(rounds), 1e-3) + spare}}


def test_a_budget_pays_for_just_as_many_rounds_as_it_should(home: Path) -> None:
    """What is left is what the accountant says of all rounds of all runs together."""
    run = recipe(privacy=WISH, rounds=3)
    crossing = Crossing({"hill": ApprovingHandler(config(home, "hill", "pays", **budget(6)))})
    for count in (3, 6):
        _play(run.model_copy(update={"seed": count}), home, crossing)
        told = crossing.desks["hill"].releases.read_entries()[-1]["epsilon"]
        assert told == pytest.approx(epsilon(spends(count), 1e-3), abs=1e-6)
    made = simulation(run.model_copy(update={"seed": 9, "rounds": 1}), home)
    reply = said(crossing.desks["hill"].answer_message(beginning(made, "hill")))
    assert reply["failure"] == "refused"
    assert reply["why"].startswith("budget: this run would cost more than the privacy budget of hill has left")
    short = ApprovingHandler(config(home, "hill", "short", **budget(3, -1e-3)))
    assert "budget" in said(short.answer_message(beginning(simulation(run, home), "hill")))["why"]


def _play(found: Recipe, home: Path, crossing: Crossing) -> None:
    """The recipe's rounds, as far as they are hill's."""
    made = simulation(found, home)
    assert said(crossing.desks["hill"].answer_message(beginning(made, "hill"))).get("ready")
    rounds, state = loop(made, crossing), made.setup.algorithm.init(made.setup.federation)
    for number in range(1, found.rounds + 1):
        answer = crossing.answer("hill", rounds.prepare_outbox("train", number, state, ["hill"], [])["hill"])
        assert isinstance(answer, bytes), answer


def test_a_server_that_goes_back_from_other_weights_runs_out_of_budget(home: Path) -> None:
    """Even where people at the site let it, every time."""
    made = simulation(recipe(privacy=WISH, rounds=2), home)
    desk = ApprovingHandler(config(home, "hill", "greedy", **budget(3)))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds, start = loop(made, Crossing({})), first_state(made)
    folder = desk.config.folder / "runs" / made.run_id()
    replies = [said(desk.answer_message(rounds.prepare_outbox("train", 1, start, ["hill"], [])["hill"]))]
    for turn in range(4):
        moved = {kind: {n: t + turn for n, t in group.items()} for kind, group in start.items()}
        allow_round(folder, 2)
        replies.append(said(desk.answer_message(rounds.prepare_outbox("train", 2, moved, ["hill"], [])["hill"])))
    assert ["failure" in reply for reply in replies] == [False, False, False, True, True]
    assert replies[3]["why"] == "privacy: round 2 would cost hill more than the recipe promises" or (
        replies[3]["why"] == "budget: the privacy budget of hill cannot pay round 2"
    )
    assert ["model" in row["kinds"] for row in desk.releases.read_entries()] == [True, True, True, False, False]


def test_a_round_is_charged_before_it_is_played(home: Path) -> None:
    """C4: whatever happens afterwards, what is written is never less than what left."""
    made = simulation(recipe(algorithm="scaffold", privacy=WISH), home)
    desk = ApprovingHandler(config(home, "hill", "charged", **budget(50)))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    order = messages.decode(
        loop(made, Crossing({})).prepare_outbox(
            "train", 1, made.setup.algorithm.init(made.setup.federation), ["hill"], []
        )["hill"]
    )
    (desk.config.folder / "runs" / made.run_id() / "memory").write_text("in the way of the site's memory")
    assert said(desk.answer_message(messages.encode(order.fields, order.tensors)))["failure"] == "error"
    assert len(Ledger(home / "hill" / "charged" / "ledger.jsonl").read()) == 1
    assert [list(row["kinds"]) for row in desk.releases.read_entries()] == [["failure"]]


COUNTED = {"privacy": {**WISH, "metrics": "count"}, "rounds": 2}


def charged(desk: SiteMessageHandler) -> list[tuple[int, str, set[str]]]:
    """Round, purpose and payers of every row of a site's ledger."""
    rows = Ledger(desk.config.folder / "ledger.jsonl").read()
    return [(row["round"], row["privacy"]["of"].partition("-")[0], set(row["privacy"]["sites"])) for row in rows]


def test_a_round_and_an_evaluation_of_its_number_are_charged_both(home: Path) -> None:
    """Train 1, evaluate 2, then train 2, which people have allowed; and the same order once more costs nothing."""
    made = simulation(recipe(**COUNTED), home)
    desk, state = ApprovingHandler(config(home, "hill", "both purposes")), first_state(made)
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds = loop(made, Crossing({}))
    asks: list[tuple[str, int, list[Part]]] = [
        ("train", 1, ["validation"]),
        ("evaluate", 2, ["test"]),
        ("train", 2, []),
    ]
    orders = [rounds.prepare_outbox(purpose, n, state, ["hill"], parts)["hill"] for purpose, n, parts in asks]
    assert "failure" not in said(desk.answer_message(orders[0]))
    assert "scores" in said(desk.answer_message(orders[1]))
    allow_round(desk.config.folder / "runs" / made.run_id(), 2)
    for _ in range(2):
        assert "failure" not in said(desk.answer_message(orders[2]))
    paid = {"hill", "validation"}
    assert charged(desk) == [(1, "train", paid), (2, "evaluate", {"test"}), (2, "train", paid)]
    assert desk.releases.read_entries()[-1]["epsilon"] == pytest.approx(epsilon(spends(2), 1e-3), abs=1e-6)


def test_a_round_that_was_charged_and_cut_off_pays_for_no_evaluation(home: Path) -> None:
    made = simulation(recipe(**COUNTED), home)
    desk, state = ApprovingHandler(config(home, "hill", "cut off")), first_state(made)
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds = loop(made, Crossing({}))
    assert "failure" not in said(desk.answer_message(rounds.prepare_outbox("train", 1, state, ["hill"], [])["hill"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteRunner, "start_local", lambda *_: 1 / 0)
        with suppress(ZeroDivisionError):
            desk.answer_message(rounds.prepare_outbox("train", 2, state, ["hill"], [])["hill"])
    early, told = (
        said(desk.answer_message(rounds.prepare_outbox("evaluate", number, state, ["hill"], ["test"])["hill"]))
        for number in (2, 3)
    )
    assert "asks for the evaluation, which follows round 2" in early["why"]
    assert "scores" in told
    assert [(number, purpose) for number, purpose, _ in charged(desk)] == [(1, "train"), (2, "train"), (3, "evaluate")]


def test_a_round_that_people_allow_again_has_other_noise_and_is_charged_again(home: Path) -> None:
    """The very same order, after another one: with its former noise a second sum behind masks could be compared."""
    made = simulation(recipe(privacy=WISH, rounds=2), home)
    desk, state = ApprovingHandler(config(home, "hill", "allowed again")), first_state(made)
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds = loop(made, Crossing({}))
    first, second = (rounds.prepare_outbox("train", n, state, ["hill"], [])["hill"] for n in (1, 2))
    replies = [messages.decode(desk.answer_message(order)) for order in (first, first, second)]
    assert messages.hash_tensors(replies[0].tensors) == messages.hash_tensors(replies[1].tensors)
    assert len(charged(desk)) == 2, "a repeated order is the same reply"
    allow_round(desk.config.folder / "runs" / made.run_id(), 1)
    replies += [messages.decode(desk.answer_message(order)) for order in (first, second, first, second)]
    assert [messages.hash_tensors(reply.tensors) for reply in replies[3:5]] == [
        messages.hash_tensors(reply.tensors) for reply in replies[5:]
    ]
    assert len({messages.hash_tensors(reply.tensors) for reply in replies}) == 4
    assert [number for number, _, _ in charged(desk)] == [1, 2, 1, 2]


def test_a_ledger_that_lost_rows_ends_all_private_work(home: Path) -> None:
    made = simulation(recipe(privacy=WISH, rounds=2), home)
    desk = ApprovingHandler(config(home, "hill", "lost", **budget(2)))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds, state = loop(made, Crossing({})), made.setup.algorithm.init(made.setup.federation)
    assert "failure" not in said(desk.answer_message(rounds.prepare_outbox("train", 1, state, ["hill"], [])["hill"]))
    (home / "hill" / "lost" / "ledger.jsonl").write_bytes(b"")
    reply = said(desk.answer_message(rounds.prepare_outbox("train", 2, state, ["hill"], [])["hill"]))
    assert reply["failure"] == "error"
    assert "ledger" not in reply["why"]
    assert "lacks charges" in desk.site_log.read_lines()[-1]


NEED = "and the validation images of hill need"
LITTLE = "too little for what the recipe promises"
COUNT: dict[str, Any] = {"metrics": "count"}
PLANS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"noise": 2.0, **COUNT}, {"metrics_noise": 1e-9}, NEED),
    ({"noise": 2.0, **COUNT}, {"metrics_noise": 0}, NEED),
    ({"noise": 2.0, **COUNT}, {"metrics_noise": lambda honest: 0.99 * honest}, NEED),
    ({"noise": 2.0, **COUNT}, {"metrics_noise": 1e300}, "should be a number from 0 to 1e+06"),
    ({"noise": 2.0, **COUNT}, {"metrics_noise": "1"}, "should be a number from 0 to 1e+06"),
    ({"noise": 2.0, **COUNT}, {"noise": 1.9}, "the recipe's noise is 2, but the plan's is 1.9"),
    ({"noise": 0.0, **COUNT}, {"metrics_noise": 0.001}, NEED),
    ({"noise": 2.0, **COUNT, "unit": "patient"}, {"metrics_noise": 1e-9}, NEED),
    ({"noise": 2.0, **COUNT, "unit": "patient"}, {"metrics_noise": lambda honest: 0.99 * honest}, NEED),
    ({"noise": 2.0, "unit": "patient"}, {"noise": 1.9}, "the recipe's noise is 2, but the plan's is 1.9"),
    ({"noise": 2.0, "unit": "site"}, {"noise": 1.9}, "the recipe's noise is 2, but the plan's is 1.9"),
    ({"noise": 2.0, "unit": "site"}, {"metrics_noise": 2.0}, "noise on metrics"),
    ({"noise": 2.0}, {"site_noise": {"hill": 1.9}}, "the recipe's noise is 2, but the plan's is 1.9"),
    ({"noise": 2.0, "epsilon": 50.0, **COUNT}, {"metrics_noise": 1e-9}, LITTLE),
    ({"epsilon": 3.0, **COUNT}, {"metrics_noise": lambda honest: 0.99 * honest}, LITTLE),
    ({"epsilon": 3.0, **COUNT}, {"metrics_noise": None}, "noise on metrics"),
    ({"epsilon": 3.0, **COUNT}, {"noise": lambda honest: 0.99 * honest}, LITTLE),
    ({"epsilon": 3.0}, {"site_noise": {"hill": 0.3}}, LITTLE),
    ({"epsilon": 3.0, "noise_per_site": False}, {"noise": lambda honest: 0.99 * honest}, LITTLE),
    ({"epsilon": 3.0, "unit": "patient"}, {"noise": 0.3}, LITTLE),
    ({"epsilon": 3.0, "unit": "patient", **COUNT}, {"metrics_noise": 1e-9}, LITTLE),
    ({"epsilon": 9.0, "unit": "site"}, {"noise": lambda honest: 0.99 * honest}, LITTLE),
    ({"noise": 2.0}, {"noise": 0.5}, "the recipe's noise is 2, but the plan's is 0.5"),
    ({"epsilon": 3.0}, {"noise": 0.3}, "too little for what the recipe promises"),
    ({"noise": 2.0, "metrics": "count"}, {"metrics_noise": None}, "noise on metrics"),
    ({"noise": 2.0}, {"metrics_noise": 1.0}, "noise on metrics"),
    ({"epsilon": 3.0, "metrics": "count"}, {"metrics_noise": 0.01}, "too little for what the recipe promises"),
    ({"noise": 2.0}, {"noise": -1.0}, "should be a number from 0 to 1e+06"),
    ({"noise": 2.0}, {"holders": 0}, "holders is 0"),
]


@pytest.mark.parametrize(("wish", "lie", "words"), PLANS)
def test_a_server_cannot_send_less_noise_than_its_recipe_promises(
    wish: dict[str, Any], lie: dict[str, Any], words: str, home: Path
) -> None:
    made = simulation(recipe(privacy={"delta": 1e-3, **wish}), home)
    assert made.setup.plan is not None
    quiet = made.setup.plan.metrics_noise
    honest = {
        "noise": made.setup.plan.noise,
        "metrics_noise": None if math.isinf(quiet) else quiet,
        "holders": made.setup.plan.max_sites_per_record,
    }
    desk = ApprovingHandler(config(home, "hill", f"less noise {PLANS.index((wish, lie, words))}"))
    told = {key: value(honest[key]) if callable(value) else value for key, value in lie.items()}
    reply = said(desk.answer_message(beginning(made, "hill", {"run": "lie", "plan": {**honest, **told}})))
    assert reply["failure"] == "refused"
    assert words in reply["why"]
    assert said(desk.answer_message(beginning(made, "hill", {"run": "honest" + made.run_id()})))["ready"]


def test_where_noise_is_given_every_site_takes_the_honest_noise_on_metrics(tmp_path: Path) -> None:
    """Sites of different sizes pay different ε for their training images, and none more for those of validation."""
    sizes = {"harbour": 8, "hill": 14, "lake": 22}
    hospitals = [{"name": site, "vendor": "film", "patients": n, "malignant": 0.5} for site, n in sizes.items()]
    data = {"name": "phantom", "size": 32, "hospitals": hospitals, "split": recipe().data.split.model_dump()}
    made = Experiment(recipe(data=data, privacy={**WISH, "noise": 1.0, "metrics": "count"}))
    assert made.setup.plan is not None
    needs = []
    for site in sizes:
        desk = ApprovingHandler(config(tmp_path, site))
        assert said(desk.answer_message(beginning(made, site)))["ready"], site
        assert desk._open is not None
        own = desk._open.setup.plan
        assert own is not None
        needs.append(least_metrics_noise(own, len(sizes)))
        validation = own.epsilon_of(own.validation_spends(len(own.rounds)))
        assert validation <= own.epsilon_of(own.run_spends()[site]) * 1.001
    assert min(needs) < 0.95 * max(needs)
    assert made.setup.plan.metrics_noise == pytest.approx(max(needs), rel=1e-3)


@pytest.mark.parametrize("lie", ["noise", "metrics_noise", "epsilon"])
@pytest.mark.parametrize(("factor", "refused"), [(0.99, True), (1.01, False)])
def test_a_promise_is_kept_to_the_percent(lie: str, factor: float, refused: bool, home: Path) -> None:
    """One percent less noise than the recipe promises is refused, one more is not; so it is with ε itself."""

    def promising(most: float) -> Experiment:
        return simulation(recipe(privacy={"delta": 1e-3, "epsilon": most, "metrics": "count"}, rounds=2), home)

    plan = promising(3.0).setup.plan
    assert plan is not None
    honest = {"noise": plan.noise_of("hill"), "metrics_noise": plan.metrics_noise, "holders": 1}
    if lie != "epsilon":
        honest[lie] *= factor
    made = promising(3.0 * factor if lie == "epsilon" else 3.0)
    desk = ApprovingHandler(config(home, "hill", f"percent {lie} {factor}"))
    reply = said(desk.answer_message(beginning(made, "hill", {"plan": honest})))
    assert ("failure" in reply) == refused
    assert not refused or "too little for what the recipe promises" in reply["why"]


def test_a_promise_holds_where_cohorts_hide_how_often_a_site_takes_part(home: Path) -> None:
    found = recipe(privacy={"delta": 1e-3, "epsilon": 3.0}, cohort=2, rounds=4)
    made = simulation(found, home)
    assert made.setup.plan is not None
    little = {"noise": 1.2, "metrics_noise": None, "holders": 1}
    fewest = next(n for n in range(1, 9) if epsilon(spends(n, 1.2), 1e-3) > 3.0)
    assert 1 < fewest <= 4
    desk = ApprovingHandler(config(home, "hill", "cohorts"))
    assert said(desk.answer_message(beginning(made, "hill", {"plan": little})))["ready"]
    rounds, state = loop(made, Crossing({})), made.setup.algorithm.init(made.setup.federation)
    replies = [
        said(desk.answer_message(rounds.prepare_outbox("train", n, state, ["hill"], [])["hill"])) for n in (1, 2, 3, 4)
    ]
    assert ["failure" in reply for reply in replies] == [n >= fewest for n in (1, 2, 3, 4)]


def test_validation_images_pay_for_metrics_and_training_images_for_training(home: Path) -> None:
    """D4: an image is one or the other, so the dearer counts, not the sum."""
    crossing = Crossing({site: ApprovingHandler(config(home, site, "dearer")) for site in ("harbour", "hill", "lake")})
    found = recipe(privacy={"delta": 1e-3, "epsilon": 8.0, "metrics": "count"}, rounds=2)
    deployed(found, home, crossing)
    rows = Ledger(home / "hill" / "dearer" / "ledger.jsonl").read()
    assert [set(row["privacy"]["sites"]) for row in rows] == [{"hill", "validation"}] * 2
    costs = [
        epsilon([Spend(*spend) for row in rows for spend in row["privacy"]["sites"][who]], 1e-3)
        for who in ("hill", "validation")
    ]
    assert crossing.desks["hill"].releases.read_entries()[-1]["epsilon"] == pytest.approx(max(costs), abs=1e-6)
    assert max(costs) <= 8.0


def test_a_preview_tells_what_the_run_would_cost(home: Path) -> None:
    desk = ApprovingHandler(config(home, "hill", "priced", **budget(5)))
    rows = {row.kind: row for row in desk.preview_releases(recipe(privacy=WISH))}
    assert rows["model"].epsilon == pytest.approx(epsilon(spends(5), 1e-3))
    assert "DP-SGD" in rows["model"].protection
    assert rows["predictions"].epsilon is None
    with pytest.raises(Refused, match="privacy budget of hill"):
        desk.preview_releases(recipe(privacy=WISH, rounds=6))
    plain = {row.kind: row for row in ApprovingHandler(config(home, "hill", "plain")).preview_releases(recipe())}
    assert plain["model"].protection == "no privacy plan in this recipe"
    assert plain["model"].bytes == sum(t.nbytes for t in _model().values())


def _model() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(64, 64), "b": torch.zeros(64), "c": torch.zeros(2, 64), "d": torch.zeros(2)}


def test_the_release_log_never_exceeds_its_size(tmp_path: Path) -> None:
    book = RotatingLog(tmp_path / "releases.jsonl", most=1000, kept=3)
    for number in range(500):
        book.append_line(f"line {number:04d} {'x' * 40}")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * 1000
    lines = book.read_lines()
    assert lines[-1].startswith("line 0499")
    assert [int(line.split()[1]) for line in lines] == list(range(500 - len(lines), 500))


def test_half_a_line_of_a_killed_process_spoils_no_other(tmp_path: Path) -> None:
    releases = ReleaseLog(tmp_path)
    note = {"run": "r", "purpose": "train", "epsilon": math.inf}
    releases.record_release(b"one", {"model": 3}, round=1, **note)  # type: ignore[arg-type]
    with open(tmp_path / "releases.jsonl", "ab") as file:
        file.write(b'{"time": "2030')
    releases.record_release(b"two", {"model": 3}, round=2, **note)  # type: ignore[arg-type]
    assert [(row["round"], row["epsilon"]) for row in releases.read_entries()] == [(1, "infinite"), (2, "infinite")]


SITE: dict[str, Any] = {"federation": "north-sea", "site": "harbour", "server": "fl.example.org:9443"}


def test_site_yaml_is_read_from_its_own_folder(tmp_path: Path) -> None:
    path = tmp_path / "kit" / "site.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({**SITE, "ca": "ca.crt", "data": {"a": "images/labels.csv", "b": "/data/b"}}))
    found = SiteConfig.load(path)
    assert (found.ca, found.folder) == (tmp_path / "kit" / "ca.crt", tmp_path / "kit" / "state")
    assert found.data == {"a": tmp_path / "kit" / "images" / "labels.csv", "b": Path("/data/b")}
    assert (found.allow.algorithms, found.allow.kinds, found.budget) == ((), (), None)
    with pytest.raises(Refused):
        check_recipe(recipe(), "harbour", found.allow, found.budget, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sight": "x"}, "there is no key 'sight'"),
        ({"site": "a/b"}, "site is 'a/b', but The site name"),
        ({"allow": {"algorithms": ["fedavgg"]}}, "did you mean 'fedavg'?"),
        ({"allow": {"models": ["resnet19"]}}, "did you mean 'resnet18'?"),
        ({"allow": {"least_sites": 0}}, "allow.least_sites is 0"),
        ({"allow": {"everything": True}}, "there is no key 'allow.everything'"),
        ({"budget": {"epsilon": -1}}, "budget.epsilon is -1"),
        ({"budget": {"epsilon": 1, "unit": "pixel"}}, "budget.unit is 'pixel'"),
        ({"federation": None}, "'federation' has no value"),
        ({"allow": {"kinds": ["modle"]}}, "no algorithm sends anything of kind 'modle' (did you mean 'model'?)"),
        ({"allow": {"kinds": "model"}}, "allow.kinds is 'model', but it should be a list, such as [model]"),
        (
            {"allow": {"algorithms": "fedavg"}},
            "allow.algorithms is 'fedavg', but it should be a list, such as [fedavg]",
        ),
        ({"data": {"busi /x": None}}, "'data.busi /x' has no value"),
        ({"data": {"busi": 5}}, "data.busi is 5, but it should be a path"),
        ({"data": "busi"}, "data should hold keys of its own"),
        ({"budget": {"epsilon": "much"}}, "budget.epsilon is 'much', but it should be a number"),
    ],
)
def test_mistakes_in_site_yaml_are_one_sentence(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump({**SITE, **change}))
    with pytest.raises(RecipeError) as caught:
        SiteConfig.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert not re.search(r"tuple|pathlib|valid|dict|\n", str(caught.value)), "no words of a programmer"
