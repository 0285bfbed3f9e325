"""Random streams: every random number of a run comes from one seed and a path of names."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stream:
    """A random stream: a seed and a path of names. Equal seeds and paths give equal numbers on every machine.

    All random numbers of a run come from such streams. Take a `child` for every purpose, for instance
    `rng.child("bank", round)`, so that a further draw elsewhere does not change the numbers.
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def child(self, *names: str | int) -> "Stream":
        """Return the stream with `names` appended to the path."""
        return Stream(self.seed, self.path + names)

    def integer(self) -> int:
        """Return a number from 0 to 2⁶³ − 1, always the same one, as a seed of what need not be secret."""
        return int(hashlib.sha256(json.dumps([self.seed, *self.path]).encode()).hexdigest()[:16], 16) >> 1

    def key(self) -> bytes:
        """Return a key of 32 bytes for a cipher: a hash of its own, of which `integer` reveals nothing."""
        return hashlib.sha256(b"key" + json.dumps([self.seed, *self.path]).encode()).digest()

    def generator(self) -> torch.Generator:
        """Return a new torch generator on the CPU, always in the same state."""
        return torch.Generator().manual_seed(self.integer())


_GLOBAL_GENERATORS = threading.RLock()


@contextmanager
def seed_generators(stream: Stream, device: torch.device) -> Iterator[None]:
    """Seed torch's generators (stochastic depth and other layers draw from them), and restore them afterwards.

    All threads share these generators, so one thread at a time has them.
    """
    cuda = device.type == "cuda"
    with _GLOBAL_GENERATORS, torch.random.fork_rng([device] if cuda else []):
        # torch.manual_seed would also reseed accelerators that were not forked.
        torch.default_generator.manual_seed(stream.integer())
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(stream.integer())
        yield
