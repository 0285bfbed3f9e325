"""The server's side of a run between sites: it knows cards, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from polyclinic.cli.display import result_table
from polyclinic.core import __version__
from polyclinic.core.errors import DataError, EngineError, RecipeError, Refused, RoundFailed, StoreError
from polyclinic.core.jobs import Failure
from polyclinic.data.patients import count_unnamed, max_images_per_patient
from polyclinic.deploy.serve import run_deployed
from polyclinic.deploy.site.scores import read_kept_scores
from polyclinic.evaluation.task import CLASSIFICATION
from polyclinic.federation.engines import RemoteExecution
from polyclinic.federation.rounds import Watch
from polyclinic.reporting.html.render import to_html
from polyclinic.reporting.render_markdown import to_markdown
from polyclinic.reporting.report import build_report
from polyclinic.reporting.report_data import read_report_data
from polyclinic.runs.remote_sites import RemoteSites, SiteProfile, find_misfits
from polyclinic.storage import messages
from polyclinic.storage.ledger import Ledger
from polyclinic.storage.run_folder import RunFolder
from tests.deploy.example_sites import EVERY, EVERYTHING, SITES, ApprovingHandler, Crossing, desks, recipe, simulation
from tests.deploy.site.test_message_handler import PHANTOM
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


def at_home() -> dict[str, Any]:
    """Everything but predictions may leave."""
    return allowing(*(kind for kind in EVERYTHING["kinds"] if kind != "predictions"))


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
    newer = SiteProfile.from_fields(CARD | {"version": "9.9"})
    RemoteSites.from_profiles({"harbour": SiteProfile.from_fields(CARD), "hill": newer})  # the protocol decides


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
        {"algorithm": "cross-site"},
        {"ensemble": True},
        EVERY["pfedcdp in three clusters"],
        {"data": PHANTOM, "evaluate__bootstrap": 30},
        {
            "privacy": {
                "noise": 2,
                "delta": 1e-3,
                "unit": "patient",
                "group": 3,
                "randomness": "seed",
                "metrics": "open",
            }
        },
    ],
    ids=str,
)
def test_a_deployed_run_is_the_simulated_one(settings: dict[str, Any], home: Path, tmp_path: Path) -> None:
    """Every figure of every site, with its interval; of all sites together whatever scores can tell exactly."""
    found = recipe(**settings)
    crossing = Crossing(desks(home, tmp_path.name, **at_home()))
    deployed = run_deployed(found, elsewhere(crossing), SITES, tmp_path).summary
    alone = simulation(found, home).run().summary
    assert deployed.sha256 == alone.sha256
    assert deployed.privacy == alone.privacy
    assert [row.train for row in deployed.site_sizes] == [row.train for row in alone.site_sizes]
    assert deployed.sites == alone.sites
    assert (deployed.pooled_from, alone.pooled_from) == ("scores", "predictions")
    assert (deployed.headline.model, deployed.headline.images) == (alone.headline.model, alone.headline.images)
    if "data" in settings:
        assert deployed.sites["hill"]["global"]["test"]["accuracy"].low is not None
    for model, parts in alone.merged.items():
        for part, wanted in parts.items():
            here = deployed.merged[model][part]
            assert (here.n, here.details) == (wanted.n, wanted.details)
            for info in CLASSIFICATION.metrics:
                if info.pooled_by != "sites":
                    assert here.value(info.name) == pytest.approx(wanted.value(info.name), abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("metrics", ["suppress", "count"])
def test_under_a_plan_final_scores_leave_only_as_it_says(metrics: str, home: Path, tmp_path: Path) -> None:
    plan = {"noise": 2.0, "delta": 1e-3, "unit": "patient", "randomness": "seed", "metrics": metrics}
    found, crossing = recipe(privacy=plan, rounds=2), Crossing(desks(home, tmp_path.name, **at_home()))
    summary = run_deployed(found, elsewhere(crossing), SITES, tmp_path).summary
    alone = simulation(found, home).run().summary
    assert (summary.sha256, summary.privacy) == (alone.sha256, alone.privacy)
    page = (tmp_path / "privacy.md").read_text()
    own = {site: read_kept_scores(desk.config.folder)[0] for site, desk in crossing.desks.items()}
    assert all(kept.judged is not None and kept.judged["auc"].value is not None for kept in own.values())
    charged = [
        (row["round"], set(row["privacy"]["sites"]))
        for row in Ledger(home / "hill" / tmp_path.name / "ledger.jsonl").read()
    ]
    if metrics == "suppress":
        assert (summary.pooled_from, summary.headline.scores.n, summary.sites) == ("nothing", 0, {})
        assert summary.withheld.keys() == set(SITES)
        assert all("privacy.metrics: suppress" in why for why in summary.withheld.values())
        assert "they stayed there" in page
        assert "no score left them" in page
        assert charged == [(1, {"hill"}), (2, {"hill"})]
        return
    assert summary.pooled_from == "scores"
    told = {site: models["global"] for site, models in summary.sites.items()}
    assert all(parts.keys() == {"test"} for parts in told.values()), "validation images have paid for rounds"
    assert all(parts["test"].metrics.keys() == {"accuracy", "loss"} for parts in told.values())
    exact = {site: kept.judged["loss"].value for site, kept in own.items() if kept.judged}
    assert all(told[site]["test"]["loss"].value != exact[site] for site in SITES), "noise is in it"
    assert charged == [(1, {"hill", "validation"}), (2, {"hill", "validation"}), (3, {"test"})]
    assert "from noised counts" in page
    order = next(data for site, data in reversed(crossing.sent) if site == "hill" and b"evaluate" in data)
    repeated = ApprovingHandler(crossing.desks["hill"].config).answer_message(order)
    assert "failure" in messages.decode(repeated).fields, "the run has ended"


def test_without_final_scores_the_report_has_the_last_metrics_of_the_sites(home: Path, tmp_path: Path) -> None:
    """A site may change its mind during a run."""
    found = recipe()
    crossing = Crossing(desks(home, tmp_path.name, **at_home()))
    stricter = desks(home, tmp_path.name, **allowing("model", "buffers"))

    def answer(site: str, data: bytes) -> bytes | Failure:
        if messages.decode(data).fields["purpose"] == "evaluate":
            crossing.desks = {**crossing.desks, site: stricter[site]}
        return crossing.answer(site, data)

    summary = run_deployed(found, RemoteExecution(MockEngine(answer), "mock"), SITES, tmp_path).summary
    assert summary.pooled_from == "reports"
    told = {site: rows["global"]["validation"] for site, rows in summary.sites.items()}
    images = sum(row.n for row in told.values())
    mean = sum(row.value("accuracy") * row.n for row in told.values()) / images
    assert set(told) == set(SITES)
    assert summary.headline.part == "validation"
    assert summary.headline["accuracy"].value == pytest.approx(mean)
    assert summary.headline.scores.n == images


def test_where_no_figure_may_leave_the_run_ends_and_says_where_they_are(home: Path, tmp_path: Path) -> None:
    crossing = Crossing(desks(home, tmp_path.name, **allowing("model", "buffers")))
    summary = run_deployed(recipe(evaluate__every=0, rounds=1), elsewhere(crossing), SITES, tmp_path).summary
    assert (tmp_path / "model.safetensors").stat().st_size > 1000
    assert (summary.pooled_from, summary.sites) == ("nothing", {})
    assert summary.withheld.keys() == set(SITES)
    report = build_report(read_report_data([tmp_path]))
    for text in (to_markdown(report), to_html(report)):
        assert "figures are at the sites" in text
        assert "hill does not let metrics leave" in text
        assert not re.search(r"\bnan\b", re.sub("<[^>]*>", "", text))
    caption = str(result_table(summary).caption)
    assert "No figure of the final model left a site" in caption
    for desk in crossing.desks.values():
        (kept,) = read_kept_scores(desk.config.folder)
        assert kept.judged is not None
        assert kept.judged.n == 8
        assert kept.withheld.startswith("policy: ")


def test_a_site_that_fails_refuses_or_lies_in_the_evaluation_is_left_out_and_named(home: Path, tmp_path: Path) -> None:
    """Without a quorum, too: all rounds were played with everybody."""
    crossing = Crossing(desks(home, tmp_path.name, **at_home()))
    events: list[tuple[str, dict[str, Any]]] = []

    def answer(site: str, data: bytes) -> bytes | Failure:
        if messages.decode(data).fields["purpose"] != "evaluate" or site == "harbour":
            return crossing.answer(site, data)
        if site == "hill":
            return Failure("error", "hill cannot do this; its own log says why")
        reply = crossing.answer(site, data)
        assert isinstance(reply, bytes)
        fields = dict(messages.decode(reply).fields)
        fields["scores"]["models"]["global"]["test"]["n"] = 10**9
        return messages.encode(fields, {})

    watch: Watch = lambda event, info: events.append((event, dict(info)))  # noqa: E731
    there = RemoteExecution(MockEngine(answer), "mock")
    summary = run_deployed(recipe(rounds=1), there, SITES, tmp_path, watch).summary
    assert summary.sites.keys() == {"harbour"}
    assert summary.withheld["hill"] == "error: hill cannot do this; its own log says why"
    assert "global is scored on 1000000000 test images, where 8 were registered" in summary.withheld["lake"]
    assert summary.headline.images == "test images of 1 of 3 sites"
    assert {info["site"]: info.get("outcome") for event, info in events if event == "evaluated"} == {
        "harbour": None,
        "hill": "error",
        "lake": "refused",
    }
    written = build_report(read_report_data([tmp_path]))
    assert all("AUC (mean of sites)" in text for text in (to_markdown(written), to_html(written)))
    assert "| all (mean of sites) |" in to_markdown(written), "so is the calibration error"
    assert "means of the sites' own figures, weighted by images" in str(result_table(summary).caption)
    report = to_markdown(written)
    assert all(f"{site} told no scores of the final model" in report for site in ("hill", "lake"))
    assert all(f"{site} told no scores of the final model" in str(result_table(summary).caption) for site in ("hill",))


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
