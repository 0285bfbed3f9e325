"""Near duplicates stay together, whatever patients a set names."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from polyclinic.core.rng import Stream
from polyclinic.data.patients import UNNAMED, is_named
from polyclinic.data.quality.near_duplicates import merge_patients


def pictures(count: int) -> torch.Tensor:
    """Different pictures: random blobs of 64 × 64."""
    noise = torch.rand(count, 1, 9, 9, generator=Stream(3).generator())
    return (F.interpolate(noise, (64, 64), mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


def brighter(images: torch.Tensor) -> torch.Tensor:
    return (images.float() * 0.9 + 12).round().to(torch.uint8)


def test_different_pictures_keep_their_patients() -> None:
    names = [f"p{n}" for n in range(60)]
    assert merge_patients(names, pictures(60)) == tuple(names)


def test_copies_make_one_patient_of_two_and_chains_make_one_of_three() -> None:
    images = pictures(60)
    images[10] = brighter(images[3])
    images[20] = brighter(images[11])
    names = [f"p{n:02d}" for n in range(60)]
    names[11] = names[10]
    joined = merge_patients(names, images)
    assert joined[3] == joined[10] == joined[11] == joined[20]
    others = [n for n in range(60) if n not in (3, 10, 11, 20)]
    assert [joined[n] for n in others] == [names[n] for n in others]


def test_a_copy_that_names_no_patient_leaves_the_patient_of_both_unknown() -> None:
    images = pictures(60)
    images[10], images[20] = brighter(images[3]), brighter(images[40])
    names = [f"p{n:02d}" for n in range(60)]
    names[10], names[20], names[40] = (f"{UNNAMED}{n}" for n in (10, 20, 40))
    joined = merge_patients(names, images)
    assert joined[3] == joined[10] != joined[20] == joined[40]
    assert [n for n in range(60) if not is_named(joined[n])] == [3, 10, 20, 40]


def test_the_order_of_images_does_not_matter() -> None:
    images = pictures(40)
    images[30] = brighter(images[5])
    names = [f"p{n:02d}" for n in range(40)]
    order = torch.randperm(40, generator=Stream(1).generator())
    shuffled = merge_patients([names[n] for n in order.tolist()], images[order])
    plain = merge_patients(names, images)
    assert shuffled == tuple(plain[n] for n in order.tolist())
