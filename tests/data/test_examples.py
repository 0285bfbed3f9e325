from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from polyclinic.data.examples import Collection, Images, Selection, concatenate


class Calls(TorchFunctionMode):
    """Notes the name of every function called on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def floats() -> Images:
    images = torch.rand(6, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    return Images(images, torch.tensor([0, 1, 2, 0, 1, 2]), tuple("aabbcc"))


def test_a_float_batch_is_two_selections_and_nothing_else(floats: Images) -> None:
    index = torch.tensor([4, 0, 4])
    with Calls() as calls:
        images, labels = floats.batch(index)
    assert calls.names.count("index_select") == 2
    assert set(calls.names) <= {"index_select", "__get__", "to"}, "besides asking for dtype and device"
    assert torch.equal(images, floats.images[index])
    assert labels.tolist() == [1, 0, 1]


def test_bytes_are_scaled_to_one() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
    batch, _ = Images(images, torch.zeros(3, dtype=torch.long)).batch(torch.arange(3))
    assert batch.dtype == torch.float32
    assert batch.flatten().tolist() == pytest.approx([0, 0.2, 1])


@pytest.mark.parametrize(("mean", "std"), [(0.5, 0.5), ((0.5, 0.25), (0.5, 2.0)), (0.0, 2.0), (0.5, 1.0)])
def test_batches_are_normalised_per_channel(mean: Any, std: Any) -> None:
    images = torch.full((1, 2, 2, 2), 255, dtype=torch.uint8)
    batch, _ = Images(images, torch.zeros(1, dtype=torch.long), mean=mean, std=std).batch(torch.tensor([0]))
    means, stds = (value if isinstance(value, tuple) else (value, value) for value in (mean, std))
    for channel in range(2):
        assert batch[0, channel].flatten().tolist() == pytest.approx([(1 - means[channel]) / stds[channel]] * 4)


def test_reading_a_batch_leaves_the_images_alone() -> None:
    images = torch.randint(0, 256, (4, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    Images(images, torch.zeros(4, dtype=torch.long), mean=0.5, std=0.5).batch(torch.arange(4))
    assert torch.equal(images, before)


def test_subsets_put_together_are_the_whole(floats: Images) -> None:
    parts = [floats.subset(torch.tensor(rows)) for rows in ([0, 1], [2], [3, 4, 5])]
    whole = concatenate(parts)
    assert isinstance(whole, Images)
    assert torch.equal(whole.images, floats.images)
    assert torch.equal(whole.labels, floats.labels)
    assert whole.patients == floats.patients


def test_patients_are_dropped_where_a_part_does_not_know_them(floats: Images) -> None:
    assert concatenate([floats, Images(floats.images, floats.labels)]).patients is None


def test_moving_keeps_everything(floats: Images) -> None:
    moved = floats.to("cpu")
    assert torch.equal(moved.images, floats.images)
    assert moved.patients == floats.patients


def test_a_selection_reads_as_the_subset_does_without_a_copy(floats: Images) -> None:
    rows = torch.tensor([5, 2, 3])
    selection, subset = Selection.from_rows(floats, rows), floats.subset(rows)
    assert len(selection) == len(subset) == 3
    assert selection.patients == subset.patients
    assert torch.equal(selection.labels, subset.labels)
    for mine, theirs in zip(selection.batch(torch.tensor([2, 0])), subset.batch(torch.tensor([2, 0])), strict=True):
        assert torch.equal(mine, theirs)
    assert selection.shared.images.data_ptr() == floats.images.data_ptr()


def test_selections_put_together_hold_every_image_once(floats: Images) -> None:
    both = concatenate(
        [Selection.from_rows(floats, torch.tensor([0, 2, 5])), Selection.from_rows(floats, torch.tensor([2, 4]))]
    )
    assert torch.equal(both.batch(torch.arange(4))[0], floats.images[[0, 2, 4, 5]])
    assert both.patients == ("a", "b", "c", "c")


def test_a_collection_hands_its_normalisation_to_all_its_images(floats: Images) -> None:
    collection = Collection(floats.images, floats.labels, ("x", "y", "z"), tuple("aabbcc"), held_out=floats)
    normalised = collection.with_normalisation(0.5, 0.25)
    expected = (floats.images - 0.5) / 0.25
    assert normalised.held_out is not None
    for examples in (normalised.to_images(), normalised.held_out):
        assert torch.allclose(examples.batch(torch.arange(6))[0], expected)
    assert collection.with_normalisation(0.5, 0.25).images is collection.images
