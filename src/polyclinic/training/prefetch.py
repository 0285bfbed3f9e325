"""Batches on the network's device. Images that are stored elsewhere are copied by a thread, a little ahead of use.

They are transferred as they are stored, from pinned memory, on a CUDA stream of their own, and scaled on arrival. So
the device neither waits for them nor holds more than a few batches. Images that are already there are only indexed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from polyclinic.core import Batch, Examples
from polyclinic.data.examples import Images, Selection

QUEUED_BATCHES = 2
"""One batch that is ready, and one that is being loaded."""
T = TypeVar("T")


class BatchTransfer(NamedTuple):
    """A batch that is being copied. It is ready once a stream has waited for `arrived` (None: it is ready now)."""

    batch: Batch
    arrived: torch.cuda.Event | None


@contextmanager
def prefetch_batches(
    data: Examples, indices: Iterable[Tensor], device: torch.device, ahead: bool | None = None
) -> Iterator[Iterator[Batch]]:
    """Open an iterator over `data.batch(index)` for each of `indices`, on `device`.

    `ahead` says whether a thread loads batches in advance; None means if they are stored on another device.
    """
    if not (data.labels.device.type != device.type if ahead is None else ahead):
        yield map(data.batch, indices)
    elif isinstance(data, Images | Selection):
        with prefetch_in_thread(
            lambda index: data.stored_batch(index, device.type == "cuda"), indices, device
        ) as batches:
            yield ((data.scale_images(images), labels) for images, labels in batches)
    else:
        with prefetch_in_thread(data.batch, indices, device) as batches:
            yield batches


@contextmanager
def prefetch_in_thread(
    load: Callable[[T], Batch], requests: Iterable[T], device: torch.device
) -> Iterator[Iterator[Batch]]:
    """Open an iterator over `load(request)` for each of `requests`, on `device`; a thread loads and copies them.

    The thread ends with the context. An error in the thread is raised where its batch would have been returned.
    """
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    thread = ThreadPoolExecutor(1, "polyclinic-feed")
    waiting = iter(requests)

    def submit(count: int) -> Iterable[Future[BatchTransfer]]:
        return [thread.submit(_start_transfer, load, request, device, side) for request in islice(waiting, count)]

    def iterate_batches() -> Iterator[Batch]:
        queue = deque(submit(QUEUED_BATCHES))
        while queue:
            transfer = queue.popleft().result()
            queue.extend(submit(1))
            yield _await_transfer(transfer, device)

    try:
        yield iterate_batches()
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
        stream = torch.cuda.current_stream(device)
        stream.wait_event(transfer.arrived)
        for tensor in transfer.batch:
            tensor.record_stream(stream)  # or its memory would be given to a later batch while this one is in use
    return transfer.batch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device` without making the host wait; the same tensor if it is already there."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
