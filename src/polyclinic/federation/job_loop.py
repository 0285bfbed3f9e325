"""The loop over the jobs of a generator (`Algorithm.local`, `Algorithm.server_step`)."""

from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")


class JobLoop(Generic[J, R]):
    """Iterates over the jobs of a generator: set `result` to the result of each job before the next one is taken."""

    returned: R
    """What the generator returned, once the loop has ended."""

    def __init__(self, work: Generator[J, Any, R]) -> None:
        self.work = work
        self.result: Any = None

    def __iter__(self) -> Iterator[J]:
        try:
            while True:
                yield self.work.send(self.result)
        except StopIteration as end:
            self.returned = end.value
