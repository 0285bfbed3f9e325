"""A server is held to the recipe: rounds in order, its learning rate, its first weights, and nothing twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from polyclinic.cli.data import hash_command
from polyclinic.cli.site import allow_round_command, approve_command
from polyclinic.core import Bundle
from polyclinic.core.errors import RecipeError, Refused, StoreError
from polyclinic.deploy.serve import run_deployed
from polyclinic.deploy.site.orders import (
    BOOK,
    Order,
    OrderBook,
    RunHistory,
    RunRules,
    allow_round,
    check_first_weights,
    check_learning_rate,
    check_tensors,
    read_permit,
)
from polyclinic.deploy.site.policy import Allow, bind_approval, finish_run, read_approvals, recipe_digest
from polyclinic.federation.engines import RemoteExecution
from polyclinic.federation.rounds import draw_cohort
from polyclinic.federation.secure_aggregation.cohort import MASKS, hash_kinds
from polyclinic.runs.assemble import round_options
from polyclinic.runs.experiment import Experiment
from polyclinic.storage import messages
from tests.deploy.example_sites import (
    CLUSTERS,
    EVERYTHING,
    SITES,
    TABLE,
    ApprovingHandler,
    Crossing,
    beginning,
    config,
    desks,
    loop,
    recipe,
    refusal,
    said,
    simulation,
    write_hospitals,
)
from tests.deploy.masking import FIVE, masking_desks
from tests.federation.mock_engine import MockEngine

RULES = RunRules("hill", "r", rounds=5, most_replies=8, most_missed=2, may_end_early=False)


def train(round: int, content: str = "", memory: int = 0) -> Order:
    return Order("train", round, f"train {round} {content}", memory)


def last(round: int, content: str = "") -> Order:
    return Order("evaluate", round, f"evaluate {round} {content}", 0)


def answered(book: OrderBook, order: Order, was_away: bool = False) -> str:
    """Why an order is refused; "": it is answered."""
    try:
        book.check(order, was_away)
    except Refused as refusal:
        return str(refusal)
    book.record(order)
    return ""


def test_an_honest_run_is_answered_and_its_order_is_all_that_is(tmp_path: Path) -> None:
    book = OrderBook(tmp_path, RULES)
    assert "leaves out round 1" in answered(book, train(2))
    for round in range(1, 6):
        assert answered(book, train(round)) == ""
        assert "comes again with other contents" in answered(book, train(round, "other"))
        assert "asks for the evaluation" in answered(book, last(round))
    assert answered(book, last(6)) == answered(book, last(6)) == ""
    assert "second evaluation" in answered(book, last(6, "other"))
    assert "was evaluated here" in answered(book, train(5)), "not even the same again"
    assert [answered(OrderBook(tmp_path, RULES), last(6)) for _ in range(2)] == ["", ""]
    assert "would be try 5 of the evaluation" in answered(book, last(6)), "as often as there are retries"


def test_a_server_that_crashed_repeats_what_it_asked(tmp_path: Path) -> None:
    """Its last snapshot was some rounds ago."""
    for round in (1, 2, 3, 2, 3, 4, 5):
        assert answered(OrderBook(tmp_path, RULES), train(round)) == ""
    assert answered(OrderBook(tmp_path, RULES), train(5)) == ""
    assert "would be answer 9 of a run that has 8" in answered(OrderBook(tmp_path, RULES), train(5))
    assert answered(OrderBook(tmp_path, RULES), last(6)) == "", "the evaluation is no such answer"


def test_a_run_that_may_end_early_is_evaluated_after_any_round_and_then_over(tmp_path: Path) -> None:
    early = RunRules("hill", "r", 5, 8, 2, may_end_early=True)
    book = OrderBook(tmp_path, early)
    assert [answered(book, train(round)) for round in (1, 2)] == ["", ""]
    assert "asks for the evaluation" in answered(book, last(2))
    assert "leaves out round 3" in answered(book, last(4))
    assert answered(book, last(3)) == ""
    assert "was evaluated here" in answered(book, train(3))


@pytest.mark.parametrize(
    ("changes", "early"),
    [({}, False), ({"early_stop": {"patience": 2}}, True), ({"privacy": {"noise": 1.0, "delta": 1e-3}}, True)],
)
def test_which_recipes_may_end_early(changes: dict[str, Any], early: bool) -> None:
    rules = RunRules.from_recipe(recipe(**changes), Allow(), "hill", "r", lambda _: True)
    assert (rules.may_end_early, rules.most_replies) == (early, 25)


def test_memory_is_of_an_answered_round_and_never_older_than_before(tmp_path: Path) -> None:
    book = OrderBook(tmp_path, RULES)
    assert "has no memory of round 1" in answered(book, train(1, memory=1))
    assert [answered(book, train(1)), answered(book, train(2, memory=1))] == ["", ""]
    assert "has no memory of round 0" in answered(book, train(3, memory=0))
    assert answered(book, train(3, memory=1)) == "", "a reply that was late does not count"


def test_a_person_may_let_a_server_skip_or_evaluate_again(tmp_path: Path) -> None:
    book = OrderBook(tmp_path, RULES)
    assert answered(book, train(1)) == ""
    allow_round(tmp_path, 5)
    assert "leaves out round 2" in answered(book, train(3))
    assert answered(book, train(5)) == ""
    assert answered(book, last(6)) == ""
    allow_round(tmp_path, 6)
    assert answered(book, last(6, "other")) == ""
    assert "second evaluation" in answered(book, last(6, "a third"))


@pytest.mark.parametrize("text", ["{", "[]", '{"rounds": {"1": 5}}', '{"rounds": {"a": ["b", 1]}}', '{"more": 1}'])
def test_a_damaged_book_answers_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / BOOK).write_text(text)
    with pytest.raises(StoreError, match="is damaged"):
        OrderBook(tmp_path, RULES).check(train(1), was_away=False)
    (tmp_path / "allowed-round.json").write_text(text)
    with pytest.raises(StoreError, match="is damaged"):
        read_permit(tmp_path)
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(StoreError, match="is damaged"):
        RunHistory(tmp_path).check_begin("hill", Allow())


@settings(max_examples=150, deadline=None)
@given(
    asks=st.lists(
        st.tuples(st.sampled_from(["train", "evaluate"]), st.integers(1, 6), st.integers(0, 2), st.booleans()),
        max_size=40,
    )
)
def test_whatever_a_server_asks_it_hears_no_more_than_the_recipe(
    asks: list[tuple[str, int, int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every round has one content, first answers go forward, and there is one evaluation, at the end."""
    book = OrderBook(tmp_path_factory.mktemp("book"), RULES)
    heard: list[Order] = []
    for purpose, round, content, away in asks:
        order = train(round, str(content)) if purpose == "train" else last(round, str(content))
        if not answered(book, order, away):
            heard.append(order)
    rounds = [order for order in heard if order.purpose == "train"]
    assert len(rounds) <= RULES.most_replies
    contents = {order.round: order.digest for order in rounds}
    assert all(contents[order.round] == order.digest for order in rounds)
    first = list(dict.fromkeys(order.round for order in rounds))
    assert first == sorted(first)
    assert len(set(range(1, max(first, default=0))) - set(first)) <= RULES.most_missed
    ends = [place for place, order in enumerate(heard) if order.purpose == "evaluate"]
    assert len({heard[place].digest for place in ends}) <= 1
    assert not ends or ends == list(range(ends[0], len(heard)))


def test_rounds_that_the_public_draw_leaves_out_are_no_gaps_and_no_rounds_of_this_site(home: Path) -> None:
    made = simulation(recipe(cohort=2, rounds=9, evaluate__every=0, model__name="linear"), home)
    desk = ApprovingHandler(config(home, "hill", "drawn"))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds, state = loop(made, Crossing({})), made.setup.algorithm.init(made.setup.federation)
    ours = [r for r in range(1, 10) if "hill" in draw_cohort(SITES, round_options(made.recipe, ""), r)]
    assert 3 < len(ours) < 9
    for round in range(1, 10):
        reply = said(desk.answer_message(rounds.prepare_outbox("train", round, state, ["hill"], [])["hill"]))
        assert ("leaves hill out of round" in reply.get("why", "")) == (round not in ours), reply
    assert "failure" not in said(
        desk.answer_message(rounds.prepare_outbox("evaluate", 10, state, ["hill"], ["test"])["hill"])
    )


def test_a_cluster_is_the_one_that_the_recipe_computes(home: Path) -> None:
    made = simulation(recipe(**CLUSTERS), home)
    desk = ApprovingHandler(config(home, "hill", "cluster"))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    rounds, state = loop(made, Crossing({})), made.setup.algorithm.init(made.setup.federation)
    outbox = rounds.prepare_outbox("train", 1, state, ["hill"], [])
    outbox.tensors = lambda _: made.setup.algorithm.broadcast(state, "lake")
    assert "hill is not in cluster 'low' in round 1" in refusal(said(desk.answer_message(outbox["hill"])))


def test_a_masked_round_cannot_be_searched_by_crafted_orders(tmp_path: Path) -> None:
    """Weights that make the update leave the grid are answered as any others: once a round, not forty times."""
    write_hospitals(tmp_path, FIVE)
    masked = recipe(rounds=2, stages=[{"name": "mask"}], evaluate__every=0)
    sites, made = masking_desks(tmp_path, "s", FIVE), simulation(masked, tmp_path)
    for site in FIVE:
        assert said(sites[site].answer_message(beginning(made, site)))["ready"]
        sites[site].note_absence()
    part = sites["fjord"]._open
    assert part is not None
    like, told = part.broadcast_templates[""], list[bytes]()
    for scale in (600.0, 601.0, 602.0, 600.0):
        weights = {
            **like,
            "model": {name: torch.full_like(tensor, scale) for name, tensor in like["model"].items()},
        }
        keys = {}
        for site in FIVE:
            wanted = {"received": hash_kinds(weights), "attempt": 0}
            keys[site] = said(sites[site].answer_message(masked_order("keys", site, made, {}, wanted)))[MASKS]
        order = masked_order("train", "fjord", made, weights, {"keys": keys, "sites": list(FIVE)})
        told.append(sites["fjord"].answer_message(order))
    assert all("comes again with other contents" in refusal(said(answer)) for answer in told[1:3])
    assert "failure" not in said(told[0])
    assert told[3] == told[0]
    rows = [row for row in sites["fjord"].releases.read_entries() if row["purpose"] == "train"]
    assert [row.get("times", 1) for row in rows] == [1, 2], rows


def masked_order(purpose: str, site: str, made: Experiment, weights: Bundle, masks: dict[str, Any]) -> bytes:
    """An order of round 2, whose weights no recipe determines."""
    order = loop(made, Crossing({})).prepare_outbox("train", 2, {}, [site], [])
    order.tensors = lambda _: weights
    fields = {**messages.decode(order[site]).fields, "purpose": purpose, MASKS: masks}
    return messages.encode({**fields, "memory_round": 0}, weights)


SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "cosine": {"schedule": {"name": "cosine", "minimum": 0.01}},
    "plateau": {"schedule": {"name": "plateau", "patience": 1, "factor": 0.5}},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_is_the_schedules(name: str) -> None:
    found = recipe(rounds=7, **SCHEDULES[name])
    schedule, base = found.schedule, found.training.optimiser.lr

    def fits(rate: float, round: int) -> bool:
        try:
            check_learning_rate(rate, found, round, 1.0, "hill")
        except Refused:
            return False
        return True

    for round in range(1, 8):
        cuts = range(1 + (round - 1) // 2) if name == "plateau" else [0]
        allowed = [base * schedule.lr_factor(round, 7, cut) for cut in cuts]
        assert all(fits(rate, round) for rate in allowed)
        others = [1e6, 0.0, -base, math.nan, base * 0.5 ** (len(allowed) + (name != "plateau")), base * 1.0000001]
        assert not any(fits(rate, round) for rate in others if rate not in allowed)
    with pytest.raises(Refused):
        check_learning_rate(base, found, 1, 2.0, "hill")
    check_learning_rate(base * 2.0, found, 1, 2.0, "hill")


def test_tensors_have_the_layout_of_the_recipe() -> None:
    like = {"model": {"w": torch.zeros(2, 3)}, "others": {"v": torch.zeros(2, 0, 5)}, "first": {"n": torch.zeros(1)}}
    check_tensors({**like, "others": {"v": torch.ones(2, 7, 5)}}, like, frozenset(), "hill")
    check_tensors({kind: group for kind, group in like.items() if kind != "first"}, like, frozenset({"first"}), "hill")
    for wrong in (
        {**like, "others": {"v": torch.ones(2, 7, 6)}},
        {**like, "first": {}},
        {**like, "model": {"w": torch.zeros(2, 3, dtype=torch.float64)}},
        {**like, "model": {"w": torch.full((2, 3), math.inf)}},
        {**like, "bank": {}},
    ):
        with pytest.raises(Refused):
            check_tensors(wrong, like, frozenset(), "hill")


def test_first_weights_differ_in_the_last_bits_at_most() -> None:
    own = {"model": {"w": torch.randn(50, generator=torch.Generator().manual_seed(1))}}
    check_first_weights(own, own, None, "hill")
    check_first_weights({"model": {"w": own["model"]["w"] * (1 + 1e-6)}}, own, None, "hill")
    for wrong in (own["model"]["w"] * 1.001, torch.zeros(50), own["model"]["w"] + torch.eye(50)[3] * 1e-3):
        with pytest.raises(Refused, match="not those that the recipe's seed makes"):
            check_first_weights({"model": {"w": wrong}}, own, None, "hill")


def app(command: Callable[..., None], *words: object, answer: str = "") -> str:
    """What a command prints."""
    found = typer.Typer(rich_markup_mode=None)
    found.command()(command)
    result = CliRunner().invoke(found, list(map(str, words)), input=answer, env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return f"{result.output}\nexit {result.exit_code}"


@pytest.fixture
def site(home: Path, tmp_path: Path) -> Path:
    """A site.yaml."""
    path = tmp_path / "site.yaml"
    values = {"federation": "f", "site": "hill", "folder": "state", "allow": EVERYTHING}
    path.write_text(json.dumps({**values, "data": {TABLE: str(home / "hill" / TABLE)}}))
    return path


def test_approving_shows_what_would_leave_asks_and_can_be_taken_back(site: Path, tmp_path: Path) -> None:
    path = tmp_path / "agreed.yaml"
    path.write_text(recipe().to_yaml())
    folder, digest = tmp_path / "state", recipe_digest(recipe())
    told = app(approve_command, site, path, answer="n\n")
    for words in (
        "model",
        "every round",
        "allow.least_sites",
        "budget",
        digest,
        "nothing bounds what its updates tell",
    ):
        assert words in told
    assert told.endswith("exit 1")
    assert read_approvals(folder) == []
    assert "no recipe is approved" in app(approve_command, site)
    assert app(approve_command, site, path, "--by", "a. person", answer="y\n").endswith("exit 0")
    (approval,) = read_approvals(folder)
    assert (approval.digest, approval.name, approval.by) == (digest, "law", "a. person")
    assert app(approve_command, site, path, "--yes").endswith("exit 0")
    assert read_approvals(folder) == [approval], "once"
    listed = app(approve_command, site)
    assert "a. person" in listed
    assert "not begun" in " ".join(listed.split())
    bind_approval(folder, approval, "run-7")
    for count in (2, 2):
        assert app(approve_command, site, path, "--yes").endswith("exit 0")
        assert len(read_approvals(folder)) == count, "another for another run"
    listed = " ".join(app(approve_command, site).split())
    assert all(words in listed for words in ("run-7 goes on", "not begun"))
    finish_run(folder, "run-7", "2026-01-02")
    assert "ended 2026-01-02" in " ".join(app(approve_command, site).split())
    assert "0 approved recipes begin with 'zz'" in app(approve_command, site, "--revoke", "zz")
    assert "no longer approved" in app(approve_command, site, "--revoke", digest[:12])
    assert read_approvals(folder) == []


def test_what_the_policy_refuses_is_not_approved(site: Path, tmp_path: Path) -> None:
    path = tmp_path / "agreed.yaml"
    path.write_text(recipe(algorithm="centralised").to_yaml())
    with pytest.raises(Refused, match="needs all sites' images in one place"):
        app(approve_command, site, path, "--yes")
    assert read_approvals(tmp_path / "state") == []


def test_a_round_is_allowed_in_a_run_that_there_is(site: Path, home: Path, tmp_path: Path) -> None:
    made = simulation(recipe(), home)
    desk = ApprovingHandler(config(home, "hill").model_copy(update={"folder": tmp_path / "state"}))
    assert said(desk.answer_message(beginning(made, "hill")))["ready"]
    for name in ("other", "../runs", ""):
        told = app(allow_round_command, site, name, 2)
        assert f"there are: {made.run_id()}" in " ".join(told.replace("│", " ").split())
        assert told.endswith("exit 2")
    beyond = app(allow_round_command, site, made.run_id(), made.recipe.rounds + 2)
    assert f"which has {made.recipe.rounds} rounds" in " ".join(beyond.replace("│", " ").split())
    assert read_permit(tmp_path / "state" / "runs" / made.run_id()) is None
    assert app(allow_round_command, site, made.run_id(), made.recipe.rounds + 1).endswith("exit 0"), "the evaluation"
    assert app(allow_round_command, site, made.run_id(), 3).endswith("exit 0")
    permit = read_permit(tmp_path / "state" / "runs" / made.run_id())
    assert permit is not None
    assert permit["round"] == 3


@pytest.fixture
def weights(home: Path, tmp_path: Path) -> Path:
    """A file of first weights."""
    trained = simulation(recipe(rounds=1, seed=5), home).run().state["model"]
    save_file({f"model/{name}": tensor for name, tensor in trained.items()}, tmp_path / "first.safetensors")
    return tmp_path / "first.safetensors"


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedper"])
def test_given_first_weights_are_recognised_by_the_hash_in_the_recipe(
    algorithm: str, weights: Path, home: Path, tmp_path: Path
) -> None:
    unnamed = recipe(rounds=2, algorithm=algorithm, model__weights=str(weights))
    crossing, out = Crossing(desks(home, f"given {algorithm}")), tmp_path / "run"
    there = RemoteExecution(MockEngine(crossing.answer), "mock")
    with pytest.raises(RecipeError, match=r"add model\.sha256, which `polyclinic weights hash RECIPE`"):
        run_deployed(unnamed, there, SITES, out)
    why = refusal(said(crossing.desks["hill"].answer_message(beginning(simulation(unnamed, home), "hill"))))
    assert "add model.sha256" in why
    path = tmp_path / "agreed.yaml"
    path.write_text(unnamed.to_yaml())
    told = app(hash_command, path, "--classes", "benign,malignant")
    digest = told.split("model.sha256: ")[1].split()[0]
    named = recipe(rounds=2, algorithm=algorithm, model__weights=str(weights), model__sha256=digest)
    assert run_deployed(named, there, SITES, out).summary.sha256 == simulation(named, home).run().summary.sha256
    wrong = recipe(rounds=2, algorithm=algorithm, model__weights=str(weights), model__sha256="0" * 64)
    with pytest.raises(RecipeError, match=f"but the first weights have {digest}"):
        simulation(wrong, home)
    # A server that ignores the recipe, as simulations of one do not.
    plain = simulation(recipe(rounds=2, algorithm=algorithm), home)
    desk = ApprovingHandler(config(home, "hill", f"given {algorithm} 2"))
    begin = beginning(plain, "hill", {"recipe": named.to_yaml()})
    assert said(desk.answer_message(begin))["ready"]
    state = plain.setup.algorithm.init(plain.setup.federation)
    order = loop(plain, Crossing({})).prepare_outbox("train", 1, state, ["hill"], [])["hill"]
    assert "not those whose SHA-256 the recipe names" in refusal(said(desk.answer_message(order)))


def test_a_hash_of_weights_that_are_not_given_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="none are"):
        recipe(model__sha256="0" * 64)
    (tmp_path / "plain.yaml").write_text(recipe(data__classes=["benign", "malignant"]).to_yaml())
    with pytest.raises(RecipeError, match="makes its first weights from its seed"):
        app(hash_command, tmp_path / "plain.yaml")
