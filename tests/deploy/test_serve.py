"""The server's side of a run between sites: it knows cards, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyclinic.core import __version__
from polyclinic.core.errors import DataError, EngineError, RecipeError, Refused, RoundFailed, StoreError
from polyclinic.core.jobs import Failure
from polyclinic.data.patients import count_unnamed, max_images_per_patient
from polyclinic.deploy.serve import run_deployed
from polyclinic.federation.engines import RemoteExecution
from polyclinic.federation.rounds import Watch
from polyclinic.runs.remote_sites import RemoteSites, SiteProfile, find_misfits
from polyclinic.storage import messages
from polyclinic.storage.run_folder import RunFolder
from tests.deploy.example_sites import EVERYTHING, SITES, Crossing, desks, recipe, simulation
from tests.federation.mock_engine import MockEngine

CARD: dict[str, Any] = {
    "version": __version__,
    "classes": ["benign", "malignant"],
    "channels": 1,
    "size": 8,
    "train": 12,
    "validation": 4,
    "test": 5,
    "groups": [4, 2],
    "unnamed": [0, 1, 5],
    "left_out": 0,
    "fingerprint": "f" * 64,
}


def elsewhere(crossing: Crossing) -> RemoteExecution:
    return RemoteExecution(MockEngine(crossing.answer), "mock")


def allowing(*kinds: str) -> dict[str, Any]:
    return {"allow": {**EVERYTHING, "kinds": kinds}}


def test_stand_ins_have_the_sizes_and_the_largest_patients_of_the_profiles() -> None:
    site = RemoteSites.from_profiles(
        {
            "harbour": SiteProfile.from_fields(CARD),
            "hill": SiteProfile.from_fields(CARD | {"train": 1, "groups": [1, 1]}),
        }
    ).sites
    assert [len(site["harbour"].train), len(site["harbour"].validation), len(site["harbour"].test)] == [12, 4, 5]
    assert max_images_per_patient(site["harbour"].train) == 4
    assert max_images_per_patient(site["harbour"].validation) == 2
    assert max_images_per_patient(site["hill"].train) == 1
    assert site["harbour"].train.patients is None
    assert [count_unnamed(part) for part in (site["harbour"].validation, site["harbour"].test)] == [1, 5]
    with pytest.raises(EngineError, match="never leave it"):
        _ = site["harbour"].train.labels


@pytest.mark.parametrize(
    "change",
    [
        {"train": 0},
        {"train": -3},
        {"train": 2.5},
        {"train": True},
        {"test": 10**12},
        {"classes": ["one"]},
        {"classes": [1, 2]},
        {"groups": [1]},
        {"unnamed": [0, 0]},
        {"left_out": -1},
        {"fingerprint": None},
        {"version": 3},
    ],
)
def test_cards_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        SiteProfile.from_fields(CARD | change)
    with pytest.raises(Refused):
        SiteProfile.from_fields({name: value for name, value in CARD.items() if name not in change})


def test_sites_that_do_not_fit_together_are_named() -> None:
    other = SiteProfile.from_fields(CARD | {"classes": ["benign", "cancer"]})
    with pytest.raises(DataError, match="hill does not fit: it has classes benign, cancer, harbour has benign, malig"):
        RemoteSites.from_profiles({"harbour": SiteProfile.from_fields(CARD), "hill": other})
    with pytest.raises(DataError, match=r"hill does not fit: it runs polyclinic 9\.9"):
        RemoteSites.from_profiles(
            {"harbour": SiteProfile.from_fields(CARD), "hill": SiteProfile.from_fields(CARD | {"version": "9.9"})}
        )


def test_who_is_odd_is_found_by_what_most_have() -> None:
    usual, odd = SiteProfile.from_fields(CARD), SiteProfile.from_fields(CARD | {"size": 16})
    assert find_misfits({}) == {}
    assert find_misfits({"a": usual, "b": usual}) == {}
    assert find_misfits({"a": odd, "b": usual, "c": usual}).keys() == {"a"}
    assert find_misfits({"a": usual, "b": odd, "c": odd}).keys() == {"a"}
    assert find_misfits({"a": odd, "b": usual}).keys() == {"b"}, "of equally many, the first is right"


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "scaffold"},
        {"privacy": {"epsilon": 8, "delta": 1e-3, "randomness": "seed"}},
        {"privacy": {"epsilon": 8, "delta": 1e-3, "unit": "patient", "randomness": "seed", "metrics": "count"}},
        {"privacy": {"noise": 2, "delta": 1e-3, "unit": "patient", "group": 3, "randomness": "seed"}},
    ],
    ids=str,
)
def test_a_deployed_run_is_the_simulated_one(settings: dict[str, Any], home: Path, tmp_path: Path) -> None:
    found = recipe(**settings)
    crossing = Crossing(desks(home, tmp_path.name))
    deployed = run_deployed(found, elsewhere(crossing), SITES, tmp_path).summary
    alone = simulation(found, home).run().summary
    assert deployed.sha256 == alone.sha256
    assert deployed.merged == alone.merged
    assert deployed.privacy == alone.privacy
    assert [row.train for row in deployed.site_sizes] == [row.train for row in alone.site_sizes]


def test_without_predictions_the_report_has_the_last_metrics_of_the_sites(home: Path, tmp_path: Path) -> None:
    found = recipe()
    crossing = Crossing(desks(home, tmp_path.name, **allowing("model", "buffers", "metrics")))
    summary = run_deployed(found, elsewhere(crossing), SITES, tmp_path).summary
    told = {site: rows["global"]["validation"] for site, rows in summary.sites.items()}
    images = sum(row.n for row in told.values())
    mean = sum(row.value("accuracy") * row.n for row in told.values()) / images
    assert set(told) == set(SITES)
    assert summary.headline.part == "validation"
    assert summary.headline["accuracy"].value == pytest.approx(mean)
    assert summary.headline.scores.n == images


def test_without_any_metrics_the_model_is_not_lost(home: Path, tmp_path: Path) -> None:
    crossing = Crossing(desks(home, tmp_path.name, **allowing("model", "buffers")))
    with pytest.raises(RoundFailed, match=r"the model is in model\.safetensors"):
        run_deployed(recipe(evaluate__every=0), elsewhere(crossing), SITES, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 1000


def test_a_missing_site_is_left_out_and_reported(home: Path, tmp_path: Path) -> None:
    crossing, seen = Crossing(desks(home, tmp_path.name)), []

    def answer(site: str, data: bytes) -> bytes | Failure:
        return Failure("dead", "it is away") if site == "hill" else crossing.answer(site, data)

    there = RemoteExecution(MockEngine(answer), "mock")
    watch: Watch = lambda event, info: seen.append((event, dict(info)))  # noqa: E731
    summary = run_deployed(recipe(quorum=2), there, SITES, tmp_path, watch).summary
    assert [row.site for row in summary.site_sizes] == ["harbour", "lake"]
    assert ("absent", {"site": "hill", "kind": "dead", "why": "it is away"}) in seen
    assert summary.absent == {"hill": "dead: it is away"}
    for quorum in (3, None):
        with pytest.raises(RoundFailed, match=r"2 of 3 sites enrolled, 3 are needed \(hill: dead: it is away\)"):
            run_deployed(recipe(quorum=quorum), there, SITES, tmp_path / "other")
    assert not RunFolder(tmp_path / "other").enrolment.exists()


def test_a_run_that_goes_on_refuses_a_site_with_other_images(home: Path, tmp_path: Path) -> None:
    crossing = Crossing(desks(home, tmp_path.name))
    run_deployed(recipe(), elsewhere(crossing), SITES, tmp_path)
    RunFolder(tmp_path).result.unlink()
    changed = RunFolder(tmp_path).enrolment.read_text().replace('"train": ', '"train": 1')
    RunFolder(tmp_path).enrolment.write_text(changed)
    with pytest.raises(StoreError, match="site harbour has other data than when this run began"):
        run_deployed(recipe(), elsewhere(crossing), SITES, tmp_path)
    RunFolder(tmp_path).enrolment.write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        run_deployed(recipe(), elsewhere(crossing), SITES, tmp_path)


@pytest.mark.parametrize("name", ["centralised", "fed-align"])
def test_what_needs_all_images_in_one_place_is_refused(name: str, tmp_path: Path) -> None:
    variant = {"variant": "paper"} if name == "fed-align" else {}
    with pytest.raises(RecipeError, match="needs all sites' images in one place"):
        run_deployed(recipe(algorithm={"name": name, **variant}), elsewhere(Crossing({})), SITES, tmp_path)


def test_who_answers_for_another_is_refused(tmp_path: Path) -> None:
    there = RemoteExecution(
        MockEngine(lambda site, _: messages.encode({"run": "", "site": "lake", "card": CARD}, {})), "mock"
    )
    with pytest.raises(RoundFailed, match="1 of 3 sites enrolled"):
        run_deployed(recipe(quorum=2), there, SITES, tmp_path)
