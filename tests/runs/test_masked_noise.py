"""Noise that is shared behind masks: each site adds 1/√(threshold − colluders) of the plan's, at the same ε."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic import Recipe, run
from polyclinic.core import Stream
from polyclinic.core.errors import RecipeError, RoundFailed
from polyclinic.core.types import Bundle
from polyclinic.federation.secure_aggregation import site as module
from polyclinic.federation.secure_aggregation.cohort import Cohort, RoundKeys
from polyclinic.federation.secure_aggregation.site import MaskingSite
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.masking.fixed_point import PARAMETERS, Words, as_tensor
from polyclinic.privacy.shared_ledger import price_ledger
from tests.federation.secure_aggregation.played import Play, masked, network_with_statistics as network_with_statistics

SIGMA, CLIP, COLLUDERS, THRESHOLD, SITES = 2.0, 0.5, 1, 4, 5
PLAN = {"unit": "site", "noise": SIGMA, "clip": CLIP, "delta": 1e-2, "randomness": "seed"}


def planned(lr: float = 0.1, masks: bool = True, **settings: Any) -> Recipe:
    options = {"threshold": THRESHOLD, "colluders": COLLUDERS}
    stages: dict[str, Any] = {} if masks else {"stages": []}
    common: dict[str, Any] = {"model": "mlp", "rounds": 1, "training__weights": "uniform", "evaluate__every": 0}
    optimiser = {"name": "sgd", "lr": lr}
    return masked(options=options, training__optimiser=optimiser, **common, **stages, **settings)


def moved(played: Play, start: Bundle) -> torch.Tensor:
    state = played.play().state
    return torch.cat([(t.double() - start["model"][n].double()).reshape(-1) for n, t in state["model"].items()])


@pytest.mark.parametrize("lost", [0, 1])
def test_the_sum_has_the_noise_of_the_plan_and_a_site_a_share_of_it(lost: int) -> None:
    """With next to no update the mean is noise alone: of K sites, √K times a site's share, divided by K."""
    played = Play(planned(lr=1e-9, privacy=PLAN))
    played.lost = {(f"site-{n + 1}", "train") for n in range(lost)}
    runner = played.runners["site-1"]
    assert runner.masking is not None
    values = sum(t.numel() for t in played.made.setup.federation.initial["model"].values())
    reach = CLIP + PARAMETERS.step * math.sqrt(values) / 2
    share = SIGMA * reach / math.sqrt(THRESHOLD - COLLUDERS)
    assert runner.masking.noise == pytest.approx(share, rel=1e-12)
    survivors = SITES - lost
    found = moved(played, played.made.setup.federation.initial)
    expected = share * math.sqrt(survivors) / survivors
    assert float(found.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * values))
    honest = (THRESHOLD - COLLUDERS) * share**2
    assert math.sqrt(honest) >= SIGMA * CLIP, "what any colluders leave is the plan's noise"


def test_epsilon_is_that_of_noise_at_every_site() -> None:
    behind, alone = (
        Play(planned(privacy=PLAN)).made.setup.plan,
        Play(planned(privacy=PLAN, masks=False)).made.setup.plan,
    )
    assert behind is not None
    assert alone is not None
    assert (behind.noise, behind.epsilon) == (alone.noise, alone.epsilon)


def test_a_record_at_every_site_moves_the_sum_by_all_of_them(tmp_path: Path) -> None:
    """What the ledger of a masked run costs an image, which may be at all sites: one noise against K clips."""
    ledger = tmp_path / "ours.jsonl"
    run(planned(privacy={**PLAN, "noise": 8.0, "randomness": "secret", "ledger": str(ledger)}))
    spent = price_ledger(ledger, 1e-3)
    true = epsilon([Spend(8.0, group=SITES)], 1e-3)
    assert spent["image"] == spent["patient"] == pytest.approx(true)
    assert spent["site"] == pytest.approx(epsilon([Spend(8.0)], 1e-3))


def test_what_a_site_adds_behind_masks_is_no_longer_than_the_clip() -> None:
    """Sensitivity: with next to no noise, and steps that are far too long, the integers that are masked."""
    played = Play(planned(lr=50.0, privacy={**PLAN, "noise": 1e-4}))
    before, added = MaskingSite._quantise, list[torch.Tensor]()

    def listen(self: MaskingSite, *given: Any) -> dict[str, Words]:
        vectors = before(self, *given)
        added.append(as_tensor(vectors["model"]).double() * PARAMETERS.step)
        return vectors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskingSite, "_quantise", listen)
        played.play()
    lengths = [float(vector.norm()) for vector in added]
    assert len(lengths) == SITES
    assert lengths == pytest.approx([CLIP] * SITES, rel=0.01)


def test_noise_of_two_sites_is_not_the_same() -> None:
    played = Play(planned(lr=1e-9, privacy=PLAN))
    start = played.made.setup.federation.initial
    everybody = moved(played, start)
    fewer = Play(planned(lr=1e-9, privacy=PLAN), {("site-1", "train")})
    some = moved(fewer, start)
    apart = everybody * SITES - some * (SITES - 1)
    assert abs(float(torch.corrcoef(torch.stack([apart, some]))[0, 1])) < 0.15


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"privacy": {**PLAN, "noise_at": "server"}}, "masks are for a server that is not trusted"),
        ({"privacy": PLAN, "stages": [{"name": "mask"}]}, "give mask.threshold"),
        ({"privacy": PLAN, "stages": [{"name": "mask", "threshold": 4, "masks": False}]}, "shows single updates"),
        ({"privacy": {**PLAN, "clip": 1e-6}}, "too small for the integers"),
    ],
)
def test_what_noise_behind_masks_needs_is_said(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Play(planned(**settings)).play()


def test_noise_for_which_masked_sums_have_no_room_is_refused_before_a_site_trains() -> None:
    """Ten standard deviations of the noise of five sites, and half a step of every value, must fit below 2³¹ steps."""
    with pytest.raises(RoundFailed, match=r"the noise of 5 sites is more than masked sums carry; lower privacy.clip"):
        (played := Play(planned(privacy={**PLAN, "clip": 8.0}))).play()
    assert not played.said("train")
    assert {purpose for _, purpose in played.refusals} == {"shares"}


def test_an_update_leaves_room_for_the_noise_that_is_added_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site's update at its limit, and all the noise that a sum has at ten standard deviations: the true sum."""
    played = Play(planned(privacy={**PLAN, "clip": 3.0}))
    site = played.runners["site-1"].masking
    assert site is not None
    most = 10 * math.sqrt(SITES) * site.noise / SITES
    drawn = torch.full(
        (sum(t.numel() for t in played.made.setup.federation.initial["model"].values()),), most, dtype=torch.float64
    )
    monkeypatch.setattr(module, "gaussian_noise", lambda shape, std, stream: drawn / PARAMETERS.step)
    monkeypatch.setattr(module, "clip", lambda tensors, *_: (tensors, 0.0))
    huge = {n: torch.full_like(t, 1e6) for n, t in played.made.setup.federation.initial["model"].items()}
    start = {n: torch.zeros_like(t) for n, t in huge.items()}
    cohort = Cohort("run", 1, {name: RoundKeys({}, 0, site.weight, b"", b"") for name in played.sites})
    words = site._quantise({"model": huge}, {"model": start}, cohort, SITES, Stream(0))["model"]
    total = sum(int(words.view("int32")[0]) for _ in played.sites)
    assert 2**31 - 100 < total < 2**31, "the room is used, and the sum of 32 bits does not wrap around"
