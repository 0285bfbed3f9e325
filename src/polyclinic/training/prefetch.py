"""Batches where the network is. Images that do not fit on its device are fetched by a thread, a little ahead of use.

They travel as they are stored, from pinned memory, on a stream of their own, and are scaled when they have arrived; so
the device neither waits for them nor holds more than a few batches. What already lies there is only picked out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from polyclinic.core.contract import Batch, Examples
from polyclinic.data.examples import Images, Selection

AHEAD = 2
"""One batch that is ready, and one in the making."""
T = TypeVar("T")


class Arriving(NamedTuple):
    """A batch on its way: to be used on a stream that has waited for `arrived` (None where copies are at once)."""

    batch: Batch
    arrived: torch.cuda.Event | None


@contextmanager
def feed(
    data: Examples, turns: Iterable[Tensor], device: torch.device, ahead: bool | None = None
) -> Iterator[Iterator[Batch]]:
    """`data.batch(index)` for each index in turn, on `device`; fetched `ahead` if (None) they lie elsewhere."""
    if not (data.labels.device.type != device.type if ahead is None else ahead):
        yield map(data.batch, turns)
    elif isinstance(data, Images | Selection):
        pinned = device.type == "cuda"
        with fetched(lambda index: data.stored(index, pinned), turns, device) as batches:
            yield ((data.scaled(images), labels) for images, labels in batches)
    else:
        with fetched(data.batch, turns, device) as batches:
            yield batches


@contextmanager
def fetched(make: Callable[[T], Batch], turns: Iterable[T], device: torch.device) -> Iterator[Iterator[Batch]]:
    """`make(turn)` for each turn, on `device`: made and sent by a thread that ends with the context.

    What goes wrong in the thread is raised where its batch would have been handed out.
    """
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    thread = ThreadPoolExecutor(1, "polyclinic-feed")
    waiting = iter(turns)

    def next_ones(count: int) -> Iterable[Future[Arriving]]:
        return [thread.submit(_send, make, turn, device, side) for turn in islice(waiting, count)]

    def batches() -> Iterator[Batch]:
        coming = deque(next_ones(AHEAD))
        while coming:
            arriving = coming.popleft().result()
            coming.extend(next_ones(1))
            yield _arrived(arriving, device)

    try:
        yield batches()
    finally:
        thread.shutdown(cancel_futures=True)


def _send(make: Callable[[T], Batch], turn: T, device: torch.device, side: torch.cuda.Stream | None) -> Arriving:
    if side is None:
        images, labels = make(turn)
        return Arriving((images.to(device), labels.to(device)), None)
    with torch.cuda.stream(side):
        images, labels = make(turn)
        sent = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        return Arriving(sent, side.record_event())


def _arrived(arriving: Arriving, device: torch.device) -> Batch:
    if arriving.arrived is not None:
        here = torch.cuda.current_stream(device)
        here.wait_event(arriving.arrived)
        for tensor in arriving.batch:
            tensor.record_stream(here)  # or its memory would be given to a later batch while this one is in use
    return arriving.batch


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` for which the host does not wait; the tensor itself if it is there."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
