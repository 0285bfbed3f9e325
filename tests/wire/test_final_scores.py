"""The scores that a site tells of the final models are as strictly read as its updates; what is wrong is named."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, roc_auc_score

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Part
from polyclinic.core.errors import Refused
from polyclinic.core.jobs import Failure
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, SiteId
from polyclinic.evaluation.assessment import assess_site
from polyclinic.evaluation.site_scores import ScoredSite, build_final_scores
from polyclinic.evaluation.task import CLASSIFICATION
from polyclinic.federation.rounds import Outcome, RoundOptions, Rounds
from polyclinic.runs.final_evaluation import (
    SiteAnswer,
    assess_answers,
    find_odd_sites,
    read_answer,
    round_predictions,
)
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from tests.federation.mock_engine import MockEngine
from tests.wire.frames import REGISTERED, RUN, federation, start

ROUND = 4
SIZES: dict[Part, int] = {"validation": 6, "test": 8}
STREAM = Stream(0, ("bootstrap",))


def groups(seed: int = 0) -> Bundle:
    generator = torch.Generator().manual_seed(seed)
    found: Bundle = {}
    for part, n in SIZES.items():
        table = torch.softmax(torch.randn(n, 2, generator=generator, dtype=torch.float64), 1)
        found[f"global|{part}"] = {
            "probabilities": table,
            "labels": torch.arange(n) % 2,
            "patients": torch.arange(n),
        }
    return found


def fields(seed: int = 0) -> dict[str, Any]:
    """Honest scores, as JSON."""
    scores = build_final_scores(CLASSIFICATION, assess_site(CLASSIFICATION, groups(seed), "east", (), 20, STREAM))
    return scores.model_dump(mode="json")


def expected(site: SiteId = "east", sizes: dict[Part, int] = SIZES) -> ScoredSite:
    return ScoredSite(site, tuple(REGISTERED), sizes, ("validation", "test"), 2)


def message(site: SiteId = "east", tensors: dict[str, torch.Tensor] | None = None, **changed: Any) -> bytes:
    told = {"run": RUN, "round": ROUND, "site": site, "scores": fields(), **changed}
    told = {name: value for name, value in told.items() if value is not ...}
    return messages.encode(told, {"predictions": tensors} if tensors else {})


def evaluated(answer: Callable[[SiteId], bytes | Failure], withheld: dict[SiteId, str]) -> dict[SiteId, SiteAnswer]:
    engine = MockEngine(lambda site, data: answer(site))
    rounds = Rounds(federation(), FedAvg(), engine, RoundOptions(rounds=ROUND - 1, run=RUN), RamJournal())
    outcome = Outcome(start(), ROUND - 1, False)
    return rounds.evaluate_sites(
        outcome, ["validation", "test"], lambda site, reply: read_answer(reply, expected(site)), None, withheld
    )


def rounded() -> dict[str, torch.Tensor]:
    return {f"global|test|{name}": tensor for name, tensor in round_predictions(groups()["global|test"]).items()}


def test_honest_scores_come_back_unchanged() -> None:
    withheld: dict[SiteId, str] = {}
    found = evaluated(message, withheld)
    assert list(found) == list(REGISTERED)
    assert withheld == {}
    assert all(answer.scores is not None for answer in found.values())
    assert found["east"].scores == build_final_scores(
        CLASSIFICATION, assess_site(CLASSIFICATION, groups(), "east", (), 20, STREAM)
    )


def spoilt(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found = copy.deepcopy(fields())
    change(found)
    return found


def part_of(found: dict[str, Any], part: str = "test") -> dict[str, Any]:
    found_part: dict[str, Any] = found["models"]["global"][part]
    return found_part


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a billion images": (lambda f: part_of(f).update(n=10**9), "1000000000 test images, where 8 were registered"),
    "too few images": (lambda f: part_of(f).update(n=7), "7 test images, where 8 were registered"),
    "no images": (lambda f: part_of(f).update(n=0), "0 test images"),
    "half an image": (lambda f: part_of(f).update(n=7.5), "models.global.test.n"),
    "true images": (lambda f: part_of(f).update(n=True), "models.global.test.n"),
    "images as text": (lambda f: part_of(f).update(n="8"), "models.global.test.n"),
    "a part that nobody asked for": (
        lambda f: f["models"]["global"].update(train=part_of(f)),
        "8 train images, where 0 were registered",
    ),
    "no such part": (lambda f: f["models"]["global"].update(extra=part_of(f)), "models.global.extra"),
    "no such model": (lambda f: f["models"].update(mine={"test": part_of(f)}), "'mine' is not a model of this run"),
    "the held-out set": (
        lambda f: f["models"].update({"held-out": {"test": part_of(f)}}),
        "is not a model of this run",
    ),
    "transfer of nobody": (lambda f: f["models"].update(transfer={"test": part_of(f)}), "where 0 were registered"),
    "an unknown metric": (
        lambda f: part_of(f)["metrics"].update(glory={"value": 1.0}),
        "'glory' is not a metric",
    ),
    "an accuracy of two": (
        lambda f: part_of(f)["metrics"].update(accuracy={"value": 2.0}),
        "accuracy is outside 0 to 1",
    ),
    "a negative AUC": (lambda f: part_of(f)["metrics"].update(auc={"value": -0.1}), "auc is outside 0 to 1"),
    "a huge loss": (lambda f: part_of(f)["metrics"].update(loss={"value": 1e99}), "loss is outside 0 to 36"),
    "an AUC in words": (lambda f: part_of(f)["metrics"].update(auc={"value": "high"}), "models.global.test.metrics"),
    "an interval upside down": (
        lambda f: part_of(f)["metrics"].update(auc={"value": 0.5, "low": 0.9, "high": 0.1}),
        "the interval of auc",
    ),
    "half an interval": (
        lambda f: part_of(f)["metrics"].update(auc={"value": 0.5, "low": 0.4, "high": None}),
        "the interval of auc",
    ),
    "an accuracy that its counts contradict": (
        lambda f: part_of(f)["metrics"].update(accuracy={"value": 1.0}),
        "accuracy is not what its own counts give",
    ),
    "counts of others": (lambda f: part_of(f)["details"].update(confusion=[[8, 8], [8, 8]]), "counts are of 32 images"),
    "negative counts": (lambda f: part_of(f)["details"].update(confusion=[[9, -1], [0, 0]]), "not counts of 2 by 2"),
    "counts of three classes": (
        lambda f: part_of(f)["details"].update(confusion=[[8, 0, 0], [0, 0, 0], [0, 0, 0]]),
        "not counts of 2 by 2",
    ),
    "counts as text": (lambda f: part_of(f)["details"].update(confusion=[["8", 0], [0, 0]]), "not counts of 2 by 2"),
    "true counts": (lambda f: part_of(f)["details"].update(confusion=[[True, 7], [0, 0]]), "not counts of 2 by 2"),
    "more details": (lambda f: part_of(f)["details"].update(note="secret"), "not counts of 2 by 2"),
    "another task": (lambda f: f.update(task="regression"), "is not a task that is known here"),
    "another version": (lambda f: f.update(version=2), "version"),
    "more keys": (lambda f: f.update(note="x"), "note"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_scores_are_refused_by_name_and_the_others_count(case: str) -> None:
    change, sentence = WRONG[case]
    withheld: dict[SiteId, str] = {}
    found = evaluated(lambda site: message(site, scores=spoilt(change)) if site == "east" else message(site), withheld)
    assert found.keys() == REGISTERED.keys() - {"east"}
    assert withheld.keys() == {"east"}
    assert withheld["east"].startswith("refused: scores: ")
    assert sentence in withheld["east"]


def tampered(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**rounded(), **{f"global|test|{name}": tensor for name, tensor in changes.items()}}


ROWS = torch.zeros(2_000_000, 1, dtype=torch.int16)
MANY = {"thousandths": ROWS, "labels": torch.zeros(2_000_000, dtype=torch.int64)}
FORGED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "two million rows": (tampered(**MANY, patients=torch.arange(2_000_000)), "oversize"),
    "one row more": (
        tampered(
            thousandths=torch.zeros(9, 1, dtype=torch.int16), labels=torch.zeros(9).long(), patients=torch.arange(9)
        ),
        "where 8 registered test images have 1 thousandths each",
    ),
    "NaN": (tampered(thousandths=torch.full((8, 1), torch.nan)), "torch.float32"),
    "more than one": (tampered(thousandths=torch.full((8, 1), 1400, dtype=torch.int16)), "more than a thousand"),
    "less than none": (tampered(thousandths=torch.full((8, 1), -1, dtype=torch.int16)), "negative"),
    "all classes": (tampered(thousandths=torch.full((8, 2), 500, dtype=torch.int16)), "thousandths each"),
    "no such label": (tampered(labels=torch.full((8,), 2)), "none of 2 classes"),
    "fewer labels": (tampered(labels=torch.zeros(7).long()), "one label and one patient for each image"),
    "training images": (
        {path.replace("test", "train"): tensor for path, tensor in rounded().items()},
        "not the predictions of test images by one model",
    ),
    "two models": (
        {**rounded(), **{path.replace("global", "personal"): tensor for path, tensor in rounded().items()}},
        "by one model",
    ),
    "another column": ({**rounded(), "global|test|pixels": torch.zeros(8)}, "by one model"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_predictions_are_refused_by_name(case: str) -> None:
    tensors, sentence = FORGED[case]
    withheld: dict[SiteId, str] = {}
    began = time.process_time()
    found = evaluated(lambda site: message(site, tensors) if site == "east" else message(site), withheld)
    assert time.process_time() - began < 5
    assert found.keys() == REGISTERED.keys() - {"east"}
    assert sentence in withheld["east"]


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        ("empty", b""),
        ("format", b"scores"),
        ("checksum", message()[:-1]),
        ("round", message(round=ROUND - 1)),
        ("run", message(run="another")),
        ("site", message("south")),
        ("scores", message(scores=...)),
        ("scores", message(scores=..., withheld="")),
        ("scores", message(scores=..., withheld="x" * 501)),
        ("scores", message(scores=..., withheld="two\nlines")),
        ("scores", message(scores=[])),
        ("kind", messages.encode({"run": RUN, "round": ROUND, "site": "east"}, {"model": {"w": torch.zeros(3)}})),
    ],
)
def test_a_wrong_message_names_its_kind(kind: str, reply: bytes) -> None:
    withheld: dict[SiteId, str] = {}
    found = evaluated(lambda site: reply if site == "east" else message(site), withheld)
    assert found.keys() == REGISTERED.keys() - {"east"}
    assert withheld["east"].startswith(f"refused: {kind}: ")


def test_a_site_may_say_that_its_scores_stay_at_home() -> None:
    withheld: dict[SiteId, str] = {}
    found = evaluated(
        lambda site: message(site, scores=..., withheld="our policy") if site == "east" else message(site), withheld
    )
    assert withheld == {"east": "our policy"}
    assert found["east"] == SiteAnswer(None, {}, "our policy")


def test_rounded_predictions_come_back_to_the_thousandth_and_sum_to_one() -> None:
    for classes in (2, 3, 7):
        generator = torch.Generator().manual_seed(classes)
        table = torch.softmax(3 * torch.randn(200, classes, generator=generator, dtype=torch.float64), 1)
        columns = {"probabilities": table, "labels": torch.arange(200) % classes, "patients": torch.arange(200)}
        sent = {f"global|test|{name}": tensor for name, tensor in round_predictions(columns).items()}
        assert sent["global|test|thousandths"].shape == (200, classes - 1)
        data = messages.encode({"run": RUN, "round": ROUND, "site": "east", "withheld": "no"}, {"predictions": sent})
        tests: list[Part] = ["test"]
        about = ScoredSite("east", tuple(REGISTERED), {"test": 200}, tests, classes)
        found = read_answer(data, about).answer.predictions["global|test"]["probabilities"]
        assert torch.allclose(found.sum(1), torch.ones(200, dtype=torch.float64), atol=1e-12)
        assert (found - table).abs().max() <= 0.0005 * classes


def test_only_predictions_of_all_sites_give_figures_of_all_images() -> None:
    """AUC and intervals are of the rounded predictions then; counts stay those of the sites, whatever was rounded."""
    answers = {}
    for place, site in enumerate(REGISTERED):
        scores = build_final_scores(CLASSIFICATION, assess_site(CLASSIFICATION, groups(place), site, (), 0, STREAM))
        sent = {f"global|test|{n}": t for n, t in round_predictions(groups(place)["global|test"]).items()}
        data = messages.encode({"scores": scores.model_dump(mode="json")}, {"predictions": sent})
        answers[site] = read_answer(data, expected(site)).answer
    whole = assess_answers(answers, len(REGISTERED), None, 50, STREAM)
    assert whole is not None
    assert whole.pooled_from == "rounded predictions"
    found = whole.assessment.merged["global"]["test"]
    every = [groups(place)["global|test"] for place in range(len(REGISTERED))]
    labels = torch.cat([one["labels"] for one in every])
    table = torch.cat([one["probabilities"] for one in every])
    assert found.value("auc") == pytest.approx(roc_auc_score(labels, table[:, 1].round(decimals=3)))
    assert found.value("accuracy") == accuracy_score(labels, table.argmax(1))
    assert found["auc"].low is not None
    some = {site: SiteAnswer(answer.scores) if site == "east" else answer for site, answer in answers.items()}
    part = assess_answers(some, len(REGISTERED), None, 50, STREAM)
    assert part is not None
    assert part.pooled_from == "scores"
    assert part.assessment.merged["global"]["test"]["auc"].low is None
    assert assess_answers({"east": SiteAnswer(None, {}, "no")}, 1, None, 50, STREAM) is None


def test_a_site_cannot_bring_a_model_that_the_run_is_then_judged_by() -> None:
    """Personal models come first among headlines; only one of three sites has one."""

    def told(site: SiteId) -> bytes:
        return message(site, scores=spoilt(lambda f: f["models"].update(personal=f["models"]["global"])))

    answers = evaluated(lambda site: told(site) if site == "east" else message(site), {})
    assert find_odd_sites(answers) == {
        "east": "refused: scores: it tells of the model 'personal', which most sites do not have"
    }
    assert find_odd_sites(evaluated(message, {})) == {}
    assert find_odd_sites(evaluated(told, {})) == {}, "where all have one, nobody is odd"


@pytest.mark.parametrize("model", ["south", "mine", "transfer", "held-out"])
def test_predictions_of_a_model_that_no_run_is_judged_by_are_refused(model: str) -> None:
    sent = {path.replace("global", model): tensor for path, tensor in rounded().items()}
    with pytest.raises(Refused, match="no model that a run is judged by"):
        read_answer(message(tensors=sent), expected())
    with pytest.raises(Refused, match="registered no test images"):
        read_answer(message(tensors=rounded()), expected(sizes={"validation": 6}))
