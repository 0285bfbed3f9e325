from __future__ import annotations

import time
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream
from polyclinic.data.builtin.phantom import HOSPITALS, MEAN, STD, PhantomOptions, PhantomSite, generate_phantom
from polyclinic.data.builtin.phantom_images import VENDORS, Cases, Vendor, acquire_images, draw_anatomy, spectral_noise
from polyclinic.data.examples import Collection


def hospital(vendor: str = "selenium", patients: int = 20, malignant: float = 0.5, name: str = "a") -> PhantomSite:
    return PhantomSite(name=name, vendor=vendor, patients=patients, malignant=malignant)


def drawn(*hospitals: PhantomSite, seed: int = 0, **options: Any) -> Collection:
    return generate_phantom(
        PhantomOptions(hospitals=hospitals or (hospital(),), **{"size": 32, **options}), Stream(seed)
    )


def cases(n: int, malignancy: float, lesion: float = 1.0) -> Cases:
    def full(value: float) -> Tensor:
        return torch.full((n,), value)

    return Cases(
        lesion=full(lesion),
        malignancy=full(malignancy),
        density=full(0.4),
        depth=full(0.7),
        height=full(0.42),
        radius=full(0.11),
        place=full(0.55),
        oblique=torch.arange(n) % 2 == 1,
        right=torch.zeros(n, dtype=torch.bool),
    )


def histogram(images: Tensor) -> Tensor:
    return torch.histc(images.float(), bins=32, min=0, max=255) / images.numel()


@pytest.fixture(scope="module")
def default() -> Collection:
    return generate_phantom(PhantomOptions(), Stream(0))


def test_the_same_stream_gives_the_same_bytes() -> None:
    one, again, other = drawn(seed=1), drawn(seed=1), drawn(seed=2)
    assert torch.equal(one.images, again.images)
    assert (one.patients, one.labels.tolist()) == (again.patients, again.labels.tolist())
    assert one.images.shape != other.images.shape or not torch.equal(one.images, other.images)


def test_another_hospital_leaves_the_first_as_it_was() -> None:
    alone, joined = drawn(hospital()), drawn(hospital(name="b", vendor="film"), hospital())
    rows = [row for row, site in enumerate(joined.sites or ()) if site == "a"]
    assert torch.equal(joined.images[rows], alone.images)


def test_more_images_than_one_chunk_are_all_different() -> None:
    images = drawn(hospital(patients=60)).images.flatten(1)
    assert len(images) > 64
    assert len({image.numpy().tobytes() for image in images}) == len(images)


@pytest.mark.parametrize(("fewest", "most"), [(2, 4), (1, 1), (3, 3)])
def test_patients_have_their_views_and_one_diagnosis(fewest: int, most: int) -> None:
    data = drawn(hospital(patients=40), views=(fewest, most))
    assert set(Counter(data.patients).values()) == set(range(fewest, most + 1))
    assert len(set(data.patients)) == 40
    assert len(set(zip(data.patients, data.labels.tolist(), strict=True))) == 40


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7, 1.0])
def test_the_share_of_malignant_patients_is_exact(share: float) -> None:
    data = drawn(hospital(patients=40, malignant=share))
    label = dict(zip(data.patients, data.labels.tolist(), strict=True))
    assert sum(label.values()) == round(share * 40)
    assert data.classes == ("benign", "malignant")


def test_screening_has_normal_patients_too() -> None:
    data = drawn(hospital(patients=40, malignant=0.3), task="screening")
    assert data.classes == ("normal", "benign", "malignant")
    assert sorted(Counter(dict(zip(data.patients, data.labels.tolist(), strict=True)).values()).items()) == [
        (0, 14),
        (1, 14),
        (2, 12),
    ]


@pytest.mark.parametrize("size", [32, 47, 64, 96, 150])
def test_any_size_from_32_is_drawn(size: int) -> None:
    images = drawn(hospital(patients=3), size=size).images
    assert images.shape[1:] == (1, size, size)
    assert images.dtype == torch.uint8


def test_a_larger_picture_is_of_the_same_kind() -> None:
    """The same patients at two sizes: about the same grey on average."""
    small, large = (drawn(hospital(patients=30), size=size).images.float().mean() for size in (32, 96))
    assert float(small) == pytest.approx(float(large), rel=0.15)


def test_the_default_hospitals_differ_in_machine_size_and_balance(default: Collection) -> None:
    assert len({h.vendor for h in HOSPITALS}) == len(HOSPITALS) == 5
    sizes, shares = [h.patients for h in HOSPITALS], [h.malignant for h in HOSPITALS]
    assert max(sizes) / min(sizes) >= 4
    assert max(shares) >= 3 * min(shares)
    assert set(default.sites or ()) == {h.name for h in HOSPITALS}


def test_normalised_default_images_are_centred(default: Collection) -> None:
    images, _ = default.to_images().batch(torch.arange(len(default)))
    assert (default.mean, default.std) == (MEAN, STD)
    assert abs(float(images.mean())) < 0.05
    assert float(images.std()) == pytest.approx(1, abs=0.05)


def test_machines_differ_more_than_patients_do() -> None:
    """Histograms of the same tissue by two machines, against histograms of two groups of patients by one."""
    same = {name: histogram(drawn(hospital(name, patients=12), seed=1, size=48).images) for name in VENDORS}
    others = {name: histogram(drawn(hospital(name, patients=12), seed=2, size=48).images) for name in VENDORS}
    patients = max(float((same[name] - others[name]).abs().sum()) for name in VENDORS)
    for one, other in combinations(VENDORS, 2):
        assert float((same[one] - same[other]).abs().sum()) > 1.5 * patients, (one, other)


def test_a_plain_machine_only_rounds() -> None:
    tissue = torch.rand(2, 32, 32, generator=torch.Generator().manual_seed(0))
    shown = acquire_images(tissue, Vendor(noise=0.0), torch.Generator())[:, 0].float() / 255
    assert float((shown - tissue).abs().max()) <= 0.5 / 255 + 1e-5


def test_curves_keep_black_white_and_order() -> None:
    ramp = torch.linspace(0, 1, 64).reshape(1, 1, 64).expand(1, 64, 64)
    for vendor in (Vendor(gamma=0.5), Vendor(gamma=2), Vendor(slope=6), Vendor(slope=-4)):
        row = acquire_images(ramp, Vendor(gamma=vendor.gamma, slope=vendor.slope, noise=0), torch.Generator())[
            0, 0, 32
        ].int()
        assert (int(row[0]), int(row[-1])) == (0, 255)
        assert bool((row.diff() >= 0).all())
    up = acquire_images(ramp, Vendor(noise=0), torch.Generator()).int()
    down = acquire_images(ramp, Vendor(noise=0, inverted=True), torch.Generator()).int()
    assert int((up + down - 255).abs().max()) <= 1


@pytest.mark.parametrize(("vendor", "change"), [(Vendor(noise=0, blur=0.03), -1), (Vendor(noise=0, sharpen=1), 1)])
def test_blur_takes_detail_and_sharpening_adds_it(vendor: Vendor, change: int) -> None:
    tissue = 0.5 + 0.1 * spectral_noise(4, 64, 2.0, torch.Generator().manual_seed(0))
    detail = [
        acquire_images(tissue, v, torch.Generator()).float().diff(dim=-1).abs().mean()
        for v in (vendor, Vendor(noise=0))
    ]
    assert change * (detail[0] - detail[1]) > 0


def test_noise_has_the_asked_strength_and_correlation() -> None:
    grey = torch.full((20, 64, 64), 0.5)
    for grain, correlated in ((0.0, False), (0.03, True)):
        image = acquire_images(grey, Vendor(noise=0.1, grain=grain), torch.Generator().manual_seed(0)).float() / 255
        assert float(image.std()) == pytest.approx(0.1, rel=0.05)
        neighbours = torch.corrcoef(torch.stack([image[..., 1:].flatten(), image[..., :-1].flatten()]))[0, 1]
        assert bool(neighbours > 0.5) == correlated


def test_texture_has_the_power_law_it_is_asked_for() -> None:
    noise = spectral_noise(40, 64, 3.0, torch.Generator().manual_seed(0))
    power = torch.fft.rfft2(noise).abs().square().mean(0)[0]
    measured = torch.log(power[4] / power[16]) / torch.log(torch.tensor(16 / 4))
    assert float(measured) == pytest.approx(3.0, abs=0.3)


def test_malignant_lesions_have_rays_outside_their_mass_and_benign_ones_do_not() -> None:
    empty, benign, malignant = (
        draw_anatomy(cases(40, degree, lesion), 64, torch.Generator().manual_seed(0))
        for degree, lesion in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    )
    assert bool(((benign - empty) > 0.05).flatten(1).any(1).all()), "every lesion shows"
    spread = [((image - empty) > 0.03).flatten(1).sum(1).float().mean() for image in (benign, malignant)]
    assert spread[1] > 1.5 * spread[0]


def test_the_breast_stands_before_a_dark_background_on_its_side() -> None:
    left = draw_anatomy(cases(4, 0.5), 64, torch.Generator().manual_seed(0))
    assert float(left[:, :, -8:].mean()) < 0.05 < float(left[:, 16:-16, :8].mean())


def test_six_hundred_images_take_less_than_three_seconds() -> None:
    start = time.process_time()
    data = drawn(hospital(patients=200), views=(3, 3), size=64)
    assert len(data) == 600
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 31}, "'size' of PhantomOptions should be greater than or equal to 32"),
        ({"task": "staging"}, "'task' of PhantomOptions should be 'diagnosis' or 'screening'"),
        ({"views": [3, 2]}, r"views \(3, 2\) are not a range"),
        ({"views": [0, 2]}, r"views \(0, 2\) are not a range"),
        ({"hospitals": []}, "hospitals"),
        ({"hospitals": [hospital(), hospital()]}, "Two hospitals have the same name"),
        (
            {"hospitals": [{"name": "a", "vendor": "x-ray", "patients": 3, "malignant": 0.5}]},
            "'vendor' of PhantomSite should be 'selenium', 'silicon'",
        ),
        (
            {"hospitals": [{"name": "a", "vendor": "film", "patients": 0, "malignant": 0.5}]},
            "'patients' of PhantomSite",
        ),
        (
            {"hospitals": [{"name": "a", "vendor": "film", "patients": 3, "malignant": 1.5}]},
            "'malignant' of PhantomSite",
        ),
        ({"lesions": 3}, "PhantomOptions has no option 'lesions'; it has: size, task, views, hospitals"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        PhantomOptions.model_validate(options)
