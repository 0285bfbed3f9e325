"""A desk that has only its own images does what the simulation does for its site, and never a thing more."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic import Recipe
from polyclinic.core.errors import Refused
from polyclinic.deploy.site.images import load_own_site
from polyclinic.evaluation.site_scores import merge_final_scores
from polyclinic.evaluation.task import CLASSIFICATION
from polyclinic.runs.sites import load_sites
from polyclinic.storage import messages
from polyclinic.storage.ledger import Ledger
from tests.deploy.example_sites import (
    BASE,
    CLUSTERS,
    EACH,
    EVERY,
    EVERYTHING,
    SITES,
    TABLE,
    ApprovingHandler,
    Crossing,
    answers_of,
    asked,
    beginning,
    config,
    deployed,
    desks,
    picture,
    recipe,
    refusal,
    said,
    simulation,
)

SEEDED = {"noise": 1.0, "delta": 1e-3, "randomness": "seed"}
MOVING: dict[str, Any] = {**CLUSTERS, "capability": {"reassess_every": 2}, "seed": 9}
"""Here every site is in another cluster in round 3 than in round 1, and all clusters have one in round 1."""
for _name, _least in (("high", 0.55), ("medium", 0.45)):
    MOVING[f"clusters__{_name}__min_score"] = _least
PHANTOM = {
    "name": "phantom",
    "size": 32,
    "hospitals": [{"name": site, "vendor": "film", "patients": 8, "malignant": 0.5} for site in SITES],
    "split": BASE["data"]["split"],
}
CASES: dict[str, dict[str, Any]] = {
    **EVERY,
    "fedmp in clusters that change": {**MOVING, "algorithm": "fedmp"},
    "alone in clusters that change": {**MOVING, "algorithm": "local"},
    "fed-align with a curriculum": {
        "algorithm": {"name": "fed-align", "warmup": 1},
        "training__curriculum__by": "forgotten",
    },
    "ensemble": {"ensemble": True},
    "forgotten first": {"training__curriculum__by": "forgotten", "evaluate__forgetting": True},
    "a plan for images": {"privacy": {"epsilon": 8, "delta": 1e-3, "randomness": "seed", "metrics": "count"}},
    "a plan for patients": {"privacy": {**SEEDED, "unit": "patient", "group": 3}},
    "a plan for patients with one to four images": {
        "data": PHANTOM,
        "privacy": {**SEEDED, "unit": "patient", "metrics": "count"},
    },
    "fedmp under a plan for patients": {"algorithm": "fedmp", "privacy": {**SEEDED, "unit": "patient"}},
    "a plan for sites": {"privacy": {**SEEDED, "unit": "site"}},
    "fedmp under a plan": {"algorithm": "fedmp", "privacy": SEEDED},
    "noise by site": {"data": PHANTOM, "privacy": {"epsilon": 8, "delta": 1e-3, "randomness": "seed"}},
    "fixed features": {"model__name": "scattering_linear"},
    "cohorts and steps": {"cohort": 2, "training__epochs": None, "training__steps": 3},
    "quantised": {"stages": [{"name": "quantise"}]},
    "dropout and the like": {"model__dropout": 0.5, "training__augment": {"flip": True}, "training__oversample": True},
    "drawn images": {"data": PHANTOM, "rounds": 5},
}


@pytest.mark.parametrize("case", CASES)
def test_message_handlers_end_in_the_bits_of_the_simulation(case: str, home: Path) -> None:
    """L4, without a network between."""
    found = recipe(**CASES[case])
    together = simulation(found, home).run()
    rounds, outcome = deployed(found, home, Crossing(desks(home, case)))
    assert outcome.rounds == 5
    assert messages.hash_tensors(outcome.state) == together.summary.sha256
    assert messages.hash_tensors(outcome.state) != messages.hash_tensors(rounds.algorithm.init(rounds.federation))


def test_message_handlers_score_the_same_as_the_simulation(home: Path) -> None:
    """Every figure of every part, of all images that the site has; `test_serve.py` compares whole runs."""
    found = recipe(algorithm="fedbn", rounds=2)
    rounds, outcome = deployed(found, home, Crossing(desks(home, "scores")))
    told = answers_of(found, home, rounds, outcome)
    scores = merge_final_scores(CLASSIFICATION, {site: answer.scores for site, answer in told.items() if answer.scores})
    together = simulation(found, home).run().summary
    assert scores.sites == together.sites
    assert scores.sites["hill"]["personal"].keys() == {"train", "validation", "test"}


class Restless(Crossing):
    """Every message comes twice, each to a desk that has just started anew."""

    def answer(self, site: str, data: bytes) -> Any:
        replies = []
        for _ in range(2):
            self.desks = {**self.desks, site: ApprovingHandler(self.desks[site].config)}
            replies.append(super().answer(site, data))
        assert replies[0] == replies[1]
        return replies[1]


@pytest.mark.parametrize("settings", [{"algorithm": "scaffold"}, {"privacy": SEEDED, "algorithm": "fedprox"}])
def test_restarts_and_repeated_messages_change_nothing(settings: dict[str, Any], home: Path) -> None:
    """C5: effect exactly once, charged once."""
    found, state = recipe(**settings, rounds=3), f"restless {settings['algorithm']}"
    crossing = Restless(desks(home, state))
    _, outcome = deployed(found, home, crossing)
    assert messages.hash_tensors(outcome.state) == simulation(found, home).run().summary.sha256
    left = crossing.desks["hill"].releases.read_entries()
    assert [(row["round"], row.get("times", 1) > 1) for row in left] == [
        (round, again) for round in (1, 2, 3) for again in (False, True)
    ]
    if "privacy" in settings:
        charged = Ledger(home / "hill" / state / "ledger.jsonl").read()
        assert [row["round"] for row in charged] == [1, 2, 3]


def test_a_round_that_comes_late_again_is_the_same_and_costs_nothing(home: Path) -> None:
    found = recipe(algorithm="scaffold", privacy={**SEEDED, "randomness": "secret"}, rounds=3)
    crossing = Crossing(desks(home, "late"))
    deployed(found, home, crossing)
    site, first = crossing.sent[0]
    desk, before = crossing.desks[site], crossing.replies[0]
    costs = desk.releases.read_entries()[-1]["epsilon"]
    again = desk.answer_message(first)
    assert messages.hash_tensors(messages.decode(again).tensors) == messages.hash_tensors(
        messages.decode(before).tensors
    )
    assert desk.releases.read_entries()[-1]["epsilon"] == costs
    assert len(Ledger(home / site / "late" / "ledger.jsonl").read()) == 3
    order = messages.decode(first)
    moved = {kind: {n: t + 1 for n, t in group.items()} for kind, group in order.tensors.items()}
    other = messages.encode(order.fields, moved)
    assert "comes again with other contents" in refusal(said(desk.answer_message(other)))


def test_noise_is_the_sites_own(home: Path) -> None:
    """Another secret gives other noise to the same order, and it leaves by no way."""
    found = recipe(privacy={**SEEDED, "randomness": "secret"}, rounds=1)
    one, other = Crossing(desks(home, "noise 1")), Crossing(desks(home, "noise 2"))
    for crossing in (one, other):
        deployed(found, home, crossing)
    assert one.sent[0] == other.sent[0]
    assert messages.hash_tensors(messages.decode(one.replies[0]).tensors) != messages.hash_tensors(
        messages.decode(other.replies[0]).tensors
    )
    secret = home / "hill" / "noise 1" / "secret"
    assert secret.stat().st_mode & 0o077 == 0
    assert not any(bytes.fromhex(secret.read_text()) in reply for reply in one.replies)


def test_a_card_says_counts_and_no_more(home: Path) -> None:
    found = recipe()
    whole = load_sites(Recipe.from_values({**BASE, "data": {**BASE["data"], "path": str(home / "simulation" / TABLE)}}))
    for site, desk in desks(home, "cards").items():
        fields = said(desk.answer_message(asked("enrol", site, found)))
        card, held = fields["card"], whole.sites[site]
        assert [card[part] for part in ("train", "validation", "test")] == [
            len(held.train),
            len(held.validation),
            len(held.test),
        ]
        assert (tuple(card["classes"]), card["channels"], card["size"]) == (whole.classes, 1, 8)
        assert card["groups"] == [EACH, EACH]
        assert set(fields) == {"run", "site", "card", "least_sites", "schema", "body"}
        assert said(desk.answer_message(asked("enrol", site, found)))["card"] == card
        assert desk.releases.read_entries()[0]["kinds"].keys() == {"card"}


def test_the_mark_of_images_tells_changes_and_nothing_else(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "hill", tmp_path / "hill", ignore=shutil.ignore_patterns("*state*", "[a-z]*[0-9]"))
    desk = ApprovingHandler(config(tmp_path, "hill"))
    marks = [said(desk.answer_message(asked("enrol", "hill", recipe())))["card"]["fingerprint"]]
    shutil.copy(home / "lake" / "0.png", tmp_path / "hill" / "0.png")
    marks.append(said(desk.answer_message(asked("enrol", "hill", recipe())))["card"]["fingerprint"])
    elsewhere = ApprovingHandler(config(tmp_path, "hill", "other state"))
    marks.append(said(elsewhere.answer_message(asked("enrol", "hill", recipe())))["card"]["fingerprint"])
    assert len(set(marks)) == 3


def test_other_images_than_the_run_began_with_are_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "hill", tmp_path / "hill")
    made = simulation(recipe(), home)
    begin = beginning(made, "hill")
    assert said(ApprovingHandler(config(tmp_path, "hill")).answer_message(begin))["ready"]
    shutil.copy(home / "lake" / "0.png", tmp_path / "hill" / "0.png")
    fields = said(ApprovingHandler(config(tmp_path, "hill")).answer_message(begin))
    assert fields["failure"] == "refused"
    assert "other images than when this run began" in fields["why"]


def written(tmp_path: Path, kind: str, home: Path) -> dict[str, Any]:
    """Hill's own images in another form, as `data` of a recipe."""
    lines = (home / "simulation" / TABLE).read_text().splitlines()
    rows = [line.split(",") for line in lines[1:] if ",hill," in line]
    data = {"path": "pictures", "size": 8, "channels": 1, "split": BASE["data"]["split"]}
    if kind == "npz":
        from PIL import Image

        np.savez(
            tmp_path / "pictures.npz",
            images=np.stack([np.asarray(Image.open(row[0])) for row in rows]),
            labels=np.array([row[1] for row in rows]),
            patient=np.array([row[3] for row in rows]),
        )
        return {**data, "name": "npz", "registered": tmp_path / "pictures.npz"}
    if kind == "folder":
        for row in rows:
            place = tmp_path / "pictures" / row[3] / row[1]
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(row[0], place)
        return {**data, "name": "folder", "levels": ["patient", "label"], "registered": tmp_path / "pictures"}
    return {**data, "name": "table", "registered": home / "simulation" / TABLE}


@pytest.mark.parametrize("kind", ["table of all sites", "npz", "folder"])
def test_a_site_finds_its_own_images_in_every_form(kind: str, home: Path, tmp_path: Path) -> None:
    data = written(tmp_path, kind, home)
    place = data.pop("registered")
    found = load_own_site(Recipe.from_values({**BASE, "data": data}), config(home, "hill", data={"pictures": place}))
    expected = load_own_site(recipe(), config(home, "hill"))
    assert list(found.sites) == ["hill"]
    ours, theirs = (
        sorted(part.batch(torch.arange(len(part)))[0].sum().item() for part in (s.train, s.validation, s.test))
        for s in (found.sites["hill"], expected.sites["hill"])
    )
    if kind != "folder":  # whose files come in another order
        assert found.fingerprint == expected.fingerprint
    assert sum(ours) == pytest.approx(sum(theirs))


@pytest.mark.parametrize("kind", ["table of all sites", "npz", "folder"])
def test_a_run_has_the_classes_that_a_site_enrolled_with_in_every_form(kind: str, home: Path, tmp_path: Path) -> None:
    data = written(tmp_path, kind, home)
    desk = ApprovingHandler(config(home, "hill", f"classes of {kind}", data={"pictures": data.pop("registered")}))
    found = Recipe.from_values({**BASE, "data": data})
    card = said(desk.answer_message(asked("enrol", "hill", found)))["card"]
    shape = {"run": "r", "channels": 1, "size": 8, "sites": list(SITES), "plan": None}
    for classes in ([*card["classes"], "normal"], card["classes"][::-1]):
        begin = asked("begin", "hill", found, {**shape, "classes": classes})
        assert "other classes than this run" in refusal(said(desk.answer_message(begin)))
    assert said(desk.answer_message(asked("begin", "hill", found, {**shape, "classes": card["classes"]})))["ready"]


WRONG_DATA: dict[str, tuple[dict[str, Any], str, str]] = {
    "a path": ({"data__path": "/etc/passwd"}, "hill has no data called '/etc/passwd'", "/etc/passwd"),
    "way out": ({"data__path": "../hill/clinic.csv"}, "no data called", "site.yaml"),
    "a set it lacks": ({"data": {"name": "busi"}}, "hill has no data called 'busi'", "site.yaml"),
    "a drawn partition": ({"data__partition": {"by": "iid", "sites": 3}}, "natural", "natural"),
    "a limit": ({"data__limit": 5}, "leave it out", "leave it out"),
    "not among them": ({"data__partition": {"by": "natural", "only": ["lake"]}}, "natural", "natural"),
    "no such site": (
        {"data": {"name": "digits", "partition": {"by": "iid", "sites": 3}}},
        "called hill",
        "called hill",
    ),
    "no such label": (
        {"data__task": {"a": ["benign"], "b": ["cyst"]}},
        "its own log says why",
        "names the label 'cyst'",
    ),
    "too few": (
        {"data__partition": {"by": "natural", "minimum": 999}},
        "its own log says why",
        "below the minimum of 999",
    ),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_data_that_will_not_do_are_one_sentence_on_each_side(case: str, home: Path) -> None:
    changes, outside, inside = WRONG_DATA[case]
    desk = ApprovingHandler(config(home, "hill", f"wrong {case}"))
    why = refusal(said(desk.answer_message(asked("enrol", "hill", recipe(**changes)))))
    assert outside in why
    assert str(home) not in why
    assert inside in desk.site_log.read_lines()[-1]
    assert desk.releases.read_entries() == []


def test_missing_files_and_tables_are_reported_at_the_site_only(home: Path, tmp_path: Path) -> None:
    gone = ApprovingHandler(config(home, "hill", "gone", data={TABLE: tmp_path / "gone.csv"}))
    why = refusal(said(gone.answer_message(asked("enrol", "hill", recipe()))))
    assert "gone" not in why
    assert "gone.csv" in gone.site_log.read_lines()[-1]
    others = ApprovingHandler(config(home, "mountain", data={TABLE: home / "simulation" / TABLE}))
    assert "log" in refusal(said(others.answer_message(asked("enrol", "mountain", recipe()))))
    assert "is from site 'mountain'" in others.site_log.read_lines()[-1]


def test_classes_are_the_recipes_or_those_of_the_sites_own_labels(home: Path) -> None:
    made = simulation(recipe(), home)
    desk = ApprovingHandler(config(home, "hill", "classes"))
    for classes in (["benign", "malignant", "normal"], ["benign", "normal"], ["malignant", "benign"]):
        begin = beginning(made, "hill", {"run": "other", "classes": classes})
        assert "other classes than this run" in refusal(said(desk.answer_message(begin)))
        assert f"the run {', '.join(classes)}" in desk.site_log.read_lines()[-1]
    rare = ["benign", "malignant", "normal"]
    wider = beginning(simulation(recipe(data__classes=rare), home), "hill", {"run": "rare", "classes": rare})
    assert said(desk.answer_message(wider)).get("ready"), "a class that this site happens not to have"
    declared = recipe(data__classes=["malignant", "benign"])
    made = simulation(declared, home)
    swapped = beginning(made, "hill", {"run": "third", "classes": ["benign", "malignant"]})
    assert "other classes than this run" in refusal(said(desk.answer_message(swapped)))
    assert "malignant, benign" in desk.site_log.read_lines()[-1]


def test_a_site_needs_only_its_own_of_several_sets_whatever_the_folder_is_called(tmp_path: Path) -> None:
    parts: list[dict[str, Any]] = []
    for place, (site, name) in enumerate((("harbour", "tb_montgomery"), ("hill", "tb_shenzhen"))):
        folder, called = tmp_path / "simulation" / name, name.title().replace("Tb_", "TB-")
        folder.mkdir(parents=True)
        rows = ["path,label,site,patient"]
        for number in range(36):
            picture(folder / f"{number}.png", 500 * place + number, number % 5 == 0)
            label = ("normal", "tuberculosis")[number // 2 % 2]
            rows.append(f"{number}.png,{label},{called},somebody {number // 2}")
        (folder / "labels.csv").write_text("\n".join(rows) + "\n")
        shutil.copytree(folder, tmp_path / site / "our X-rays")
        parts.append({"set": name, "site": site, "task": {"well": ["normal"], "ill": ["tuberculosis"]}})
    found = Recipe.from_values({**BASE, "data": {"name": "multi", "parts": parts, "size": 8, "channels": 1}})
    whole = load_sites(found, tmp_path / "simulation")
    for part in parts:
        site = part["site"]
        registered = {part["set"]: tmp_path / site / "our X-rays"}
        own = load_own_site(found, config(tmp_path, site, data=registered))
        assert own.fingerprint == replace(whole, sites={site: whole.sites[site]}).fingerprint
        with pytest.raises(Refused, match="has no data called"):
            load_own_site(found, config(tmp_path, site, data={}))


def test_a_site_that_may_begin_no_further_run_today_does_not_enrol(home: Path, tmp_path: Path) -> None:
    """Refused only at `begin`, it would be missing among sites that had begun; a run that has begun is continued."""
    desk = desks(home, tmp_path.name, ("hill",), allow={**EVERYTHING, "runs_per_day": 1})["hill"]
    assert said(desk.answer_message(beginning(simulation(recipe(), home), "hill")))["ready"]
    assert "card" in said(desk.answer_message(asked("enrol", "hill", recipe())))
    why = refusal(said(desk.answer_message(asked("enrol", "hill", recipe(rounds=4)))))
    assert "1 runs have begun at hill within 24 hours" in why
