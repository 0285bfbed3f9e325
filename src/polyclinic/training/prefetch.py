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

QUEUED_BATCHES = 2
"""One batch that is ready, and one in the making."""
T = TypeVar("T")


class BatchTransfer(NamedTuple):
    """A batch on its way: to be used on a stream that has waited for `arrived` (None where copies are at once)."""

    batch: Batch
    arrived: torch.cuda.Event | None


@contextmanager
def prefetch_batches(
    data: Examples, indices: Iterable[Tensor], device: torch.device, ahead: bool | None = None
) -> Iterator[Iterator[Batch]]:
    """`data.batch(index)` for each index in turn, on `device`; fetched `ahead` if (None) they lie elsewhere."""
    if not (data.labels.device.type != device.type if ahead is None else ahead):
        yield map(data.batch, indices)
    elif isinstance(data, Images | Selection):
        pinned = device.type == "cuda"
        with prefetch_in_thread(lambda index: data.stored_batch(index, pinned), indices, device) as batches:
            yield ((data.scale_images(images), labels) for images, labels in batches)
    else:
        with prefetch_in_thread(data.batch, indices, device) as batches:
            yield batches


@contextmanager
def prefetch_in_thread(
    load: Callable[[T], Batch], requests: Iterable[T], device: torch.device
) -> Iterator[Iterator[Batch]]:
    """`make(turn)` for each turn, on `device`: made and sent by a thread that ends with the context.

    What goes wrong in the thread is raised where its batch would have been handed out.
    """
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    thread = ThreadPoolExecutor(1, "polyclinic-feed")
    waiting = iter(requests)

    def next_ones(count: int) -> Iterable[Future[BatchTransfer]]:
        return [thread.submit(_start_transfer, load, turn, device, side) for turn in islice(waiting, count)]

    def batches() -> Iterator[Batch]:
        coming = deque(next_ones(QUEUED_BATCHES))
        while coming:
            arriving = coming.popleft().result()
            coming.extend(next_ones(1))
            yield _await_transfer(arriving, device)

    try:
        yield batches()
    finally:
        thread.shutdown(cancel_futures=True)


def _start_transfer(
    load: Callable[[T], Batch], request: T, device: torch.device, side: torch.cuda.Stream | None
) -> BatchTransfer:
    if side is None:
        images, labels = load(request)
        return BatchTransfer((images.to(device), labels.to(device)), None)
    with torch.cuda.stream(side):
        images, labels = load(request)
        sent = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        return BatchTransfer(sent, side.record_event())


def _await_transfer(transfer: BatchTransfer, device: torch.device) -> Batch:
    if transfer.arrived is not None:
        here = torch.cuda.current_stream(device)
        here.wait_event(transfer.arrived)
        for tensor in transfer.batch:
            tensor.record_stream(here)  # or its memory would be given to a later batch while this one is in use
    return transfer.batch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` for which the host does not wait; the tensor itself if it is there."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
