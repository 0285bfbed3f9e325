"""Sums behind masks: the bits of the same integers without masks, near the mean of single updates, whoever is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyclinic import run
from polyclinic.core.errors import RecipeError, RoundFailed
from polyclinic.privacy.masking.fixed_point import as_words
from polyclinic.privacy.transforms.mask import SUM
from polyclinic.storage import messages
from tests.federation.secure_aggregation.played import (
    ALGORITHMS,
    Play,
    dataset_of,
    largest_difference,
    masked,
    network_with_statistics as network_with_statistics,
    same_bits,
)


def by_default(chosen: str, *more: str) -> list[Any]:
    """Parameters of a test, of which only the first is tried by default.

    All: `./scripts/test --heavy tests/federation/secure_aggregation`.
    """
    return [chosen, *(pytest.param(name, marks=pytest.mark.heavy) for name in more)]


def settings_of(name: str) -> dict[str, Any]:
    return {"algorithm": name, **ALGORITHMS[name]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masks_change_no_bit_of_the_sum(name: str) -> None:
    with_masks = Play(masked(True, **settings_of(name)))
    without = Play(masked(False, **settings_of(name)))
    assert same_bits(with_masks.play().state, without.play().state)
    sent = messages.decode(with_masks.said("train")[0]).tensors
    more = {"scaffold": {"buffers", "control"}, "fedbn": set[str]()}.get(name, {"buffers"})
    assert set(sent) == {"model", *more}
    assert with_masks.said("train")[0] != without.said("train")[0]


@pytest.mark.parametrize("name", by_default("scaffold", "fedavg", "fedprox", "fedbn", "fedcycle", "fedper"))
def test_the_result_is_that_of_single_updates_but_for_rounding(name: str) -> None:
    plain = Play(masked(**settings_of(name), stages=[]))
    assert largest_difference(Play(masked(**settings_of(name))).play().state, plain.play().state) < 3e-6


@pytest.mark.parametrize("name", by_default("fedavg", "scaffold", "fedbn"))
@pytest.mark.parametrize("purpose", ["train", "unmask", *by_default("keys", "shares", "agree")])
def test_one_of_five_is_lost_anywhere(name: str, purpose: str) -> None:
    """The others' sum, to the bit: without the site if it is lost before its update came, with it afterwards."""
    lost = {("site-2", purpose)}
    found = Play(masked(True, **settings_of(name)), set(lost)).play()
    wanted = Play(masked(False, **settings_of(name)), set(lost)).play()
    assert same_bits(found.state, wanted.state)
    everybody = Play(masked(True, **settings_of(name))).play()
    assert same_bits(found.state, everybody.state) == (purpose in ("agree", "unmask"))


def test_a_round_that_fewer_sites_begin_has_the_threshold_of_the_run() -> None:
    played = Play(masked(), {("site-2", "keys")})
    assert same_bits(played.play().state, Play(masked(False), set(played.lost)).play().state)
    with pytest.raises(RoundFailed, match="3 sites began it; cohort: 3 sites take part, where 4 are needed"):
        Play(masked(), {("site-2", "keys"), ("site-4", "keys")}).play()


@pytest.mark.parametrize("purpose", ["train", *by_default("unmask", "shares", "agree")])
def test_below_the_threshold_the_round_ends_and_nothing_is_unmasked(purpose: str) -> None:
    played = Play(masked(), {("site-2", purpose), ("site-4", purpose)})
    with pytest.raises(RoundFailed, match=r"round 1 was given up, and no update was unmasked.*3 (of 5 sites|shares)"):
        played.play()
    asked = {order.fields["purpose"] for _, order in played.sent}
    assert ("unmask" in asked) == (purpose == "unmask")


def test_what_the_server_gets_of_a_site_is_uniform_and_never_its_update() -> None:
    """The integers of each site are in its reply without masks, and nowhere behind masks."""
    without, behind = Play(masked(False)), Play(masked(True))
    without.play()
    behind.play()
    plain, hidden = without.said("train"), b"".join(data for _, _, data in behind.replies)
    for data in plain:
        vector = as_words(messages.decode(data).tensors["model"][SUM])
        assert vector.tobytes() in data
        assert vector.tobytes()[:64] not in hidden
        assert np.abs(vector.view(np.int32)).max() < 2**28, "a plain update is small"
    for data in behind.said("train"):
        vector = as_words(messages.decode(data).tensors["model"][SUM])
        assert 0.4 < float((vector > 2**31).mean()) < 0.6


def test_the_order_of_arrival_changes_nothing() -> None:
    assert same_bits(Play(masked()).play(arrival=[4, 2, 0, 1, 3]).state, Play(masked()).play().state)


@pytest.mark.parametrize("cohort", [4])
def test_cohorts_of_a_round(cohort: int) -> None:
    options = {"threshold": cohort}
    found = Play(masked(True, cohort=cohort, options=options)).play()
    assert same_bits(found.state, Play(masked(False, cohort=cohort, options=options)).play().state)


def test_a_circle_of_neighbours_gives_the_same_sum_with_fewer_shares() -> None:
    circle, everybody = Play(masked(sites=9, options={"neighbours": 4})), Play(masked(sites=9))
    circle.lost = everybody.lost = {("site-3", "train")}
    assert same_bits(circle.play().state, everybody.play().state)
    sealed = [messages.decode(play.said("shares")[0]).fields["masks"]["sealed"] for play in (circle, everybody)]
    assert list(map(len, sealed)) == [4, 8]


@pytest.mark.parametrize("engine", [{"name": "stacked"}, {"name": "local", "workers": 2}])
def test_every_engine_gives_the_same_sum_with_masks_and_without(engine: dict[str, Any]) -> None:
    given = {f"engine__{key}": value for key, value in engine.items()}
    found = [run(masked(masks, **given), dataset=dataset_of(5)).summary.sha256 for masks in (True, False)]
    assert found[0] == found[1]
    if engine["name"] == "local":
        assert found[0] == run(masked(), dataset=dataset_of(5)).summary.sha256


def test_a_bound_at_home_shortens_what_a_site_adds() -> None:
    bound, start = 1e-3, Play(masked()).made.setup.federation.initial
    short = Play(masked(rounds=1, options={"bound": bound})).play().state
    moved = sum(float((t.double() - start["model"][n].double()).square().sum()) for n, t in short["model"].items())
    assert 0 < moved**0.5 <= bound * 1.01
    free = Play(masked(rounds=1)).play().state
    assert largest_difference(short, free) > bound


@pytest.mark.parametrize("lr", [0.1, 1e6])
def test_whatever_training_made_of_an_update_every_site_answers_alike(
    lr: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A site that refused a value out of range would tell the server, which chooses the weights, that it was."""
    played = Play(masked(training__optimiser={"name": "sgd", "lr": lr}, max_norm=1e30, rounds=1))
    played.play()
    assert not played.refusals
    replies = [messages.decode(data) for data in played.said("train")]
    assert len(replies) == 5
    assert len({tuple(sorted(reply.fields)) for reply in replies}) == 1
    assert [set(reply.fields["masks"]) for reply in replies] == [{"signature", "unreadable"}] * 5
    assert ("were brought into range" in caplog.text) == (lr > 1), "the site's own people are told"


def test_a_sum_of_values_out_of_range_is_that_of_the_limits() -> None:
    """It does not wrap around: behind masks the sum is, to the bit, that of the same integers in the open."""
    options: dict[str, Any] = {"training__optimiser": {"name": "sgd", "lr": 1e6}, "max_norm": 1e30, "rounds": 1}
    found = Play(masked(True, **options)).play().state
    assert same_bits(found, Play(masked(False, **options)).play().state)
    assert max(float(t.abs().max()) for t in found["model"].values()) > 1, "some were out of range"


@pytest.mark.parametrize("sites", [1, 2])
def test_too_few_sites_are_refused_before_anything_runs(sites: int) -> None:
    with pytest.raises(RecipeError, match=r"a sum could be that of one honest site|a round has"):
        Play(masked(sites=sites))
