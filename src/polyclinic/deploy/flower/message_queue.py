"""Messages that wait until their site asks for them, and replies as they arrive.

The round loop puts messages in and takes replies out, the web server does the opposite, in another thread. A message
is held once: parts that are the same for several sites are shared. A reply beyond a megabyte lies in a temporary file
until the round loop takes it.
"""

import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile

from polyclinic.core import SiteId

MEMORY_BYTES = 1 << 20
"""A reply that is larger is kept in a file until it is read."""
MIN_REPLY_BYTES, REPLY_FACTOR = 256 << 20, 16
"""A reply may have MIN_REPLY_BYTES plus REPLY_FACTOR times the bytes of the message it answers."""


@dataclass(eq=False)
class QueuedMessage:
    """A message to a site. Its name is random: whoever knows it and has the site's key may answer."""

    name: str
    site: SiteId
    parts: tuple[bytes, ...]
    """Nothing, once the site has been sent them."""
    collected: bool = False
    """Whether the site has asked for it."""
    answering: bool = False
    """Whether a reply is arriving or has arrived."""

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.parts))


class ReplyUpload:
    """A reply while it arrives.

    Args:
        message: The message that it answers.
    """

    def __init__(self, message: QueuedMessage) -> None:
        self.message, self.size = message, 0
        self.most_bytes = MIN_REPLY_BYTES + REPLY_FACTOR * message.size
        self._file: SpooledTemporaryFile[bytes] = SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115  closed by read and close

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def flush(self) -> None:
        self._file.flush()

    def read(self) -> bytes:
        """Return the whole reply, and delete the file."""
        with self._file as file:
            file.seek(0)
            return file.read()

    def close(self) -> None:
        """Delete what has arrived."""
        self._file.close()


class MessageQueue:
    """The messages of all sites. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.announce: Callable[[SiteId], None] = lambda _: None
        """Called with the site of every new message."""
        self.messages: dict[str, QueuedMessage] = {}
        """All messages that have not been withdrawn, by name, the oldest first."""
        self._replies: queue.SimpleQueue[ReplyUpload] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def put(self, site: SiteId, parts: tuple[bytes, ...]) -> str:
        """Hold a message for a site, and return its name."""
        message = QueuedMessage(secrets.token_hex(16), site, parts)
        with self._lock:
            self.messages[message.name] = message
        self.announce(site)
        return message.name

    def collect(self, site: SiteId) -> QueuedMessage | None:
        """Return the site's oldest message that it has not been given yet; None if there is none."""
        with self._lock:
            for message in self.messages.values():
                if message.site == site and not message.collected:
                    message.collected = True
                    return message
        return None

    def begin_reply(self, name: str, site: SiteId) -> ReplyUpload | None:
        """Begin to take the site's reply to a message; None if nobody waits for one, or one is arriving already."""
        with self._lock:
            message = self.messages.get(name)
            if message is None or message.site != site or not message.collected or message.answering:
                return None
            message.answering = True
        return ReplyUpload(message)

    def finish_reply(self, upload: ReplyUpload) -> None:
        """A reply has arrived completely. If nobody waits for it any more, it is deleted."""
        with self._lock:
            expected = upload.message.name in self.messages
        if expected:
            self._replies.put(upload)
        else:
            upload.close()

    def drop_reply(self, upload: ReplyUpload) -> None:
        """A reply was cut off; the site may send it again."""
        upload.close()
        with self._lock:
            upload.message.answering = False

    def wait_for_reply(self, seconds: float) -> tuple[str, bytes] | None:
        """Return the name of a message and its reply, waiting for one; None if none has come after so many seconds."""
        try:
            upload = self._replies.get(timeout=seconds)
        except queue.Empty:
            return None
        return upload.message.name, upload.read()

    def withdraw(self, name: str) -> None:
        """Forget a message; a reply to it is refused from now on."""
        with self._lock:
            self.messages.pop(name, None)
