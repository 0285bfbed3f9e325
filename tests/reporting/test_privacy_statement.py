"""privacy.md: what each kind of run must say, with figures that its ledger bears out, and what none may claim."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyclinic import run
from polyclinic.analysis.audit.result import AuditResult
from polyclinic.analysis.privacy_audit import save_audit
from polyclinic.core.jobs import Exchange
from polyclinic.evaluation.site_scores import FinalScores
from polyclinic.evaluation.summary import Audit, RunSummary
from polyclinic.privacy.accounting import Accountant, Spend, epsilon
from polyclinic.privacy.gaussian_tests import GaussianTest
from polyclinic.privacy.one_run_bound import CanaryBound
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.reporting.formatting import round_up
from polyclinic.reporting.privacy_statement import privacy_line, write_privacy_page
from polyclinic.runs.final_evaluation import SiteAnswer
from polyclinic.runs.privacy_record import list_releases, list_site_releases
from polyclinic.storage.run_folder import RunFolder
from tests.small import tiny

IMAGE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-4}
SITE: dict[str, Any] = {"unit": "site", "epsilon": 8.0, "delta": 1e-3}
PHANTOM = {
    "name": "phantom",
    "size": 32,
    "hospitals": [{"name": name, "vendor": "film", "patients": 20, "malignant": 0.5} for name in ("a", "b")],
}
OVERLAP = {"by": "admixture", "sites": 3, "primary": 4, "admixture": 0.7}
RUNS: dict[str, dict[str, Any]] = {
    "no plan": {},
    "image": {"privacy": IMAGE},
    "seeded": {"privacy": {**IMAGE, "randomness": "seed"}},
    "patient": {
        "privacy": {"unit": "patient", "noise": 5.0, "delta": 1e-3},
        "data": PHANTOM,
        "training__batch": 16,
    },
    "declared": {"privacy": {"unit": "patient", "group": 3, "noise": 9.0, "delta": 1e-3}},
    "site": {"privacy": SITE},
    "server": {"privacy": {**SITE, "noise_at": "server"}},
    "count": {"privacy": {**IMAGE, "metrics": "count"}},
    "open": {"privacy": {**IMAGE, "metrics": "open"}},
    "replace": {"privacy": {"noise": 3.0, "delta": 1e-4, "neighbours": "replace", "sampling": "shuffle"}},
    "stopped": {"privacy": {**IMAGE, "epsilon": 2.0, "noise": 2.0}, "rounds": 40},
    "overlap": {"privacy": {"noise": 1.5, "delta": 1e-4}, "data__partition": OVERLAP},
    "no noise": {"privacy": {"noise": 0.0, "delta": 1e-4}},
}
CLAIMING = sorted(set(RUNS) - {"no plan", "no noise", "seeded"})
LIBRARIES: dict[str, Accountant] = {"PLD, dp-accounting": "pld", "RDP, dp-accounting": "rdp", "PRV, Opacus": "prv"}
NOBODY = "the other sites, whoever gets the models, and a server that follows the plan: noise is added"
Folder = Callable[[str], Path]
ANSWERED = SiteAnswer(FinalScores(task="classification", models={}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Of a finished run of `RUNS`, each played once."""
    place = tmp_path_factory.mktemp("pages")

    @cache
    def played(name: str) -> Path:
        run(tiny(**RUNS[name]), place / name)
        return place / name

    return played


def text(path: Path) -> str:
    return (path / "privacy.md").read_text(encoding="utf-8")


def result(path: Path) -> RunSummary:
    return RunFolder(path).read_summary()


def cell(told: str, name: str) -> str:
    """The right-hand side of a line of the page's tables."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", told, re.MULTILINE)
    return str(found)


def section(told: str, name: str) -> str:
    return told.split(f"## {name}\n")[1].split("\n## ")[0]


def charged(path: Path) -> dict[str, list[Spend]]:
    """Every release of every site, as the ledger has it."""
    total: dict[str, list[Spend]] = {}
    for row in map(json.loads, (path / "ledger.jsonl").read_text().splitlines()):
        if row["event"] == "charge" and row["privacy"]:
            for site, spends in row["privacy"]["sites"].items():
                total.setdefault(site, []).extend(Spend(*spend) for spend in spends)
    return total


# Without a plan


def test_without_a_plan_nothing_is_claimed(folder: Folder) -> None:
    told = text(folder("no plan"))
    assert "**Nothing is claimed.**" in told
    assert not re.search(r"[εδ]|What it means|need not be trusted|protects \|", told.replace("what protects it |", ""))
    assert all("no p" in cell(told, kind) for kind in ("model", "metrics", "predictions"))


def test_a_kind_that_an_algorithm_sends_beside_its_model_is_listed() -> None:
    (first, *_) = list_releases(None, [Exchange("control", like="model")])
    assert first.kind == "control"
    assert "no privacy plan" in first.protection


# With one


@pytest.mark.parametrize("name", CLAIMING)
def test_a_claim_says_for_whom_against_whom_and_what_it_leaves_out(folder: Folder, name: str) -> None:
    told, wish = text(folder(name)), RUNS[name]["privacy"]
    unit = wish.get("unit", "image")
    whom = cell(told, "whom it protects")
    assert whom.startswith(f"one {unit}")
    assert f"for {whom}, over the whole run" in told
    assert f"one {unit}" in cell(told, "neighbouring data sets")
    assert float(cell(told, "δ")) == wish["delta"]
    assert cell(told, "who need not be trusted").startswith(NOBODY) == (name != "server")
    if name == "server":
        assert "against a hostile server" not in told
    else:
        most = f"ε = {wish['epsilon']:g}" if "epsilon" in wish else "its rounds, once each"
        held = cell(told, "against a hostile server")
        assert f"this run costs them no more than {most};" in held
        assert "all runs together are bounded at the sites that set a budget in site.yaml" in held
    assert cell(told, "ε that was allowed") == (f"{wish['epsilon']:g}" if "epsilon" in wish else "not limited")
    gaps = section(told, "What is NOT protected")
    for always in ("how many training images", "final evaluation", "floating-point", "a site that lies"):
        assert always in gaps
    assert cell(told, "number of images") == "public by assumption"
    assert "outside the claim" in cell(told, "predictions")
    assert "not audited" in section(told, "Audit")


@pytest.mark.parametrize("name", sorted(set(CLAIMING) - {"overlap"}))
def test_the_figures_are_those_of_the_ledger(folder: Folder, name: str) -> None:
    """No record is at two sites here, so the worst-placed one pays what the dearest site does."""
    told, wish, spent = text(folder(name)), RUNS[name]["privacy"], charged(folder(name))
    figures = cell(told, f"ε of the worst-placed {wish.get('unit', 'image')}")
    first = re.findall(r"^([\d.]+) \((PLD, dp-accounting)\)(?:, which is what was limited)?", figures)
    assert ("which is what was limited" in figures) == ("epsilon" in wish)
    shown = {library: figure for figure, library in first} | dict(re.findall(r"(\w+, [\w-]+): ([\d.]+)", figures))
    # Only a patient's several images that are sampled one by one are beyond RDP and PRV.
    assert shown.keys() == ({"PLD, dp-accounting"} if name == "declared" else LIBRARIES.keys())
    for library, figure in shown.items():
        neighbours = wish.get("neighbours", "add or remove")
        paid = max(epsilon(s, wish["delta"], LIBRARIES[library], neighbours) for s in spent.values())
        assert paid * (1 - 1e-9) <= float(figure) <= paid * 1.0011, "rounded up, and hardly"
    (claimed,) = re.findall(r"\*\*ε = ([\d.]+) at δ", told)
    assert (
        float(shown["PLD, dp-accounting"]) <= float(claimed) * (1 + 1e-9) <= float(shown["PLD, dp-accounting"]) * 1.011
    )
    assert float(shown["PLD, dp-accounting"]) <= wish.get("epsilon", math.inf)


def test_images_of_a_patient_are_told_apart_from_the_patient(folder: Folder) -> None:
    alone = "A patient with several images at a site"
    assert alone in section(text(folder("image")), "What is NOT protected")
    told = text(folder("patient"))
    assert alone not in told
    assert "with all training images of that patient" in cell(told, "whom it protects")
    for name, group, sampled in (("patient", 1, "patient"), ("declared", 3, "image")):
        told = text(folder(name))
        assert {spend.group for spends in charged(folder(name)).values() for spend in spends} == {group}
        assert cell(told, "sampling").startswith(f"every {sampled} joins every step by itself")
        (largest,) = re.findall(r"^at most (\d+)", cell(told, "training images of one patient at a site"))
        assert int(largest) > 1, "these patients have one image each, which shows nothing"


def test_what_a_trusted_server_sees_is_said(folder: Folder) -> None:
    told = text(folder("server"))
    seen = cell(told, "who need not be trusted")
    assert "the SERVER is trusted: it sees every site's clipped update before noise" in seen
    assert "by the server, to the mean" in cell(told, "model")
    assert "before it leaves the site" in cell(text(folder("site")), "model")


def test_a_site_hides_its_updates_not_its_presence(folder: Folder) -> None:
    for name in ("site", "server"):
        assert "no credit is taken" in cell(text(folder(name)), "sampling")
    for name in ("image", "patient", "site", "server"):
        assert "That a site took part" in section(text(folder(name)), "What is NOT protected")


def test_neighbours_and_sampling_are_those_of_the_plan(folder: Folder) -> None:
    usual, other = text(folder("image")), text(folder("replace"))
    assert "with and without one image" in cell(usual, "neighbouring data sets")
    assert "Poisson" in cell(usual, "sampling")
    assert "one image that is replaced by another" in cell(other, "neighbouring data sets")
    assert "shuffled" in cell(other, "sampling")
    assert "Poisson" not in other


def test_metrics_are_kept_noised_or_told(folder: Folder) -> None:
    openly = "which sites reported without noise"
    kept, noised, told = (text(folder(name)) for name in ("image", "count", "open"))
    assert cell(kept, "metrics") == "kept at the sites"
    assert "NOT protected" in cell(told, "metrics")
    assert openly in section(told, "What is NOT protected")
    assert openly not in kept + noised
    (noise,) = re.findall(r"noised counts \(noise ([\d.]+)\)", cell(noised, "metrics"))
    price = epsilon([Spend(float(noise), times=2)], IMAGE["delta"])
    assert price == pytest.approx(IMAGE["epsilon"], rel=0.01)
    assert "outside the claim, as test images are" in section(noised, "What is NOT protected")


def test_noise_from_a_seed_is_no_guarantee(folder: Folder) -> None:
    path, words = folder("seeded"), "no guarantee: the noise comes from a public seed"
    told, warning = text(path), "whoever has the recipe can remove the noise"
    assert re.search(rf"ε would be [\d.]+ at δ = [\d.e-]+ for one image at a site.*; \*\*{words}\*\*", told)
    assert not re.search(r"\*\*ε|whom it protects|need not be trusted|never surer|ε = ", told)
    gaps = section(told, "What is NOT protected")
    assert "- Anything." in gaps
    assert warning in gaps
    assert warning not in text(folder("image"))
    assert words not in text(folder("image"))
    spent = result(path).privacy
    assert spent is not None
    assert not spent.has_guarantee
    assert re.fullmatch(
        rf"privacy: ε would be [\d.]+ per image at δ = 0.0001; see privacy.md; {words}", privacy_line(spent)
    )
    assert cell(told, "model").startswith("noised, but without a guarantee")


def test_a_run_of_an_earlier_version_with_noise_from_its_seed_is_no_guarantee(folder: Folder) -> None:
    old = json.loads((folder("image") / "result.json").read_text())
    assert old["privacy"]["no_guarantee_reason"] == ""
    old["privacy"]["randomness"] = "seed"
    summary = RunSummary.model_validate(old)
    assert summary.privacy is not None
    assert not summary.privacy.has_guarantee
    assert "**ε" not in write_privacy_page(summary)


def test_a_run_that_its_budget_stopped_says_when(folder: Folder) -> None:
    path = folder("stopped")
    played = sum(row["event"] == "round" for row in map(json.loads, (path / "ledger.jsonl").read_text().splitlines()))
    assert 1 <= played < 40
    assert f"The run stopped after round {played}: the next one would have cost more" in text(path)
    assert "stopped after" not in text(folder("image"))


def test_a_record_at_several_sites_pays_for_all_of_them(folder: Folder) -> None:
    path = folder("overlap")
    told, spent = text(path), charged(path)
    assert "for a record that may be at 3 sites" in told
    assert "a record that may be" not in text(folder("image"))
    (claimed,) = re.findall(r"\*\*ε = ([\d.]+) at δ", told)
    together = epsilon([spend for spends in spent.values() for spend in spends], 1e-4)
    alone = max(epsilon(spends, 1e-4) for spends in spent.values())
    assert together * 0.995 <= float(claimed) <= together * 1.02, "sites' rates are rounded up to the largest"
    assert cell(told, "ε if it is at one site only") == f"at most {round_up(alone)}"


def test_without_noise_nothing_follows(folder: Folder) -> None:
    told = text(folder("no noise"))
    assert "**No protection.** Without noise ε is infinite." in told
    assert "**ε" not in told
    assert not re.search(r"\d", cell(told, "ε of the worst-placed image"))
    assert "No statement about single people" in section(told, "What it means")


# What ε means


@given(value=st.floats(0.01, 20))
def test_how_sure_one_may_become(folder: Folder, value: float) -> None:
    """Bayes, from fifty-fifty: p/(1 − p) = e^ε."""
    told = section(write_privacy_page(costing(value, folder)), "What it means")
    ((sure, certain),) = re.findall(r"may be (?:([\d.]+) % sure|(practically certain))", told)
    (odds,) = re.findall(r"odds of ([\d.e+]+) to 1", told)
    truth = 1 / (1 + math.exp(-value))
    assert bool(certain) == (truth >= 0.999)
    assert certain or truth - 1e-9 <= float(sure) / 100 <= truth + 0.0011
    assert math.exp(value) * (1 - 1e-6) <= float(odds) <= math.exp(value) * 1.011


def test_whatever_epsilon_is_the_page_can_be_written(folder: Folder) -> None:
    assert "odds of 5.19e+21 to 1" in write_privacy_page(costing(1e4, folder)), "beyond ε = 50 no larger number is told"


def with_privacy(summary: RunSummary, **changes: Any) -> RunSummary:
    assert summary.privacy is not None
    return summary.model_copy(update={"privacy": summary.privacy.model_copy(update=changes)})


def costing(value: float, folder: Folder) -> RunSummary:
    """A run's summary, had it cost so much."""
    return with_privacy(result(folder("image")), epsilon_by_accountant=dict.fromkeys(LIBRARIES.values(), value))


# Audited


NOISE = GaussianTest("weights, training job 1", "noise", 1.01, 1.0, 0.6, 5000, 1.0)
MOVED = GaussianTest("weights, training job 1", "sensitivity", 1.0, 1.0, 1.0, 800, 1.0)
GUESSED = CanaryBound(3.0, 1.2, 1e-4, 0.96, 1000, 40, 30, "products", 3.5)
FOUND = AuditResult(
    engine="stacked",
    stacked=3,
    unit="image",
    sites=("site-1", "site-2", "site-3"),
    site="site-2",
    rounds=2,
    planned_rounds=2,
    canaries=1000,
    kinds=("weights, training job 1",),
    claimed=3.0,
    measured=2.97,
    delta=1e-4,
    confidence=0.95,
    tests=(NOISE, MOVED),
    canary_bound=GUESSED,
)


def test_an_audit_completes_the_page_and_changes_nothing_else(tmp_path: Path) -> None:
    run(tiny(privacy=IMAGE), tmp_path)
    before, summary = text(tmp_path), result(tmp_path)
    save_audit(tmp_path, {**FOUND.as_json(), "membership": "Members are hardly told apart."})
    told = text(tmp_path)
    audited = section(told, "Audit")
    said = (
        "No contradiction found",
        "engine stacked, 3 sites at once",
        "1,000 canaries (unit image)",
        "training job 1",
    )
    for words in (*said, "would be 2.97; 3 is", "30 of 40 guesses", "95 %", "no proof", "hardly told apart"):
        assert words in audited
    assert "not audited" not in told
    assert told.replace(audited, "") == before.replace(section(before, "Audit"), "")
    after = result(tmp_path)
    assert after.privacy is not None
    assert after.privacy.audit is not None
    assert after.privacy.audit.model_dump()["measured"] == FOUND.measured
    assert with_privacy(after, audit=None) == summary


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(FOUND, tests=(replace(NOISE, measured=0.7, p_value=1e-9), MOVED)), "noise is 0.7, where 1 is charged"),
        (replace(FOUND, canary_bound=replace(GUESSED, bound=3.2)), "The claim is refuted: 30 of 40 guesses"),
        (replace(FOUND, tests=(NOISE,)), "could not have refuted the claim"),
        (replace(FOUND, kinds=("features",)), "Not attacked, or without power: features"),
        (replace(FOUND, canary_bound=None), "That is no proof"),
    ],
)
def test_an_audit_is_told_as_it_went(folder: Folder, found: AuditResult, words: str) -> None:
    summary = with_privacy(costing(3.0, folder), audit=Audit.model_validate(found.as_json()))
    assert words in section(write_privacy_page(summary), "Audit")


@given(value=st.floats(1e-8, 1e6), digits=st.integers(2, 5))
def test_costs_are_rounded_up_and_hardly(value: float, digits: int) -> None:
    assert value * (1 - 1e-9) <= float(round_up(value, digits)) <= value * (1 + 11 * 10.0**-digits)


def test_pooled_images_are_said_to_be_pooled(tmp_path: Path) -> None:
    run(tiny(algorithm="centralised"), tmp_path / "free")
    assert "All images were pooled" in text(tmp_path / "free")
    run(tiny(algorithm="centralised", privacy=IMAGE), tmp_path / "plan")
    assert "NOT the place where all images lie" in cell(text(tmp_path / "plan"), "who need not be trusted")


def test_a_refuted_claim_is_not_repeated_as_one(folder: Folder) -> None:
    audit = Audit.model_validate({"refuted": True, "site": "site-1", "verdict": "The claim is refuted: so it is."})
    summary = with_privacy(result(folder("image")), audit=audit)
    told = write_privacy_page(summary)
    assert "Do not rely on this run" in told
    assert "**ε =" not in told


def test_what_is_masked_is_called_so_and_only_then() -> None:
    kinds = [Exchange("model", like="model")]
    hidden, plain = list_releases(None, kinds, [Mask()]), list_releases(None, kinds, [Mask(masks=False)])
    assert hidden[0].protection == f"{plain[0].protection}; masked: the server learns the sum over sites"
    bare = "; not masked: the server learns those of each site"
    words = {row.kind: row.protection for row in hidden}
    assert words == {row.kind: row.protection + bare * (row.kind == "metrics") for row in plain} | {
        "model": words["model"]
    }
    for released in (hidden, plain):
        told = {row.kind: row.protection for row in list_site_releases(released, None, {"hill": ANSWERED}, [])}
        assert told["final scores"].endswith(bare) == (released is hidden)
        assert told["predictions"] == "asked of no site, and none left a site"
        for value in ("of each part", "left out", "channels", "without a patient's name", "a keyed hash"):
            assert value in told["card"]
