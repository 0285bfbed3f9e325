"""Images that lie elsewhere than the network: the same batches in the same order, from a thread that does not stay."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from polyclinic.core.jobs import Fitted, Score, Step
from polyclinic.core.network import Network
from polyclinic.core.options import Augment, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, Examples
from polyclinic.data.examples import Images, PerChannel, Selection, SiteData
from polyclinic.runs.sites import FederatedDataset
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities, task_loss
from polyclinic.training.network import LiveNetwork
from polyclinic.training.prefetch import QUEUED_BATCHES, prefetch_batches, prefetch_in_thread
from tests.laws.bench import noise, same, small
from tests.training.jobs import at_round, job

CPU = torch.device("cpu")
STREAM = Stream(0, ("site", "here"))
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before, "fewer where another test's thread has ended meanwhile"


def pictures(count: int, dtype: torch.dtype, mean: PerChannel = 0.0, std: PerChannel = 1.0) -> Images:
    generator = Stream(3, ("pictures",)).generator()
    images = torch.randint(256, (count, 3, 4, 4), generator=generator).to(dtype)
    return Images(images, torch.randint(5, (count,), generator=generator), None, mean, std)


@dataclass(frozen=True)
class Plain:
    """Examples that have nothing but what every kind of examples has."""

    inner: Images

    @property
    def labels(self) -> Tensor:
        return self.inner.labels

    patients = None

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, index: Tensor) -> Batch:
        return self.inner.batch(index)


def kinds(images: Images) -> tuple[Examples, ...]:
    return images, Selection.from_rows(images, torch.arange(len(images)).flip(0)), Plain(images)


SCALES = [(0.0, 1.0), (0.3, 0.5), ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))]


@DEVICES
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("mean", "std"), SCALES)
def test_batches_and_their_order_are_those_of_the_data(
    device: str, dtype: torch.dtype, mean: PerChannel, std: PerChannel
) -> None:
    turns = [torch.tensor(rows, dtype=torch.int64) for rows in ([4, 1], [0], [], [9, 9, 3], [2, 5, 6, 7], [1], [8])]
    for data in kinds(pictures(10, dtype, mean, std)):
        with prefetch_batches(data, turns, torch.device(device), ahead=True) as fed:
            found = list(fed)
        assert len(found) == len(turns)
        for (images, labels), index in zip(found, turns, strict=True):
            expected, called = data.batch(index)
            assert images.device.type == labels.device.type == device
            torch.testing.assert_close(
                images.cpu(), expected, rtol=0 if device == "cpu" else 1e-6, atol=0 if device == "cpu" else 1e-7
            )
            assert torch.equal(labels.cpu(), called)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), max_size=12), read=st.integers(0, 12))
def test_whoever_leaves_early_leaves_no_thread_behind(sizes: list[int], read: int) -> None:
    before, data = threading.active_count(), noise(5)
    with prefetch_batches(data, [torch.arange(size) for size in sizes], CPU, ahead=True) as fed:
        seen = [len(labels) for (_, labels), _ in zip(fed, range(read), strict=False)]
    assert seen == sizes[:read]
    assert threading.active_count() == before


def test_an_error_of_whoever_uses_the_batches_ends_the_thread_too() -> None:
    before = threading.active_count()

    def use() -> None:
        with prefetch_batches(noise(5), [torch.arange(5)] * 9, CPU, ahead=True) as fed:
            next(fed)
            assert threading.active_count() > before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert threading.active_count() == before


def test_where_the_images_are_at_hand_there_is_no_thread() -> None:
    before = threading.active_count()
    with prefetch_batches(noise(5), [torch.arange(5)], CPU) as fed:
        next(fed)
        assert threading.active_count() == before


def test_an_error_in_the_thread_surfaces_at_its_batch() -> None:
    def make(turn: int) -> Batch:
        return torch.full((1,), 12 / (turn - 3)), torch.tensor([turn])

    with prefetch_in_thread(make, range(6), CPU) as fed:
        assert [int(next(fed)[1]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            next(fed)


def test_the_next_batch_is_made_while_this_one_is_used() -> None:
    begun = [threading.Event() for _ in range(4)]
    makers = set()

    def make(turn: int) -> Batch:
        begun[turn].set()
        makers.add(threading.current_thread())
        return torch.zeros(1), torch.tensor([turn])

    with prefetch_in_thread(make, range(4), CPU) as fed:
        for turn, _ in enumerate(fed):
            assert turn == 3 or begun[turn + 1].wait(10), "nobody fetched the next batch"
    assert len(makers) == 1
    assert threading.current_thread() not in makers


def test_only_a_few_batches_wait() -> None:
    """Or images that do not fit on the device would fill it all the same."""
    made = []

    def make(turn: int) -> Batch:
        made.append(turn)
        return torch.zeros(1), torch.tensor([turn])

    with prefetch_in_thread(make, range(50), CPU) as fed:
        for used, _ in enumerate(fed, 1):
            assert len(made) <= used + QUEUED_BATCHES


# Where a consortium's images lie.


def consortium() -> FederatedDataset:
    """Two sites that share ten pictures of 48 bytes."""
    shared = pictures(10, torch.uint8)
    parts = [
        [Selection.from_rows(shared, torch.arange(at, at + 2)) for at in begin] for begin in ((0, 2, 4), (4, 6, 8))
    ]
    return FederatedDataset(("a", "b"), {n: SiteData(n, *p) for n, p in zip("xy", parts, strict=True)}, None, 3, 4)


@pytest.mark.parametrize(("room", "device"), [(480, "meta"), (479, "cpu"), (None, "meta")])
def test_images_go_to_the_device_if_there_is_room_for_all_of_them(room: int | None, device: str) -> None:
    """PyTorch's `meta` device stands for one that is not the CPU; shared images count once."""
    hospitals = consortium()
    moved = hospitals.on_device(torch.device("meta"), room)
    assert {p.labels.device.type for s in moved.values() for p in (s.train, s.validation, s.test)} == {device}
    shared = {id(p.shared) for s in moved.values() for p in (s.train, s.validation, s.test) if isinstance(p, Selection)}
    assert len(shared) == 1
    assert hospitals.on_device(CPU) == hospitals.sites


def test_pictures_of_each_site_count_each() -> None:
    sites = {n: SiteData(n, *[pictures(2, torch.uint8)] * 3) for n in "xy"}
    for room, device in ((2 * 96, "meta"), (2 * 96 - 1, "cpu")):
        moved = FederatedDataset(("a", "b"), sites, None, 3, 4).on_device(torch.device("meta"), room)
        assert {site.train.labels.device.type for site in moved.values()} == {device}


# On a GPU: fed or at hand, the same training, and the host never waits for the device.


def on_gpu(data: Examples, training: Training, steps: tuple[Step, ...] = (Step(task_loss),)) -> Fitted:
    network = LiveNetwork(small().module, torch.device("cuda"))
    return fit(job(network, training, steps=steps), network, data, at_round(1), STREAM)


AUGMENT = Augment(rotation=10, flip=True, brightness=0.2, contrast=0.2, crop=0.1, blur=1.0)


@NEEDS_CUDA
@pytest.mark.parametrize("training", [Training(batch=4, epochs=3), Training(batch=4, augment=AUGMENT)])
def test_training_on_fed_images_is_training_on_images_at_hand(training: Training) -> None:
    data = Selection.from_rows(noise(40), torch.arange(30))
    near = data.with_images(data.shared.to("cuda"))
    for steps in ((Step(task_loss),), (Step(task_loss, ("extractor.",)), Step(task_loss, ("head.",)))):
        assert same(on_gpu(data, training, steps).weights, on_gpu(near, training, steps).weights)
    network = LiveNetwork(small().module, torch.device("cuda"))
    ask = Score(job(network, training).weights, predict_probabilities)
    assert same({"": score(ask, network, data, 7)}, {"": score(ask, network, near, 7)})


class Alarm:
    """Between the first and the last step of a job any wait of the host for the device is an error."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seen = steps, 0

    def __call__(self, network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
        self.seen += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error" if 1 < self.seen < self.steps else "default")
        return task_loss(network, weights, batch, reference)


@NEEDS_CUDA
@pytest.mark.parametrize("near", [True, False], ids=["at hand", "fed"])
@pytest.mark.parametrize("scale", SCALES)
def test_inside_a_job_the_host_never_waits_for_the_device(near: bool, scale: tuple[PerChannel, PerChannel]) -> None:
    mean, std = (value if isinstance(value, float) else value[:1] for value in scale)
    pixels = pictures(30, torch.uint8)
    images = Images(pixels.images[:, :1], pixels.labels % 3, None, mean, std)
    data = Selection.from_rows(images.to("cuda") if near else images, torch.arange(30))
    alarm = Alarm(steps=24)
    try:
        on_gpu(data, Training(batch=4, epochs=3), (Step(alarm),))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert alarm.seen == 24
