"""FedMP: what a site tells and hears, both averages by hand, what is refused, and all of it under a privacy plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from polyclinic import run
from polyclinic.algorithms.representation.fedmp import FedMP
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.core.jobs import Fit, Fitted, Job, Site, Update
from polyclinic.core.options import Private
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, SiteId, Tensors
from polyclinic.data.examples import Images, SiteData
from polyclinic.federation.site_runner import drive_jobs
from polyclinic.runs.experiment import Experiment
from tests.algorithms.test_fedmp import MOMENTUM, SGD, WITH_EACH_VARIANT, Variant, deep, made_of
from tests.laws.bench import CLASSES, clinics, federation, noise, same, site, small, tapped
from tests.small import tiny

# What a site tells, and both averages: equations 6 and 7


LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
"""One image of class 2, so that it is not told."""


def reply(
    algorithm: FedMP, features: Tensor, memory: Bundle | None, labels: Tensor = LABELS, number: int = 1, secret: int = 9
) -> tuple[Update, Bundle | None]:
    """A site's answer whose training did nothing and whose images have these features."""
    state = algorithm.init(federation(algorithm, clinics(8, 8, dtype=features.dtype), small(dtype=features.dtype))[0])

    def answer(job: Job, number: int) -> Any:
        return Fitted(job.weights, 1, 0.0, {}) if isinstance(job, Fit) else {"features": features, "labels": labels}

    here = Site("clinic-1", len(labels), number, 3, 0.1, Stream(secret, ("secret",)))
    work = algorithm.local(algorithm.broadcast(state, "clinic-1"), memory, here, Stream(0, ("round", number)))
    update, kept = drive_jobs(work, answer)
    algorithm.check_update(update)
    return update, kept


def random(*shape: int, name: str = "z") -> Tensor:
    return torch.randn(*shape, generator=Stream(5, (name, *shape)).generator(), dtype=torch.float64)


@WITH_EACH_VARIANT
@pytest.mark.parametrize("mu", [0.5, 0.8, 1.0])
def test_a_sites_means_by_hand(variant: Variant, mu: float) -> None:
    """(6): class 1 is missing in the second round, class 2 always has too few images."""
    algorithm, first, second, third = FedMP(SGD, variant=variant, mu_client=mu), *(random(8, 16, name=n) for n in "abc")
    one, memory = reply(algorithm, first, None)
    two, memory = reply(algorithm, second, memory, torch.where(LABELS == 1, 0, LABELS))
    three, _ = reply(algorithm, third, memory)
    start = mu if variant == "paper" else 1.0
    a0, a1 = start * first[:4].mean(0), start * first[4:7].mean(0)
    b0 = (1 - mu) * a0 + mu * second[:7].mean(0)
    c0, c1 = ((1 - mu) * old + mu * new.mean(0) for old, new in ((b0, third[:4]), (a1, third[4:7])))
    nothing = torch.zeros(16, dtype=torch.float64)
    for update, wanted, images in (
        (one, [a0, a1, nothing], [4, 3, 0]),
        (two, [b0, a1, nothing], [7, 0, 0]),
        (three, [c0, c1, nothing], [4, 3, 0]),
    ):
        torch.testing.assert_close(update.tensors["means"]["means"], torch.stack(wanted), rtol=1e-12, atol=1e-12)
        assert update.tensors["means"]["images"].tolist() == images


@WITH_EACH_VARIANT
def test_of_a_class_of_few_images_no_number_leaves_the_site(variant: Variant) -> None:
    """Neither in the first round nor later; its feature is 10⁶, so it would be seen."""
    algorithm, memory = FedMP(SGD, variant=variant), None
    features = random(8, 16)
    features[LABELS == 2] = 1e6
    for number in (1, 2, 3):
        update, memory = reply(algorithm, features, memory, number=number)
        sent = update.tensors
        assert all(float(t.abs().max()) < 1e3 for kind in ("features", "means") for t in sent[kind].values())
        assert float(sent["features"]["held"][2]) == float(sent["means"]["images"][2]) == 0


def told_of(means: list[list[float]], images: list[float], examples: int) -> Update:
    own = {"means": torch.tensor(means).double(), "images": torch.tensor(images).double()}
    weights: Bundle = {"model": {"w": torch.ones(1)}, "buffers": {}}
    return Update({**weights, "means": own}, examples)


def prototypes(algorithm: FedMP, *rounds: list[Update]) -> Tensors:
    none = torch.zeros(3, dtype=torch.float64)
    state: Bundle = {"model": {"w": torch.zeros(1)}, "buffers": {}}
    state["prototypes"] = {"means": none[:, None].repeat(1, 2), "known": none}
    for updates in rounds:
        state = algorithm.aggregate(state, iter(updates))
    return state["prototypes"]


FIRST = [told_of([[1, 2], [7, 7], [0, 0]], [3, 1, 0], 4), told_of([[5, 6], [0, 0], [0, 0]], [12, 0, 0], 12)]
"""The second site has no image of class 1, and nobody has one of class 2."""
SECOND = [told_of([[4, 4], [3, -1], [0, 0]], [2, 2, 0], 4)]


def test_prototypes_by_hand_weighted_by_the_images_of_the_class() -> None:
    """(7), corrected: a site that lacks a class has no say in its prototype, whatever it sends."""
    algorithm = FedMP(SGD, completion=False, mu_server=0.7)
    found = prototypes(algorithm, FIRST)
    wanted = torch.tensor([[(3 * 1 + 12 * 5) / 15, (3 * 2 + 12 * 6) / 15], [7, 7], [0, 0]], dtype=torch.float64)
    torch.testing.assert_close(found["means"], wanted)
    assert found["known"].tolist() == [1, 1, 0]
    loud = [FIRST[0], told_of([[5, 6], [-1e6, 1e6], [1e6, 1e6]], [12, 0, 0], 12)]
    assert torch.equal(prototypes(algorithm, loud)["means"], found["means"])
    later = prototypes(algorithm, FIRST, SECOND)
    wanted = torch.stack([0.3 * wanted[0] + 0.7 * 4, torch.tensor([0.3 * 7 + 0.7 * 3, 0.3 * 7 - 0.7]), wanted[2]])
    torch.testing.assert_close(later["means"], wanted)


def test_as_printed_prototypes_start_at_0_and_a_site_without_a_class_pulls_it_there() -> None:
    """(7), paper: weights are 4/16 and 12/16 for every class, so class 1 keeps a quarter of its length."""
    algorithm = FedMP(SGD, variant="paper", completion=False, mu_server=0.7)
    found = prototypes(algorithm, FIRST)
    plain = torch.tensor([[(4 * 1 + 12 * 5) / 16, (4 * 2 + 12 * 6) / 16], [7 / 4, 7 / 4], [0, 0]], dtype=torch.float64)
    torch.testing.assert_close(found["means"], 0.7 * plain)
    later = prototypes(algorithm, FIRST, SECOND)["means"]
    torch.testing.assert_close(later[1], 0.3 * 0.7 * plain[1] + 0.7 * torch.tensor([3.0, -1.0]).double())


@WITH_EACH_VARIANT
def test_a_class_that_nobody_told_of_keeps_its_prototype(variant: Variant) -> None:
    algorithm = FedMP(SGD, variant=variant, completion=False)
    silent = [told_of([[0, 0], [9, 9], [0, 0]], [0, 0, 0], 4)]
    before, after = prototypes(algorithm, FIRST), prototypes(algorithm, FIRST, silent)
    assert torch.equal(before["means"], after["means"])
    assert torch.equal(before["known"], after["known"])


def disjoint() -> dict[SiteId, SiteData]:
    """Class 0 at two sites, class 1 at one, class 2 at the other; class 2 in too few images."""
    labels = {"a": [0, 0, 0, 0, 1, 1, 1], "b": [0] * 6 + [2] * 2}
    return {
        name: site(name, Images(noise(len(y), name, dtype=torch.float64).images, torch.tensor(y)))
        for name, y in labels.items()
    }


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_what_travels_are_features_of_the_trained_model_as_it_evaluates(cut: int) -> None:
    sites, network = disjoint(), deep(cut)
    algorithm = FedMP(MOMENTUM, bank=3)
    played, letters = tapped(algorithm, sites, network, rounds=3)
    sent: dict[tuple[int, SiteId], Tensor] = {}
    for letter in letters:
        z, labels = made_of(letter, sites, deep(cut))
        told = letter.answer.tensors
        assert set(told) == {"model", "buffers", "features", "means"}
        assert told["features"]["held"].tolist() == ([3, 3, 0] if letter.site == "a" else [3, 0, 0])
        for c in range(CLASSES):
            for feature in told["features"]["values"][c, : int(told["features"]["held"][c])]:
                gaps = (z[labels == c] - feature).abs().flatten(1).max(1).values
                assert float(gaps.min()) < 1e-10
        sent[letter.round, letter.site] = told["features"]["values"]
        if letter.round > 1:
            heard = letter.sent.tensors["others"]
            other = "b" if letter.site == "a" else "a"
            room = heard["values"].shape[1]
            assert torch.equal(heard["values"], sent[letter.round - 1, other][:, :room])
    assert set(letters[0].sent.tensors) == {"model", "buffers", "prototypes", "others"}
    assert letters[0].sent.tensors["others"]["values"].numel() == 0, "nothing was there to send in round 1"
    picks = [sent[number, "b"][0] for number in (1, 2, 3)]
    rows = [made_of(next(m for m in letters if (m.round, m.site) == (r, "b")), sites, deep(cut))[0] for r in (1, 2, 3)]
    chosen = {
        tuple(torch.cdist(p.flatten(1), z[:6].flatten(1)).argmin(1).tolist()) for p, z in zip(picks, rows, strict=True)
    }
    assert len(chosen) > 1, "other images in another round"
    state = played.outcome.state
    assert all(bool(t.isfinite().all()) for group in state.values() for t in group.values())


@pytest.mark.parametrize(("completion", "alignment"), [(True, False), (False, True), (False, False)])
def test_nothing_is_sent_that_is_not_needed(completion: bool, alignment: bool) -> None:
    algorithm = FedMP(SGD, completion=completion, alignment=alignment)
    _, letters = tapped(algorithm, disjoint(), deep(3), rounds=2)
    told = {"model", "buffers"} | ({"features"} if completion else set()) | ({"means"} if alignment else set())
    heard = {"model", "buffers"} | ({"others"} if completion else set()) | ({"prototypes"} if alignment else set())
    assert all(set(letter.answer.tensors) == told and set(letter.sent.tensors) == heard for letter in letters)


def test_every_round_and_every_site_samples_others_features_by_a_key_of_its_own() -> None:
    algorithm = FedMP(SGD)
    state = algorithm.init(federation(algorithm, clinics(8, 8), small())[0])
    state["bank"] = {n: t + 1 if n.endswith("held") else t for n, t in state["bank"].items()}

    def key(name: SiteId, number: int) -> int:
        here, stream = Site(name, 8, number, 3, 0.1), Stream(0, ("site", name))
        job = next(algorithm.local(algorithm.broadcast(state, name), None, here, stream))
        assert isinstance(job, Fit)
        return int(job.reference["bank"]["key"])

    places = [(name, number) for name in ("clinic-1", "clinic-2") for number in (2, 3, 4)]
    assert len({key(*place) for place in places}) == 6
    assert key("clinic-1", 3) == key("clinic-1", 3)


# What is refused


@pytest.mark.parametrize("images", [[-1.0, 2.0], [3.0, 2.0]])
def test_counts_that_cannot_be_are_refused(images: list[float]) -> None:
    FedMP(SGD).check_update(Update({"means": {"images": torch.tensor([1.0, 3.0])}}, 4))
    with pytest.raises(Refused, match="counts of classes"):
        FedMP(SGD).check_update(Update({"means": {"images": torch.tensor(images)}}, 4))


@pytest.mark.parametrize("held", [[-1.0, 2.0], [1.5, 2.0], [0.0, 5.0]])
def test_numbers_of_features_that_cannot_be_are_refused(held: list[float]) -> None:
    FedMP(SGD, bank=4).check_update(Update({"features": {"held": torch.tensor([0.0, 4.0])}}, 4))
    with pytest.raises(Refused, match="whole and from 0 to 4"):
        FedMP(SGD, bank=4).check_update(Update({"features": {"held": torch.tensor(held)}}, 4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("bank", "receive", "sample", "fewest")),
        *((name, value) for name in ("mu_client", "mu_server") for value in (0.0, 1.1, -0.5, float("nan"))),
        *((name, value) for name in ("clip", "noise_features", "noise_means") for value in (0.0, -1.0, float("nan"))),
    ],
)
def test_impossible_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=f"algorithm.{name} is {value}, but should be "):
        FedMP(SGD, **{name: value})


# Under a privacy plan

IMAGE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-4}


def test_features_and_means_are_charged_and_the_page_says_what_protects_them() -> None:
    found = run(tiny(algorithm={"name": "fedmp", "noise_means": 30.0}, privacy=IMAGE))
    told = {row.kind: row.protection for row in found.summary.released}
    assert ["noise 20 ×" in told["features"], "noise 30 ×" in told["means"]] == [True, True]
    assert all("charged" in told[kind] for kind in ("features", "means"))


def test_more_is_released_than_by_fedavg_so_it_costs_more() -> None:
    def plan(method: Any) -> tuple[list[float], float]:
        found = Experiment(tiny(algorithm=method, privacy={"noise": 1.0, "delta": 1e-4})).setup.plan
        assert found is not None
        return list(found.other_releases.values()), found.epsilon

    both, features, means, neither, fedavg = (
        plan(method)
        for method in (
            {"name": "fedmp", "noise_features": 15.0, "noise_means": 25.0},
            {"name": "fedmp", "noise_features": 15.0, "noise_means": 25.0, "alignment": False},
            {"name": "fedmp", "noise_features": 15.0, "noise_means": 25.0, "completion": False},
            {"name": "fedmp", "completion": False, "alignment": False},
            "fedavg",
        )
    )
    assert both[0] == features[0] == [15.0, 25.0], "which classes are told, their counts tell: noised, and charged"
    assert means[0] == [25.0]
    assert neither == fedavg
    assert both[1] > means[1] > fedavg[1]


def test_a_whole_site_is_not_protected_and_a_longer_first_round_is_not_priced() -> None:
    with pytest.raises(RecipeError, match="sends more"):
        Experiment(tiny(algorithm="fedmp", privacy={"unit": "site", "epsilon": 30.0, "delta": 1e-3}))
    with pytest.raises(RecipeError, match=r"leave out training\.first_epochs"):
        tiny(algorithm="fedmp", training__first_epochs=2, privacy=IMAGE)


def test_under_a_plan_a_reply_is_noised_and_small_classes_are_withheld() -> None:
    """3000 images of class 0, five of class 1, none of class 2. The seed that all know has no part in it."""
    private = replace(SGD, private=Private(1.0, 1.0))
    algorithm = FedMP(private, noise_features=3.0, noise_means=2.0, clip=4.0, bank=500)
    labels = torch.tensor([0] * 3000 + [1] * 5)
    features = random(3005, 16) * 0.1 + 0.5
    update, memory = reply(algorithm, features, None, labels)
    sent = update.tensors
    assert sent["features"]["held"].tolist() == [500, 0, 0]
    rest = sent["features"]["values"][0] - 0.5
    assert float(rest.std()) == pytest.approx(2 * 3.0 * 4.0, rel=0.04), "2·σ·clip; five standard errors of 8000"
    assert bool((sent["features"]["values"][1:] == 0).all())
    gap = float((sent["means"]["means"][0] - features[:3000].mean(0)).abs().max())
    assert 0 < gap < 6 * 2.0 * 4.0 / 0.9**0.5 / 3000
    assert sent["means"]["images"][1:].tolist() == [0, 0]
    assert bool((sent["means"]["means"][1:] == 0).all())
    assert memory is not None
    assert torch.equal(memory["means"]["means"], sent["means"]["means"]), "nothing is remembered that was not told"
    again, _ = reply(algorithm, features, None, labels, number=2)
    assert same(again.tensors, sent), "slots are drawn from the secret, not from the seed"
    other, _ = reply(algorithm, features, None, labels, secret=10)
    assert not torch.equal(other.tensors["features"]["values"], sent["features"]["values"])


@pytest.mark.parametrize("algorithm", ["fedmp", "fed-align"])
def test_a_finished_run_keeps_no_features_of_images(tmp_path: Path, algorithm: str) -> None:
    found = run(tiny(algorithm=algorithm), tmp_path / "run")
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert {name.partition("/")[0] for name in kept} <= {"model", "buffers", "prototypes"}
    assert found.summary.headline.model == "global"
