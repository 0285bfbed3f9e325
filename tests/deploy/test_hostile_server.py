"""T1: a hostile server against a site with its kit's own policy and one approved honest recipe.

The attacks of a review are played by a server in this process against a real `SiteMessageHandler` whose site.yaml is
that of a provisioned kit. Each attack also runs against a site without the guard, where it must read images: otherwise
these tests could not fail.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from polyclinic import Recipe
from polyclinic.core import Bundle, SiteId
from polyclinic.deploy.config import FederationConfig, ServerSection
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.deploy.site import participation
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.message_handler import MOST_RUNS, SiteMessageHandler
from polyclinic.deploy.site.orders import OrderBook, allow_round
from polyclinic.deploy.site.policy import RELEASED_PARTS, read_approvals, write_approvals
from polyclinic.deploy.site.scores import HomeEvaluation, score_at_home
from polyclinic.runs.sites import FederatedDataset
from polyclinic.storage import messages
from tests.deploy.example_sites import EVERYTHING, SITES, approve, asked, said

EACH, SIZE = 100, 32
HONEST: dict[str, Any] = {
    "name": "agreed",
    "rounds": 5,
    "data": {"name": "table", "path": "scans", "size": SIZE, "channels": 1, "classes": ["benign", "malignant"]},
    "model": "cnn_c",
    "algorithm": "fedavg",
    "training": {"batch": 32, "optimiser": {"lr": 0.05}},
    "evaluate": {"bootstrap": 0},
}
ONE_IMAGE: dict[str, Any] = {
    **HONEST,
    "rounds": 21,
    "model": "linear",
    "training": {"epochs": None, "steps": 1, "batch": 1, "optimiser": {"lr": 0.05}},
}
"""What a server would send that wants one image a round: the gradient of a linear model is the image."""


def write_scans(folder: Path, first: int) -> Path:
    """A table of real ultrasound images, half of each class; `first`: where in the set to begin."""
    source = Path(os.environ.get("POLYCLINIC_DATA", "")) / "busi"
    if not (source / "labels.csv").exists():
        pytest.skip("needs the images of BUSI under POLYCLINIC_DATA")
    rows = ["path,label"]
    for label in ("benign", "malignant"):
        found = [
            line.split(",")[0] for line in (source / "labels.csv").read_text().splitlines() if f",{label}," in line
        ]
        for number, path in enumerate(found[first : first + EACH // 2]):
            name = f"{label} {number}.png"
            with Image.open(source / path) as scan:
                scan.convert("L").resize((SIZE, SIZE)).save(folder / name)
            rows.append(f"{name},{label}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder / "labels.csv"


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The images of two hospitals."""
    return [write_scans(tmp_path_factory.mktemp(f"scans {first}"), first) for first in (0, EACH)]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("kits") / "k"
    server = ServerSection(host="127.0.0.1", port=9443)
    provision_federation(FederationConfig(federation="north-sea", server=server, sites=SITES), folder)
    return folder


@dataclass
class EvilServer:
    """A server that says what it likes to one site, and keeps what it hears."""

    desk: SiteMessageHandler
    told: list[str]
    recipe: Recipe
    run: str = "run-1"
    heard: list[bytes] = field(default_factory=list)

    def say(self, data: bytes) -> dict[str, Any]:
        self.heard.append(self.desk.answer_message(data))
        return said(self.heard[-1])

    def enrol(self, asking: Recipe | None = None) -> dict[str, Any]:
        return self.say(asked("enrol", "hill", asking or self.recipe))

    def begin(self, asking: Recipe | None = None, **fields: Any) -> dict[str, Any]:
        shape = {"classes": ["benign", "malignant"], "channels": 1, "size": SIZE, "sites": list(SITES), "plan": None}
        return self.say(asked("begin", "hill", asking or self.recipe, {"run": self.run, **shape, **fields}))

    def order(self, purpose: str, round: int, weights: Bundle, **fields: Any) -> dict[str, Any]:
        common: dict[str, Any] = {
            "run": self.run,
            "site": "hill",
            "seed": self.recipe.seed,
            "purpose": purpose,
            "round": round,
            "rounds": self.recipe.rounds,
            "lr": self.recipe.training.optimiser.lr,
            "parts": ["validation"] if purpose == "train" else ["test"],
            "oldest_snapshot": 0,
            "memory_round": 0,
        }
        return self.say(messages.encode({**common, **fields}, weights))

    def last(self) -> Bundle:
        """The tensors of the last reply."""
        return messages.decode(self.heard[-1]).tensors

    def first_weights(self) -> Bundle:
        """The recipe's own, which everybody can make."""
        part = self.desk._open
        assert part is not None
        return {kind: dict(group) for kind, group in part.broadcast_templates[""].items()}

    def images(self) -> FederatedDataset:
        assert self.desk._open is not None
        return self.desk._open.setup.dataset


def kit_site(kits: Path, folder: Path, table: Path, **allow: Any) -> tuple[SiteMessageHandler, list[str]]:
    """A site as its kit sets it up, with its own images, and its terminal."""
    told: list[str] = []
    site = SiteConfig.load(kits / "sites" / "hill" / "site.yaml")
    changed = site.allow.model_copy(update=allow)
    site = site.model_copy(update={"data": {"scans": table}, "folder": folder, "allow": changed})
    return SiteMessageHandler(site, told.append), told


def attack(kits: Path, folder: Path, table: Path, found: Recipe | None = None, **allow: Any) -> EvilServer:
    """A server that has enrolled a site for the honest recipe, which the site's people approved.

    This site asks for no other sites' signatures, as if a server that plays with it alone had them: that it has not,
    and gets nothing, is another test's.
    """
    desk, told = kit_site(kits, folder, table, **{"least_sites": 1, **allow})
    server = EvilServer(desk, told, found or Recipe.from_values(HONEST))
    approve(desk.config.folder, server.recipe)
    assert "card" in server.enrol()
    return server


def play_honestly(server: EvilServer, rounds: int) -> Bundle:
    """Play the first rounds as a server of one site would."""
    weights = server.first_weights()
    for round in range(1, rounds + 1):
        assert "failure" not in server.order("train", round, weights)
        weights = server.last()
    return weights


def changed(weights: Bundle, **kinds: Mapping[str, torch.Tensor]) -> Bundle:
    return {**weights, **{kind: {**weights.get(kind, {}), **group} for kind, group in kinds.items()}}


def zeros(weights: Bundle) -> Bundle:
    return {kind: {name: torch.zeros_like(t) for name, t in group.items()} for kind, group in weights.items()}


def broken(weights: Bundle, value: float) -> Bundle:
    return changed(weights, model={"head.bias": torch.full((2,), value)})


ATTACKS: dict[str, tuple[str, Any]] = {
    "other first weights": ("first weights", lambda s, w: fresh(s).order("train", 1, zeros(w))),
    "learning rate 1e6": ("learning rate of 1e+06 in round 3", lambda s, w: s.order("train", 3, w, lr=1e6)),
    "learning rate 0": ("learning rate of 0", lambda s, w: s.order("train", 3, w, lr=0.0)),
    "learning rate below 0": ("lr: lr is -0.05", lambda s, w: s.order("train", 3, w, lr=-0.05)),
    "a round again": ("round 2 of run run-1 was answered before", lambda s, w: s.order("train", 2, zeros(w))),
    "the first round again": ("round 1 of run run-1 was answered before", lambda s, w: s.order("train", 1, w)),
    "a round left out": ("leaves out round 3, for which hill was there", lambda s, w: s.order("train", 4, w)),
    "another memory": (
        "has no memory of round 4",
        lambda s, w: s.order("train", 3, w, memory_round=4),
    ),
    "NaN": ("holds NaN or infinity in 'head.bias'", lambda s, w: s.order("train", 3, broken(w, float("nan")))),
    "infinity": ("holds NaN or infinity", lambda s, w: s.order("train", 3, broken(w, float("inf")))),
    "an extra kind": ("was sent 'bank'", lambda s, w: s.order("train", 3, changed(w, bank={"a": torch.zeros(9)}))),
    "an extra tensor": ("other names", lambda s, w: s.order("train", 3, changed(w, model={"a": torch.zeros(9)}))),
    "metrics of training images": ("validation images only", lambda s, w: s.order("train", 3, w, parts=["train"])),
    "evaluation before the end": ("asks for the evaluation, which follows", lambda s, w: s.order("evaluate", 3, w)),
    "evaluation at the end of nothing": ("leaves out round 3", lambda s, w: s.order("evaluate", 6, w)),
    "a run of others": ("list of sites lacks hill", lambda s, w: s.begin(run="others", sites=["a", "b", "c"])),
    "a run of nobody": ("0 sites are named", lambda s, w: s.begin(run="nobody", sites=[])),
    "the site thrice": ("names a site twice", lambda s, w: s.begin(run="thrice", sites=["hill"] * 3)),
    "another recipe": ("nobody at hill has approved", lambda s, w: s.enrol(Recipe.from_values(ONE_IMAGE))),
    "one digit changed": ("nobody at hill has approved", lambda s, w: s.enrol(with_digit())),
    "one digit changed, begun": ("nobody at hill has approved", lambda s, w: s.begin(with_digit(), run="other")),
    "another seed": ("nobody at hill has approved", lambda s, w: s.begin(Recipe.from_values({**HONEST, "seed": 1}))),
}


def fresh(server: EvilServer) -> EvilServer:
    """The same server with another run."""
    other = EvilServer(server.desk, server.told, server.recipe, "run-2", server.heard)
    assert other.begin()["ready"]
    approve(server.desk.config.folder, server.recipe)
    return other


def with_digit() -> Recipe:
    return Recipe.from_values({**HONEST, "training": {"batch": 32, "optimiser": {"lr": 0.06}}})


def test_every_attack_is_refused_by_name_and_tells_nothing(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    """Two hospitals with quite different images refuse with the same bytes."""
    answers: list[dict[str, bytes]] = []
    for number, table in enumerate(scans):
        server, found = attack(kits, tmp_path / str(number), table), dict[str, bytes]()
        assert server.begin()["ready"]
        approve(server.desk.config.folder, server.recipe)  # so that it is not for want of one that runs are refused
        weights = play_honestly(server, 2)
        left = len(server.desk.releases.read_entries())
        for name, (words, ask) in ATTACKS.items():
            reply = ask(server, weights)
            assert reply.get("failure") == "refused", name
            assert words in reply["why"], (name, reply["why"])
            assert words in server.told[-1], "on the terminal"
            assert words in server.desk.site_log.read_lines()[-1], "in the log"
            assert server.last() == {}
            found[name] = server.heard[-1]
        assert len(server.desk.releases.read_entries()) == left
        assert "failure" not in server.order("train", 3, play_on(server)), "and the honest run goes on"
        answers.append(found)
    assert answers[0] == answers[1]


def test_a_server_alone_with_a_site_gets_nothing(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    """With the kit's own policy, whole and unchanged."""
    server = attack(kits, tmp_path, scans[0], least_sites=3)
    assert "takes part with at least 3 sites, and this run has 1" in server.begin(run="alone", sites=["hill"])["why"]
    assert server.begin()["ready"]
    reply = server.order("train", 1, server.first_weights())
    assert reply["why"].startswith("cohort: 1 of the 3 sites that hill asks for took part in round 0")
    assert server.last() == {}
    assert [row["purpose"] for row in server.desk.releases.read_entries()] == ["enrol"]


def play_on(server: EvilServer) -> Bundle:
    """The weights of the last honest reply."""
    replies = [messages.decode(reply) for reply in server.heard]
    return next(reply.tensors for reply in reversed(replies) if reply.tensors)


@pytest.mark.parametrize("guarded", [True, False])
def test_one_image_a_round_is_read_only_where_the_site_lets_a_round_have_one(
    guarded: bool, kits: Path, scans: list[Path], tmp_path: Path
) -> None:
    """With a linear model of zeros and a batch of one, each of 20 rounds is an image, to the last bits."""
    policy = {} if guarded else {"least_images": 1}
    server = attack(kits, tmp_path, scans[0], Recipe.from_values(ONE_IMAGE), **policy)
    if guarded:
        why = server.begin()["why"]
        assert "at least 64 training images shall stand behind an update of hill" in why
        assert "no run run-1" in server.order("train", 1, {})["why"]
        return
    assert server.begin()["ready"]
    weights = server.first_weights()
    assert "failure" not in server.order("train", 1, weights)
    train = server.images().sites["hill"].train
    true = train.batch(torch.arange(len(train)))[0].flatten(1)
    errors, found = [], set()
    for round in range(2, 22):
        assert "failure" not in server.order("train", round, zeros(weights))
        step = server.last()["model"]["head.weight"][0] / (server.recipe.training.optimiser.lr / 2)
        distance = torch.minimum((true - step).abs().amax(1), (true + step).abs().amax(1))
        errors.append(float(distance.min()))
        found.add(int(distance.argmin()))
    assert max(errors) < 1e-4, "the attack must work where nothing stops it"
    assert len(found) == 20


def block_reader(like: Bundle, row: int, column: int) -> Bundle:
    """Weights of the approved network that make its word on an image the maximum of one block of 4 × 4 pixels."""
    weights = zeros(like)
    model = weights["model"]
    model["extractor.conv1.weight"][0, 0, 1, 1] = 1
    model["extractor.conv1.bias"][0] = 5  # so that nothing is cut off below
    model["extractor.conv2.weight"][0, 0, 1, 1] = 1
    model["extractor.dense.weight"][0, row * (SIZE // 4) + column] = 1
    model["head.weight"][1, 0] = 0.5
    return weights


def blocks(server: EvilServer, part: str) -> torch.Tensor:
    images = getattr(server.images().sites["hill"], part)
    pixels = images.batch(torch.arange(len(images)))[0]
    return torch.nn.functional.max_pool2d(pixels, 4).flatten(1)


def read_blocks(server: EvilServer, weights: Bundle, parts: list[str], count: int) -> dict[str, torch.Tensor]:
    """What a server reads of images by `count` evaluations with crafted weights, one block each; NaN: not answered."""
    found: dict[str, list[torch.Tensor]] = {part: [] for part in parts}
    for number in range(count):
        crafted = block_reader(weights, number // (SIZE // 4), number % (SIZE // 4))
        server.order("evaluate", 6, crafted, parts=parts)
        predictions = server.last().get("predictions", {})
        for part in parts:
            rows = predictions.get(f"global|{part}|thousandths")
            sites = len(getattr(server.images().sites["hill"], part))
            odds = torch.full((sites,), torch.nan) if rows is None else -(rows[:, 0].double() / 1000).logit()
            found[part].append(odds / 0.5 - 5)
    return {part: torch.stack(columns, 1) for part, columns in found.items()}


def answer_everything(recipe: Recipe, site: SiteId, groups: Bundle, *_: object) -> HomeEvaluation:
    """All predictions of all parts, exact: in thousandths, which here are no whole numbers."""
    found = {f"{key}|thousandths": rows["probabilities"][:, :1].double() * 1000 for key, rows in groups.items()}
    scores, headline = score_at_home(recipe, site, groups)
    return HomeEvaluation(headline, scores, {"withheld": "nothing"}, {"predictions": found})


def test_crafted_weights_read_all_images_where_evaluation_is_not_guarded(
    kits: Path, scans: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules of a former version: any number of evaluations, of any part, exact."""
    monkeypatch.setattr(OrderBook, "check", lambda *_, **__: None)
    monkeypatch.setattr(participation, "answer_evaluation", answer_everything)
    monkeypatch.setattr(participation, "rounded_bytes", lambda *_: 1 << 30)
    monkeypatch.setattr(participation, "check_predicted", lambda *_: None)
    server = attack(kits, tmp_path, scans[0], kinds=("model", "buffers", "metrics", "predictions"))
    assert server.begin()["ready"]
    parts = ["train", "validation", "test"]
    found = read_blocks(server, server.first_weights(), parts, 64)
    for part in parts:
        assert float((found[part] - blocks(server, part)).abs().max()) < 1e-3, "all blocks of all images"


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("asked_for", [64, pytest.param(1024, marks=pytest.mark.heavy)])
def test_of_many_evaluations_one_is_answered_at_most_and_of_test_images(
    asked_for: int, allowed: bool, kits: Path, scans: list[Path], tmp_path: Path
) -> None:
    """By default none; where a site lets predictions leave, one number of three decimals for each test image.

    With the review's 1,024 evaluations: `./scripts/test --heavy tests/deploy/test_hostile_server.py`.
    """
    kinds = ("model", "buffers", "metrics", *(["predictions"] if allowed else []))
    server = attack(kits, tmp_path, scans[0], kinds=kinds)
    assert server.begin()["ready"]
    weights = play_honestly(server, 5)
    found = read_blocks(server, weights, ["train", "validation", "test"], asked_for)
    assert bool(found["train"].isnan().all())
    assert bool(found["validation"].isnan().all())
    answered = ~found["test"].isnan().all(0)
    assert answered.tolist() == [allowed, *[False] * (asked_for - 1)]
    predicted = [tensors for reply in server.heard if (tensors := messages.decode(reply).tensors.get("predictions"))]
    assert len(predicted) == allowed
    for tensors in predicted:
        rows = tensors["global|test|thousandths"]
        assert rows.dtype == torch.int16
        assert rows.shape[1] == 1, "one number an image, of two classes"
        assert {name.split("|")[1] for name in tensors} == set(RELEASED_PARTS)
    scored = [fields for reply in server.heard if "scores" in (fields := messages.decode(reply).fields)]
    assert len(scored) == 1, "figures of all images together, once"
    assert "asks for a second evaluation" in server.told[-1]
    assert "comes after this run was evaluated" in server.order("train", 5, weights)["why"]


def test_repeated_orders_come_to_an_end(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    """Only the last order is free, as its answer is kept; older ones are computed, and counted."""
    server = attack(kits, tmp_path, scans[0], retries=3)
    assert server.begin()["ready"]
    first = server.first_weights()
    second = play_honestly(server, 1)
    assert "failure" not in server.order("train", 2, second)
    for _ in range(9):
        assert "failure" not in server.order("train", 2, second)
    answers = ["failure" not in server.order("train", 1 + turn % 2, (first, second)[turn % 2]) for turn in range(9)]
    assert answers == [True] * 6 + [False] * 3, "5 rounds and 3 retries, of which two rounds were played"
    assert "would be answer 9 of a run that has 8" in server.told[-1]


def test_an_approval_is_for_one_run_to_its_end(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    """Else a server that ends a run and begins it anew would have another evaluation."""
    server = attack(kits, tmp_path, scans[0], kinds=("model", "buffers", "metrics", "predictions"))
    assert server.begin()["ready"]
    weights = play_honestly(server, 5)
    assert "failure" not in server.order("evaluate", 6, weights)
    assert server.begin()["ready"], "a server that was started again goes on"
    server.say(messages.encode({"purpose": "end", "run": server.run, "site": "hill"}, {}))
    for run in ("run-1", "run-2"):
        assert "approved at hill for one run, and ran to its end on 20" in server.begin(run=run)["why"]
    approve(server.desk.config.folder, server.recipe)
    assert server.begin()["ready"]


def test_of_several_runs_one_has_the_approval_whatever_is_asked_first(
    kits: Path, scans: list[Path], tmp_path: Path
) -> None:
    """Else a server would begin many, and have an evaluation of each."""
    server = attack(kits, tmp_path, scans[0], kinds=("model", "buffers", "metrics", "predictions"))
    folder = server.desk.config.folder
    begun = [server.begin(run=f"run-{number}") for number in range(4)]
    assert ["failure" in reply for reply in begun] == [False, True, True, True]
    assert "for one run, and is in use by its run run-0; if another shall run" in begun[1]["why"]
    approve(folder, server.recipe)
    approve(folder, server.recipe)
    assert ["failure" in server.begin(run=run) for run in ("run-2", "run-3", "run-0")] == [False, True, False]
    left = {approval.run: approval.finished for approval in read_approvals(folder)}
    assert left == {"run-0": "", "run-2": ""}, "two approvals, of one run each"
    server.run = "run-0"
    assert "failure" not in server.order("train", 1, server.first_weights())
    write_approvals(folder, [approval for approval in read_approvals(folder) if approval.run == "run-2"])
    for purpose in ("train", "evaluate", "keys", "unmask"):
        assert "no approval at hill is for the run run-0" in server.order(purpose, 2, server.first_weights())["why"]
    server.say(messages.encode({"purpose": "end", "run": "run-2", "site": "hill"}, {}))
    assert "ran to its end on" in server.begin(run="run-2")["why"], "that it was never evaluated makes no difference"


def test_the_oldest_of_many_runs_gives_up_its_approval_with_its_data(
    kits: Path, scans: list[Path], tmp_path: Path
) -> None:
    server = attack(kits, tmp_path, scans[0], runs_per_day=99)
    for number in range(MOST_RUNS + 1):
        assert "failure" not in server.begin(run=f"run-{number}")
        approve(server.desk.config.folder, server.recipe)
    ended = [approval.run for approval in read_approvals(server.desk.config.folder) if approval.finished]
    assert len(ended) == 1
    assert len(list((tmp_path / "runs").iterdir())) == MOST_RUNS


NO_CLASSES = {**HONEST, "data": {key: value for key, value in HONEST["data"].items() if key != "classes"}}
TWO = ["benign", "malignant"]
CHOSEN_CLASSES = {
    "1,022 more": [*TWO, *(f"x{number}" for number in range(1022))],
    "one more": [*TWO, "normal"],
    "another order": TWO[::-1],
    "one fewer": ["benign"],
    "another name": ["benign", "cancer"],
    "none": [],
}


def test_the_server_does_not_choose_the_classes(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    """Of every test image as many thousandths leave as there are classes, less one. The server's own would be more."""
    for given in (HONEST, NO_CLASSES):
        server = attack(kits, tmp_path / str(given is HONEST), scans[0], Recipe.from_values(given))
        for name, classes in CHOSEN_CLASSES.items():
            assert "other classes than this run" in server.begin(classes=classes)["why"], name
        assert server.begin(classes=TWO)["ready"]
        assert server.images().classes == ("benign", "malignant")


def test_an_order_that_failed_counts_and_comes_again_as_it_was(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    """Else a server could ask forty orders of its making in one round, and read what each refusal tells."""
    found = Recipe.from_values({**HONEST, "algorithm": "scaffold"})
    server = attack(kits, tmp_path, scans[0], found, algorithms="all", kinds=tuple(EVERYTHING["kinds"]), retries=3)
    assert server.begin()["ready"]
    first, memory = server.first_weights(), tmp_path / "runs" / server.run / "memory"
    memory.write_text("in the way of the site's memory, so that no round ends")
    asked_for = [first, *[changed(first, model={"head.bias": torch.full((2,), 1e-6 * n)}) for n in range(1, 40)]]
    told = [server.order("train", 1, weights) for weights in asked_for]
    assert told[0]["failure"] == "error"
    assert all("comes again with other contents" in reply["why"] for reply in told[1:])
    again = [server.order("train", 1, first)["why"] for _ in range(9)]
    assert sum("would be answer 9 of a run that has 8" in why for why in again) == 2, "7 of 9 tries were left"
    rows = [row for row in server.desk.releases.read_entries() if row["purpose"] == "train"]
    assert [list(row["kinds"]) for row in rows] == [["failure"]] * 4
    assert [row.get("times", 1) for row in rows] == [1, 2, 4, 8]
    assert rows[0]["bytes"] == len(server.heard[-49]) == rows[0]["kinds"]["failure"]


def test_an_evaluation_that_failed_comes_again_as_it_was_and_no_more_than_retries(
    kits: Path, scans: list[Path], tmp_path: Path
) -> None:
    server = attack(kits, tmp_path, scans[0], retries=3)
    assert server.begin()["ready"]
    weights, place = play_honestly(server, 5), tmp_path / "scores"
    place.write_text("in the way of the scores, so that no evaluation ends")
    assert server.order("evaluate", 6, weights)["failure"] == "error"
    assert "asks for a second evaluation" in server.order("evaluate", 6, broken(weights, 1.0))["why"]
    (approval,) = read_approvals(tmp_path)
    assert approval.finished, "no other run may follow, either"
    assert server.order("evaluate", 6, weights)["failure"] == "error"
    place.unlink()
    server.desk = SiteMessageHandler(server.desk.config, server.told.append)
    assert "scores" in server.order("evaluate", 6, weights)
    assert "scores" in server.order("evaluate", 6, weights), "the same bytes, which cost no try"
    place.rename(tmp_path / "kept")
    place.write_text("in the way again")
    (tmp_path / "runs" / server.run / "last-evaluate").unlink()
    told = [server.order("evaluate", 6, weights) for _ in range(3)]
    assert [reply["failure"] for reply in told] == ["error", "refused", "refused"]
    assert "would be try 5 of the evaluation" in told[-1]["why"]


def test_runs_are_counted_by_the_day_whatever_is_ended_between(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    server = attack(kits, tmp_path, scans[0])
    for number in range(6):
        approve(server.desk.config.folder, server.recipe)
        server.run = f"run-{number // 2}" if number < 4 else f"run-{number}"
        reply = server.begin()
        server.desk.answer_message(messages.encode({"purpose": "end", "run": server.run, "site": "hill"}, {}))
        assert ("failure" in reply) == (number >= 4), reply
    assert "4 runs have begun at hill within 24 hours" in server.told[-2]


def test_absence_excuses_as_many_rounds_as_the_policy_says(kits: Path, scans: list[Path], tmp_path: Path) -> None:
    server = attack(kits, tmp_path, scans[0], missed_rounds=1)
    assert server.begin()["ready"]
    weights = play_honestly(server, 1)
    assert "leaves out round 2" in server.order("train", 3, weights)["why"]
    server.desk.note_absence()
    assert "leaves out 2 rounds, beyond allow.missed_rounds: 1" in server.order("train", 4, weights)["why"]
    assert "failure" not in server.order("train", 3, weights)
    server.desk.note_absence()
    assert "beyond allow.missed_rounds" in server.order("train", 5, weights)["why"], "they are counted over the run"
    assert "failure" not in server.order("train", 4, weights)


def test_going_back_is_an_order_of_its_own_that_people_allow_once(
    kits: Path, scans: list[Path], tmp_path: Path
) -> None:
    server = attack(kits, tmp_path, scans[0])
    assert server.begin()["ready"]
    weights = play_honestly(server, 4)
    other = changed(weights, model={"head.bias": torch.ones(2)})
    why = server.order("train", 2, other)["why"]
    assert "polyclinic site allow-round site.yaml run-1 2" in why
    folder = tmp_path / "runs" / "run-1"
    allow_round(folder, 2)
    assert "was answered before" in server.order("train", 3, other)["why"], "this round, and no other"
    assert "failure" not in server.order("train", 2, other)
    assert "was answered before" in server.order("train", 2, weights)["why"], "once"
    restarted = SiteMessageHandler(server.desk.config, server.told.append)
    server.desk = restarted
    assert "failure" not in server.order("train", 3, other), "from there it goes on, also after a restart"
    assert "leaves out round 4, for which" in server.order("train", 5, other)["why"]


def test_the_default_of_a_kit_is_the_strict_one(kits: Path) -> None:
    allow = SiteConfig.load(kits / "sites" / "hill" / "site.yaml").allow
    assert allow.algorithms == ("fedavg",)
    assert allow.kinds == ("model", "buffers", "metrics")
    assert (allow.least_images, allow.least_sites, allow.runs_per_day) == (64, 3, 4)
    assert EVERYTHING["least_images"] == 1, "tests of other things allow more, and say so"
