"""Engines on this machine: sites run one after another in this process, or in parallel in worker processes.

Workers are forked, so they share the images; bytes travel over pipes, nothing is pickled. Any worker may serve any
site, since the memory of sites is on disk.
"""

import contextlib
import ctypes
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from polyclinic.core import Failure, PolyclinicError, Refused, SiteId, StoreError
from polyclinic.federation.engines import Answer
from polyclinic.federation.mailbox import Outbox
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.storage.messages import Message, decode

T = TypeVar("T")


def call_or_failure(call: Callable[[], T]) -> T | Failure:
    """Return the result of `call`, or the failure of the site that it runs.

    Only our own errors are failures of a site; bugs surface. A `StoreError` ends the run: the memory of all sites is in
    the run's folder, so none of them could go on.
    """
    try:
        return call()
    except StoreError:
        raise
    except Refused as refusal:
        return Failure("refused", str(refusal))
    except PolyclinicError as error:
        return Failure("error", str(error))


def message_for(sent: Mapping[SiteId, bytes], site: SiteId) -> Message:
    """Return a site's order; the round loop's own messages need no decoding."""
    return sent.in_process_message(site) if isinstance(sent, Outbox) else decode(sent[site])


def keep_freed_memory() -> None:
    """Have glibc keep freed activations for the next step instead of handing them back to the kernel.

    Otherwise every training step pays thousands of page faults for memory it had a moment ago. Elsewhere: no effect.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    with contextlib.suppress(OSError, AttributeError):
        for option, size in ((mmap_threshold, 32 << 20), (trim_threshold, 512 << 20), (top_pad, 64 << 20)):
            ctypes.CDLL(None).mallopt(option, size)


class LocalEngine:
    """Runs sites in this process. `threads` for PyTorch: with 1, results do not depend on the number of cores."""

    def __init__(self, runners: Mapping[SiteId, SiteRunner], threads: int = 1) -> None:
        self.runners = runners
        torch.set_num_threads(threads)
        keep_freed_memory()

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        for site in sent:
            yield site, call_or_failure(partial(self._ask_site, sent, site))

    def _ask_site(self, sent: Mapping[SiteId, bytes], site: SiteId) -> Message:
        return self.runners[site].reply(message_for(sent, site))

    def close(self) -> None:
        """Nothing to release."""


class WorkerEngine:
    """Runs sites in `workers` forked processes; a free worker takes the next site."""

    def __init__(self, runners: Mapping[SiteId, SiteRunner], workers: int, threads: int = 1) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)  # forking while other threads compute would hang the child
        torch.optim.SGD([torch.zeros(1)])  # the first optimiser loads a compiler: here once, not in every worker
        self.runners = runners
        context = get_context("fork")
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            process = context.Process(target=self._serve_pipe, args=(theirs, threads), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)

    def _serve_pipe(self, pipe: Connection, threads: int) -> None:
        """Serve one worker: read a site's name and a message, write a reply or a failure, until the pipe closes."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for ours in self.pipes:
            ours.close()  # or this worker would keep its own pipe open and never see that the parent is gone
        torch.set_num_threads(threads)
        while True:
            try:
                site, data = pipe.recv_bytes().decode(), pipe.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            kind, payload = answer_or_failure(self.runners[site], data)
            try:
                pipe.send_bytes(kind.encode())
                pipe.send_bytes(payload)
            except OSError:
                os._exit(0)

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        waiting = deque(sent)
        busy: dict[Connection, SiteId] = {}
        idle = [pipe for pipe, process in zip(self.pipes, self.processes, strict=True) if process.is_alive()]
        while waiting or busy:
            while waiting and idle:
                site, pipe = waiting[0], idle.pop()
                with contextlib.suppress(OSError):  # it died while idle: another worker takes the site
                    pipe.send_bytes(site.encode())
                    pipe.send_bytes(sent[site])
                    busy[pipe] = waiting.popleft()
            if not busy:
                yield from ((site, Failure("dead", "no worker process is left")) for site in waiting)
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                site = busy.pop(ready)
                answer = _receive_reply(ready)
                if not (isinstance(answer, Failure) and answer.kind == "dead"):
                    idle.append(ready)
                yield site, answer

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5)


def answer_or_failure(runner: SiteRunner, data: bytes) -> tuple[str, bytes]:
    """Return the kind of result ("reply", a kind of failure, "store" or "bug"), and the reply or a sentence."""
    try:
        answer = call_or_failure(partial(runner.answer, data))
    except StoreError as error:
        return "store", str(error).encode()
    except Exception:
        return "bug", traceback.format_exc().encode()
    return (answer.kind, answer.sentence.encode()) if isinstance(answer, Failure) else ("reply", answer)


def parse_worker_reply(kind: str, payload: bytes, place: str) -> bytes | Failure:
    """Return what `answer_or_failure` returned in another process; raises what would have ended the run there."""
    if kind == "reply":
        return payload
    words = payload.decode()
    if kind == "store":
        raise StoreError(words)
    if kind == "bug":
        raise RuntimeError(f"in {place}:\n{words}")
    return Failure("refused" if kind == "refused" else "error", words)


def _receive_reply(pipe: Connection) -> bytes | Failure:
    try:
        kind, payload = pipe.recv_bytes(), pipe.recv_bytes()
    except (EOFError, OSError):
        return Failure("dead", "the worker process ended; was it out of memory?")
    return parse_worker_reply(kind.decode(), payload, "a worker process")
