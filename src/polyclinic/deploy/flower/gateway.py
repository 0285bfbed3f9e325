"""The server's only entrance: ASGI middleware that passes only the requests of registered sites to Flower's SuperLink.

Flower 1.41 serves three interfaces on one port and authenticates callers on one of them, the fleet interface for sites.
Through the others, anyone who reaches the port may register a key, start runs and read their results. Nor does Flower
check that a reply comes from the site it names, or limit the size of a request. This gateway closes these holes.
"""

import asyncio
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeAlias
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyclinic.core import SiteId, __version__

Refusal: TypeAlias = tuple[int, str, str]
"""The HTTP status, a note for the server's log, and a sentence for the caller."""

FLEET = "/v1/fleet/"
OPEN_PATHS = frozenset(
    FLEET + name
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "pull-object",
        "confirm-message-received",
        "push-messages",
        "push-object",
    )
)
SENDER_PATHS = frozenset({FLEET + "push-messages", FLEET + "pull-messages"})
"""Requests whose sender is checked here; Flower checks the others."""
KEY, NAMES = "flwr-public-key", "polyclinic-names"
PROTOCOL_HEADER, VERSION = "polyclinic-protocol", "polyclinic-version"
MAX_OBJECT_BYTES = 64 << 20
"""Of one uploaded object: Flower sends arrays in pieces of 5 MiB."""
MAX_REQUEST_BYTES = 1 << 20
"""Of any other request."""
MIN_REPLY_BYTES, REPLY_FACTOR = 256 << 20, 16
"""A reply may have MIN_REPLY_BYTES plus REPLY_FACTOR times the bytes of the message it answers."""
HOLD_SECONDS = 10.0
"""How long a request for work is held open while there is none, so that no site needs to ask often."""


class Gateway:
    """ASGI middleware around Flower's application.

    Args:
        app: Flower's ASGI application.
        keys: The site of each registered public key.
        nodes: Flower's node of each site.
        protocol: The number of the protocol that every site must speak (`polyclinic.core.PROTOCOL`).
        senders: Reads from a path and a body the nodes in whose name a request is made.
        refused: Is called with the site ("" for an unknown caller) and the reason of every refused request.
        federation: The federation's name; "" accepts any.
        former: Public keys that were revoked, each with a description of its owner.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Mapping[bytes, SiteId],
        nodes: Mapping[SiteId, int],
        protocol: int,
        senders: Callable[[str, bytes], set[int]],
        refused: Callable[[SiteId, str], None],
        federation: str = "",
        former: Mapping[bytes, str] | None = None,
    ) -> None:
        self.former = former or {}
        self.app, self.keys, self.nodes, self.federation = app, keys, nodes, federation
        self.protocol, self.senders, self.refused = protocol, senders, refused
        self.last_seen: dict[SiteId, float] = {}
        self.versions: dict[SiteId, str] = {}
        """The version of polyclinic that each site says it runs."""
        self.bytes_left: dict[SiteId, int] = {}
        """How much each site may still send in reply."""
        self.arrived: Callable[[], None] = lambda: None
        """Called when a piece of a reply has arrived."""
        self.hold = HOLD_SECONDS
        self._work: defaultdict[SiteId, asyncio.Event] = defaultdict(asyncio.Event)
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify_site(self, site: SiteId, size: int = 0) -> None:
        """Release the site's held request: there is a message of `size` bytes for it. May be called from any thread."""
        self.bytes_left[site] = MIN_REPLY_BYTES + REPLY_FACTOR * size
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._work[site].set)

    def release_waiters(self) -> None:
        """Release all held requests and hold none from now on. May be called from any thread."""
        self.hold = 0.0
        for site in self.nodes:
            self.notify_site(site)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle_request(scope, receive, send)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, path = Request(scope, receive), scope["path"]
        site, body = self.keys.get(_read_key(request), ""), b""
        refusal = self._find_caller_problem(request, site)
        if refusal is None:
            read = await _read_body(request, MAX_OBJECT_BYTES if path == FLEET + "push-object" else MAX_REQUEST_BYTES)
            body, refusal = read or b"", self._find_body_problem(path, read, site)
        if refusal is not None:
            status, note, sentence = refusal
            self.refused(site, note)
            await JSONResponse({"polyclinic": sentence}, status)(scope, receive, send)
            return
        if path == FLEET + "pull-messages":
            await self._wait_for_work(site)
        await self.app(scope, _replay_body(body, receive), partial(self._watch_response, send, site, request))
        if path == FLEET + "push-object":
            self.arrived()

    async def _watch_response(self, send: Send, site: SiteId, request: Request, event: Message) -> None:
        """A response without an error means that Flower has verified the site's signature."""
        if event["type"] == "http.response.start" and event["status"] < 400:
            self.last_seen[site], self.versions[site] = time.time(), _read_version(request)
        await send(event)

    def _find_caller_problem(self, request: Request, site: SiteId) -> Refusal | None:
        """Why this caller may not make this request, judged by its method, path and headers."""
        method, path = request.method, request.scope["path"]
        if method != "POST" or path not in OPEN_PATHS:
            return 404, f"{method[:10]} {path[:60]!r} is not open to sites", "there is nothing here"
        if not site:
            note = self.former.get(_read_key(request), "a key that is not registered")
            return 403, note, "its key is not registered, or was revoked; ask for a new kit"
        if (protocol := request.headers.get(PROTOCOL_HEADER, "")[:20]) != str(self.protocol):
            theirs, version = f"protocol {protocol or 'unknown'}", _read_version(request)
            return (
                403,
                f"it speaks {theirs!r} (polyclinic {version!r}), not {self.protocol}",
                f"the server runs polyclinic {__version__} with protocol {self.protocol}, this site "
                f"{version or 'another program'} with {theirs}; install the server's version",
            )
        return self._find_name_problem(request.headers.get(NAMES, "")[:2000], site)

    def _find_name_problem(self, names: str, site: SiteId) -> Refusal | None:
        """Why the names in site.yaml are not those of the key: files of two kits are mixed, or a name was changed."""
        federation, _, named = map(unquote, names.partition("/"))
        for what, theirs, ours in (("site", named, site), ("federation", federation, self.federation)):
            if names and ours and theirs != ours:
                return (
                    403,
                    f"it calls itself the {what} {theirs[:100]!r}",
                    f"its key is that of the {what} {ours}, but `{what}` in site.yaml is {theirs[:100]!r}; use the "
                    "files of one kit",
                )
        return None

    def _find_body_problem(self, path: str, body: bytes | None, site: SiteId) -> Refusal | None:
        """Why this body is refused: it is too large (None), or is sent in the name of another site."""
        if path == FLEET + "push-object":
            self.bytes_left[site] = self.bytes_left.get(site, 0) - len(body or b"")
        if body is None or self.bytes_left.get(site, 0) < 0:
            return 413, "a request that is too large", "a request is larger than the server takes"
        if path in SENDER_PATHS and not self._is_sender(path, body, site):
            return 403, "a request in the name of another site", "a request in the name of another site"
        return None

    def _is_sender(self, path: str, body: bytes, site: SiteId) -> bool:
        try:
            return self.senders(path, body) <= {self.nodes[site]}
        except Exception:  # a parser may raise anything on untrusted bytes
            return False

    async def _wait_for_work(self, site: SiteId) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._work[site].wait(), self.hold)
            self._work[site].clear()


def _read_version(request: Request) -> str:
    return request.headers.get(VERSION, "")[:40]


def _read_key(request: Request) -> bytes:
    try:
        return b64decode(request.headers.get(KEY, ""), validate=True)
    except ValueError:
        return b""


async def _read_body(request: Request, limit: int) -> bytes | None:
    """The whole body; None as soon as it exceeds `limit` bytes."""
    body = bytearray()
    with suppress(ClientDisconnect):
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                return None
        return bytes(body)
    return b""


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that delivers the body again, which has been read already."""
    held: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return held.pop() if held else await receive()

    return replay
