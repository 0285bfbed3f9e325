"""The interface of update transforms, which clip, noise or quantise an update on its way to the server."""

from typing import Protocol

from polyclinic.core import Bundle, Stream


class UpdateTransform(Protocol):
    """A transform of updates at the site (clip, noise, quantise) and, in reverse order, at the server."""

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        """Return what leaves the site instead of `tensors`. Names, shapes and dtypes must not depend on values."""
        ...

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        """Return, at the server and before values are checked, what the algorithm gets."""
        ...
