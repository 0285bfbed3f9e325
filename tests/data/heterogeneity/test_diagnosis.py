"""Closed forms, other libraries' figures, p-values that are uniform where there is nothing, power where there is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from matplotlib.text import Text
from PIL import Image
from scipy import stats
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from polyclinic.algorithms import ALGORITHMS
from polyclinic.core.errors import DataError
from polyclinic.core.rng import Stream
from polyclinic.data.builtin.phantom import PhantomOptions, PhantomSite, generate_phantom
from polyclinic.data.examples import Images
from polyclinic.data.heterogeneity import feature_shift
from polyclinic.data.heterogeneity.advice import (
    FOR_DOMAINS,
    FOR_LABELS,
    FOR_SCANNERS,
    FOR_SIZES,
    LABELS,
    recommend_methods,
)
from polyclinic.data.heterogeneity.diagnosis import (
    PER_SITE,
    Diagnosis,
    diagnose_sites,
    format_diagnosis,
    jensen_shannon,
    measure_label_skew,
)
from polyclinic.data.patients import Indices
from polyclinic.reporting.heterogeneity_figure import build_figure, draw_diagnosis

CLASSES = ("benign", "malignant")


def site(seed: int, share: float = 0.5, patients: int = 40, gain: float = 1.0, offset: float = 0.0) -> Images:
    """Patients with one to three noisy images of 12 × 12; a malignant one has a bright square."""
    rng = np.random.default_rng(seed)
    ill = np.arange(patients) < round(share * patients)
    of_image = np.repeat(np.arange(patients), rng.integers(1, 4, patients))
    images = rng.normal(size=(len(of_image), 1, 12, 12)) + 0.3 * rng.normal(size=patients)[of_image, None, None, None]
    images[ill[of_image], :, 3:9, 3:9] += 3.0
    names = tuple(f"Smith-{seed}-{number}" for number in of_image)
    return Images(torch.tensor(gain * images + offset).float(), torch.tensor(ill[of_image]).long(), names)


def diagnosed(*sites: Images, seed: int = 0, features: feature_shift.Features | None = None) -> Diagnosis:
    named = {f"clinic-{number}": examples for number, examples in enumerate(sites)}
    return diagnose_sites(named, CLASSES, Stream(seed), features)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Every refit trains five classifiers; the p-value's resolution is all that suffers."""
    before, feature_shift.REFITS = feature_shift.REFITS, 20
    yield
    feature_shift.REFITS = before


@pytest.fixture(scope="module")
def alike() -> Diagnosis:
    return diagnosed(site(1), site(2), site(3))


@pytest.fixture(scope="module")
def scanners() -> Diagnosis:
    return diagnosed(site(1), site(2, gain=1.6, offset=1.0), site(3))


@pytest.fixture(scope="module")
def skewed() -> Diagnosis:
    return diagnosed(site(1, share=0.15, patients=120), site(2, share=0.5), site(3, share=0.85, patients=80))


def strengths(diagnosis: Diagnosis) -> dict[str, str]:
    return {advice.kind: advice.strength for advice in diagnosis.advice}


counts = st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any)


@given(counts, counts)
def test_the_divergence_is_that_of_scipy(p: list[int], q: list[int]) -> None:
    ours = float(jensen_shannon(np.array(p), np.array(q)))
    # The square of a root that scipy takes of rounding errors, which may be below 0.
    with np.errstate(invalid="ignore"):
        theirs = float(np.nan_to_num(jensenshannon(p, q, base=2))) ** 2
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert 0 <= ours <= 1 + 1e-12
    assert ours == pytest.approx(float(jensen_shannon(np.array(q), np.array(p))), abs=1e-12)


def test_disjoint_labels_are_one_bit_apart_and_equal_ones_none() -> None:
    assert jensen_shannon(np.array([3, 0, 0]), np.array([0, 1, 7])) == pytest.approx(1)
    assert jensen_shannon(np.array([3, 6]), np.array([10, 20])) == pytest.approx(0, abs=1e-15)


def test_the_thresholds_are_the_shares_they_are_said_to_be() -> None:
    for bound, share in zip(LABELS, (0.62, 0.75), strict=True):
        assert jensen_shannon(np.array([0.5, 0.5]), np.array([share, 1 - share])) == pytest.approx(bound, rel=0.1)


def labelled(seed: int) -> tuple[Indices, Indices]:
    """Three sites without skew. All images of a patient have one label, so images are far from independent."""
    rng = np.random.default_rng(seed)
    tallies = np.zeros((120, 3), dtype=np.int64)
    tallies[np.arange(120), rng.integers(0, 3, 120)] = rng.integers(1, 9, 120)
    return tallies, np.repeat([0, 1, 2], [20, 40, 60])


def test_without_label_skew_p_is_uniform_and_the_expectation_right() -> None:
    found = [measure_label_skew(*labelled(seed), Stream(seed)) for seed in range(100)]
    assert stats.kstest([one.p for one in found], "uniform").pvalue > 0.01
    observed = np.array([one.observed for one in found])
    assert abs(observed.mean() - np.mean([one.expected for one in found])) < 4 * observed.std() / 10


def test_label_skew_of_disjoint_sites_is_certain() -> None:
    skew = measure_label_skew(np.repeat(np.eye(2, dtype=np.int64), 20, axis=0), np.repeat([0, 1], 20), Stream(0))
    assert skew.observed == pytest.approx(float(jensen_shannon(np.array([1, 0]), np.array([1, 1]))))
    assert skew.p == 1 / 501


def test_alike_sites_need_nothing_but_averaging(alike: Diagnosis) -> None:
    assert set(strengths(alike).values()) == {"none"}
    assert "FedAvg." in " ".join(format_diagnosis(alike))
    assert alike.domain is not None
    assert alike.domain.accuracy == pytest.approx(1 / 3, abs=0.12)
    assert all(pair.holm is not None and pair.holm > 0.05 for pair in alike.pairs)


def test_a_gain_and_offset_are_found_and_nothing_else(scanners: Diagnosis) -> None:
    found = strengths(scanners)
    assert (found["label skew"], found["intensity shift"], found["feature shift"]) == ("none", "strong", "strong")
    assert scanners.intensity.p < 0.01
    for pair in scanners.pairs:
        assert pair.p is not None
        assert pair.p < 0.01 if "clinic-1" in (pair.a, pair.b) else pair.p > 0.01
    other = diagnosed(site(1), site(2, gain=1.6, offset=1.0))
    assert other.domain is not None
    assert other.domain.accuracy > 0.95


def test_skewed_labels_are_not_mistaken_for_a_shift(skewed: Diagnosis) -> None:
    found = strengths(skewed)
    assert (found["label skew"], found["intensity shift"], found["feature shift"]) == ("strong", "none", "none")
    assert skewed.domain is not None
    assert skewed.domain.accuracy < 0.5


@pytest.mark.parametrize(("vendors", "expected"), [(("film", "film"), "none"), (("film", "silicon"), "strong")])
def test_drawn_mammograms(vendors: tuple[str, str], expected: str) -> None:
    hospitals = tuple(
        PhantomSite(name=f"h{number}", vendor=vendor, patients=60, malignant=share)
        for number, (vendor, share) in enumerate(zip(vendors, (0.2, 0.8), strict=True))
    )
    drawn = generate_phantom(PhantomOptions(size=32, hospitals=hospitals), Stream(0))
    rows = [torch.tensor([name == f"h{number}" for name in drawn.sites or ()]).nonzero()[:, 0] for number in range(2)]
    found = strengths(diagnosed(*(drawn.to_images().subset(index) for index in rows)))
    assert found["label skew"] == "strong"
    assert found["feature shift"] == expected


def test_figures_of_sites_are_those_of_their_pixels(scanners: Diagnosis) -> None:
    images = [site(1).images, site(2, gain=1.6, offset=1.0).images, site(3).images]
    edges = np.linspace(*scanners.greys, 65)
    spread = float(torch.cat(images).std(correction=0))
    for profile, pixels in zip(scanners.sites, images, strict=True):
        assert profile.mean == pytest.approx(float(pixels.mean()), abs=1e-5)
        assert profile.std == pytest.approx(float(pixels.std(correction=0)), abs=1e-5)
        shares = np.histogram(pixels.numpy(), bins=edges)[0] / pixels.numel()
        assert profile.histogram == pytest.approx(shares, abs=1e-3)
    a, b = scanners.sites[:2]
    middles = (edges[:-1] + edges[1:]) / 2
    distance = stats.wasserstein_distance(middles, middles, a.histogram, b.histogram)
    assert scanners.pairs[0].intensity == pytest.approx(distance / spread, rel=1e-4)
    assert scanners.intensity.observed == max(pair.intensity for pair in scanners.pairs)


def test_sizes_and_counts(skewed: Diagnosis) -> None:
    sizes = np.array([profile.images for profile in skewed.sites])
    assert skewed.effective_sites == pytest.approx(sizes.sum() ** 2 / (sizes**2).sum())
    assert skewed.size_ratio == pytest.approx(sizes.max() / sizes.min())
    assert [profile.patients for profile in skewed.sites] == [120, 40, 80]
    assert [sum(profile.counts.values()) for profile in skewed.sites] == sizes.tolist()
    assert max(sizes) <= PER_SITE, "or pixels would be compared with a sample"


def test_the_stream_decides_and_the_order_of_sites_does_not(scanners: Diagnosis) -> None:
    named: Mapping[str, Images] = {
        "clinic-2": site(3),
        "clinic-1": site(2, gain=1.6, offset=1.0),
        "clinic-0": site(1),
    }
    assert diagnose_sites(named, CLASSES, Stream(0)) == scanners
    assert diagnose_sites(named, CLASSES, Stream(1)) != scanners


def test_large_sites_are_sampled_by_whole_patients() -> None:
    many, seen = site(1, patients=400), []

    def watched(images: Tensor) -> Tensor:
        seen.append(images)
        return images.flatten(1)[:, :5]

    found = diagnosed(many, site(2), features=watched)
    assert found.features == "given by the caller"
    assert found.sites[0].images == len(many) > PER_SITE
    assert PER_SITE - 3 < sum(map(len, seen)) - len(site(2)) <= PER_SITE
    owner = {image.numpy().tobytes(): (many.patients or ())[row] for row, image in enumerate(many.images)}
    drawn = [owner[image.numpy().tobytes()] for image in torch.cat(seen) if image.numpy().tobytes() in owner]
    assert all(drawn.count(name) == (many.patients or ()).count(name) for name in set(drawn))


CONSTANT = Images(torch.ones(30, 1, 4, 4), torch.arange(30) % 2, None)
LONELY = replace(site(4, patients=4), patients=("Smith",) * len(site(4, patients=4)))


@pytest.mark.parametrize(
    "sites",
    [
        (CONSTANT, CONSTANT),
        (LONELY, LONELY),
        (site(1, share=0.0), site(2, share=1.0)),
        (site(1, patients=1), site(2)),
        (
            Images(torch.rand(12, 3, 1, 1), torch.zeros(12).long(), None),
            Images(torch.rand(1, 3, 1, 1), torch.ones(1).long()),
        ),
    ],
    ids=["constant", "one patient", "disjoint", "tiny", "one pixel"],
)
def test_whatever_the_data_the_answer_is_json_and_sentences(sites: tuple[Images, Images]) -> None:
    found = diagnosed(*sites)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["classes"] == list(CLASSES)
    assert all(not line[0].islower() and line.endswith(".") for line in format_diagnosis(found))
    assert strengths(found)["feature shift"] == "none"


def test_no_patient_is_named(skewed: Diagnosis) -> None:
    assert "Smith" not in json.dumps(skewed.as_json()) + " ".join(format_diagnosis(skewed))


def test_every_method_that_is_suggested_can_be_run() -> None:
    named = {name for methods in (FOR_LABELS, FOR_SIZES, FOR_SCANNERS, FOR_DOMAINS) for name, _ in methods}
    assert named - {""} <= ALGORITHMS.keys()


def test_every_finding_suggests_something(scanners: Diagnosis, skewed: Diagnosis) -> None:
    large = diagnosed(site(1, patients=200), site(2, patients=8), site(3, patients=8))
    found = {advice.kind for one in (scanners, skewed, large) for advice in one.advice if advice.methods}
    assert {"label skew", "size skew", "intensity shift", "feature shift"} <= found


def test_a_strong_shift_suggests_what_our_own_results_bear_out(scanners: Diagnosis) -> None:
    (shifted,) = [advice for advice in scanners.advice if advice.kind == "feature shift"]
    methods = "; ".join(shifted.methods)
    assert shifted.strength == "strong"
    assert "training.epochs: 1" in methods
    assert "comparison with Local" in methods
    assert "Cross-site" in methods
    assert "FedCycle" not in methods


@pytest.mark.parametrize(("value", "expected"), [(1.0, "1.0"), (12.34, "12.3"), (1000.0, "1,000"), (12345.6, "12,346")])
def test_ratios_are_formatted_with_separators(value: float, expected: str, skewed: Diagnosis) -> None:
    (sizes,) = [advice for advice in recommend_methods(replace(skewed, size_ratio=value)) if advice.kind == "size skew"]
    assert f"the largest has {expected} times" in sizes.sentence
    shown = texts(replace(skewed, size_ratio=value))
    assert any(f"largest : smallest = {expected})" in text for text in shown)


def texts(diagnosis: Diagnosis) -> list[str]:
    """All that the picture says in words."""
    return [text.get_text() for text in build_figure(diagnosis, "x").findobj(Text) if isinstance(text, Text)]


def test_the_grey_cells_are_explained_and_all_words_fit(tmp_path: Path) -> None:
    found = diagnosed(site(1, patients=14), site(2, patients=14, share=0.0))
    assert found.domain is not None
    assert not found.domain.is_trusted
    assert any("grey: the same site, or no class in common" in text for text in texts(found))
    draw_diagnosis(found, tmp_path / "one.png")
    assert edges_are_white(tmp_path / "one.png")


def edges_are_white(path: Path) -> bool:
    """Nothing is cut off."""
    with Image.open(path) as shown:
        pixels = np.asarray(shown.convert("RGB"))
    return all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))


def test_label_skew_suggests_what_is_registered(skewed: Diagnosis) -> None:
    text = " ".join(format_diagnosis(skewed))
    for name in ("SCAFFOLD", "FedProx", "oversampling", "Local"):
        assert name in text


def test_too_few_patients_are_not_trusted_and_unknown_ones_named(alike: Diagnosis) -> None:
    few_images = replace(site(3, patients=3), patients=None)
    few = diagnosed(site(1, patients=14), site(2, patients=14), few_images)
    text = " ".join(format_diagnosis(few))
    assert "cannot be trusted: it had 14 patients" in text
    assert f"leaves out site 3 ({len(few_images)} images), with fewer than 10 patients" in text
    assert f"Patients are unknown at site 3 ({len(few_images)} images)" in text
    assert "trusted" not in " ".join(format_diagnosis(alike))


def test_shared_patients_are_counted_without_names() -> None:
    text = " ".join(format_diagnosis(diagnosed(site(1), site(1))))
    assert "40 of the patients compared are at more than one site" in text


BROKEN = replace(site(1), images=torch.full_like(site(1).images, float("nan")))


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ((site(1),), "fewer than two"),
        ((site(1), Images(torch.zeros(0, 1, 12, 12), torch.zeros(0).long())), "Site 2 of 2 has no images"),
        ((site(1), replace(site(2), labels=site(2).labels + 1)), "'clinic-1' has 38 images labelled outside"),
        ((BROKEN, site(2)), "'clinic-0' has at least"),
        ((site(1), CONSTANT), "different shapes"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(sites: tuple[Images, ...], words: str) -> None:
    with pytest.raises(DataError) as caught:
        diagnosed(*sites)
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("features", [lambda x: x, lambda x: x.flatten(1)[:1], lambda x: x.flatten(1) / 0])
def test_features_that_are_none_are_refused(features: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DataError, match="one row per image"):
        diagnosed(site(1), site(2), features=features)


def many(sites: int, one: Diagnosis) -> Diagnosis:
    """The same diagnosis of more sites."""
    profiles = [replace(one.sites[n % 3], name=f"hospital number {n:02d} of $10 µ_x") for n in range(sites)]
    pairs = [replace(one.pairs[0], a=a.name, b=b.name) for n, a in enumerate(profiles) for b in profiles[n + 1 :]]
    return replace(one, sites=tuple(profiles), pairs=tuple(pairs))


@pytest.mark.parametrize("sites", [3, 31])
def test_the_picture_is_whole_and_describes_itself(sites: int, scanners: Diagnosis, tmp_path: Path) -> None:
    draw_diagnosis(scanners if sites == 3 else many(sites, scanners), tmp_path / "one.png", "How they differ")
    with Image.open(tmp_path / "one.png") as drawn:
        assert (drawn.width, drawn.height) == (2400, 1800)
        assert drawn.info["Title"] == "How they differ"
        assert scanners.advice[0].sentence in drawn.info["Description"]
    assert edges_are_white(tmp_path / "one.png")
    assert os.listdir(tmp_path) == ["one.png"]


def test_what_could_not_be_measured_is_drawn_as_well_and_always_alike(tmp_path: Path) -> None:
    found = diagnosed(site(1, patients=1), site(2))
    assert (found.domain, found.pairs[0].mmd2) == (None, None)
    for name in ("one.png", "two.png"):
        draw_diagnosis(found, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.heavy
def test_four_sites_of_500_take_less_than_20_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_shift, "REFITS", 100)
    generator = Stream(0).generator()
    sites = [
        Images(torch.rand(500, 1, 64, 64, generator=generator), torch.randint(0, 2, (500,), generator=generator))
        for _ in range(4)
    ]
    began = time.process_time()
    diagnosed(*sites)
    assert time.process_time() - began < 20
